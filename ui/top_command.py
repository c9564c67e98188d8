"""The command `phaseplane top`: reads its options and hands over to ui/tui, where Textual is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from ui.client import DEFAULT_URL, clean_url
from ui.errors import CliError, UsageFault
from ui.options import ApiKey, Command, Config, Json, Url
from ui.words import LANGUAGES, words

NEEDED = "textual"
MISSING = "the screen needs Textual, which is not installed; run `pip install 'phaseplane[tui]'`, or use --once"
NO_TERMINAL = "the screen needs a terminal, and standard output is none; use --once, or --once --json"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and end; --json for scripts.")] = False,
    json: Json = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Change nothing: every action is disabled.")] = False,
    record: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Keep what is shown.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="FILE", help="Show a recording, no fleet.")] = None,
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=3600, help="Seconds between redraws; a new verdict shows at once.")
    ] = 1.0,
    target: Annotated[float, typer.Option("--target", min=0.0, max=1.0, help="Attainment that is wanted.")] = 0.9,
    ascii: Annotated[bool, typer.Option("--ascii", help="No braille, no box drawing: ASCII signs alone.")] = False,
    lang: Annotated[str | None, typer.Option("--lang", help="en or zh-Hant; else as the locale is.")] = None,
    url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Watch the fleet in this terminal and act on it: verdict, curves, instances, requests, KV, rebalance.

    Keys: 1-6 panels, Enter opens, Esc closes, / filters, s sorts, m moves an instance, d drains it, p plans another
    split, u undoes, a autopilot, space pauses, [ ] { } go through time, L back to now, e exports, : commands, ? help,
    q leaves.

    NO_COLOR is respected. With a screen reader use --once, or --every 60.
    """
    if lang is not None and not any(lang.lower().startswith(known[:2]) for known in LANGUAGES):
        raise UsageFault(f"{lang!r} is no language of this screen; choose {' or '.join(LANGUAGES)}")
    if json and not once:
        raise UsageFault("--json prints one look, so it needs --once as well")
    if record is not None and (once or replay is not None):
        raise UsageFault("--record keeps a running screen; leave out --once and --replay")
    if not once and not sys.stdout.isatty():
        raise CliError(NO_TERMINAL)
    if not once and importlib.util.find_spec(NEEDED) is None:
        raise CliError(MISSING)
    from ui.tui.model import Picture
    from ui.tui.once import print_once
    from ui.tui.pen import Pen

    pen = Pen(words(lang), ascii)
    basis = Picture(target=target, read_only=read_only, url=clean_url(url))
    if once:
        print_once(pen, basis, json, replay, api_key)
        return
    from ui.tui.run import show

    show(pen, basis, every, record, replay, api_key)
