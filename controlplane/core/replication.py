"""Hot prefixes: counts how often leading blocks are asked for, and has one pool copy them to another towards the load.

Sends Replicate and hears Replicated; moves nothing itself, and nothing depends on a copy being made. The counting is
a sketch, so that memory does not grow with the number of prefixes (Mooncake Store's hot keys, FAST'25, section 5.3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.core.desk import Desk
from controlplane.core.directory import Match
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from transfer.terms import InstanceId
from transfer.wire.messages import Replicate, Replicated

SKETCH_WIDTH = 1 << 17
"""Counters of a row, for some 500 arrivals a second with prompts of their own in a window of a minute."""
COUNT_BITS = 16
MAX_REMEMBERED = 4096
"""Prefixes whose cooldown is remembered; beyond that the oldest may be copied again early."""


class Sketch(Protocol):
    """transfer/sketch.py's CountMin."""

    def add(self, key: bytes) -> int:
        """Count it once more; returns the estimate, never too low."""

    def age(self) -> None:
        """Let all counts fade to half."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One order that no Replicated has ended yet."""

    name: str
    source: InstanceId
    source_epoch: int
    target: InstanceId
    target_epoch: int
    hashes: tuple[bytes, ...]
    deadline_s: float

    def touches(self, instance_id: InstanceId) -> bool:
        return instance_id in (self.source, self.target)

    def overlaps(self, hashes: Sequence[bytes]) -> bool:
        """Whether one of the two is a front of the other."""
        shared = min(len(hashes), len(self.hashes))
        return hashes[shared - 1] == self.hashes[shared - 1]


class Replication:
    """Single owner: SchedulerCore. At most config.max_replications copies at a time, one for a prefix, each with a
    deadline; a prefix rests for replicate_again_s after every order."""

    def __init__(self, desk: Desk, sketch: Sketch) -> None:
        self._desk, self._sketch = desk, sketch
        self._aged_s: float | None = None
        self._copies: dict[str, Copy] = {}
        self._rests_until: OrderedDict[bytes, float] = OrderedDict()
        self._num_ordered = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._copies)

    def arrived(self, hashes: Sequence[bytes], root: bytes, group: Group) -> None:
        """A request with these leading blocks was placed: count them, and order a copy when they are hot.

        Where there is no second pool there is nothing to count for.
        """
        if len(group.pools) < 2:
            return
        config = self._desk.config
        self._age()
        depth = 0
        for blocks in _depths(min(len(hashes), config.replicate_blocks)):
            if self._sketch.add(hashes[blocks - 1]) >= config.hot_arrivals:
                depth = blocks
        if depth and len(self._copies) < config.max_replications:
            self._consider(hashes[:depth], root, group)

    def replicated(self, sender: InstanceId, message: Replicated) -> None:
        """The order has ended. Late, repeated and foreign words change nothing."""
        copy = self._copies.get(message.name)
        if copy is None or (copy.source, copy.source_epoch) != (sender, message.epoch):
            return
        del self._copies[message.name]
        copied = min(max(0, message.num_blocks), len(copy.hashes))
        self._desk.count("replicated_blocks", copied)
        if not copied:
            self._fail(copy, message.reason or "it holds none of the blocks any more")

    def lost(self, instance_id: InstanceId) -> None:
        """Nothing more is heard of what it copied or was sent."""
        for copy in [one for one in self._copies.values() if one.touches(instance_id)]:
            del self._copies[copy.name]
            self._fail(copy, f"{instance_id} is lost")

    def tick(self) -> None:
        for copy in [one for one in self._copies.values() if self._desk.now >= one.deadline_s]:
            del self._copies[copy.name]
            self._fail(copy, f"no answer within {self._desk.config.replicate_timeout_s:g} s")

    # --- choosing -------------------------------------------------------------------------------------------

    def _consider(self, hashes: Sequence[bytes], root: bytes, group: Group) -> None:
        """Order a copy of as much of the prefix as some pool holds, unless enough pools hold that already."""
        desk, config = self._desk, self._desk.config
        matches = desk.directory.match(hashes)
        held = max((matches[name].blocks for name in group.pools if name in matches), default=0)
        if not held or self._rests(hashes[held - 1]):
            return
        hashes = tuple(hashes[:held])
        holders = [one for name, one in group.pools.items() if name in matches and matches[name].blocks >= held]
        if len(holders) >= config.replicas or any(copy.overlaps(hashes) for copy in self._copies.values()):
            return
        target = self._target(group, holders, matches, held)
        if target is None:
            return
        source = min(holders, key=lambda one: (self._num_copies(one), matches[one.id].ssd, one.id))
        self._order(source, target, root, hashes)

    def _target(
        self, group: Group, holders: list[Instance], matches: dict[InstanceId, Match], blocks: int
    ) -> Instance | None:
        """A pool that has room and holds less of it: on another host than the holders, nearest to who fetches, least
        filled."""
        hosts = {one.hello.host_id: None for one in holders}
        near = {one.hello.host_id: None for one in (*group.prefills, *group.mixed)}
        names = {one.id: None for one in holders}
        usable = [one for one in group.pools.values() if one.id not in names and one.room >= blocks]
        return min(
            usable, default=None,
            key=lambda one: (
                one.hello.host_id in hosts, one.hello.host_id not in near, self._num_copies(one),
                one.load.cached_blocks / one.hello.num_blocks,
                -matches[one.id].blocks if one.id in matches else 0, one.id,
            ),
        )  # fmt: skip

    def _order(self, source: Instance, target: Instance, root: bytes, hashes: tuple[bytes, ...]) -> None:
        desk = self._desk
        self._num_ordered += 1
        name = f"copy-{desk.control_epoch:x}-{self._num_ordered}"
        deadline_s = desk.now + desk.config.replicate_timeout_s
        self._copies[name] = Copy(name, source.id, source.epoch, target.id, target.epoch, hashes, deadline_s)
        self._rests_until[hashes[-1]] = desk.now + desk.config.replicate_again_s
        self._rests_until.move_to_end(hashes[-1])
        while len(self._rests_until) > MAX_REMEMBERED:
            self._rests_until.popitem(last=False)
        desk.count("replications")
        order = Replicate(name=name, epoch=source.epoch, fingerprint=root, hashes=hashes, target=target.peer())
        desk.send(source.id, order)

    # --- helpers --------------------------------------------------------------------------------------------

    def _age(self) -> None:
        now, window_s = self._desk.now, self._desk.config.hot_window_s
        if self._aged_s is None:
            self._aged_s = now
        halvings = int((now - self._aged_s) / window_s)
        for _ in range(min(halvings, COUNT_BITS)):  # after so many, every count is 0
            self._sketch.age()
        self._aged_s += halvings * window_s

    def _rests(self, key: bytes) -> bool:
        return self._desk.now < self._rests_until.get(key, float("-inf"))

    def _num_copies(self, one: Instance) -> int:
        return sum(copy.touches(one.id) for copy in self._copies.values())

    def _fail(self, copy: Copy, reason: str) -> None:
        self._desk.count("replications_failed")
        self._desk.note("info", f"a copy of a hot prefix from {copy.source} to {copy.target} was not made: {reason}")


def _depths(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: where prefixes are counted, so that an arrival costs a logarithm of its blocks."""
    found, power = [], 1
    while power <= most:
        found.append(power)
        if power > 1 and power + power // 2 <= most:
            found.append(power + power // 2)
        power *= 2
    return found
