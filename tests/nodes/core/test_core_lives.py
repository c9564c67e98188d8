"""How requests change hands and end: generations, a step in flight, leases, pause and migration."""

from __future__ import annotations

import pytest
from batching_harness import Harness, running
from requests_kit import PROMPT, config, none_of, only, params, prefill, receive, reference, spec

from nodes.core.events import (
    Admitted,
    CannotPause,
    Drop,
    Emit,
    Gone,
    Grow,
    Grown,
    Handed,
    HandsChanged,
    KvReady,
    NotAdmitted,
    Pause,
    Paused,
    Renew,
    Resume,
    StepDone,
    Tick,
)
from nodes.core.sequence import State
from transfer.errors import EngineFailed, IllegalTransition
from transfer.terms import FinishReason

# --- generations and idempotency ---


def test_the_same_add_is_answered_the_same_and_an_older_one_is_refused() -> None:
    h = Harness()
    first = only(h.add(spec("a", PROMPT, generation=5)), Admitted)
    again = h.add(spec("a", PROMPT, generation=5))
    assert only(again, Admitted) == first
    assert len(again) == 1
    refused = only(h.add(spec("a", PROMPT, generation=4)), NotAdmitted)
    assert (refused.retry, refused.generation) == (False, 4)
    h.run()
    h.assert_result("a", 5)


def test_a_repeated_add_of_waiting_work_does_not_queue_twice() -> None:
    h = Harness(config(num_blocks=4))
    h.add(prefill("p", [1] * 13))
    h.add(prefill("q", [2] * 13))
    assert h.add(prefill("q", [2] * 13)) == []
    assert h.core.load(0.0).num_waiting == 1


def test_a_newer_generation_takes_the_place_of_the_older() -> None:
    h = Harness()
    h.add(receive(generation=1))
    effects = h.add(receive(generation=2))
    assert only(effects, Gone).generation == 1
    assert only(effects, Admitted).generation == 2
    assert h.send(KvReady(request_id="r", generation=1)) == []
    h.deliver_kv("r", 2)
    h.run()
    h.assert_result("r", 2)


def test_drop_and_handed_are_answered_also_when_nothing_is_here() -> None:
    h = Harness()
    h.add(spec("a", PROMPT, generation=3))
    h.records.update({(name, gen): h.record("a", 3) for name, gen in (("ghost", 1), ("a", 2))})
    for event in (
        Drop(request_id="ghost", generation=1, reason="test"),
        Handed(request_id="ghost", generation=1),
        Drop(request_id="a", generation=2, reason="older than what is here"),
    ):
        gone = only(h.send(event), Gone)
        assert (gone.request_id, gone.generation, gone.num_blocks) == (event.request_id, event.generation, 0)
    assert h.core.state_of("a", 3) is State.PREFILLING


def test_a_drop_of_a_later_generation_takes_what_is_here() -> None:
    h = Harness()
    h.add(receive(generation=3))
    h.records["r", 7] = h.record("r", 3)
    gone = only(h.send(Drop(request_id="r", generation=7, reason="test")), Gone)
    assert (gone.generation, gone.num_blocks) == (7, 3)
    assert h.core.idle


# --- a step in flight ---


def test_blocks_of_a_dropped_sequence_are_not_reused_before_its_step_is_done() -> None:
    h = Harness(config(num_blocks=4))
    h.add(spec("a", PROMPT))
    h.begin_step()
    assert h.send(Drop(request_id="a", generation=1, reason="test")) == []
    assert h.send(Drop(request_id="a", generation=1, reason="again")) == []
    assert only(h.add(receive("r", [6] * 9)), NotAdmitted).free_blocks == 1
    assert not h.core.idle
    assert h.core.holdings()[0].num_blocks == 3
    effects = h.end_step()
    assert only(effects, Gone).num_blocks == 3
    assert none_of(effects, Emit)
    assert none_of(h.add(receive("s", [6] * 9)), NotAdmitted)


def test_a_newer_generation_lives_beside_the_older_one_still_in_its_step() -> None:
    h = Harness()
    h.add(spec("a", PROMPT))
    h.begin_step()
    effects = h.add(spec("a", PROMPT, generation=2))
    assert none_of(effects, Gone)
    assert not set(only(effects, Admitted).blocks) & set(h.record("a", 1).blocks)
    assert only(h.end_step(), Gone).generation == 1
    h.run()
    h.assert_result("a", 2)


def test_gone_waits_for_every_older_generation_and_answers_each_asker() -> None:
    h = Harness()
    h.add(spec("a", PROMPT))
    h.begin_step()
    h.add(spec("a", PROMPT, generation=2))
    assert h.send(Drop(request_id="a", generation=2, reason="test")) == []
    effects = h.end_step()
    assert [(e.generation, e.num_blocks) for e in effects if isinstance(e, Gone)] == [(1, 3), (2, 6)]
    h.assert_at_rest()


def test_a_lease_that_ends_beside_the_step_of_an_older_generation_is_told_after_it() -> None:
    h = Harness()
    h.add(spec("a", PROMPT, generation=1))
    h.begin_step()
    h.add(receive("a", PROMPT, generation=2))
    h.now += 60.0
    assert h.send(Tick()) == []
    told = [effect for effect in h.end_step() if isinstance(effect, Gone)]
    assert [(one.generation, one.lost is not None) for one in told] == [(1, False), (2, True)]


def test_one_step_at_a_time() -> None:
    h = Harness()
    with pytest.raises(IllegalTransition, match="no step running cannot take StepDone"):
        h.send(StepDone(sampled={}, duration_s=0.0))
    h.add(spec("a", PROMPT))
    h.begin_step()
    with pytest.raises(IllegalTransition, match="step running cannot take next_step"):
        h.core.next_step(0.0)
    with pytest.raises(EngineFailed, match="drew no token for request a"):
        h.core.handle(StepDone(sampled={}, duration_s=0.0), 0.0)


def test_new_blocks_are_announced_before_anything_else() -> None:
    h = Harness()
    effects = h.add(spec("a", PROMPT))
    assert isinstance(effects[0], HandsChanged)
    assert sorted(effects[0].blocks) == sorted(h.record("a").blocks)


# --- leases ---


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (receive("x"), "no KV arrived within 10 s"),
        (prefill("x", fetch_blocks=1), "fetch from the pool did not end"),
        (prefill("x", [5]), "did not acknowledge"),
    ],
)
def test_a_lease_without_progress_ends(one, reason: str) -> None:
    h = Harness()
    h.add(one)
    h.now = 9.0
    h.send(Renew(request_id="x", generation=1))
    h.now = 18.9
    assert h.send(Tick()) == []
    h.now = 19.0
    gone = only(h.send(Tick()), Gone)
    assert gone.lost is not None
    assert gone.lost.startswith("lease over: ")
    assert reason in gone.lost
    h.assert_at_rest()


def test_work_that_computes_or_runs_has_no_lease() -> None:
    h = Harness()
    h.add(receive())
    h.deliver_kv("r")
    h.add(prefill())
    h.now = 1e6
    assert h.send(Tick()) == []
    h.step()
    assert h.send(Tick()) == []  # computed just now: its lease starts here
    h.now += 10.0
    assert only(h.send(Tick()), Gone).request_id == "p"


# --- pause, resume, migration ---


def test_pause_between_steps_is_answered_at_once_and_resume_continues() -> None:
    h = Harness()
    running(h)
    paused = only(h.send(Pause(request_id="a", generation=1)), Paused)
    assert (paused.num_output, len(paused.blocks)) == (1, 3)
    assert only(h.send(Pause(request_id="a", generation=1)), Paused) == paused
    assert h.step() is None
    h.record("a").paused = False
    h.send(Resume(request_id="a", generation=1))
    h.run()
    h.assert_result("a")


def test_pause_in_a_step_waits_for_its_end() -> None:
    h = Harness()
    running(h)
    h.begin_step()
    assert h.send(Pause(request_id="a", generation=1)) == []
    effects = h.end_step()
    assert [type(effect) for effect in effects[:2]] == [Emit, Paused]
    assert only(effects, Paused).num_output == 2
    gone = only(h.send(Handed(request_id="a", generation=1)), Gone)
    assert (gone.num_blocks, gone.lost) == (3, None)
    h.assert_at_rest()


def test_a_resume_before_the_step_ends_takes_the_pause_back() -> None:
    h = Harness()
    running(h)
    h.begin_step()
    h.send(Pause(request_id="a", generation=1))
    h.send(Resume(request_id="a", generation=1))
    assert none_of(h.end_step(), Paused)
    h.run()
    h.assert_result("a")


def test_what_ends_or_does_not_run_cannot_pause() -> None:
    h = Harness()
    running(h, sampling=params(2))
    h.begin_step()
    h.send(Pause(request_id="a", generation=1))
    assert only(h.end_step(), CannotPause).reason == "it has ended"
    h.records["a", 9] = h.record("a")
    assert only(h.send(Pause(request_id="a", generation=9)), CannotPause).reason == "it is not here"
    h.add(receive())
    assert "receiving" in only(h.send(Pause(request_id="r", generation=1)), CannotPause).reason
    running(h, "b")
    h.begin_step()
    h.send(Pause(request_id="b", generation=1))
    assert none_of(h.send(Drop(request_id="b", generation=1, reason="test")), Gone)
    assert h.record("b").gone == 0
    h.end_step()
    assert h.record("b").gone == 1


def test_a_migration_continues_at_the_target_with_newer_tokens() -> None:
    source, target = Harness(), Harness()
    running(source)
    reserved = receive("a", list(source.record("a").tokens), num_output=1, generation=2, sampling=params())
    target.add(reserved)
    for _ in range(4):
        source.step()
    paused = only(source.send(Pause(request_id="a", generation=1)), Paused)
    needed = len(paused.blocks)
    assert needed == 4 > len(target.record("a", 2).blocks) == 3
    grown = only(target.send(Grow(request_id="a", generation=2, num_blocks=needed)), Grown)
    assert grown.blocks[:3] == target.record("a", 2).blocks
    one = target.record("a", 2)
    one.tokens = list(paused.tokens)
    target.write_kv(one, grown.blocks, one.have, paused.tokens)
    target.send(KvReady(request_id="a", generation=2, tokens=paused.tokens, num_output=paused.num_output))
    source.send(Handed(request_id="a", generation=1))
    target.run()
    assert one.output == reference(spec("a", PROMPT), 48)[0]
    assert one.finish is FinishReason.LENGTH
    source.assert_at_rest()
    target.assert_at_rest()


def test_a_migration_that_does_not_fit_or_does_not_continue_is_lost() -> None:
    for tokens, word in (
        ([9, *PROMPT], "do not continue"),
        (PROMPT + [1] * 4, "cannot have arrived"),
        (PROMPT + [1] * 40, "at most 48"),
    ):
        h = Harness()
        h.add(receive())
        gone = only(h.send(KvReady(request_id="r", generation=1, tokens=tokens, num_output=4)), Gone)
        assert word in (gone.lost or "")
        h.assert_at_rest()
    h = Harness(config(num_blocks=4))
    h.add(receive())
    assert "outgrew" in (only(h.send(Grow(request_id="r", generation=1, num_blocks=5)), Gone).lost or "")
    h.assert_at_rest()
    assert only(h.core.handle(Grow(request_id="r", generation=1, num_blocks=5), 0.0), Gone).lost


def test_a_sequence_that_resumes_at_a_block_boundary_gets_its_block() -> None:
    h = Harness()
    h.add(spec("a", PROMPT[:7]))
    h.step()
    h.step()  # 9 tokens: the next needs a third block
    h.send(Pause(request_id="a", generation=1))
    h.record("a").paused = False
    h.begin_step()
    h.send(Resume(request_id="a", generation=1))
    h.run()
    h.assert_result("a")


def test_a_resume_beside_a_step_preempts_nobody_in_it() -> None:
    h = Harness(config(num_blocks=6, max_context=24))
    running(h, "a", tokens=[1] * 7)
    h.begin_step()
    h.send(Pause(request_id="a", generation=1))
    h.end_step()  # paused with 9 tokens: the next one needs a third block
    running(h, "b", tokens=[2] * 15)  # and b has taken all there were
    assert h.core.load(0.0).free_blocks == 0
    h.begin_step()
    h.record("a").paused = False
    h.send(Resume(request_id="a", generation=1))
    assert h.core.state_of("b", 1) is State.RUNNING
    h.end_step()
    assert h.core.state_of("b", 1) is State.WAITING
    h.run()
    h.assert_result("a")
    h.assert_result("b")
