"""A pool fetch beside compute: when a sequence joins, what an abandoned step leaves, what a failed fetch costs."""

from __future__ import annotations

import pytest
from batching_harness import Harness, running
from requests_kit import PROMPT, config, none_of, only, prefill, receive, spec

from nodes.core.events import Arriving, Computed, Drop, Emit, Fetched, Gone, StepDone, StepUndone, Tick
from nodes.core.sequence import State
from transfer.errors import IllegalTransition

OTHER = [6, 5, 4, 3, 2, 1, 0, 6]


def fetching(h: Harness, name: str = "p", num_blocks: int = 2, **changes: object):
    h.add(prefill(name, fetch_blocks=num_blocks, **changes))
    return h.record(name)


def test_the_rest_is_computed_while_leading_blocks_arrive() -> None:
    h = Harness()
    one = fetching(h)
    assert h.step() is None, "not before it is known how many blocks come"
    h.arriving("p", 2)
    plan = h.begin_step()
    assert plan is not None
    assert (plan.arriving, plan.started) == (["p"], ["p"])
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(8, 1)]
    assert h.core.cached_hashes() == (), "nothing is shared before it has arrived"
    computed = only(h.end_step(), Computed)  # proves that all has arrived
    assert (computed.fetched_tokens, computed.computed_tokens) == (8, 1)
    assert len(h.core.cached_hashes()) == 2
    assert h.fetch_ended(one) == []
    assert h.core.state_of("p", 1) is State.COMPUTED


def test_only_the_first_step_waits() -> None:
    h = Harness(config(token_budget=8))
    fetching(h, tokens=[1, 2, 3, 4, 5] * 5, num_blocks=2)
    h.arriving("p", 2)
    assert [plan.arriving for plan in iter(h.step, None)] == [["p"], []]


def test_an_end_of_the_fetch_before_the_step_makes_it_an_ordinary_one() -> None:
    h = Harness()
    one = fetching(h)
    h.arriving("p", 2)
    h.fetch_ended(one)
    assert len(h.core.cached_hashes()) == 2
    plan = h.begin_step()
    assert plan is not None
    assert plan.arriving == []
    assert only(h.end_step(), Computed).fetched_tokens == 8


@pytest.mark.parametrize("promised", [0, 1, 3])
def test_nothing_begins_when_nothing_would_be_gained(promised: int) -> None:
    """0: none comes. 1: the cache holds as much. 3: nothing would be left to compute."""
    h = Harness()
    h.add(prefill("warm", [1, 2, 3, 4, 5]))
    h.run()
    fetching(h, tokens=[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1], num_blocks=3)
    h.arriving("p", promised)
    assert h.core.state_of("p", 1) is State.FETCHING


def test_decodes_do_not_wait_for_a_pool() -> None:
    h = Harness()
    running(h, "a", OTHER)
    one = fetching(h)
    h.arriving("p", 2)
    for _ in range(3):
        plan = h.step()
        assert plan is not None
        assert [chunk.request_id for chunk in plan.chunks] == ["a"]
    h.fetch_ended(one)
    plan = h.step()
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks] == ["a", "p"]


@pytest.mark.parametrize("told_first", [True, False])
def test_an_abandoned_step_undoes_its_plan_and_nothing_else(told_first: bool) -> None:
    """The failed sequence computes all; the others get the same work again, in the same order, pushes included."""
    h = Harness(config(token_budget=64, num_blocks=32))
    h.add(prefill("q", OTHER * 2))
    h.add(spec("l", OTHER))
    bad = fetching(h)
    fetching(h, "s", tokens=[5, *OTHER], num_blocks=1)
    h.arriving("p", 2)
    h.arriving("s", 1)
    first = h.begin_step()
    assert first is not None
    assert first.arriving == ["p", "s"]
    if told_first:
        h.fetch_ended(bad, 0)
        assert none_of(h.abandon_step([bad]), Computed)
        again = h.begin_step()
        assert again is not None
        assert [chunk.start for chunk in again.chunks if chunk.request_id == "p"] == [0]
    else:
        h.abandon_step([bad])
        assert h.core.state_of("p", 1) is State.FETCHING, "its blocks may be written until the fetch has ended"
        again = h.begin_step()
        assert again is not None
        assert all(chunk.request_id != "p" for chunk in again.chunks)
    assert again.arriving == ["s"]
    assert again.started == []
    for name in ("q", "l", "s"):
        assert [c for c in again.chunks if c.request_id == name] == [c for c in first.chunks if c.request_id == name]
        assert [p for p in again.pushes if p.request_id == name] == [p for p in first.pushes if p.request_id == name]
    h.end_step()
    if not told_first:
        h.fetch_ended(bad, 1)
        assert bad.fetched == 1
    h.run()
    for one in h.records.values():
        assert one.computed is not None or one.finish is not None
    assert bad.computed is not None
    assert bad.computed.fetched_tokens == (0 if told_first else 4)


def test_a_failed_fetch_falls_back_to_the_prefix_cache() -> None:
    h = Harness()
    h.add(prefill("warm", [1, 2, 3, 4, 5]))
    h.run()
    one = fetching(h)
    assert one.have == 1
    h.arriving("p", 2)
    h.begin_step()
    h.fetch_ended(one, 0)
    h.end_step()  # the harness abandons it
    computed = [e for e in (h.begin_step(), *h.end_step()) if isinstance(e, Computed)]
    assert [(e.cached_tokens, e.fetched_tokens, e.computed_tokens) for e in computed] == [(4, 0, 5)]


def test_dropped_while_it_arrives_in_a_step_returns_its_blocks_when_that_ends() -> None:
    for end in (lambda h: h.end_step(), lambda h: h.abandon_step([h.record("p")])):
        h = Harness()
        fetching(h)
        h.arriving("p", 2)
        h.begin_step()
        drop = Drop(request_id="p", generation=1, reason="abort")
        assert none_of(h.send(drop), Gone)
        assert only(end(h), Gone).num_blocks == 3
        h.assert_at_rest()
        assert h.core.cached_hashes() == ()


def test_waiting_again_after_a_late_gate_has_a_lease() -> None:
    h = Harness()
    one = fetching(h)
    h.arriving("p", 2)
    h.now = 100.0
    assert none_of(h.send(Tick()), Gone), "while it computes, the role bounds its fetch"
    h.begin_step()
    h.abandon_step([one])
    h.now = 109.0
    assert none_of(h.send(Tick()), Gone)
    h.now = 110.0
    assert "fetch from the pool did not end" in (only(h.send(Tick()), Gone).lost or "")
    h.assert_at_rest()


def test_a_step_that_ends_well_beside_a_failed_fetch_is_a_bug() -> None:
    h = Harness()
    fetching(h)
    h.arriving("p", 2)
    h.begin_step()
    h.core.handle(Fetched(request_id="p", generation=1, num_blocks=0), h.now)
    with pytest.raises(IllegalTransition, match="fetch failed cannot take arrived"):
        h.core.handle(StepDone(sampled={}, duration_s=0.1), h.now)


def test_who_generates_fetches_too_and_says_so_with_its_first_token() -> None:
    h = Harness()
    h.add(spec("l", PROMPT, fetch_blocks=2))
    h.arriving("l", 2)
    plan = h.begin_step()
    assert plan is not None
    assert plan.arriving == ["l"]
    effects = h.end_step()
    computed = only(effects, Computed)
    assert (computed.cached_tokens, computed.fetched_tokens, computed.computed_tokens) == (0, 8, 2)
    assert effects.index(computed) < effects.index(only(effects, Emit))
    assert only(effects, Emit).cached_tokens == 8
    h.fetch_ended(h.record("l"))
    h.run()
    h.assert_result("l")


def test_blocks_that_a_fetch_still_writes_are_not_taken_for_others() -> None:
    """The one that runs needs a block and is served first: all the same it is what gives way."""
    h = Harness(config(num_blocks=6))
    h.add(spec("l", PROMPT, fetch_blocks=2, priority=1))
    h.arriving("l", 2)
    h.add(receive("r", PROMPT[:9]))
    h.deliver_kv("r")
    for _ in range(4):
        h.step()
    assert [h.core.state_of(name, 1) for name in ("r", "l")] == [State.WAITING, State.PREFILLING]
    h.land(h.record("l"))
    h.run()
    for name in ("l", "r"):
        h.assert_result(name)


def test_who_was_preempted_does_not_wait_for_a_second_fetch() -> None:
    h = Harness(config(num_blocks=6, prefix_cache=False))
    h.add(spec("a", PROMPT[:9]))
    h.step()
    h.add(spec("l", PROMPT, fetch_blocks=2, priority=1))
    h.fetch_ended(h.record("l"), 2)
    h.run()
    assert h.num_preempted == 1
    for name in ("a", "l"):
        h.assert_result(name)


def test_order_of_events_is_checked() -> None:
    h = Harness()
    with pytest.raises(IllegalTransition, match="no step running cannot take StepUndone"):
        h.send(StepUndone(failed=()))
    h.add(prefill("p"))
    with pytest.raises(IllegalTransition, match="cannot take fetched"):
        h.send(Fetched(request_id="p", generation=1, num_blocks=1))
    assert h.send(Arriving(request_id="gone", generation=1, num_blocks=1)) == []
