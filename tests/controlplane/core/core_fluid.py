"""A fleet as a fluid, around the real autopilot: traffic, plans, pins and scores are the core's own.

Prompts go through one queue that all prefill instances serve, running requests share the pace of all decode instances,
and what cannot be in time is turned away on arrival, as admission does. An instance that changes role serves nothing
while it drains and switches. Days pass in seconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from core_kit import H20, H800, SHAPE, config, hello, profile

from controlplane.core.autopilot import Autopilot
from controlplane.core.config import CoreConfig
from controlplane.core.desk import Desk
from controlplane.core.events import ApplyWanted, Audit, Effect, PlanReady, PlanWanted
from controlplane.core.instance import Instance
from controlplane.core.pins import Pins
from controlplane.core.plans import AUTOPILOT, Plans
from controlplane.core.queues import Server, Steps, capacity
from controlplane.core.score import Scores
from controlplane.core.steps import StepRun, StepState
from transfer.api import ApplyRequest, PlanRequest
from transfer.profile import HardwareProfile
from transfer.terms import KvLayout, Role, Slo
from transfer.wire.messages import Heartbeat, LoadReport

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16", rope="theta=1")
SWITCH_S = 3.0
_FAST = profile(H800)


@dataclass(frozen=True)
class Mix:
    """What arrives: requests a second, and the mean sizes; every size varies by a factor of up to 2 both ways."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int


Script = Callable[[float], Mix]


class FluidRunner:
    """Carries steps out in the fluid: an instance is out for its drain and its switch."""

    def __init__(self, world: World) -> None:
        self._world, self.switch_s = world, SWITCH_S

    def advance(self, plan_id: str, step: StepRun) -> None:
        desk, instance = self._world.desk, self._world.desk.fleet.live(step.instance_id)
        assert instance is not None
        match step.machine.state:
            case StepState.PENDING:
                desk.fleet.move(instance, "drain")
                step.fire("drain", desk.now)
            case StepState.DRAINING if desk.now - step.since_s >= self._world.drain_s(instance):
                desk.fleet.move(instance, "switch")
                step.fire("switch", desk.now)
            case StepState.SWITCHING if desk.now - step.since_s >= SWITCH_S:
                desk.fleet.take_role(instance, step.to_role)
                desk.fleet.move(instance, "switched")
                instance.speed = self._world.speed_of(instance)
                step.fire("reported", desk.now)
                step.fire("verified", desk.now)
                self._world.moves.append((desk.now, step.instance_id, step.from_role, step.to_role))
            case _:
                pass


class World:
    """One model on instances named as in "2P2D"; `run` lets time pass."""

    def __init__(
        self, shape: str, script: Script, settings: CoreConfig | None = None, *, seed: int = 0, dt: float = 0.5,
        prefill: HardwareProfile = H800, decode: HardwareProfile = H800, truth: tuple[float, float] = (1.0, 1.0),
        num_blocks: int = 30_000,
    ) -> None:  # fmt: skip
        """truth: real over predicted step times of prefill and of decode, which nobody is told."""
        settings = settings or config(autopilot="auto")
        self.desk = Desk(config_with(settings), 7, seed)
        self.pins, self.scores = Pins(), Scores()
        self.plans = Plans(self.desk, FluidRunner(self), self.pins, self.scores)  # type: ignore[arg-type]
        self.autopilot = Autopilot(self.desk, self.plans, self.pins)
        self.script, self.dt, self.truth = script, dt, truth
        self.random = random.Random(seed)
        self.moves: list[tuple[float, str, Role, Role]] = []
        self.audit: list[Audit] = []
        self.muted: set[str] = set()
        self.slow: dict[str, float] = {}
        self.good = self.offered = 0
        self.good_at: list[float] = []
        self._numbers = count()
        self._queue: deque[tuple[float, str, float, float, int, int]] = deque()
        self._backlog_s = 0.0
        self._waiting: deque[tuple[str, float, int, int]] = deque()
        self._running: list[tuple[float, str, float, float, int, int]] = []
        self._context = 0
        self._tokens = self._beat_s = 0.0
        self._pace_s = 0.01
        self._steps: dict[tuple[int, int], Steps] = {}
        self._compute_s: dict[int, float] = {}
        self._ratio: dict[int, float] = {}
        number = ""
        for char in shape:
            if char.isdigit():
                number += char
                continue
            role, hardware = {"P": (Role.PREFILL, prefill), "D": (Role.DECODE, decode), "M": (Role.MIXED, prefill)}[
                char
            ]
            for index in range(int(number)):
                said = hello(f"{char.lower()}{index}", role, hardware=hardware, layout=LAYOUT, num_blocks=num_blocks)
                self.beat(self.desk.fleet.join(said, 0.0))
            number = ""

    # --- looking ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.desk.now

    @property
    def _anyone(self) -> str:
        return next(one.id for one in self.desk.fleet.engines() if one.role is Role.DECODE)

    @property
    def split(self) -> str:
        counts = self.desk.fleet.counts()
        return f"{counts[Role.PREFILL]}P{counts[Role.DECODE]}D"

    def goodput(self, since_s: float, until_s: float) -> float:
        """Good requests a second among those that arrived in this time."""
        return sum(since_s < at_s <= until_s for at_s in self.good_at) / (until_s - since_s)

    def lines(self, code: str) -> list[str]:
        looks = self.autopilot.view(self.now).evaluations
        return [one.line for one in looks if one.code == code]

    # --- driving ----------------------------------------------------------------------------------------------

    def operator(self, xpyd: str, actor: str = "alice") -> None:
        """An operator's plan, applied."""
        self.plans.wanted(PlanWanted(ask_id="a", request=PlanRequest(xpyd=xpyd)))
        plan = next(one for one in self.desk.take() if isinstance(one, PlanReady)).plan
        asked = ApplyRequest(base_version=self.desk.fleet.version, actor=actor)
        self.plans.apply(ApplyWanted(ask_id="b", plan_id=plan.plan_id, apply=asked, at_s=1e9))
        self.take(self.desk.take())

    def take(self, effects: list[Effect]) -> None:
        self.audit += [one for one in effects if isinstance(one, Audit)]

    def run(self, seconds: float) -> World:
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.desk.begin(self.now + self.dt)
            self._arrive()
            self._prefill()
            self._decode()
            if self.now >= self._beat_s:
                self._beat_s += 1.0
                for one in self.desk.fleet.engines():
                    if one.id not in self.muted:
                        self.beat(one)
            self.plans.advance()
            self.autopilot.tick()
            self.take(self.desk.take())
        return self

    def beat(self, one: Instance) -> None:
        blocks = one.hello.num_blocks
        load = LoadReport(num_blocks=blocks, free_blocks=blocks, step_s=self._pace_s, speed=self.speed_of(one))
        if one.state.value in ("joining", "lost"):
            self.desk.fleet.hear(
                one, Heartbeat(epoch=1, state="ready", load=load, holdings=(), role=one.role), self.now
            )
        one.last_seen_s, one.load, one.speed = self.now, load, load.speed

    def speed_of(self, one: Instance) -> float:
        return self.slow.get(one.id, 1.0)

    def drain_s(self, one: Instance) -> float:
        """Its share of the running requests moves over its link."""
        decodes = max(1, sum(other.role is Role.DECODE for other in self.desk.fleet.engines()))
        if one.role is not Role.DECODE:
            return 0.5
        rows = len(self._running) / decodes
        return 0.02 * rows + rows * 2000 * LAYOUT.token_bytes / (one.hello.hardware.link_bytes_per_s * 0.8)

    # --- the fluid --------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        mix = self.script(self.now)
        for _ in range(_poisson(self.random, mix.rate_per_s * self.dt)):
            name = f"r{next(self._numbers)}"
            prompt, output = (max(1, round(mean * self._vary())) for mean in (mix.prompt_tokens, mix.output_tokens))
            self.offered += 1
            self.desk.traffic.arrived(name, self.now, "m", "default", prompt, 100_000)
            compute_s = self._compute_s.setdefault(prompt, 0.0) or _FAST.prefill_s(prompt)
            self._compute_s[prompt] = compute_s
            servers, speed = self._prefill_rate()
            wait_s = self._backlog_s / servers if servers > 0 else 1e9
            if wait_s + compute_s * speed > SLO.ttft_s:
                self._end(name, self.now, False, 0)
                continue
            self._backlog_s += compute_s
            self._queue.append((compute_s, name, self.now, self.now + compute_s * speed, output, prompt))

    def _vary(self) -> float:
        return 2.0 ** self.random.uniform(-1.0, 1.0) / 1.0820

    def _prefill_rate(self) -> tuple[float, float]:
        """(seconds of prompts computed in a second, slowness of one of them)."""
        ready = [one for one in self.desk.fleet.engines() if one.role is Role.PREFILL and one.ready]
        rate = sum(self._relative(one) / (self.speed_of(one) * self.truth[0]) for one in ready)
        return rate, len(ready) / rate if rate > 0 else 1.0

    def _relative(self, one: Instance) -> float:
        """How fast it computes a prompt, an H800 being 1."""
        if one.taste not in self._ratio:
            self._ratio[one.taste] = _FAST.prefill_s(2000) / one.profile.prefill_s(2000)
        return self._ratio[one.taste]

    def _prefill(self) -> None:
        rate, _ = self._prefill_rate()
        left_s = rate * self.dt
        while self._queue and left_s > 0:
            compute_s, name, arrived_s, earliest_s, output, prompt = self._queue[0]
            if compute_s > left_s:
                self._queue[0] = (compute_s - left_s, name, arrived_s, earliest_s, output, prompt)
                self._backlog_s -= left_s
                return
            left_s -= compute_s
            self._backlog_s -= compute_s
            self._queue.popleft()
            self._waiting.append((name, arrived_s, output, prompt))

    def _servers(self) -> list[Server]:
        counts: dict[tuple[int, float], list[Instance]] = {}
        for one in self.desk.fleet.engines():
            if one.role is Role.DECODE and one.ready:
                counts.setdefault((one.taste, self.speed_of(one)), []).append(one)
        return [Server(len(alike), self._steps_of(alike[0]), speed * self.truth[1])
                for (_, speed), alike in counts.items()]  # fmt: skip

    def _steps_of(self, one: Instance) -> Steps:
        context = max(128, 128 * round(self._context / max(1, len(self._running)) / 128))
        name = (one.taste, context)
        if name not in self._steps:
            fits = one.hello.num_blocks * 16 / context
            latency = one.profile
            self._steps[name] = Steps(lambda rows: latency.decode_step_s(rows, rows * context), fits)
        return self._steps[name]

    def _pace(self, servers: list[Server]) -> float:
        """The common step of the requests that run."""
        rows = float(len(self._running))
        if not rows:
            return 0.01
        rows = min(rows, capacity(servers, 10.0)[1])
        low, high = 0.001, 1.0
        for _ in range(12):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if capacity(servers, middle)[1] >= rows else (middle, high)
        return high

    def _decode(self) -> None:
        servers = self._servers()
        room = int(capacity(servers, SLO.tpot_s)[1]) if servers else 0
        while self._waiting and len(self._running) < room:
            name, arrived_s, output, prompt = self._waiting.popleft()
            if self.now - arrived_s > SLO.ttft_s:
                self._end(name, arrived_s, False, 0)
                continue
            self.desk.traffic.began(name, "m", self.now, self._anyone, 0)
            heappush(self._running, (self._tokens + output, name, arrived_s, self.now, output, prompt))
            self._context += prompt + output // 2
        while self._waiting and self.now - self._waiting[0][1] > SLO.ttft_s:
            name, arrived_s, _, _ = self._waiting.popleft()
            self._end(name, arrived_s, False, 0)
        if not servers:
            return
        self._pace_s = self._pace(servers)
        self._tokens += self.dt / self._pace_s
        while self._running and self._running[0][0] <= self._tokens:
            _, name, arrived_s, began_s, output, prompt = heappop(self._running)
            self._context -= prompt + output // 2
            tpot_s = (self.now - began_s) / output
            self._end(name, arrived_s, tpot_s <= SLO.tpot_s * 1.02 + self.dt / output, output)

    def _end(self, name: str, arrived_s: float, good: bool, output: int) -> None:
        self.desk.traffic.ended(name, "m", ok=output > 0, output_tokens=output, cached_tokens=0, good=good)
        if good:
            self.good += 1
            self.good_at.append(arrived_s)


def config_with(settings: CoreConfig) -> CoreConfig:
    return config(**{
        name: getattr(settings, name) for name in settings.__struct_fields__ if name != "classes"
    } | {"classes": {"default": SLO}})  # fmt: skip


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's method; means stay small."""
    number, left = 0, rng.expovariate(1.0)
    while left < mean:
        number += 1
        left += rng.expovariate(1.0)
    return number


__all__ = ["AUTOPILOT", "H20", "H800", "SHAPE", "SLO", "Mix", "World"]
