"""A leg: one generation of one request on one instance, and the one place that cleans up after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nodes.core.events import (
    Add,
    Admitted,
    CannotPause,
    Computed,
    Emit,
    Gone,
    Grown,
    NotAdmitted,
    Paused,
    SequenceSpec,
)
from nodes.roles.fetch import PoolFetch
from nodes.roles.stream import PushStream
from transfer.kv.port import SendStats
from transfer.wire.messages import KvSource, PrefillDone, PrefillStarted

if TYPE_CHECKING:
    from nodes.roles.shell import BatchShell


class Leg:
    """One generation of one request here. begin -> (admitted) -> gone, or begin -> refused: exactly one end.

    Subclasses override what concerns them. All of it is called on the event loop and must not block.
    """

    def __init__(self, shell: BatchShell, spec: SequenceSpec, source: KvSource | None) -> None:
        """source: where the core waits for leading blocks from (SequenceSpec.fetch_blocks)."""
        self.shell, self.spec, self._source = shell, spec, source
        self.request_id, self.generation = spec.request_id, spec.generation
        self.blocks: list[int] = []
        self.have_blocks = 0
        self.aborted: str | None = None
        self.forgotten = False
        """Its control plane is gone: the generation says nothing any more."""
        self._fetch: PoolFetch | None = None
        self._started_s: float | None = None

    def begin(self) -> None:
        self.shell.handle(Add(spec=self.spec))

    def repeated(self) -> None:
        """The message that made this leg came again."""

    def started(self) -> None:
        """Its first chunk is in the step that starts now."""
        if self._started_s is None:
            self._started_s = asyncio.get_running_loop().time()
            self.shell.context.send(PrefillStarted(request_id=self.request_id, generation=self.generation))

    def stream(self) -> PushStream | None:
        """Where the KV of its steps goes."""
        return None

    def fetch(self) -> PoolFetch | None:
        """What brings its leading blocks from a pool."""
        return self._fetch

    def admitted(self, effect: Admitted) -> None:
        self.blocks, self.have_blocks = effect.blocks, effect.have_blocks

    def refused(self, effect: NotAdmitted) -> None:
        """Nothing was held."""

    def computed(self, effect: Computed) -> None:
        pass

    def grown(self, effect: Grown) -> None:
        self.blocks = effect.blocks

    def emitted(self, effect: Emit) -> None:
        pass

    def paused(self, effect: Paused) -> None:
        pass

    def cannot_pause(self, effect: CannotPause) -> None:
        pass

    def abort(self, reason: str) -> None:
        """End it. Gone follows, now or when what it waits for has let go of its blocks."""
        self.aborted = self.aborted or reason
        self.shell.drop(self, reason)

    def gone(self, effect: Gone) -> None:
        """It holds no block any more: after a finish, a hand-over, a drop, or, with `lost`, by the core's decision."""

    # --- a prompt that is computed here -----------------------------------------------------------------------

    async def fetch_leading(self) -> None:
        """Bring what the core waits for, once it is admitted: whole blocks before the last token, when those are more
        than it has cached. Cancel it to stop, then `let_go`."""
        source, size = self._source, self.shell.context.block_size
        if source is None:
            return
        upto = min(source.num_blocks, (len(self.spec.tokens) - 1) // size, len(self.blocks))
        if upto > self.have_blocks:
            self._fetch = PoolFetch(self.shell, self, source.peer, upto)
            await self._fetch.run()

    def let_go(self, reason: str) -> None:
        """Nothing of ours writes into the blocks any more: give them back."""
        self.shell.drop(self, reason)
        if self._fetch is not None:
            self._fetch.gate.let_go()

    def prefill_done(self, computed: Computed, computed_s: float, sent: SendStats | None = None) -> PrefillDone:
        """Its report. computed_s: when all was computed, in loop time; sent: what went to the target until now."""
        fetch = self._fetch
        return PrefillDone(
            request_id=self.request_id, generation=self.generation, computed_tokens=computed.computed_tokens,
            cached_tokens=computed.cached_tokens, fetched_tokens=computed.fetched_tokens,
            prefill_s=computed_s - (self._started_s or computed_s), transfer_s=sent.transfer_s if sent else 0.0,
            exposed_s=asyncio.get_running_loop().time() - computed_s, transfer_bytes=sent.num_bytes if sent else 0,
            fetch_s=fetch.fetch_s if fetch else 0.0, fetch_exposed_s=fetch.exposed_s if fetch else 0.0,
        )  # fmt: skip
