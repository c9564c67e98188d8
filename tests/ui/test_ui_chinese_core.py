"""Nothing that the control plane's core or its planner says of a fleet is without a code, so that it can be said in
Chinese: refusals, and a plan on the Planner page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from test_console_pages import page
from test_ui_chinese import CHINESE, CJK, sentences, shown, spoken

from controlplane.planner.wants import parse_wants
from controlplane.sim.fleet import parse_fleet
from transfer.errors import InvalidValue
from transfer.objectives import parse_objectives
from transfer.said import Said, joined, said_of, say
from transfer.sentences import ENGLISH
from ui.console.planning import Outcome, Planning, read_report
from ui.console.screens.planner import RUN

ROOT = Path(__file__).parents[2]
TOLD = [
    *(ROOT / "controlplane" / "core").rglob("*.py"),
    *(ROOT / "controlplane" / "planner").glob("*.py"),
    *(ROOT / name for name in ("controlplane/sim/fleet.py", "nodes/hardware.py", "transfer/objectives.py")),
]
FOR_OTHERS = ("config.py", "machine.py", "recorder.py")
"""Faults of settings, of recordings and of the program itself, which no screen shows."""
SAYS = ("say", "counted")
MODEL = "llama-3.1-8b"
__all__ = ["spoken"]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each call of a name that has arguments: the name, and the first of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            yield node.func.id, node.args[0]


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def test_every_refusal_of_the_core_and_the_planner_has_a_code() -> None:
    bare = [
        f"{file.relative_to(ROOT)}:{what.lineno}"
        for file in TOLD if file.name not in FOR_OTHERS
        for name, what in calls(ast.parse(file.read_text())) if name == "InvalidValue" and is_text(what)
    ]  # fmt: skip
    assert bare == []


def test_every_code_that_is_said_has_its_sentence() -> None:
    files = [file for folder in ("controlplane", "transfer") for file in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "nodes" / name for name in ("hardware.py", "shapes.py")]
    codes = {
        what.value
        for file in files
        for name, what in calls(ast.parse(file.read_text()))
        if name in SAYS and isinstance(what, ast.Constant)
    }
    assert len(codes) > 100
    assert codes - ENGLISH.keys() == set()


@pytest.mark.parametrize("wrong", [
    partial(parse_fleet, "8xH800", MODEL, 512),
    partial(parse_fleet, "0xH800:prefill", MODEL, 512),
    partial(parse_fleet, "1xH800:worker", MODEL, 512),
    partial(parse_fleet, "1xCPU@2:kv_pool", MODEL, 512),
    partial(parse_fleet, "1xH800:decode+4TB", MODEL, 512),
    partial(parse_fleet, "1xH800@0:decode", MODEL, 512),
    partial(parse_fleet, "1xH800@1:decode", "deepseek-v3", 512),
    partial(parse_fleet, "1xH900:decode", MODEL, 512),
    partial(parse_fleet, "1xH800:decode", "lama", 512),
    partial(parse_objectives, ["ttft:soon,tpot:0.2"]),
    partial(parse_objectives, ["ttft:2"]),
    partial(parse_wants, ["rate=3"]),
    partial(parse_wants, ["a rate=3 a rate=3"]),
    partial(parse_wants, [" ".join(f"m{number} rate=1" for number in range(20))]),
    partial(parse_wants, ["a 'b"]),
    partial(parse_wants, ["a rite=3"]),
    partial(parse_wants, ["a rate="]),
    partial(parse_wants, ["a rate=3 pool=1xCPU"]),
    partial(parse_wants, ["a"]),
    partial(parse_wants, ["a rate=often"]),
])  # fmt: skip
def test_what_is_written_wrongly_on_the_planner_page_is_said_in_both_languages(wrong: Callable[[], object]) -> None:
    with pytest.raises(InvalidValue) as error:
        wrong()
    said = said_of(error.value)
    chinese = CHINESE.sentence(said, "")
    assert said.code != "text"
    assert CJK.search(chinese), said
    assert not re.search("write it|give|there is no|needs", chinese), "no English around the values"
    assert not re.search("[{}]", str(said)), "every value is filled in"


def an_outcome() -> Outcome:
    serves = say("planner.serves", rate="3", low="2", high="4", target="90%", per_gpu="1", price="9")
    gain = say("planner.more", margin="20%", other=say("planner.other_colocated"))
    verdict = say("planner.disaggregate", xpyd="1P1D", fleet="2xH800", serves=serves, gain=gain)
    busiest = say("planner.busiest", phase="decode", where="H800", use="80%", term=say("terms.weight"))
    why = joined((busiest, say("planner.lift_time", where="H800")))
    notes = joined((say("planner.expects", rate="3"), say("planner.over")))
    labels = (say("planner.split", num=1), say("planner.nothing"))
    warnings = (
        say("planner.no_trace", trace="generated:conversation"),
        say("planner.no_current"),
        say("divide.prices"),
    )
    row = {
        "label": "split 1, doing nothing", "label_said": labels, "fleet": "2xH800", "xpyd": "1P1D", "num_gpus": 2,
        "price_per_hour": 9.0, "max_rate": 3.0, "low": 2.0, "high": 4.0, "per_gpu": 1.5, "cost_per_good": 0.001,
        "attainment": 0.9, "note": str(notes), "note_said": notes,
    }  # fmt: skip
    return read_report(msgspec.json.encode({
        "verdict": str(verdict), "verdict_said": verdict, "bottleneck": str(why), "bottleneck_said": why,
        "warnings": list(map(str, warnings)), "warnings_said": warnings, "chosen": row, "alternatives": [],
        "possible_rate": 4.0, "of_possible": 0.75, "commands": [], "frontier": [],
    }))  # fmt: skip


class Planned(Planning):
    """One that has ended."""

    fails: tuple[str, Said | None] | None = None
    running = property(lambda self: False)

    def fault(self) -> tuple[str, Said | None] | None:
        return self.fails

    def outcome(self) -> Outcome:
        return an_outcome()


def planner_page(lang: str, fails: tuple[str, Said | None] | None = None) -> str:
    run, planned = page("planner", lang), Planned([])
    planned.fails = fails
    run.session_state[RUN] = planned
    return "\n".join(shown(run.run()))


def test_a_plan_is_read_in_the_language_of_the_page(spoken: object) -> None:
    chinese = planner_page("zh-Hant")
    assert sentences([chinese]) == []
    assert "\u5efa\u8b70\u5206\u96e2" in chinese
    english = planner_page("en")
    for text in ("Disaggregate: 1P1D (2xH800) serves 3 requests a second", "most of it weight; more time of H800 would",
                 "split 1, doing nothing: it expects 3/s of itself", "prices are indicative"):  # fmt: skip
        assert text in english


def test_a_refusal_of_the_planner_is_too(spoken: object) -> None:
    said = say("planner.hopeless", target="90%")
    assert sentences([planner_page("zh-Hant", (str(said), said))]) == []
    assert "no fleet reaches 90% attainment" in planner_page("en", (str(said), said))
    assert "it said nothing" in planner_page("en", ("it said nothing", None))
