"""Simulates a trace on a fleet: an event heap drives the scheduler core and the nodes' batching cores. No asyncio."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from controlplane.core.events import (
    ApplyWanted,
    Arrived,
    Audit,
    AutopilotKept,
    AutopilotReady,
    Effect,
    Event,
    Expect,
    Fail,
    Finished,
    Looked,
    NeedTokens,
    Note,
    PlanReady,
    PlanRefused,
    PlansKept,
    PlanWanted,
    RequestSpec,
    Send,
    Tick,
)
from controlplane.core.goodput import counts_for_attainment
from controlplane.core.scheduler import SchedulerCore
from controlplane.sim.chain import Chain
from controlplane.sim.lives import Lives
from controlplane.sim.node import SimEngine
from controlplane.sim.spec import Decision, NodeSpec, Order, SimConfig, SimResult
from controlplane.sim.stepper import ENDS
from controlplane.sim.world import World
from transfer.api import ApplyRequest, PlanRequest, RequestRecord
from transfer.errors import InvalidValue
from transfer.terms import KvLayout, ModelIdentity, Role, SamplingParams
from transfer.traces.request import TraceRequest

TICK_S, CALM_TICK_S = 0.1, 1.0
"""How often the scheduler hears of time passing: while something waits; while nothing does."""
REST_S = 60.0
"""After the last end, for what is still being released."""
LOOKS_A_LEASE = 4
"""How often in the time of a lease instances look whether one is over."""
MAX_NOTES = 100
PROGRESS_EVERY = 256
TOKEN_BYTES = 4
REFUSALS = (429, 503)

OnProgress = Callable[[int, int], None]
"""(requests ended, of all)."""


def simulate(
    nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], config: SimConfig, on_progress: OnProgress | None = None
) -> SimResult:
    """Serve the trace with the fleet. Deterministic. Raises InvalidValue, with a sentence, for what cannot work."""
    return Simulation(nodes, trace, config, on_progress).run()


class Simulation:
    """One run. core: the scheduler, to look at; journal: told of every event that enters it, before it does."""

    def __init__(
        self, nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], config: SimConfig,
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        self.config, self._specs = config, {one.id: one for one in nodes}
        if len(self._specs) != len(nodes):
            raise InvalidValue("two instances of the fleet have the same id; give each its own")
        self._trace = sorted(trace, key=lambda one: one.at_s)
        self._on_progress = on_progress
        self.world = World(config, _identity(config), config.layout or _layout(nodes, config))
        core = config.core if config.keep_decisions else replace(config.core, num_explained=1)
        self.core = SchedulerCore(core, 1, config.seed)
        self.journal: Callable[[float, Event], None] | None = None
        self._chain = Chain(config.block_size)
        self._records: list[RequestRecord] = []
        self._decisions: list[Decision] = []
        self._notes: list[str] = []
        self._num_arrived = self._num_asked = self._num_rejected = 0
        self._ticked_s = 0.0
        self._num_beats = 0
        self._beats_a_look = max(1, int(config.core.lease_s / LOOKS_A_LEASE / config.core.heartbeat_s))
        self._lives = Lives(self.world, self._specs)
        self._performers: dict[type[Effect], Callable[[Any], None]] = {
            Send: self._send, Expect: self._expect, NeedTokens: self._need_tokens, Fail: self._fail,
            Finished: self._finished, Audit: lambda effect: None, PlanReady: self._plan_ready,
            PlansKept: lambda effect: None, AutopilotKept: lambda effect: None, AutopilotReady: lambda effect: None,
            Looked: lambda effect: None,
            PlanRefused: lambda effect: self._note(effect.message), Note: self._noted,
        }  # fmt: skip

    def run(self) -> SimResult:
        began = time.perf_counter()
        heap, trace = self.world.heap, self._trace
        for name in self._specs:
            self._lives.join(name)
        heap.at(self.config.core.heartbeat_s, self._beat)
        heap.at(TICK_S, self._tick)
        for fault in self.config.faults:
            heap.at(fault.at_s, self._lives.fault, fault)
        for order in self.config.orders:
            heap.at(order.at_s, self._order, order)
        self._drain()
        if trace:
            heap.at(trace[0].at_s, self._arrive, 0)
            heap.at(trace[-1].at_s + self.config.drain_s, self._give_up)
        end_s = trace[-1].at_s + self.config.drain_s + REST_S if trace else 0.0
        with _no_collection():
            self._loop(end_s)
        return self._result(time.perf_counter() - began)

    # --- the loop ---------------------------------------------------------------------------------------------

    def _loop(self, end_s: float) -> None:
        world, heap = self.world, self.world.heap
        inbox, dirty, entries, streams = world.inbox, world.dirty, heap.entries, world.router.streams
        while entries and entries[0][0] <= end_s:
            heap.run_next()
            if inbox:
                self._drain()
            if dirty and heap.next_s > heap.now:
                self._begin_steps()
            if not streams and self._at_rest():
                return

    def _drain(self) -> None:
        """Every event that waits for the core, and what follows from it at this instant."""
        inbox, performers, now = self.world.inbox, self._performers, self.world.now
        handle, journal = self.core.handle, self.journal
        while inbox:
            event = inbox.popleft()
            if journal is not None:
                journal(now, event)
            for effect in handle(event, now):
                performers[type(effect)](effect)

    def _begin_steps(self) -> None:
        """The instant is over: instances that have work and no step begin one."""
        dirty = self.world.dirty
        while dirty:
            steppers = list(dirty)
            dirty.clear()
            for stepper in steppers:
                stepper.begin()
            if self.world.inbox:
                self._drain()

    def _at_rest(self) -> bool:
        return (
            self._num_arrived == len(self._trace) and not self.world.router.streams
            and not self.core.in_flight and not self.core.ledger.num_legs
        )  # fmt: skip

    # --- what happens in time ---------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        config, world, request = self.config, self.world, self._trace[number]
        name = f"r{number}"
        keys = self._chain.keys(name, request)
        world.keys[name] = keys
        num_shareable = (request.prompt_tokens - 1) // config.block_size
        most = request.output_tokens if config.max_tokens is None else max(config.max_tokens, request.output_tokens)
        spec = RequestSpec(
            request_id=name, model=config.model, tokens=bytes(TOKEN_BYTES * request.prompt_tokens),
            sampling=SamplingParams(max_tokens=most, ignore_eos=config.max_tokens is None),
            traffic_class=request.traffic_class or config.core.default_class, arrived_s=world.now,
            arrived_at=request.at_s, timeout_s=config.timeout_s, tenant=request.tenant, priority=request.priority,
            hashes=tuple([key[0] for key in keys[:num_shareable]]),
        )  # fmt: skip
        world.router.open(spec, request.output_tokens)
        world.inbox.append(Arrived(request=spec))
        self._num_arrived += 1
        if self._num_arrived < len(self._trace):
            world.heap.at(self._trace[self._num_arrived].at_s, self._arrive, self._num_arrived)

    def _beat(self) -> None:
        world = self.world
        self._num_beats += 1
        looks = not self._num_beats % self._beats_a_look
        for node in world.nodes.values():
            if node.alive:
                if looks:
                    node.tick()
                node.beat()
        world.heap.at(world.now + self.config.core.heartbeat_s, self._beat)

    def _tick(self) -> None:
        world = self.world
        if world.now - self._ticked_s >= CALM_TICK_S - 1e-6 or self.core.awaits_tick:
            self._ticked_s = world.now
            world.inbox.append(Tick())
        world.heap.at(world.now + TICK_S, self._tick)

    def _give_up(self) -> None:
        self.world.router.give_up(self.world.now)

    def _order(self, order: Order) -> None:
        self._num_asked += 1
        self.world.inbox.append(PlanWanted(ask_id=f"ask-{self._num_asked}", request=PlanRequest(xpyd=order.xpyd)))

    # --- effects ----------------------------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        node = self.world.nodes.get(effect.instance_id)
        if node is not None and node.alive:
            node.receive(effect.message)

    def _expect(self, effect: Expect) -> None:
        self.world.router.expect(effect)
        if not self.config.keep_decisions:
            return
        request = self.core.request(effect.request_id)
        if request is not None and request.generation == effect.generation and request.decode is not None:
            self._decisions.append(
                Decision(
                    at_s=self.world.now, request_id=effect.request_id, prefill=request.prefill, decode=request.decode,
                    candidates=request.why if request.minted == 1 else (),
                )
            )  # fmt: skip

    def _need_tokens(self, effect: NeedTokens) -> None:
        resume = self.world.router.need_tokens(effect.request_id)
        if resume is not None:
            self.world.inbox.append(resume)

    def _fail(self, effect: Fail) -> None:
        self._num_rejected += effect.status in REFUSALS
        self.world.router.fail(effect, self.world.now)

    def _finished(self, effect: Finished) -> None:
        record = effect.record
        self._records.append(record)
        self.world.keys.pop(record.request_id, None)
        if self._on_progress is not None and not len(self._records) % PROGRESS_EVERY:
            self._on_progress(len(self._records), len(self._trace))

    def _plan_ready(self, effect: PlanReady) -> None:
        if effect.plan.status == "planned" and effect.ask_id.startswith("ask-"):
            self.world.inbox.append(
                ApplyWanted(
                    ask_id=f"apply-{effect.ask_id}", plan_id=effect.plan.plan_id,
                    apply=ApplyRequest(base_version=effect.plan.base_version), at_s=self.world.now,
                )
            )  # fmt: skip

    def _noted(self, effect: Note) -> None:
        if effect.level != "info":
            self._note(effect.text)

    def _note(self, text: str) -> None:
        if len(self._notes) < MAX_NOTES:
            self._notes.append(f"{self.world.now:.3f} s: {text}")

    # --- what came out ----------------------------------------------------------------------------------------

    def _result(self, wall_s: float) -> SimResult:
        classes, records = self.config.core.classes, self._records
        counted = 0
        for record in records:
            slo = classes.get(record.traffic_class)
            counted += slo is not None and counts_for_attainment(record, slo)
        first_s = self._trace[0].at_s if self._trace else 0.0
        span_s = max((one.arrived_at + one.e2e_s for one in records), default=first_s) - first_s
        preempted = sum(
            node.shell.core.load(self.world.now).num_preemptions
            for node in self.world.nodes.values() if isinstance(node, SimEngine) and node.alive
        )  # fmt: skip
        gpus = sum(one.num_gpus for one in self._specs.values() if one.role is not Role.KV_POOL)
        price = sum(one.price_per_hour for one in self._specs.values())
        return SimResult(
            records=tuple(records), wall_s=wall_s, span_s=span_s, gpu_s=gpus * span_s, dollars=price * span_s / 3600,
            good=sum(record.good is True for record in records), counted=counted,
            rejected=self._num_rejected,
            num_preemptions=preempted + self.world.num_preemptions, num_moves=self.world.num_moves,
            decisions=tuple(self._decisions), notes=tuple(self._notes), busy_s=self.world.busy_s,
        )  # fmt: skip


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A simulation makes many objects and next to no cycles of them: looking for those took a tenth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()
            gc.unfreeze()  # now all of it is old, so that the next collection does not begin with it
            gc.enable()


def _identity(config: SimConfig) -> ModelIdentity:
    return ModelIdentity(
        name=config.model,
        revision="simulated",
        tokenizer="simulated",
        vocab_size=2,
        max_context=config.max_context,
        eos_token_ids=() if config.max_tokens is None else (ENDS,),
    )


def _layout(nodes: Sequence[NodeSpec], config: SimConfig) -> KvLayout:
    """Of as many layers as the model has and token_bytes in all."""
    shape = next((one.latency.shape for one in nodes if one.latency is not None), None)
    num_layers = shape.num_layers if shape is not None else 1
    return KvLayout(
        num_layers=num_layers, num_kv_heads=1, head_dim=max(1, round(config.token_bytes / (2 * num_layers))),
        block_size=config.block_size, dtype="uint8", rope="simulated",
    )  # fmt: skip
