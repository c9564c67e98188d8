"""How long an engine that batches by itself takes, by when its output comes; compared with what its profile says.

It tells no steps. The time between two outputs of a request is one, as long as no prompt was computed meanwhile; a
prompt's is from where the engine began it, or had ended the prompts before it, to its first output.
"""

from __future__ import annotations

from nodes.core.speed import SpeedMeter
from nodes.engines.served import Job, Output
from transfer.profile import LatencyProfile


class Timed:
    """One job. num_tokens: its context now; num_cached: tokens that the engine need not compute, as far as is known."""

    __slots__ = ("began_at", "is_prompt", "last_at", "num_cached", "num_drawn", "num_tokens")

    def __init__(self, job: Job) -> None:
        self.num_tokens, self.num_cached = len(job.tokens), job.num_loaded
        self.is_prompt = job.num_loaded < len(job.tokens) - 1
        self.began_at: float | None = None
        self.last_at: float | None = None
        self.num_drawn = 0


class JobTimes:
    """Told of jobs as they go; `turn` ends each turn of the loop in which something came."""

    def __init__(self, latency: LatencyProfile, meter: SpeedMeter) -> None:
        self._latency, self._meter = latency, meter
        self._prompts: dict[Timed, None] = {}
        self._decodes: dict[Timed, None] = {}
        self._drew: dict[Timed, None] = {}
        self._done: list[Timed] = []
        self._prompt_ended_at = 0.0

    def began(self, timed: Timed, now: float) -> None:
        timed.began_at = now
        if timed.is_prompt:
            self._prompts[timed] = None

    def drew(self, timed: Timed, output: Output) -> None:
        if timed in self._prompts:
            if output.cached_tokens is not None:
                timed.num_cached = min(output.cached_tokens, timed.num_tokens - 1)
            if output.token_ids:
                self._prompt_done(timed)
        timed.num_drawn += len(output.token_ids)
        if output.token_ids:
            self._drew[timed] = None

    def over(self, timed: Timed, *, well: bool) -> None:
        """Forget it. well: not aborted, nor failed: a prompt of which only KV was wanted is done."""
        self._decodes.pop(timed, None)
        if timed in self._prompts and well:
            self._prompt_done(timed)
        self._prompts.pop(timed, None)

    def turn(self, now: float) -> tuple[float, int]:
        """Seconds of the step that ended, 0.0 where that is not known, and prompt tokens computed in it."""
        step_s, num_prefill_tokens = self._decode_step_s(now), 0
        if self._done:
            num_prefill_tokens = sum(one.num_tokens - one.num_cached for one in self._done)
            step_s = self._prompt_s(now)
            self._prompt_ended_at, self._done = now, []
        for timed in self._drew:
            timed.num_tokens += timed.num_drawn
            timed.num_drawn, timed.last_at = 0, now
            self._decodes[timed] = None
        self._drew = {}
        return step_s, num_prefill_tokens

    def _prompt_done(self, timed: Timed) -> None:
        del self._prompts[timed]
        self._done.append(timed)

    def _decode_step_s(self, now: float) -> float:
        """Mean time of one token since each request's last output."""
        gaps = [(now - one.last_at) / one.num_drawn for one in self._drew
                if one.last_at is not None and one.last_at >= self._prompt_ended_at]  # fmt: skip
        if not gaps:
            return 0.0
        step_s = sum(gaps) / len(gaps)
        if not self._prompts and not self._done:
            context = sum(one.num_tokens for one in self._decodes)
            self._meter.measured(step_s, self._latency.decode_step_s(len(self._decodes), context), now)
        return step_s

    def _prompt_s(self, now: float) -> float:
        """Time of the prompts that are done, as of one step in which the requests that generate drew a token too."""
        began_at = min(now if one.began_at is None else one.began_at for one in self._done)
        measured_s = now - max(began_at, self._prompt_ended_at)
        rows = len(self._decodes)
        context = pairs = sum(one.num_tokens for one in self._decodes)
        for one in self._done:
            context += one.num_tokens
            pairs += (one.num_tokens * (one.num_tokens + 1) - one.num_cached * (one.num_cached + 1)) // 2
        num_new = sum(one.num_tokens - one.num_cached for one in self._done)
        predicted_s = self._latency.step_s(num_new + rows, context, len(self._done) + rows, pairs)
        if measured_s > 0.0:
            self._meter.measured(measured_s, predicted_s, now)
        return measured_s
