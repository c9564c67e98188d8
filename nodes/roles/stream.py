"""One prefill's KV on its way out: which of its blocks are final, which were pushed, when the link is done.

Pushes layer by layer during a step, or as an engine that batches by itself saves them, and at once what was final
before the receiver's grant came.
"""

from __future__ import annotations

from nodes.roles.context import Link
from transfer.kv.port import KvSender


class PushStream:
    """Blocks [first_block, end_block) of a request's table, pushed once each in every layer.

    Called on the event loop, except that the pushes `claim` returns may run on an engine's thread.
    """

    def __init__(self, first_block: int, end_block: int, num_layers: int, block_size: int, link: Link) -> None:
        self._final = self._pushed = first_block
        self._end = end_block
        self._num_layers, self._block_size, self._link = num_layers, block_size, link
        self._first = first_block
        self._sender: KvSender | None = None
        self._saved: list[tuple[int, int, int]] = []
        self.sent_at = 0.0
        """When an emulated link has carried everything pushed so far; in the past where links are real."""

    def attach(self, sender: KvSender, now: float) -> None:
        """The receiver granted: push what is final already."""
        self._sender = sender
        for layer, first, count in self._saved:
            sender.push(layer, first, count)
        self._saved = []
        self._push_final(now, now)

    def saved(self, layer: int, first: int, count: int) -> None:
        """Blocks [first, first + count) are final in this layer: they need not wait for the others. When all are, they
        are finalised all the same; a sender leaves out what it was given before."""
        start, end = max(first, self._first), min(first + count, self._end)
        if end <= start:
            return
        if self._sender is None:
            self._saved.append((layer, start, end - start))
        else:
            self._sender.push(layer, start, end - start)

    def claim(self, upto: int) -> tuple[KvSender, int, int] | None:
        """Before a step that makes blocks below `upto` final: (sender, first, count) to push after each layer.
        None when the receiver has not granted yet, or has the blocks: `finalise` then sees to them."""
        first, upto = self._pushed, min(upto, self._end)
        if self._sender is None or upto <= first:
            return None
        self._pushed = upto
        return self._sender, first, upto - first

    def unclaim(self, first: int) -> None:
        """The step of a claim from block `first` was abandoned. What it pushed is right (a layer is pushed when all it
        rests on was there) and is not sent again; its blocks are claimed again by the steps that make them again."""
        self._pushed = first

    def finalise(self, upto: int, since: float, now: float) -> None:
        """Blocks below `upto` are final, made between `since` and `now`. Those that the running step pushes as it goes
        are left to it."""
        upto = min(upto, self._end)
        if upto < self._pushed:
            return
        before, self._final = self._final, max(self._final, upto)
        if self._sender is not None and self._pushed > before:
            self._carry(self._pushed - before, since, now)
        self._push_final(since, now)

    def _push_final(self, since: float, now: float) -> None:
        count = self._final - self._pushed
        if self._sender is None or count <= 0:
            return
        for layer in range(self._num_layers):
            self._sender.push(layer, self._pushed, count)
        self._pushed = self._final
        self._carry(count, since, now)

    def _carry(self, num_blocks: int, since: float, now: float) -> None:
        self.sent_at = self._link.send(num_blocks * self._block_size, since, now)
