"""TPOT by the instance on which requests ended, over the last minute. Bounded: a histogram a second and instance."""

from __future__ import annotations

from collections import deque

from controlplane.core.buckets import Buckets
from transfer.terms import InstanceId


class Paces:
    def __init__(self, span: int) -> None:
        """span: slots of one second that count."""
        self._span = span
        self._slots: deque[tuple[int, dict[InstanceId, Buckets]]] = deque()
        self._sums: dict[InstanceId, Buckets] = {}

    def add(self, slot: int, instance_id: InstanceId, index: int | None, tpot_s: float) -> None:
        """One request ended there. index: as Buckets.add_to."""
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, {}))
        for by_instance in (self._slots[-1][1], self._sums):
            by_instance.setdefault(instance_id, Buckets()).add_to(index, tpot_s)

    def expire(self, slot: int) -> None:
        """Let go of what is older than the span when `slot` is the present one."""
        while self._slots and self._slots[0][0] <= slot - self._span:
            for instance_id, buckets in self._slots.popleft()[1].items():
                total = self._sums[instance_id]
                total.subtract(buckets)
                if not total.count:
                    del self._sums[instance_id]

    def median(self, instance_id: InstanceId) -> float | None:
        """Seconds; None where no request with a second token ended."""
        found = self._sums.get(instance_id)
        return None if found is None else found.quantile(0.5)
