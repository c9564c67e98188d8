"""A small world around one scheduler core: model nodes, a token router, a network with faults. Deterministic by seed.

Model nodes obey the wire's contract as the real ones do (idempotent, fenced, lease-bound), so that what the core
does under drops, duplicates, reordering, deaths, restarts and cancels can be judged by invariants after every event.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from core_kit import GREEDY, spec
from core_nodes import Node, token_of
from msgspec.structs import replace

from controlplane.core.config import CoreConfig
from controlplane.core.events import (
    Arrived,
    Effect,
    Ended,
    Event,
    Expect,
    Fail,
    Finished,
    FirstToken,
    FromNode,
    NeedTokens,
    NodeLost,
    Resume,
    Send,
    Tick,
)
from controlplane.core.instance import Charge, InstanceState
from controlplane.core.ledger import LegKind
from controlplane.core.lifecycle import RequestState
from controlplane.core.recorder import FlightRecorder, effects_digest
from controlplane.core.scheduler import SchedulerCore
from transfer.terms import Role, pack_tokens, unpack_tokens
from transfer.wire.messages import (
    Heartbeat,
    Hello,
    Message,
    Welcome,
)


@dataclass
class Faults:
    """Chances for each control message. Tokens are never lost within a session, as on the real wire."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False


@dataclass
class Client:
    """What the gateway knows of one request. delivered: output tokens so far, each checked against token_of."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    arrived: float
    generations: list[int] = field(default_factory=list)
    delivered: int = 0
    first: float | None = None
    over: bool = False
    outcome: str = ""


class World:
    def __init__(self, seed: int, config: CoreConfig, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.core = SchedulerCore(config, 99, seed)
        self.recorder = FlightRecorder(config, 99, seed)
        self.recording = [self.recorder.header()]
        self.digests: list[bytes] = []
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client] = {}
        self.finished: dict[str, int] = {}
        self.records: list[Finished] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._last: dict[tuple[str, bool], float] = {}
        self._cut: set[str] = set()
        self.after(0.0, lambda: self.every(0.1, lambda: self.event(Tick()), lambda: True))

    # --- time -----------------------------------------------------------------------------------------------

    def after(self, delay: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, act))

    def every(self, period: float, act: Callable[[], None], while_: Callable[[], bool]) -> None:
        def again() -> None:
            if while_():
                act()
                self.after(period, again)

        self.after(0.0, again)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        self.now = until

    # --- network --------------------------------------------------------------------------------------------

    def _deliver(self, link: tuple[str, bool], act: Callable[[], None], reliable: bool = False) -> None:
        if link[0] in self._cut:
            return
        faults, copies = self.faults, 1
        if not reliable:
            if self.rng.random() < faults.drop:
                return
            copies += self.rng.random() < faults.duplicate
        for _ in range(copies):
            at = self.now + 0.001 + self.rng.random() * 0.004
            if not faults.reorder or reliable:
                at = max(at, self._last.get(link, 0.0) + 1e-6)
                self._last[link] = at
            self.after(at - self.now, act)

    def to_control(self, node: Node, message: Message) -> None:
        event = FromNode(instance_id=node.name, message=message)  # type: ignore[arg-type]
        reliable = isinstance(message, Hello | Heartbeat)
        self._deliver((node.name, True), lambda: self.event(event), reliable)

    def tokens(self, node: Node, name: str, generation: int, index: int, finished: bool) -> None:
        self._deliver((node.name, True), lambda: self._token(name, generation, index, finished), True)

    # --- the gateway ----------------------------------------------------------------------------------------

    def _token(self, name: str, generation: int, index: int, finished: bool) -> None:
        client = self.clients[name]
        if client.over or generation not in client.generations or index < client.delivered:
            return
        assert index == client.delivered, f"{name}: token {index} after {client.delivered} (generation {generation})"
        client.delivered += 1
        if client.first is None:
            client.first = self.now
            self.event(FirstToken(request_id=name))
        if finished:
            self.close(client, "ok", by_node=True)

    def close(self, client: Client, outcome: str, by_node: bool = False) -> None:
        """The client's one terminal event."""
        if client.over:
            return
        client.over, client.outcome = True, outcome
        ttft = None if client.first is None else client.first - client.arrived
        self.event(Ended(
            request_id=client.request_id, outcome=outcome, finish_reason="length" if outcome == "ok" else None,  # type: ignore[arg-type]
            output_tokens=client.delivered, ttft_s=ttft, tpot_s=0.05 if client.delivered > 1 else None,
            e2e_s=self.now - client.arrived, max_itl_s=None, by_node=by_node,
        ))  # fmt: skip

    # --- driving --------------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        self.recording.append(self.recorder.entry(self.now, event))
        effects = self.core.handle(event, self.now)
        self.digests.append(effects_digest(effects))
        for effect in effects:
            self.perform(effect)
        self.check()

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send(instance_id=name, message=message):
                instance = self.core.instance(name)
                assert instance is None or instance.state is not InstanceState.LOST, f"{message} to a lost instance"
                node = self.nodes.get(name)
                if node is not None:
                    self._deliver(
                        (name, False), lambda: node.alive and node.hear(message), isinstance(message, Welcome)
                    )
            case Expect(request_id=name, generation=generation):
                self.clients[name].generations.append(generation)
            case NeedTokens(request_id=name):
                client = self.clients[name]
                client.generations.clear()
                if not client.over:
                    output = [token_of(name, index) for index in range(client.delivered)]
                    answer = Resume(request_id=name, tokens=pack_tokens(client.prompt + output), num_output=len(output))
                    self.after(0.0, lambda: self.event(answer))
            case Fail(request_id=name, kind=kind):
                outcomes = {"overloaded": "rejected", "invalid": "rejected", "timeout": "timed_out"}
                client = self.clients[name]
                self.after(0.0, lambda: self.close(client, outcomes.get(kind, "error")))
            case Finished(record=record):
                assert (record.error or "None") == str(record.error_said), "it can be said in every language"
                self.finished[record.request_id] = self.finished.get(record.request_id, 0) + 1
                self.records.append(effect)

    def start_node(self, name: str, role: Role, num_blocks: int = 400) -> None:
        self._cut.discard(name)
        self.nodes[name] = Node(self, name, role, self.rng.getrandbits(32), num_blocks)

    def kill(self, name: str, detected: float = 0.05) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        node.alive = False
        self._cut.add(name)
        self.after(detected, lambda: self.event(NodeLost(instance_id=name)))

    def cut(self, name: str, seconds: float) -> None:
        """A partition longer than the liveness time: control sees a loss, the node says Hello again afterwards."""
        node = self.nodes[name]
        if not node.alive or name in self._cut:
            return
        self._cut.add(name)
        self.after(3.0, lambda: self.event(NodeLost(instance_id=name)))

        def heal() -> None:
            if node.alive and self.nodes[name] is node:
                self._cut.discard(name)
                node.joined = False
                node.beat()

        self.after(3.0 + seconds, heal)

    def arrive(self, name: str, num_tokens: int, max_tokens: int, timeout_s: float) -> None:
        first = self.rng.randrange(1, 6)
        request = spec(name, num_tokens, now=self.now, first=first, timeout_s=timeout_s,
                       sampling=replace(GREEDY, max_tokens=max_tokens))  # fmt: skip
        self.clients[name] = Client(name, unpack_tokens(request.tokens), max_tokens, self.now)
        self.event(Arrived(request=request))

    # --- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        core = self.core
        charged: dict[str, Charge] = {}
        for leg in core.ledger.everything():
            assert not leg.closed
            total = charged.get(leg.instance.id, Charge())
            charged[leg.instance.id] = Charge(*(a + b for a, b in zip(total, leg.charge, strict=True)))
            request = core.request(leg.request_id)
            if request is None:
                assert leg.closing, f"a leg of the ended request {leg.request_id} is not being closed"
            elif request.state in (RequestState.QUEUED, RequestState.RESUMING, RequestState.FAILING):
                assert leg.closing, f"{leg.key} is open while its request is {request.state}"
        for name in self.nodes:
            instance = core.instance(name)
            if instance is not None:
                assert instance.charges == charged.get(name, Charge()), name
                assert instance.pending_blocks >= 0
        waiting = {one.request_id for model in core._desk.line.models() for one in core._desk.line.of(model)}
        for name in self.clients:
            request = core.request(name)
            queued = request is not None and request.state is RequestState.QUEUED
            assert queued == (name in waiting), f"{name}: in line {name in waiting}, queued {queued}"
            if request is not None and request.state in (RequestState.RESERVING, RequestState.MIGRATING):
                assert core.ledger.find(name, request.generation, LegKind.DECODE) is not None or (
                    request.state is RequestState.MIGRATING
                )
        assert all(count == 1 for count in self.finished.values()), self.finished

    def check_rest(self) -> None:
        """Everything has ended and nothing is left anywhere."""
        assert self.core.in_flight == 0, [
            (one, self.core.request(one).state)
            for one in self.clients
            if self.core.request(one) is not None  # type: ignore[union-attr]
        ]
        assert set(self.finished) == set(self.clients)
        assert self.core.ledger.num_legs == 0
        assert self.core.ledger.orphaned_blocks(self.now) == 0
        for node in self.nodes.values():
            if node.alive:
                assert not node.held, f"{node.name} still holds {list(node.held)}"
                instance = self.core.instance(node.name)
                assert instance is not None
                assert not any(instance.charges)
