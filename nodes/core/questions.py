"""What may be asked of a batching core at any time: its load, what it holds, who runs. Changes nothing but leases."""

from __future__ import annotations

from nodes.core import report
from nodes.core.blocks import BlockPool, BlockTable
from nodes.core.endings import Endings
from nodes.core.pins import Pins
from nodes.core.residency import Residency
from nodes.core.sequence import Roster, State
from transfer.terms import RequestId
from transfer.wire.messages import Holding, LoadReport


class Questions:
    """The part of a core that answers; its parts are made in Admission (admission.py)."""

    _roster: Roster
    _residency: Residency
    _pool: BlockPool
    _pins: Pins
    _endings: Endings

    @property
    def idle(self) -> bool:
        """No request is here, nor anything the engine still computes of one."""
        return not self._roster.live and not self._roster.leaving

    @property
    def running_ids(self) -> list[RequestId]:
        """Requests that generate, in the order they are served: those that can be paused."""
        return [sequence.request_id for sequence in self._roster.running]

    @property
    def running(self) -> list[tuple[RequestId, int]]:
        """The same, with their generations."""
        return [(sequence.request_id, sequence.generation) for sequence in self._roster.running]

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Prefill work that there is no room for yet."""
        return len(self._roster.waiting)

    @property
    def num_prefilling(self) -> int:
        return len(self._roster.prefilling)

    def blocks_of(self, request_id: RequestId, generation: int) -> list[int] | None:
        """The table of one request now (a copy); None when this generation of it is not here."""
        sequence = self._roster.find(request_id, generation)
        return None if sequence is None else list(sequence.table.blocks)

    def state_of(self, request_id: RequestId, generation: int) -> State | None:
        sequence = self._roster.find(request_id, generation)
        return None if sequence is None else sequence.state

    def holdings(self) -> tuple[Holding, ...]:
        """Every request that holds blocks, those included that were dropped in the running step."""
        return report.holdings(self._roster)

    def load(self, now: float, *, step_s: float = 0.0, speed: float = 1.0, unsettled: int = 0) -> LoadReport:
        """This instance's load. step_s, speed, unsettled: what its shell measures. waiting: not computing yet."""
        return report.load_report(
            self._roster, self._residency, self._other_tables(), step_s=step_s, speed=speed, unsettled=unsettled
        )

    def renew(self, request_id: RequestId, generation: int, now: float) -> None:
        """As the event Renew, where nothing else may change."""
        if sequence := self._roster.find(request_id, generation):
            sequence.renew(now)

    def lease_over(self, now: float) -> bool:
        """Whether a Tick now would end a sequence or a pin."""
        return self._endings.lease_over(now) or self._pins.lease_over(now)

    def cached_hashes(self) -> tuple[bytes, ...]:
        """Hash of every whole block that can be found here now, held or not: for a directory's snapshot."""
        return self._pool.digests()

    def check(self) -> int:
        """Full integrity check, O(num_blocks): leaked blocks, 0 when all is well. Raises IllegalTransition when a
        block is two things at once. `load` does the cheap half of it."""
        return self._pool.check([one.table for one in self._roster.everyone()] + self._other_tables())

    def _other_tables(self) -> list[BlockTable]:
        """That no sequence has."""
        return self._pins.tables()
