"""Small fleets and traces for the planner's tests."""

from __future__ import annotations

import random

from controlplane.core.config import CoreConfig, check_config
from controlplane.sim.spec import NodeSpec, SimConfig
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest

BLOCK = 16
SHAPE = ModelShape(
    num_layers=8, hidden_size=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn_size=4096, vocab_size=32000
)
SPARSE = ModelShape(
    num_layers=8, hidden_size=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn_size=4096, vocab_size=32000,
    num_experts=16, experts_per_token=2, expert_ffn_size=1024, num_window_layers=4, window=256,
)  # fmt: skip


def profile(
    tflops: float = 2.0, tb_per_s: float = 0.05, *, shape: ModelShape = SHAPE, pp: int = 1, dp: int = 1,
    overlap: float = 1.0,
) -> LatencyProfile:  # fmt: skip
    hardware = HardwareProfile(
        name=f"T{tflops:g}", num_gpus=pp * dp, peak_flops=tflops * 1e12, memory_bytes=16e9,
        memory_bytes_per_s=tb_per_s * 1e12, link_bytes_per_s=5e10, price_per_hour=1.0,
    )  # fmt: skip
    return LatencyProfile(hardware=hardware, shape=shape, pp=pp, dp=dp, overlap=overlap)


def node(name: str, role: Role, latency: LatencyProfile, *, num_blocks: int = 4096, **fields: object) -> NodeSpec:
    return NodeSpec(
        id=name, role=role, hardware=latency.hardware.name, num_gpus=latency.num_gpus, price_per_hour=1.0,
        latency=latency, link_bytes_per_s=5e10, num_blocks=num_blocks, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def config(slo: Slo, policy: str = "slo") -> SimConfig:
    core = check_config(CoreConfig(policy=policy, classes={"default": slo}))
    return SimConfig(core=core, model="tiny", token_bytes=SHAPE.kv_token_bytes, block_size=BLOCK, timeout_s=60.0)


def traffic(seed: int, num: int, rate: float, *, prompt: int = 600, output: int = 40) -> list[TraceRequest]:
    """Arrivals in bursts, sizes of all kinds, and some prompts that begin alike."""
    draw = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(num):
        at_s += draw.expovariate(rate) if draw.random() < 0.7 else 0.0
        tokens = 1 + int(draw.expovariate(1 / prompt))
        app = draw.randrange(3)
        blocks = tuple(app * 1000 + place for place in range(draw.randrange(1 + tokens // BLOCK)))
        found.append(
            TraceRequest(
                at_s=at_s, prompt_tokens=tokens, output_tokens=1 + int(draw.expovariate(1 / output)), blocks=blocks,
                block_tokens=BLOCK,
            )
        )  # fmt: skip
    return found
