"""Continuous batching of one instance as a pure core: events in, effects out, steps pulled (nodes/core/events.py).

Performs nothing and reads no clock; a role does. Iteration-level scheduling as in Orca (OSDI'22, section 3.1),
paged blocks and preemption by recompute as in vLLM (SOSP'23, sections 4.3 and 4.5), chunked prefill beside decodes
as in Sarathi-Serve (OSDI'24, section 4.2).
"""

from __future__ import annotations

from nodes.core.admission import Admission, computed
from nodes.core.counted import CountedTokens
from nodes.core.endings import Endings
from nodes.core.events import (
    Arriving,
    Effect,
    Emit,
    Pause,
    Resume,
    StepDone,
    StepPlan,
    StepUndone,
    Work,
)
from nodes.core.planning import InStep, num_even_steps, plan_step
from nodes.core.residency import BatchConfig, Residency
from nodes.core.sequence import Roster, Sequence, State
from nodes.engines.engine import Sampled
from transfer.errors import EngineFailed, IllegalTransition
from transfer.terms import FinishReason


class BatchCore(Admission):
    """All sequences of one instance. One step at a time; every other event is taken while a step runs.

    Guarantees beyond Admission's: blocks of a sequence in the running step are not reused before StepDone or
    StepUndone; a sequence that fits alone in the arena finishes.
    """

    def __init__(self, config: BatchConfig) -> None:
        roster = Roster()
        residency = Residency(config.checked(), roster)
        super().__init__(residency, roster, Endings(roster, residency.pool))
        self._step: list[InStep] | None = None
        self._handlers |= {
            Arriving: lambda event, now, effects: self._fetching.arriving(event),
            StepDone: self._step_done,
            StepUndone: self._step_undone,
            Pause: lambda event, now, effects: self._takeover.pause(event, effects),
            Resume: lambda event, now, effects: self._takeover.resume(event),
        }

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

    def _make_room(self) -> None:
        if self._step is None and self._roster.running:
            self._residency.grow_running()  # never beside a step: what has to be preempted may be in it

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
            effects.append(computed(sequence))
        index = sequence.num_output
        finish = sequence.append(sampled.token_id)
        effects.append(_emit(sequence, index, sampled, finish))
        if finish is not None:
            self._endings.end(sequence, "finish", effects)
        elif sequence.state is State.PREFILLING:
            self._roster.move(sequence, "first_token")
        elif sequence.pause_wanted:
            self._takeover.stop_stepping(sequence, effects)


_ANY = Sampled(0)


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
