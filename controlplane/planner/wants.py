"""What is wanted of each of several models, as `--model "NAME rate=3 slo=ttft=2,tpot=0.05 trace=FILE"` says it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path

from transfer.errors import InvalidValue
from transfer.said import say
from transfer.terms import Struct

MAX_MODELS = 16
KEYS = ("rate", "slo", "trace", "format", "pool", "now")
EXAMPLE = '--model "llama-3-70b rate=3 slo=ttft=2,tpot=0.05"'


class Want(Struct, frozen=True):
    """rate: requests a second. slos, trace, format: like the flags, which stand where these do not. pools: KV pools of
    this model, which keeps them to itself. now: the fleet that serves it, None where nobody said."""

    model: str
    rate: float
    slos: tuple[str, ...] = ()
    trace: str | None = None
    format: str | None = None
    pools: tuple[str, ...] = ()
    now: str | None = None

    @property
    def name(self) -> str:
        """By which clients call it."""
        return Path(self.model).name


def is_several(texts: Sequence[str]) -> bool:
    """Whether they say more than one name."""
    return len(_words(texts)) > 1


def parse_wants(texts: Sequence[str]) -> tuple[Want, ...]:
    """A word without = begins the next model. Raises InvalidValue."""
    models: list[tuple[str, list[str]]] = []
    for word in _words(texts):
        if "=" not in word:
            models.append((word, []))
        elif models:
            models[-1][1].append(word)
        else:
            raise InvalidValue(say("want.before", word=repr(word), example=EXAMPLE))
    wants = tuple(_want(model, words) for model, words in models)
    names = [one.name for one in wants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidValue(say("want.twice", model=twice))
    if len(wants) > MAX_MODELS:
        raise InvalidValue(say("want.many", num=len(wants), most=MAX_MODELS))
    return wants


def _words(texts: Sequence[str]) -> list[str]:
    try:
        return [word for text in texts for word in ([text] if _is_directory(text) else shlex.split(text))]
    except ValueError as error:
        raise InvalidValue(
            say("want.unreadable", text=repr(" ".join(texts)), reason=error, example=EXAMPLE)
        ) from None  # fmt: skip


def _is_directory(text: str) -> bool:
    """Its name may have spaces and quotes."""
    try:
        return Path(text).is_dir()
    except OSError:  # too long for a name
        return False


def _want(model: str, words: Sequence[str]) -> Want:
    values: dict[str, list[str]] = {key: [] for key in KEYS}
    for word in words:
        key, _, value = word.partition("=")
        if key not in values:
            nearest = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)[0]
            raise InvalidValue(
                say("want.no_key", model=model, name=repr(key), nearest=nearest, keys=", ".join(KEYS))
            )  # fmt: skip
        if not value or (values[key] and key not in ("slo", "pool")):
            raise InvalidValue(say("want.one_value", model=model, name=key, got=repr(word)))
        values[key].append(value)
    stray = next((pool for pool in values["pool"] if ":kv_pool" not in pool), None)
    if stray is not None:
        raise InvalidValue(say("want.no_pool", model=model, pool=stray))
    first = {key: found[0] if found else None for key, found in values.items()}
    return Want(
        model=model, rate=_rate(model, first["rate"]), slos=tuple(values["slo"]), trace=first["trace"],
        format=first["format"], pools=tuple(values["pool"]), now=first["now"],
    )  # fmt: skip


def _rate(model: str, text: str | None) -> float:
    if text is None:
        raise InvalidValue(say("want.no_rate", model=model, example=EXAMPLE))
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise InvalidValue(say("want.rate", model=model, got=repr(text)))
    return rate
