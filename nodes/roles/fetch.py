"""A prompt's leading blocks come from a pool, and the rest of it is computed meanwhile where that pays.

Times are the event loop's. What a failed fetch leaves is computed: it costs time, never the request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nodes.core.events import Arriving, Fetched, Renew
from nodes.engines.engine import Chunk
from nodes.roles.context import sleep_until
from nodes.roles.gate import FetchGate
from transfer.errors import KvError
from transfer.kv.block import block_hashes
from transfer.kv.port import KvFetch
from transfer.wire.messages import KvPeer

if TYPE_CHECKING:
    from nodes.roles.leg import Leg
    from nodes.roles.shell import BatchShell


class PoolFetch:
    """Blocks [leg.have_blocks, upto) of an admitted leg. `run` once, and cancel it to stop; it ends within half a
    lease, and from then on nothing writes into the blocks. When it was stopped, open its gate once the core knows.

    The core hears Arriving as soon as the first layer is here and the rest will not take longer than the first step
    beside it: joining earlier would make others wait in that step and bring nothing. Where requests decode it never
    does. Fetched follows with the last layer, or with the failure.
    """

    def __init__(self, shell: BatchShell, leg: Leg, peer: KvPeer, upto: int) -> None:
        context = shell.context
        self._shell, self._leg, self._peer, self._upto = shell, leg, peer, upto
        self._loop = asyncio.get_running_loop()
        self._num_layers, self._model_layers = context.engine.layout.num_layers, context.engine.latency.shape.num_layers
        self._timeout_s = min(context.bounds.fetch_s, leg.spec.lease_s / 2)
        self.gate = FetchGate(leg.request_id, self._num_layers, self._timeout_s)
        self._promised = 0
        self._first_step_s = 0.0
        self._promised_at = self._ready_at = self._ended_at = self.gate.since
        self._begun = self._ended = False
        self._waited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def fetch_s(self) -> float:
        """Start to end, or until now."""
        return (self._ended_at if self._ended else self._loop.time()) - self.gate.since

    @property
    def exposed_s(self) -> float:
        """What compute waited: until the rest of the prompt could join a step, and within that step."""
        return self._ready_at - self.gate.since + self._waited_s

    def held_step(self, waited_s: float) -> None:
        """A step with the request stood still for that long."""
        self._waited_s += waited_s

    async def run(self) -> None:
        leg, context = self._leg, self._shell.context
        have, size = leg.have_blocks, context.block_size
        hashes = tuple(block_hashes(leg.spec.tokens[: self._upto * size], size, leg.spec.root))
        fetch = KvFetch(
            request_id=leg.request_id, target_epoch=self._peer.epoch, fingerprint=leg.spec.root, hashes=hashes[have:]
        )
        self._shell.handle(Renew(request_id=leg.request_id, generation=leg.generation))  # outlives the fetch
        reason = "the pool did not send what it promised"
        try:
            try:
                count = await context.port.fetch(
                    self._peer, fetch, leg.blocks[have : self._upto], self._timeout_s, self._on_layer
                )
            except KvError as error:
                count, reason = 0, str(error)
            if count and count == self._promised:
                self.gate.landed(self._num_layers)
            if self.gate.complete:
                await self._emulate_link()
            else:
                self.gate.fail(reason)
            self._end()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    # --- on the way -----------------------------------------------------------------------------------------

    def _on_layer(self, layer: int, num_blocks: int) -> None:
        """KvPort.fetch tells how many blocks come, then each layer."""
        now = self._loop.time()
        if layer < 0:
            self._promised, self._promised_at = num_blocks, now
            self._first_step_s = self._predict_first_step_s()
            link_s = self._shell.link.needs_s(num_blocks * self._shell.context.block_size)
            self.gate.carried_by(min(self._timeout_s, link_s))
            return
        self.gate.landed(layer + 1)
        link_done_s = self.gate.due(self._model_layers - 1, self._model_layers)
        if self.gate.complete:
            if link_done_s <= now:
                self._end()
            return
        rest_s = (now - self._promised_at) / (layer + 1) * (self._num_layers - layer - 1)
        self._begin_at(max(now + rest_s, link_done_s) - self._first_step_s)

    async def _emulate_link(self) -> None:
        """The blocks are here; an emulated link still brings them, layer by layer."""
        last_s = self.gate.due(self._model_layers - 1, self._model_layers)
        if last_s > self._loop.time():
            self._begin_at(last_s - self._first_step_s)
            await sleep_until(last_s)

    def _begin_at(self, when: float) -> None:
        """Let the rest join a step then, if nothing better is known until then; not before the first layer is here."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(max(when, self.gate.due(0, self._model_layers)), self._begin)

    def _begin(self) -> None:
        if self._begun or self._ended or self._first_step_s <= 0.0 or self._shell.core.running_ids:
            return
        self._begun, self._ready_at = True, self._loop.time()
        self._tell(Arriving, self._promised)

    def _end(self) -> None:
        """All is here, or nothing of it counts."""
        if self._ended:
            return
        self._ended, self._ended_at = True, self._loop.time()
        if not (self._begun and self.gate.complete):
            self._ready_at = self._ended_at
        self._tell(Fetched, self._promised if self.gate.complete else 0)
        stream = self._leg.stream()
        if stream is not None and self.gate.complete:
            stream.finalise(self._leg.have_blocks + self._promised, self.gate.since, self._ended_at)

    def _tell(self, event: type[Arriving] | type[Fetched], num_blocks: int) -> None:
        leg = self._leg
        self._shell.handle(
            event(request_id=leg.request_id, generation=leg.generation, num_blocks=leg.have_blocks + num_blocks)
        )

    def _predict_first_step_s(self) -> float:
        """Of the tokens behind the promised blocks that fit into one step; 0.0 when there are none."""
        context, tokens = self._shell.context, self._leg.spec.tokens[:-1]
        start = (self._leg.have_blocks + self._promised) * context.block_size
        chunk = tokens[start : start + context.config.token_budget]
        if not chunk:
            return 0.0
        return self._shell.beside_fetch_s(Chunk(self._leg.request_id, chunk, start, self._leg.blocks))
