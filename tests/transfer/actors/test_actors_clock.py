"""Virtual time: exact, instant, the same every run, and never a silent hang."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from transfer.actors.clock import VirtualClockError, VirtualClockLoop, run_virtual


def test_a_week_passes_in_no_time_and_exactly() -> None:
    async def week() -> list[float]:
        loop = asyncio.get_running_loop()
        marks = []
        for _ in range(7):
            await asyncio.sleep(86_400)
            marks.append(loop.time())
        return marks

    began = time.monotonic()
    assert run_virtual(week(), limit_s=8 * 86_400) == [86_400.0 * day for day in range(1, 8)]
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("start", [0.0, 1e6, 1.7e9, 1e15])
def test_any_start_time_works(start: float) -> None:
    async def sleep() -> float:
        await asyncio.sleep(1.0)
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep(), start=start) == start + 1.0


def test_order_is_by_time_and_repeats() -> None:
    async def race() -> list[str]:
        seen: list[str] = []

        async def runner(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append(name)
            await asyncio.sleep(delay_s)
            seen.append(name.upper())

        async with asyncio.TaskGroup() as group:
            for name, delay_s in (("c", 3.0), ("a", 1.0), ("b", 2.5)):
                group.create_task(runner(name, delay_s))
        return seen

    assert run_virtual(race()) == ["a", "A", "b", "c", "B", "C"]
    assert run_virtual(race()) == run_virtual(race())


def test_timeouts_fire_in_virtual_time() -> None:
    async def wait() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == 30.0


def test_a_deadlock_is_named() -> None:
    async def stuck() -> None:
        waiter = asyncio.create_task(asyncio.Event().wait(), name="the-waiter")
        await waiter

    with pytest.raises(VirtualClockError, match=r"deadlock at 0 s.*the-waiter"):
        run_virtual(stuck())


def test_the_limit_is_a_limit() -> None:
    async def heartbeat() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    with pytest.raises(VirtualClockError, match="limit of 15 s"):
        run_virtual(heartbeat(), start=5.0, limit_s=10.0)


def test_spinning_in_place_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.actors.clock._MAX_IDLE_TURNS", 1000)

    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(VirtualClockError, match="stands still"):
        run_virtual(spin())


def test_the_real_world_is_refused() -> None:
    async def reach_out() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        with pytest.raises(VirtualClockError, match="run_in_executor is refused in virtual time"):
            await asyncio.to_thread(time.monotonic)
        with pytest.raises(VirtualClockError, match="create_connection"):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(VirtualClockError, match="create_server"):
            await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        with pytest.raises(VirtualClockError, match="subprocess_exec"):
            await asyncio.create_subprocess_exec("true")
        here, there = socket.socketpair()
        with here, there, pytest.raises(VirtualClockError, match="add_reader"):
            loop.add_reader(here, print)

    run_virtual(reach_out())


def test_leftover_tasks_are_cancelled_and_errors_come_out() -> None:
    cancelled = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fail() -> None:
        task = asyncio.create_task(background())
        await asyncio.sleep(1.0)
        assert not task.done()
        raise LookupError("out")

    with pytest.raises(LookupError, match="out"):
        run_virtual(fail())
    assert cancelled == [True]
