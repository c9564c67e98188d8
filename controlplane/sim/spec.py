"""What is simulated: the nodes of a fleet and what goes wrong, as data; and what came out."""

from __future__ import annotations

from controlplane.core.config import CoreConfig
from transfer.api import CandidateView, RequestRecord
from transfer.profile import LatencyProfile
from transfer.terms import InstanceId, KvLayout, RequestId, Role, Struct


class NodeSpec(Struct, frozen=True):
    """One simulated instance. latency is None for a kv_pool.

    num_blocks: KV blocks of `block_size` tokens in memory; ssd_blocks: of a pool, on SSD. latency_error: relative
    standard deviation of step times around the profile, drawn from the run's seed. shares_kv, moves: as in Hello.
    """

    id: InstanceId
    role: Role
    hardware: str
    num_gpus: int
    price_per_hour: float
    latency: LatencyProfile | None
    link_bytes_per_s: float
    num_blocks: int
    ssd_blocks: int = 0
    token_budget: int = 2048
    max_running: int = 256
    host: str = ""
    """Instances of one host move KV at the host's speed; empty: a host of its own."""
    latency_error: float = 0.0
    shares_kv: bool = True
    moves: bool = True


class Fault(Struct, frozen=True):
    """kind "kill": the instance dies at at_s and a new life joins after duration_s (0: never). "slow": its steps take
    `factor` times as long for duration_s. "mute": its heartbeats are lost for duration_s ("" as instance: everybody's).
    """

    at_s: float
    kind: str
    instance: InstanceId
    duration_s: float = 0.0
    factor: float = 1.0


class Order(Struct, frozen=True):
    """An operator asks for this split ("2P3D") and applies the plan at once."""

    at_s: float
    xpyd: str


class SimConfig(Struct, frozen=True):
    """core.policy names the placement policy. token_bytes: of KV, in all layers. stepwise: never advance runs of equal
    decode steps in closed form (slower, same result)."""

    core: CoreConfig
    model: str
    token_bytes: float
    block_size: int = 512
    seed: int = 0
    stepwise: bool = False
    keep_decisions: bool = False
    """With the candidates of each; otherwise only the chosen one is explained."""
    faults: tuple[Fault, ...] = ()
    max_context: int = 131072
    drain_s: float = 600.0
    """Simulated seconds after the last arrival before what has not ended counts as timed out."""
    timeout_s: float = 600.0
    """Of each request, from its arrival."""
    max_tokens: int | None = None
    """The most output that clients ask for; each output then ends by itself where the trace says. None: they ask for
    exactly what comes, as a benchmark's client does."""
    liveness_s: float = 3.0
    """How long the control plane hears nothing from a killed instance before it counts as lost."""
    layout: KvLayout | None = None
    """What instances declare; None: one of token_bytes."""
    orders: tuple[Order, ...] = ()


class Decision(Struct, frozen=True):
    """One placement as it was made."""

    at_s: float
    request_id: RequestId
    prefill: InstanceId | None
    decode: InstanceId
    candidates: tuple[CandidateView, ...]


class SimResult(Struct, frozen=True):
    """records: one for each request, in order of their ends. gpu_s, dollars: of the whole fleet over span_s, from the
    first arrival to the last end. num_moves: role switches that were carried out."""

    records: tuple[RequestRecord, ...]
    wall_s: float
    span_s: float
    gpu_s: float
    dollars: float
    good: int
    counted: int
    rejected: int
    num_preemptions: int
    num_moves: int
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    busy_s: dict[InstanceId, float] = {}
    """Seconds that steps took on each instance, in all its lives and roles."""

    @property
    def attainment(self) -> float:
        return self.good / self.counted if self.counted else 0.0

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.span_s if self.span_s > 0 else 0.0

    @property
    def goodput_per_gpu(self) -> float:
        return self.good / self.gpu_s if self.gpu_s > 0 else 0.0

    @property
    def cost_per_good(self) -> float | None:
        return self.dollars / self.good if self.good else None
