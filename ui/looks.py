"""How roles, states and verdicts look on every surface: a letter or sign first, a colour besides, for dark and light.

Colour is never the only sign. It names no widget and no text: words are in ui/words.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Theme = Literal["dark", "light"]


class Look(NamedTuple):
    """sign: what stands for it where there is room for one character; ascii: the same for `--ascii`. dark and light:
    its colour on such a ground, #rrggbb, each at a contrast of 4.5 to 1 or more."""

    sign: str
    ascii: str
    dark: str
    light: str

    def colour(self, theme: Theme) -> str:
        return self.dark if theme == "dark" else self.light


GROUNDS: dict[Theme, str] = {"dark": "#0f1419", "light": "#ffffff"}
"""The grounds these colours are chosen for."""

ROLES: dict[str, Look] = {
    "prefill": Look("P", "P", "#6cb6ff", "#0b5cad"),
    "decode": Look("D", "D", "#f0a35e", "#8f4a00"),
    "mixed": Look("M", "M", "#c297ff", "#6b3fa0"),
    "kv_pool": Look("K", "K", "#57c9b5", "#0b6b5d"),
}
STATES: dict[str, Look] = {
    "joining": Look("\u2026", ".", "#9aa7b4", "#57606a"),
    "ready": Look("\u25cf", "*", "#5fd38d", "#1a7f37"),
    "cordoned": Look("\u2016", "=", "#e3c04b", "#7a5b00"),
    "draining": Look("\u25bd", "v", "#e3c04b", "#7a5b00"),
    "switching": Look("\u21c4", "~", "#c297ff", "#6b3fa0"),
    "lost": Look("\u2715", "x", "#ff7b72", "#b42318"),
}
VERDICTS: dict[str, Look] = {
    "met": Look("\u2713", "+", "#5fd38d", "#1a7f37"),
    "missed": Look("!", "!", "#ff7b72", "#b42318"),
    "idle": Look("\u2013", "-", "#9aa7b4", "#57606a"),
    "degraded": Look("\u25b3", "^", "#e3c04b", "#7a5b00"),
    "stale": Look("?", "?", "#e3c04b", "#7a5b00"),
}
STAGES: dict[str, Look] = {
    "queue": Look("q", "q", "#9aa7b4", "#57606a"),
    "decode_admission": Look("a", "a", "#e3c04b", "#7a5b00"),
    "prefill": Look("p", "p", "#6cb6ff", "#0b5cad"),
    "transfer": Look("t", "t", "#57c9b5", "#0b6b5d"),
    "decode": Look("d", "d", "#f0a35e", "#8f4a00"),
}
"""In the order a request passes them."""
UNKNOWN = Look("?", "?", "#9aa7b4", "#57606a")


def role(name: str) -> Look:
    return ROLES.get(name, UNKNOWN)


def state(name: str) -> Look:
    return STATES.get(name, UNKNOWN)


def stage(name: str) -> Look:
    return STAGES.get(name, UNKNOWN)
