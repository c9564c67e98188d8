"""What the control plane says of the fleet, as a code with values, so that every screen can say it in its language.

`str()` is the English sentence, from transfer/sentences.py; ui/words has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transfer.sentences import ENGLISH
from transfer.terms import Struct

MAX_NAMED = 3
"""Ids that a sentence lists."""
JOIN = "join"
"""The code whose message stands between the sentences of a list."""


class Said(Struct, frozen=True):
    """code: a key of ENGLISH. values: by placeholder; a sentence within it is one itself, and several are joined."""

    code: str
    values: dict[str, str | Said | tuple[Said, ...]] = {}

    def __str__(self) -> str:
        return render(self, ENGLISH.__getitem__)


def say(code: str, **values: object) -> Said:
    """Figures are put into words by whoever says them; what is neither Said nor several of them is taken as text."""
    return Said(code, {name: _value(one) for name, one in values.items()})


def render(said: Said, message: Callable[[str], str]) -> str:
    """In the language of `message`, which has the text of each code. Raises KeyError for one that is unknown, or when
    a value is missing."""
    template = message(said.code)
    if not said.values:
        return template
    return template.format(**{name: _text(one, message) for name, one in said.values.items()})


def counted(code: str, num: int, **values: object) -> Said:
    """With `num`, or for one the code's own sentence for that, which ends in _one."""
    return say(f"{code}_one", **values) if num == 1 else say(code, num=num, **values)


def joined(parts: Sequence[Said]) -> Said:
    """Several sentences in one, at least one."""
    whole = parts[0]
    for one in parts[1:]:
        whole = say("and_so", first=whole, then=one)
    return whole


def said_of(error: Exception) -> Said:
    """What an error was raised with; its text where that has no code."""
    what = error.args[0] if error.args else ""
    return what if isinstance(what, Said) else say("text", text=str(error))


def names(ids: Iterable[str]) -> str | Said:
    """The first few, and how many more."""
    listed = list(ids)
    some = ", ".join(listed[:MAX_NAMED])
    return some if len(listed) <= MAX_NAMED else say("names_more", some=some, num=len(listed) - MAX_NAMED)


def _value(value: object) -> str | Said | tuple[Said, ...]:
    if isinstance(value, Said | str):
        return value
    if isinstance(value, tuple) and all(isinstance(one, Said) for one in value):
        return value
    return str(value)


def _text(value: str | Said | tuple[Said, ...], message: Callable[[str], str]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Said):
        return render(value, message)
    return message(JOIN).join(render(one, message) for one in value)
