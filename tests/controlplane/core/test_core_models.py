"""Two models in one fleet: requests, drains, plans, looks and memories of one have nothing to do with the other's."""

from __future__ import annotations

import msgspec
from core_kit import MODEL, Rig, config, sends
from core_plans import apply, plan, refused

from controlplane.core.lifecycle import RequestState
from controlplane.core.policies.registry import POLICIES
from transfer.api import Plan
from transfer.terms import Role, Slo
from transfer.wire.messages import Migrate, Prefill, Reserve

OTHER = msgspec.structs.replace(MODEL, name="n", revision="r2", tokenizer="t2")


def two(**changes: object) -> Rig:
    """1P2D of each: p0, d0, d1 serve m; q0, e0, e1 serve n."""
    rig = Rig(config(**changes))
    rig.fleet("1P2D")
    for name, role in (("q0", Role.PREFILL), ("e0", Role.DECODE), ("e1", Role.DECODE)):
        rig.join(name, role, model=OTHER)
    return rig


def test_every_policy_places_a_request_among_its_own() -> None:
    for policy in POLICIES:
        rig = two(policy=policy)
        for index in range(8):
            rig.decoding(f"m{index}", 200, first=index)
            rig.decoding(f"n{index}", 200, first=index, model="n")
        placed = [*sends(rig.all_effects, Reserve), *sends(rig.all_effects, Prefill)]
        assert {(message.request_id[0], name) for name, message in placed} <= {
            *(("m", name) for name in ("p0", "d0", "d1")), *(("n", name) for name in ("q0", "e0", "e1")),
        }, policy  # fmt: skip
        assert len({name for name, _ in placed}) >= 4, policy


def test_a_model_that_is_not_served_or_full_holds_up_nobody_else() -> None:
    rig = two()
    rig.arrive("x", model="unknown")
    for name in ("e0", "e1"):
        rig.beat(name, free_blocks=0)
    for index in range(6):
        rig.arrive(f"n{index}", model="n")
    rig.decoding("m0")
    assert rig.request("m0").state is RequestState.DECODING
    assert {rig.request(f"n{index}").state for index in range(6)} == {RequestState.QUEUED}
    assert "unknown" in str(rig.request("x").waits_for)


def test_late_requests_of_one_model_take_nothing_from_the_others_memory() -> None:
    rig = two(policy="goodput", classes={"default": Slo(ttft_s=2.0, tpot_s=0.1)})
    for index in range(30):
        rig.decoding(f"n{index}", 2000, first=index, model="n")
        rig.end(f"n{index}")
    other, own = rig.core._desk.memory("n"), rig.core._desk.memory("m")
    assert other.timely_s.per_s(rig.now) > 0.0
    assert own.timely_s.per_s(rig.now) == 0.0
    assert (len(other.outputs), len(own.outputs)) == (30, 0)


def test_a_drain_moves_requests_to_their_own_kind_only() -> None:
    rig = two()
    for index in range(6):
        rig.decoding(f"n{index}", model="n")
    made = plan(rig, moves={"e0": "prefill"})
    assert made.predicted is not None
    assert isinstance(apply(rig, made.plan_id), Plan)
    targets = {name for name, message in sends(rig.all_effects, Reserve) if message.generation == 2}
    assert targets == {"e1"}
    for index in range(6):
        if rig.request(f"n{index}").move is not None:
            rig.reserved(f"n{index}")
    assert {message.target.instance_id for _, message in sends(rig.all_effects, Migrate)} == {"e1"}


def test_plans_leave_every_model_both_phases_and_name_their_instances() -> None:
    rig = two()
    assert "of n" in refused(rig, moves={"q0": "decode"}).message
    assert "of n" in refused(rig, moves={"e0": "prefill", "e1": "prefill"}).message
    assert refused(rig, "2P4D").message
    assert [one.instance_id for one in plan(rig, moves={"e0": "prefill", "d0": "prefill"}).steps] == ["d0", "e0"]


def test_the_autopilot_looks_at_each_model_by_itself() -> None:
    rig = two(autopilot="advise", autopilot_every_s=3.0)
    rig.wait(7.0, ["p0", "d0", "d1", "q0", "e0", "e1"])
    looks = rig.core.autopilot(rig.now).evaluations
    assert len(looks) >= 4
    assert {one.model for one in looks} == {"m", "n"}


def test_operators_see_which_model_misses() -> None:
    rig = two(classes={"default": Slo(ttft_s=2.0, tpot_s=0.1)})
    for index, (model, ttft_s) in enumerate((("m", 0.5), ("m", 0.5), ("n", 0.5), ("n", 3.0))):
        rig.decoding(f"r{index}", model=model)
        rig.end(f"r{index}", ttft_s=ttft_s)
    state, found = rig.core.state(rig.now), rig.core.readings(rig.now)
    own, other = state.by_model
    assert [(one.name, one.good, one.total, one.attainment) for one in state.by_model] == [
        ("m", 2, 2, 1.0), ("n", 1, 2, 0.5),
    ]  # fmt: skip
    assert own.recent_per_s + other.recent_per_s == state.goodput.per_s
    assert other.ttft_s.p90 is not None
    assert other.ttft_s.p90 > 2.0 > (own.ttft_s.p90 or 9.0)
    for one in state.by_model:
        lead = f"model.{one.name}."
        assert found[f"{lead}attainment"] == one.attainment
        assert found[f"{lead}goodput_per_s"] == one.recent_per_s
        assert found[f"{lead}ttft_p90_s"] == one.ttft_s.p90
    alone = Rig()
    alone.fleet("1P1D")
    assert alone.core.state(alone.now).by_model == ()
    assert not any(name.startswith("model.") for name in alone.core.readings(alone.now))
