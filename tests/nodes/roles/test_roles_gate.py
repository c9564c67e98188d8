"""The gate between a fetch and a step: on the event loop, and from an engine's thread."""

from __future__ import annotations

import asyncio
import time

import pytest
from roles_harness import virtual

from nodes.roles import gate as module
from nodes.roles.gate import FetchGate, StepGate
from transfer.errors import StepAbandoned


@virtual
async def test_a_layer_is_waited_for_and_no_other() -> None:
    gate, loop = FetchGate("r", 3, 10.0), asyncio.get_running_loop()
    for layer in range(3):
        loop.call_later(1.0 + layer, gate.landed, layer + 1)
    for layer in range(3):
        await gate.ready(layer)
        assert loop.time() == pytest.approx(1.0 + layer)
    assert gate.complete
    gate.fail("too late to matter")
    await gate.ready(2)
    assert not gate.failed


@virtual
async def test_a_failure_wakes_who_waits_and_who_comes_later_but_not_for_what_is_there() -> None:
    gate = FetchGate("r", 3, 10.0)
    gate.landed(1)
    asyncio.get_running_loop().call_later(1.0, gate.fail, "the pool was lost")
    await gate.ready(0)
    for _ in range(2):
        with pytest.raises(StepAbandoned, match="layer 1 of the blocks fetched for request r will not come: the pool"):
            await gate.ready(1)
    await gate.ready(0)
    gate.landed(3)
    assert gate.failed
    assert not gate.complete


@virtual
async def test_let_go_passes_and_late_abandons() -> None:
    loop = asyncio.get_running_loop()
    gone, late = FetchGate("gone", 2, 10.0), FetchGate("late", 2, 10.0)
    both = StepGate([gone, late])
    loop.call_later(1.0, gone.let_go)
    with pytest.raises(StepAbandoned, match="not all here after 11 s"):
        await both.ready(0)
    assert loop.time() == pytest.approx(11.0)
    assert both.failed == ("late",)


@virtual
async def test_an_emulated_link_brings_layers_one_after_another() -> None:
    await asyncio.sleep(5.0)
    first, second = FetchGate("a", 1, 10.0), FetchGate("b", 1, 10.0)
    first.carried_by(8.0)
    assert [StepGate([first, second]).due(layer, 4) for layer in range(4)] == [7.0, 9.0, 11.0, 13.0]
    assert second.due(3, 4) == 5.0, "where links are real it is long due"


async def test_a_thread_waits_layer_by_layer() -> None:
    gate = FetchGate("r", 2, 10.0)
    passed: list[int] = []

    def engine() -> None:
        for layer in range(2):
            gate.wait(layer)
            passed.append(layer)

    step = asyncio.create_task(asyncio.to_thread(engine))
    for layer in range(2):
        await asyncio.sleep(0.02)
        assert passed == list(range(layer))
        gate.landed(layer + 1)
    await asyncio.wait_for(step, 5.0)
    assert passed == [0, 1]


@pytest.mark.parametrize("failed", [True, False])
async def test_a_thread_is_woken_by_the_end(failed: bool) -> None:
    gate = FetchGate("r", 2, 10.0)
    step = asyncio.create_task(asyncio.to_thread(gate.wait, 1))
    await asyncio.sleep(0.02)
    if not failed:
        gate.let_go()
        await asyncio.wait_for(step, 5.0)
        return
    gate.fail("corrupt")
    with pytest.raises(StepAbandoned, match="corrupt"):
        await asyncio.wait_for(step, 5.0)


async def test_a_thread_does_not_wait_beyond_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.02)
    gate, started = FetchGate("r", 2, 0.05), time.monotonic()
    with pytest.raises(StepAbandoned, match="not all here"):
        await asyncio.wait_for(asyncio.to_thread(gate.wait, 0), 5.0)
    assert 0.05 <= time.monotonic() - started < 2.0
    assert gate.failed
