"""Who waits for a place, in which order, and who is told early that waiting is hopeless."""

from __future__ import annotations

import math
from bisect import insort
from random import Random
from typing import NamedTuple

from controlplane.core.config import CoreConfig
from controlplane.core.fleet import Group
from controlplane.core.lifecycle import Request
from transfer.said import Said, say

LOOK_AHEAD = 8
"""Waiting requests tried behind one that found no room; smaller ones may fit."""
STARVED_S = 5.0
"""A request without room for this long is not overtaken any more."""


class WaitingLine:
    """Requests without a place, by model, in order of priority and arrival. Bounded by admission; a policy may try them
    in an order of its own."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def add(self, request: Request) -> None:
        insort(self._lines.setdefault(request.spec.model, []), request, key=lambda one: one.rank)

    def discard(self, request: Request) -> None:
        """Idempotent."""
        line = self._lines.get(request.spec.model, [])
        if request in line:
            line.remove(request)
            if not line:
                del self._lines[request.spec.model]

    def models(self) -> list[str]:
        return list(self._lines)

    def of(self, model: str) -> list[Request]:
        """A copy of one model's line."""
        return list(self._lines.get(model, ()))


class Rejection(NamedTuple):
    said: Said
    retry_after_s: float


def predicted_wait_s(
    group: Group | None, line: list[Request], usual_hold_s: float, now: float, computed_share: float = 1.0,
    on_decode: bool = False,
) -> float:  # fmt: skip
    """Seconds until a request at the end of the line gets a place: the slower of prefill (tokens ahead that must be
    computed over the fleet's rate) and decode (Little's law: requests ahead x usual stay / running requests). Those
    that let others go ahead do not count. on_decode: decode instances compute prompts, too."""
    if group is None:
        return 0.0
    servers = [*group.prefills, *group.mixed]
    if on_decode or not servers:
        servers += group.decodes
    rate = sum(one.rate_tokens_per_s for one in servers)
    line = [one for one in line if not one.yields]
    ahead = computed_share * sum(one.num_tokens for one in line)
    charged_s = min((one.queue_s(now) for one in servers), default=0.0)
    prefill_s = charged_s + ahead / rate if rate > 0 else 0.0
    rows = sum(one.rows for one in (*group.decodes, *group.mixed))
    decode_s = len(line) * usual_hold_s / rows if rows else 0.0
    return max(prefill_s, decode_s)


def reject_full(config: CoreConfig, num_waiting: int, wait_s: float, rng: Random) -> Rejection | None:
    """429 when the line is as long as it may get."""
    if num_waiting < config.max_queue:
        return None
    again_s = retry_after_s(config, wait_s, rng)
    code = "ended.full_for" if wait_s >= 0.05 else "ended.full"
    return Rejection(say(code, num=num_waiting, seconds=f"{wait_s:.1f}", again=f"{again_s:.0f}"), again_s)


def reject_hopeless(
    config: CoreConfig, request: Request, ttft_s: float, rng: Random, error_s: float = 0.0
) -> Rejection | None:
    """429 when the predicted TTFT is beyond what the request can use by more than error_s, the prediction's error.
    Early rejection as in Mooncake (FAST'25, section 7), by default only against the request's own timeout."""
    if config.early_reject == "never" or request.num_resumes or request.chosen is not None:
        return None
    limit_s = request.spec.timeout_s
    if config.early_reject == "objective" and request.slo is not None:
        limit_s = min(limit_s, request.slo.ttft_s)
    if ttft_s - error_s <= limit_s:
        return None
    return late_rejection(config, ttft_s, limit_s, rng, error_s)


def late_rejection(config: CoreConfig, ttft_s: float, limit_s: float, rng: Random, error_s: float = 0.0) -> Rejection:
    """The answer to a request whose first token is predicted in ttft_s, later than limit_s."""
    again_s = retry_after_s(config, ttft_s - limit_s, rng)
    predicted = say("ended.predicted" if error_s else "ended.predicted_exactly", seconds=f"{ttft_s:.1f}",
                    error=f"{error_s:.1f}")  # fmt: skip
    code = "ended.late" if limit_s > 0.0 else "ended.rest_too_long"
    return Rejection(say(code, predicted=predicted, limit=f"{limit_s:.4g}", again=f"{again_s:.0f}"), again_s)


def retry_after_s(config: CoreConfig, wait_s: float, rng: Random) -> float:
    """Whole seconds, at least one; up to half as long again, so that clients turned away together return apart."""
    return float(min(config.max_retry_after_s, max(1, math.ceil(wait_s * (1.0 + 0.5 * rng.random())))))
