"""Everything the console and the TUI say, in English and in Traditional Chinese: one catalogue, looked up by key.

A language is a folder of TOML files (shared, tui, console, core); a table in them is a screen, a key a message, and
"{name}" in it a value. Figures are put into words by ui/figures.py before they come here.
"""

from __future__ import annotations

import os
import string
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from transfer.said import Said, render
from transfer.sentences import ENGLISH

LANGUAGES = ("en", "zh-Hant")
DEFAULT = "en"
CORE = "core"
"""The table of what the control plane says: its English is transfer/sentences.py."""
NAMES = {"en": "English", "zh-Hant": "\u7e41\u9ad4\u4e2d\u6587"}
"""Each language by its own name, for a menu of languages."""


class Words:
    """The catalogue in one language. Immutable."""

    def __init__(self, lang: str, messages: Mapping[str, str]) -> None:
        self.lang, self._messages = lang, messages

    def say(self, key: str, **values: object) -> str:
        """The message under `key`, its placeholders filled. Raises KeyError for an unknown key or a missing value."""
        message = self.raw(key)
        return message.format(**values) if "{" in message else message

    def raw(self, key: str) -> str:
        """The message with its placeholders as they are. Raises KeyError for an unknown key."""
        try:
            return self._messages[key]
        except KeyError:
            near = get_close_matches(key, self._messages, 1)
            raise KeyError(f"no message {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")) from None

    def has(self, key: str) -> bool:
        return key in self._messages

    def sentence(self, said: Said | None, english: str) -> str:
        """What the control plane said. english: its sentence, for what has no code, or one that is not known here."""
        if said is None or self.lang == DEFAULT:
            return english
        try:
            return render(said, lambda code: self.raw(f"{CORE}.{code}"))
        except (KeyError, IndexError):
            return english

    def under(self, prefix: str) -> dict[str, str]:
        """Every message whose key begins with `prefix.`, by the rest of its key: a whole screen for a page's script."""
        lead = f"{prefix}."
        return {key[len(lead) :]: text for key, text in self._messages.items() if key.startswith(lead)}

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._messages)


def words(lang: str | None = None, environ: Mapping[str, str] | None = None) -> Words:
    """In `lang`, else as PHASEPLANE_LANG says, else as the locale's variables do, else in English."""
    return _load(choose(lang, os.environ if environ is None else environ))


def choose(lang: str | None, environ: Mapping[str, str]) -> str:
    """The language of LANGUAGES that is meant: by name ("zh-Hant"), tag ("zh-TW") or locale ("zh_TW.UTF-8")."""
    asked = (lang, environ.get("PHASEPLANE_LANG"), *(environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG")))
    for text in asked:
        if text:
            return "zh-Hant" if text.lower().startswith("zh") else DEFAULT
    return DEFAULT


def placeholders(message: str) -> frozenset[str]:
    """Names in braces. Raises ValueError for a message that cannot be formatted."""
    return frozenset(name for _, name, _, _ in string.Formatter().parse(message) if name is not None)


@cache
def _load(lang: str) -> Words:
    messages = {f"{CORE}.{code}": text for code, text in ENGLISH.items()} if lang == DEFAULT else dict[str, str]()
    for file in sorted((Path(__file__).parent / lang).glob("*.toml")):
        for key, text in _flat(tomllib.loads(file.read_text(encoding="utf-8")), ""):
            if key in messages:
                raise ValueError(f"{file.name} of {lang} has {key} again; every message has one place")
            messages[key] = text
    return Words(lang, messages)


def _flat(table: Mapping[str, object], lead: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{lead}{name}.")
        else:
            found.append((f"{lead}{name}", str(value)))
    return found
