"""Prefix directory: which instances hold which KV blocks, fed by their CacheEvents. Never trusted for text.

A holder is one life of one instance (a slot); sets of holders are bit masks, so that matching a prefix costs one
lookup a block however many instances hold it. Bounded: the least recently used hashes are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from transfer.terms import InstanceId
from transfer.wire.messages import CacheEvents


class _Holder:
    __slots__ = ("asked_s", "bit", "blind", "epoch", "hashes", "seq")

    def __init__(self, bit: int, epoch: int) -> None:
        self.bit, self.epoch = bit, epoch
        self.seq = 0
        self.blind = False
        self.asked_s: float | None = None
        self.hashes: dict[bytes, None] = {}


class Directory:
    """Idempotent by (epoch, seq): a repeated or older CacheEvents changes nothing."""

    def __init__(self, max_hashes: int, ask_again_s: float) -> None:
        """ask_again_s: how long to wait for a snapshot before asking again."""
        self._max_hashes, self._ask_again_s = max_hashes, ask_again_s
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._holders: dict[InstanceId, _Holder] = {}
        self._by_bit: dict[int, InstanceId] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def join(self, instance_id: InstanceId, epoch: int) -> None:
        """A new life of an instance: nothing of an older one is credited."""
        self.drop(instance_id)
        bit = 0
        while bit in self._by_bit:
            bit += 1
        self._by_bit[bit] = instance_id
        self._holders[instance_id] = _Holder(bit, epoch)

    def drop(self, instance_id: InstanceId) -> None:
        """Forget everything the instance held. Idempotent."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            self._clear(holder)
            del self._by_bit[holder.bit]

    def apply(self, instance_id: InstanceId, events: CacheEvents, now: float) -> bool:
        """Take one message; True when a snapshot must be asked for, because one was missed."""
        holder = self._holders.get(instance_id)
        if holder is None or holder.epoch != events.epoch or events.seq < holder.seq:
            return False
        if events.snapshot:
            self._clear(holder)
            holder.blind, holder.asked_s, holder.seq = False, None, events.seq
            self._store(holder, events.stored)
            return False
        if events.seq == holder.seq:
            return False
        if holder.blind or events.seq != holder.seq + 1:
            if not holder.blind:
                self._clear(holder)
                holder.blind = True
            return self.asking(instance_id, now)
        holder.seq = events.seq
        self._remove(holder, events.removed)
        self._store(holder, events.stored)
        return False

    def asking(self, instance_id: InstanceId, now: float) -> bool:
        """Whether to ask for a snapshot now; remembers that it was asked."""
        holder = self._holders.get(instance_id)
        if holder is None or (holder.asked_s is not None and now - holder.asked_s < self._ask_again_s):
            return False
        holder.asked_s = now
        return True

    def match(self, hashes: Sequence[bytes]) -> dict[InstanceId, int]:
        """Leading blocks held without a gap, by instance, longest first. O(blocks of the longest match)."""
        masks, alive, depth = self._masks, -1, 0
        found: list[tuple[int, int]] = []
        for key in hashes:
            mask = masks.get(key)
            if mask is None:
                break
            kept = mask if alive == -1 else alive & mask
            if kept != alive:
                if alive != -1 and depth:
                    found.append((alive & ~kept, depth))
                alive = kept
            if not alive:
                break
            depth += 1
        if depth and alive > 0:
            found.append((alive, depth))
        for key in reversed(hashes[:depth]):  # the head last: without it the rest is of no use
            masks.move_to_end(key)
        return {self._by_bit[bit]: blocks for mask, blocks in reversed(found) for bit in _bits(mask)}

    def _store(self, holder: _Holder, hashes: Sequence[bytes]) -> None:
        flag, masks = 1 << holder.bit, self._masks
        for key in hashes:
            masks[key] = masks.get(key, 0) | flag
            masks.move_to_end(key)
            holder.hashes[key] = None
        while len(masks) > self._max_hashes:
            key, mask = masks.popitem(last=False)
            for bit in _bits(mask):
                self._holders[self._by_bit[bit]].hashes.pop(key, None)

    def _remove(self, holder: _Holder, hashes: Sequence[bytes]) -> None:
        keep, masks = ~(1 << holder.bit), self._masks
        for key in hashes:
            if key in holder.hashes:
                del holder.hashes[key]
                left = masks[key] & keep
                if left:
                    masks[key] = left
                else:
                    del masks[key]

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, list(holder.hashes))


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
