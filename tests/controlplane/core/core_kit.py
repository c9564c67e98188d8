"""What the scheduler core's tests speak in: profiles, Hello, requests, and a Rig that drives one core by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from controlplane.core.config import CoreConfig
from controlplane.core.events import (
    Arrived,
    Effect,
    Ended,
    Event,
    Fail,
    Finished,
    FirstToken,
    FromNode,
    NodeMessage,
    RequestSpec,
    Send,
    Tick,
)
from controlplane.core.instance import Instance
from controlplane.core.lifecycle import Request
from controlplane.core.scheduler import SchedulerCore
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.terms import KvLayout, ModelIdentity, Role, SamplingParams, Slo, pack_tokens
from transfer.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Heartbeat,
    Hello,
    Holding,
    KvReceived,
    LoadReport,
    Message,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Released,
    Reserve,
    Reserved,
)

M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Effect)

BLOCK = 16
MODEL = ModelIdentity(name="m", revision="r1", tokenizer="t1", vocab_size=1000, max_context=100_000)
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=BLOCK, dtype="uint8", rope="theta=1")
SHAPE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
H800 = HardwareProfile(
    name="H800", num_gpus=1, peak_flops=989e12, memory_bytes=80e9, memory_bytes_per_s=3.35e12,
    link_bytes_per_s=50e9, price_per_hour=2.0,
)  # fmt: skip
H20 = HardwareProfile(
    name="H20", num_gpus=1, peak_flops=148e12, memory_bytes=96e9, memory_bytes_per_s=4.0e12,
    link_bytes_per_s=50e9, price_per_hour=0.7,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def profile(hardware: HardwareProfile) -> LatencyProfile:
    return LatencyProfile(hardware=hardware, shape=SHAPE)


def hello(
    name: str, role: Role, *, epoch: int = 1, num_blocks: int = 1000, hardware: HardwareProfile | None = None,
    model: ModelIdentity = MODEL, layout: KvLayout = LAYOUT, protocol: int = PROTOCOL_VERSION, host: str | None = None,
    holdings: tuple[Holding, ...] = (), **more: object,
) -> Hello:  # fmt: skip
    """more: further fields of Hello."""
    hardware = hardware or (H20 if role is Role.DECODE else H800)
    pool = role is Role.KV_POOL
    said = Hello(
        protocol=protocol, instance_id=name, epoch=epoch, role=role, model=None if pool else model, layout=layout,
        engine="dram" if pool else "emulated", hardware=hardware, latency=None if pool else profile(hardware),
        num_blocks=num_blocks, data_endpoint=f"inproc://{name}", host_id=host or name, holdings=holdings,
        token_budget=0 if pool else 2048,
    )  # fmt: skip
    return msgspec.structs.replace(said, **more)


def spec(
    request_id: str, num_tokens: int = 100, *, traffic_class: str = "default", now: float = 0.0,
    sampling: SamplingParams = GREEDY, timeout_s: float = 600.0, first: int = 1, salt: str = "", priority: int = 0,
    model: str = "m",
) -> RequestSpec:  # fmt: skip
    """A request of `num_tokens` tokens; equal `first` means an equal prompt."""
    tokens = [first] + [(first * 31 + index) % 997 for index in range(num_tokens - 1)]
    return RequestSpec(
        request_id=request_id, model=model, tokens=pack_tokens(tokens), sampling=sampling,
        traffic_class=traffic_class, arrived_s=now, arrived_at=1e9 + now, timeout_s=timeout_s, salt=salt,
        priority=priority,
    )  # fmt: skip


def ended(request_id: str, **changes: object) -> Ended:
    values: dict[str, object] = {
        "request_id": request_id, "outcome": "ok", "finish_reason": "length", "output_tokens": 8, "ttft_s": 0.5,
        "tpot_s": 0.02, "e2e_s": 1.0, "max_itl_s": 0.03,
    }  # fmt: skip
    return Ended(**{**values, **changes})  # type: ignore[arg-type]


class Rig:
    """One core and a clock moved by hand. `effects` are those of the last event."""

    def __init__(self, config: CoreConfig | None = None, *, seed: int = 0) -> None:
        self.core = SchedulerCore(config or CoreConfig(), 7, seed)
        self.now = 0.0
        self.effects: list[Effect] = []
        self.all_effects: list[Effect] = []
        self.holding: dict[str, tuple[Holding, ...]] = {}
        """What instances say in `wait` that they hold."""

    def do(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        self.effects = self.core.handle(event, self.now)
        self.all_effects += self.effects
        return self.effects

    def node(self, name: str, message: NodeMessage, after: float = 0.0) -> list[Effect]:
        return self.do(FromNode(instance_id=name, message=message), after)

    def join(self, name: str, role: Role, **options: object) -> None:
        said = hello(name, role, **options)  # type: ignore[arg-type]
        self.node(name, said)
        self.beat(name)

    def beat(self, name: str, *, state: str = "ready", holdings: tuple[Holding, ...] = (), after: float = 0.0,
             role: Role | None = None, **load: object) -> list[Effect]:  # fmt: skip
        one = self.instance(name)
        values = {"num_blocks": one.hello.num_blocks, "free_blocks": one.hello.num_blocks, **load}
        report = LoadReport(**values)  # type: ignore[arg-type]
        return self.node(
            name, Heartbeat(epoch=one.epoch, state=state, load=report, holdings=holdings, role=role), after
        )

    def fleet(self, shape: str = "1P1D", **options: object) -> None:
        """Join p0.., d0.., m0.. as in "2P1D" or "2M"."""
        number = ""
        for char in shape:
            if char.isdigit():
                number += char
                continue
            role = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED, "K": Role.KV_POOL}[char]
            for index in range(int(number)):
                self.join(f"{char.lower()}{index}", role, **options)
            number = ""

    def arrive(self, request_id: str, num_tokens: int = 100, **options: object) -> list[Effect]:
        options.setdefault("now", self.now)
        return self.do(Arrived(request=spec(request_id, num_tokens, **options)))  # type: ignore[arg-type]

    def tick(self, after: float = 0.1) -> list[Effect]:
        return self.do(Tick(), after)

    def wait(self, seconds: float, beats: Iterable[str] = ()) -> list[Effect]:
        """Ticks of 0.1 s, with a heartbeat of each named instance a second. Returns all effects on the way."""
        names, seen, until = list(beats), [], self.now + seconds
        number = 0
        while self.now < until - 1e-9:
            seen += self.tick()
            number += 1
            if number % 10 == 0:
                for name in names:
                    seen += self.beat(name, holdings=self.holding.get(name, ()))
        return seen

    # --- the usual course of one request --------------------------------------------------------------------

    def reserved(self, request_id: str, have: int = 0, free: int = 900, after: float = 0.0) -> list[Effect]:
        one = self.request(request_id)
        generation = one.move.generation if one.move is not None else one.generation
        target = one.move.target if one.move is not None else one.decode
        return self.node(
            str(target),
            Reserved(request_id=request_id, generation=generation, have_tokens=have, free_blocks=free), after,
        )  # fmt: skip

    def started(self, request_id: str, after: float = 0.0) -> list[Effect]:
        one = self.request(request_id)
        name = one.prefill or one.decode
        return self.node(str(name), PrefillStarted(request_id=request_id, generation=one.generation), after)

    def done(self, request_id: str, after: float = 0.0, *, cached: int = 0, fetched: int = 0,
             exposed_s: float = 0.0, prefill_s: float = 0.1) -> list[Effect]:  # fmt: skip
        one = self.request(request_id)
        return self.node(
            str(one.prefill),
            PrefillDone(
                request_id=request_id, generation=one.generation, computed_tokens=one.num_tokens - 1 - cached - fetched,
                cached_tokens=cached, fetched_tokens=fetched, prefill_s=prefill_s, transfer_s=0.1,
                exposed_s=exposed_s, transfer_bytes=1000,
            ), after,
        )  # fmt: skip

    def received(self, request_id: str, after: float = 0.0) -> list[Effect]:
        one = self.request(request_id)
        generation = one.move.generation if one.move is not None else one.generation
        target = one.move.target if one.move is not None else one.decode
        return self.node(str(target), KvReceived(request_id=request_id, generation=generation), after)

    def decoding(self, request_id: str, num_tokens: int = 100, **options: object) -> None:
        """Bring a request to where it decodes."""
        self.arrive(request_id, num_tokens, **options)
        self.reserved(request_id)
        if self.request(request_id).prefill is not None:
            self.started(request_id)
            self.done(request_id)
            self.received(request_id)
        self.do(FirstToken(request_id=request_id))

    def end(self, request_id: str, **changes: object) -> list[Effect]:
        return self.do(ended(request_id, **changes))

    def release(self, effects: Iterable[Effect]) -> None:
        """Every instance answers the aborts it was sent."""
        for name, abort in sends(effects, Abort):
            self.node(name, Released(request_id=abort.request_id, generation=abort.generation, num_blocks=0))

    # --- looking --------------------------------------------------------------------------------------------

    def request(self, request_id: str) -> Request:
        found = self.core.request(request_id)
        assert found is not None, f"request {request_id} is not in flight"
        return found

    def instance(self, name: str) -> Instance:
        found = self.core.instance(name)
        assert found is not None, f"no instance {name}"
        return found

    def at_rest(self) -> None:
        """Nothing is held, charged or orphaned anywhere."""
        assert self.core.in_flight == 0
        assert self.core.ledger.num_legs == 0
        assert self.core.ledger.orphaned_blocks(self.now) == 0
        for one in self.core.state(self.now).instances:
            assert not any(self.instance(one.id).charges), one.id
            assert self.instance(one.id).pending_blocks == 0


def sends(effects: Iterable[Effect], kind: type[M]) -> list[tuple[str, M]]:
    """(instance, message) of every Send of this kind."""
    return [
        (one.instance_id, one.message) for one in effects if isinstance(one, Send) and isinstance(one.message, kind)
    ]


def sent(effects: Iterable[Effect], kind: type[M]) -> tuple[str, M]:
    """The only one of its kind."""
    found = sends(effects, kind)
    assert len(found) == 1, f"{len(found)} of {kind.__name__} among {[type(one).__name__ for one in effects]}"
    return found[0]


def those(effects: Iterable[Effect], kind: type[E]) -> list[E]:
    return [one for one in effects if isinstance(one, kind)]


def only(effects: Iterable[Effect], kind: type[E]) -> E:
    found = those(effects, kind)
    assert len(found) == 1, f"{len(found)} of {kind.__name__}"
    return found[0]


def config(**changes: object) -> CoreConfig:
    return msgspec.structs.replace(CoreConfig(), **changes)


__all__ = [
    "BLOCK", "GREEDY", "H20", "H800", "LAYOUT", "MODEL", "Fail", "Finished", "Prefill", "Reserve", "Rig", "Slo",
    "config", "ended", "hello", "only", "profile", "sends", "sent", "spec", "those",
]  # fmt: skip
