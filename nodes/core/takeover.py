"""A running sequence changes instance: pause and resume at the source, grow and take over at the target.

The first handoff of prefilled KV ends in the same KvReady. Moves no bytes (transfer/kv does).
"""

from __future__ import annotations

from nodes.core.counted import own_tokens
from nodes.core.endings import Endings
from nodes.core.events import CannotPause, Effect, Grow, Grown, KvReady, Pause, Paused, Resume
from nodes.core.residency import Residency
from nodes.core.sequence import Roster, Sequence, State
from transfer.errors import IllegalTransition


class Takeover:
    """Handlers of KvReady, Grow, Pause and Resume. Those for a generation that is not here change nothing."""

    def __init__(self, roster: Roster, residency: Residency, endings: Endings) -> None:
        self._roster, self._residency, self._endings = roster, residency, endings

    def kv_ready(self, event: KvReady, effects: list[Effect]) -> None:
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None:
            return
        tokens = event.tokens
        if tokens is not None and (wrong := self._residency.cannot_take_over(sequence, tokens)):
            self._endings.end(sequence, "lose", effects, lost=wrong)
            return
        self._roster.move(sequence, "kv_ready")
        if tokens is not None:
            sequence.tokens, sequence.num_output = own_tokens(tokens), event.num_output
        sequence.num_computed = len(sequence.tokens) - 1
        self._residency.commit(sequence)

    def grow(self, event: Grow, now: float, effects: list[Effect]) -> None:
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None:
            self._endings.say_gone(event.request_id, event.generation, effects, lost="the reservation is not here")
            return
        if sequence.state is not State.RECEIVING:
            raise IllegalTransition(f"request {event.request_id}", sequence.state, "grow", tuple(sequence.history))
        table, pool = sequence.table, self._residency.pool
        if not pool.extend(table, event.num_blocks - len(table.blocks), 1):
            lost = (
                f"a migration of {event.num_blocks} KV blocks outgrew its {len(table.blocks)}, {pool.num_free} are free"
            )
            self._endings.end(sequence, "lose", effects, lost=lost)
            return
        sequence.renew(now)
        effects.append(Grown(request_id=event.request_id, generation=event.generation, blocks=list(table.blocks)))

    def pause(self, event: Pause, effects: list[Effect]) -> None:
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None or sequence.state not in (State.RUNNING, State.PAUSED):
            reason = "it is not here" if sequence is None else f"it is {sequence.state}, not running"
            effects.append(CannotPause(request_id=event.request_id, generation=event.generation, reason=reason))
        elif sequence.state is State.PAUSED:
            self._say_paused(sequence, effects)
        elif sequence.in_step:
            sequence.pause_wanted = True
        else:
            self.stop_stepping(sequence, effects)

    def stop_stepping(self, sequence: Sequence, effects: list[Effect]) -> None:
        """Pause a running sequence that is in no step."""
        sequence.pause_wanted = False
        self._roster.move(sequence, "pause")
        self._say_paused(sequence, effects)

    def resume(self, event: Resume) -> None:
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None:
            return
        if sequence.pause_wanted:
            sequence.pause_wanted = False
        else:
            self._roster.move(sequence, "resume")

    def _say_paused(self, sequence: Sequence, effects: list[Effect]) -> None:
        num_blocks = -(-(len(sequence.tokens) - 1) // sequence.block_size)
        effects.append(
            Paused(
                request_id=sequence.request_id,
                generation=sequence.generation,
                tokens=own_tokens(sequence.tokens),
                num_output=sequence.num_output,
                blocks=sequence.table.blocks[:num_blocks],
            )
        )
