"""Where a request's time to first token went: a clock that is always in exactly one stage, so that stages add up."""

from __future__ import annotations

QUEUE, ADMISSION, PREFILL, TRANSFER, DECODE = "queue", "decode_admission", "prefill", "transfer", "decode"
STAGES = (QUEUE, ADMISSION, PREFILL, TRANSFER, DECODE)
"""In the order a request passes them: waiting for compute; waiting for room on decode; computing the prompt; KV on its
way after that; from KV received to the first token delivered."""


class StageClock:
    """Loop seconds spent in each stage until the first token. Stages may be entered again after a resume."""

    __slots__ = ("_seconds", "_since", "stage")

    def __init__(self, now: float) -> None:
        self.stage: str | None = QUEUE
        self._since = now
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def enter(self, stage: str | None, now: float) -> None:
        """Leave the present stage at `now`; None stops the clock for good."""
        before = self.stage
        if before is None:
            return
        if now > self._since:
            self._seconds[before] += now - self._since
            self._since = now
        self.stage = stage

    def move(self, source: str, target: str, seconds: float, now: float) -> None:
        """Count up to `seconds` of `source` as `target`: learned later from the node that did the work."""
        stage = self.stage
        if stage is not None:
            self.enter(stage, now)
        moved = min(max(0.0, seconds), self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def so_far(self, now: float) -> dict[str, float]:
        """Seconds by stage up to `now`, stages of zero left out."""
        seconds = dict(self._seconds)
        if self.stage is not None:
            seconds[self.stage] += max(0.0, now - self._since)
        return {stage: spent for stage, spent in seconds.items() if spent > 0}

    def summing_to(self, ttft_s: float, now: float) -> dict[str, float]:
        """Stages that add up to `ttft_s`, the gateway's own measurement. The last stage absorbs the difference
        between its clock and this one; where that is not enough, the stages before it do."""
        seconds = {stage: self._seconds[stage] for stage in STAGES}
        if self.stage is not None:
            seconds[self.stage] += max(0.0, now - self._since)
        difference = ttft_s - sum(seconds.values())
        for stage in reversed(STAGES):
            kept = max(0.0, seconds[stage] + difference)
            difference -= kept - seconds[stage]
            seconds[stage] = kept
        return {stage: spent for stage, spent in seconds.items() if spent > 0}
