"""The core of an instance whose engine batches by itself: events in, effects out, jobs launched (nodes/core/jobs.py).

Decides what is with the engine, which arena blocks it reads and writes, and when those are free again; computes and
performs nothing. The arena holds KV of prompts, as they come and go, and is the prefix cache: what a request generates
stays in the engine while it runs, and is saved beside the prompt when it has ended and there is room (keeps.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from nodes.core.admission import Admission
from nodes.core.blocks import BlockTable
from nodes.core.endings import Endings
from nodes.core.events import Add, Arriving, CannotPause, Effect, Emit, KvReady, Pause, SequenceSpec, Work
from nodes.core.jobs import Began, Cancel, Drew, JobOver, Keep, Keeping, Kept, Launch, Saved, Started
from nodes.core.keeps import Keeps
from nodes.core.launched import Launched
from nodes.core.sequence import Roster, Sequence, State
from nodes.core.served_residency import ServedConfig, ServedResidency
from nodes.engines.served import Job, Output
from transfer.terms import RequestId, SamplingParams


class ServedCore(Admission):
    """All sequences of one instance. A sequence is launched as soon as it has its blocks and what comes into them.

    Guarantees beyond Admission's: each Launch is for a sequence that has no other job; blocks of a job are not reused
    before its JobOver, whatever ends the sequence (Cancel is said where it is dropped); a request is not admitted again
    before. Nothing is preempted or paused. Events of a job that is not here change nothing.
    """

    config: ServedConfig
    _residency: ServedResidency

    def __init__(self, config: ServedConfig) -> None:
        roster = Roster()
        residency = ServedResidency(config.checked(), roster)
        super().__init__(residency, roster, _Endings(roster, residency.pool))
        self._jobs: dict[RequestId, Launched] = {}
        self._keeps = Keeps(residency.pool, config.block_size)
        self._handlers |= {
            Arriving: lambda event, now, effects: None,  # nothing is computed beside a fetch: Fetched follows
            KvReady: self._kv_ready,
            Pause: lambda event, now, effects: self._cannot_pause(event, effects),
            Began: lambda event, now, effects: self._began(event, effects),
            Saved: lambda event, now, effects: self._saved(event),
            Drew: lambda event, now, effects: self._drew(event, effects),
            JobOver: self._job_over,
            Keep: self._keep,
            Kept: lambda event, now, effects: self._keeps.kept(event),
        }

    # --- requests come --------------------------------------------------------------------------------------

    def _add(self, event: Add, now: float, effects: list[Effect]) -> None:
        spec = event.spec
        here = self._roster.live.get(spec.request_id)
        if here is not None and here.in_step and here.generation < spec.generation:
            self._endings.end(here, "drop", effects)
        if spec.request_id in self._roster.leaving:
            busy = "an older placement of the request is still leaving the engine"
            effects.append(self._refusal(spec, busy, retry=True))
        else:
            super()._add(event, now, effects)

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        sequence = super()._new_sequence(spec)
        if not self.config.shares_kv:
            sequence.fetch_blocks = 0
        return sequence

    def _kv_ready(self, event: KvReady, now: float, effects: list[Effect]) -> None:
        self._takeover.kv_ready(event, effects)
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is not None:
            self._launch(sequence, effects)

    def _prefilling(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        self._maybe_computed(sequence, now, effects)
        if sequence.state is State.PREFILLING:
            self._launch(sequence, effects)

    def _launch(self, sequence: Sequence, effects: list[Effect]) -> None:
        sequence.in_step = True
        blocks = sequence.table.blocks[: self._residency.staged_blocks(sequence)]
        received = sequence.work is Work.RECEIVE
        job = Job(
            sequence.request_id, sequence.generation, list(sequence.tokens), sequence.num_output,
            self._sampling(sequence), blocks, num_loaded=sequence.num_computed,
            save_from=len(blocks) if received else sequence.num_computed // sequence.block_size,
            salt=sequence.spec.salt, priority=sequence.spec.priority,
        )  # fmt: skip
        self._jobs[sequence.request_id] = Launched(sequence, job, self.config.num_layers)
        effects.append(Launch(job=job))

    def _sampling(self, sequence: Sequence) -> SamplingParams | None:
        """Engines refuse to begin what cannot end within their context; here it ends there."""
        params = sequence.params
        room = self.config.max_length - (len(sequence.tokens) - sequence.num_output)
        if params is None or params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    # --- a job runs and ends --------------------------------------------------------------------------------

    def _began(self, event: Began, effects: list[Effect]) -> None:
        if launched := self._find(event):
            _say_started(launched.sequence, effects)

    def _saved(self, event: Saved) -> None:
        if launched := self._find(event):
            launched.saved(event.layer, event.first, event.count)
            launched.sequence.num_computed = max(launched.sequence.num_computed, launched.num_final_tokens)
            self._residency.commit(launched.sequence)

    def _drew(self, event: Drew, effects: list[Effect]) -> None:
        launched, output = self._find(event), event.output
        if launched is None or launched.finish is not None:
            return
        sequence = launched.sequence
        _say_started(sequence, effects)
        if sequence.work is Work.PREFILL:
            launched.told_cached(output.cached_tokens)
            return
        launched.finish = output.finish
        if not output.token_ids and output.finish is None:
            return
        cached_tokens = None
        if not sequence.reported_cached:
            launched.told_cached(output.cached_tokens)
            sequence.reported_cached = True
            effects.append(launched.computed())
            cached_tokens = launched.cached_prompt_tokens()
        effects.append(_emit(sequence, output, cached_tokens))
        sequence.tokens.extend(output.token_ids)
        sequence.num_output += len(output.token_ids)
        if sequence.state is State.PREFILLING:
            self._roster.move(sequence, "first_token")

    def _job_over(self, event: JobOver, now: float, effects: list[Effect]) -> None:
        launched = self._jobs.get(event.request_id)
        if launched is None or launched.job.generation != event.generation:
            return
        del self._jobs[event.request_id]
        self._blocked = ()
        sequence = launched.sequence
        sequence.in_step = False
        if sequence.state is State.LEAVING:
            self._endings.leave(sequence, effects)
        elif launched.finish is not None:
            self._endings.end(sequence, "finish", effects)
        elif event.error is not None:
            self._endings.end(sequence, "lose", effects, lost=event.error)
        elif sequence.work is Work.PREFILL and sequence.num_computed >= sequence.num_to_compute:
            _say_started(sequence, effects)
            self._roster.move(sequence, "computed")
            sequence.renew(now)
            effects.append(launched.computed())
        else:
            self._endings.end(sequence, "lose", effects, lost=launched.unfinished())

    def _find(self, event: Began | Saved | Drew) -> Launched | None:
        """The job, while its sequence has not been dropped."""
        launched = self._jobs.get(event.request_id)
        if launched is None or launched.job.generation != event.generation:
            return None
        return None if launched.sequence.state is State.LEAVING else launched

    def _keep(self, event: Keep, now: float, effects: list[Effect]) -> None:
        if self.num_waiting:
            effects.append(Keeping(name=event.name, blocks=[], num_cached=0))
        else:
            self._keeps.keep(event, now, effects)

    def _other_tables(self) -> list[BlockTable]:
        return super()._other_tables() + self._keeps.tables()

    def _cannot_pause(self, event: Pause, effects: list[Effect]) -> None:
        sequence = self._roster.find(event.request_id, event.generation)
        reason = (
            "it is not here" if sequence is None
            else "its engine batches by itself and cannot let go of a request that runs; place it anew instead"
        )  # fmt: skip
        effects.append(CannotPause(request_id=event.request_id, generation=event.generation, reason=reason))


class _Endings(Endings):
    """Where a sequence is dropped that the engine still computes, the job is cancelled."""

    def end(
        self, sequence: Sequence, event: str, effects: list[Effect], *, generation: int = -1, lost: str | None = None
    ) -> None:
        if event == "drop" and sequence.in_step:
            effects.append(Cancel(request_id=sequence.request_id, generation=sequence.generation))
        super().end(sequence, event, effects, generation=generation, lost=lost)


def _say_started(sequence: Sequence, effects: list[Effect]) -> None:
    if not sequence.started and sequence.work is not Work.RECEIVE:
        sequence.started = True
        effects.append(Started(request_id=sequence.request_id, generation=sequence.generation))


def _emit(sequence: Sequence, output: Output, cached_tokens: int | None) -> Emit:
    return Emit(
        request_id=sequence.request_id, generation=sequence.generation, index=sequence.num_output,
        token_ids=output.token_ids, logprobs=output.logprobs, finish=output.finish, cached_tokens=cached_tokens,
    )  # fmt: skip
