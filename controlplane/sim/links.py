"""Who waits for whom on the network: one queue for what an instance sends, one for what it receives.

First come, first served, as a NIC's work queue is and as the emulated engine's link (nodes/roles/context.py): the KV of
one request arrives whole before that of the next begins to, so that on average it arrives earlier than if the two had
shared the link; and a transfer is settled when it is booked, where fair shares move with every other one that begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.terms import InstanceId

SAME_HOST = "\0"


@dataclass(frozen=True, slots=True)
class Nic:
    """bytes_per_s: what arrives, protocol and gaps taken off."""

    id: InstanceId
    host: str
    bytes_per_s: float


class Links:
    def __init__(self, same_host_bytes_per_s: float) -> None:
        self._same_host = same_host_bytes_per_s
        self._sends: dict[str, float] = {}
        self._receives: dict[str, float] = {}

    def seconds(self, source: Nic, target: Nic, num_bytes: float) -> float:
        """On links that nobody else uses."""
        rate = min(source.bytes_per_s, target.bytes_per_s)
        return num_bytes / (max(rate, self._same_host) if source.host == target.host else rate)

    def book(
        self, source: Nic, target: Nic, num_bytes: float, since: float, now: float, num_layers: int = 1
    ) -> float:  # fmt: skip
        """When `num_bytes`, which came into being evenly between `since` and `now`, will have arrived: the last layer's
        share leaves at `now` at the earliest."""
        needed_s = self.seconds(source, target, num_bytes)
        if source.host == target.host:  # through memory, which no NIC sees
            lane = SAME_HOST + source.id
            self._sends[lane] = end = max(self._sends.get(lane, 0.0), since) + needed_s
        else:
            sent = max(self._sends.get(source.id, 0.0), since) + num_bytes / source.bytes_per_s
            received = max(self._receives.get(target.id, 0.0), since) + num_bytes / target.bytes_per_s
            self._sends[source.id], self._receives[target.id] = sent, received
            end = max(sent, received)
        return max(end, now + needed_s / num_layers)
