"""What the autopilot goes by: one model's recorded traffic in windows, held to what came of it under the present split.

Collects and corrects; what would help is moves.py's, what is done about it autopilot.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.core.desk import Desk
from controlplane.core.fleet import Group
from controlplane.core.forecast import Predictor, pace_of
from controlplane.core.looks import AGREE
from controlplane.core.moves import LEAST_STEP, Advice, turns_back
from controlplane.core.traffic import Load, Pace
from controlplane.core.tried import Work
from transfer.said import Said, say
from transfer.terms import InstanceId, Role

NO_WORK = Work(0.0, 0.0)
SHORT = 1 / 6
"""The shortest window of traffic, as a part of autopilot_window_s."""
SLOT = 1 / 3
"""Pieces in which the last minutes are looked at for how long a load lasts, as a part of it too."""
CALM_USE = 0.6
"""While both phases stay below this, and all requests are good, MAX_CALM looks do without a forecast."""
MAX_CALM = 2
MAX_CORRECTION = 1.5
"""Work may be so much more or less than the model says, as far as the outcome shows."""


@dataclass(slots=True)
class Evidence:
    """windows: forecasts under the traffic that there was enough of, from short to long; none: why, in `lacks`."""

    roles: Mapping[InstanceId, Role]
    windows: list[Predictor]
    lacks: Said | None = None
    measuring: bool = False
    """Whether it only takes time until there is enough."""
    work: Work = NO_WORK
    """The load of the shortest window."""
    good: int = 0
    counted: int = 0
    """Outcome of the present split: of the requests of the last autopilot_window_s, and that arrived since it is."""


@dataclass(slots=True)
class _Calm:
    """A look that found nothing to gain, with the load that it saw and the use of each phase; num_left: looks that may
    still rely on it."""

    version: int
    span_s: float
    num: int
    prompt_tokens: int
    prefill_use: float
    decode_use: float
    num_left: int = MAX_CALM


class Observer:
    """Reads the desk and changes nothing. Only ready instances count."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._outcomes: dict[float, tuple[int, int]] = {}
        """Of this look, by the time since when."""
        self._calm: dict[str, _Calm] = {}

    def gather(self, model: str, group: Group, since_s: float) -> Evidence:
        """since_s: when roles last changed; outcomes from before say nothing of the present split."""
        desk, config = self._desk, self._desk.config
        ready = [one for one in group.members if one.ready]
        roles = {one.id: one.role for one in ready}
        spans_s = sorted({SHORT * config.autopilot_window_s, config.autopilot_window_s, config.traffic_window_s})
        num, span_s = desk.traffic.count(desk.now, model, spans_s[-1])
        if ready and num > 0 and span_s < spans_s[0]:
            left_s = spans_s[0] - span_s + (AGREE - 1) * config.autopilot_every_s
            return Evidence(roles, [], say("hold.measuring", seconds=f"{left_s:.0f}"), measuring=True)
        if not ready or num < config.min_traffic:
            few = say("hold.few", num=num, seconds=f"{span_s:.0f}", needed=config.min_traffic)
            return Evidence(roles, [], few)
        lately, short_s = desk.traffic.count(desk.now, model, spans_s[0])
        if not lately and num / span_s * short_s >= config.min_traffic:
            return Evidence(roles, [], say("hold.silence", seconds=f"{short_s:.0f}"))
        windows: list[Predictor] = []
        pace = pace_of(group)
        self._outcomes.clear()
        good, counted = self._outcome_since(model, max(since_s, desk.now - config.autopilot_window_s), pace)
        for place_s in spans_s:
            load = desk.traffic.load(desk.now, model, place_s, pace)
            if load.num < config.min_traffic:
                continue
            windows.append(Predictor(ready, load, config.classes, config))
            if len(windows) == 1 and self._content(model, windows[0], roles, since_s, pace):
                break  # whatever the others say: the last seconds do not need it
        else:
            self._correct(model, windows, roles, since_s, pace)
        rate = windows[0].load.rate_per_s
        work = Work(rate * windows[0].compute_tokens, rate * windows[0].output_tokens)
        return Evidence(roles, windows, work=work, good=good, counted=counted)

    def calm(self, model: str, group: Group, since_s: float) -> bool:
        """Whether the last look still holds that found nothing to gain: few requests more, and all of them good."""
        desk, was = self._desk, self._calm.get(model)
        if was is None or was.version != desk.fleet.version or not was.num_left:
            return False
        was.num_left -= 1
        num, prompt_tokens = desk.traffic.volume(desk.now, model, was.span_s)
        if not num or was.prefill_use * prompt_tokens > CALM_USE * was.prompt_tokens:
            return False
        if was.decode_use * num > CALM_USE * was.num:
            return False
        first_s = max(since_s, desk.now - was.span_s)
        good, counted = desk.traffic.outcome(first_s, desk.now, model, desk.config.classes, pace_of(group))
        return good == counted

    def changing(self, model: str) -> bool:
        """Whether the shortest window is of two loads."""
        return self._desk.traffic.changing(self._desk.now, model, SHORT * self._desk.config.autopilot_window_s)

    def turns_back(self, model: str, group: Group, evidence: Evidence, advice: Advice) -> Said | None:
        """Why the move would not pay if the load turns back after as long as it did before; None when it would."""
        desk, config = self._desk, self._desk.config
        slot_s, ready = SLOT * config.autopilot_window_s, evidence.windows[0].instances
        loads: list[Load] = desk.traffic.slots(desk.now, model, slot_s, pace_of(group))
        slots = [Predictor(ready, one, config.classes, config) if one.shapes else None for one in loads]
        return turns_back(slots, evidence.roles, advice, slot_s, SHORT * config.autopilot_window_s)

    def _content(
        self, model: str, window: Predictor, roles: Mapping[InstanceId, Role], since_s: float, pace: Pace
    ) -> bool:
        """Whether this window leaves nothing to gain, by forecast and by outcome."""
        split = window.split(roles)
        found = window.forecast(split)
        if found is None or found.attainment < 1.0 - 2 * LEAST_STEP:
            return False
        good, counted = self._outcome(model, window, since_s, pace)
        if good < (1.0 - 2 * LEAST_STEP) * counted:
            return False
        span_s, version = window.load.span_s, self._desk.fleet.version
        num, prompt_tokens = self._desk.traffic.volume(self._desk.now, model, span_s)
        self._calm[model] = _Calm(version, span_s, num, prompt_tokens, found.prefill_use, found.decode_use)
        return True

    def _correct(
        self, model: str, windows: list[Predictor], roles: Mapping[InstanceId, Role], since_s: float, pace: Pace
    ) -> None:
        """All windows by the middle one's outcome, and the shortest also by its own where that is worse; where it is
        better the load may only just be building up."""
        if not windows:
            return
        split, whole_s = windows[0].split(roles), 0.9 * self._desk.config.autopilot_window_s
        usual = next((one for one in windows if one.load.span_s >= whole_s), None)
        if usual is not None:
            usual.correct(split, *self._outcome(model, usual, since_s, pace), 1.0 / MAX_CORRECTION, MAX_CORRECTION)
            for one in windows:
                one.factors = usual.factors
        windows[0].correct(split, *self._outcome(model, windows[0], since_s, pace), 1.0, MAX_CORRECTION)

    def _outcome(self, model: str, window: Predictor, since_s: float, pace: Pace) -> tuple[int, int]:
        first_s = self._desk.now - window.load.span_s
        return (0, 0) if first_s < since_s else self._outcome_since(model, first_s, pace)

    def _outcome_since(self, model: str, first_s: float, pace: Pace) -> tuple[int, int]:
        if first_s not in self._outcomes:
            desk = self._desk
            self._outcomes[first_s] = desk.traffic.outcome(first_s, desk.now, model, desk.config.classes, pace)
        return self._outcomes[first_s]


def since_of(ended_s: float | None) -> float:
    """When roles last changed, for `gather`."""
    return -math.inf if ended_s is None else ended_s
