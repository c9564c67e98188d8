"""What a step waits for: layers of a pool fetch, told on the event loop, waited for there or on an engine's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

from transfer.errors import StepAbandoned
from transfer.terms import RequestId

GRACE_S = 1.0
"""Beyond the fetch's own deadline: the fetch says when it is late; should it not, the step ends all the same."""


class FetchGate:
    """LayerGate of one fetch of `num_layers` layers. Once complete it never fails, once failed it never passes.

    Use on the event loop; `wait` is for another thread. timeout_s: the fetch's.
    """

    def __init__(self, request_id: RequestId, num_layers: int, timeout_s: float) -> None:
        self.request_id, self._num_layers = request_id, num_layers
        self.since = asyncio.get_running_loop().time()
        self._late_s = timeout_s + GRACE_S
        self._late_at = time.monotonic() + self._late_s
        self._changed = threading.Condition()
        self._woken = asyncio.Event()
        self._landed = 0
        self._failure: str | None = None
        self._let_go = False
        self._link_s = 0.0

    @property
    def complete(self) -> bool:
        """Every layer is here: it can fail no more."""
        return self._landed == self._num_layers

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def carried_by(self, link_s: float) -> None:
        """An emulated link needs `link_s` from the start, layer after layer."""
        self._link_s = link_s

    def due(self, layer: int, num_layers: int) -> float:
        return self.since + self._link_s * (layer + 1) / num_layers

    # --- what happens to the fetch --------------------------------------------------------------------------

    def landed(self, num_layers: int) -> None:
        """The first `num_layers` layers are in place and verified."""
        with self._changed:
            if not self.failed:
                self._landed = max(self._landed, num_layers)
            self._wake()

    def fail(self, reason: str) -> None:
        """The rest will not come. Changes nothing once it is complete."""
        with self._changed:
            if not (self.complete or self.failed):
                self._failure = reason
            self._wake()

    def let_go(self) -> None:
        """Nobody wants the sequence, as the core knows: a step with it ends undisturbed, whatever it computes of it."""
        with self._changed:
            self._let_go = True
            self._wake()

    # --- LayerGate ------------------------------------------------------------------------------------------

    def wait(self, layer: int) -> None:
        with self._changed:
            while not self._passes(layer):
                left_s = self._late_at - time.monotonic()
                if left_s <= 0.0:
                    self._failure = self._late()
                else:
                    self._changed.wait(left_s)

    async def ready(self, layer: int) -> None:
        try:
            async with asyncio.timeout_at(self.since + self._late_s):
                while not self._passes(layer):
                    self._woken.clear()
                    await self._woken.wait()
        except TimeoutError:
            self.fail(self._late())
            self._passes(layer)

    def _passes(self, layer: int) -> bool:
        if self._landed > layer or (self._let_go and not self.failed):
            return True
        if self._failure is not None:
            raise StepAbandoned(
                f"layer {layer} of the blocks fetched for request {self.request_id} will not come: {self._failure}"
            )
        return False

    def _wake(self) -> None:
        self._changed.notify_all()
        self._woken.set()

    def _late(self) -> str:
        return f"it is not all here after {self._late_s:g} s"


class StepGate:
    """LayerGate of all fetches that a step waits for."""

    def __init__(self, gates: Sequence[FetchGate]) -> None:
        self._gates = gates

    @property
    def failed(self) -> tuple[RequestId, ...]:
        return tuple(gate.request_id for gate in self._gates if gate.failed)

    def wait(self, layer: int) -> None:
        for gate in self._gates:
            gate.wait(layer)

    async def ready(self, layer: int) -> None:
        for gate in self._gates:
            await gate.ready(layer)

    def due(self, layer: int, num_layers: int) -> float:
        return max(gate.due(layer, num_layers) for gate in self._gates)
