"""A small fleet for role tests: real instances over emulated engines, and a control plane of a few lines."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nodes.engines.emulated import EmulatedEngine, continuation, emulated_identity, emulated_layout
from nodes.engines.engine import Engine
from nodes.hardware import preset
from nodes.instance import InstanceActor, InstanceSpec, PoolMemory
from nodes.roles.base import BatchRole
from nodes.roles.context import Bounds
from nodes.roles.kv_pool import PoolRole
from nodes.shapes import latency_profile, shape
from transfer.actors.clock import run_virtual
from transfer.actors.supervision import Supervisor
from transfer.kv.links.inproc import InprocKvNetwork, KvFaults
from transfer.terms import Role, SamplingParams, pack_tokens
from transfer.wire.endpoint import PeerEvent
from transfer.wire.inproc import Faults, InprocNetwork
from transfer.wire.messages import (
    Abort,
    Heartbeat,
    Hello,
    KvPeer,
    KvSource,
    Message,
    PoolMap,
    PoolPeer,
    Prefill,
    Reserve,
    Reserved,
    StepOutput,
    Welcome,
)

BLOCK = 4
LEASE_S = 5.0
KV_LATENCY_S = 0.0003
M = TypeVar("M", bound=Message)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * seed) % 256 for i in range(length)]


@dataclass
class Options:
    num_blocks: int = 256
    token_budget: int = 64
    max_running: int = 32
    speed: float = 1.0
    pool_blocks: int = 128
    grace_s: float = 10.0
    bounds: Bounds = field(default_factory=Bounds)


class Control:
    """Answers Hello with Welcome, keeps everything it hears, and sends what a test tells it to."""

    def __init__(self, network: InprocNetwork, epoch: int = 1) -> None:
        self.epoch = epoch
        self.heard: list[tuple[str, Message]] = []
        self.hellos: dict[str, Hello] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.output: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.events: list[tuple[str, PeerEvent]] = []
        self._changed = asyncio.Event()
        self.endpoint = network.router(on_message=self._on_message, on_peer=self._on_peer)

    def send(self, instance: str, message: Message) -> None:
        self.endpoint.send(instance, message)

    def peer(self, instance: str) -> KvPeer:
        hello = self.hellos[instance]
        return KvPeer(instance_id=instance, epoch=hello.epoch, data_endpoint=hello.data_endpoint, host_id=hello.host_id)

    def of(self, kind: type[M], request: str | None = None, instance: str | None = None) -> list[M]:
        return [
            m
            for name, m in self.heard
            if isinstance(m, kind)
            and (request is None or getattr(m, "request_id", None) == request)
            and (instance is None or name == instance)
        ]

    async def expect(
        self, kind: type[M], request: str | None = None, instance: str | None = None, count: int = 1, within: float = 60
    ) -> M:
        """The `count`th message of this kind; fails the test when it does not come."""
        await self.until(lambda: len(self.of(kind, request, instance)) >= count, f"{kind.__name__} {request}", within)
        return self.of(kind, request, instance)[count - 1]

    async def until(self, condition: Callable[[], bool], what: str, within: float = 60) -> None:
        try:
            async with asyncio.timeout(within):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            heard = [(name, type(m).__name__) for name, m in self.heard if not isinstance(m, Heartbeat | StepOutput)]
            raise AssertionError(f"{what} did not come within {within} s; heard {heard[-30:]}") from None

    def reserve(
        self, instance: str, request: str, tokens: list[int], *, generation: int = 1, remote: bool = True,
        max_tokens: int = 8, num_output: int = 0, lease_s: float = LEASE_S, source: str | None = None,
        source_blocks: int = 0, **sampling: Any,
    ) -> None:  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.send(
            instance,
            Reserve(
                request_id=request, generation=generation, tokens=pack_tokens(tokens), num_output=num_output,
                sampling=params, remote=remote, lease_s=lease_s, source=self.source(source, source_blocks),
            ),
        )  # fmt: skip

    def prefill(
        self, instance: str, request: str, tokens: list[int], target: str, *, generation: int = 1, have_tokens: int = 0,
        source: str | None = None, source_blocks: int = 0, lease_s: float = LEASE_S,
    ) -> None:  # fmt: skip
        self.send(
            instance,
            Prefill(
                request_id=request, generation=generation, tokens=pack_tokens(tokens), target=self.peer(target),
                have_tokens=have_tokens, lease_s=lease_s,
                source=self.source(source, source_blocks),
            ),
        )  # fmt: skip

    def source(self, pool: str | None, num_blocks: int) -> KvSource | None:
        return KvSource(peer=self.peer(pool), num_blocks=num_blocks) if pool else None

    def abort(self, instance: str, request: str, generation: int = 1) -> None:
        self.send(instance, Abort(request_id=request, generation=generation, reason="the client left"))

    async def hand_off(
        self, request: str, tokens: list[int], prefill: str = "p0", decode: str = "d0", *, generation: int = 1,
        max_tokens: int = 8, num_output: int = 0, source: str | None = None, source_blocks: int = 0,
    ) -> None:  # fmt: skip
        """Reserve, then Prefill with what decode has, as the scheduler does."""
        self.reserve(decode, request, tokens, generation=generation, max_tokens=max_tokens, num_output=num_output)
        await self.until(
            lambda: any(r.generation == generation for r in self.of(Reserved, request, decode)), "Reserved"
        )
        reserved = next(r for r in self.of(Reserved, request, decode) if r.generation == generation)
        self.prefill(
            prefill, request, tokens, decode, generation=generation, have_tokens=reserved.have_tokens, source=source,
            source_blocks=source_blocks,
        )  # fmt: skip

    async def text(self, request: str, tokens: list[int], count: int, within: float = 60) -> None:
        """Wait for the request's end and compare its tokens with the reference."""
        await self.until(lambda: request in self.finished, f"the end of {request}", within)
        assert self.output[request] == continuation(tokens, count)

    def _on_message(self, instance: str, message: Message) -> None:
        self.heard.append((instance, message))
        match message:
            case Hello():
                self.hellos[instance] = message
                self.send(
                    instance,
                    Welcome(control_epoch=self.epoch, role=message.role, heartbeat_s=1.0, lease_s=LEASE_S),
                )
                self._tell_pools()
            case Heartbeat():
                self.beats[instance] = message
            case StepOutput():
                for item in message.items:
                    output = self.output.setdefault(item.request_id, [])
                    assert item.index <= len(output), f"a gap in {item.request_id}: {item.index} after {len(output)}"
                    output[item.index :] = item.token_ids
                    if item.finish is not None:
                        self.finished[item.request_id] = item.finish
        self._changed.set()

    def _tell_pools(self) -> None:
        pools = tuple(
            PoolPeer(instance_id=name, epoch=h.epoch, data_endpoint=h.data_endpoint, host_id=h.host_id)
            for name, h in sorted(self.hellos.items())
            if h.role is Role.KV_POOL
        )
        for name, hello in self.hellos.items():
            if hello.role is not Role.KV_POOL and pools and name in self.endpoint.sessions:
                self.send(name, PoolMap(pools=pools))

    def _on_peer(self, instance: str, event: PeerEvent) -> None:
        self.events.append((instance, event))
        self._changed.set()


class Fleet:
    """Instances "p0", "d1", "m0", "k0" by the first letter of their role. Use as `async with`.

    At the end everything must be at rest: no block held, none leaked, each arena's core consistent.
    """

    ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED, "k": Role.KV_POOL}

    def __init__(
        self, *names: str, options: Options | None = None, faults: Faults | None = None,
        kv_faults: KvFaults | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.names, self.options = names, options or Options()
        self.network = InprocNetwork(seed, faults)
        self.kv = InprocKvNetwork(seed, latency_s=KV_LATENCY_S, bytes_per_s=1e7, faults=kv_faults)
        self.control = Control(self.network)
        self.actors: dict[str, InstanceActor] = {}
        self.given_up: list[tuple[str, int]] = []
        self.escalated: list[str] = []
        self.crashed: list[InstanceActor] = []
        self._epochs = itertools.count(100)
        self._supervisor = Supervisor("fleet", lambda name, error: self.escalated.append(name))

    async def __aenter__(self) -> Fleet:
        await self.control.endpoint.start()
        for name in self.names:
            self.start(name)
        await self.control.until(lambda: set(self.names) <= set(self.control.beats), "everybody joined")
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.at_rest()
        await self._supervisor.stop(5.0)
        assert not self.escalated

    def start(self, name: str) -> None:
        self._supervisor.spawn(name, lambda: self._make(name))

    async def stop(self, name: str) -> None:
        await self._supervisor.stop_actor(name)
        del self.actors[name]

    def crash(self, name: str) -> None:
        """As SIGKILL: nothing is said, its links just break."""
        actor = self.actors.pop(name)
        self.network.crash(name)
        self.kv.crash(name)
        self.crashed.append(actor)

    def shell(self, name: str) -> Any:
        role = self.actors[name].role
        assert isinstance(role, BatchRole)
        return role.shell

    def pool(self, name: str) -> PoolRole:
        role = self.actors[name].role
        assert isinstance(role, PoolRole)
        return role

    async def at_rest(self, within: float = 30.0) -> None:
        """Wait until nothing is held anywhere, then check every block."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while loop.time() < deadline and not self._idle():  # noqa: ASYNC110  (roles do not signal that they are idle)
            await asyncio.sleep(0.05)
        for name, actor in self.actors.items():
            assert actor.role is not None
            assert actor.role.holdings() == (), f"{name} still holds {actor.role.holdings()}"
            assert actor.role.load().leaked_blocks == 0, name
            if isinstance(actor.role, BatchRole):
                assert actor.role.idle, name
                assert actor.role.shell.core.check() == 0, name
                assert not actor.role.shell.legs.num_unanswered, name
            if isinstance(actor.role, PoolRole):
                assert actor.role.store.check() == 0, name
                assert actor.role.store.pinned_blocks == actor.role.store.writing_blocks == 0, name

    def _idle(self) -> bool:
        stores = [actor.role.store for actor in self.actors.values() if isinstance(actor.role, PoolRole)]
        moving = sum(store.pinned_blocks + store.writing_blocks for store in stores)
        return not moving and all(actor.role is not None and actor.role.idle for actor in self.actors.values())

    def _make(self, name: str) -> InstanceActor:
        options, role = self.options, self.ROLES[name[0]]
        spec = InstanceSpec(
            instance_id=name, role=role, host_id="host", make_engine=self._engine_maker(role),
            make_port=lambda instance_id, epoch, arena: self.kv.port(instance_id=instance_id, epoch=epoch, arena=arena),
            make_endpoint=lambda instance_id, on_message, on_peer, on_bad: self.network.dealer(
                instance_id, on_message=on_message, on_peer=on_peer, on_bad=on_bad
            ),
            give_up=lambda sentence, status: self.given_up.append((sentence, status)),
            token_budget=options.token_budget, max_running=options.max_running, grace_s=options.grace_s,
            bounds=options.bounds, make_epoch=lambda: next(self._epochs),
        )  # fmt: skip
        self.actors[name] = InstanceActor(spec)
        return self.actors[name]

    def _engine_maker(self, role: Role) -> Callable[[], Awaitable[Engine | PoolMemory]]:
        options = self.options
        hardware = preset("H800")

        async def make() -> Engine | PoolMemory:
            if role is Role.KV_POOL:
                return PoolMemory(emulated_layout(BLOCK), options.pool_blocks, hardware)
            return EmulatedEngine(
                latency_profile(hardware, shape("llama-3.1-8b")), emulated_identity("llama-3.1-8b"), options.num_blocks,
                block_size=BLOCK, speed=options.speed,
            )  # fmt: skip

        return make


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the virtual clock."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


async def serve_thirty_two(fleet: Fleet) -> None:
    """Prompts and answers of many lengths at once over p0, p1, d0 and d1; each has the reference text."""
    prompts = {f"r{i}": prompt(5 + 7 * i % 90, seed=i) for i in range(32)}
    for i, (name, tokens) in enumerate(prompts.items()):
        await fleet.control.hand_off(name, tokens, f"p{i % 2}", f"d{i // 2 % 2}", max_tokens=1 + i % 13)
    for i, (name, tokens) in enumerate(prompts.items()):
        await fleet.control.text(name, tokens, 1 + i % 13)
    assert len(fleet.control.finished) == 32
