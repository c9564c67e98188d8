"""Leading blocks that come from a pool: before the prompt's compute, or layer by layer beside it.

Decides what of a sequence is valid then; moves no bytes (a role's fetch does) and says no effects (batching.py does).
"""

from __future__ import annotations

from nodes.core.events import Arriving, Fetched
from nodes.core.residency import Residency
from nodes.core.sequence import Roster, Sequence, State
from transfer.errors import IllegalTransition


class Fetching:
    """Handlers of Arriving and Fetched. Those for a generation that is not here change nothing."""

    def __init__(self, roster: Roster, residency: Residency) -> None:
        self._roster, self._residency = roster, residency

    def arriving(self, event: Arriving) -> None:
        """Let it compute beside its fetch, if something is left to compute."""
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None:
            return
        promised = min(event.num_blocks, sequence.num_blocks_to_fetch)
        if promised <= sequence.have_blocks or promised * sequence.block_size >= sequence.num_to_compute:
            return
        self._roster.move(sequence, "arriving")
        sequence.arriving_blocks = sequence.num_pushed = promised
        sequence.num_computed = promised * sequence.block_size
        sequence.overlapped = True

    def fetched(self, event: Fetched) -> Sequence | None:
        """The fetch ended. Returns the sequence when what it has computed may have changed."""
        sequence = self._roster.find(event.request_id, event.generation)
        if sequence is None:
            return None
        valid = max(sequence.have_blocks, min(event.num_blocks, sequence.num_blocks_to_fetch))
        if sequence.arriving_blocks:
            if valid >= sequence.arriving_blocks:
                self.arrived(sequence)
            elif sequence.in_step:
                sequence.valid_blocks = valid
            else:
                self._continue_from(sequence, valid)
        elif sequence.overlapped and sequence.state is not State.FETCHING:
            return None  # a step that waited for all of it said so before
        else:
            self._roster.move(sequence, "fetched")
            self._continue_from(sequence, valid)
        return sequence

    def arrived(self, sequence: Sequence) -> None:
        """All that was on its way is in place. Raises IllegalTransition when the fetch has failed."""
        if sequence.valid_blocks is not None:
            raise IllegalTransition(
                f"request {sequence.request_id}", "fetch failed", "arrived", tuple(sequence.history)
            )
        sequence.fetched_blocks = sequence.arriving_blocks - sequence.have_blocks
        sequence.arriving_blocks = 0
        self._residency.commit(sequence)

    def undone(self, sequence: Sequence, failed: bool, now: float) -> None:
        """The step of a sequence with blocks on their way was abandoned; `failed`: because they will not come."""
        if sequence.valid_blocks is not None:
            self._continue_from(sequence, sequence.valid_blocks)
        elif failed:  # its blocks may be written until the fetch has ended
            self._roster.move(sequence, "fetch_failed")
            sequence.arriving_blocks = 0
            sequence.num_pushed = sequence.have_blocks
            sequence.num_computed = sequence.have_blocks * sequence.block_size
            sequence.renew(now)

    def _continue_from(self, sequence: Sequence, valid: int) -> None:
        sequence.arriving_blocks, sequence.valid_blocks = 0, None
        sequence.fetched_blocks = valid - sequence.have_blocks
        sequence.num_pushed = valid
        sequence.num_computed = valid * sequence.block_size
        self._residency.commit(sequence)
