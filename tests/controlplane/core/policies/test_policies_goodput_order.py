"""Policy `goodput` puts the line in order: deadlines, priorities, who is late, shares of tenants."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import Rig, config, sends, spec
from policy_kit import H800, answer, asked, d, p

from controlplane.core.events import Arrived
from controlplane.core.lifecycle import Request, new_request
from controlplane.core.policies.goodput import placed
from controlplane.core.policies.line import AGED_S, QUANTUM_TOKENS, order
from controlplane.core.policies.memory import Memory, Shares
from transfer.terms import Slo
from transfer.wire.messages import Reserve

CHEAP = msgspec.structs.replace(H800, name="cheap", price_per_hour=0.5)


def test_late_ones_earn_a_tenth_of_prefill_time_and_spend_it() -> None:
    memory = Memory()
    assert memory.allowance_s(10.0, 2) == pytest.approx(2.0)
    assert memory.allowance_s(10.0, 2) == pytest.approx(2.0)
    assert memory.allowance_s(1000.0, 2) == 5.0, "bounded"
    at = asked(p("p0"), d("d0"), tokens=8000, memory=memory)
    found = answer("goodput", p("p0"), d("d0"), tokens=8000)
    assert isinstance(found, list)
    placed(at, found[0])
    assert memory.late_s == 5.0, "who is in time pays nothing"
    at.late = True
    placed(at, found[0])
    assert memory.late_s == pytest.approx(5.0 - found[0].charge_prefill.prefill_us / 1e6)


def waiting(
    name: str, arrived_s: float, *, ttft_s: float | None = 2.0, priority: int = 0, tenant: str = ""
) -> Request:  # fmt: skip
    said = msgspec.structs.replace(spec(name, now=arrived_s, priority=priority), tenant=tenant)
    return new_request(said, 0, "default", None if ttft_s is None else Slo(ttft_s=ttft_s, tpot_s=0.1), 0)


def names(line: list[Request], now: float, memory: Memory | None = None) -> str:
    return "".join(one.request_id for one in order(line, now, memory or Memory()))


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    line = [
        waiting("a", 0.0, ttft_s=9.0), waiting("b", 1.0, ttft_s=2.0), waiting("c", 2.0, ttft_s=0.5),
        waiting("d", 0.5, ttft_s=None),
    ]  # fmt: skip
    assert names(line, 2.0) == "cbad"
    assert names([*line, waiting("z", 2.0, priority=-1)], 2.0) == "zcbad"


def test_who_is_late_goes_behind_but_not_for_ever() -> None:
    line = [waiting("a", 0.0), waiting("b", 5.0)]
    assert names(line, 1.0) == "ab"
    assert names(line, 6.0) == "ba"
    assert names([*line, waiting("c", 31.5)], 2.0 + AGED_S) == "acb"


def test_a_tenant_that_had_its_share_goes_behind_one_that_had_less() -> None:
    line = [waiting("a", 0.0, tenant="x"), waiting("b", 0.1, tenant="y")]
    memory = Memory()
    assert names(line, 0.5, memory) == "ab"
    memory.shares.serve("x", QUANTUM_TOKENS * 2)
    assert names(line, 0.5, memory) == "ba"
    memory.shares.serve("y", QUANTUM_TOKENS * 1.5)
    assert names(line, 0.5, memory) == "ab", "within a quantum the deadline decides"


def test_shares_are_bounded_in_number_and_in_credit() -> None:
    shares = Shares(most_credit=1000.0)
    for index in range(5000):
        shares.serve(f"t{index}", 1.0)
    assert len(shares) == 1024
    shares.serve("heavy", 1e6)
    assert shares.of("away") == pytest.approx(1e6 - 1000.0)


def test_two_tenants_share_a_busy_prefill_whatever_one_of_them_sends() -> None:
    rig = Rig(config(policy="goodput", colocate="never", classes={"default": Slo(ttft_s=60.0, tpot_s=1.0)}))
    rig.fleet("1P1D", num_blocks=60_000)
    served: list[str] = []

    def send(name: str, tenant: str) -> None:
        said = spec(name, 4000, now=rig.now, first=len(name))
        rig.do(Arrived(request=msgspec.structs.replace(said, tenant=tenant)))

    for index in range(40):
        send(f"x{index}", "x")
    for index in range(10):
        send(f"y{index}", "y")
    seen = list(sends(rig.all_effects, Reserve))
    for _ in range(20):
        for _, reserve in seen:
            served.append(reserve.request_id)
            rig.now += 0.2
            before = len(rig.all_effects)
            rig.reserved(reserve.request_id, free=50_000)
            rig.started(reserve.request_id)
            rig.done(reserve.request_id, cached=0)
            rig.received(reserve.request_id)
            seen = list(sends(rig.all_effects[before:], Reserve))
    others = [name[0] for name in served[2:18]]
    assert 6 <= others.count("y") <= 10, served


# --- arithmetic -------------------------------------------------------------------------------------------------
