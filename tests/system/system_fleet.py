"""The whole system in one process on the virtual clock: real plane, real scheduler, real instances over emulated
engines, real codecs; only the networks are in-process, so that a seed decides every delay, loss and death."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from roles_harness import Fleet, Options

from controlplane.core.config import CoreConfig
from controlplane.core.events import ApplyWanted, Effect, Event, PlanWanted, RequestSpec
from controlplane.core.recorder import FlightRecorder, effects_digest, replay
from controlplane.core.scheduler import SchedulerCore
from controlplane.plane import Hooks, Plane, build, collect
from nodes.engines.emulated import continuation
from transfer.actors.clock import run_virtual
from transfer.api import ApplyRequest, Plan, PlanRequest, RequestRecord
from transfer.terms import SamplingParams, Slo, pack_tokens
from transfer.wire.inproc import Faults

MODEL = "llama-3.1-8b"
EOS = 256
REST_S = 60.0


@dataclass
class Life:
    """One life of the control plane, with what its core was told and decided."""

    plane: Plane
    core: SchedulerCore
    frames: list[bytes]
    digests: list[bytes] = field(default_factory=list)


class System(Fleet):
    """Instances as in Fleet ("p0", "d1", "m0", "k0"), under a real control plane that can be killed and restarted."""

    def __init__(
        self, *names: str, seed: int = 0, options: Options | None = None, faults: Faults | None = None,
        config: CoreConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__(*names, seed=seed, options=options, faults=faults)
        self.config = config or CoreConfig(classes={"default": Slo(ttft_s=2.0, tpot_s=0.2)})
        self.records: list[RequestRecord] = []
        self.failures: list[str] = []
        self.lives: list[Life] = []
        self._num_asked = self._num_started = 0
        self._started: list[tuple[str, int]] = []

    async def __aenter__(self) -> System:
        await self.start_control()
        for name in self.names:
            self.start(name)
        await self.until(self._all_ready, "every instance ready")
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            await self.rest()
        await super().__aexit__(kind, *rest)
        await self.life.plane.stop()
        assert self.failures == []

    def start(self, name: str) -> None:
        """A life of the instance; a crashed one before it may still run, cut off from everybody."""
        self._num_started += 1
        self._started.append((name, self._num_started))
        self._supervisor.spawn(f"{name}/{self._num_started}", lambda: self._make(name))

    async def leave(self, name: str) -> None:
        """As SIGTERM: it says Goodbye and ends in order."""
        number = max(number for actor, number in self._started if actor == name)
        await self._supervisor.stop_actor(f"{name}/{number}")
        del self.actors[name]

    @property
    def life(self) -> Life:
        return self.lives[-1]

    async def start_control(self) -> None:
        number = len(self.lives) + 1
        core, codec = SchedulerCore(self.config, number, number), FlightRecorder(self.config, number, number)
        handle, frames = core.handle, [codec.header()]

        def watched(event: Event, now: float) -> list[Effect]:
            effects = handle(event, now)
            life.digests.append(effects_digest(effects))
            return effects

        core.handle = watched  # type: ignore[method-assign]
        hooks = Hooks(
            on_finished=self.records.append,
            journal=lambda now, event: frames.append(codec.entry(now, event)),
            on_failure=lambda name, error: self.failures.append(f"{name}: {error!r}"),
        )
        life = Life(build(core, self.network.router, hooks), core, frames)
        self.lives.append(life)
        await life.plane.start()

    async def kill_control(self) -> None:
        """As SIGKILL: its end of every link vanishes; its clients' streams are abandoned with it."""
        self.network.crash("control")
        await self.life.plane.supervisor.stop(0.0)

    async def rest(self) -> None:
        """Wait until the core knows of no request and no orphan, then say so or fail."""
        await self.until(lambda: self.life.core.in_flight == 0 and self.orphans() == 0, "rest")

    def orphans(self) -> int:
        return self.life.core.state(asyncio.get_running_loop().time()).orphaned_kv_blocks

    async def until(self, condition: Callable[[], bool], what: str, within: float = REST_S) -> None:
        end = asyncio.get_running_loop().time() + within
        while not condition():
            assert asyncio.get_running_loop().time() < end, f"{what} did not come within {within} virtual s"
            await asyncio.sleep(0.05)

    def _all_ready(self) -> bool:
        state = self.life.core.state(asyncio.get_running_loop().time())
        return {view.id for view in state.instances if view.state == "ready"} >= set(self.actors)

    async def complete(
        self, name: str, prompt: list[int], num_output: int, timeout_s: float = 300.0, salt: str = ""
    ) -> list[int]:
        now = asyncio.get_running_loop().time()
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=1)
        return await collect(
            self.life.plane.submit(
                RequestSpec(
                    request_id=name, model=MODEL, tokens=pack_tokens(prompt), sampling=sampling, arrived_s=now,
                    traffic_class="default", arrived_at=now, timeout_s=timeout_s, salt=salt,
                )
            )
        )  # fmt: skip

    async def right(self, name: str, prompt: list[int], num_output: int, salt: str = "") -> None:
        """Complete it and compare with the reference text: nothing repeated, missing or wrong."""
        assert await self.complete(name, prompt, num_output, salt=salt) == continuation(prompt, num_output), name

    def record(self, name: str) -> RequestRecord:
        """Of a request that has ended."""
        return next(record for record in self.records if record.request_id == name)

    async def rebalance(self, xpyd: str) -> Plan:
        """Plan it and apply it; returns at once, the plan goes on."""
        ask, self._num_asked = self.life.plane.scheduler.ask, self._num_asked + 2
        made = await ask(PlanWanted(ask_id=f"plan-{self._num_asked}", request=PlanRequest(xpyd=xpyd)))
        apply = ApplyRequest(base_version=made.base_version)
        return await ask(ApplyWanted(ask_id=f"apply-{self._num_asked}", plan_id=made.plan_id, apply=apply))

    def plan(self, plan_id: str) -> Plan:
        plan = self.life.core.plan(plan_id)
        assert plan is not None
        return plan

    def check_replay(self) -> None:
        """A fresh core fed with the recording decides the same, event for event, in every life."""
        for life in self.lives:
            assert [step.digest for step in replay(life.frames)] == life.digests


def prompts(seed: int, count: int, longest: int = 300) -> list[tuple[list[int], int]]:
    """Random prompts, some with a shared front, and how many tokens to make of each."""
    rng = random.Random(seed)
    front = [rng.randrange(97, 123) for _ in range(longest // 2)]
    made = []
    for _ in range(count):
        tail = [rng.randrange(97, 123) for _ in range(rng.randrange(1, longest))]
        made.append(((front if rng.random() < 0.3 else []) + tail, rng.randrange(1, 60)))
    return made


def virtual(scenario: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 3600.0) -> None:
    run_virtual(scenario(), limit_s=limit_s)
