"""Who gets blocks and who gives them up: admission, waiting, preemption, pins, load."""

from __future__ import annotations

import msgspec
import pytest
from batching_harness import Harness, running
from requests_kit import PROMPT, ROOT, config, none_of, only, params, prefill, receive, spec

from nodes.core.events import (
    Admitted,
    Drop,
    Fetched,
    Grow,
    Handed,
    KvReady,
    NotAdmitted,
    Pause,
    Pin,
    Pinned,
    Resume,
    Tick,
    Unpin,
    Unpinned,
)
from nodes.core.sequence import MOVES, State
from transfer.errors import IllegalTransition

# --- admission ---


def test_what_can_never_fit_is_refused_for_good() -> None:
    h = Harness(config(num_blocks=4, max_context=48))
    long = only(h.add(spec("a", [1] * 16)), NotAdmitted)
    assert (long.retry, long.free_blocks) == (False, 4)
    assert "16 tokens leave no room to generate: this instance holds at most 16 tokens of one request" in long.reason
    assert not only(h.add(prefill("b", [1] * 18)), NotAdmitted).retry
    assert not only(h.add(spec("c", [])), NotAdmitted).retry
    assert not only(h.add(spec("d", PROMPT, num_output=8)), NotAdmitted).retry
    assert not only(h.add(receive("e", sampling=None)), NotAdmitted).retry
    h.assert_at_rest()


def test_a_growing_sequence_needs_the_watermark_unless_the_arena_is_empty() -> None:
    h = Harness(config(num_blocks=8, watermark=0.25))  # two blocks to grow
    assert none_of(h.add(spec("alone", [1] * 28)), NotAdmitted)  # seven of eight blocks: nobody else is here
    h.send(Drop(request_id="alone", generation=1, reason="test"))
    h.add(receive("r", [2] * 12))
    refused = only(h.add(receive("s", [3] * 13)), NotAdmitted)
    assert (refused.retry, refused.free_blocks) == (True, 5)
    assert refused.reason == "needs 6 free KV blocks (2 of them to grow), 5 are free"
    assert none_of(h.add(prefill("p", [3] * 13)), NotAdmitted)  # does not grow


def test_prefill_work_waits_in_order_and_is_admitted_when_room_comes() -> None:
    h = Harness(config(num_blocks=4, max_waiting=2))
    h.add(prefill("p", [1] * 13))
    assert h.add(prefill("q", [2] * 13)) == []
    assert h.add(prefill("small", [3] * 3)) == []  # there is room for it, but the head is not overtaken
    full = only(h.add(prefill("x")), NotAdmitted)
    assert (full.retry, "max_waiting" in full.reason) == (True, True)
    assert h.core.load(0.0).num_waiting == 2
    assert h.core.load(0.0).queued_prefill_tokens == 12 + 12 + 2
    h.run()
    admitted = [e.request_id for e in h.send(Handed(request_id="p", generation=1)) if isinstance(e, Admitted)]
    assert admitted == ["q", "small"]
    h.run()
    h.send(Handed(request_id="q", generation=1))
    h.run()
    assert h.record("small").computed is not None


def test_max_running_bounds_what_is_admitted() -> None:
    h = Harness(config(max_running=1))
    h.add(receive())
    refused = only(h.add(spec("a", PROMPT)), NotAdmitted)
    assert (refused.retry, "max_running" in refused.reason) == (True, True)


def test_nothing_overtakes_what_was_preempted() -> None:
    h = Harness(config(num_blocks=5, max_context=20))
    h.add(spec("a", [1] * 7, sampling=params(12)))
    h.add(spec("b", [2] * 7, sampling=params(12)))
    while not h.num_preempted:
        h.step()
    refused = only(h.add(spec("c", [3])), NotAdmitted)
    assert (refused.retry, "wait here for free KV blocks" in refused.reason) == (True, True)
    h.run()
    h.assert_result("a")
    h.assert_result("b")


# --- preemption ---


def test_the_latest_of_the_lowest_priority_is_preempted_and_continues_its_output() -> None:
    h = Harness(config(num_blocks=8, max_context=32))
    for name, priority in (("urgent", 0), ("old", 1), ("new", 1)):
        h.add(spec(name, [priority + 1] * 7 + [len(name)], priority=priority, sampling=params(14)))
    preempted = []
    while (plan := h.step()) is not None:
        preempted += plan.preempted
    assert preempted[0] == "new"
    assert "urgent" not in preempted
    for name in ("urgent", "old", "new"):
        h.assert_result(name)
    assert h.core.load(0.0).num_preemptions == len(preempted)
    h.assert_at_rest()


def test_a_preempted_sequence_takes_its_own_blocks_from_the_cache_again() -> None:
    h = Harness(config(num_blocks=6, max_context=24))
    h.add(spec("a", [1] * 8, sampling=params(12)))
    h.add(spec("b", [2] * 8, sampling=params(12)))
    starts = [chunk.start for plan in iter(h.step, None) for chunk in plan.chunks if len(chunk.tokens) > 1]
    assert h.num_preempted
    assert starts[:2] == [0, 0]
    assert all(start > 0 for start in starts[2:])


def test_a_younger_prompt_half_computed_gives_way_to_an_older_decode() -> None:
    h = Harness(config(num_blocks=6, max_context=24, token_budget=8))
    h.add(spec("old", [1] * 6, sampling=params(4)))
    h.step()
    h.add(spec("young", [2] * 16))
    h.step()
    assert h.core.state_of("young", 1) is State.PREFILLING
    assert h.core.load(0.0).free_blocks == 0
    h.step()
    assert (h.core.state_of("old", 1), h.core.state_of("young", 1)) == (State.RUNNING, State.WAITING)
    h.run()
    h.assert_result("old")
    h.assert_result("young")


def test_a_repeated_add_tells_what_a_preempted_sequence_holds() -> None:
    h = Harness(config(num_blocks=5, max_context=20))
    h.add(spec("a", [1] * 7, sampling=params(12)))
    h.add(spec("b", [2] * 7, sampling=params(12)))
    while not h.core.load(0.0).num_preemptions:
        h.step()
    again = only(h.add(h.record("b").spec), Admitted)
    assert (again.blocks, again.have_blocks) == ([], 0)


def test_prefill_work_and_kv_in_flight_are_never_preempted() -> None:
    h = Harness(config(num_blocks=8, max_context=32))
    h.add(spec("a", [1, 1, 2], sampling=params(20)))
    h.add(prefill("p", [2] * 9))
    h.add(receive("r", [3] * 9))
    h.add(spec("m", [4, 4], sampling=params(20)))
    h.step()
    h.send(Pause(request_id="m", generation=1))
    h.run()  # needs six blocks, has two: gives up its own and waits
    assert h.core.load(0.0).num_preemptions == 1
    assert h.core.state_of("a", 1) is State.WAITING
    held = {holding.request_id: holding.num_blocks for holding in h.core.holdings()}
    assert held == {"a": 0, "p": 2, "r": 3, "m": 1}
    for event in (Handed(request_id="p", generation=1), Drop(request_id="r", generation=1, reason="test")):
        h.send(event)
    h.run()
    h.assert_result("a")


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 7])
def test_whatever_fits_alone_finishes(num_blocks: int) -> None:
    """Every request may grow until it fills the arena; each step gives the first of them a token or its blocks."""
    limit = num_blocks * 4
    h = Harness(config(num_blocks=num_blocks, max_context=1000, max_running=6))
    waiting = [spec(f"s{i}", [1 + i % 5] * (1 + i % (limit - 1)), sampling=params(1000)) for i in range(12)]
    while waiting:
        refused = [one for one in waiting if not none_of(h.add(one), NotAdmitted)]
        for one in waiting:
            h.record(one.request_id).refused = 0
        assert h.step() is not None or not refused
        waiting = refused
    h.run(5000)
    for i in range(12):
        h.assert_result(f"s{i}")
        assert len(h.record(f"s{i}").tokens) == limit
    h.assert_at_rest()


# --- pins ---


def test_a_pin_keeps_cached_blocks_until_unpinned_or_its_lease_is_over() -> None:
    h = Harness(config(num_blocks=4))
    h.add(spec("a", PROMPT, sampling=params(1)))
    h.run()
    hashes = h.core.cached_hashes()
    pinned = only(h.send(Pin(name="store-1", hashes=(*hashes, b"x" * 32), lease_s=5.0)), Pinned)
    assert len(pinned.blocks) == len(hashes) == 2
    refused = only(h.add(receive("r", [6] * 10)), NotAdmitted)
    assert refused.free_blocks == 2
    h.send(Unpin(name="store-1"))
    h.send(Unpin(name="store-1"))
    assert h.core.load(0.0).free_blocks == 4
    h.send(Pin(name="store-2", hashes=hashes, lease_s=5.0))
    h.now = 5.0
    assert only(h.send(Tick()), Unpinned).name == "store-2"
    assert h.core.load(0.0).free_blocks == 4


# --- the table and the report ---


def test_an_illegal_move_raises_with_the_history() -> None:
    h = Harness()
    running(h)
    with pytest.raises(IllegalTransition, match=r"request a in state running cannot take handed.*add -> prefill"):
        h.send(Handed(request_id="a", generation=1))
    with pytest.raises(IllegalTransition, match="cannot take kv_ready"):
        h.send(KvReady(request_id="a", generation=1))
    with pytest.raises(IllegalTransition, match="cannot take fetched"):
        h.send(Fetched(request_id="a", generation=1, num_blocks=1))
    with pytest.raises(IllegalTransition, match="cannot take resume"):
        h.send(Resume(request_id="a", generation=1))
    with pytest.raises(IllegalTransition, match="cannot take grow"):
        h.send(Grow(request_id="a", generation=1, num_blocks=9))
    h.check()
    h.run()
    h.assert_result("a")


def test_every_state_is_in_the_table_and_leads_to_gone() -> None:
    assert set(MOVES) == set(State)
    for state in State:
        seen = [state]
        for one in seen:
            seen += [to for to in MOVES[one].values() if to not in seen]
        assert State.GONE in seen


def test_the_load_counts_what_runs_waits_and_is_cached() -> None:
    h = Harness()
    h.add(spec("done", [5] * 9, sampling=params(1)))
    h.run()
    h.add(receive())
    running(h, "a")
    h.add(prefill("p", [6] * 9, fetch_blocks=1))
    load = h.core.load(0.0)
    assert (load.num_running, load.num_waiting, load.queued_prefill_tokens) == (1, 2, 8)
    assert (load.num_blocks, load.free_blocks, load.cached_blocks) == (16, 16 - 3 - 3 - 2, 2)
    assert h.core.running_ids == ["a"]
    assert h.core.blocks_of("a", 1) == h.record("a").blocks
    assert h.core.blocks_of("a", 2) is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=type(load)) == load
    assert h.record("a").spec.root == ROOT
