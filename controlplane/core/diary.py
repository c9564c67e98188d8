"""What of the autopilot outlives the control plane: its settings and pins, and the reasons of its looks.

Tells the shell, which keeps it; looks that say the same but for their numbers are one row with a count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controlplane.core.desk import Desk
from controlplane.core.events import AutopilotKept, AutopilotState, Looked
from controlplane.core.pins import Pins
from transfer.autopilot import AutopilotMode, LookRow

TOLD_EVERY = 20
"""Looks that may be lost from a count when the control plane is killed."""
_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class _Run:
    """Looks in a row that say the same. since_s: loop time of the first."""

    name: tuple[str, str]
    row: LookRow
    since_s: float
    num: int = 0


class Diary:
    def __init__(self, desk: Desk, pins: Pins) -> None:
        self._desk, self._pins = desk, pins
        self._runs: dict[str, _Run] = {}
        self._num_runs = 0
        self._told: tuple[AutopilotMode, int, int | None, int] | None = None

    def looked(self, model: str, code: str, line: str) -> None:
        """One look of this model."""
        name = (code, _NUMBERS.sub("#", line))
        run = self._runs.get(model)
        if run is None or run.name != name:
            if run is not None and run.num % TOLD_EVERY != 1:
                self._tell(run)
            self._num_runs += 1
            look_id = f"{self._desk.control_epoch:x}-{self._num_runs}"
            run = self._runs[model] = _Run(name, LookRow(look_id, model, code, line), self._desk.now)
        run.num += 1
        if run.num % TOLD_EVERY == 1:
            self._tell(run)

    def keep(self, mode: AutopilotMode, floor: int, max_moves: int | None) -> None:
        """What is set now, and the pins; told when something but time has changed them since the first call."""
        what = (mode, floor, max_moves, self._pins.num_changes)
        if self._told is not None and what != self._told:
            config = self._desk.config
            self._desk.emit(AutopilotKept(state=AutopilotState(
                mode=mode, floor=floor, max_moves=max_moves, pins=self._pins.views(self._desk.now),
                configured=(config.autopilot, config.autopilot_floor, config.autopilot_max_moves),
            )))  # fmt: skip
        self._told = what

    def _tell(self, run: _Run) -> None:
        """Times are seconds from now on; the shell knows the time."""
        self._desk.emit(Looked(row=LookRow(
            look_id=run.row.look_id, model=run.row.model, code=run.row.code, line=run.row.line, num=run.num,
            began_at=run.since_s - self._desk.now, ended_at=0.0,
        )))  # fmt: skip
