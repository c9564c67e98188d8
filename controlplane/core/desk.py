"""What the parts of the scheduler share while they handle one event: the books, the clock and the outgoing effects."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Literal

from controlplane.core.admission import WaitingLine
from controlplane.core.config import CoreConfig
from controlplane.core.directory import Directory
from controlplane.core.events import Effect, Note, Send
from controlplane.core.fleet import Fleet
from controlplane.core.goodput import GoodputCore
from controlplane.core.kvwatch import KvWatch
from controlplane.core.ledger import Ledger, Order
from controlplane.core.lifecycle import Request
from controlplane.core.policies.memory import Memory
from controlplane.core.traffic import Traffic
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import Message


class Desk:
    """Single owner: SchedulerCore. `now` is the loop time of the event being handled; it never goes back.

    stirred: something changed that may give a waiting request its place.
    """

    def __init__(self, config: CoreConfig, control_epoch: int, seed: int) -> None:
        self.config, self.control_epoch = config, control_epoch
        self.random = random.Random(seed)
        self.now = 0.0
        self.started_s: float | None = None
        self.stirred = False
        self.requests: dict[RequestId, Request] = {}
        self.fleet = Fleet(config.forget_s)
        self.ledger = Ledger(config.lease_s, config.heartbeat_s, config.abort_retry_s)
        self.directory = Directory(config.directory_blocks, config.lease_s)
        self.watch = KvWatch()
        """For operators to look at."""
        self.line = WaitingLine()
        self.goodput = GoodputCore(config.classes)
        self.traffic = Traffic(config.traffic_window_s)
        self._memories: dict[str, Memory] = {}
        self.counters: dict[str, int] = {}
        self.held: dict[InstanceId, RequestId] = {}
        """Instances set aside for one request each (suspects.py)."""
        self._out: list[Effect] = []
        self._num_picks = 0

    def begin(self, now: float) -> None:
        if now > self.now or self.started_s is None:
            self.now = self.ledger.now = max(now, self.now)
            if self.started_s is None:
                self.started_s = self.now

    def take(self) -> list[Effect]:
        """The effects of the event, in the order they are to be performed."""
        out, self._out = self._out, []
        return out

    def emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def send(self, instance_id: InstanceId, message: Message) -> None:
        self._out.append(Send(instance_id=instance_id, message=message))

    def order(self, orders: Iterable[Order]) -> None:
        """Send the ledger's aborts."""
        for instance, abort in orders:
            self.send(instance.id, abort)

    def note(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._out.append(Note(level=level, text=text))

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def memory(self, model: str) -> Memory:
        """What the placement policy remembers of a model's requests: models share no instance."""
        if model not in self._memories:
            self._memories[model] = Memory()
        return self._memories[model]

    def next_pick(self) -> int:
        """Numbers every choice of an instance: ties go to whoever was picked longest ago."""
        self._num_picks += 1
        return self._num_picks
