"""Which blocks are pushed when, and what an emulated link makes of it."""

from __future__ import annotations

import pytest

from nodes.engines.emulated import EmulatedEngine, emulated_identity
from nodes.hardware import preset
from nodes.roles.context import Link
from nodes.roles.stream import PushStream
from nodes.shapes import latency_profile, shape
from transfer.kv.port import KvTrailer, SendStats

MODEL = shape("llama-3.1-8b")


class Recorder:
    """A KvSender that keeps what it is told to push."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, int, int]] = []

    def push(self, layer: int, first_block: int, count: int) -> None:
        self.pushed.append((layer, first_block, count))

    async def commit(self, trailer: KvTrailer, timeout_s: float) -> SendStats:
        return SendStats(num_bytes=0, transfer_s=0.0, exposed_s=0.0)

    def abort(self, reason: str) -> None:
        pass

    def covered(self) -> list[tuple[int, int]]:
        return [(layer, block) for layer, first, count in self.pushed for block in range(first, first + count)]


@pytest.fixture
def engine() -> EmulatedEngine:
    return EmulatedEngine(latency_profile(preset("H800"), MODEL), emulated_identity("m"), 8)


@pytest.mark.parametrize("attach_at", range(5))
def test_every_block_is_pushed_once_in_every_layer_whenever_the_grant_comes(
    engine: EmulatedEngine, attach_at: int
) -> None:
    """Blocks 2..9: 2 and 3 were cached, then three steps make the rest."""
    sender, stream = Recorder(), PushStream(2, 10, 2, 16, Link(engine))
    stream.finalise(4, 0.0, 0.0)
    for step, upto in enumerate((5, 8, 12)):
        if attach_at == step:
            stream.attach(sender, float(step))
        claim = stream.claim(upto)
        granted = attach_at <= step or (attach_at == 3 and step == 2)
        assert (claim is not None) == granted
        for layer in range(2):
            if claim is not None:
                claim[0].push(layer, claim[1], claim[2])
        if attach_at == 3 and step == 1:
            stream.attach(sender, 1.5)  # the grant comes while a step runs
        stream.finalise(upto, float(step), step + 1.0)
    if attach_at == 4:
        stream.attach(sender, 3.0)
    assert sorted(sender.covered()) == [(layer, block) for layer in range(2) for block in range(2, 10)]
    assert stream.claim(12) is None


def test_a_step_sends_what_is_fetched_beside_it_and_an_abandoned_one_leaves_it_to_the_next(
    engine: EmulatedEngine,
) -> None:
    """Blocks 0..3 arrive while a step makes 4..7: all of them travel with the step, and the link is charged once."""
    sender, link = Recorder(), Link(engine)
    stream = PushStream(0, 8, 2, 16, link)
    stream.attach(sender, 0.0)
    assert stream.claim(8) == (sender, 0, 8)
    stream.finalise(4, 0.0, 1.0)  # the fetch has ended
    assert (sender.pushed, stream.sent_at) == ([], 0.0)
    stream.unclaim(0)
    assert stream.claim(6) == (sender, 0, 6)
    stream.finalise(6, 1.0, 2.0)
    assert stream.claim(8) == (sender, 6, 2)
    stream.finalise(8, 2.0, 2.0)
    assert stream.sent_at == pytest.approx(2.0 + engine.handoff_s(6 * 16) / MODEL.num_layers + engine.handoff_s(2 * 16))


def test_what_an_engine_saves_leaves_at_once_or_with_the_grant(engine: EmulatedEngine) -> None:
    """Blocks 2..5 are wanted, in whatever order their layers are saved."""
    sender, stream = Recorder(), PushStream(2, 6, 2, 16, Link(engine))
    stream.saved(1, 0, 2)
    stream.saved(1, 1, 3)
    assert sender.pushed == []
    stream.attach(sender, 0.0)
    assert sender.pushed == [(1, 2, 2)]
    stream.saved(0, 3, 9)
    assert sender.pushed[1:] == [(0, 3, 3)]
    stream.finalise(6, 1.0, 1.0)
    assert set(sender.covered()) == {(layer, block) for layer in range(2) for block in range(2, 6)}


def test_a_link_is_shared_and_hides_under_compute_all_but_the_last_layer(engine: EmulatedEngine) -> None:
    link, tokens = Link(engine), 1_000_000
    needed = engine.handoff_s(tokens)
    assert link.send(tokens, 0.0, 0.5 * needed) == pytest.approx(needed)
    assert link.send(tokens, 0.0, 0.5 * needed) == pytest.approx(2 * needed), "one after the other"
    late = 100 * needed
    assert link.send(tokens, late - 2 * needed, late) == pytest.approx(late + needed / MODEL.num_layers)


def test_a_real_link_is_not_waited_for() -> None:
    engine = EmulatedEngine(latency_profile(preset("H800"), MODEL), emulated_identity("m"), 8, speed=float("inf"))
    assert Link(engine).send(1_000_000, 0.0, 7.0) == 7.0
