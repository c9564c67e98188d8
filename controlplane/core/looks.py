"""The autopilot's looks, and what is shown of them: one may be chance, so an answer stands when AGREE in a row give it.

Until then it is still being measured, and an answer that was given stays. Pure; autopilot.py looks and acts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from controlplane.core.moves import Advice
from transfer.said import Said, say
from transfer.terms import InstanceId

AGREE = 3
"""Looks in a row that must be sure of a move before it is proposed or made, or say the same to be shown."""
STANDS = 2 * AGREE
"""What is shown stands until so many looks in a row do not bear it out, or a move is made or proposed."""
AGAIN = 1.5
"""Periods between two looks that follow each other, at most."""
AT_ONCE = ("blind", "busy", "measuring", "move", "refused")
"""Codes of looks that tell what is, not what the traffic asks for: they are shown as they come."""
DOUBTS = ("hold.unsure", "hold.unsure_cost", "hold.changing")
"""Why a look is not sure of a move that it would make all the same."""


@dataclass(slots=True)
class Look:
    """code: as Evaluation has it. sure: the direction of the move that it is sure of, also when it asks for the next
    looks to agree."""

    at_s: float
    model: str
    code: str
    said: Said
    advice: Advice | None = None
    sure: str = ""

    @property
    def answer(self) -> tuple[str, str, str]:
        """What it says apart from its figures and from which of several equal instances it names."""
        if self.sure:
            return "move", "", self.sure
        why = self.said.values.get("why")
        direction = self.advice.direction if self.advice is not None else ""
        return self.code, why.code if isinstance(why, Said) else "", direction

    @property
    def leans(self) -> str:
        """Where it would move to, were it sure; a look that has a reason against the move does not lean to it."""
        advice, why = self.advice, self.said.values.get("why")
        doubts = isinstance(why, Said) and why.code in DOUBTS
        return self.sure or (advice.direction if advice is not None and doubts else "")

    @property
    def kinds(self) -> str:
        return self.advice.kinds if self.advice is not None else ""


def hold(at_s: float, model: str, code: str, why: Said, advice: Advice | None = None, sure: str = "") -> Look:
    """A look that leaves everything as it is."""
    return Look(at_s, model, code, say("hold.why", why=why), advice, sure)


class Steady:
    """Of one model. shown: what stands; None before the first look."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: deque[Look] = deque(maxlen=STANDS)
        self.shown: Look | None = None

    @property
    def named(self) -> frozenset[InstanceId]:
        """The instances that were named last: of several equal ones they are named again."""
        advice = next((one.advice for one in (self.shown, *self._last) if one is not None and one.advice), None)
        return frozenset(one.id for one, _ in advice.switches) if advice is not None else frozenset()

    @property
    def moving(self) -> frozenset[InstanceId]:
        """The instances that what is shown would move."""
        advice = self.shown.advice if self.shown is not None else None
        return frozenset(one.id for one, _ in advice.switches) if advice is not None else frozenset()

    def num_sure(self, now: float, direction: str) -> int:
        """How many of the last looks, in a row and until now, are sure of this direction."""
        num, next_s = 0, now
        for look in reversed(self._last):
            if look.sure != direction or next_s - look.at_s > AGAIN * self._every_s:
                break
            num, next_s = num + 1, look.at_s
        return num

    def note(self, look: Look) -> Look:
        """A look was taken: it is shown, or what is shown stays. After a time without any, as when the model's last
        engine left and another joined, nothing of before stays."""
        if self._last and look.at_s - self._last[-1].at_s > STANDS * self._every_s:
            self._last.clear()
            self.shown = None
        if look.code in AT_ONCE:
            self._last.clear()
            self.shown = look
        else:
            self._last.append(look)
            self.shown = self._after(look)
        return self.shown

    def _after(self, look: Look) -> Look:
        shown, agreed = self.shown, _agreed([one.answer for one in self._last])
        if agreed and look.sure and (shown is None or look.answer != shown.answer):
            return look
        if shown is not None and any(_supports(one, shown) for one in self._last):
            return look if look.answer == shown.answer and self._repeats(look, shown) else shown
        if agreed:
            return look
        missing = AGREE - len(self._last)
        if shown is not None and shown.code == "measuring" and look.sure:
            missing = AGREE - self.num_sure(look.at_s, look.sure)
        if missing > 0:
            left = say("hold.measuring", seconds=f"{missing * self._every_s:g}")
            return hold(look.at_s, look.model, "measuring", left)
        return hold(look.at_s, look.model, "unsure", say("hold.disagree", num=AGREE))

    def _repeats(self, look: Look, shown: Look) -> bool:
        """Whether the look has the shown answer's newer figures. How many instances should move changes when all looks
        that are remembered say so."""
        if not look.sure:
            return True
        same = look.kinds == shown.kinds or _agreed([one.kinds for one in self._last], STANDS)
        return look.code != "unsure" and same


def _supports(look: Look, shown: Look) -> bool:
    """Whether the look lets stand what is shown. A proposal also stands while it is only doubted."""
    return look.answer == shown.answer or (shown.code == "advise" and look.leans == shown.sure)


def _agreed(says: list[str] | list[tuple[str, str, str]], num: int = AGREE) -> bool:
    """Whether the last so many say the same."""
    return len(says) >= num and len(set(says[-num:])) == 1
