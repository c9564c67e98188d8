"""The style sheet of every page: live/console.css, with the colours of ui/looks.py for dark and light grounds."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ui import looks

FOLDER = Path(__file__).parent / "live"


@cache
def style_sheet() -> str:
    """CSS text. The palette follows `data-pp-theme` on the root, which live/island.js sets from the page's ground."""
    return "\n".join([_palette("light", ":root"), _palette("dark", ":root[data-pp-theme=dark]"), read("console.css")])


@cache
def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _palette(theme: looks.Theme, selector: str) -> str:
    groups = (("role", looks.ROLES), ("state", looks.STATES), ("verdict", looks.VERDICTS), ("stage", looks.STAGES))
    lines = [f"--pp-{group}-{name}:{look.colour(theme)};" for group, looked in groups for name, look in looked.items()]
    return f"{selector}{{{''.join(lines)}--pp-ground:{looks.GROUNDS[theme]};}}"
