"""When KV is copied: at once on CPUs; on CUDA on a stream of its own, through pinned memory, beside the computation.

Which tokens, and whether they may be copied at all, is said by the caller, whose `Arena` calls take its lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from nodes.engines.vllm.mover import Cache, Span, read_span, write_span

Store = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes a layer's K and V of a span, in host memory, into the arena and says so; drops them where not allowed."""
QUEUE_LIMIT = 256


class Copies(Protocol):
    """Between one vLLM worker's cache and host memory. Layers are numbered from 0."""

    def load(self, layer: int, span: Span, halves: torch.Tensor) -> None:
        """halves [2, num_tokens, num_heads, head_dim], in host memory, into the cache before `loaded` returns."""

    def loaded(self, layer: int) -> None:
        """The layer's loads happen before whatever the engine does next."""

    def save(self, layer: int, span: Span, store: Store) -> None:
        """Calls store with what the engine has written so far, from any thread, some time."""

    def fence(self) -> None:
        """What the engine does next happens after everything to be saved has been read."""

    def close(self) -> None: ...


class HostCopies:
    def __init__(self, caches: list[Cache], block_size: int) -> None:
        self._caches, self._block_size = caches, block_size

    def load(self, layer: int, span: Span, halves: torch.Tensor) -> None:
        write_span(self._caches[layer], span, self._block_size, halves)

    def loaded(self, layer: int) -> None:
        pass

    def save(self, layer: int, span: Span, store: Store) -> None:
        store(*read_span(self._caches[layer], span, self._block_size, torch.device("cpu")))

    def fence(self) -> None:
        pass

    def close(self) -> None:
        pass


class CudaCopies:
    """A thread stores what has arrived in pinned memory; QUEUE_LIMIT copies may wait for it, then saving waits too."""

    def __init__(self, caches: list[Cache], block_size: int, device: torch.device) -> None:
        self._caches, self._block_size, self._device = caches, block_size, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._loaded: dict[int, torch.cuda.Event] = {}
        self._waiting: queue.Queue[tuple[torch.cuda.Event, torch.Tensor, Store] | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._store, name="phaseplane-save", daemon=True)
        self._thread.start()

    def load(self, layer: int, span: Span, halves: torch.Tensor) -> None:
        pinned = halves.contiguous().pin_memory()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            write_span(self._caches[layer], span, self._block_size, pinned.to(self._device, non_blocking=True))
            self._loaded[layer] = self._stream.record_event()

    def loaded(self, layer: int) -> None:
        event = self._loaded.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def save(self, layer: int, span: Span, store: Store) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            halves = torch.stack(read_span(self._caches[layer], span, self._block_size, self._device))
            pinned = torch.empty(halves.shape, dtype=halves.dtype, pin_memory=True)
            pinned.copy_(halves, non_blocking=True)
            event = self._stream.record_event()
        self._waiting.put((event, pinned, store))

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(timeout=10.0)

    def _store(self) -> None:
        while (one := self._waiting.get()) is not None:
            event, pinned, store = one
            event.synchronize()
            store(pinned[0], pinned[1])
