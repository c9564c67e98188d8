"""The connector that vLLM loads (kv_connector_module_path): its interface on one side, plan.py and worker.py behind.

Requests without a ticket of ours in kv_transfer_params are served as if there were no connector.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tp_group

from nodes.engines.vllm.frames import PROTOCOL, Hello
from nodes.engines.vllm.mover import Cache, PackedCache, PlainCache
from nodes.engines.vllm.plan import Requests, StepItem, num_sound
from nodes.engines.vllm.probe import find_cells
from nodes.engines.vllm.worker import Worker
from transfer.errors import InvalidValue
from transfer.models import read_identity


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What of one step concerns us. over: jobs whose requests have ended."""

    items: list[StepItem] = field(default_factory=list)
    over: list[int] = field(default_factory=list)


class PhaseplaneConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """kv_connector_extra_config: "socket", where the agent listens; "launched", true where it started this vLLM."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._requests = Requests()
        self._over: list[int] = []
        self._placed: list[tuple[Any, list[int]]] = []
        self._step: list[tuple[Any, list[int]]] = []
        self._pool: Any = None
        self._worker: Worker | None = None
        self._layers: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not saved is found missing by the agent: vLLM need not hold a request back for it."""
        return False

    # --- beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found = self._requests.num_external(
            request.request_id, request.kv_transfer_params, request.num_prompt_tokens, num_computed_tokens
        )
        return found, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests.allocated(request.request_id, num_external_tokens)
        self._placed.append((request, list(blocks.get_block_ids()[0])))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        counts, plan = scheduler_output.num_scheduled_tokens, StepPlan(over=self._over)
        self._over = []
        for new in scheduler_output.scheduled_new_reqs:
            self._add(plan, new.req_id, new.block_ids, new.num_computed_tokens, counts[new.req_id], fresh=True)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            fresh = request_id in cached.resumed_req_ids
            self._add(plan, request_id, blocks, start, counts[request_id], fresh=fresh)
        self._step, self._placed = self._placed, []
        return plan

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM leaves blocks that failed to load to the request which was to load them: in its prefix cache for others,
        and to those of the same step that have found them there already. It may be aborted before it computes them, so
        they are found by nobody, and whoever has them computes them."""
        failed = connector_output.invalid_block_ids
        if not failed or self._pool is None:
            return
        size, spoiled = self._vllm_config.cache_config.block_size, set[int]()
        for request, table in self._step:
            sound = num_sound(table, failed)
            if sound < len(table):
                request.num_computed_tokens = min(request.num_computed_tokens, sound * size)
                spoiled.update(table[sound:])
        self._pool.evict_blocks(spoiled)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        job = self._requests.finished(request.request_id)
        if job is not None:
            self._over.append(job)
        return False, None

    def _add(
        self,
        plan: StepPlan,
        request_id: str,
        blocks: tuple[list[int], ...] | None,
        start: int,
        count: int,
        *,
        fresh: bool,
    ) -> None:
        item = self._requests.scheduled(request_id, blocks[0] if blocks else None, start, count, fresh=fresh)
        if item is not None:
            plan.items.append(item)

    # --- beside the cache

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        extra = self._kv_transfer_config.kv_connector_extra_config
        names = sorted(kv_caches, key=_layer_number)
        self._layers = {name: index for index, name in enumerate(names)}
        obstacle = self._obstacle(kv_caches)
        caches = [] if obstacle else [self._cache(name, kv_caches[name]) for name in names]
        first = kv_caches[names[0]]
        self._worker = Worker(
            caches, self._vllm_config.cache_config.block_size, first.device, Path(extra["socket"]),
            self._hello(first, len(names), obstacle), launched=bool(extra.get("launched")), agree=_any_worker,
        )  # fmt: skip

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.begin(connector_metadata.items, connector_metadata.over)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save_layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.fence()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved from Python, between the graph's pieces."""
        return True

    def _obstacle(self, kv_caches: dict[str, torch.Tensor]) -> str:
        model, shapes = self._vllm_config.model_config, {tuple(cache.shape) for cache in kv_caches.values()}
        if split := _split(self._vllm_config.parallel_config, self._vllm_config.kv_transfer_config.engine_id):
            return split
        if len(self._kv_cache_config.kv_cache_groups) != 1 or len(shapes) != 1:
            return "its layers keep KV in different shapes"
        shape = next(iter(shapes))
        heads, size = model.get_num_kv_heads(self._vllm_config.parallel_config), model.get_head_size()
        if len(shape) != 4 or shape[1:] != (heads, self._vllm_config.cache_config.block_size, 2 * size):
            return f"its cache has the shape {shape}, which is not of K and V by head"
        return ""

    def _cache(self, name: str, cache: torch.Tensor) -> Cache:
        if cache.device.type != "cpu":
            return PlainCache(cache)
        layer = self._vllm_config.compilation_config.static_forward_context[name]

        def write(key: torch.Tensor, value: torch.Tensor, into: torch.Tensor, slots: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, into, slots)

        _, heads, block_size, width = cache.shape
        return PackedCache(cache, find_cells(write, heads, block_size, width // 2, cache.dtype))

    def _hello(self, cache: torch.Tensor, num_layers: int, obstacle: str) -> Hello:
        config = self._vllm_config
        revision, tokenizer = _identity(config.model_config.model)
        return Hello(
            protocol=PROTOCOL, version=vllm.__version__, pid=os.getpid(), model=config.model_config.model,
            revision=revision, tokenizer=tokenizer, dtype=str(config.model_config.dtype).removeprefix("torch."),
            cache_dtype=str(cache.dtype).removeprefix("torch."), num_layers=num_layers,
            num_kv_heads=config.model_config.get_total_num_kv_heads(),
            head_dim=config.model_config.get_head_size(), block_size=config.cache_config.block_size,
            num_blocks=self._kv_cache_config.num_blocks, world_size=config.parallel_config.world_size,
            max_model_len=config.model_config.max_model_len, device=cache.device.type, obstacle=obstacle,
            missing=_missing(config), rank=get_tp_group().rank_in_group, engine=config.kv_transfer_config.engine_id,
        )  # fmt: skip


def _layer_number(name: str) -> tuple[int, str]:
    found = re.search(r"\.(\d+)\.", name)
    return (int(found[1]) if found else 0, name)


def _any_worker(failed: list[bool]) -> list[bool]:
    """Agree of worker.py."""
    group = get_tp_group()
    if group.world_size == 1:
        return failed
    found = torch.tensor(failed, dtype=torch.int32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return [bool(one) for one in found.tolist()]


def _split(parallel: Any, engine_id: str) -> str:
    """Why the workers of this vLLM do not hold one KV cache, split by heads on one machine; empty where they do."""
    if parallel.pipeline_parallel_size > 1:
        return f"it splits its layers over {parallel.pipeline_parallel_size} pipeline stages"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "it splits sequences over its workers (context parallelism)"
    if re.search(r"_dp\d+$", engine_id):  # so vLLM names each of them
        return "its server has several engines (data parallelism)"
    if parallel.nnodes > 1:
        return f"its workers are on {parallel.nnodes} machines, which share no memory"
    return ""


def _missing(config: Any) -> tuple[str, ...]:
    """A vLLM that plans a step before the last one's failed loads are known goes on from KV that did not load."""
    set_to = {
        "--no-async-scheduling": not config.scheduler_config.async_scheduling,
        "--scheduling-policy priority": config.scheduler_config.policy == "priority",
        "kv_load_failure_policy recompute": config.kv_transfer_config.kv_load_failure_policy == "recompute",
    }
    return tuple(name for name, is_so in set_to.items() if not is_so)


def _identity(model: str) -> tuple[str, str]:
    try:
        identity = read_identity(Path(model))
    except InvalidValue:  # a name in a registry, or weights in another form: preflight says what that means
        return "", ""
    return identity.revision, identity.tokenizer
