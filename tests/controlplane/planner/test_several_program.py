"""The planner told of several models, as a program: its JSON, its report for a person, its refusals."""

from __future__ import annotations

import io

import pytest
from planner_kit import printed
from rich.console import Console

from controlplane.planner import cli as program
from controlplane.planner.division_report import DivisionPlan
from controlplane.planner.division_view import show_division

SMALL, LARGE = "llama-3.1-8b rate=6 slo=ttft=1,tpot=0.04", "qwen3-14b rate=2 now=1xH20:mixed"
ARGUMENTS = [
    "--fleet", "2xH800,2xH20", "--model", SMALL, "--model", LARGE, "--trace", "generated:conversation?num=300",
    "--num", "50", "--effort", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> DivisionPlan:
    return printed(ARGUMENTS, DivisionPlan)


def test_the_program_divides_simulates_and_reports(plan: DivisionPlan) -> None:
    assert plan.num_runs >= 4
    assert [one.model for one in plan.chosen.models] == ["llama-3.1-8b", "qwen3-14b"]
    for one in plan.chosen.models:
        assert one.fleet is not None
        assert one.share == pytest.approx(one.fleet.max_rate / one.wanted)
        assert one.fleet.attainment >= 0.9
        assert one.fleet.cost_per_good == pytest.approx(
            one.fleet.price_per_hour / 3600 / (one.fleet.max_rate * one.fleet.attainment)
        )
    assert {one.kind for one in plan.alternatives} == {"equal", "now"}
    assert plan.chosen.least_share >= max(one.least_share for one in plan.alternatives)
    assert [str(one) for one in plan.warnings_said] == list(plan.warnings)
    assert "qwen3-14b: objectives are the defaults" in "\n".join(plan.warnings)
    assert "nobody said what serves llama-3.1-8b now: it is taken as nothing" in plan.warnings


def test_a_person_reads_it_in_order(plan: DivisionPlan) -> None:
    out = io.StringIO()
    show_division(Console(file=out, width=160, highlight=False, markup=False), plan)
    text = out.getvalue()
    order = [
        "Inputs", "2xH800,2xH20", "warning: ", "\nVerdict", plan.verdict[1:], "\nChosen", "llama-3.1-8b", "qwen3-14b",
        "to spare", "\nAn equal division", "\nDoing nothing", "no instance", "Where this comes from",
        "error not measured", "To apply", "phaseplane.toml", '[models."qwen3-14b"]', plan.commands[-1],
    ]  # fmt: skip
    place = 0
    for part in order:
        assert part in text[place:], f"{part!r} is not where it should be"
        place = text.index(part, place)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "3"], "--rate is of a plan of one model; say it for each, like rate=3"),
        (["--current", "1xH800:mixed"], "say it for each, like now=4xH800@4:mixed"),
        (["--png", "plan.png"], "--png is of a plan of one model; leave it out"),
        (["--fleet", "2xH800,1xCPU:kv_pool"], "like pool=1xCPU:kv_pool"),
        (["--model", "llama-9 rate=1"], "did you mean"),
        (["--model", "llama-3-8b"], "nobody said how many requests a second llama-3-8b shall serve"),
        (["--model", "llama-3-8b rate=1 slo=soon"], "objective"),
        (["--model", "llama-3-8b rate=1 now=many"], "part of a fleet"),
        (["--model", "llama-3-8b rate=1 pool=2xH800"], "like pool=1xCPU:kv_pool"),
        (["--model", "llama-3.1-405b rate=1"], "the weights of llama-3.1-405b"),
        (["--budget", "0.1"], "raise --budget"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert program.main([*ARGUMENTS, *flags]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert said in told.err
    assert told.err.count("\n") == 1
