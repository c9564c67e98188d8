"""The autopilot on simulated instances, with real queues, handoffs, migrations and role switches: what
benchmarks/bench_autopilot.py shows, and when it must hold."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from controlplane.core.events import AutopilotWanted
from controlplane.sim.driver import Simulation
from controlplane.sim.spec import Fault
from transfer.autopilot import PinRequest


def _bench() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "bench_autopilot.py"
    spec = importlib.util.spec_from_file_location("bench_autopilot", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bench_autopilot"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = _bench()
LONG_PROMPTS = (60.0, bench.LONG_PROMPTS, "prefill")
LONG_ANSWERS = (120.0, bench.Mix(5.0, 200, 1000), "decode")


def changing() -> list[object]:
    """From prefill-heavy to decode-heavy after a minute."""
    return bench.trace(bench.Case("short", (4, 2), (LONG_PROMPTS, LONG_ANSWERS)), 0)


def steered(*faults: Fault, pin: PinRequest | None = None) -> tuple[Simulation, list[tuple[float, str]]]:
    """4P2D under the changing load, at its end."""
    simulation, moves = bench.prepared((4, 2), changing(), "auto", faults=faults)
    if pin is not None:
        simulation.world.heap.at(1.0, simulation.world.inbox.append, AutopilotWanted(ask_id="", pin=pin))
    simulation.run()
    return simulation, moves


def lines(simulation: Simulation, code: str) -> list[str]:
    """Of the last looks, newest first."""
    looks = simulation.core.autopilot(simulation.world.now).evaluations
    return [one.line for one in looks if one.code == code]


# --- bars -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_flat_load_for_a_day_makes_no_move() -> None:
    """dynamo#9294: no oscillation between 2 and 1."""
    found = bench.measure(bench.BY_NAME["flat"])
    assert (found.moves, found.missed) == (0, [])


@pytest.mark.slow
def test_a_flat_load_near_the_limit_makes_no_move_in_an_hour() -> None:
    found = bench.measure(bench.BY_NAME["busy"])
    assert (found.moves, found.missed) == (0, [])


@pytest.mark.slow
def test_a_step_is_followed_within_two_minutes_at_little_loss() -> None:
    """The splits are those that are best for each part."""
    found = bench.measure(bench.BY_NAME["step"], fixed=[(5, 1), (3, 3), (2, 4)])
    assert found.missed == []
    assert found.moves >= 2
    assert found.wrong == 0
    assert found.settled_s is not None
    assert found.settled_s <= 120.0
    assert found.of_ideal >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_swing_costs_no_more_than_the_best_split_that_stays() -> None:
    found = bench.measure(bench.BY_NAME["swing"], fixed=[(3, 3), (2, 4)])
    assert found.missed == []
    assert found.wrong == 0
    assert found.first_s is not None
    assert found.first_s <= 15.0
    assert found.of_ideal >= 0.97


# --- when it must hold ------------------------------------------------------------------------------------------


def test_no_traffic_holds_and_keeps_the_split() -> None:
    """dynamo#3131, dynamo#7067: a minute of load, ten of nothing, and one request so that the time passes."""
    busy = (60.0, bench.Mix(1.0, 500, 20), "")
    requests = bench.trace(bench.Case("ends", (3, 1), (busy, (600.0, bench.Mix(1e-9, 1, 1), ""), busy)), 0)
    simulation, moves = bench.prepared((3, 1), requests[:-40], "auto")
    result = simulation.run()
    assert moves == []
    assert result.attainment == 1.0
    assert any("0 requests in the last 300 s" in line for line in lines(simulation, "quiet"))
    assert simulation.core.state(simulation.world.now).xpyd == "3P1D"


@pytest.mark.slow
def test_without_heartbeats_it_holds_and_goes_on_when_it_sees() -> None:
    """dynamo#14575: nobody is heard for the minute in which the load changes."""
    simulation, moves = steered(Fault(at_s=45.0, kind="mute", instance="", duration_s=65.0))
    assert moves
    assert min(at_s for at_s, _ in moves) > 110.0
    assert {role for _, role in moves} == {"decode"}
    assert simulation.core.metrics()["autopilot_moves_total"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("straggler", ["d0", "p0"])
def test_one_straggler_at_3x_is_no_reason_to_flap(straggler: str) -> None:
    load = (240.0, bench.Mix(1.6, 1500, 300), "")
    requests = bench.trace(bench.Case("slow", (3, 3), (load,)), 0)
    fault = Fault(at_s=40.0, kind="slow", instance=straggler, duration_s=120.0, factor=3.0)
    simulation, moves = bench.prepared((3, 3), requests, "auto", faults=(fault,))
    result = simulation.run()
    assert len(moves) <= 1, moves
    assert all(straggler != step.instance_id for plan in simulation.core.plans() for step in plan.steps)
    assert result.attainment > 0.9


@pytest.mark.slow
def test_a_pinned_split_is_held_and_it_says_what_it_would_do() -> None:
    """dynamo#4420: an operator's setting is neither ignored nor undone."""
    simulation, moves = steered(pin=PinRequest(subject="split", actor="alice", why="a test"))
    assert moves == []
    held = lines(simulation, "pinned")
    assert held
    assert "it would move p" in held[0]
    assert "; the split is pinned by alice (a test)" in held[0]
