"""What an accelerator can do: class presets (dense figures, indicative prices) and a short probe of this machine's CPU.

Numbers only. It does not pick a model (see shapes.py), and it imports no torch.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from transfer.errors import InvalidValue
from transfer.profile import HardwareProfile
from transfer.said import say

TERA, GIGA = 1e12, 1e9
PROBE_COPY_BYTES = 64 << 20
PROBE_MATRIX = 768
PROBE_S = 0.2
"""Of each kind; the best counts, since what else starts on this machine only makes it worse."""
PRICE_PER_CORE_HOUR = 0.04


def _gpu(
    name: str, tflops: tuple[float, float, float], memory_gb: float, tb_per_s: float, scale_up_gb_per_s: float,
    link_gbit: float, price: float, scale_up_size: int = 8,
) -> HardwareProfile:  # fmt: skip
    bf16, fp8, fp4 = tflops
    return HardwareProfile(
        name=name,
        num_gpus=1,
        peak_flops=bf16 * TERA,
        memory_bytes=memory_gb * GIGA,
        memory_bytes_per_s=tb_per_s * TERA,
        link_bytes_per_s=link_gbit / 8 * GIGA,
        price_per_hour=price,
        peak_flops_fp8=fp8 * TERA,
        peak_flops_fp4=fp4 * TERA,
        scale_up_bytes_per_s=scale_up_gb_per_s * GIGA,
        scale_up_size=scale_up_size,
    )


PRESETS: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        # name, dense TFLOPS (bf16, fp8, fp4), GB, TB/s, GB/s one GPU sends to its neighbours (half of what vendors
        # quote for both directions), Gbit/s one GPU can send to another host (its share of the NICs), $/h. Prices, and
        # all of B300 and GB300, are indicative.
        _gpu("H800", (989, 1979, 0), 80, 3.35, 200, 400, 2.0),
        _gpu("H20", (148, 296, 0), 96, 4.0, 450, 200, 0.70),
        _gpu("H100", (989, 1979, 0), 80, 3.35, 450, 400, 3.0),
        _gpu("H200", (989, 1979, 0), 141, 4.8, 450, 400, 4.0),
        _gpu("A100", (312, 0, 0), 80, 2.04, 300, 200, 1.5),
        _gpu("L40S", (362, 733, 0), 48, 0.864, 32, 200, 1.0),
        _gpu("B200", (2250, 4500, 9000), 180, 7.7, 900, 400, 5.0),
        _gpu("B300", (2250, 4500, 13500), 270, 7.7, 900, 800, 6.0),
        _gpu("GB200", (2500, 5000, 10000), 186, 8.0, 900, 400, 6.5, 72),
        _gpu("GB300", (2500, 5000, 15000), 279, 8.0, 900, 800, 7.5, 72),
        _gpu("CPU", (115, 0, 0), 1000, 0.25, 0, 400, 0.5),
    )
}


def preset(name: str) -> HardwareProfile:
    """The class called `name`, in any case ("H20-96" is H20). Raises InvalidValue naming the nearest class."""
    wanted = name.strip().upper()
    if found := PRESETS.get(wanted) or PRESETS.get(wanted.split("-")[0]):
        return found
    nearest = difflib.get_close_matches(wanted, PRESETS, n=1, cutoff=0.0)[0]
    raise InvalidValue(say("hardware.unknown", name=repr(name), nearest=nearest, known=", ".join(PRESETS)))


def with_gpus(profile: HardwareProfile, num_gpus: int) -> HardwareProfile:
    """One instance over `num_gpus` of the class. Rates stay those of one GPU (LatencyProfile.tp multiplies);
    the link and the price grow. Raises InvalidValue below one."""
    if num_gpus < 1:
        raise InvalidValue(say("hardware.gpus", got=num_gpus))
    times = num_gpus / profile.num_gpus
    return msgspec.structs.replace(
        profile,
        num_gpus=num_gpus,
        link_bytes_per_s=profile.link_bytes_per_s * times,
        price_per_hour=profile.price_per_hour * times,
    )


def probe() -> HardwareProfile:
    """This machine's CPU, measured in under half a second: float32 matmul rate and copy bandwidth.

    The link is what one copy through shared memory with a checksum leaves: a quarter of the memory bandwidth.
    """
    cores = num_cores()
    bandwidth = _copy_bytes_per_s()
    return HardwareProfile(
        name="CPU",
        num_gpus=1,
        peak_flops=_matmul_flops(),
        memory_bytes=float(memory_bytes()),
        memory_bytes_per_s=bandwidth,
        link_bytes_per_s=bandwidth / 4,
        price_per_hour=PRICE_PER_CORE_HOUR * cores,
    )


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit when that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _copy_bytes_per_s() -> float:
    source = np.ones(PROBE_COPY_BYTES // 8)
    target = np.zeros_like(source)  # touched, so that page faults are not timed
    target[:] = source
    best = _best_s(lambda: np.copyto(target, source))
    return 2 * PROBE_COPY_BYTES / best


def _matmul_flops() -> float:
    matrix = np.ones((PROBE_MATRIX, PROBE_MATRIX), dtype=np.float32)
    out = matrix @ matrix
    best = _best_s(lambda: np.matmul(matrix, matrix, out=out))
    return float(2 * PROBE_MATRIX**3 / best)


def _best_s(work: Callable[[], object]) -> float:
    until, best = time.perf_counter() + PROBE_S, float("inf")
    while time.perf_counter() < until:
        best = min(best, _timed(work))
    return best


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
