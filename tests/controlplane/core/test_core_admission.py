"""Who waits, in which order, and who is refused early."""

from __future__ import annotations

from core_kit import Rig, Slo, config, ended, only, sends, spec, those

from controlplane.core.events import Arrived, Fail, Finished
from controlplane.core.lifecycle import RequestState
from transfer.wire.messages import Abort, Reserve


def full(rig: Rig) -> None:
    """No decode instance has a free block."""
    rig.beat("d0", free_blocks=0)


def test_a_full_line_answers_429_with_retry_after() -> None:
    """smg#2247: before any work starts, with the time to come back."""
    rig = Rig(config(max_queue=2))
    rig.fleet("1P1D")
    full(rig)
    for index in range(2):
        rig.arrive(f"r{index}")
    fail = only(rig.arrive("r2"), Fail)
    assert (fail.status, fail.kind) == (429, "overloaded")
    assert fail.retry_after_s is not None
    assert fail.retry_after_s >= 1.0
    record = only(rig.end("r2", outcome="rejected", by_node=False, ttft_s=None, output_tokens=0), Finished).record
    assert (record.outcome, record.good) == ("rejected", False)
    assert rig.core.in_flight == 2


def test_hopeless_requests_are_rejected_by_prediction() -> None:
    """Mooncake's early rejection, by default only against what the client can wait for."""
    rig = Rig(config(colocate="never"))  # or decode would compute it
    rig.fleet("1P1D", num_blocks=10_000)
    rig.beat("p0", speed=90.0)
    fail = only(rig.arrive("r1", 50_000, timeout_s=20.0), Fail)
    assert fail.status == 429
    assert "later than the 20 s" in fail.message
    assert not sends(rig.effects, Reserve)
    assert not those(rig.arrive("r2", 50_000, timeout_s=2000.0), Fail)


def test_a_long_line_in_front_is_not_mistaken_for_long_requests() -> None:
    """The predicted wait counts how long requests hold their place, not how long they waited for it."""
    rig = Rig()
    rig.fleet("1P1D")
    for index in range(30):
        rig.decoding(f"x{index}")
        rig.now += 0.5
        rig.end(f"x{index}", e2e_s=60.0)
    rig.decoding("busy")
    full(rig)
    for index in range(50):
        assert not those(rig.arrive(f"r{index}", timeout_s=60.0), Fail), index
    rejected = [index for index in range(50, 150) if those(rig.arrive(f"r{index}", timeout_s=60.0), Fail)]
    assert rejected == list(range(121, 150)), "120 requests of half a second each are ahead"


def test_objectives_reject_early_only_when_asked_to() -> None:
    for mode, rejected in (("never", False), ("hopeless", False), ("objective", True)):
        rig = Rig(config(early_reject=mode, classes={"default": Slo(ttft_s=0.05, tpot_s=1.0)}))
        rig.fleet("1P1D", num_blocks=10_000)
        rig.beat("p0", speed=10.0)
        assert bool(those(rig.arrive("r1", 4000), Fail)) is rejected, mode


def test_operators_see_how_many_of_those_that_wait_are_past_their_objective_and_why() -> None:
    for mode in ("hopeless", "objective"):
        rig = Rig(config(early_reject=mode, classes={"default": Slo(ttft_s=1.0, tpot_s=1.0), "bulk": None}))
        rig.fleet("1P1D")
        full(rig)
        for name, traffic_class in (("late", "default"), ("free", "bulk")):
            rig.arrive(name, traffic_class=traffic_class)
        rig.now += 1.5
        rig.arrive("timely")
        state, told = rig.core.state(rig.now), rig.core.metrics()
        assert (state.queue_depth, state.queue_late) == (3, 1)
        assert told["requests_waiting_past_objective"] == 1.0
        assert state.notice == "", "no room on decode is what they wait for"
        rig.core._desk.memory("m").kept_s = rig.now
        state = rig.core.state(rig.now + 9.0)
        assert ("that time is kept" in state.notice) is (mode == "hopeless")
        assert state.notice == ("" if state.notice_said is None else str(state.notice_said))
        assert rig.core.state(rig.now + 11.0).notice_said is None, "it is so no more"


def test_priority_then_arrival_and_resumed_ones_keep_their_turn() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    full(rig)
    for name, priority in (("b", 0), ("c", 0), ("a", -1), ("d", 5)):
        rig.now += 0.01
        rig.arrive(name, priority=priority)
    served = []
    for _ in range(4):
        effects = rig.beat("d0", free_blocks=20)
        ((_, reserve),) = sends(effects, Reserve)
        served.append(reserve.request_id)
        rig.reserved(reserve.request_id, free=0)
    assert served == ["a", "b", "c", "d"]


def test_a_small_request_may_overtake_but_not_for_ever() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.beat("d0", free_blocks=20)
    rig.arrive("large", 5000)
    effects = rig.arrive("small", 50)
    assert [message.request_id for _, message in sends(effects, Reserve)] == ["small"]
    rig.now += 40.0
    assert not sends(rig.arrive("late", 50), Reserve), "one that starves for room is not overtaken any more"
    rig.beat("d0", free_blocks=900)
    assert rig.request("large").state is RequestState.RESERVING


def test_what_can_never_fit_is_a_400_at_once() -> None:
    rig = Rig()
    rig.fleet("1P1D", num_blocks=10)
    fail = only(rig.arrive("r1", 5000), Fail)
    assert (fail.status, fail.kind) == (400, "invalid")
    assert "313 KV blocks" in fail.message
    assert "has 10" in fail.message


def test_a_request_that_finds_no_place_in_time_is_unavailable() -> None:
    rig = Rig(config(max_queue_s=5.0))
    rig.fleet("1P1D")
    full(rig)
    rig.arrive("r1")
    seen = []
    for _ in range(70):
        seen += rig.tick()
        if round(rig.now * 10) % 10 == 0:
            seen += rig.beat("d0", free_blocks=0) + rig.beat("p0")
    fail = only(seen, Fail)
    assert (fail.status, fail.kind) == (503, "unavailable")
    assert "free KV blocks" in fail.message


def test_a_cancel_in_line_leaves_nothing() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    full(rig)
    rig.arrive("r1")
    effects = rig.end("r1", outcome="cancelled", by_node=False)
    assert not sends(effects, Abort)
    rig.beat("d0")
    assert not sends(rig.effects, Reserve)
    rig.at_rest()


def test_a_thousand_at_once_all_end() -> None:
    """tt-inference-server#4081: 990 of 1000 finish elsewhere, the rest never."""
    rig = Rig()
    rig.fleet("2P2D", num_blocks=200)
    for index in range(1000):
        rig.do(Arrived(request=spec(f"r{index}", 100, now=rig.now, first=index % 50 + 1)))
    live: list[str] = []
    for _ in range(4000):
        effects, rig.all_effects = rig.all_effects, []
        for name, reserve in sends(effects, Reserve):
            live.append(reserve.request_id)
            rig.reserved(reserve.request_id, free=rig.instance(name).free_blocks - 7)
        for name in live:
            rig.done(name) if rig.request(name).prefill else None
            rig.received(name)
            rig.do(ended(name))
        live = []
        if not rig.core.in_flight:
            break
    assert rig.core.in_flight == 0
    rig.at_rest()
