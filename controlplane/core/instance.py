"""One life of one instance as the control plane sees it: state table, declared profile, reported and charged load."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from controlplane.core.machine import Machine, mermaid
from transfer.errors import IllegalTransition
from transfer.profile import LatencyProfile
from transfer.terms import InstanceId, Role
from transfer.wire.messages import Heartbeat, Hello, KvPeer, LoadReport, PoolPeer

US = 1_000_000
FETCH_FADE_S = 60.0
"""Half-life of what was measured of a pool, so that one that was slow once is tried again."""


class InstanceState(StrEnum):
    JOINING = "joining"
    """Known, not yet ready for work."""
    READY = "ready"
    CORDONED = "cordoned"
    """Set aside by an operator: gets no new work; what it has goes on."""
    DRAINING = "draining"
    """Gets no new work; what it has finishes or migrates."""
    SWITCHING = "switching"
    """Empty; takes another role."""
    LOST = "lost"


INSTANCE_MOVES: dict[InstanceState, dict[str, InstanceState]] = {
    InstanceState.JOINING: {"heard_ready": InstanceState.READY, "lose": InstanceState.LOST},
    InstanceState.READY: {
        "heard_unready": InstanceState.JOINING,
        "cordon": InstanceState.CORDONED,
        "drain": InstanceState.DRAINING,
        "lose": InstanceState.LOST,
    },
    InstanceState.CORDONED: {
        "resume": InstanceState.READY,
        "drain": InstanceState.DRAINING,
        "heard_unready": InstanceState.JOINING,
        "lose": InstanceState.LOST,
    },
    InstanceState.DRAINING: {
        "undrain": InstanceState.READY,
        "switch": InstanceState.SWITCHING,
        "lose": InstanceState.LOST,
    },
    InstanceState.SWITCHING: {
        "switched": InstanceState.READY,
        "restore": InstanceState.JOINING,
        "lose": InstanceState.LOST,
    },
    InstanceState.LOST: {"rejoin": InstanceState.JOINING},
}


class Charge(NamedTuple):
    """Load put on an instance at dispatch, in its own units. prefill_us: predicted compute of the prefill tokens.

    rows: requests that decode there, or on a prefill instance those it computes for. tpot_us: pace objective of the
    row, 0 without one.
    """

    prefill_tokens: int = 0
    prefill_us: int = 0
    rows: int = 0
    context_tokens: int = 0
    blocks: int = 0
    tpot_us: int = 0


class Instance:
    """Mutable; owned by Fleet. Charges are exact: every one is taken back once, and a negative sum raises."""

    __slots__ = (
        "blocks", "busy_until_s", "charged", "context_tokens", "epoch", "fetch_scale", "free_blocks", "full", "held",
        "hello", "hint_s", "id", "joined_s", "last_seen_s", "latency", "load", "machine", "missed", "node_state",
        "paces", "pending_blocks", "picked", "prefill_tokens", "prefill_us", "rate_tokens_per_s", "reported_s", "role",
        "rows", "since_report", "speed", "taste", "token_hint_s", "tpot_us",
    )  # fmt: skip

    def __init__(self, hello: Hello, now: float) -> None:
        self.id: InstanceId = hello.instance_id
        self.epoch, self.role, self.hello, self.latency = hello.epoch, hello.role, hello, hello.latency
        self.machine = Machine(f"instance {hello.instance_id}", INSTANCE_MOVES, InstanceState.JOINING)
        self.joined_s = self.last_seen_s = self.reported_s = now
        self.node_state = ""
        self.load = LoadReport(num_blocks=hello.num_blocks, free_blocks=hello.num_blocks)
        self.speed = 1.0
        self.fetch_scale = 1.0
        """A pool's measured / predicted fetch time; what was measured fades."""
        self.missed = 0
        """Fetches in a row that brought nothing of what a pool says it has."""
        self.free_blocks = hello.num_blocks
        self.pending_blocks = 0
        self.full = self.held = False
        self.prefill_tokens = self.prefill_us = self.rows = self.context_tokens = self.blocks = self.tpot_us = 0
        self.paces: dict[int, int] = {}
        """Rows by pace objective in microseconds, those without one left out."""
        self.busy_until_s = now
        """When all prefill work charged would be done, had it gone as predicted since the last of it ended."""
        self.since_report = [0, 0]
        self.picked = 0
        self.taste = 0
        self.rate_tokens_per_s = 0.0
        self.hint_s: float | None = None
        self.token_hint_s: float | None = None
        self._measure_rate()

    @property
    def state(self) -> InstanceState:
        return self.machine.state

    @property
    def ready(self) -> bool:
        return self.machine.state is InstanceState.READY

    @property
    def room(self) -> int:
        """Blocks it last said are free, less those asked for since."""
        return self.free_blocks - self.pending_blocks

    @property
    def kv_use(self) -> float:
        """Share of its blocks that is in use, by its last word."""
        load = self.load
        return (load.num_blocks - load.free_blocks) / load.num_blocks if load.num_blocks > 0 else 0.0

    @property
    def num_gpus(self) -> int:
        return 0 if self.role is Role.KV_POOL else self.hello.hardware.num_gpus

    @property
    def profile(self) -> LatencyProfile:
        """Raises IllegalTransition for a pool, which computes nothing."""
        if self.latency is None:
            raise IllegalTransition(f"instance {self.id}", self.role.value, "a prediction of compute time")
        return self.latency

    def peer(self) -> KvPeer:
        return KvPeer(instance_id=self.id, epoch=self.epoch, data_endpoint=self.hello.data_endpoint,
                      host_id=self.hello.host_id)  # fmt: skip

    def pool_peer(self, weight: float) -> PoolPeer:
        return PoolPeer(instance_id=self.id, epoch=self.epoch, data_endpoint=self.hello.data_endpoint,
                        host_id=self.hello.host_id, weight=weight)  # fmt: skip

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Take the instance's own account. It corrects estimates; it never changes what was charged."""
        if self.fetch_scale != 1.0:
            self.fetch_scale **= 0.5 ** (max(0.0, now - self.last_seen_s) / FETCH_FADE_S)
        load = beat.load
        self.last_seen_s = self.reported_s = now
        self.node_state, self.load = beat.state, load
        self.told_free(load.free_blocks)
        self.since_report = [self.since_report[1], 0]
        speed = min(100.0, max(0.01, load.speed if load.speed > 0 else 1.0))
        self.hint_s = self.token_hint_s = None
        if speed != self.speed:
            self.speed = speed
            self._measure_rate()

    def take_role(self, role: Role) -> None:
        """Its speed was measured in the other phase."""
        self.role, self.speed = role, 1.0
        self._measure_rate()

    def told_free(self, free_blocks: int, full: bool = False) -> None:
        """Its word on its own room. full: it refused, whatever is free; it is asked again after its next word or
        when one of its requests ends."""
        self.free_blocks, self.full = free_blocks, full

    def freed(self, blocks: int) -> None:
        """A request ended there: its blocks are free before the next heartbeat says so."""
        self.free_blocks, self.full = min(self.hello.num_blocks, self.free_blocks + blocks), False

    def charge(self, charge: Charge, now: float = 0.0) -> None:
        if charge.prefill_us:
            self.busy_until_s = max(self.busy_until_s, now) + charge.prefill_us / US * self.speed
        self._add(charge, 1)
        self.since_report[1] += charge.prefill_tokens

    def discharge(self, charge: Charge, now: float = 0.0) -> None:
        """Raises IllegalTransition when more is taken back than was charged."""
        self._add(charge, -1)
        if charge.prefill_us:
            self.busy_until_s = now + self.prefill_us / US * self.speed

    def pend(self, blocks: int) -> None:
        """Blocks asked for and not answered; negative when the answer came."""
        self.pending_blocks += blocks
        if self.pending_blocks < 0:
            raise IllegalTransition(f"instance {self.id}", "pending blocks 0", f"an answer for {-blocks} more")

    def backlog_s(self, now: float) -> float:
        """queue_s, and no more than is left of all work charged had it gone as predicted. What is overdue counts as
        half of its delay."""
        queue_s = self.queue_s(now)
        if not queue_s:
            return 0.0
        left_s = self.busy_until_s - now
        return min(queue_s, left_s if left_s > 0 else -0.5 * left_s)

    def queue_s(self, now: float | None = None) -> float:
        """Predicted seconds until prefill work charged now would start.

        now: loop time; the last report is aged to it: steps since are taken to have gone as predicted, and of what was
        charged after it nothing counts as done before it is heard. None: as if the report were new.
        """
        token_s = self.token_hint_s
        if token_s is None:
            token_s = self.prefill_us / US / self.prefill_tokens * self.speed if self.prefill_tokens else 0.0
            self.token_hint_s = token_s
        if not token_s:
            return 0.0
        before, after = self.since_report
        told_s = token_s * (self.load.queued_prefill_tokens + before + after)
        if now is not None:
            told_s = max(token_s * after, told_s - (now - self.reported_s))
        return min(token_s * self.prefill_tokens, told_s)

    def step_hint_s(self) -> float:
        """Predicted decode step with one more request of the usual length: cheap, for ranking before weighing."""
        if self.hint_s is None:
            usual = self.context_tokens // self.rows if self.rows else 0
            self.hint_s = self.step_s(usual)
        return self.hint_s

    def step_s(self, context_tokens: int) -> float:
        """Predicted decode step with one more request that holds `context_tokens`."""
        return self.profile.decode_step_s(self.rows + 1, self.context_tokens + context_tokens) * self.speed

    def _add(self, charge: Charge, sign: int) -> None:
        self.prefill_tokens += sign * charge.prefill_tokens
        self.prefill_us += sign * charge.prefill_us
        self.rows += sign * charge.rows
        self.context_tokens += sign * charge.context_tokens
        self.blocks += sign * charge.blocks
        if charge.tpot_us:
            self.tpot_us += sign * charge.tpot_us
            self._count_pace(charge.tpot_us, sign * charge.rows)
        self.hint_s = self.token_hint_s = None
        if (
            self.prefill_tokens < 0 or self.prefill_us < 0 or self.rows < 0 or self.context_tokens < 0
            or self.blocks < 0 or self.tpot_us < 0
        ):  # fmt: skip
            raise IllegalTransition(f"instance {self.id}", f"charged {self.charges}", f"giving back {charge}")

    @property
    def charges(self) -> Charge:
        return Charge(
            self.prefill_tokens, self.prefill_us, self.rows, self.context_tokens, self.blocks, self.tpot_us
        )  # fmt: skip

    def _count_pace(self, tpot_us: int, by: int) -> None:
        rows = self.paces.get(tpot_us, 0) + by
        if rows > 0:
            self.paces[tpot_us] = rows
        else:
            self.paces.pop(tpot_us, None)

    def _measure_rate(self) -> None:
        if self.latency is not None:
            budget = max(self.hello.token_budget, 256)
            self.rate_tokens_per_s = budget / (self.latency.prefill_s(budget) * self.speed)


def instance_diagram() -> str:
    """The instance's states as a Mermaid diagram."""
    return mermaid(INSTANCE_MOVES, InstanceState.JOINING)
