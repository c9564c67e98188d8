"""The scheduler as a pure core: one event in, effects out. It wires the parts and reads nothing but its arguments.

The same object runs live, in virtual time and in a replay of the flight recorder, and decides identically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from controlplane.core.autopilot import Autopilot
from controlplane.core.balance import Balance
from controlplane.core.classes import Classes
from controlplane.core.config import CoreConfig, check_config
from controlplane.core.desk import Desk
from controlplane.core.dispatch import Dispatch
from controlplane.core.endings import Endings
from controlplane.core.events import (
    ApplyWanted,
    Arrived,
    AutopilotRestored,
    AutopilotWanted,
    ClassesRestored,
    ClassesWanted,
    Effect,
    Ended,
    Event,
    FirstToken,
    FromNode,
    HoldWanted,
    NodeLost,
    PlansRestored,
    PlanWanted,
    Resume,
    Tick,
)
from controlplane.core.handoff import Handoff
from controlplane.core.holds import Holds
from controlplane.core.instance import Instance
from controlplane.core.ledger import Ledger
from controlplane.core.lifecycle import Request
from controlplane.core.membership import Membership
from controlplane.core.migration import Migrations
from controlplane.core.pins import Pins
from controlplane.core.planrun import StepRunner
from controlplane.core.plans import Plans
from controlplane.core.policies.registry import POLICIES
from controlplane.core.readings import Readings
from controlplane.core.recovery import Recovery
from controlplane.core.replication import SKETCH_WIDTH, Replication
from controlplane.core.score import Scores
from controlplane.core.view import core_metrics, fleet_state, kv_detail
from transfer.api import FleetState, Plan
from transfer.autopilot import AutopilotView
from transfer.classes import ClassesView
from transfer.screens import KvDetail
from transfer.sketch import CountMin
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import (
    CacheEvents,
    Goodbye,
    Heartbeat,
    Hello,
    KvReceived,
    MigrateFailed,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Released,
    Replicated,
    RequestLost,
    Reserved,
    ReserveRefused,
    RoleReport,
)

SPEND_S = 1.0


class SchedulerCore:
    """Deterministic: equal config, control_epoch, seed and events give equal effects. Every method is synchronous.

    Guarantees: exactly one Finished for every request that arrived; no blocks are held anywhere for a request that
    has ended, once its instances answered; charges on instances return to zero with their legs. Events that are
    repeated, late or of an older placement change nothing. Raises IllegalTransition only for a fault of its own.
    """

    def __init__(self, config: CoreConfig, control_epoch: int, seed: int) -> None:
        self.config = check_config(config)
        self._desk = desk = Desk(config, control_epoch, seed)
        self._endings = Endings(desk)
        self._replication = Replication(desk, CountMin(SKETCH_WIDTH))
        self._dispatch = Dispatch(desk, self._endings, self._replication)
        self._recovery = Recovery(desk, self._dispatch, self._endings)
        self._migrations = Migrations(desk, self._dispatch, self._recovery, self._on_moved)
        self._balance = Balance(desk, self._migrations)
        self._handoff = Handoff(desk, self._dispatch, self._recovery, self._migrations)
        self._membership = Membership(desk, self._recovery, self._on_lost)
        pins = Pins()
        self._plans = Plans(desk, StepRunner(desk, self._migrations, self._membership), pins, Scores())
        self._autopilot = Autopilot(desk, self._plans, pins)
        self._holds = Holds(desk, self._migrations, self._membership, self._plans)
        self._classes = Classes(desk, self._autopilot.unjudge)
        self._readings = Readings(desk)
        self._spent_s, self._spent_version = 0.0, -1
        handoff, membership = self._handoff, self._membership
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            FromNode: self._from_node, NodeLost: self._node_lost, Arrived: self._arrived,
            Resume: self._recovery.resume, FirstToken: self._first_token, Ended: self._endings.ended,
            PlanWanted: self._plans.wanted, ApplyWanted: self._plans.apply, Tick: self._tick,
            AutopilotWanted: self._autopilot.wanted, AutopilotRestored: self._autopilot.restored,
            HoldWanted: self._holds.wanted, ClassesWanted: self._classes.wanted,
            ClassesRestored: self._classes.restored, PlansRestored: self._plans.restored,
        }  # fmt: skip
        self._node_handlers: dict[type, Callable[[InstanceId, Any], object]] = {
            Hello: membership.hello, Heartbeat: self._heartbeat, Goodbye: membership.goodbye,
            RoleReport: self._role_report, Reserved: handoff.reserved, ReserveRefused: handoff.refused,
            PrefillStarted: handoff.prefill_started, PrefillDone: handoff.prefill_done,
            PrefillFailed: handoff.prefill_failed, KvReceived: handoff.kv_received,
            RequestLost: handoff.request_lost, Released: handoff.released, MigrateFailed: self._migrations.failed,
            CacheEvents: membership.cache_events, Replicated: self._replication.replicated,
        }  # fmt: skip

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at loop time `now` (seconds, not decreasing); perform the effects in order."""
        desk = self._desk
        desk.begin(now)
        self._handlers[type(event)](event)
        if self._plans.applying is not None:
            self._plans.advance()
        if desk.stirred:
            self._dispatch.pump()
        if desk.fleet.version != self._spent_version:
            self._spend()
        return desk.take()

    # --- what may be read -----------------------------------------------------------------------------------

    def state(self, now: float) -> FleetState:
        """The fleet as operators see it."""
        return fleet_state(self._desk, now, self._autopilot)

    def metrics(self) -> dict[str, float]:
        """What the core alone knows, by name on /metrics without prefix; counters end in _total."""
        return core_metrics(self._desk, self._autopilot)

    def readings(self, now: float) -> dict[str, float]:
        """This second's value of every series; to be asked for once a second."""
        return self._readings.take(now)

    def kv(self, now: float) -> KvDetail:
        """Links, hot prefixes, caches and failures."""
        return kv_detail(self._desk, now)

    def autopilot(self, now: float) -> AutopilotView:
        """Mode, last looks, pins and score."""
        return self._autopilot.view(now)

    def classes(self) -> ClassesView:
        """Objectives and prices."""
        return self._classes.view()

    def plan(self, plan_id: str) -> Plan | None:
        return self._plans.plan(plan_id)

    def plans(self) -> list[Plan]:
        """Newest first; the oldest are forgotten."""
        return self._plans.all()

    @property
    def in_flight(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._desk.requests)

    @property
    def awaits_tick(self) -> bool:
        """Whether time alone may change something before a second is over: somebody waits for a place, a plan is
        carried out, an abort is not confirmed, or the policy migrates."""
        if POLICIES[self.config.policy].moves is not None:
            return bool(self._desk.requests)
        return bool(
            self._desk.line.models() or self._plans.applying is not None or self._desk.ledger.num_closing
            or self._holds.draining
        )  # fmt: skip

    @property
    def models(self) -> tuple[str, ...]:
        """Model names that some engine of the fleet serves."""
        return tuple(sorted(self._desk.fleet.groups))

    @property
    def version(self) -> int:
        """Bumped by every change of membership, role or plan."""
        return self._desk.fleet.version

    def can_serve(self, model: str) -> bool:
        """Whether a request for `model` would find ready instances now."""
        group = self._desk.fleet.groups.get(model)
        return group is not None and bool(group.mixed or (group.decodes and group.prefills))

    def request(self, request_id: RequestId) -> Request | None:
        """A request in flight, to look at only."""
        return self._desk.requests.get(request_id)

    def instance(self, instance_id: InstanceId) -> Instance | None:
        """An instance, to look at only."""
        return self._desk.fleet.instances.get(instance_id)

    @property
    def ledger(self) -> Ledger:
        """The handoff ledger, to look at only."""
        return self._desk.ledger

    # --- events ---------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived) -> None:
        request = self._dispatch.arrived(event)
        if request is not None:
            self._recovery.watch(request)

    def _first_token(self, event: FirstToken) -> None:
        request = self._desk.requests.get(event.request_id)
        if request is not None:
            self._handoff.first_token(request)
            if request.decode is not None:
                self._desk.traffic.began(
                    request.request_id, request.spec.model, self._desk.now, request.decode, request.cached_tokens
                )

    def _from_node(self, event: FromNode) -> None:
        self._node_handlers[type(event.message)](event.instance_id, event.message)

    def _node_lost(self, event: NodeLost) -> None:
        self._membership.lost(event.instance_id)

    def _heartbeat(self, sender: InstanceId, beat: Heartbeat) -> None:
        instance = self._membership.heartbeat(sender, beat)
        if instance is not None:
            self._holds.heard(instance)
            self._plans.beat(instance, beat)

    def _role_report(self, sender: InstanceId, report: RoleReport) -> None:
        instance = self._desk.fleet.live(sender, report.epoch)
        if instance is not None:
            self._plans.report(instance, report)

    def _tick(self, event: Tick) -> None:
        desk = self._desk
        self._recovery.tick()
        self._migrations.tick()
        self._holds.tick()
        self._balance.tick()
        self._replication.tick()
        self._membership.tick()
        self._plans.advance()
        self._autopilot.tick()
        desk.goodput.advance(desk.now)
        if desk.now - self._spent_s >= SPEND_S:
            desk.fleet.forget(desk.now)
            self._spend()
        desk.stirred = True

    def _spend(self) -> None:
        """Book what the fleet cost until now; from now on it is the present one."""
        desk = self._desk
        self._spent_s, self._spent_version = desk.now, desk.fleet.version
        price = sum(one.hello.hardware.price_per_hour for one in desk.fleet.alive())
        desk.goodput.spend(sum(one.num_gpus for one in desk.fleet.engines()), price, desk.now)

    def _on_lost(self, instance: Instance, reason: str) -> None:
        self._replication.lost(instance.id)
        if self._plans.applying is not None:
            self._plans.advance()

    def _on_moved(self, instance_id: InstanceId) -> None:
        self._plans.moved(instance_id)
