"""Makes engines and pool memory from an agent's options. Torch is imported here, and only for the native engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from nodes.engines.emulated import EmulatedEngine, emulated_identity, emulated_layout
from nodes.engines.engine import Engine
from nodes.engines.served import ServedEngine
from nodes.hardware import memory_bytes, preset, probe, with_gpus
from nodes.instance import PoolMemory
from nodes.options import AgentOptions, InstanceName
from nodes.pool.ssd import SsdConfig, pool_directory
from nodes.shapes import kv_blocks, latency_profile, shape
from transfer.errors import InvalidValue
from transfer.kv.blob import HEADER_BYTES
from transfer.models import model_dir
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import KvLayout, Role

GIB = 1 << 30
DEFAULT_NATIVE_KV_GIB = 1.0
POOL_MEMORY_SHARE = 8
"""A native pool takes at most this part (1/n) of the machine's memory unless told otherwise."""
DEFAULT_SSD_GIB = 16.0
MAX_EMULATED_POOL_BLOCKS = 1 << 17

MakeEngine = Callable[[], Awaitable[Engine | ServedEngine | PoolMemory]]


def engine_maker(options: AgentOptions, name: InstanceName) -> MakeEngine:
    """How to make what `name` runs on. Raises InvalidValue now for what can be seen to be wrong now."""
    if options.engine == "emulated":
        return _emulated(options, name)
    directory = model_dir(options.model)
    hardware = _hardware(options, name)
    if name.role is Role.KV_POOL:

        async def make_pool() -> PoolMemory:
            layout = await asyncio.to_thread(_native_layout, directory, options)
            default = min(DEFAULT_NATIVE_KV_GIB * GIB, memory_bytes() / POOL_MEMORY_SHARE)
            ssd = _ssd(options, name, HEADER_BYTES + layout.block_bytes)
            num_blocks = _num_blocks(options, layout, default)
            return PoolMemory(layout, num_blocks, hardware or probe(), shared=True, ssd=ssd)

        return make_pool
    if options.engine in ("openai", "vllm"):
        from nodes.making_served import served_maker

        return served_maker(options, directory, hardware)

    async def make_engine() -> Engine:
        def load() -> Engine:
            from nodes.engines.native.engine import NativeEngine

            return NativeEngine(
                directory, dtype=options.dtype, device=options.device, num_blocks=options.num_blocks,
                kv_bytes=int((options.kv_gib or DEFAULT_NATIVE_KV_GIB) * GIB), block_size=options.block_size,
                shared=True, num_threads=options.threads, hardware=hardware,
            )  # fmt: skip

        return await asyncio.to_thread(load)

    return make_engine


def _emulated(options: AgentOptions, name: InstanceName) -> MakeEngine:
    hardware = _hardware(options, name) or preset("CPU")
    model = shape(options.model)
    layout = emulated_layout(options.block_size)
    if name.role is Role.KV_POOL:
        real_bytes = model.kv_token_bytes * options.block_size
        room = options.kv_gib * GIB if options.kv_gib else hardware.memory_bytes
        blocks = options.num_blocks or min(MAX_EMULATED_POOL_BLOCKS, max(1, int(room // real_bytes)))

        async def make_pool() -> PoolMemory:
            return PoolMemory(layout, blocks, hardware, ssd=_ssd(options, name, real_bytes))

        return make_pool
    latency = _with_curve(latency_profile(hardware, model), options)
    if options.num_blocks:
        num_blocks = options.num_blocks
    elif options.kv_gib:
        num_blocks = max(1, int(options.kv_gib * GIB // (model.kv_token_bytes * options.block_size)))
    else:
        num_blocks = kv_blocks(hardware, model, options.block_size)

    async def make_engine() -> Engine:
        return EmulatedEngine(
            latency, emulated_identity(Path(options.model).name), num_blocks, block_size=options.block_size,
            speed=options.speed, jitter=options.jitter, seed=options.seed,
        )  # fmt: skip

    return make_engine


def _ssd(options: AgentOptions, name: InstanceName, block_bytes: float) -> SsdConfig | None:
    """block_bytes: what a block takes there; for an emulated pool what a real one would."""
    if options.ssd_dir is None:
        return None
    num_blocks = int((options.ssd_gib or DEFAULT_SSD_GIB) * GIB // block_bytes)
    return SsdConfig(pool_directory(Path(options.ssd_dir), name.instance_id), num_blocks)


def _native_layout(directory: Path, options: AgentOptions) -> KvLayout:
    from nodes.engines.native.engine import kv_layout

    dtype = options.dtype
    if options.engine == "vllm" and dtype == "auto":  # vLLM's own choice
        from nodes.making_served import stored_dtype

        dtype = stored_dtype(directory)
    return kv_layout(directory, dtype=dtype, device=options.device, block_size=options.block_size)


def _hardware(options: AgentOptions, name: InstanceName) -> HardwareProfile | None:
    """None: measure it."""
    wanted = name.hardware or options.hardware
    return None if wanted == "auto" else with_gpus(preset(wanted), options.tp)


def _with_curve(latency: LatencyProfile, options: AgentOptions) -> LatencyProfile:
    values = {field: getattr(latency, field) for field in latency.__struct_fields__}
    curve = {
        name: value for name in ("mfu", "mbu", "alpha_s", "beta_s") if (value := getattr(options, name)) is not None
    }
    return LatencyProfile(**values | curve)


def _num_blocks(options: AgentOptions, layout: KvLayout, default_bytes: float) -> int:
    if options.num_blocks:
        return options.num_blocks
    blocks = int((options.kv_gib * GIB if options.kv_gib else default_bytes) // layout.block_bytes)
    if blocks < 1:
        raise InvalidValue(f"one KV block takes {layout.block_bytes} bytes; raise --kv-gib")
    return blocks
