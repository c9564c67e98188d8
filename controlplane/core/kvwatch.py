"""Where KV goes and what is asked for most: handoff links, hot prefixes, evictions. For operators; decides nothing.

Bounded in every part, and it never sees a prompt: a prefix is known by its hash alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

from controlplane.core.directory import Directory
from controlplane.core.instance import Instance
from transfer.screens import LinkView, PrefixView
from transfer.terms import InstanceId
from transfer.wire.messages import PrefillDone

WINDOW_S = 60
MAX_LINKS = 4096
MAX_PREFIXES = 256
MAX_SHOWN = 32
NAME_CHARS = 12
"""Hexadecimal digits of a prefix's hash that stand for it."""


class KvWatch:
    """Single owner: the desk. Told of every handoff, first placement and cache event."""

    def __init__(self) -> None:
        self._links: OrderedDict[tuple[InstanceId, InstanceId], _Link] = OrderedDict()
        self._prefixes: dict[bytes, _Prefix] = {}
        self._least: list[tuple[int, int, bytes]] = []
        """Heap of a weight that each prefix once had, its number in order of coming, and its key."""
        self._num_prefixes = 0
        self._evicted: dict[InstanceId, int] = {}

    def handed_off(self, prefill: Instance, decode: Instance, message: PrefillDone, now: float) -> None:
        """One prompt's KV arrived. The pair longest unused is forgotten beyond MAX_LINKS."""
        key = (prefill.id, decode.id)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = _Link()
        self._links.move_to_end(key)
        if len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        bandwidths = [one.hello.hardware.link_bytes_per_s for one in (prefill, decode)]
        link.add(message, min(bandwidths), now)

    def asked(self, hashes: Sequence[bytes], num_blocks: int, block_size: int, now: float) -> None:
        """A request arrived whose first num_blocks blocks some instance holds: the longest prefix of it that is known.

        Counts the most frequent ones (Metwally et al., "Space-Saving", ICDT 2005): the least frequent gives way.
        """
        key = hashes[num_blocks - 1]
        prefix = self._prefixes.get(key)
        if prefix is None:
            weight = self._give_way() if len(self._prefixes) >= MAX_PREFIXES else 0
            prefix = self._prefixes[key] = _Prefix(weight, num_blocks, num_blocks * block_size)
            self._num_prefixes += 1
            heapq.heappush(self._least, (weight, self._num_prefixes, key))
        prefix.weight += 1
        prefix.num_hits += 1
        prefix.last_s = now

    def _give_way(self) -> int:
        """Forget the least frequent prefix, of several the oldest; returns its weight."""
        while True:
            weight, number, key = self._least[0]
            weighs = self._prefixes[key].weight
            if weighs == weight:
                heapq.heappop(self._least)
                del self._prefixes[key]
                return weight
            heapq.heapreplace(self._least, (weighs, number, key))

    def evicted(self, instance_id: InstanceId, num_blocks: int) -> None:
        if num_blocks:
            self._evicted[instance_id] = self._evicted.get(instance_id, 0) + num_blocks

    def lost(self, instance_id: InstanceId) -> None:
        """What it evicted counts from its next life on; its links stay until others push them out."""
        self._evicted.pop(instance_id, None)

    def num_evicted(self, instance_id: InstanceId) -> int:
        return self._evicted.get(instance_id, 0)

    def links(self, now: float) -> tuple[LinkView, ...]:
        """In order of prefill and decode instance."""
        return tuple(self._links[key].view(*key, now) for key in sorted(self._links))

    def prefixes(self, directory: Directory, now: float) -> tuple[PrefixView, ...]:
        """The most hit first."""
        ranked = sorted(self._prefixes.items(), key=lambda item: (-item[1].num_hits, item[0]))[:MAX_SHOWN]
        return tuple(
            PrefixView(
                name=key.hex()[:NAME_CHARS], num_tokens=one.num_tokens, num_blocks=one.num_blocks,
                num_hits=one.num_hits, holders=directory.holders(key), last_hit_s=round(now - one.last_s, 1),
            )
            for key, one in ranked
        )  # fmt: skip


class _Link:
    __slots__ = ("_bandwidth", "_busy_s", "_exposed_s", "_num", "_num_bytes", "_recent", "_since_s")

    def __init__(self) -> None:
        self._num = self._num_bytes = 0
        self._busy_s = self._exposed_s = self._bandwidth = 0.0
        self._since_s: float | None = None
        self._recent: deque[tuple[int, int]] = deque()
        """(second, bytes) of the last WINDOW_S."""

    def add(self, message: PrefillDone, bandwidth: float, now: float) -> None:
        num_bytes = max(0, message.transfer_bytes)
        self._num += 1
        self._num_bytes += num_bytes
        self._busy_s += max(0.0, message.transfer_s)
        self._exposed_s += max(0.0, message.exposed_s)
        self._bandwidth = bandwidth
        if self._since_s is None:
            self._since_s = now
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            num_bytes += self._recent.pop()[1]
        self._recent.append((second, num_bytes))
        while self._recent[0][0] <= second - WINDOW_S:
            self._recent.popleft()

    def view(self, prefill: InstanceId, decode: InstanceId, now: float) -> LinkView:
        """Rates over the last WINDOW_S, or since the first handoff where that is shorter (at least a second)."""
        window_s = min(float(WINDOW_S), max(1.0, now - (self._since_s if self._since_s is not None else now)))
        rate = sum(size for second, size in self._recent if second > int(now) - WINDOW_S) / window_s
        return LinkView(
            prefill=prefill, decode=decode, num_transfers=self._num, num_bytes=self._num_bytes,
            busy_s=round(self._busy_s, 6), exposed_s=round(self._exposed_s, 6), bytes_per_s=round(rate, 1),
            utilisation=rate / self._bandwidth if self._bandwidth > 0 else 0.0, window_s=window_s,
        )  # fmt: skip


class _Prefix:
    """weight: hits, and those of whom it replaced, by which it is kept."""

    __slots__ = ("last_s", "num_blocks", "num_hits", "num_tokens", "weight")

    def __init__(self, weight: int, num_blocks: int, num_tokens: int) -> None:
        self.weight, self.num_blocks, self.num_tokens = weight, num_blocks, num_tokens
        self.num_hits = 0
        self.last_s = 0.0
