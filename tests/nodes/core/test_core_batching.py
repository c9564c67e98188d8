"""The batching core, work by work: what is computed when, chunks, prefix cache, fetch, stopping."""

from __future__ import annotations

import pytest
from batching_harness import Harness
from requests_kit import (
    EOS,
    PROMPT,
    add,
    config,
    digests,
    next_token,
    none_of,
    only,
    params,
    prefill,
    receive,
    reference,
    spec,
)

from nodes.core.batching import BatchCore
from nodes.core.events import (
    Admitted,
    Computed,
    Emit,
    Fetched,
    Gone,
    Handed,
    StepDone,
)
from nodes.core.sequence import State
from nodes.engines.engine import Sampled
from transfer.errors import InvalidValue
from transfer.terms import FinishReason, TokenLogprob

# --- one request, three kinds of work ---


def test_local_work_computes_its_prompt_and_generates() -> None:
    h = Harness()
    admitted = only(h.add(spec("a", PROMPT)), Admitted)
    assert (len(admitted.blocks), admitted.have_blocks) == (3, 0)
    plan = h.step()
    assert plan is not None
    assert (plan.started, plan.num_prefill_tokens, plan.pushes) == (["a"], 10, [])
    h.run()
    h.assert_result("a")
    assert h.num_steps == 8
    h.assert_at_rest()


def test_received_work_generates_after_kv_ready_and_only_then() -> None:
    h = Harness()
    h.add(receive())
    assert h.step() is None
    h.deliver_kv("r")
    plan = h.step()
    assert plan is not None
    assert [(chunk.start, chunk.tokens) for chunk in plan.chunks] == [(9, [4])]
    assert (plan.started, plan.num_prefill_tokens) == ([], 0)
    h.run()
    h.assert_result("r")
    assert h.num_steps == 8
    assert set(h.record("r").cached_tokens) == {None}


def test_prefill_work_makes_all_but_the_last_token_and_keeps_it_until_handed() -> None:
    h = Harness()
    h.add(prefill())
    plan = h.step()
    assert plan is not None
    assert plan.chunks[0].sampling is None
    assert plan.chunks[0].tokens == PROMPT[:-1]
    assert h.record("p").computed == Computed(
        request_id="p", generation=1, computed_tokens=9, cached_tokens=0, fetched_tokens=0
    )
    assert h.step() is None
    assert h.core.holdings()[0].num_blocks == 3
    gone = only(h.send(Handed(request_id="p", generation=1)), Gone)
    assert (gone.num_blocks, gone.lost) == (3, None)
    h.assert_at_rest()


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    h = Harness()
    effects = h.add(prefill(tokens=[5]))
    assert only(effects, Admitted).blocks == []
    assert only(effects, Computed).computed_tokens == 0


# --- chunks and budget ---


def test_decodes_come_first_then_prompts_in_order_of_priority_and_arrival() -> None:
    h = Harness(config(token_budget=8, num_blocks=32))
    h.add(spec("decode", PROMPT[:3]))
    h.step()
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        h.add(spec(name, [6, *PROMPT[:4]], priority=priority))
    plan = h.step()
    assert plan is not None
    assert [(c.request_id, len(c.tokens)) for c in plan.chunks] == [("decode", 1), ("first", 5), ("second", 2)]
    plan = h.step()
    assert plan is not None
    assert [(c.request_id, len(c.tokens)) for c in plan.chunks] == [
        ("decode", 1), ("first", 1), ("second", 3), ("late", 3),
    ]  # fmt: skip
    assert plan.started == ["late"]
    h.run()
    for name in ("decode", "first", "second", "late"):
        h.assert_result(name)


def test_a_chunked_prompt_pushes_every_block_once_and_the_partial_one_last() -> None:
    h = Harness(config(token_budget=5, max_running=5))
    h.add(prefill(tokens=[*PROMPT, 5]))  # 10 tokens to make: blocks of 4, 4 and 2
    pushes = []
    while (plan := h.step()) is not None:
        pushes.append([(push.first_block, push.count) for push in plan.pushes])
    assert pushes == [[(0, 1)], [(1, 2)]]


def test_the_budget_must_hold_a_token_of_every_running_request() -> None:
    with pytest.raises(InvalidValue, match=r"token_budget \(4\) must be at least max_running \(8\)"):
        BatchCore(config(token_budget=4))
    with pytest.raises(InvalidValue, match="num_blocks must be at least 1"):
        BatchCore(config(num_blocks=0))
    with pytest.raises(InvalidValue, match="watermark"):
        BatchCore(config(watermark=1.0))


# --- prefix cache ---


def test_a_second_prompt_reuses_whole_blocks_but_computes_its_last_token() -> None:
    h = Harness()
    prompt = PROMPT[:8]  # two whole blocks exactly
    h.add(spec("a", prompt))
    h.run()
    admitted = only(h.add(spec("b", prompt)), Admitted)
    assert admitted.have_blocks == 1
    plan = h.step()
    assert plan is not None
    assert (plan.chunks[0].start, plan.num_prefill_tokens) == (4, 4)
    assert h.record("b").cached_tokens == [4]
    h.run()
    h.assert_result("b")
    assert h.record("b").cached_tokens[1:] == [None] * 7


def test_blocks_of_the_output_are_reused_by_the_next_turn() -> None:
    h = Harness()
    h.add(spec("a", PROMPT))
    h.run()
    turn = [*h.record("a").tokens, 1, 2, 3]
    assert only(h.add(spec("b", turn)), Admitted).have_blocks == (len(PROMPT) + 8 - 1) // 4


def test_prefill_work_found_whole_in_the_cache_is_computed_at_once() -> None:
    h = Harness()
    h.add(prefill("p", PROMPT[:9]))
    h.run()
    effects = h.add(prefill("q", PROMPT[:9]))
    assert only(effects, Admitted).have_blocks == 2
    assert only(effects, Computed).cached_tokens == 8
    assert h.step() is None


def test_another_tenant_finds_nothing() -> None:
    h = Harness()
    h.add(spec("a", PROMPT))
    h.run()
    assert only(h.add(spec("b", PROMPT, root=b"t" * 32)), Admitted).have_blocks == 0
    h.run()
    h.assert_result("b")


def test_received_and_fetched_blocks_enter_the_cache() -> None:
    h = Harness()
    h.add(receive())
    h.deliver_kv("r")
    assert only(h.add(receive("s")), Admitted).have_blocks == 2
    h = Harness()
    h.add(prefill(fetch_blocks=2))
    one = h.record("p")
    one.fetched = 2
    h.write_kv(one, one.blocks, 0, PROMPT[:9])
    h.send(Fetched(request_id="p", generation=1, num_blocks=2))
    assert only(h.add(prefill("q")), Admitted).have_blocks == 2


def test_prefix_cache_can_be_off() -> None:
    h = Harness(config(prefix_cache=False))
    for name in ("a", "b"):
        assert only(h.add(spec(name, PROMPT)), Admitted).have_blocks == 0
        h.run()
        h.assert_result(name)
    assert h.core.cached_hashes() == ()


# --- pool fetch ---


def test_a_fetch_holds_the_prompt_back_and_shortens_it() -> None:
    h = Harness()
    h.add(prefill(fetch_blocks=5))  # more than there are whole blocks of tokens[:-1]
    assert h.core.state_of("p", 1) is State.FETCHING
    assert h.step() is None
    one = h.record("p")
    one.fetched = 1
    h.write_kv(one, one.blocks, 0, PROMPT[:5])
    h.send(Fetched(request_id="p", generation=1, num_blocks=1))
    plan = h.step()
    assert plan is not None
    assert [(push.first_block, push.count) for push in plan.pushes] == [(1, 2)]
    computed = h.record("p").computed
    assert computed is not None
    assert (computed.computed_tokens, computed.fetched_tokens) == (5, 4)


def test_a_fetch_that_found_nothing_computes_all_and_one_that_found_all_computes_nothing() -> None:
    h = Harness()
    h.add(prefill(fetch_blocks=2))
    assert none_of(h.send(Fetched(request_id="p", generation=1, num_blocks=0)), Computed)
    h.run()
    assert h.record("p").computed is not None
    h.add(prefill("q", [6] * 9, fetch_blocks=2))
    one = h.record("q")
    one.fetched = 2
    h.write_kv(one, one.blocks, 0, one.tokens)
    assert only(h.send(Fetched(request_id="q", generation=1, num_blocks=2)), Computed).fetched_tokens == 8


def test_no_fetch_when_the_cache_holds_as_much() -> None:
    h = Harness()
    h.add(prefill())
    h.run()
    h.add(prefill("q", fetch_blocks=2))
    assert h.core.state_of("q", 1) is State.PREFILLING


# --- stopping ---


def test_max_tokens_of_one_gives_exactly_one_token() -> None:
    h = Harness()
    h.add(spec("a", PROMPT, sampling=params(1)))
    h.add(receive(sampling=params(1)))
    h.deliver_kv("r")
    h.run()
    for name in ("a", "r"):
        assert (h.record(name).num_output, h.record(name).finish) == (1, FinishReason.LENGTH)
    h.assert_at_rest()


def test_max_tokens_counts_from_the_original_request() -> None:
    h = Harness()
    output, _ = reference(spec("a", PROMPT), 48)
    h.add(spec("a", PROMPT + output[:5], num_output=5))
    h.run()
    assert h.record("a").output == output
    assert h.num_steps == 3


def test_eos_and_stop_ids_end_with_the_token_included() -> None:
    h = Harness()
    output, _ = reference(spec("a", PROMPT), 48)
    stop = output[3]
    h.add(spec("a", PROMPT, sampling=params(8, stop_token_ids=(stop,))))
    h.run()
    first = output.index(stop)
    assert (h.record("a").output, h.record("a").finish) == (output[: first + 1], FinishReason.STOP)
    prompt = next(p for p in ([i, j, 1] for i in range(1, 7) for j in range(1, 7)) if next_token(digests(p)[-1]) == EOS)
    h.add(spec("b", prompt, sampling=params(8, ignore_eos=False)))
    h.add(spec("c", prompt, sampling=params(8)))
    h.run()
    assert (h.record("b").output, h.record("b").finish) == ([EOS], FinishReason.STOP)
    assert (h.record("c").output[0], h.record("c").num_output) == (EOS, 8)


def test_min_tokens_bans_stop_tokens_and_then_no_more() -> None:
    h = Harness()
    sampling = params(8, min_tokens=2, stop_token_ids=(3, EOS, 3), ignore_eos=False)
    h.add(spec("a", PROMPT, sampling=sampling))
    banned = []
    while (plan := h.begin_step()) is not None:
        drawn = plan.chunks[0].sampling
        assert drawn is not None
        banned.append(drawn.banned)
        h.end_step()
    assert banned[:2] == [(3, EOS)] * 2
    assert set(banned[2:]) <= {()}
    h.assert_result("a")


def test_an_engine_that_draws_a_banned_token_does_not_end_the_request_early() -> None:
    core = BatchCore(config())
    h = Harness()
    core.handle(add(spec("a", PROMPT, sampling=params(3, min_tokens=2, stop_token_ids=(6,)))), 0.0)
    finishes = []
    while core.next_step(0.0) is not None:
        emit = only(core.handle(StepDone(sampled={"a": Sampled(6)}, duration_s=0.0), 0.0), Emit)
        finishes.append(emit.finish)
    assert finishes == [None, None, FinishReason.STOP]
    assert h.core.idle


def test_the_context_ends_the_request_with_length() -> None:
    h = Harness(config(max_context=14))
    h.add(spec("a", PROMPT, sampling=params(100)))
    h.run()
    assert (h.record("a").num_output, h.record("a").finish) == (4, FinishReason.LENGTH)
    h.assert_result("a")


def test_logprobs_travel_with_their_token() -> None:
    core = BatchCore(config())
    core.handle(add(spec("a", PROMPT, sampling=params(1, logprobs=1))), 0.0)
    core.next_step(0.0)
    logprob = TokenLogprob(logprob=-0.5, top_ids=(3,), top_logprobs=(-0.5,))
    effects = core.handle(StepDone(sampled={"a": Sampled(3, logprob)}, duration_s=0.1), 0.0)
    assert only(effects, Emit).logprobs == (logprob,)
