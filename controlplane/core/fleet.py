"""Membership: which instances there are, in which state and role, which may serve which model together.

Keeps one Instance a life, judges every Hello, and groups ready instances by model for placement. Sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core.instance import Instance, InstanceState
from controlplane.core.kinship import difference, stranger
from controlplane.core.vetting import implausible
from controlplane.text import natural
from transfer.terms import InstanceId, KvLayout, ModelIdentity, Role, kv_fingerprint
from transfer.wire.messages import PROTOCOL_VERSION, Heartbeat, Hello, PoolMap

MAX_PAST_EPOCHS = 8
MAX_ROOTS = 1024
MIN_WEIGHT = 0.1
RAMP_STEPS = 6


@dataclass
class Group:
    """Everything that serves one model name. Lists hold ready instances, in order of id.

    model, layout: of those that share KV, where there are any. shares: whether there are.
    """

    model: ModelIdentity
    layout: KvLayout
    shares: bool = True
    members: list[Instance] = field(default_factory=list)
    """All engines of the model that are not lost, whatever their state."""
    prefills: list[Instance] = field(default_factory=list)
    decodes: list[Instance] = field(default_factory=list)
    mixed: list[Instance] = field(default_factory=list)
    pools: dict[InstanceId, Instance] = field(default_factory=dict)
    roots: dict[str, bytes] = field(default_factory=dict)

    def root(self, salt: str) -> bytes:
        """Root of the block hash chain for one tenant."""
        if salt not in self.roots:
            if len(self.roots) >= MAX_ROOTS:
                self.roots.clear()
            self.roots[salt] = kv_fingerprint(self.model, self.layout, salt)
        return self.roots[salt]

    @property
    def largest_blocks(self) -> int:
        """KV blocks of the largest member."""
        return max((one.hello.num_blocks for one in self.members), default=0)


class Fleet:
    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self.instances: dict[InstanceId, Instance] = {}
        """By id; a lost one stays until it is forgotten or replaced."""
        self.groups: dict[str, Group] = {}
        self.version = 0
        """Bumped by every change of membership, role or plan."""
        self._ordered: list[Instance] = []
        self._past: dict[InstanceId, list[int]] = {}
        self._lost_s: dict[InstanceId, float] = {}

    # --- who may join ---------------------------------------------------------------------------------------

    def refusal(self, hello: Hello) -> str | None:
        """Why this instance cannot join, in a sentence; None when it can."""
        if hello.protocol != PROTOCOL_VERSION:
            return (f"{hello.instance_id} speaks protocol {hello.protocol}, this control plane {PROTOCOL_VERSION}; "
                    "run the same release on both")  # fmt: skip
        if wrong := implausible(hello):
            return wrong
        if hello.role is Role.KV_POOL:
            return self._pool_refusal(hello)
        if hello.model is None or hello.layout is None or hello.latency is None:
            return f"{hello.instance_id} has role {hello.role.value} but names no model, KV layout or latency profile"
        if hello.num_blocks < 1:
            return f"{hello.instance_id} has {hello.num_blocks} KV blocks; give it memory for at least one"
        if not hello.shares_kv and hello.role is not Role.MIXED:
            return (f"{hello.instance_id} has role {hello.role.value} and an engine that keeps its KV to itself; "
                    "it can only serve whole requests, so start it as mixed")  # fmt: skip
        group = self.groups.get(hello.model.name)
        others = [one for one in group.members if one.id != hello.instance_id] if group else []
        return stranger(hello, hello.model, hello.layout, [one.hello for one in others])

    def superseded(self, hello: Hello) -> bool:
        """Whether this is the word of a life that a later one has replaced. Once that is lost the earlier may return:
        it was only out of hearing, as when a second agent was started under its name by mistake and ended again."""
        return self.live(hello.instance_id) is not None and hello.epoch in self._past.get(hello.instance_id, [])

    def _pool_refusal(self, hello: Hello) -> str | None:
        if hello.num_blocks < 1:
            return f"{hello.instance_id} has {hello.num_blocks} KV blocks; give the pool memory for at least one"
        groups = [group for group in self.groups.values() if group.shares]
        if hello.layout is None or not groups or any(group.layout == hello.layout for group in groups):
            return None
        return (f"{hello.instance_id} pools KV in a layout that no model of the fleet has: "
                f"{difference(hello.layout, groups[0].layout)} differs from {groups[0].model.name}'s")  # fmt: skip

    # --- membership -----------------------------------------------------------------------------------------

    def join(self, hello: Hello, now: float) -> Instance:
        """A new life. The caller has taken leave of an older one with `lose`."""
        old = self.instances.get(hello.instance_id)
        if old is not None and old.epoch != hello.epoch:
            past = self._past.setdefault(hello.instance_id, [])
            past.append(old.epoch)
            self._past[hello.instance_id] = [epoch for epoch in past if epoch != hello.epoch][-MAX_PAST_EPOCHS:]
        instance = Instance(hello, now)
        self.instances[instance.id] = instance
        self._lost_s.pop(instance.id, None)
        self.changed()
        return instance

    def live(self, instance_id: InstanceId, epoch: int | None = None) -> Instance | None:
        """The instance, unless it is unknown, lost or, when an epoch is given, in another life."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state is InstanceState.LOST:
            return None
        return instance if epoch is None or instance.epoch == epoch else None

    def lose(self, instance: Instance, now: float) -> None:
        instance.machine.fire("lose")
        self._lost_s[instance.id] = now
        self.changed()

    def rejoin(self, instance: Instance) -> None:
        """A lost instance was heard again, in the same life."""
        instance.machine.fire("rejoin")
        self._lost_s.pop(instance.id, None)
        self.changed()

    def hear(self, instance: Instance, beat: Heartbeat, now: float) -> bool:
        """Take a heartbeat; True when what may be placed on the fleet changed."""
        instance.heard(beat, now)
        event = "heard_ready" if beat.state == "ready" else "heard_unready"
        if not instance.machine.can(event):
            return False
        instance.machine.fire(event)
        self.changed()
        return True

    def move(self, instance: Instance, event: str) -> None:
        """A step of a plan: drain, undrain, switch, switched or restore."""
        instance.machine.fire(event)
        self.changed()

    def take_role(self, instance: Instance, role: Role) -> None:
        """What the node says it is now. A pool has no engine and an engine is no pool, whatever it says."""
        if instance.role is not role and Role.KV_POOL not in (instance.role, role):
            instance.take_role(role)
            self.changed()

    def forget(self, now: float) -> None:
        """Drop instances lost long ago from display."""
        for instance_id, lost_s in list(self._lost_s.items()):
            if now - lost_s > self._forget_s:
                del self._lost_s[instance_id], self.instances[instance_id]
                self._past.pop(instance_id, None)
                self.changed()

    def changed(self) -> None:
        """Bump the version, order instances and group the ready ones anew."""
        self.version += 1
        groups: dict[str, Group] = {}
        profiles: dict[object, int] = {}
        self._ordered = ordered = [self.instances[name] for name in sorted(self.instances, key=natural)]
        alive = [one for one in ordered if one.state is not InstanceState.LOST]
        for one in alive:
            one.taste = profiles.setdefault(one.latency, len(profiles))
            model, layout, shares = one.hello.model, one.hello.layout, one.hello.shares_kv
            if one.role is Role.KV_POOL or model is None or layout is None:
                continue
            group = groups.setdefault(model.name, Group(model, layout, shares))
            if shares and not group.shares:
                group.model, group.layout, group.shares = model, layout, True
            group.members.append(one)
            if one.ready:
                {Role.PREFILL: group.prefills, Role.DECODE: group.decodes, Role.MIXED: group.mixed}[one.role].append(
                    one
                )
        for name, group in groups.items():
            old = self.groups.get(name)
            if old is not None and old.model == group.model and old.layout == group.layout:
                group.roots = old.roots
            if group.shares:
                group.pools = {one.id: one for one in alive if one.ready and _pools_for(one, group.layout)}
        self.groups = groups

    # --- views ----------------------------------------------------------------------------------------------

    def pool_map(self, group: Group, ramp_s: float, together_s: float, now: float) -> PoolMap:
        """The pools that engines of the group may put to, in order of id. One that joined others gets its full share of
        new prefixes only after ramp_s; those that joined within together_s of the first one began with it."""
        pools = group.pools.values()
        first_s = min((one.joined_s for one in pools), default=now)
        return PoolMap(pools=tuple(
            one.pool_peer(_ramped(now - one.joined_s, ramp_s) if one.joined_s - first_s > together_s else 1.0)
            for one in pools
        ))  # fmt: skip

    def alive(self) -> list[Instance]:
        """Every instance that is not lost, in order of id."""
        return [one for one in self.ordered() if one.state is not InstanceState.LOST]

    def ordered(self) -> list[Instance]:
        """Every instance, lost ones on display included, in order of id, numbers in ids by value."""
        return self._ordered

    def engines(self) -> list[Instance]:
        return [one for one in self.alive() if one.role is not Role.KV_POOL]

    def counts(self) -> dict[Role, int]:
        """Engines by role, pools included, whatever their state, lost ones left out."""
        counts = dict.fromkeys(Role, 0)
        for one in self.alive():
            counts[one.role] += 1
        return counts


def xpyd(num_prefill: int, num_decode: int, num_mixed: int = 0) -> str:
    """ "2P1D"; "2P1D+1M" with mixed instances beside; "2M" when there are only those."""
    pairs = f"{num_prefill}P{num_decode}D"
    if not num_mixed:
        return pairs
    return f"{pairs}+{num_mixed}M" if num_prefill or num_decode else f"{num_mixed}M"


def _ramped(age_s: float, ramp_s: float) -> float:
    """From MIN_WEIGHT to 1.0, in RAMP_STEPS equal steps, so that engines are told of few changes."""
    if age_s >= ramp_s:
        return 1.0
    return round(MIN_WEIGHT + (1.0 - MIN_WEIGHT) * int(RAMP_STEPS * age_s / ramp_s) / RAMP_STEPS, 3)


def _pools_for(one: Instance, layout: KvLayout) -> bool:
    return one.role is Role.KV_POOL and one.hello.layout in (None, layout)
