"""How a long pull shows itself: rich bars on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[int, int], None]
"""Called with (done, all) as often as one likes."""


class Reporter(Protocol):
    def note(self, text: str) -> None:
        """One line that stays."""

    def stage(self, text: str) -> contextlib.AbstractContextManager[Advance]:
        """Shows `text` while the block runs."""


def make_reporter() -> Reporter:
    """Bars when standard error is a terminal, lines otherwise."""
    return BarReporter() if sys.stderr.isatty() else LineReporter()


class LineReporter:
    """Plain lines: one when a stage starts, one when it is over."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[Advance]:
        self.note(f"{text} ...")
        started = time.monotonic()
        yield lambda _done, _total: None
        self.note(f"{text}: done in {time.monotonic() - started:.1f} s")


class BarReporter:
    """A bar where the length is known, a moving one where it is not."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[Advance]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bars:
            task = bars.add_task(text, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)
            finished = bars.tasks[task]
            bars.update(task, completed=finished.total or 1, total=finished.total or 1)
