"""NativeEngine: the Engine protocol over a torch decoder. All torch work runs in one thread of its own.

A step that is asked for while another runs waits for it. Steps are not retried: a failed one ends the engine.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from nodes.engines.engine import LayerGate, OnLayer, StepBatch, StepResult
from nodes.engines.native.calibration import decoder_shape, device_name, measure_latency, measure_machine, still_holds
from nodes.engines.native.config import DecoderConfig, read_config
from nodes.engines.native.kv import TORCH_DTYPES, PagedKv
from nodes.engines.native.model import Decoder
from nodes.engines.native.plan import Limits, check_batch, plan_step
from nodes.engines.native.sampling import sample
from nodes.profiles import ProfileKey, load_profile
from transfer.errors import EngineFailed, InvalidValue
from transfer.kv.arena import KvArena
from transfer.models import read_identity
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import KvLayout

DEFAULT_KV_BYTES = 1 << 30


class NativeEngine:
    """Runs a model directory in Hugging Face format. Loading blocks for seconds: construct it off the event loop.

    dtype: "float32", "bfloat16", "float16" or "auto" (bfloat16 where the processor computes it natively).
    device: "cpu", "cuda" or "auto". num_blocks wins over kv_bytes. num_threads: None leaves torch's default.
    hardware: what the node declares; measured when None. measure: time a few steps for `latency`. calibrated: use what
    `phaseplane calibrate` kept for the same model, dtype, device and threads, where it still holds.

    Idempotency: a step with the same chunk writes the same KV. `close` is idempotent.
    Raises InvalidValue when the model, dtype or device cannot be used, or when there is no room for the KV.
    """

    kind = "native"

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_blocks: int | None = None,
        kv_bytes: int = DEFAULT_KV_BYTES,
        block_size: int = 16,
        shared: bool = False,
        num_threads: int | None = None,
        hardware: HardwareProfile | None = None,
        measure: bool = True,
        calibrated: bool = True,
    ) -> None:
        self.device = _choose_device(device)
        self.dtype_name = _choose_dtype(dtype, self.device)
        self.config = read_config(model_dir)
        self.model = read_identity(model_dir)
        self.layout = _layout(self.config, self.dtype_name, block_size)
        self.num_blocks = num_blocks if num_blocks is not None else kv_bytes // self.layout.block_bytes
        self._limits = Limits(
            num_blocks=self.num_blocks,
            block_size=block_size,
            vocab_size=self.config.vocab_size,
            max_context=min(self.config.max_context, self.num_blocks * block_size),
        )
        self._kv = PagedKv(self.layout, self.num_blocks, self.device, shared=shared)
        self.arena: KvArena = self._kv.arena
        initializer = partial(torch.set_num_threads, num_threads) if num_threads else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="native-engine", initializer=initializer)
        self._is_closed = False
        try:
            self._decoder = self._thread.submit(self._load, model_dir).result()
            self.profile_key = self._thread.submit(self._key, hardware).result()
            self.hardware, self.latency = self._thread.submit(self._profile, hardware, measure, calibrated).result()
        except BaseException:
            self._thread.shutdown(wait=True)
            self._kv.close()
            raise

    async def step(
        self, batch: StepBatch, on_layer: OnLayer | None = None, before_layer: LayerGate | None = None
    ) -> StepResult:
        """Raises InvalidValue, before anything is written, for a chunk outside the arena; StepAbandoned when the gate
        does; EngineFailed otherwise."""
        if self._is_closed:
            raise EngineFailed("the engine is closed; start another instance")
        check_batch(batch, self._limits)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._step, batch, on_layer, before_layer)

    def handoff_s(self, num_tokens: int) -> float:
        """0.0: this engine's links are real."""
        return 0.0

    async def close(self) -> None:
        """Waits for a running step, then gives the memory back."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._thread.shutdown, wait=True)
            self._kv.close()

    def _load(self, model_dir: Path) -> Decoder:
        dtype = TORCH_DTYPES[self.dtype_name]
        try:
            return Decoder(model_dir, self.config, dtype, self.device, self._limits.max_context)
        except (RuntimeError, MemoryError) as error:  # torch reports a full memory as RuntimeError
            raise InvalidValue(
                f"cannot load {model_dir} on {self.device} ({error}); free memory or choose a smaller model"
            ) from error

    def _step(self, batch: StepBatch, on_layer: OnLayer | None, before_layer: LayerGate | None) -> StepResult:
        started, waited_s = time.perf_counter(), 0.0

        def wait(layer: int) -> None:
            nonlocal waited_s
            if before_layer is not None:
                since = time.perf_counter()
                before_layer.wait(layer)
                waited_s += time.perf_counter() - since

        try:
            with torch.inference_mode():
                plan = plan_step(batch, self._limits, self._decoder.dtype, self.device)
                logits = self._decoder.forward(plan, self._kv, on_layer, None if before_layer is None else wait)
                samplings = [chunk.sampling for chunk in plan.sampled if chunk.sampling is not None]
                tokens = sample(logits, samplings) if samplings else []
        except (RuntimeError, MemoryError, IndexError, TypeError) as error:
            raise EngineFailed(f"a step of {batch.num_tokens} tokens failed in torch: {error}") from error
        if self.device.type == "cuda" and not samplings:
            torch.cuda.synchronize(self.device)  # duration_s is the step's, not the launch's
        sampled = {chunk.request_id: token for chunk, token in zip(plan.sampled, tokens, strict=True)}
        return StepResult(sampled=sampled, duration_s=time.perf_counter() - started, waited_s=waited_s)

    def _key(self, hardware: HardwareProfile | None) -> ProfileKey:
        """Runs in the engine's thread, whose number of threads it tells."""
        return ProfileKey(
            model=self.model.revision, dtype=self.dtype_name, device=device_name(self.device),
            num_threads=torch.get_num_threads(), software=f"torch {torch.__version__}",
            hardware=hardware.name if hardware is not None else "",
        )  # fmt: skip

    def _profile(
        self, hardware: HardwareProfile | None, measure: bool, calibrated: bool
    ) -> tuple[HardwareProfile, LatencyProfile]:
        def run(batch: StepBatch) -> float:
            return self._step(batch, None, None).duration_s

        stored = load_profile(self.profile_key) if measure and calibrated else None
        if stored is not None and still_holds(stored.latency, run, self._limits):
            return stored.latency.hardware, stored.latency
        declared = hardware or measure_machine(TORCH_DTYPES[self.dtype_name], self.device)
        profile = LatencyProfile(hardware=declared, shape=decoder_shape(self.config, self.layout.itemsize))
        return declared, measure_latency(profile, run, self._limits) if measure else profile


def kv_layout(model_dir: Path, *, dtype: str = "auto", device: str = "auto", block_size: int = 16) -> KvLayout:
    """The layout of an engine made with these arguments, without loading weights: for a pool beside such engines.

    Raises InvalidValue as NativeEngine does.
    """
    return _layout(read_config(model_dir), _choose_dtype(dtype, _choose_device(device)), block_size)


def _choose_device(name: str) -> torch.device:
    if name not in ("cpu", "cuda", "auto"):
        raise InvalidValue(f"device must be cpu, cuda or auto, got {name!r}")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise InvalidValue("no CUDA device is visible to torch; set the device to cpu, or see `phaseplane doctor`")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _choose_dtype(name: str, device: torch.device) -> str:
    if name == "auto":
        if device.type == "cuda":
            return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    if name not in TORCH_DTYPES:
        raise InvalidValue(f"dtype must be one of {', '.join(TORCH_DTYPES)} or auto, got {name!r}")
    return name


def _layout(config: DecoderConfig, dtype: str, block_size: int) -> KvLayout:
    if block_size < 1:
        raise InvalidValue(f"block_size must be at least 1, got {block_size}")
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        rope=config.rope.description,
    )
