"""Our policy by its properties: dominance, monotony, harm, price, late binding, deadlines, fairness, rejection."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from core_kit import Rig, config, those
from policy_kit import H20, H800, SLO, answer, asked, chosen, d, k, m, p, pair

from controlplane.core.admission import Rejection
from controlplane.core.events import Fail
from controlplane.core.placement import Block, Blocked, Candidate
from controlplane.core.policies.line import takes
from controlplane.core.policies.memory import Memory
from controlplane.core.policies.odds import within
from controlplane.core.policies.protocol import Running, Situation
from controlplane.core.policies.registry import POLICIES
from transfer.said import say
from transfer.terms import Slo

CHEAP = msgspec.structs.replace(H800, name="cheap", price_per_hour=0.5)


def ranked(*instances: object, **question: object) -> list[Candidate]:
    found = answer("goodput", *instances, **question)  # type: ignore[arg-type]
    assert isinstance(found, list), found
    return found


def test_nobody_is_taken_who_is_predicted_worse_in_every_respect_at_equal_price() -> None:
    rng = random.Random(3)
    for _ in range(200):
        fleet = [p(f"p{i}", rows=rng.randrange(2), queued=rng.randrange(0, 3000)) for i in range(3)]
        fleet += [d(f"d{i}", rows=rng.randrange(80), context=rng.randrange(100_000)) for i in range(3)]
        found = answer("goodput", *fleet, tokens=rng.randrange(50, 6000))
        if not isinstance(found, list):
            continue
        best = found[0]
        for other in found[1:]:
            if other.remote == best.remote:
                assert other.ttft_s > best.ttft_s - 1e-9 or other.tpot_s > best.tpot_s - 1e-9


def test_more_load_never_attracts() -> None:
    for rows in range(0, 200, 20):
        fleet = (p("p0"), d("d0", rows=20, context=20_000), d("d1", rows=rows, context=rows * 1000))
        assert chosen("goodput", *fleet) == ("p0", "d1" if rows < 20 else "d0")
    for queued in (0, 500, 1500, 2500):
        fleet = (p("p0", rows=1, queued=1000), p("p1", rows=1, queued=queued), d("d0"))
        assert chosen("goodput", *fleet)[0] == ("p1" if queued < 1000 else "p0")


def test_cheap_hardware_that_keeps_the_objective_goes_first_and_dear_is_kept() -> None:
    dear = msgspec.structs.replace(H800, price_per_hour=4.0)
    fleet = (p("p0"), d("d0", hardware=dear), d("d1", hardware=CHEAP, rows=1, context=500))
    assert chosen("goodput", *fleet)[1] == "d1"
    slow = d("d1", hardware=CHEAP, rows=150, context=500_000)
    assert chosen("goodput", p("p0"), d("d0", hardware=dear), slow, slo=Slo(ttft_s=2.0, tpot_s=0.02))[1] == "d0"


def test_a_decode_where_others_would_be_pushed_past_their_pace_is_left_alone() -> None:
    """Both are within this one's objective; d0 runs rows of a stricter class near their limit."""
    rows = 60
    strict = d("d0", rows=rows, context=60_000)
    limit = strict.profile.decode_step_s(rows, 60_000) * 1.05
    strict.paces = {round(limit * 1e6): rows}
    slower = d("d1", rows=90, context=90_000)
    loose = Slo(ttft_s=2.0, tpot_s=0.2)
    slower.paces = {200_000: 90}
    found = ranked(p("p0"), strict, slower, slo=loose)
    assert found[0].decode.id == "d1"
    slow = next(one.reason for one in found if one.decode.id == "d0" and one.remote)
    assert [said.code for said in slow] == ["place.good", "place.harm"]


def test_it_waits_rather_than_break_a_full_fleet_while_it_still_can_be_good() -> None:
    one = d("d0", rows=100, context=100_000)
    tight = one.profile.decode_step_s(101, 101_000) * 1.01
    one.paces = {round(tight * 1e6): 100}
    found = answer("goodput", p("p0"), one, slo=Slo(ttft_s=5.0, tpot_s=tight))
    assert isinstance(found, Blocked)
    assert found.block is Block.ROOM
    assert "others" in str(found.said)


def test_prefill_is_bound_late() -> None:
    busy = [p("p0", rows=2, queued=20_000), p("p1", rows=2, queued=9_000)]
    found = answer("goodput", *busy, d("d0"), colocate="never")
    assert isinstance(found, Blocked)
    assert found.block is Block.BACKLOG
    assert chosen("goodput", busy[0], p("p1", rows=1, queued=9_000), d("d0"), colocate="never")[0] == "p1"
    many_small = p("p1", rows=9, queued=2_000)
    assert chosen("goodput", busy[0], many_small, d("d0"), colocate="never")[0] == "p1"


def test_a_quick_instance_that_is_busy_is_worth_waiting_for_while_the_deadline_allows() -> None:
    quick, slow = p("p0", rows=2, queued=5_000), p("p1", hardware=H20)
    question = {"tokens": 16_000, "slo": Slo(ttft_s=2.5, tpot_s=0.2), "colocate": "never"}
    found = answer("goodput", quick, slow, d("d0"), **question)
    assert isinstance(found, Blocked)
    assert found.block is Block.BETTER_LATER
    assert "p0 is worth waiting for" in str(found.said)
    assert found.awaits is quick
    assert 0.0 < found.again_s <= 0.5, "and tried again before, as its chance falls"
    assert not takes(quick, 0.0)
    assert takes(p("p0", rows=1, queued=5_000), 0.0)
    assert chosen("goodput", quick, slow, d("d0"), tokens=1000, colocate="never")[0] == "p1"


def test_decode_computes_the_prompt_where_that_is_what_keeps_the_deadline() -> None:
    busy = p("p0", rows=2, queued=60_000)
    assert chosen("goodput", busy, d("d0")) == (None, "d0")
    assert chosen("goodput", p("p0"), d("d0")) == ("p0", "d0")
    crowd = d("d0", rows=100, context=100_000)
    pace_s = crowd.profile.decode_step_s(100, 100_000) * 1.2
    crowd.paces = {round(pace_s * 1e6): 100}
    assert isinstance(answer("goodput", busy, crowd, slo=Slo(ttft_s=4.0, tpot_s=pace_s)), Blocked), "their pace counts"


def test_an_objective_for_the_end_counts_as_one_for_the_first_token_at_the_pace_predicted() -> None:
    """100 tokens at d0's pace take so long that 0.3 s are left for the prompt, which is enough at p0 only."""
    end_s = 0.3 + 100 * d("d0").profile.decode_step_s(1, 8_000)
    slo = Slo(ttft_s=10.0, tpot_s=0.5, e2e_s=end_s)
    question = {"tokens": 8_000, "colocate": "never", "early_reject": "objective"}
    slow, busy = p("p1", hardware=H20), p("p0", rows=1, queued=50_000)
    assert isinstance(answer("goodput", slow, busy, d("d0"), slo=slo, **question), Rejection)
    assert chosen("goodput", slow, busy, d("d0"), slo=Slo(ttft_s=10.0, tpot_s=0.5), **question)[0] == "p1"
    assert chosen("goodput", slow, p("p0"), d("d0"), slo=slo, **question)[0] == "p0"
    never = answer("goodput", p("p0"), d("d0"), slo=Slo(ttft_s=10.0, tpot_s=0.5, e2e_s=end_s - 0.3), **question)
    assert isinstance(never, Rejection)
    assert "the rest of the answer alone takes longer than its objective" in str(never.said)


def test_stolen_time_counts_against_computing_more_on_the_same_decode() -> None:
    memory = Memory()
    for _ in range(20):
        memory.steal("d0", 0.2, 0.0)
    assert memory.stolen_share("d0", 0.0) == pytest.approx(0.55, rel=0.02)
    assert memory.stolen_share("d0", 5.0) == pytest.approx(0.28, rel=0.02)
    busy = p("p0", rows=2, queued=60_000)
    assert chosen("goodput", busy, d("d0"), d("d1"), memory=memory) == (None, "d1")


def test_a_prefix_wins_while_its_instance_is_not_too_busy() -> None:
    assert chosen("goodput", p("p0"), p("p1"), d("d0"), tokens=4000, held={"p1": 3200})[0] == "p1"
    assert (
        chosen("goodput", p("p0"), p("p1", rows=1, queued=25_000), d("d0"), tokens=4000, held={"p1": 3200})[0] == "p0"
    )
    fetched = ranked(p("p0"), d("d0"), k("k0"), tokens=4000, held={"k0": 3984})[0]
    assert fetched.pool is not None


def test_an_instance_that_is_short_of_kv_loses() -> None:
    short = d("d0", num_blocks=120, blocks=0)  # 1000 + 1200 tokens are 138 blocks
    assert chosen("goodput", p("p0"), short, d("d1", rows=30, context=30_000), output=1200.0)[1] == "d1"


def test_decode_near_its_memory_is_asked_how_far_it_will_grow() -> None:
    """150 rows of 1000 tokens now; what they still make decides."""
    memory, full = Memory(), d("d0", rows=150, context=150_000, num_blocks=10_000, blocks=9000, tpot_s=0.5)
    for _ in range(100):
        memory.finished(12)
    rows = [Running(f"r{i}", 950, 10, 2000, True) for i in range(150)]
    loose = Slo(ttft_s=2.0, tpot_s=0.5)
    assert chosen("goodput", p("p0"), full, memory=memory, running=lambda one: rows, slo=loose)[1] == "d0"
    growing = Memory()
    for _ in range(100):
        growing.finished(900)
    found = answer("goodput", p("p0"), full, memory=growing, running=lambda one: rows, slo=loose)
    assert isinstance(found, Blocked)
    assert "peak" in str(found.said)


def test_prompts_stay_off_a_decode_whose_memory_is_what_others_wait_for() -> None:
    """Whoever runs there would hold it for longer. The same queue and rows, with room and without."""
    busy = p("p0", rows=2, queued=30_000)  # 1.2 s
    memory = Memory()
    memory.counts.add(10.0, 0.0)
    memory.spent.add(7.0, 0.0)
    memory.sizes.add(20_000.0, 0.0)
    loose = Slo(ttft_s=2.0, tpot_s=0.5)
    question = {"tokens": 2000, "slo": loose, "memory": memory}
    roomy = d("d0", rows=60, context=60_000, tpot_s=0.5)
    assert chosen("goodput", busy, roomy, **question) == (None, "d0")
    full = d("d0", rows=60, context=60_000, tpot_s=0.5, num_blocks=10_000, free=600)
    assert isinstance(answer("goodput", busy, full, **question), Blocked)


# --- rejection --------------------------------------------------------------------------------------------------


def test_rejection_is_early_only_in_objective_mode_and_only_beyond_the_error_bar() -> None:
    def at(queued: int, mode: str) -> object:
        return answer("goodput", p("p0", rows=2, queued=queued), d("d0"), colocate="never", early_reject=mode)

    assert isinstance(at(80_000, "objective"), Rejection)  # 3.2 s of queue for 2 s
    assert isinstance(at(80_000, "hopeless"), Blocked)
    assert isinstance(at(80_000, "never"), Blocked)
    for queued in (49_000, 51_000, 53_000):  # 1.96 to 2.12 s, of which 10 % may be wrong twice
        assert isinstance(at(queued, "objective"), Blocked), queued
    assert isinstance(at(65_000, "objective"), Rejection)


def test_a_request_that_was_placed_before_is_not_turned_away() -> None:
    question = {"colocate": "never", "early_reject": "objective", "resumed": True}
    found = answer("goodput", p("p0", queued=80_000, rows=2), d("d0"), **question)
    assert isinstance(found, Blocked)


def test_rejections_say_when_to_come_back() -> None:
    found = answer("goodput", p("p0", rows=2, queued=200_000), d("d0"), colocate="never", early_reject="objective")
    assert isinstance(found, Rejection)
    assert found.retry_after_s >= 6.0
    assert "more or less" in str(found.said)


# --- who is late ------------------------------------------------------------------------------------------------


def test_a_late_request_takes_what_nobody_wants() -> None:
    assert chosen("goodput", p("p0"), d("d0"), waited_s=9.0)[0] == "p0", "idle: served at once"
    wanted = Memory()
    for _ in range(5):
        wanted.counts.add(10.0, 0.0)
        wanted.spent.add(9.0, 0.0)  # others are served just in time
    found = answer("goodput", p("p0"), d("d0"), waited_s=9.0, memory=wanted)
    assert isinstance(found, Blocked)
    assert found.block is Block.BETTER_LATER
    wanted.late_s = 0.5
    assert isinstance(answer("goodput", p("p0"), d("d0"), waited_s=9.0, memory=wanted), list), "its turn has come"


def test_who_will_be_turned_away_takes_no_time_that_others_want() -> None:
    """It has a small chance still, and others are served just in time."""
    wanted = Memory()
    wanted.late_s = 0.5
    for _ in range(5):
        wanted.counts.add(10.0, 0.0)
        wanted.spent.add(9.0, 0.0)
    question = {"tokens": 8_000, "colocate": "never", "memory": wanted, "slo": Slo(ttft_s=2.0, tpot_s=0.05)}
    fleet = (p("p0", rows=1, queued=42_000), d("d0"))
    found = answer("goodput", *fleet, early_reject="objective", **question)
    assert isinstance(found, Blocked)
    assert "so others go first" in str(found.said)
    assert isinstance(answer("goodput", *fleet, early_reject="never", **question), list), "its turn has come"


def test_odds_are_those_of_the_normal_distribution() -> None:
    assert within(2.0, 2.0, 0.1) == pytest.approx(0.5)
    assert within(2.0, 1.8, 0.1) == pytest.approx(0.97725, abs=1e-4)
    assert within(2.0, 2.2, 0.1) == pytest.approx(0.02275, abs=1e-4)
    assert (within(2.0, 1.0, 0.0), within(1.0, 2.0, 0.0), within(9.0, 1.0, 0.1)) == (1.0, 0.0, 1.0)


def test_a_measured_error_widens_the_bar() -> None:
    sure, unsure = p("p0", rows=2, queued=60_000), p("p0", rows=2, queued=60_000)
    for one, error in ((sure, 0.02), (unsure, 0.4)):
        assert one.latency is not None
        one.latency = msgspec.structs.replace(one.latency, error=error)
    question = {"colocate": "never", "early_reject": "objective"}
    assert isinstance(answer("goodput", sure, d("d0"), **question), Rejection)
    assert isinstance(answer("goodput", unsure, d("d0"), **question), Blocked)


def test_mixed_instances_compete_by_prediction() -> None:
    assert chosen("goodput", p("p0", rows=2, queued=60_000), d("d0", rows=100, context=200_000), m("m0")) == (
        None,
        "m0",
    )


def test_rejected_in_objective_mode_end_to_end() -> None:
    rig = Rig(config(early_reject="objective", colocate="never", classes={"default": Slo(ttft_s=0.05, tpot_s=1.0)}))
    rig.fleet("1P1D", num_blocks=10_000)
    rig.beat("p0", speed=10.0)
    (fail,) = those(rig.arrive("r1", 4000), Fail)
    assert (fail.status, fail.kind) == (429, "overloaded")
    assert fail.retry_after_s is not None
    assert SLO.ttft_s == 2.0
    assert pair(ranked(p("p0"), d("d0"))[0]) == ("p0", "d0")


def test_who_awaits_an_instance_is_left_alone_until_that_takes_work_or_its_time_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(config(policy="goodput"))
    rig.fleet("1P1D", num_blocks=10_000)
    tries: list[float] = []
    open_now: list[bool] = []

    def place(at: Situation) -> Blocked:
        tries.append(at.now)
        return Blocked(
            Block.BETTER_LATER, say("text", text="p0 is worth waiting for"), at.now + 0.35, at.group.prefills[0]
        )

    policy = dataclasses.replace(POLICIES["goodput"], place=place, takes=lambda one, now: bool(open_now))
    monkeypatch.setitem(POLICIES, "goodput", policy)
    rig.arrive("r1", 4000)
    rig.tick(0.1)
    assert len(tries) == 1
    open_now.append(True)
    rig.tick(0.1)
    assert len(tries) == 2, "it takes work"
    open_now.clear()
    for _ in range(3):
        rig.tick(0.1)
    assert len(tries) == 2
    rig.tick(0.1)
    assert len(tries) == 3, "its time has come"
    rig.tick(0.1)
    assert len(tries) == 3
    rig.instance("p0").machine.fire("cordon")
    rig.tick(0.1)
    assert len(tries) == 4, "it will not take work"


def test_only_paces_near_their_limit_tell_how_wrong_predictions_are() -> None:
    memory = Memory()
    for _ in range(100):
        memory.paced(0.02, 0.04, 0.05, 1.0)
    assert memory.pace_error(1.0) is None
    for _ in range(100):
        memory.paced(0.045, 0.0468, 0.05, 1.0)
    assert memory.pace_error(1.0) == pytest.approx(0.04, rel=0.01)


def test_pairs_that_are_left_out_would_not_have_been_chosen() -> None:
    """With nothing to explain most pairs are not looked at: the answer is that of looking at them all."""
    rng = random.Random(5)
    for number in range(400):
        prefills = [
            (f"p{i}", rng.randrange(3), rng.choice((0, 500, 2000, 8000)), rng.randrange(4), rng.choice((H800, CHEAP)))
            for i in range(6)
        ]
        decodes = [(f"d{i}", rng.randrange(60), rng.randrange(90_000), rng.randrange(4)) for i in range(4)]
        held = {name: rng.choice((0, 0, 256, 4096)) for name, *_ in prefills}
        slo = Slo(ttft_s=rng.choice((0.2, 0.4, 2.0)), tpot_s=0.03, e2e_s=rng.choice((None, 5.0)))
        waited_s, tokens, want = rng.choice((0.0, 0.1, 3.0)), rng.randrange(500, 9000), rng.random()
        found = []
        for num_explained in (1, 1000):
            memory = Memory()
            memory.counts.add(20.0, 0.0)
            memory.spent.add(20.0 * want, 0.0)
            memory.sizes.add(20_000.0, 0.0)
            memory.late_s = number % 3
            at = asked(
                *(p(name, rows=rows, queued=rows * queued, picked=turn, hardware=hardware)
                  for name, rows, queued, turn, hardware in prefills),
                *(d(name, rows=rows, context=context, picked=turn) for name, rows, context, turn in decodes),
                tokens=tokens, slo=slo, waited_s=waited_s, held=held, memory=memory, num_explained=num_explained,
                early_reject=("never", "objective")[number % 2], seed=number,
            )  # fmt: skip
            said = POLICIES["goodput"].place(at)
            awaits = said.awaits.id if isinstance(said, Blocked) and said.awaits is not None else ""
            what = pair(said[0]) if isinstance(said, list) and said else said[:3]
            found.append((what, awaits, at.late, at.spare))
        assert found[0] == found[1]
