"""Section: SLO attainment over request rate as in DistServe's Table 2, simulated with its own step times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from controlplane.validation import distserve
from controlplane.validation.section import Section, percent
from controlplane.validation.simulated import attained, instances, serve
from nodes.fitting import StepSample, fit
from transfer.api import RequestRecord
from transfer.profile import LatencyProfile
from transfer.terms import Role
from transfer.traces.arrivals import poisson_times
from transfer.traces.mixes import Mix, mean_tokens
from transfer.traces.request import TraceRequest

MODEL = "facebook/opt-13b"
RATES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Requests a second and GPU."""
TABLE_2 = {
    "vLLM": (0.970, 0.655, 0.528, 0.449, 0.367, 0.278, 0.236),
    "DistServe": (1.0, 1.0, 0.993, 0.873, 0.830, 0.773, 0.700),
}
"""Attainment of the real systems, DistServe (OSDI'24), Table 2."""
RUNS = {
    "vLLM": (0.680, 0.673, 0.520, 0.604, 0.270, 0.203, 0.068),
    "DistServe": (0.963, 0.943, 0.907, 0.747, 0.547, 0.460, 0.357),
}
"""Share of requests within RUNS_TTFT_S and TPOT_S in runs that the authors kept in their repository's history:
simdistserve/benchmarks/alignment/data-ground-truth/opt-13b-sharegpt at commit 20a1633, of them vllm-N-RATE with N = 100
RATE, and distserve-c21d11-300-RATE."""
RUNS_TTFT_S, PAPER_TTFT_S, LOOSE_TTFT_S, TPOT_S = 0.2, 0.25, 0.4, 0.1
WITHIN = 0.05
NUM, SEEDS, BLOCK_SIZE, MAX_TOKENS = 300, (0, 1, 2), 16, 2048
KV_TOKENS = {1: 66_144, 2: 163_008}
"""By tp, of OPT-13B on A100-80G, as DistServe profiled it."""
NVLINK_BYTES_PER_S = 300e9
SHAREGPT = Mix(
    prompt=(2, 9, 26, 86, 244, 375, 515, 686, 855, 1039, 1281, 1533, 1723, 1923, 2031),
    output=(1, 2, 6, 9, 14, 22, 38, 82, 168, 266, 358, 513, 648, 977, 1809),
)
"""Quantiles of lengths in those runs."""


def distserve_goodput(data: Path) -> Section:
    """Both of Table 2's columns over its rates, at three objectives."""
    simulated = {name: [_records(name, rate, data) for rate in RATES] for name in TABLE_2}
    rows = []
    for index, rate in enumerate(RATES):
        for name, table in TABLE_2.items():
            ours = [_mean(simulated[name][index], ttft_s) for ttft_s in (RUNS_TTFT_S, PAPER_TTFT_S, LOOSE_TTFT_S)]
            cells = (RUNS[name][index], ours[0], table[index], ours[1], ours[2])
            rows.append((f"{rate:.1f}", name, *(percent(cell) for cell in cells)))
    points = {
        (name, ttft_s): _near(simulated[name], table, ttft_s)
        for name, table in TABLE_2.items() for ttft_s in (RUNS_TTFT_S, PAPER_TTFT_S, LOOSE_TTFT_S)
    }  # fmt: skip
    runs = {name: _near(simulated[name], RUNS[name], RUNS_TTFT_S) for name in RUNS}
    ceiling = _ceiling(data)
    passed = all(points[name, PAPER_TTFT_S] == len(RATES) for name in TABLE_2)
    return Section(
        title="SLO attainment over rate: DistServe's Table 2",
        verdict=f"Of {len(RATES)} points each, within 5 points of the table: "
        + "; ".join(
            f"at TTFT {ttft_s:g} s DistServe {points['DistServe', ttft_s]}, vLLM {points['vLLM', ttft_s]}"
            for ttft_s in (RUNS_TTFT_S, PAPER_TTFT_S, LOOSE_TTFT_S)
        )
        + f". Within 5 points of the authors' runs at {RUNS_TTFT_S:g} s: DistServe {runs['DistServe']}, vLLM "
        f"{runs['vLLM']}.",
        table=[
            ("rate a GPU", "system", f"runs, {RUNS_TTFT_S:g} s", f"ours, {RUNS_TTFT_S:g} s", "Table 2",
             f"ours, {PAPER_TTFT_S:g} s", f"ours, {LOOSE_TTFT_S:g} s"),
            *rows,
        ],
        notes=_notes(ceiling),
        passed=passed,
        figures=(
            *((f"{name}_within_5_points_at_{ttft_s:g}_s", count) for (name, ttft_s), count in points.items()),
            *((f"{name}_runs_within_5_points", count) for name, count in runs.items()),
        ),
    )  # fmt: skip


def _notes(ceiling: float) -> list[str]:
    prompt, output = mean_tokens(SHAREGPT.prompt), mean_tokens(SHAREGPT.output)
    return [
        f"Assumed: OPT-13B on A100-80G, {NUM} Poisson arrivals, ShareGPT-like lengths (mean {prompt:.0f} and "
        f"{output:.0f} tokens, quantiles of the lengths in the authors' runs), TPOT {TPOT_S:g} s; vLLM on one GPU; "
        "DistServe with prefill on two (TP2) and decode on one, so that three times the rate arrives; KV capacities as "
        f"published. Mean of {len(SEEDS)} seeds. TTFT and TPOT are counted as the paper does, the first token at the "
        "prefill's end.",
        f"The paper's objectives for OPT-13B (TTFT {PAPER_TTFT_S:g} s) cannot give its table: by its own vLLM profile "
        f"an undisturbed prefill keeps {PAPER_TTFT_S:g} s for {percent(ceiling, 0)} of such prompts only, where the "
        "table has 97.0 % at 1 request a second. In the authors' own run at that rate 68 % are within "
        f"{RUNS_TTFT_S:g} s, 86 % within {PAPER_TTFT_S:g} s and 96 % within {LOOSE_TTFT_S:g} s.",
        "At 2.5 requests a second and GPU and beyond, DistServe's decode instance runs short of KV, and in its runs 12 "
        "to 34 % of requests miss TPOT, which its decode profile does not show; at 2.0 a second, 300 requests attained "
        "90.7 % and 600 of them 60.7 %.",
        "vLLM of that time computed prompts in steps of their own before any decode; ours computes them in one step "
        "with the running decodes: slower to the first token at low rates, and better under overload.",
    ]


@cache
def _profile(data: Path, engine: str, tp: int, phases: tuple[str, ...]) -> LatencyProfile:
    coefficients = distserve.load(data, engine)[MODEL][str(tp)]
    base = distserve.base_profile(MODEL, tp)
    samples: list[StepSample] = []
    if "prefill" in phases:
        samples += distserve.prefill_samples(base, coefficients)
    if "decode" in phases:
        samples += distserve.decode_samples(base, coefficients)
    return fit(samples).profile(base)


def _records(name: str, rate: float, data: Path) -> list[Sequence[RequestRecord]]:
    """Of each seed."""
    if name == "vLLM":
        latency = _profile(data, "vllm", 1, ("prefill", "decode"))
        nodes = instances(Role.MIXED, 1, latency, KV_TOKENS[1] // BLOCK_SIZE, NVLINK_BYTES_PER_S)
        policy, num_gpus = "colocated", 1
    else:
        prefill, decode = _profile(data, "distserve", 2, ("prefill",)), _profile(data, "distserve", 1, ("decode",))
        nodes = instances(Role.PREFILL, 1, prefill, KV_TOKENS[2] // BLOCK_SIZE, NVLINK_BYTES_PER_S)
        nodes += instances(Role.DECODE, 1, decode, KV_TOKENS[1] // BLOCK_SIZE, NVLINK_BYTES_PER_S)
        policy, num_gpus = "distserve", 3
    return [serve(nodes, _trace(rate * num_gpus, seed), policy, BLOCK_SIZE).records for seed in SEEDS]


def _trace(rate: float, seed: int) -> list[TraceRequest]:
    draw = random.Random(seed)
    requests = []
    for at_s in poisson_times(rate, NUM, seed):
        prompt, output = SHAREGPT.draw(draw)
        requests.append(
            TraceRequest(at_s=at_s, prompt_tokens=prompt, output_tokens=max(1, min(output, MAX_TOKENS - prompt)))
        )
    return requests


def _mean(runs: Sequence[Sequence[RequestRecord]], ttft_s: float) -> float:
    return fmean(attained(records, ttft_s, TPOT_S) for records in runs)


def _near(simulated: Sequence[Sequence[Sequence[RequestRecord]]], table: Sequence[float], ttft_s: float) -> int:
    return sum(abs(_mean(runs, ttft_s) - there) <= WITHIN for runs, there in zip(simulated, table, strict=True))


def _ceiling(data: Path) -> float:
    """Share of prompts whose prefill alone, by vLLM's profile, takes no longer than the paper's TTFT."""
    coefficients = distserve.load(data, "vllm")[MODEL]["1"]
    draw = random.Random(0)
    lengths = [SHAREGPT.draw(draw)[0] for _ in range(10_000)]
    return fmean(distserve.prefill_s(coefficients, (length,)) <= PAPER_TTFT_S for length in lengths)
