"""Our policy offered twice what decode can pace: goodput stays near the capacity, and who is late does not starve."""

from __future__ import annotations

import random
from functools import cache
from typing import Literal

from sim_kit import MODEL, config, request
from sim_kit import run as simulated

from controlplane.core.config import CoreConfig
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.spec import SimResult
from transfer.terms import Slo
from transfer.traces.request import TraceRequest

SLO = Slo(ttft_s=1.0, tpot_s=0.02)
BLOCK = 512


def offered(per_s: float, span_s: float) -> list[TraceRequest]:
    rng, at_s, made = random.Random(5), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s)) < span_s:
        made.append(request(at_s, prompt=1000, output=rng.randrange(40, 400)))
    return made


@cache
def served(reject: Literal["hopeless", "objective"]) -> SimResult:
    core = CoreConfig(classes={"default": SLO}, policy="goodput", early_reject=reject)
    made = config(core=core, block_size=BLOCK, max_context=8192, timeout_s=300.0, drain_s=300.0)
    return simulated(parse_fleet("1xH800:prefill,1xH20:decode", MODEL, BLOCK), offered(30.0, 10.0), made)[1]


def test_decode_is_not_filled_past_its_pace_where_hopeless_requests_are_refused() -> None:
    result = served("objective")
    paces = [record.tpot_s for record in result.records if record.tpot_s is not None]
    assert sum(pace > SLO.tpot_s for pace in paces) < 0.05 * len(paces)
    assert result.good > 0.95 * (result.counted - result.rejected)
    assert result.good > 0.4 * result.counted


def test_goodput_stays_near_the_capacity_where_nobody_is_refused() -> None:
    refusing, result = served("objective"), served("hopeless")
    assert result.good > 0.85 * refusing.good
    assert result.rejected == 0
    assert all(record.outcome == "ok" for record in result.records), "who is late is served in the end"
