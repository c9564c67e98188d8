"""Attention of one step over paged KV: long chunks tile by tile, single tokens group by group.

Exact: every query sees positions up to its own and no other. Grouped-query heads that share a KV head are
folded into the query dimension, so that K and V are never repeated.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nodes.engines.native.config import DecoderConfig
from nodes.engines.native.kv import LayerKv
from nodes.engines.native.plan import ChunkSpan, DecodeGroup, KvSpan, StepPlan

_TILE_ROWS = 128
"""Queries of a chunk attended to at once: scores of a tile stay in cache."""


class Scratch:
    """Buffers that are reused from layer to layer and step to step; they only grow."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor of undefined content, valid until `name` is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self._dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


class Attention:
    """`run` is given each layer's rotated queries and keys. One instance serves all layers, one step at a time."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_heads, self._group, self._dim = config.num_kv_heads, config.group_size, config.head_dim
        self._scale = config.head_dim**-0.5
        self._scratch = Scratch(dtype, device)
        self._tiled = device.type == "cpu"
        hidden = torch.full((_TILE_ROWS, _TILE_ROWS), float("-inf"), dtype=dtype, device=device)
        self._diagonal = hidden.triu_(1)

    def run(self, plan: StepPlan, layer: LayerKv, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [num_rows, num_heads, head_dim]; k and v [num_rows, num_kv_heads, head_dim], already in the arena too.

        Returns [num_rows, num_heads * head_dim], valid until the next call.
        """
        if not plan.chunks and len(plan.groups) == 1:
            return self._attend_group(q, layer, plan.groups[0]).view(q.shape[0], -1)
        out = self._scratch.take("out", (q.shape[0], self._kv_heads * self._group * self._dim))
        for span in plan.chunks:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            if span.start == 0:  # all of the sequence is in this step: nothing to look up
                keys, values = k[rows].transpose(0, 1)[None], v[rows].transpose(0, 1)[None]
            else:
                keys, values = self._read(span.kv, layer)
            if self._tiled:
                self._attend_tiled(q[rows], keys[0], values[0], span.start, out[rows])
            else:
                self._attend_fused(q[rows], keys, values, span, out[rows])
        for group in plan.groups:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            out[rows] = self._attend_group(q[rows], layer, group).view(group.num_rows, -1)
        return out

    def _read(self, span: KvSpan, layer: LayerKv) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, num_kv_heads, num_tokens, head_dim]: views where blocks follow one another, else gathered."""
        if span.first_slot is not None:
            first, count = span.first_slot, span.num_tokens
            return layer.keys.narrow(2, first, count), layer.values.narrow(2, first, count)
        assert span.index is not None
        gathered = self._gather(span.index, layer).view(2, 1, -1, self._kv_heads, self._dim)[:, :, : span.num_tokens]
        keys, values = gathered.transpose(2, 3)
        return keys, values

    def _gather(self, index: torch.Tensor, layer: LayerKv) -> torch.Tensor:
        into = self._scratch.take("gathered", (index.shape[0], layer.halves.shape[1]))
        return torch.index_select(layer.halves, 0, index, out=into)

    def _attend_tiled(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Tiles of queries against all keys they may see: no work above the diagonal but inside a tile.

        q [num_rows, num_heads, head_dim]; keys, values [num_kv_heads, num_tokens, head_dim]. With bfloat16 the
        scores are rounded before the softmax, which costs little beside the rounding of weights and KV.
        """
        heads, group, dim = self._kv_heads, self._group, self._dim
        queries = q.view(-1, heads, group, dim).permute(1, 2, 0, 3)
        outputs = out.view(-1, heads, group, dim).permute(1, 2, 0, 3)
        num_keys = keys.shape[1]
        keys = self._scratch.take("keys", (heads, dim, num_keys)).copy_(keys.transpose(1, 2))
        values = self._scratch.take("values", (heads, num_keys, dim)).copy_(values)
        for begin in range(0, q.shape[0], _TILE_ROWS):
            end = min(begin + _TILE_ROWS, q.shape[0])
            rows, seen = end - begin, start + end
            tile = self._scratch.take("tile", (heads, group, rows, dim))
            torch.mul(queries[:, :, begin:end], self._scale, out=tile)
            scores = self._scratch.take("scores", (heads, group * rows, seen))
            torch.bmm(tile.view(heads, -1, dim), keys[:, :, :seen], out=scores)
            scores.view(heads, group, rows, seen)[..., start + begin :].add_(self._diagonal[:rows, :rows])
            weights = self._scratch.take("weights", (heads, group * rows, seen))
            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, values[:, :seen], out=tile.view(heads, -1, dim))
            outputs[:, :, begin:end] = tile

    def _attend_fused(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: ChunkSpan, out: torch.Tensor
    ) -> None:
        """One fused call. The query heads of a KV head are the batch, K and V are expanded without a copy."""
        heads, group, dim, rows = self._kv_heads, self._group, self._dim, span.num_rows
        queries = q.view(rows, heads, group, dim).permute(2, 1, 0, 3)
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        mask = None
        if span.start:
            mask = torch.ones(rows, span.kv.num_tokens, dtype=torch.bool, device=q.device).tril_(span.start)
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        out.view(rows, heads, group, dim).copy_(found.permute(2, 1, 0, 3))

    def _attend_group(self, q: torch.Tensor, layer: LayerKv, group: DecodeGroup) -> torch.Tensor:
        """q [num_rows, num_heads, head_dim], one row a sequence.

        Returns [num_rows, num_kv_heads, group_size, head_dim], contiguous.
        """
        heads, dim, rows = self._kv_heads, self._dim, group.num_rows
        if group.single is not None:
            keys, values = self._read(group.single, layer)
        else:
            assert group.index is not None
            assert group.stale is not None
            gathered = self._gather(group.index, layer)
            gathered.view(-1, heads * dim).index_fill_(0, group.stale, 0.0)
            keys, values = gathered.view(2, rows, -1, heads, dim).transpose(2, 3)
        queries = q.view(rows, heads, self._group, dim)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask).contiguous()
