"""Simulated fleets for the validation, and latencies counted as the papers count them."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import simulate
from controlplane.sim.spec import NodeSpec, SimConfig, SimResult
from transfer.api import RequestRecord
from transfer.profile import LatencyProfile
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest

PATIENT = Slo(ttft_s=1e6, tpot_s=1e6)
"""Objectives nobody misses: whatever a policy refuses for their sake is served."""
PATIENCE_S = 7200.0


def instances(
    role: Role, count: int, latency: LatencyProfile, num_blocks: int, link_bytes_per_s: float, token_budget: int = 2048
) -> list[NodeSpec]:
    """`count` equal instances, named by their role and class."""
    hardware = latency.hardware
    return [
        NodeSpec(
            id=f"{role}-{hardware.name}-{number}".lower(), role=role, hardware=hardware.name,
            num_gpus=latency.num_gpus, price_per_hour=hardware.price_per_hour, latency=latency,
            link_bytes_per_s=link_bytes_per_s, num_blocks=num_blocks, token_budget=token_budget,
        )
        for number in range(count)
    ]  # fmt: skip


def serve(nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], policy: str, block_size: int) -> SimResult:
    """The trace served to its end, by nobody's objectives."""
    latency = next(node.latency for node in nodes if node.latency is not None)
    core = CoreConfig(classes={"default": PATIENT}, default_class="default", policy=policy, autopilot="off")
    config = SimConfig(
        core=core, model="validation", token_bytes=latency.shape.kv_token_bytes, block_size=block_size,
        timeout_s=PATIENCE_S, drain_s=PATIENCE_S,
    )  # fmt: skip
    return simulate(nodes, trace, config)


def first_token_s(record: RequestRecord) -> float:
    """TTFT as the papers count it: to the prefill's end, which has the first token. Ours is longer: it has the transfer
    and, with another instance decoding, the first decode step."""
    return record.stages_s.get("queue", 0.0) + record.stages_s.get("prefill", 0.0)


def later_token_s(record: RequestRecord) -> float:
    """TPOT as the papers count it: from the prefill's end to the last token, over the tokens after the first."""
    return (record.e2e_s - first_token_s(record)) / max(1, record.output_tokens - 1)


def attained(records: Sequence[RequestRecord], ttft_s: float, tpot_s: float) -> float:
    """Share of requests within both, counted as the papers count."""
    good = sum(
        record.outcome == "ok" and first_token_s(record) <= ttft_s
        and (record.output_tokens < 2 or later_token_s(record) <= tpot_s)
        for record in records
    )  # fmt: skip
    return good / len(records)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
