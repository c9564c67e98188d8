"""The handoff ledger: who holds blocks for which generation of which request, until they say that they do not.

Owns legs and their charges, decides nothing about requests. Delivery: an Abort is sent again until the instance
answers Released, is lost, or a heartbeat proves that it holds nothing; every operation is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from controlplane.core.instance import Charge, Instance
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import Abort, Heartbeat, Holding

LegKey = tuple[RequestId, int, "LegKind"]


class LegKind(StrEnum):
    DECODE = "decode"
    """Holds the KV the request runs from: the decode, mixed or migration target instance."""
    PREFILL = "prefill"


KINDS = tuple(LegKind)


class Leg:
    """One instance's part in one placement. Open until closed; closing: aborted, Released not heard yet.

    sent: whether the instance was told at all. held_blocks: what its last heartbeat said it holds for this leg.
    missing_s: since when its heartbeats have not listed an answered decode leg or a prefill leg that was sent.
    """

    __slots__ = (
        "abort_s", "answered", "asked_blocks", "charge", "closed", "closing_s", "generation", "held_blocks",
        "instance", "key", "kind", "missing_s", "name", "opened_s", "pending_blocks", "reason", "request_id", "sent",
        "started",
    )  # fmt: skip

    def __init__(
        self, request_id: RequestId, generation: int, kind: LegKind, instance: Instance, charge: Charge, now: float
    ) -> None:
        self.request_id, self.generation, self.kind, self.instance = request_id, generation, kind, instance
        self.name, self.key = (request_id, generation), (request_id, generation, kind)
        self.charge, self.opened_s = charge, now
        self.sent = self.answered = self.started = self.closed = False
        self.pending_blocks = self.asked_blocks = self.held_blocks = 0
        self.closing_s: float | None = None
        self.abort_s = now
        self.missing_s: float | None = None
        self.reason = ""

    @property
    def closing(self) -> bool:
        return self.closing_s is not None


class _Stray:
    """Blocks an instance says it holds for something the ledger does not know."""

    __slots__ = ("abort_s", "num_blocks", "since_s")

    def __init__(self, since_s: float, num_blocks: int) -> None:
        self.since_s, self.num_blocks = since_s, num_blocks
        self.abort_s: float | None = None


Order = tuple[Instance, Abort]
"""An Abort the caller must send now."""


class Ledger:
    def __init__(self, lease_s: float, heartbeat_s: float, abort_retry_s: float) -> None:
        self._lease_s, self._heartbeat_s, self._abort_retry_s = lease_s, heartbeat_s, abort_retry_s
        self.now = 0.0
        """Of the event being handled; the desk sets it."""
        self._by_request: dict[RequestId, dict[LegKey, Leg]] = {}
        self._by_instance: dict[InstanceId, dict[LegKey, Leg]] = {}
        self._closing: dict[LegKey, Leg] = {}
        self._strays: dict[InstanceId, dict[tuple[RequestId, int], _Stray]] = {}
        self._leaked: dict[InstanceId, int] = {}

    # --- legs -----------------------------------------------------------------------------------------------

    def open(
        self, request_id: RequestId, generation: int, kind: LegKind, instance: Instance, charge: Charge, now: float
    ) -> Leg:
        """A new leg; its charge is on the instance until it closes."""
        leg = Leg(request_id, generation, kind, instance, charge, now)
        self._by_request.setdefault(request_id, {})[leg.key] = leg
        self._by_instance.setdefault(instance.id, {})[leg.key] = leg
        instance.charge(charge, now)
        return leg

    def sent(self, leg: Leg, asked_blocks: int = 0) -> None:
        """The instance was told; it will answer. asked_blocks: taken off its free blocks until it does."""
        leg.sent = True
        leg.pending_blocks = leg.asked_blocks = asked_blocks
        leg.instance.pend(asked_blocks)

    def answered(self, leg: Leg) -> None:
        """Its free blocks, as told with the answer, speak for themselves from now on. Idempotent."""
        leg.answered = True
        leg.instance.pend(-leg.pending_blocks)
        leg.pending_blocks = 0

    def computed(self, leg: Leg) -> None:
        """Its prompt needs no more compute: give the prefill part of the charge back. Idempotent."""
        done = Charge(prefill_tokens=leg.charge.prefill_tokens, prefill_us=leg.charge.prefill_us)
        leg.instance.discharge(done, self.now)
        leg.charge = leg.charge._replace(prefill_tokens=0, prefill_us=0)

    def close(self, leg: Leg | None) -> None:
        """Nothing is held for this leg any more. Idempotent."""
        if leg is None or leg.closed:
            return
        leg.closed = True
        held = leg.asked_blocks if leg.answered else 0
        self.answered(leg)
        leg.instance.freed(max(held, leg.held_blocks))
        leg.instance.discharge(leg.charge, self.now)
        leg.charge = Charge()
        for index, name in ((self._by_request, leg.request_id), (self._by_instance, leg.instance.id)):
            legs = index[name]
            del legs[leg.key]
            if not legs:
                del index[name]
        self._closing.pop(leg.key, None)

    def abort(self, leg: Leg, reason: str, now: float) -> list[Order]:
        """Fence the leg. It stays, charged, until Released; one the instance never heard of closes at once."""
        if leg.closed or leg.closing:
            return []
        if not leg.sent:
            self.close(leg)
            return []
        leg.closing_s = leg.abort_s = now
        leg.reason = reason
        self._closing[leg.key] = leg
        return [(leg.instance, Abort(request_id=leg.request_id, generation=leg.generation, reason=reason))]

    def abort_request(self, request_id: RequestId, reason: str, now: float) -> list[Order]:
        """Both legs of every generation, at once."""
        return [order for leg in self.legs_of(request_id) for order in self.abort(leg, reason, now)]

    def released(self, instance_id: InstanceId, request_id: RequestId, generation: int) -> list[Leg]:
        """The instance holds nothing for the request at or below `generation`. Returns the legs that closed."""
        legs = [leg for leg in self.legs_of(request_id)
                if leg.instance.id == instance_id and leg.generation <= generation]  # fmt: skip
        for leg in legs:
            self.close(leg)
        return legs

    def lose(self, instance_id: InstanceId) -> list[Leg]:
        """The instance is gone, and what it held with it. Returns its legs, closed, oldest first."""
        legs = self.legs_at(instance_id)
        for leg in legs:
            self.close(leg)
        self._strays.pop(instance_id, None)
        self._leaked.pop(instance_id, None)
        return legs

    def find(self, request_id: RequestId, generation: int, kind: LegKind) -> Leg | None:
        legs = self._by_request.get(request_id)
        return None if legs is None else legs.get((request_id, generation, kind))

    def legs_of(self, request_id: RequestId) -> list[Leg]:
        return list(self._by_request.get(request_id, {}).values())

    def legs_at(self, instance_id: InstanceId) -> list[Leg]:
        return list(self._by_instance.get(instance_id, {}).values())

    def everything(self) -> Iterable[Leg]:
        return (leg for legs in self._by_request.values() for leg in legs.values())

    def highest(self, request_id: RequestId) -> int:
        """The highest generation of the request that may still be held somewhere; 0 when there is none."""
        return max((leg.generation for leg in self.legs_of(request_id)), default=0)

    @property
    def num_legs(self) -> int:
        return sum(len(legs) for legs in self._by_request.values())

    @property
    def num_closing(self) -> int:
        """Legs that were aborted and not confirmed yet."""
        return len(self._closing)

    # --- truth ----------------------------------------------------------------------------------------------

    def hear(self, instance: Instance, beat: Heartbeat, now: float) -> list[Order]:
        """Compare a heartbeat's holdings with the legs."""
        self._leaked[instance.id] = beat.load.leaked_blocks
        held = {(one.request_id, one.generation): one for one in beat.holdings}
        strays = dict(held)
        for leg in self.legs_at(instance.id):
            one = held.get(leg.name)
            if one is not None:
                strays.pop(leg.name, None)
                leg.held_blocks, leg.missing_s = one.num_blocks, None
                continue
            leg.held_blocks = 0
            if not (leg.sent if leg.kind is LegKind.PREFILL else leg.answered):
                leg.missing_s = None
            elif leg.missing_s is None:
                leg.missing_s = now
            if leg.closing_s is not None and now - leg.closing_s > self._lease_s:
                self.close(leg)
        return self._hear_strays(instance, strays.values(), now, self._heartbeat_s)

    def hear_hello(self, instance: Instance, holdings: tuple[Holding, ...], now: float) -> list[Order]:
        """What a (re)joining instance still holds and the ledger does not know is aborted at once."""
        legs = self._by_instance.get(instance.id, {})
        strays = [one for one in holdings
                  if not any((one.request_id, one.generation, kind) in legs for kind in KINDS)]  # fmt: skip
        return self._hear_strays(instance, strays, now, 0.0)

    def retry(self, now: float) -> list[Order]:
        """Aborts to send again."""
        late = [leg for leg in self._closing.values() if now - leg.abort_s >= self._abort_retry_s]
        for leg in late:
            leg.abort_s = now
        return [
            (leg.instance, Abort(request_id=leg.request_id, generation=leg.generation, reason=leg.reason))
            for leg in late
        ]

    def orphaned_blocks(self, now: float) -> int:
        """Blocks held for longer than a lease for nobody, and what instances found leaked themselves."""
        strays = sum(
            stray.num_blocks
            for strays in self._strays.values()
            for stray in strays.values()
            if now - stray.since_s > self._lease_s
        )
        stuck = sum(
            leg.held_blocks
            for leg in self._closing.values()
            if leg.closing_s is not None and now - leg.closing_s > self._lease_s
        )
        return strays + stuck + sum(self._leaked.values())

    def _hear_strays(
        self, instance: Instance, unknown: Iterable[Holding], now: float, patience_s: float
    ) -> list[Order]:
        """Everything it holds that has no leg."""
        before = self._strays.pop(instance.id, {})
        strays: dict[tuple[RequestId, int], _Stray] = {}
        orders: list[Order] = []
        for one in unknown:
            name = (one.request_id, one.generation)
            stray = strays[name] = before.get(name) or _Stray(now, one.num_blocks)
            stray.num_blocks = one.num_blocks
            due = stray.since_s + patience_s if stray.abort_s is None else stray.abort_s + self._lease_s
            if now >= due:
                stray.abort_s = now
                reason = "the control plane knows no such placement"
                abort = Abort(request_id=one.request_id, generation=one.generation, reason=reason)
                orders.append((instance, abort))
        if strays:
            self._strays[instance.id] = strays
        return orders
