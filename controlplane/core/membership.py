"""Conversation with instances about themselves: Hello, heartbeats, loss, Goodbye, cache events, pool maps."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core.desk import Desk
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance, InstanceState
from controlplane.core.recovery import Recovery
from controlplane.core.suspects import blame, is_engine_failure
from controlplane.core.vetting import in_range
from transfer.said import Said, say
from transfer.terms import InstanceId, Role
from transfer.wire.messages import (
    CacheEvents,
    CacheSnapshotWanted,
    Goodbye,
    Heartbeat,
    Hello,
    NotWelcome,
    PoolMap,
    Welcome,
)

RAMP_LOOK_S = 1.0


class Membership:
    """on_lost is told of every instance that is lost, after its requests were placed anew."""

    def __init__(self, desk: Desk, recovery: Recovery, on_lost: Callable[[Instance, str], None]) -> None:
        self._desk, self._recovery, self._on_lost = desk, recovery, on_lost
        self._maps: dict[InstanceId, PoolMap] = {}
        self._ramps, self._shared_s = False, 0.0

    def hello(self, sender: InstanceId, hello: Hello) -> None:
        """Welcome, or NotWelcome with a sentence. Repeated by the same life: welcome again, nothing is forgotten."""
        desk, fleet = self._desk, self._desk.fleet
        if hello.instance_id != sender:
            self._refuse(sender, f"{sender} introduced itself as {hello.instance_id}; an instance has one name")
            return
        if fleet.superseded(hello):
            desk.note("warning", f"{sender}: an earlier life said Hello after a later one; it is ignored")
            return
        reason = fleet.refusal(hello)
        if reason is not None:
            self._refuse(sender, reason)
            return
        instance = fleet.live(sender)
        if instance is not None and instance.epoch != hello.epoch:
            self._lose(instance, say("lost.restarted", role=instance.role.value, id=instance.id))
            instance = None
        if instance is None:
            instance = fleet.join(hello, desk.now)
            desk.directory.join(sender, hello.epoch)
            desk.note("info", f"{instance.role.value} instance {sender} joined ({hello.hardware.name})")
        elif hello.role is not instance.role and instance.state is not InstanceState.SWITCHING:
            fleet.take_role(instance, hello.role)
        instance.last_seen_s = desk.now
        config = desk.config
        # A node answers Welcome with a snapshot of its cache, so that a restarted control plane knows it again.
        desk.send(sender, Welcome(control_epoch=desk.control_epoch, role=instance.role,
                                  heartbeat_s=config.heartbeat_s, lease_s=config.lease_s))  # fmt: skip
        self._maps.pop(sender, None)
        desk.order(desk.ledger.hear_hello(instance, hello.holdings, desk.now))
        self.share_pools()

    def heartbeat(self, sender: InstanceId, beat: Heartbeat) -> Instance | None:
        """Take the beat of a live instance. One that was given up and speaks again in the same life rejoins."""
        desk, beat = self._desk, in_range(beat)
        instance = desk.fleet.instances.get(sender)
        if instance is None or instance.epoch != beat.epoch:
            return None
        if instance.state is InstanceState.LOST:
            desk.fleet.rejoin(instance)
            desk.directory.join(sender, beat.epoch)
            if desk.directory.asking(sender, desk.now):
                desk.send(sender, CacheSnapshotWanted(epoch=beat.epoch))
            desk.order(desk.ledger.hear_hello(instance, beat.holdings, desk.now))
            desk.note("info", f"{instance.role.value} instance {sender} is heard again")
        if desk.fleet.hear(instance, beat, desk.now):
            desk.note("info", f"{instance.role.value} instance {sender} is {instance.state.value} ({beat.state})")
            self.share_pools()
        desk.order(desk.ledger.hear(instance, beat, desk.now))
        desk.stirred = True
        return instance

    def goodbye(self, sender: InstanceId, message: Goodbye) -> None:
        instance = self._desk.fleet.live(sender, message.epoch)
        if instance is not None:
            why = say("lost.left", role=instance.role.value, id=instance.id, reason=message.reason)
            self._lose(instance, why, engine_failed=is_engine_failure(message.reason))

    def lost(self, instance_id: InstanceId) -> None:
        """The wire has heard nothing for its liveness time. Idempotent."""
        instance = self._desk.fleet.live(instance_id)
        if instance is not None:
            self._lose(instance, say("lost.instance", role=instance.role.value, id=instance.id))

    def cache_events(self, sender: InstanceId, events: CacheEvents) -> None:
        self._desk.watch.evicted(sender, len(events.removed))
        if self._desk.directory.apply(sender, events, self._desk.now):
            self._desk.send(sender, CacheSnapshotWanted(epoch=events.epoch))

    def new_role(self, instance: Instance) -> None:
        """Its role actor is a new one: tell it what it missed."""
        self._maps.pop(instance.id, None)
        self.share_pools()

    def _lose(self, instance: Instance, why: Said, engine_failed: bool = False) -> None:
        desk, reason = self._desk, str(why)
        desk.note("warning", reason)
        desk.count("instances_lost")
        desk.fleet.lose(instance, desk.now)
        desk.directory.drop(instance.id)
        desk.watch.lost(instance.id)
        self._maps.pop(instance.id, None)
        legs = desk.ledger.lose(instance.id)
        if engine_failed:
            blame(desk, instance.id, legs)
        self._recovery.lost_legs(legs, why)
        self._on_lost(instance, reason)
        self.share_pools()
        desk.stirred = True

    def _refuse(self, sender: InstanceId, reason: str) -> None:
        self._desk.note("error", f"refused an instance: {reason}")
        self._desk.send(sender, NotWelcome(reason=reason))

    def tick(self) -> None:
        """Pools that are new take a growing share of what is stored."""
        if self._ramps and self._desk.now - self._shared_s >= RAMP_LOOK_S:
            self.share_pools()

    def share_pools(self) -> None:
        """Send every engine the pools it may put to, when they or their weights changed for it."""
        desk, config = self._desk, self._desk.config
        maps = {
            model: desk.fleet.pool_map(group, config.ramp_s, config.lease_s, desk.now)
            for model, group in desk.fleet.groups.items()
        }
        self._shared_s = desk.now
        self._ramps = any(pool.weight < 1.0 for pools in maps.values() for pool in pools.pools)
        for instance in desk.fleet.alive():
            if instance.role is Role.KV_POOL or instance.hello.model is None or not instance.hello.shares_kv:
                continue
            pools = maps[instance.hello.model.name]
            if self._maps.get(instance.id) != pools:
                self._maps[instance.id] = pools
                desk.send(instance.id, pools)


def served_models(groups: dict[str, Group]) -> tuple[str, ...]:
    """Model names that some engine serves, sorted."""
    return tuple(sorted(groups))
