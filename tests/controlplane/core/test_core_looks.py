"""What is shown of the autopilot's looks: measured first, then steady, and it follows a load that really changes."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from core_fluid import Mix, Script, World
from core_kit import config

from controlplane.core.looks import AGREE, STANDS, Look, Steady, hold
from transfer.said import counted, say

LONG_PROMPTS = Mix(14, 9000, 60)
LONG_ANSWERS = Mix(130, 800, 400)
EVERY_S = 1.5
MET, SILENCE = say("hold.met"), say("hold.silence", seconds="10")


class Move:
    """Stands in for an Advice: what looks.py reads of it."""

    def __init__(self, direction: str, num: int = 1) -> None:
        self.direction, self.kinds, self.switches = direction, ", ".join([direction] * num), ()
        self.said = say("advice.move", moves=self.kinds, promise="", seconds="1")


def look(what: str, at_s: float = 0.0) -> Look:
    """met, quiet; of P->D: "?D" a doubt, "D" one that asks for agreement, "D!" and "DD!" proposals of one and two."""
    if what in ("met", "quiet"):
        return hold(at_s, "m", what, MET if what == "met" else SILENCE)
    move = Move("P->D" if "D" in what else "D->P", max(1, what.count("D"), what.count("P")))
    if what.startswith("?"):
        return hold(at_s, "m", "unsure", say("hold.unsure", moves=move.kinds, promise=""), move)  # type: ignore[arg-type]
    if what.endswith("!"):
        return Look(at_s, "m", "advise", move.said, move, move.direction)  # type: ignore[arg-type]
    again = counted("hold.again", 1, advice=move.said)
    return hold(at_s, "m", "unsure", again, move, move.direction)  # type: ignore[arg-type]


def shown(looks: str) -> list[str]:
    """After each: the code, and how many would move of what is proposed."""
    steady, found = Steady(EVERY_S), []
    for number, what in enumerate(looks.split()):
        one = steady.note(look(what, number * EVERY_S))
        found.append(f"{one.code} {one.kinds}".strip() if one.code == "advise" else one.code)
    return found


def test_until_enough_looks_agree_it_is_measuring_and_says_for_how_long_yet() -> None:
    assert shown("met met met") == ["measuring", "measuring", "met"]
    assert shown("met D D D!")[-2:] == ["measuring", "advise P->D"], "it waits for the next to agree"
    steady = Steady(EVERY_S)
    lines = [str(steady.note(look("met", at_s)).said) for at_s in (0.0, 1.5)]
    assert lines == ["hold: still measuring, 3 s yet", "hold: still measuring, 1.5 s yet"]
    assert shown("met ?D quiet")[-1] == "unsure", "no answer is one too, after a while"


def test_an_answer_stands_until_looks_in_a_row_are_against_it() -> None:
    assert shown("D D D! met ?P met D met met met met met")[2:] == ["advise P->D"] * 10
    assert shown("D D D!" + " met" * STANDS)[-2:] == ["advise P->D", "met"]
    assert shown("D D D!" + " ?D" * 20)[-1] == "advise P->D", "doubt is not against it"
    assert shown("met met met ?D ?D ?D ?D met ?D ?D ?D")[-1] == "met"


def test_the_other_move_is_shown_as_soon_as_it_is_made() -> None:
    assert shown("D D D! P P P!")[-2:] == ["advise P->D", "advise D->P"]
    assert shown("met met met D D D!")[-2:] == ["met", "advise P->D"]


def test_how_many_are_to_move_changes_when_looks_in_a_row_say_so() -> None:
    assert shown("D D D! DD! D!" + " DD!" * (STANDS - 1))[-1] == "advise P->D"
    assert shown("D D D!" + " DD!" * STANDS)[-2:] == ["advise P->D", "advise P->D, P->D"]


def test_what_is_so_is_shown_at_once_and_then_measured_anew() -> None:
    steady = Steady(EVERY_S)
    for number in range(AGREE):
        steady.note(look("met", number * EVERY_S))
    busy = hold(9.0, "m", "busy", say("hold.busy", plan="plan-1"))
    assert steady.note(busy) is busy
    assert steady.note(look("met", 10.5)).code == "measuring"


def test_looks_that_were_missed_in_between_agree_on_nothing() -> None:
    steady = Steady(EVERY_S)
    for at_s in (0.0, 1.5, 9.0):
        steady.note(look("D", at_s))
    assert steady.num_sure(10.5, "P->D") == 1
    assert steady.num_sure(10.5, "D->P") == 0


def test_what_was_shown_before_a_time_without_looks_is_not_shown_after_it() -> None:
    steady = Steady(EVERY_S)
    for number, what in enumerate(["D", "D", "D!"]):
        steady.note(look(what, number * EVERY_S))
    assert steady.shown is not None
    assert steady.shown.code == "advise"
    assert steady.note(look("quiet", 3600.0)).code == "measuring"


# --- under load -------------------------------------------------------------------------------------------------


def proposals(world: World, seconds: float) -> list[tuple[float, str]]:
    """(when, what is proposed: kinds, or nothing) each time that it changes."""
    found: list[tuple[float, str]] = []
    for _ in range(int(seconds)):
        one = world.run(1.0).autopilot.view(world.now).shown
        what = ", ".join(sorted(one.moves.values())) if one is not None and one.code == "advise" else ""
        found.append((world.now, what))
    return [next(group) for _, group in groupby(found, key=lambda one: one[1])]


def advising(shape: str, script: Script, seed: int = 0) -> World:
    return World(shape, script, config(autopilot="advise"), seed=seed)


@pytest.mark.parametrize(("shape", "mix"), [
    ("4P2D", Mix(30, 8000, 600)), ("4P2D", Mix(40, 1000, 800)), ("3P1D", Mix(20, 300, 3000)),
])  # fmt: skip
def test_a_steady_overload_from_an_idle_start_changes_the_proposal_once_at_most(shape: str, mix: Mix) -> None:
    alone = steady = 0
    for seed in range(3):
        world = advising(shape, lambda _: mix, seed)
        _, first, *later = [what for _, what in proposals(world, 120)]
        assert first, "after the measuring"
        assert len(later) <= 1, (seed, first, later)
        assert "" not in later
        said = [one.kinds if one.code == "advise" else "" for one in world.autopilot._looks]
        alone, steady = alone + sum(one != other for one, other in pairwise(said)), steady + 1 + len(later)
    assert alone > steady, "look by look it would change more often"


def test_it_says_at_the_start_that_it_is_measuring() -> None:
    world = advising("2P2D", lambda _: Mix(8, 8000, 60))
    view = world.run(4.0).autopilot.view(world.now)
    assert view.shown is not None
    assert view.shown.code == "measuring"
    assert view.line == "hold: still measuring, 10 s yet"
    assert world.run(12.0).autopilot.view(world.now).line.startswith("move ")


def test_a_load_that_changes_is_followed() -> None:
    world = advising("5P3D", lambda now: LONG_PROMPTS if now < 65 else LONG_ANSWERS)
    changes = proposals(world, 90)
    assert [set(what.split(", ")) for _, what in changes[:2]] == [{""}, {"decode"}]
    assert 65.0 < changes[1][0] <= 80.0
