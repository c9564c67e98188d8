"""Paged KV as torch sees it: a tensor over the arena's memory, with the views each layer needs made once.

On CUDA the blocks live on the device and a host arena of the same shape stages what crosses the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfer.kv.arena import ArenaHandle, HostArena, KvArena
from transfer.terms import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Views of one layer's blocks. num_slots = num_blocks * block_size.

    keys, values: [1, num_kv_heads, num_slots, head_dim]. rows_k, rows_v: [num_slots, num_kv_heads * head_dim].
    halves: [2 * num_blocks, block_size * num_kv_heads * head_dim], the K blocks, then the V blocks.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows_k: torch.Tensor
    rows_v: torch.Tensor
    halves: torch.Tensor


class PagedKv:
    """KV of all layers, [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, *, shared: bool = False) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        host = HostArena(layout, num_blocks, shared=shared)
        mirror = torch.frombuffer(host.buffer, dtype=TORCH_DTYPES[layout.dtype]).view(shape)
        self.arena: KvArena
        if device.type == "cpu":
            self.tensor, self.arena = mirror, host
        else:
            self.tensor = torch.zeros(shape, dtype=mirror.dtype, device=device)
            self.arena = StagingArena(host, mirror, self.tensor)
        self._host = host
        self.layers = [_layer_views(self.tensor[layer], layout, num_blocks) for layer in range(layout.num_layers)]

    def mark_written(self, layer: int) -> None:
        """This step's KV of `layer` has been queued on the device."""
        if isinstance(self.arena, StagingArena):
            self.arena.mark_written(layer)

    def close(self) -> None:
        """Unlink shared memory. Idempotent."""
        self._host.close()


class StagingArena:
    """KvArena of a CUDA device: `views` shows a host mirror that prepare_read fills and commit_write empties.

    The mirror is as large as the device's KV, in anonymous memory that costs nothing until touched
    (shared memory is taken at once). Copies run on a stream of their own, after the layer's kernels.
    """

    def __init__(self, host: HostArena, mirror: torch.Tensor, tensor: torch.Tensor) -> None:
        self.layout, self.num_blocks = host.layout, host.num_blocks
        self._host, self._mirror, self._tensor = host, mirror, tensor
        self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._written = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(host.layout.num_layers)
        ]

    @property
    def handle(self) -> ArenaHandle | None:
        return self._host.handle

    def views(self, layer: int, first_block: int, count: int) -> tuple[memoryview, memoryview]:
        return self._host.views(layer, first_block, count)

    def mark_written(self, layer: int) -> None:
        """Called on the engine's stream after the kernels that write `layer`."""
        self._written[layer].record()

    def prepare_read(self, layer: int, blocks: list[int]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written[layer])
            ids = torch.tensor(blocks, device=self._tensor.device)
            found = self._tensor[layer].index_select(1, ids).cpu()
        self._mirror[layer].index_copy_(1, torch.tensor(blocks), found)

    def commit_write(self, layer: int, blocks: list[int]) -> None:
        staged = self._mirror[layer].index_select(1, torch.tensor(blocks))
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(blocks, device=self._tensor.device)
            self._tensor[layer].index_copy_(1, ids, staged.to(self._tensor.device))
        self._stream.synchronize()  # the engine may read these blocks in its next step

    def generation(self, block: int) -> int:
        return self._host.generation(block)

    def bump(self, block: int) -> None:
        self._host.bump(block)


def _layer_views(layer: torch.Tensor, layout: KvLayout, num_blocks: int) -> LayerKv:
    num_slots, row = num_blocks * layout.block_size, layout.num_kv_heads * layout.head_dim
    return LayerKv(
        keys=layer[0].view(1, num_slots, layout.num_kv_heads, layout.head_dim).transpose(1, 2),
        values=layer[1].view(1, num_slots, layout.num_kv_heads, layout.head_dim).transpose(1, 2),
        rows_k=layer[0].view(num_slots, row),
        rows_v=layer[1].view(num_slots, row),
        halves=layer.view(2 * num_blocks, layout.block_size * row),
    )
