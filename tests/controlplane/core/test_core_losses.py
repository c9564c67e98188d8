"""What is lost, late, orphaned or never answered, and how each request still ends once."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import GREEDY, Rig, config, only, sends, sent, those

from controlplane.core.events import Effect, Fail, Finished, FirstToken, NeedTokens, NodeLost, Note, Resume
from controlplane.core.ledger import LegKind
from controlplane.core.lifecycle import RequestState
from transfer.wire.messages import (
    Abort,
    Holding,
    KvReceived,
    Prefill,
    PrefillFailed,
    Released,
    RequestLost,
    Reserve,
    Reserved,
    ReserveRefused,
)


def test_what_is_held_for_a_placement_that_is_over_is_fenced() -> None:
    """A Reserved or KvReceived that nobody waits for any more."""
    rig = Rig()
    rig.fleet("1P1D")
    for message in (
        Reserved(request_id="gone", generation=4, have_tokens=0, free_blocks=9),
        KvReceived(request_id="gone", generation=4),
    ):
        name, abort = sent(rig.node("d0", message), Abort)
        assert (name, abort.request_id, abort.generation) == ("d0", "gone", 4)


def test_orphaned_blocks_count_after_a_lease_and_are_aborted() -> None:
    """The gauge is exact: a race in flight is no orphan, a real leak shows and is freed."""
    rig = Rig(config(lease_s=4.0))
    rig.fleet("1P1D")
    leak = (Holding(request_id="ghost", generation=2, num_blocks=11),)
    assert not sends(rig.beat("d0", holdings=leak), Abort), "it may just be ending"
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0
    effects = rig.beat("d0", holdings=leak, after=1.1)
    assert sent(effects, Abort)[1].request_id == "ghost"
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0
    rig.beat("d0", holdings=leak, after=3.0)
    assert rig.core.state(rig.now).orphaned_kv_blocks == 11
    assert "11 KV blocks are held for nobody" in rig.core.state(rig.now).verdict
    assert sends(rig.beat("d0", holdings=leak, after=3.0), Abort), "asked again after a lease"
    rig.beat("d0")
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0


def test_blocks_of_an_aborted_request_count_as_orphaned_when_it_never_lets_go() -> None:
    rig = Rig(config(lease_s=4.0))
    rig.fleet("1P1D")
    rig.decoding("r1")
    rig.end("r1", outcome="cancelled", by_node=False)
    held = (Holding(request_id="r1", generation=1, num_blocks=7),)
    rig.beat("d0", holdings=held, after=1.0)
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0
    rig.beat("d0", holdings=held, after=4.0)
    assert rig.core.state(rig.now).orphaned_kv_blocks == 7
    rig.beat("d0", after=1.0)
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0
    assert rig.core.ledger.num_legs == 0, "its heartbeat proves that it holds nothing"


def test_leaks_that_a_node_finds_itself_count_at_once() -> None:
    rig = Rig()
    rig.fleet("1D")
    rig.beat("d0", leaked_blocks=3)
    assert rig.core.state(rig.now).orphaned_kv_blocks == 3
    rig.do(NodeLost(instance_id="d0"))
    assert rig.core.state(rig.now).orphaned_kv_blocks == 0


def test_an_unanswered_reservation_is_repeated_then_given_up() -> None:
    """production-stack#706: no request without an owner and a deadline."""
    rig = Rig(config(lease_s=6.0))
    rig.fleet("1P2D")
    rig.arrive("r1")
    first = str(rig.request("r1").decode)
    seen = sends(rig.wait(4.0, ["p0", "d0", "d1"]), Reserve)
    assert {name for name, _ in seen} == {first}
    assert {message.generation for _, message in seen} == {1}
    seen = sends(rig.wait(4.0, ["p0", "d0", "d1"]), Reserve)
    assert [(name, message.generation) for name, message in seen][-1] == (str(rig.request("r1").decode), 2)
    assert rig.request("r1").decode != first


def test_a_long_prefill_queue_kills_no_healthy_request() -> None:
    """tokenspeed#1427, llm-d-router#2295: liveness is the owner's heartbeat, not age; the reservation is renewed."""
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    rig.holding["d0"] = (Holding(request_id="r1", generation=1, num_blocks=7),)
    rig.holding["p0"] = (Holding(request_id="r1", generation=1, num_blocks=0),)
    seen = rig.wait(30.0, ["p0", "d0"])
    assert not those(seen, NeedTokens)
    assert not those(seen, Fail)
    assert len(sends(seen, Reserve)) >= 15, "its lease on decode is renewed while prefill lives"
    assert sends(seen, Prefill), "an order that never started is repeated"
    assert rig.request("r1").state is RequestState.PREFILLING


def test_kv_that_never_arrives_after_prefill_is_done_ends_in_another_try() -> None:
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    rig.started("r1")
    rig.done("r1")
    assert those(rig.wait(8.0, ["p0", "d0"]), NeedTokens)


def test_a_running_request_that_its_node_does_not_hold_any_more_is_resumed() -> None:
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.decoding("r1")
    assert not those(rig.wait(8.0, ["p0", "d0"]), NeedTokens)
    assert those(rig.wait(4.0, ["p0", "d0"]), NeedTokens)


def test_preempted_requests_hold_nothing_and_are_not_lost() -> None:
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.decoding("r1")
    for _ in range(20):
        effects = rig.beat("d0", num_waiting=1, holdings=(Holding("r1", 1, 0),), after=1.0)
        effects += rig.tick()
        assert not those(effects, NeedTokens)


def test_what_waits_on_a_node_does_not_hide_what_it_has_lost() -> None:
    """The message that ended r1 was dropped, and d0 is busy with others."""
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.decoding("r1")
    effects: list[Effect] = []
    for _ in range(12):
        effects += rig.beat("p0", after=1.0)
        effects += rig.beat("d0", num_waiting=3)
        effects += rig.tick()
    assert those(effects, NeedTokens)


@pytest.mark.parametrize("began", [True, False])
def test_a_prompt_that_its_node_does_not_know_is_placed_again(began: bool) -> None:
    """PrefillFailed was dropped, or the node is deaf: the decode reservation must not be renewed until the timeout."""
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    if began:
        rig.started("r1")
    effects: list[Effect] = []
    for _ in range(12):
        effects += rig.beat("p0", after=1.0)
        effects += rig.beat("d0", holdings=(Holding("r1", 1, 7),), num_waiting=1)
        effects += rig.tick()
    assert those(effects, NeedTokens)


def test_a_timeout_ends_it_wherever_it_is() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1", timeout_s=2.0)
    effects = rig.wait(2.1)
    fail = only(effects, Fail)
    assert (fail.status, fail.kind) == (504, "timeout")
    assert sends(effects, Abort)
    assert rig.request("r1").state is RequestState.FAILING


def test_a_gateway_that_never_confirms_still_gives_one_record() -> None:
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.decoding("r1", timeout_s=1.0)
    seen = rig.wait(7.0, ["p0", "d0"])
    record = only(seen, Finished).record
    assert record.outcome == "timed_out"
    assert any("did not confirm" in note.text for note in those(seen, Note))
    assert not those(rig.end("r1"), Finished)


def test_the_same_id_twice_in_flight_is_one_request() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1")
    effects = rig.arrive("r1")
    assert not sends(effects, Reserve)
    assert rig.core.in_flight == 1


def test_an_id_that_comes_again_while_its_legs_close_gets_a_newer_generation() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    rig.end("r1", outcome="cancelled", by_node=False)
    rig.arrive("r1")
    assert sent(rig.effects, Reserve)[1].generation == 2
    rig.node("d0", Released(request_id="r1", generation=1, num_blocks=7))
    assert rig.core.ledger.find("r1", 2, LegKind.DECODE) is not None


def test_late_messages_for_requests_that_ended_are_harmless() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    rig.end("r1")
    for message in (
        PrefillFailed(request_id="r1", generation=1, reason="x"),
        RequestLost(request_id="r1", generation=1, reason="x"),
        ReserveRefused(request_id="r1", generation=1, reason="x", retry=True, free_blocks=1),
    ):
        assert rig.node("d0", message) == []
    assert rig.do(FirstToken(request_id="r1")) == []
    assert rig.do(Resume(request_id="r1", tokens=b"", num_output=0)) == []
    rig.at_rest()


def test_sampling_salt_and_priority_travel_with_every_placement() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    sampling = msgspec.structs.replace(GREEDY, seed=77, min_tokens=3)
    rig.arrive("r1", sampling=sampling, salt="tenant-a", priority=-2)
    reserve = sent(rig.effects, Reserve)[1]
    assert (reserve.sampling, reserve.salt, reserve.priority) == (sampling, "tenant-a", -2)
    prefill = sent(rig.reserved("r1"), Prefill)[1]
    assert (prefill.salt, prefill.priority) == ("tenant-a", -2)


def test_a_prefill_whose_end_was_never_heard_is_released_once_its_kv_has_long_arrived() -> None:
    rig = Rig(config(lease_s=3.0))
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    rig.started("r1")
    rig.received("r1")
    assert rig.request("r1").state is RequestState.DECODING
    assert rig.instance("p0").prefill_tokens == 0, "its KV is complete, so nothing is left to compute"
    rig.holding["d0"] = (Holding(request_id="r1", generation=1, num_blocks=7),)
    seen = rig.wait(5.0, ["p0", "d0"])
    assert {name for name, _ in sends(seen, Abort)} == {"p0"}
    assert not those(seen, NeedTokens)


def test_a_client_that_cancels_as_decode_finishes_still_has_decode_asked() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    assert sent(rig.end("r1", outcome="cancelled", by_node=True), Abort)[0] == "d0"


def test_room_is_what_decode_told_with_its_last_answer() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.arrive("r1")
    first = str(rig.request("r1").decode)
    rig.reserved("r1", free=3)
    for index in range(4):
        rig.arrive(f"n{index}")
        assert rig.request(f"n{index}").decode != first
