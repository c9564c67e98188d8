"""One request through the core, and everything that can go wrong with it. References are public fault reports."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, only, sends, sent, those

from controlplane.core.events import Expect, Fail, Finished, FirstToken, NeedTokens, NodeLost, Resume, Send
from controlplane.core.lifecycle import RequestState
from transfer.terms import pack_tokens, unpack_tokens
from transfer.wire.messages import (
    Abort,
    KvReceived,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Released,
    RequestLost,
    Reserve,
    Reserved,
    ReserveRefused,
)


def test_the_usual_course_and_its_record() -> None:
    """vllm#29474: the stages add up to the user's TTFT."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1", 100)
    reserve = sent(rig.effects, Reserve)
    assert reserve[0] == "d0"
    assert (reserve[1].remote, reserve[1].generation, reserve[1].num_output) == (True, 1, 0)
    assert [type(one) for one in rig.effects] == [Expect, Send], "the router expects tokens before they can come"
    name, prefill = sent(rig.reserved("r1", have=32, after=0.1), Prefill)
    assert (name, prefill.target.instance_id, prefill.have_tokens) == ("p0", "d0", 32)
    assert prefill.tokens == reserve[1].tokens
    rig.started("r1", after=0.2)
    rig.done("r1", after=0.3, cached=16, exposed_s=0.05)
    assert rig.instance("p0").prefill_tokens == 0
    rig.received("r1", after=0.02)
    assert rig.request("r1").state is RequestState.DECODING
    rig.do(FirstToken(request_id="r1"), after=0.08)
    record = only(rig.end("r1", ttft_s=0.71), Finished).record
    assert record.stages_s == pytest.approx(
        {"decode_admission": 0.1, "queue": 0.2, "prefill": 0.25, "transfer": 0.07, "decode": 0.09}
    )
    assert sum(record.stages_s.values()) == pytest.approx(0.71, abs=1e-12)
    assert (record.prefill, record.decode, record.cached_tokens, record.good) == ("p0", "d0", 16, True)
    assert record.why[0].chosen
    assert not sends(rig.effects, Abort)
    rig.at_rest()


def test_a_prompt_of_one_token_is_local_to_decode() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1", 1)
    assert sent(rig.effects, Reserve)[1].remote is False
    rig.reserved("r1")
    assert not sends(rig.effects, Prefill)
    rig.do(FirstToken(request_id="r1"))
    assert rig.request("r1").state is RequestState.DECODING
    rig.end("r1", cached_tokens=0)
    rig.at_rest()


def test_both_legs_are_aborted_at_once_and_everything_returns() -> None:
    """vllm#46283, aibrix#2289: prefill and decode both abort, no block is left."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    effects = rig.end("r1", outcome="cancelled", by_node=False)
    assert sorted(name for name, _ in sends(effects, Abort)) == ["d0", "p0"]
    assert only(effects, Finished).record.outcome == "cancelled"
    assert rig.core.ledger.num_legs == 2, "charged until the instances say that they hold nothing"
    rig.release(effects)
    rig.at_rest()


def test_a_client_that_leaves_between_prefill_and_decode_strands_nothing() -> None:
    """llm-d#1138, sglang#28651: the twin is cancelled at once."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    rig.started("r1")
    rig.done("r1")
    effects = rig.end("r1", outcome="cancelled", by_node=False)
    assert [name for name, _ in sends(effects, Abort)] == ["d0"]
    rig.release(effects)
    rig.at_rest()


def test_an_abort_is_repeated_until_it_is_answered() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    first = rig.end("r1", outcome="cancelled", by_node=False)
    assert len(sends(first, Abort)) == 1
    again = rig.wait(1.15, ["d0", "p0"])
    assert [name for name, _ in sends(again, Abort)] == ["d0"]
    rig.release(again)
    assert not sends(rig.wait(3.0, ["d0", "p0"]), Abort)
    rig.at_rest()


def test_released_and_done_twice_change_nothing() -> None:
    """vllm-ascend#16517, LMCache#987: release is idempotent."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    done = PrefillDone(
        request_id="r1", generation=1, computed_tokens=99, cached_tokens=0, fetched_tokens=0, prefill_s=0.1,
        transfer_s=0.1, exposed_s=0.0, transfer_bytes=1,
    )  # fmt: skip
    for _ in range(2):
        rig.node("p0", done)
        rig.node("d0", KvReceived(request_id="r1", generation=1))
        rig.node("d0", Reserved(request_id="r1", generation=1, have_tokens=0, free_blocks=900))
    effects = rig.end("r1")
    for _ in range(2):
        rig.node("d0", Released(request_id="r1", generation=1, num_blocks=3))
        rig.end("r1")
    assert len(those(rig.all_effects, Finished)) == 1
    assert not sends(effects, Abort)
    rig.at_rest()


def test_prefill_load_is_released_at_the_first_token_not_at_the_end() -> None:
    """llm-d-router#2243."""
    rig = Rig()
    rig.fleet("1M")
    rig.arrive("r1", 500)
    rig.reserved("r1")
    assert rig.instance("m0").prefill_tokens == 500
    rig.do(FirstToken(request_id="r1"))
    assert rig.instance("m0").prefill_tokens == 0
    assert rig.instance("m0").rows == 1


def test_decode_refuses_and_prefill_is_never_started() -> None:
    """vllm#41269, sglang#31206: the pair is chosen at once, and a refusal frees both within the event."""
    rig = Rig()
    rig.fleet("1P2D")
    rig.arrive("r1")
    first = str(rig.request("r1").decode)
    other = {"d0": "d1", "d1": "d0"}[first]
    effects = rig.node(first, ReserveRefused(request_id="r1", generation=1, reason="full", retry=True, free_blocks=500))
    name, reserve = sent(effects, Reserve)
    assert (name, reserve.generation) == (other, 2)
    assert not sends(effects, Prefill)
    assert rig.instance(first).rows == 0
    assert rig.instance("p0").prefill_tokens == 99, "charged once, for the new generation"


def test_without_any_room_it_waits_and_goes_when_room_is_freed() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r0")
    rig.arrive("r1")
    rig.node("d0", ReserveRefused(request_id="r1", generation=1, reason="full", retry=True, free_blocks=0))
    assert rig.request("r1").state is RequestState.QUEUED
    rig.tick()
    assert not sends(rig.effects, Reserve)
    effects = rig.end("r0")
    assert sent(effects, Reserve)[1].generation == 2
    rig.reserved("r1", after=0.3)
    rig.started("r1")
    rig.done("r1")
    rig.received("r1")
    rig.do(FirstToken(request_id="r1"))
    record = only(rig.end("r1", ttft_s=rig.now - 0.0), Finished).record
    assert record.stages_s["decode_admission"] == pytest.approx(0.4, abs=0.01)


def test_a_refusal_for_good_everywhere_is_a_clear_error() -> None:
    """sglang#30233: never garbage, an error before any work."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1")
    refused = ReserveRefused(
        request_id="r1", generation=1, reason="it needs 900 blocks here", retry=False, free_blocks=9
    )
    fail = only(rig.node("d0", refused), Fail)
    assert (fail.status, fail.kind) == (400, "invalid")
    assert "900 blocks" in fail.message
    rig.end("r1", outcome="rejected", by_node=False)
    rig.at_rest()


def test_prefill_is_lost_and_the_request_is_placed_again_with_what_was_delivered() -> None:
    """smg#2491, vllm#21570: the older generation is fenced on decode, then computed anew."""
    rig = Rig()
    rig.fleet("2P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    lost = str(rig.request("r1").prefill)
    effects = rig.do(NodeLost(instance_id=lost))
    assert sent(effects, Abort)[1].generation == 1
    assert only(effects, NeedTokens).request_id == "r1"
    assert not sends(effects, Reserve), "not before the gateway said what was delivered"
    effects = rig.do(Resume(request_id="r1", tokens=rig.request("r1").tokens, num_output=0))
    assert sent(effects, Reserve)[1].generation == 2
    assert rig.request("r1").prefill != lost
    late = rig.node("d0", KvReceived(request_id="r1", generation=1))
    assert rig.request("r1").state is RequestState.RESERVING
    assert not sends(late, Abort), "an Abort for it is on its way already"


def test_decode_is_lost_and_the_request_resumes_with_its_output() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.decoding("r1")
    dead = str(rig.request("r1").decode)
    effects = rig.do(NodeLost(instance_id=dead))
    assert only(effects, NeedTokens)
    prompt = unpack_tokens(rig.request("r1").tokens)
    effects = rig.do(Resume(request_id="r1", tokens=pack_tokens([*prompt, 5, 6, 7]), num_output=3))
    name, reserve = sent(effects, Reserve)
    assert name != dead
    assert (reserve.generation, reserve.num_output, len(reserve.tokens) // 4) == (2, 3, 103)
    rig.reserved("r1")
    rig.started("r1")
    rig.done("r1")
    rig.received("r1")
    record = only(rig.end("r1", output_tokens=8), Finished).record
    assert (record.num_resumes, record.prompt_tokens, record.good) == (1, 100, True)
    rig.at_rest()


def test_a_lost_reservation_needs_no_tokens_because_none_can_exist() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.arrive("r1")
    effects = rig.do(NodeLost(instance_id=str(rig.request("r1").decode)))
    assert not those(effects, NeedTokens)
    assert sent(effects, Reserve)[1].generation == 2
    assert rig.request("r1").num_resumes == 0


@pytest.mark.parametrize("kind", [PrefillFailed, RequestLost])
def test_a_failed_prefill_is_a_message_and_others_are_preferred_next(kind: type[PrefillFailed | RequestLost]) -> None:
    """vllm PR 50754, vllm#55870: a failure is announced and acted upon."""
    rig = Rig()
    rig.fleet("2P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    failed = str(rig.request("r1").prefill)
    rig.node(failed, kind(request_id="r1", generation=1, reason="corrupt"))
    rig.do(Resume(request_id="r1", tokens=rig.request("r1").tokens, num_output=0))
    assert rig.request("r1").prefill != failed
    assert rig.request("r1").generation == 2


def test_resumes_are_bounded_and_end_in_one_clear_error() -> None:
    rig = Rig(config(max_resumes=2))
    rig.fleet("1P1D")
    rig.arrive("r1")
    for generation in (1, 2, 3):
        rig.reserved("r1")
        effects = rig.node("d0", RequestLost(request_id="r1", generation=generation, reason="the KV is corrupt"))
        rig.release(effects)
        if generation < 3:
            rig.do(Resume(request_id="r1", tokens=rig.request("r1").tokens, num_output=0))
    fail = only(effects, Fail)
    assert (fail.status, fail.kind) == (500, "internal")
    assert "the KV is corrupt" in fail.message
    record = only(rig.end("r1", outcome="error", by_node=False), Finished).record
    assert (record.outcome, record.good) == ("error", False)
    rig.at_rest()
