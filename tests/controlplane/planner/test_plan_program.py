"""The planner as a program: its report, its progress, its refusals."""

from __future__ import annotations

import io

import pytest
from planner_kit import printed
from rich.console import Console

from controlplane.planner import cli as program
from controlplane.planner.report import PlanReport
from controlplane.planner.view import show

MODEL = "llama-3.1-8b"
ARGUMENTS = [
    "--fleet", "2xH800", "--model", MODEL, "--trace", "generated:conversation?num=60", "--slo", "ttft=1,tpot=0.04",
    "--num", "50", "--effort", "1", "--no-baselines",
]  # fmt: skip


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return printed(ARGUMENTS, PlanReport)


def test_progress_is_said_line_by_line_to_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with program._progress(lines=True) as on_run:
        on_run("2xH800@1:mixed", 3)
    assert capsys.readouterr().err == "simulated 3 runs, now 2xH800@1:mixed\n"
    with program._progress(lines=False) as on_run:
        assert on_run is None


def test_the_program_plans_simulates_and_reports(report: PlanReport) -> None:
    assert report.num_runs > 3
    assert report.possible_rate is not None
    assert report.chosen.max_rate <= report.possible_rate * 1.02
    assert report.chosen.low < report.chosen.max_rate < report.chosen.high
    assert report.chosen.attainment >= 0.9
    assert any("doing nothing" in one.label for one in (report.chosen, *report.alternatives))
    assert [one.name for one in report.inputs if one.is_default] == [
        "price of a GPU-hour",
        "wanted",
        "budget",
        "now",
        "policy",
    ]
    assert all(sum(phase.shares.values()) == pytest.approx(1.0) for phase in report.phases)


def test_a_person_reads_it_in_order(report: PlanReport) -> None:
    out = io.StringIO()
    show(Console(file=out, width=160, highlight=False, markup=False), report, "THE PLOT")
    text = out.getvalue()
    order = [
        "Inputs", "warning: ", "\nVerdict", report.verdict, "of possible", "Frontier", "THE PLOT", "Why",
        report.bottleneck, "Alternatives", "doing nothing", "Where this comes from", "error not measured", "To apply",
        report.commands[0],
    ]  # fmt: skip
    place = 0
    for part in order:
        assert part in text[place:], f"{part!r} is not where it should be"
        place = text.index(part, place)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "1.5"], "--target"), (["--rate", "-1"], "--rate"), (["--budget", "0.001"], "raise --budget"),
        (["--png", "/no/such/place.png"], "--png"), (["--slo", "soon"], "objective"),
        (["--current", "many"], "part of a fleet"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_a_sentence(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    _refused([*ARGUMENTS, *flags], said, capsys)


def test_a_model_that_is_not_known_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    _refused(["llama-9" if word == MODEL else word for word in ARGUMENTS], "did you mean", capsys)


def _refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(arguments) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert said in told.err
    assert told.err.count("\n") == 1
