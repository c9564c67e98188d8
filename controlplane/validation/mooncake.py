"""Section: Mooncake's placement policies on its conversation trace, mean TTFT beside those of its paper."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from controlplane.validation import splitwise
from controlplane.validation.section import Section, percent
from controlplane.validation.simulated import instances, serve
from controlplane.validation.sources import MOONCAKE
from nodes.fitting import fit
from transfer.profile import LatencyProfile
from transfer.terms import Role
from transfer.traces.reading import read_trace

PUBLISHED = {
    "random": ("random", 19.65), "least_loaded": ("load balancing", 5.27),
    "cache_aware": ("local cache-aware", 3.58), "conductor": ("global cache-aware", 3.07),
}  # fmt: skip
"""Mean TTFT, s, by policy: Mooncake (FAST'25), prefill scheduling on 8 prefill and 8 decode instances."""
NUM, NUM_EACH, SPEED_UP = 4000, 8, 1.0
BLOCK_SIZE = 512
NET_BYTES_PER_S = 100e9
"""800 Gbit/s an instance of eight A100."""
MEMORY_SHARE = 0.9
RATIO_OFF = 0.3


def mooncake_policies(data: Path) -> Section:
    """Mean TTFT of the four policies; passed when they come in the paper's order and about its ratios."""
    latency = a100_llama(data)
    kv_bytes = latency.num_gpus * latency.hardware.memory_bytes * MEMORY_SHARE - 2.0 * latency.shape.total_params
    num_blocks = int(kv_bytes / latency.shape.kv_token_bytes / BLOCK_SIZE)
    nodes = [
        node
        for role in (Role.PREFILL, Role.DECODE)
        for node in instances(role, NUM_EACH, latency, num_blocks, NET_BYTES_PER_S)
    ]
    whole = read_trace(data / MOONCAKE.files[0])
    trace = [replace(one, at_s=one.at_s / SPEED_UP) for one in whole[:NUM]]
    means, hits = {}, {}
    for policy in PUBLISHED:
        records = serve(nodes, trace, policy, BLOCK_SIZE).records
        means[policy] = fmean(one.ttft_s for one in records if one.ttft_s is not None)
        hits[policy] = sum(one.cached_tokens for one in records) / sum(one.prompt_tokens for one in records)
    ours, theirs = [*means.values()], [one[1] for one in PUBLISHED.values()]
    ordered = ours == sorted(ours, reverse=True)
    off = max(abs((one / ours[-1]) / (two / theirs[-1]) - 1.0) for one, two in zip(ours, theirs, strict=True))
    rows = [
        (theirs_name, policy, f"{published:.2f}", f"{means[policy]:.2f}", f"{published / theirs[-1]:.2f}",
         f"{means[policy] / ours[-1]:.2f}", percent(hits[policy]))
        for policy, (theirs_name, published) in PUBLISHED.items()
    ]  # fmt: skip
    return Section(
        title="Placement policies: Mooncake's mean TTFT",
        verdict=f"The four policies come in {'the' if ordered else 'another than the'} paper's order; to the global "
        f"cache-aware one they are as {' : '.join(f'{one / ours[-1]:.1f}' for one in ours)}, in the paper as "
        f"{' : '.join(f'{one / theirs[-1]:.1f}' for one in theirs)}: ratios up to {percent(off, 0)} off; the "
        f"bar is {percent(RATIO_OFF, 0)}.",
        table=[
            ("paper's policy", "ours", "paper, s", "ours, s", "paper, ratio", "ours, ratio", "prompt tokens cached"),
            *rows,
        ],
        notes=[
            f"The first {len(trace):,} requests of the conversation trace as recorded, on {NUM_EACH} prefill and "
            f"{NUM_EACH} decode instances of eight A100 with Llama-2-70B, step times fitted to Splitwise's "
            "measurements of steps of up to 2,048 tokens. Nothing is refused. Mean TTFT as we count it.",
            "The paper replays another trace of 23,000 requests, on a model and load it does not tell exactly, with KV "
            "in host memory too; ours is in GPU memory only. Ratios between policies depend on how near to saturation "
            "the prefill instances are.",
        ],
        passed=ordered and off <= RATIO_OFF,
        figures=tuple((f"{policy}_mean_ttft_s", mean) for policy, mean in means.items()),
    )


def a100_llama(data: Path) -> LatencyProfile:
    """Llama-2-70B on eight A100, fitted to steps no larger than ours."""
    samples = splitwise.load(data)[splitwise.Group("llama2-70b", "A100", 8)]
    near = [one for one in samples.prefill if one.num_new_tokens <= 2048]
    return fit([*near, *samples.decode]).profile(samples.prefill[0].profile)
