"""Model instances for the chaos tests: they obey the wire's contract (idempotent, fenced, leased)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core_kit import BLOCK, hello

from transfer.terms import Role, unpack_tokens
from transfer.wire.messages import (
    Abort,
    Heartbeat,
    Holding,
    KvReceived,
    LoadReport,
    Message,
    Migrate,
    MigrateFailed,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Released,
    RequestLost,
    Reserve,
    Reserved,
    ReserveRefused,
    RoleOrder,
    RoleReport,
    Welcome,
)

if TYPE_CHECKING:
    from core_world import World

STEP_S = 0.05
MAX_RUNNING = 6
"""A bound that the core does not know of, so that reservations are refused."""
LEASE_CHECK_S = 0.5


@dataclass
class Held:
    """One request on one node."""

    generation: int
    blocks: int
    state: str  # receiving, computing, handing, running, paused
    tokens: list[int]
    num_output: int
    max_tokens: int
    deadline: float
    version: int = 0


class Node:
    """A model instance. All of its times come from the world's clock."""

    def __init__(self, world: World, name: str, role: Role, epoch: int, num_blocks: int) -> None:
        self.world, self.name, self.role, self.epoch, self.num_blocks = world, name, role, epoch, num_blocks
        self.alive, self.joined = True, False
        self.held: dict[str, Held] = {}
        self.fences: dict[str, int] = {}
        self.busy_until = 0.0
        world.every(1.0, self.beat, lambda: self.alive)
        world.every(LEASE_CHECK_S, self.expire, lambda: self.alive)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(one.blocks for one in self.held.values())

    def say(self, message: Message) -> None:
        if self.alive:
            self.world.to_control(self, message)

    def beat(self) -> None:
        if not self.joined:
            self.say(hello(self.name, self.role, epoch=self.epoch, num_blocks=self.num_blocks,
                           holdings=self.holdings()))  # fmt: skip
            return
        load = LoadReport(
            num_running=sum(one.state == "running" for one in self.held.values()), num_blocks=self.num_blocks,
            free_blocks=self.free, queued_prefill_tokens=sum(
                len(one.tokens) for one in self.held.values() if one.state == "computing"),
        )  # fmt: skip
        self.say(Heartbeat(epoch=self.epoch, state="ready", load=load, holdings=self.holdings(), role=self.role))

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(request_id=name, generation=one.generation, num_blocks=one.blocks)
            for name, one in self.held.items()
            if one.blocks
        )

    def expire(self) -> None:
        for name, one in list(self.held.items()):
            if one.state in ("receiving", "handing") and self.world.now > one.deadline:
                del self.held[name]
                kind = PrefillFailed if self.role is Role.PREFILL else RequestLost
                self.say(kind(request_id=name, generation=one.generation, reason="lease over"))

    def hear(self, message: Message) -> None:
        match message:
            case Welcome():
                self.joined = True
                self.beat()
            case Reserve():
                self.reserve(message)
            case Prefill():
                self.prefill(message)
            case Abort():
                self.abort(message)
            case Migrate():
                self.migrate(message)
            case RoleOrder():
                self.take_role(message)

    # --- decode ---------------------------------------------------------------------------------------------

    def reserve(self, ask: Reserve) -> None:
        name, generation = ask.request_id, ask.generation
        here = self.held.get(name)
        if self.role is Role.PREFILL:
            self.say(ReserveRefused(request_id=name, generation=generation, reason="a prefill instance", retry=False,
                                    free_blocks=self.free))  # fmt: skip
            return
        if generation <= self.fences.get(name, 0) or (here is not None and here.generation > generation):
            return
        if here is not None and here.generation == generation:
            here.deadline = max(here.deadline, self.world.now + ask.lease_s)
            self.say(Reserved(request_id=name, generation=generation, have_tokens=0, free_blocks=self.free))
            return
        if here is not None:
            del self.held[name]
        tokens = unpack_tokens(ask.tokens)
        blocks = -(-len(tokens) // BLOCK)
        if blocks > self.free or len(self.held) >= MAX_RUNNING:
            self.say(ReserveRefused(request_id=name, generation=generation, reason="no room",
                                    retry=blocks <= self.num_blocks, free_blocks=self.free))  # fmt: skip
            return
        one = Held(generation, blocks, "receiving" if ask.remote else "computing", tokens, ask.num_output,
                   ask.sampling.max_tokens, self.world.now + ask.lease_s)  # fmt: skip
        self.held[name] = one
        self.say(Reserved(request_id=name, generation=generation, have_tokens=0, free_blocks=self.free))
        if not ask.remote:
            self.world.after(self.compute_s(len(tokens)), lambda: self.run(name, one))

    def compute_s(self, num_tokens: int) -> float:
        """One thing at a time."""
        self.busy_until = max(self.busy_until, self.world.now) + num_tokens * 0.0005
        return self.busy_until - self.world.now

    def arrived(self, name: str, generation: int, tokens: list[int] | None, num_output: int) -> bool:
        """A peer's KV is here; False when nothing waits for it."""
        one = self.held.get(name)
        if not self.alive or one is None or one.generation != generation or one.state != "receiving":
            return False
        if tokens is not None:
            need = -(-len(tokens) // BLOCK)
            if need - one.blocks > self.free:
                return False
            one.tokens, one.num_output, one.blocks = tokens, num_output, max(need, one.blocks)
        self.say(KvReceived(request_id=name, generation=generation))
        self.world.after(0.0, lambda: self.run(name, one))
        one.state = "computing"
        return True

    def run(self, name: str, one: Held) -> None:
        """Start or go on stepping."""
        if self.alive and self.held.get(name) is one and one.state in ("computing", "receiving"):
            one.state = "running"
            one.version += 1
            self.step(name, one, one.version)

    def step(self, name: str, one: Held, version: int) -> None:
        if not self.alive or self.held.get(name) is not one or one.state != "running" or one.version != version:
            return
        index = one.num_output
        one.tokens.append(token_of(name, index))
        one.num_output += 1
        finished = one.num_output >= one.max_tokens
        self.world.tokens(self, name, one.generation, index, finished)
        if finished:
            del self.held[name]
            self.fences[name] = max(self.fences.get(name, 0), one.generation)
            return
        one.blocks = max(one.blocks, -(-len(one.tokens) // BLOCK))
        self.world.after(STEP_S, lambda: self.step(name, one, version))

    def migrate(self, order: Migrate) -> None:
        name = order.request_id
        one = self.held.get(name)
        if one is None or one.generation != order.generation or one.state != "running":
            self.say(MigrateFailed(request_id=name, generation=order.generation, reason="it does not run here"))
            return
        one.state = "paused"

        def moved() -> None:
            if not self.alive or self.held.get(name) is not one or one.state != "paused":
                return
            target = self.world.nodes.get(order.target.instance_id)
            good = (target is not None and target.epoch == order.target.epoch and self.world.rng.random() > 0.1
                    and target.arrived(name, order.target_generation, list(one.tokens), one.num_output))  # fmt: skip
            if good:
                del self.held[name]
                self.fences[name] = max(self.fences.get(name, 0), order.generation)
                self.say(Released(request_id=name, generation=order.generation, num_blocks=one.blocks))
            else:
                one.state = "computing"
                self.run(name, one)
                self.say(MigrateFailed(request_id=name, generation=order.generation, reason="refused"))

        self.world.after(0.1, moved)

    # --- prefill --------------------------------------------------------------------------------------------

    def prefill(self, order: Prefill) -> None:
        name, generation = order.request_id, order.generation
        here = self.held.get(name)
        if generation <= self.fences.get(name, 0) or (here is not None and here.generation >= generation):
            return
        if self.role is Role.DECODE:
            self.say(PrefillFailed(request_id=name, generation=generation, reason="a decode instance"))
            return
        tokens = unpack_tokens(order.tokens)
        one = Held(generation, -(-len(tokens) // BLOCK), "computing", tokens, 0, 0, self.world.now + order.lease_s)
        self.held[name] = one

        def start() -> None:
            if self.alive and self.held.get(name) is one:
                self.say(PrefillStarted(request_id=name, generation=generation))

        def done() -> None:
            if not self.alive or self.held.get(name) is not one:
                return
            del self.held[name]
            self.fences[name] = max(self.fences.get(name, 0), generation)
            target = self.world.nodes.get(order.target.instance_id)
            good = (target is not None and target.epoch == order.target.epoch and self.world.rng.random() > 0.02
                    and target.arrived(name, generation, None, 0))  # fmt: skip
            if good:
                self.say(PrefillDone(
                    request_id=name, generation=generation, computed_tokens=len(tokens) - 1, cached_tokens=0,
                    fetched_tokens=0, prefill_s=0.05, transfer_s=0.02, exposed_s=0.01, transfer_bytes=10,
                ))  # fmt: skip
            else:
                self.say(PrefillFailed(request_id=name, generation=generation, reason="the target refused"))

        self.world.after(max(0.0, self.busy_until - self.world.now), start)
        self.world.after(self.compute_s(len(tokens)), done)

    # --- either ---------------------------------------------------------------------------------------------

    def abort(self, message: Abort) -> None:
        name = message.request_id
        self.fences[name] = max(self.fences.get(name, 0), message.generation)
        one = self.held.get(name)
        if one is not None and one.generation <= message.generation:
            del self.held[name]
        self.say(Released(request_id=name, generation=message.generation, num_blocks=0))

    def take_role(self, order: RoleOrder) -> None:
        if order.epoch != self.epoch:
            return
        ok = not self.held or order.role is self.role
        if ok:
            self.role = order.role
        self.say(RoleReport(plan_id=order.plan_id, epoch=self.epoch, role=self.role, ok=ok,
                            detail="" if ok else "not idle"))  # fmt: skip
        self.beat()


def token_of(name: str, index: int) -> int:
    """Output token `index` of a request: the same wherever it is drawn."""
    return (sum(name.encode()) * 7 + index * 13) % 997
