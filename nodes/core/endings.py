"""How sequences leave an instance: dropped, handed over, finished, or at the end of a lease; always answered by Gone.

Blocks that the running step still writes come back when it is done, and only then is Gone said.
"""

from __future__ import annotations

from nodes.core.blocks import BlockPool
from nodes.core.events import CannotPause, Effect, Gone
from nodes.core.sequence import LEASED, Roster, Sequence, State
from transfer.terms import RequestId

_LEASE_OVER = {
    State.RECEIVING: "no KV arrived",
    State.FETCHING: "the fetch from the pool did not end",
    State.COMPUTED: "the receiver did not acknowledge the KV",
}


class Endings:
    """Idempotent: what is not here is answered as gone. Remembers nothing of a request that has gone."""

    def __init__(self, roster: Roster, pool: BlockPool) -> None:
        self._roster, self._pool = roster, pool

    def forget(self, request_id: RequestId, generation: int, event: str, effects: list[Effect]) -> None:
        """Drop or hand over whatever is here of the request up to this generation."""
        sequence = self._roster.live.get(request_id)
        if sequence is not None and sequence.generation <= generation:
            self.end(sequence, event, effects, generation=generation)
        else:
            self.say_gone(request_id, generation, effects)

    def end(
        self, sequence: Sequence, event: str, effects: list[Effect], *, generation: int = -1, lost: str | None = None
    ) -> None:
        """Take a sequence's blocks back and answer Gone: now, or when the step that writes them is done."""
        generation = max(generation, sequence.generation)
        if event == "drop" and sequence.in_step:
            self._roster.move(sequence, "drop_in_step")
            self.say_gone(sequence.request_id, generation, effects)
        else:
            self._roster.move(sequence, event)
            num_blocks = self._pool.release(sequence.table)
            self.say_gone(sequence.request_id, generation, effects, num_blocks, lost)
        if sequence.pause_wanted:
            sequence.pause_wanted = False
            effects.append(
                CannotPause(request_id=sequence.request_id, generation=sequence.generation, reason="it has ended")
            )

    def leave(self, sequence: Sequence, effects: list[Effect]) -> None:
        """The step that the sequence was in has ended, and it was dropped meanwhile: its blocks return, and all who
        asked are answered."""
        self._roster.move(sequence, "step_done")
        num_blocks = self._pool.release(sequence.table)
        for gone in sequence.owed:
            self.say_gone(gone.request_id, gone.generation, effects, gone.num_blocks + num_blocks, gone.lost)

    def expire(self, now: float, effects: list[Effect]) -> None:
        """End every sequence whose lease is over: what it waits for has not moved since the last Renew."""
        for state in LEASED:
            for sequence in list(self._roster.by_state[state]):
                if now >= sequence.deadline:
                    lost = f"lease over: {_LEASE_OVER[state]} within {sequence.spec.lease_s:g} s"
                    self.end(sequence, "lose", effects, lost=lost)

    def lease_over(self, now: float) -> bool:
        return any(now >= one.deadline for state in LEASED for one in self._roster.by_state[state])

    def say_gone(
        self,
        request_id: RequestId,
        generation: int,
        effects: list[Effect],
        num_blocks: int = 0,
        lost: str | None = None,
    ) -> None:
        """Answer Gone, or owe it while an older generation of the request is still being written."""
        gone = Gone(request_id=request_id, generation=generation, num_blocks=num_blocks, lost=lost)
        leaving = self._roster.leaving.get(request_id)
        if leaving is None or leaving.generation > generation:
            effects.append(gone)
        elif all(owed.generation != generation for owed in leaving.owed):
            leaving.owed.append(gone)
