"""ServedCore, event by event: what is launched with which KV, what is told, when blocks come back."""

from __future__ import annotations

import msgspec
import pytest
from requests_kit import PROMPT, ROOT, none_of, only, params, prefill, receive, reference, spec
from served_harness import LAYERS, SIZE, ServedHarness, served_config

from nodes.core.events import (
    Admitted,
    CannotPause,
    Computed,
    Drop,
    Emit,
    Fetched,
    Gone,
    Handed,
    KvReady,
    NotAdmitted,
    Pause,
    Tick,
    Work,
)
from nodes.core.jobs import Cancel, Drew, JobOver, Launch, Saved, Started
from nodes.core.sequence import State
from nodes.core.served_residency import HEADROOM_TOKENS
from nodes.engines.served import Output
from transfer.errors import EngineFailed, InvalidValue
from transfer.terms import FinishReason

A, P, R = ("a", 1), ("p", 1), ("r", 1)


def end(h: ServedHarness, name: str = "p") -> None:
    """A prefill, computed and handed over."""
    h.add(prefill(name))
    h.finish((name, 1))
    h.send(Handed(request_id=name, generation=1))


def test_a_prefill_is_launched_saved_layer_by_layer_and_handed_over() -> None:
    h = ServedHarness()
    effects = h.add(prefill())
    job = only(effects, Launch).job
    assert (job.sampling, job.num_loaded, job.save_from, len(job.blocks)) == (None, 0, 0, 3)
    assert job.blocks == only(effects, Admitted).blocks
    assert only(h.begin("p"), Started).request_id == "p"
    h.save_all(P)
    assert h.core.load(0.0).queued_prefill_tokens == 0
    assert none_of(h.draw(P), Computed), "the engine may still write"
    assert only(h.over(P), Computed).computed_tokens == len(PROMPT) - 1
    assert h.core.state_of(*P) is State.COMPUTED
    assert only(h.send(Handed(request_id="p", generation=1)), Gone).num_blocks == 3
    assert len(h.core.cached_hashes()) == 2, "whole blocks only"


def test_what_is_cached_is_loaded_and_not_saved_again() -> None:
    h = ServedHarness()
    end(h)
    job = only(h.add(prefill("q", [*PROMPT, 6, 5, 4])), Launch).job
    assert (job.num_loaded, job.save_from) == (8, 2)
    done = only(h.finish(("q", 1)), Computed)
    assert (done.cached_tokens, done.computed_tokens) == (8, 4)
    effects = h.add(prefill("w", [*PROMPT[:8], 3]))
    assert none_of(effects, Launch), "all of it is here: nothing to run"
    assert only(effects, Computed).cached_tokens == 8


def test_a_block_counts_only_when_every_layer_of_it_and_of_those_before_is_saved() -> None:
    h = ServedHarness()
    h.add(prefill())
    for layer, index in ((0, 0), (0, 1), (1, 1), (1, 2)):
        h.save(P, layer, index)
    assert h.core.cached_hashes() == ()
    h.save(P, 1, 0)
    assert len(h.core.cached_hashes()) == 2
    h.over(P, None)
    assert "KV of 8 tokens, not of all 9" in (h.record("p").lost or "")


def test_what_the_engine_was_not_asked_to_save_is_not_believed() -> None:
    h = ServedHarness()
    end(h)
    h.add(prefill("q", [*PROMPT, 6, 5, 4]))
    for layer, first, count in ((0, 1, 1), (0, 3, 1), (LAYERS, 2, 1), (0, 2, -1)):
        with pytest.raises(EngineFailed, match="the engine saved blocks"):
            h.send(Saved(request_id="q", generation=1, layer=layer, first=first, count=count))


def test_received_kv_is_loaded_and_generation_goes_on_from_it() -> None:
    h = ServedHarness()
    assert none_of(h.add(receive()), Launch)
    job = only(h.deliver("r"), Launch).job
    assert (job.num_loaded, job.save_from, job.num_output) == (9, 3, 0)
    assert none_of(h.begin("r"), Started), "its prompt is computed elsewhere"
    effects = h.draw(R, 2)
    assert only(effects, Emit).cached_tokens is None
    assert none_of(effects, Computed)
    assert only(h.finish(R), Gone).lost is None
    one = h.record("r")
    assert (one.output, one.finish) == reference(one.spec, 48)
    assert len(h.core.cached_hashes()) == 2, "what was generated is not in the arena"


def test_migrated_kv_brings_newer_tokens() -> None:
    h = ServedHarness()
    h.add(receive(sampling=params(20)))
    one = h.record("r")
    whole = reference(one.spec, 48)[0]
    output = whole[:2]
    one.tokens = [*PROMPT, *output]
    h.write_kv(one, 0, len(one.tokens) - 1)
    one.spec = msgspec.structs.replace(one.spec, num_output=2)
    job = only(h.send(KvReady(request_id="r", generation=1, tokens=one.tokens, num_output=2)), Launch).job
    assert (job.num_loaded, job.num_output, len(job.blocks)) == (11, 2, 3)
    h.finish(R)
    assert output + one.output == whole


def test_a_local_prompt_is_saved_and_its_first_output_says_what_was_spared() -> None:
    h = ServedHarness()
    end(h)
    h.add(spec("a", PROMPT))
    effects = h.draw(A)
    assert [type(effect) for effect in effects] == [Started, Computed, Emit]
    assert (only(effects, Computed).cached_tokens, only(effects, Computed).computed_tokens) == (8, 2)
    assert only(effects, Emit).cached_tokens == 8
    assert only(h.draw(A), Emit).cached_tokens is None
    assert h.core.num_running == 1
    h.finish(A)
    assert h.record("a").output == reference(h.record("a").spec, 48)[0]


def test_the_engines_own_account_of_cached_tokens_counts() -> None:
    h = ServedHarness()
    h.add(spec("a", PROMPT, fetch_blocks=2))
    one = h.record("a")
    h.write_kv(one, 0, 8)
    h.send(Fetched(request_id="a", generation=1, num_blocks=2))
    effects = h.send(Drew(request_id="a", generation=1, output=Output((3,), cached_tokens=9)))
    done = only(effects, Computed)
    assert (done.fetched_tokens, done.cached_tokens, done.computed_tokens) == (8, 1, 1)
    h.add(spec("b", PROMPT))
    assert h.jobs["b", 1].job.num_loaded == 8
    failed_to_load = h.send(Drew(request_id="b", generation=1, output=Output((3,), cached_tokens=0)))
    assert only(failed_to_load, Computed).computed_tokens == 10


def test_a_fetch_comes_first_and_what_did_not_come_is_computed() -> None:
    h = ServedHarness()
    assert none_of(h.add(prefill(fetch_blocks=2)), Launch)
    h.write_kv(h.record("p"), 0, 4)
    job = only(h.send(Fetched(request_id="p", generation=1, num_blocks=1)), Launch).job
    assert (job.num_loaded, job.save_from) == (4, 1)
    done = only(h.finish(P), Computed)
    assert (done.fetched_tokens, done.computed_tokens) == (4, 5)


def test_a_dropped_job_keeps_its_blocks_until_the_engine_lets_go() -> None:
    h = ServedHarness(served_config(num_blocks=3))
    h.add(spec("a", PROMPT))
    effects = h.send(Drop(request_id="a", generation=1, reason="abort"))
    assert only(effects, Cancel).request_id == "a"
    assert none_of(effects, Gone)
    assert none_of(h.send(Drop(request_id="a", generation=1, reason="again")), Cancel)
    h.add(prefill())
    assert not h.record("p").num_admitted, "no block is free yet"
    assert none_of(h.draw(A), Emit)
    h.save(A, 0, 0)
    effects = h.over(A)
    assert only(effects, Gone).num_blocks == 3
    assert only(effects, Launch).job.request_id == "p"


def test_the_engines_memory_is_free_only_when_it_lets_go() -> None:
    h = ServedHarness(served_config(capacity_blocks=3))
    h.add(spec("a", [1], sampling=params(8)))  # no block of the arena, and three of the engine's
    h.send(Drop(request_id="a", generation=1, reason="abort"))
    assert none_of(h.add(prefill()), Admitted)
    assert only(h.over(A), Launch).job.request_id == "p"


def test_the_same_request_does_not_come_again_before_the_engine_let_go() -> None:
    h = ServedHarness()
    h.add(spec("a", PROMPT))
    effects = h.add(spec("a", PROMPT, generation=2))
    assert only(effects, Cancel).generation == 1
    refused = only(effects, NotAdmitted)
    assert refused.retry
    assert "still leaving the engine" in refused.reason
    h.over(A)
    assert only(h.add(spec("a", PROMPT, generation=2)), Launch).job.generation == 2
    assert none_of(h.send(JobOver(request_id="a", generation=1)), Gone), "an old job says nothing of the new one"
    assert only(h.add(spec("a", PROMPT)), NotAdmitted).retry is False


def test_a_failed_job_loses_its_request_alone() -> None:
    h = ServedHarness()
    h.add(spec("a", PROMPT))
    h.add(prefill())
    assert only(h.over(A, "the prompt is too long"), Gone).lost == "the prompt is too long"
    h.add(receive())
    h.deliver("r")
    h.draw(R)
    assert only(h.over(R, None), Gone).lost == "the engine ended the request before its last token"
    assert only(h.finish(P), Computed)


def test_a_finished_request_is_finished_whatever_comes_after() -> None:
    h = ServedHarness()
    h.add(spec("a", PROMPT, sampling=params(1)))
    assert only(h.draw(A), Emit).finish is FinishReason.LENGTH
    assert none_of(h.send(Drew(request_id="a", generation=1, output=Output((1,)))), Emit)
    assert only(h.over(A, "the connection broke"), Gone).lost is None


def test_a_request_that_runs_cannot_be_paused() -> None:
    h = ServedHarness()
    h.add(spec("a", PROMPT))
    h.draw(A)
    assert "cannot let go of a request" in only(h.send(Pause(request_id="a", generation=1)), CannotPause).reason
    assert "not here" in only(h.send(Pause(request_id="a", generation=2)), CannotPause).reason
    assert only(h.draw(A), Emit)


def test_leases_end_what_waits_and_not_what_runs() -> None:
    h = ServedHarness()
    h.add(receive())
    h.add(spec("a", PROMPT))
    h.now = 11.0
    assert only(h.send(Tick()), Gone).request_id == "r"
    h.finish(A)


def test_the_engine_admits_what_its_own_memory_holds() -> None:
    h = ServedHarness(served_config(capacity_blocks=8))
    h.add(spec("a", PROMPT, sampling=params(8)))  # 18 tokens at most: 5 blocks
    assert (h.core.load(0.0).num_blocks, h.core.load(0.0).free_blocks) == (8, 3)
    refused = only(h.add(spec("b", PROMPT, sampling=params(8))), NotAdmitted)
    assert (refused.retry, refused.free_blocks) == (True, 3)
    assert "needs 5 KV blocks of the engine, 3 are free" in refused.reason
    h.add(prefill())
    h.finish(A)
    assert h.core.load(0.0).free_blocks == 8 - 3
    never = only(h.add(spec("c", [1] * 32)), NotAdmitted)
    assert not never.retry
    never = only(h.add(prefill("d", [1] * 33)), NotAdmitted)
    assert (never.retry, "32 of one request" in never.reason) == (False, True)


def test_long_outputs_are_charged_as_they_grow_and_need_no_arena() -> None:
    h = ServedHarness(served_config(num_blocks=4, capacity_blocks=200, max_context=800))
    h.add(spec("a", PROMPT, sampling=params(600)))
    assert h.core.load(0.0).free_blocks == 1, "the arena is the tighter bound"
    assert h.core.load(0.0).num_blocks == 4
    before = h.core._residency._charged()
    assert before == -(-(len(PROMPT) + HEADROOM_TOKENS) // SIZE)
    h.draw(A, 40)
    assert h.core._residency._charged() == before + 10
    h.finish(A)
    assert len(h.record("a").output) == 600


def test_no_more_output_is_asked_of_the_engine_than_it_has_room_for() -> None:
    """A chat without max_tokens gets what the model could hold; an engine that holds less would refuse all of it."""
    h = ServedHarness(served_config(max_context=len(PROMPT) + 5))
    wanted = params(600, min_tokens=9)
    job = only(h.add(spec("a", PROMPT, sampling=wanted)), Launch).job
    assert job.sampling is not None
    assert (job.sampling.max_tokens, job.sampling.min_tokens) == (5, 5)
    h = ServedHarness(h.config)
    resumed = msgspec.structs.replace(spec("b", [*PROMPT, 1, 2], sampling=wanted), num_output=2)
    job = only(h.add(resumed), Launch).job
    assert job.sampling is not None
    assert job.sampling.max_tokens == 5, "output there is already counts"


def test_a_prompt_that_the_arena_cannot_hold_is_refused_for_good() -> None:
    h = ServedHarness(served_config(num_blocks=2))
    refused = only(h.add(spec("a", PROMPT)), NotAdmitted)
    assert not refused.retry
    assert "does not fit into the 2 KV blocks of 4 beside the engine" in refused.reason


def test_an_engine_that_keeps_its_kv_serves_whole_requests_only() -> None:
    h = ServedHarness(served_config(num_blocks=1, shares_kv=False, prefix_cache=False, capacity_blocks=6))
    for one in (prefill(), receive()):
        refused = only(h.add(one), NotAdmitted)
        assert not refused.retry
        assert "keeps its KV to itself" in refused.reason
    job = only(h.add(spec("a", PROMPT, fetch_blocks=2, salt="tenant", priority=3)), Launch).job
    assert (job.blocks, job.num_loaded, job.save_from, job.salt, job.priority) == ([], 0, 0, "tenant", 3)
    assert (h.core.load(0.0).num_blocks, h.core.load(0.0).free_blocks) == (6, 1)
    assert only(h.add(spec("b", PROMPT)), NotAdmitted).retry
    h.finish(A)
    assert h.record("a").output == reference(h.record("a").spec, 24)[0]
    assert h.core.load(0.0).free_blocks == 6


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InvalidValue, match="KV memory of at least one block"):
        ServedHarness(served_config(capacity_blocks=0))


def test_work_of_one_token_needs_no_block() -> None:
    h = ServedHarness()
    assert only(h.add(prefill("p", [3])), Computed).computed_tokens == 0
    h.add(receive("r", [3]))
    assert only(h.deliver("r"), Launch).job.blocks == []
    h.finish(R)
    assert h.record("r").output == reference(spec("r", [3], Work.RECEIVE, root=ROOT), 48)[0]
