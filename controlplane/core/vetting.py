"""Judges the numbers nodes send before anything is computed from them: nodes mean well and may still be wrong.

What would make a prediction impossible is refused at Hello; what a heartbeat reports is brought into range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from controlplane.text import shown
from transfer.errors import InvalidValue
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.wire.messages import Heartbeat, Hello, LoadReport

MAX_COUNT = 1 << 40
"""Of blocks and tokens; far beyond any machine, far below what a float counts exactly."""
MAX_S = 1e9

_SPEEDS = ("peak_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s")
_SHARES = ("mfu", "mfu_attention", "mbu", "mbu_kv", "link_efficiency", "scale_up_efficiency")


def implausible(hello: Hello) -> str | None:
    """Which declared number cannot be true, or which name cannot be shown, in a sentence; None when all can."""
    for what, name in _names(hello):
        if not name.isprintable():
            return f"{shown(name)} is no {what}: it has signs that no screen can show; name it in plain letters"
    wrong = next(iter(_wrong(hello)), None)
    if wrong is None:
        return None
    return f"{hello.instance_id} declares {wrong}, which no machine has; correct its hardware or latency profile"


def _names(hello: Hello) -> Iterable[tuple[str, str]]:
    """Terminals and logs print them as they are."""
    yield from (("instance id", hello.instance_id), ("host id", hello.host_id), ("engine name", hello.engine))
    yield "name of hardware", hello.hardware.name
    if hello.model is not None:
        yield "name of a model", hello.model.name


def in_range(beat: Heartbeat) -> Heartbeat:
    """The same beat; one with numbers that cannot be true has them replaced by the nearest that can."""
    load = beat.load
    if _all_in_range(load) and all([0 <= one.num_blocks <= MAX_COUNT for one in beat.holdings]):
        return beat
    counts = {
        name: _count(getattr(load, name))
        for name in LoadReport.__struct_fields__
        if name not in ("step_s", "speed")
    }  # fmt: skip
    step_s = load.step_s if 0.0 <= load.step_s <= MAX_S else 0.0
    speed = load.speed if 0.0 < load.speed <= MAX_S else 1.0
    checked = LoadReport(step_s=step_s, speed=speed, **counts)
    holdings = tuple(one for one in beat.holdings if 0 <= one.num_blocks <= MAX_COUNT)
    return Heartbeat(epoch=beat.epoch, state=beat.state, load=checked, holdings=holdings, role=beat.role)


def _all_in_range(load: LoadReport) -> bool:
    """Of each of its numbers; as quick as can be, since all but all beats are right."""
    counts = (
        load.num_running, load.num_waiting, load.queued_prefill_tokens, load.num_blocks, load.free_blocks,
        load.cached_blocks, load.num_preemptions, load.leaked_blocks, load.ssd_blocks, load.ssd_capacity_blocks,
        load.unsettled,
    )  # fmt: skip
    return min(counts) >= 0 and max(counts) <= MAX_COUNT and 0.0 <= load.step_s <= MAX_S and 0.0 < load.speed <= MAX_S


def _wrong(hello: Hello) -> Iterable[str]:
    for name, count, least in (("num_blocks", hello.num_blocks, 0), ("token_budget", hello.token_budget, 0)):
        if not least <= count <= MAX_COUNT:
            yield f"{name} {count}"
    yield from _wrong_hardware(hello.hardware)
    layout = hello.layout
    if layout is not None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if not 1 <= getattr(layout, name) <= MAX_COUNT:
                yield f"{name} {getattr(layout, name)} of its KV layout"
    if hello.latency is not None:
        yield from _wrong_latency(hello.latency)


def _wrong_hardware(hardware: HardwareProfile) -> Iterable[str]:
    for name in _SPEEDS:
        value = getattr(hardware, name)
        if not (value > 0.0 and math.isfinite(value)):
            yield f"{name} {value}"
    if not (hardware.price_per_hour >= 0.0 and math.isfinite(hardware.price_per_hour)):
        yield f"price_per_hour {hardware.price_per_hour}"
    if not 0 <= hardware.num_gpus <= MAX_COUNT:
        yield f"num_gpus {hardware.num_gpus}"


def _wrong_latency(latency: LatencyProfile) -> Iterable[str]:
    yield from _wrong_hardware(latency.hardware)
    for name in _SHARES:
        value = getattr(latency, name)
        if not (value > 0.0 and math.isfinite(value)):
            yield f"{name} {value}"
    for name in ("tp", "pp", "dp", "ep"):
        if not 1 <= getattr(latency, name) <= MAX_COUNT:
            yield f"{name} {getattr(latency, name)}"
            return
    if latency.error is not None and not 0.0 <= latency.error <= MAX_S:
        yield f"error {latency.error}"
    try:
        step_s = latency.step_s(1, 1, 1)
    except (ArithmeticError, InvalidValue):
        step_s = math.nan
    if not 0.0 < step_s <= MAX_S:
        yield f"a latency profile by which a step of one token takes {step_s} s"


def _count(value: int) -> int:
    return min(max(0, value), MAX_COUNT)
