"""Prefix directory: which instances hold which KV blocks in which tier, fed by CacheEvents. Never trusted for text.

A holder is one life of one instance (a slot); sets of holders are bit masks, so that matching a prefix costs one
lookup a block however many instances hold it. Bounded: the least recently used hashes are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from transfer.terms import InstanceId
from transfer.wire.messages import CacheEvents


class Match(NamedTuple):
    """Leading blocks of a prefix that one instance holds without a gap.

    blocks: in any tier. ssd: how many of them are on its SSD only. lead: blocks before the first such one.
    """

    blocks: int
    ssd: int
    lead: int


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
        self._ssd: dict[bytes, int] = {}
        """The part of a mask whose holders have the block on SSD only; hashes without such holders are left out."""
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
            self._store(holder, events.stored, on_ssd=False)
            self._store(holder, events.stored_ssd, on_ssd=True)
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
        self._store(holder, events.stored, on_ssd=False)
        self._store(holder, events.stored_ssd, on_ssd=True)
        return False

    def asking(self, instance_id: InstanceId, now: float) -> bool:
        """Whether to ask for a snapshot now; remembers that it was asked."""
        holder = self._holders.get(instance_id)
        if holder is None or (holder.asked_s is not None and now - holder.asked_s < self._ask_again_s):
            return False
        holder.asked_s = now
        return True

    def match(self, hashes: Sequence[bytes]) -> dict[InstanceId, Match]:
        """Leading blocks held without a gap, by instance, longest first. O(blocks of the longest match)."""
        masks, ssd, alive, depth = self._masks, self._ssd, -1, 0
        found: list[tuple[int, int]] = []
        cold: list[tuple[int, int]] = []
        touched, counts = 0, _Counts()
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
            if ssd and (here := ssd.get(key, 0) & alive):
                if fresh := here & ~touched:
                    cold.append((fresh, depth))
                    touched |= fresh
                counts.add(here)
            depth += 1
        if depth and alive > 0:
            found.append((alive, depth))
        for key in reversed(hashes[:depth]):  # the head last: without it the rest is of no use
            masks.move_to_end(key)
        leads = {bit: lead for mask, lead in cold for bit in _bits(mask)}
        matches: dict[InstanceId, Match] = {}
        for mask, blocks in reversed(found):
            warm = Match(blocks, 0, blocks)
            for bit in _bits(mask):
                lead = leads.get(bit)
                matches[self._by_bit[bit]] = warm if lead is None else Match(blocks, counts.of(bit), lead)
        return matches

    def holders(self, key: bytes) -> tuple[InstanceId, ...]:
        """Instances that have this block, in any tier."""
        return tuple(sorted(self._by_bit[bit] for bit in _bits(self._masks.get(key, 0))))

    def _store(self, holder: _Holder, hashes: Sequence[bytes], on_ssd: bool) -> None:
        flag, masks = 1 << holder.bit, self._masks
        known, to_end = masks.get, masks.move_to_end
        for key in hashes:
            mask = known(key)
            if mask is None:
                masks[key] = flag
            else:
                masks[key] = mask | flag
                to_end(key)
        holder.hashes.update(dict.fromkeys(hashes))
        if on_ssd or self._ssd:
            for key in hashes:
                self._tier(key, flag, on_ssd)
        while len(masks) > self._max_hashes:
            key, mask = masks.popitem(last=False)
            self._ssd.pop(key, None)
            for bit in _bits(mask):
                self._holders[self._by_bit[bit]].hashes.pop(key, None)

    def _remove(self, holder: _Holder, hashes: Sequence[bytes]) -> None:
        flag, masks = 1 << holder.bit, self._masks
        held, on_ssd = holder.hashes, bool(self._ssd)
        for key in hashes:
            if key in held:
                del held[key]
                if on_ssd:
                    self._tier(key, flag, on_ssd=False)
                left = masks[key] & ~flag
                if left:
                    masks[key] = left
                else:
                    del masks[key]

    def _tier(self, key: bytes, flag: int, on_ssd: bool) -> None:
        before = self._ssd.get(key, 0)
        after = before | flag if on_ssd else before & ~flag
        if after:
            self._ssd[key] = after
        elif before:
            del self._ssd[key]

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, list(holder.hashes))


class _Counts:
    """A counter for each bit, kept as binary digits in masks: counting a whole mask costs two steps on average."""

    __slots__ = ("_digits",)

    def __init__(self) -> None:
        self._digits: list[int] = []

    def add(self, mask: int) -> None:
        """One more for each bit of the mask."""
        for index, digit in enumerate(self._digits):
            self._digits[index], mask = digit ^ mask, digit & mask
            if not mask:
                return
        self._digits.append(mask)

    def of(self, bit: int) -> int:
        return sum((digit >> bit & 1) << index for index, digit in enumerate(self._digits))


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
