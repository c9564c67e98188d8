"""The connector's copies on CUDA: beside the computation, in order with it."""

from __future__ import annotations

import threading

import pytest
import torch

from nodes.engines.vllm.copies import CudaCopies
from nodes.engines.vllm.mover import Cache, PlainCache, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
LAYERS, HEADS, SIZE, DIM = 3, 4, 16, 64


def test_kv_goes_to_the_device_and_back_in_order() -> None:
    """What is saved is what the stream had written by then, though the engine writes on."""
    device = torch.device("cuda")
    tensors = [torch.zeros(8, SIZE, HEADS, 2 * DIM, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    caches: list[Cache] = [PlainCache(one.transpose(1, 2)) for one in tensors]
    copies = CudaCopies(caches, SIZE, device)
    tokens = [torch.randn(2, 40, HEADS, DIM).bfloat16() for _ in range(LAYERS)]
    stored: dict[int, torch.Tensor] = {}
    ready = threading.Event()

    def store(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        stored[layer] = torch.stack((keys, values)).clone()
        if len(stored) == LAYERS:
            ready.set()

    span = Span([6, 1, 3], (), 0, 40)
    for layer in range(LAYERS):
        copies.load(layer, span, tokens[layer])
    for layer in range(LAYERS):
        copies.loaded(layer)
        tensors[layer].mul_(2)
        copies.save(layer, span, lambda keys, values, layer=layer: store(layer, keys, values))  # type: ignore[misc]
    copies.fence()
    for one in tensors:
        one.zero_()
    assert ready.wait(10)
    for layer in range(LAYERS):
        assert torch.equal(stored[layer], tokens[layer] * 2)
    copies.close()
