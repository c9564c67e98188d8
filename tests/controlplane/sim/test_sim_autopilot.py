"""The autopilot on simulated instances, with real queues, handoffs, migrations and role switches."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import Simulation
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.spec import SimConfig, SimResult
from nodes.shapes import shape
from transfer.terms import Slo
from transfer.traces.request import TraceRequest

MODEL, BLOCK = "llama-3.1-8b", 64
Mix = tuple[float, int, int]
"""Requests a second, and the mean tokens of prompts and outputs, each varied by a factor of up to 2 both ways."""


def trace(script: Callable[[float], Mix], seconds: float) -> list[TraceRequest]:
    rng, at_s, made = random.Random(0), 0.0, []

    def vary(mean: int) -> int:
        return max(1, round(mean * 2 ** rng.uniform(-1, 1) / 1.082))

    while True:
        rate, prompt, output = script(at_s)
        at_s += rng.expovariate(rate)
        if at_s >= seconds:
            return made
        made.append(TraceRequest(at_s=at_s, prompt_tokens=vary(prompt), output_tokens=vary(output)))


def simulated(fleet: str, requests: list[TraceRequest], mode: str) -> tuple[Simulation, SimResult]:
    classes: dict[str, Slo | None] = {"default": Slo(ttft_s=2.0, tpot_s=0.05)}
    config = SimConfig(
        core=CoreConfig(classes=classes, autopilot=mode),  # type: ignore[arg-type]
        model=MODEL, token_bytes=shape(MODEL).kv_token_bytes, block_size=BLOCK,
    )  # fmt: skip
    simulation = Simulation(parse_fleet(fleet, MODEL, BLOCK), requests, config)
    return simulation, simulation.run()


def good(result: SimResult, since_s: float, until_s: float) -> int:
    return sum(one.good is True and since_s < one.arrived_at <= until_s for one in result.records)


@pytest.mark.slow
def test_a_step_to_long_answers_is_followed_at_little_loss() -> None:
    requests = trace(lambda now: (12.0, 8000, 150) if now < 60 else (24.0, 1000, 1000), 260)
    simulation, result = simulated("6xH800@1:prefill,2xH800@1:decode", requests, "auto")
    plans = simulation.core.plans()
    assert [(one.before, one.status) for one in plans] == [("6P2D", "done")]
    assert result.num_moves == len(plans[0].steps) >= 2
    score = simulation.core.autopilot(260.0).score
    assert score.num == 1
    assert abs(score.moves[0].measured - score.moves[0].predicted) < 0.1
    _, ideal = simulated("2xH800@1:prefill,6xH800@1:decode", requests, "off")
    assert good(result, 60, 260) >= 0.95 * good(ideal, 60, 260)
    assert good(result, 0, 60) == 0 or good(result, 0, 60) >= 0.97 * sum(one.at_s <= 60 for one in requests)


@pytest.mark.slow
def test_flat_load_for_an_hour_makes_no_move_in_the_simulator() -> None:
    simulation, result = simulated("2xH800@1:prefill,1xH800@1:decode", trace(lambda _: (1.0, 4000, 200), 3600), "auto")
    assert result.num_moves == 0
    assert simulation.core.metrics()["autopilot_moves_total"] == 0
    assert simulation.core.metrics()["autopilot_looks_total"] > 1000
    assert result.attainment > 0.99
