"""What the autopilot says and takes as JSON: its looks, what it is told to leave alone, how its moves came out.

Plain structs, no behaviour; the paths are named in api.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transfer.said import Said
from transfer.terms import Struct

AutopilotMode = Literal["off", "advise", "auto"]
MAX_NAME_CHARS = 256


class Evaluation(Struct, frozen=True):
    """One look of the autopilot. ago_s: seconds before this answer. code: quiet (too little traffic), measuring (not
    for long enough yet), met (nothing to gain), unsure, blind (heartbeats are out), busy (a plan runs), pinned,
    resting, advise, move, refused.

    gain: predicted, as a share of goodput; low and high bound its 80 % interval; None where nothing is proposed.
    """

    ago_s: float
    model: str
    code: str
    line: str
    moves: dict[str, str] = {}
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    duration_s: float | None = None
    said: Said | None = None
    """The line."""


class LookRow(Struct, frozen=True):
    """Looks of the autopilot, one after another, that said the same but for their numbers: line is the first one's, num
    how many they were. began_at, ended_at: Unix time. look_id: of this row alone."""

    look_id: str
    model: str
    code: str
    line: str
    num: int = 1
    began_at: float = 0.0
    ended_at: float = 0.0


class PinView(Struct, frozen=True):
    """The autopilot leaves it alone. subject: an instance's id, or "split": all roles. left_s None: until released."""

    subject: str
    who: str
    left_s: float | None
    why: str = ""


class ScoredMove(Struct, frozen=True):
    """Attainment after a move: predicted before it, expected by the model for the load that then came, and measured of
    the requests that arrived after it. gain: predicted, as a share of goodput."""

    plan_id: str
    actor: str
    change: str
    predicted: float
    expected: float
    measured: float
    num_requests: int
    gain: float | None = None


class ScoreView(Struct, frozen=True):
    """bias: mean of measured - expected attainment; error: root mean square of it as a share of the expected one, with
    what profiles declare as its beginning. This error is what the intervals of the next moves allow for."""

    num: int = 0
    bias: float | None = None
    error: float | None = None
    moves: tuple[ScoredMove, ...] = ()


class AutopilotSettings(Struct, frozen=True):
    """every_s, window_s and rest_s are its three timers. max_moves None: a third of the engines."""

    every_s: float
    window_s: float
    rest_s: float
    floor: int
    max_moves: int | None
    pin_s: float


class AutopilotView(Struct, frozen=True):
    """GET /v1/autopilot. evaluations and score: the newest first. shown: what looks in a row agree on, or what stands
    until others do; line is its."""

    mode: AutopilotMode
    rule: str
    line: str
    settings: AutopilotSettings
    evaluations: tuple[Evaluation, ...] = ()
    pins: tuple[PinView, ...] = ()
    score: ScoreView = ScoreView()
    said: Said | None = None
    """The line."""
    rule_said: Said | None = None
    shown: Evaluation | None = None


class AutopilotRequest(Struct, frozen=True):
    """What to change; None leaves it. max_moves 0: a third of the engines."""

    mode: AutopilotMode | None = None
    floor: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    max_moves: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"


class PinRequest(Struct, frozen=True):
    """subject: an instance's id, or "split". ttl_s None: until released."""

    subject: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)] = "split"
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    why: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"
