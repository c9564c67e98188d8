"""Continuous batching of one instance as a pure core: events in, effects out, steps pulled (nodes/core/events.py).

Performs nothing and reads no clock; a role does. Iteration-level scheduling as in Orca (OSDI'22, section 3.1),
paged blocks and preemption by recompute as in vLLM (SOSP'23, sections 4.3 and 4.5), chunked prefill beside decodes
as in Sarathi-Serve (OSDI'24, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodes.core.counted import CountedTokens
from nodes.core.endings import Endings
from nodes.core.events import (
    Add,
    Admitted,
    Arriving,
    Cached,
    Computed,
    Drop,
    Effect,
    Emit,
    Event,
    Fetched,
    Grow,
    Handed,
    HandsChanged,
    KvReady,
    NotAdmitted,
    Pause,
    Pin,
    Renew,
    Resume,
    SequenceSpec,
    StepDone,
    StepPlan,
    StepUndone,
    Tick,
    Unpin,
    Work,
)
from nodes.core.fetching import Fetching
from nodes.core.pins import Pins
from nodes.core.planning import InStep, num_even_steps, plan_step
from nodes.core.questions import Questions
from nodes.core.residency import BatchConfig, Residency
from nodes.core.sequence import Roster, Sequence, State
from nodes.core.takeover import Takeover
from nodes.engines.engine import Sampled
from transfer.errors import EngineFailed, IllegalTransition
from transfer.terms import FinishReason


class BatchCore(Questions):
    """All sequences of one instance. One step at a time; every other event is taken while a step runs.

    Guarantees: an Add is answered by Admitted or NotAdmitted (prefill work maybe later); every admitted
    sequence ends with exactly one Gone; blocks of a sequence in the running step are not reused before
    StepDone or StepUndone; a sequence that fits alone in the arena finishes. A repeated Add, Drop or Handed
    is harmless. Raises IllegalTransition when a role breaks the order of events.
    """

    def __init__(self, config: BatchConfig) -> None:
        self.config = config.checked()
        self._roster = Roster()
        self._residency = Residency(config, self._roster)
        self._pool = self._residency.pool
        self._endings = Endings(self._roster, self._pool)
        self._takeover = Takeover(self._roster, self._residency, self._endings)
        self._fetching = Fetching(self._roster, self._residency)
        self._pins = Pins(self._pool)
        self._step: list[InStep] | None = None
        self._num_arrivals = 0
        self._blocked: tuple[object, ...] = ()
        self._handlers: dict[type[Event], Callable[[Any, float, list[Effect]], None]] = {
            Add: self._add,
            Arriving: lambda event, now, effects: self._fetching.arriving(event),
            Fetched: self._fetched,
            Renew: self._renew,
            StepDone: self._step_done,
            StepUndone: self._step_undone,
            KvReady: lambda event, now, effects: self._takeover.kv_ready(event, effects),
            Grow: self._takeover.grow,
            Pause: lambda event, now, effects: self._takeover.pause(event, effects),
            Resume: lambda event, now, effects: self._takeover.resume(event),
            Handed: lambda event, now, effects: self._forget(event, "handed", effects),
            Drop: lambda event, now, effects: self._forget(event, "drop", effects),
            Pin: self._pins.pin,
            Unpin: lambda event, now, effects: self._pins.unpin(event.name),
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; the role performs the effects in order, before it handles another."""
        effects: list[Effect] = []
        self._handlers[type(event)](event, now, effects)
        if self._step is None and self._roster.running:
            self._residency.grow_running()  # never beside a step: what has to be preempted may be in it
        if self._roster.waiting:
            self._admit_waiting(now, effects)
        if self._pool.has_changes:
            taken, stored, removed = self._pool.drain()
            if taken:
                effects.insert(0, HandsChanged(blocks=taken))
            if stored or removed:
                effects.append(Cached(stored=stored, removed=removed))
        return effects

    def next_step(self, now: float, *, bare: bool = False) -> StepPlan | None:
        """What the engine shall run now; None when nothing can. Answer it with StepDone or StepUndone first.
        bare: only the size of the step and not its chunks, for whoever only takes its time."""
        if self._step is not None:
            raise IllegalTransition("the batching core", "step running", "next_step")
        planned = plan_step(self._roster, self.config.token_budget, self._residency.preempted, bare=bare)
        if planned is None:
            return None
        self._residency.preempted = []
        plan, self._step = planned
        return plan

    # --- many steps at once: simulators ---------------------------------------------------------------------

    def even_steps(self) -> int:
        """How many steps, the running one included, will only make their decodes longer by a token each, as long as no
        event comes: those may be taken together with `ahead`. 0: take the running one with StepDone."""
        if self._step is None:
            return 0
        waiting = self._roster.waiting
        if waiting and (waiting[0], self._pool.num_free, self._roster.num_active) != self._blocked:
            return 0
        return num_even_steps(self._roster, self._step)

    def ahead(self, count: int) -> None:
        """The running step and those after it have ended, `count` of at most even_steps() as they were when it began;
        the next one runs. The same as so many times StepDone and next_step where tokens are counted (counted.py)."""
        if self._step is None:
            raise IllegalTransition("the batching core", "no step running", "ahead")
        for sequence, _, _ in self._step:
            tokens = sequence.tokens
            if type(tokens) is not CountedTokens or sequence.params is None:
                raise IllegalTransition(f"request {sequence.request_id}", "tokens of its own", "ahead")
            tokens.count_ += count
            sequence.num_output += count
            sequence.num_computed += count
            if tokens.count_ > len(sequence.table.blocks) * sequence.block_size or (
                sequence.num_output >= sequence.params.max_tokens
            ):
                raise IllegalTransition(f"request {sequence.request_id}", f"{tokens.count_} tokens", f"ahead({count})")

    # --- requests come --------------------------------------------------------------------------------------

    def _add(self, event: Add, now: float, effects: list[Effect]) -> None:
        spec = event.spec
        here = self._roster.live.get(spec.request_id)
        if here is not None and spec.generation < here.generation:
            older = f"generation {spec.generation} of the request is older than {here.generation}, which is here"
            effects.append(self._refusal(spec, older, retry=False))
            return
        if here is not None and spec.generation == here.generation:
            here.renew(now)
            if here.admitted:
                effects.append(_admitted(here, self._pool.num_free))
            return
        if here is not None:
            self._endings.end(here, "drop", effects)
        if reason := self._residency.never_fits(spec):
            effects.append(self._refusal(spec, reason, retry=False))
            return
        waiting = self._roster.waiting
        sequence = self._new_sequence(spec)
        if spec.work is Work.PREFILL:
            if len(waiting) >= self.config.max_waiting:
                full = f"{len(waiting)} requests wait here already (max_waiting)"
                effects.append(self._refusal(spec, full, retry=True))
            else:
                self._roster.add(sequence)
            return
        busy = f"{len(waiting)} requests wait here for free KV blocks" if waiting else self._residency.admit(sequence)
        if busy:
            effects.append(self._refusal(spec, busy, retry=True))
        else:
            self._roster.add(sequence)
            self._place(sequence, now, effects)

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        config = self.config
        self._num_arrivals += 1
        return Sequence(
            spec, self._num_arrivals, block_size=config.block_size, max_length=config.max_length,
            eos_token_ids=config.eos_token_ids,
        )  # fmt: skip

    def _refusal(self, spec: SequenceSpec, reason: str, *, retry: bool) -> NotAdmitted:
        return NotAdmitted(
            request_id=spec.request_id, generation=spec.generation, reason=reason, retry=retry,
            free_blocks=self._pool.num_free,
        )  # fmt: skip

    def _admit_waiting(self, now: float, effects: list[Effect]) -> None:
        """In order of rank; the head is never overtaken. Skipped while nothing changed since it found no room."""
        waiting = self._roster.waiting
        while waiting:
            sequence = waiting[0]
            situation = (sequence, self._pool.num_free, self._roster.num_active)
            if situation == self._blocked:
                return
            if self._residency.admit(sequence):
                self._blocked = situation
                return
            self._place(sequence, now, effects)

    def _place(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        """A sequence got its blocks: say so the first time, and start what it waits for."""
        if not sequence.admitted:
            sequence.admitted = True
            effects.append(_admitted(sequence, self._pool.num_free))
        self._blocked = ()
        sequence.renew(now)
        if sequence.work is Work.RECEIVE:
            self._roster.move(sequence, "receive")
        elif sequence.num_blocks_to_fetch > sequence.have_blocks:
            self._roster.move(sequence, "fetch")
        else:
            self._roster.move(sequence, "prefill")
            self._maybe_computed(sequence, now, effects)

    # --- KV comes -------------------------------------------------------------------------------------------

    def _fetched(self, event: Fetched, now: float, effects: list[Effect]) -> None:
        sequence = self._fetching.fetched(event)
        if sequence is not None:
            self._maybe_computed(sequence, now, effects)

    def _maybe_computed(self, sequence: Sequence, now: float, effects: list[Effect]) -> None:
        """Prefill work with KV of all its tokens is done; its receiver's lease starts."""
        if sequence.work is not Work.PREFILL or sequence.num_computed < sequence.num_to_compute:
            return
        self._roster.move(sequence, "computed")
        sequence.renew(now)
        effects.append(_computed(sequence))

    # --- a step ends ----------------------------------------------------------------------------------------

    def _step_done(self, event: StepDone, now: float, effects: list[Effect]) -> None:
        for sequence, count, _ in self._step_over("StepDone", effects):
            if event.quiet and sequence.state is State.RUNNING and self._ran_on(sequence, event):
                continue
            if sequence.arriving_blocks:
                self._fetching.arrived(sequence)
            sequence.num_computed += count
            if sequence.num_computed >= (sequence.num_committed + 1) * sequence.block_size:
                self._residency.commit(sequence)
            if sequence.work is Work.PREFILL:
                self._maybe_computed(sequence, now, effects)
            elif sequence.num_computed == len(sequence.tokens):
                sampled = event.sampled.get(sequence.request_id, _ANY if event.quiet else None)
                self._draw(sequence, sampled, effects)

    def _ran_on(self, sequence: Sequence, event: StepDone) -> bool:
        """A decode whose token nobody wants to hear of, and which goes on: without a word, if it is one."""
        params = sequence.params
        if (
            params is None or sequence.num_output + 1 >= params.max_tokens
            or sequence.num_computed + 2 >= sequence.max_length or sequence.request_id in event.sampled
            or sequence.pause_wanted or not sequence.reported_cached
        ):  # fmt: skip
            return False
        sequence.tokens.append(0)
        sequence.num_output += 1
        sequence.num_computed += 1
        if sequence.num_computed >= (sequence.num_committed + 1) * sequence.block_size:
            self._residency.commit(sequence)
        return True

    def _step_undone(self, event: StepUndone, now: float, effects: list[Effect]) -> None:
        for sequence, _, num_pushed in self._step_over("StepUndone", effects):
            sequence.num_pushed = num_pushed
            if sequence.arriving_blocks:
                self._fetching.undone(sequence, sequence.request_id in event.failed, now)
            elif sequence.pause_wanted:
                self._takeover.stop_stepping(sequence, effects)

    def _step_over(self, event: str, effects: list[Effect]) -> list[InStep]:
        """What was in the step that ended and is still here."""
        step, self._step = self._step, None
        if step is None:
            raise IllegalTransition("the batching core", "no step running", event)
        stayed: list[InStep] = []
        for planned in step:
            sequence = planned[0]
            sequence.in_step = False
            if sequence.state is State.LEAVING:
                self._endings.leave(sequence, effects)
            else:
                stayed.append(planned)
        return stayed

    def _draw(self, sequence: Sequence, sampled: Sampled | None, effects: list[Effect]) -> None:
        if sampled is None:
            raise EngineFailed(f"the engine drew no token for request {sequence.request_id}; replace the instance")
        if not sequence.reported_cached:
            effects.append(_computed(sequence))
        index = sequence.num_output
        finish = sequence.append(sampled.token_id)
        effects.append(_emit(sequence, index, sampled, finish))
        if finish is not None:
            self._endings.end(sequence, "finish", effects)
        elif sequence.state is State.PREFILLING:
            self._roster.move(sequence, "first_token")
        elif sequence.pause_wanted:
            self._takeover.stop_stepping(sequence, effects)

    # --- small ones -----------------------------------------------------------------------------------------

    def _renew(self, event: Renew, now: float, effects: list[Effect]) -> None:
        if sequence := self._roster.find(event.request_id, event.generation):
            sequence.renew(now)

    def _forget(self, event: Handed | Drop, move: str, effects: list[Effect]) -> None:
        self._endings.forget(event.request_id, event.generation, move, effects)

    def _tick(self, event: Tick, now: float, effects: list[Effect]) -> None:
        self._endings.expire(now, effects)
        self._pins.expire(now, effects)


_ANY = Sampled(0)


def _admitted(sequence: Sequence, num_free: int) -> Admitted:
    return Admitted(
        request_id=sequence.request_id,
        generation=sequence.generation,
        blocks=list(sequence.table.blocks),
        have_blocks=min(sequence.have_blocks, sequence.num_computed // sequence.block_size),
        free_blocks=num_free,
    )


def _computed(sequence: Sequence) -> Computed:
    cached, fetched = (blocks * sequence.block_size for blocks in (sequence.have_blocks, sequence.fetched_blocks))
    return Computed(
        request_id=sequence.request_id,
        generation=sequence.generation,
        computed_tokens=sequence.num_to_compute - cached - fetched,
        cached_tokens=cached,
        fetched_tokens=fetched,
    )


def _emit(sequence: Sequence, index: int, sampled: Sampled, finish: FinishReason | None) -> Emit:
    return Emit(
        request_id=sequence.request_id,
        generation=sequence.generation,
        index=index,
        token_ids=(sampled.token_id,),
        logprobs=None if sampled.logprob is None else (sampled.logprob,),
        finish=finish,
        cached_tokens=None if sequence.reported_cached else sequence.report_cached(),
    )
