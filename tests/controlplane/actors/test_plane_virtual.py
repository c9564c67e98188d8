"""The plane over an in-process network in virtual time, with the real scheduler core and a node played by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from controlplane.core.config import CoreConfig
from controlplane.core.events import Event, RequestSpec
from controlplane.core.recorder import FlightRecorder, effects_digest, replay
from controlplane.core.scheduler import SchedulerCore
from controlplane.gateway.errors import ApiError
from controlplane.plane import Hooks, Plane, build, collect
from transfer.actors.clock import run_virtual
from transfer.api import RequestRecord
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.terms import FinishReason, KvLayout, ModelIdentity, Role, SamplingParams, pack_tokens, unpack_tokens
from transfer.wire.endpoint import PeerEvent
from transfer.wire.inproc import InprocEndpoint, InprocNetwork
from transfer.wire.messages import (
    CONTROL,
    PROTOCOL_VERSION,
    Abort,
    Heartbeat,
    Hello,
    LoadReport,
    Message,
    NotWelcome,
    Released,
    Reserve,
    Reserved,
    StepOutput,
    TokenItem,
    Welcome,
)

STEP_S = 0.01
HARDWARE = HardwareProfile(
    name="H800", num_gpus=1, peak_flops=989e12, memory_bytes=80e9, memory_bytes_per_s=3.35e12, link_bytes_per_s=50e9,
    price_per_hour=2.0,
)  # fmt: skip
SHAPE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
MODEL = ModelIdentity(name="m", revision="r", tokenizer="t", vocab_size=257, max_context=4096)
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype="uint8", rope="x")


class MixedNode:
    """Counts upwards from the length of what it was given: token i of a request is prompt + i, by any path."""

    def __init__(self, network: InprocNetwork, name: str) -> None:
        self.name, self.epoch = name, 1
        self.refused: str | None = None
        self.tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self.silent = False
        self.end: InprocEndpoint = network.dealer(name, on_message=self.on_message, on_peer=self.on_peer)

    def on_peer(self, peer: str, event: PeerEvent) -> None:
        if event is PeerEvent.CONNECTED:
            self.say(
                Hello(
                    protocol=PROTOCOL_VERSION, instance_id=self.name, epoch=self.epoch, role=Role.MIXED, model=MODEL,
                    layout=LAYOUT, engine="emulated", hardware=HARDWARE, num_blocks=500, token_budget=2048,
                    latency=LatencyProfile(hardware=HARDWARE, shape=SHAPE), data_endpoint="inproc://x", host_id="h",
                )
            )  # fmt: skip

    def on_message(self, peer: str, message: Message) -> None:
        match message:
            case Welcome():
                self.beat()
            case NotWelcome():
                self.refused = message.reason
            case Reserve():
                self.say(Reserved(request_id=message.request_id, generation=message.generation, have_tokens=0,
                                  free_blocks=400))  # fmt: skip
                task = asyncio.create_task(self.generate(message))
                self.tasks[message.request_id] = (message.generation, task)
            case Abort():
                generation, task = self.tasks.get(message.request_id, (0, None))
                if task is not None and generation <= message.generation:
                    task.cancel()
                self.say(Released(request_id=message.request_id, generation=message.generation, num_blocks=0))

    async def generate(self, work: Reserve) -> None:
        prompt = len(unpack_tokens(work.tokens)) - work.num_output
        for index in range(work.num_output, work.sampling.max_tokens):
            await asyncio.sleep(STEP_S)
            if self.silent:
                return
            finish = FinishReason.LENGTH if index == work.sampling.max_tokens - 1 else None
            self.say(StepOutput(epoch=self.epoch, items=(
                TokenItem(request_id=work.request_id, generation=work.generation, index=index,
                          token_ids=(prompt + index,), finish=finish, cached_tokens=0),)))  # fmt: skip

    def beat(self) -> None:
        if self.end.alive:
            load = LoadReport(num_blocks=500, free_blocks=400)
            self.say(Heartbeat(epoch=self.epoch, state="ready", load=load))
            asyncio.get_running_loop().call_later(1.0, self.beat)

    def say(self, message: Message) -> None:
        if CONTROL in self.end.sessions:
            self.end.send(CONTROL, message)


class World:
    """A plane, its recording and what finished."""

    def __init__(self) -> None:
        self.network = InprocNetwork(seed=3)
        self.records: list[RequestRecord] = []
        self.frames: list[bytes] = []
        self.digests: list[bytes] = []
        self.failures: list[str] = []
        config = CoreConfig()
        core, codec = SchedulerCore(config, 7, 11), FlightRecorder(config, 7, 11)
        self.frames.append(codec.header())
        handle = core.handle

        def watched(event: Event, now: float) -> Any:
            effects = handle(event, now)
            self.digests.append(effects_digest(effects))
            return effects

        core.handle = watched  # type: ignore[method-assign]
        self.core = core
        hooks = Hooks(
            on_finished=self.records.append,
            journal=lambda now, event: self.frames.append(codec.entry(now, event)),
            on_failure=lambda name, error: self.failures.append(name),
            check_hello=lambda hello: "not you" if hello.instance_id == "stranger" else None,
        )
        self.plane: Plane = build(core, self.network.router, hooks)

    def spec(self, name: str, num_prompt: int = 40, max_tokens: int = 20) -> RequestSpec:
        now = asyncio.get_running_loop().time()
        return RequestSpec(
            request_id=name, model="m", tokens=pack_tokens(list(range(num_prompt))), arrived_s=now, arrived_at=now,
            sampling=SamplingParams(max_tokens=max_tokens), traffic_class="default", timeout_s=60.0,
        )  # fmt: skip


def virtual(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    """Run a scenario against a started plane, stop it, and check what always holds."""

    async def run() -> World:
        world = World()
        await world.plane.start()
        await scenario(world)
        await asyncio.sleep(12)  # leases and grace run out
        assert len(world.plane.router) == 0
        assert world.core.in_flight == 0
        assert world.core.state(asyncio.get_running_loop().time()).orphaned_kv_blocks == 0
        await world.plane.stop()
        assert world.failures == []
        return world

    return run_virtual(run())


async def node(world: World, name: str) -> MixedNode:
    made = MixedNode(world.network, name)
    await made.end.start()
    return made


def test_requests_are_placed_streamed_counted_and_replay_identically() -> None:
    async def scenario(world: World) -> None:
        await node(world, "a")
        await node(world, "b")
        await asyncio.sleep(0.2)
        outputs = await asyncio.gather(*(collect(world.plane.submit(world.spec(f"r{n}"))) for n in range(10)))
        assert outputs == [list(range(40, 60))] * 10

    world = virtual(scenario)
    assert [record.outcome for record in world.records] == ["ok"] * 10
    assert {record.decode for record in world.records} == {"a", "b"}
    for record in world.records:
        assert record.ttft_s is not None
        assert sum(record.stages_s.values()) == pytest.approx(record.ttft_s, rel=0.02)
    assert [step.digest for step in replay(world.frames)] == world.digests


def test_a_node_that_dies_costs_a_resume_and_no_token() -> None:
    async def scenario(world: World) -> None:
        first = await node(world, "a")
        await asyncio.sleep(0.2)
        work = [asyncio.create_task(collect(world.plane.submit(world.spec(f"r{n}", max_tokens=50)))) for n in range(4)]
        await asyncio.sleep(0.2)
        await node(world, "b")
        first.silent = True
        world.network.crash("a")
        assert await asyncio.gather(*work) == [list(range(40, 90))] * 4

    world = virtual(scenario)
    assert [(record.outcome, record.num_resumes, record.decode) for record in world.records] == [("ok", 1, "b")] * 4
    assert [step.digest for step in replay(world.frames)] == world.digests


def test_a_client_that_leaves_stops_the_node() -> None:
    async def scenario(world: World) -> None:
        made = await node(world, "a")
        await asyncio.sleep(0.2)
        async with contextlib.aclosing(world.plane.submit(world.spec("r", max_tokens=1000))) as stream:
            async for _ in stream:
                break
        await asyncio.sleep(1.0)
        assert made.tasks["r"][1].cancelled()

    (record,) = virtual(scenario).records
    assert (record.outcome, record.output_tokens) == ("cancelled", 1)


def test_without_nodes_a_request_fails_with_a_sentence() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(ApiError, match="no decode instance") as failed:
            await collect(world.plane.submit(world.spec("r")))
        assert failed.value.status == 503

    assert [record.outcome for record in virtual(scenario).records] == ["error"]


def test_strangers_and_impostors_are_not_welcome() -> None:
    async def scenario(world: World) -> None:
        stranger = await node(world, "stranger")
        impostor = MixedNode(world.network, "impostor")
        impostor.name = "another"
        await impostor.end.start()
        confused = await node(world, "confused")
        await asyncio.sleep(0.2)
        confused.say(Abort(request_id="r", generation=1, reason="I am not the control plane"))
        await asyncio.sleep(0.2)
        assert stranger.refused == "not you"
        assert impostor.refused is not None
        assert "calls itself another" in impostor.refused
        assert confused.refused is not None
        assert "Abort is the control plane's to send" in confused.refused
        views = world.core.state(asyncio.get_running_loop().time()).instances
        assert [(view.id, view.state) for view in views] == [("confused", "lost")]

    virtual(scenario)


def test_a_core_that_raises_ends_the_plane_and_is_reported() -> None:
    async def run() -> World:
        world = World()
        await world.plane.start()

        def broken(event: Event, now: float) -> Any:
            raise RuntimeError("a bug")

        world.core.handle = broken  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        world.plane.router.sweep()
        await world.plane.stop()
        return world

    assert run_virtual(run()).failures == ["scheduler"]
