"""Which generation of each request an instance works for, which waits for it, and what has ended: so orders may repeat.

Holds legs and calls them; what a leg does, and what is told outside, is its shell's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from nodes.core.events import Gone
from transfer.terms import RequestId
from transfer.wire.messages import Abort

MAX_FENCES, FENCE_S = 4096, 120.0
"""What ended is remembered so long: far beyond any delay of an order (a silent session ends within seconds)."""
_NO_FENCE = -1, 0.0


class AnyLeg(Protocol):
    """forgotten: its control plane is gone, and its generation says nothing any more."""

    request_id: RequestId
    generation: int
    forgotten: bool

    def begin(self) -> None: ...

    def repeated(self) -> None:
        """The message that made this leg came again."""

    def abort(self, reason: str) -> None: ...


L = TypeVar("L", bound=AnyLeg)


class Legs(Generic[L]):
    """Idempotent by (request_id, generation): what ended here does not begin again, an older generation never does, a
    newer one begins when the older has let go of its blocks. live: to look at only. began: told before a leg begins."""

    def __init__(self, began: Callable[[], None] | None = None) -> None:
        self.live: dict[RequestId, L] = {}
        self._began = began
        self._next: dict[RequestId, L] = {}
        self._aborts: dict[RequestId, int] = {}
        self._fences: OrderedDict[RequestId, tuple[int, float]] = OrderedDict()  # generation, and since when

    @property
    def idle(self) -> bool:
        """No leg is here and none waits."""
        return not self.live and not self._next

    @property
    def num_unanswered(self) -> int:
        """Aborts that wait for their Gone."""
        return len(self._aborts)

    @property
    def fenced(self) -> list[RequestId]:
        """Requests that are remembered to have ended here, oldest first."""
        return list(self._fences)

    def find(self, request_id: RequestId, generation: int | None = None) -> L | None:
        """The leg of exactly this generation; of any when None."""
        leg = self.live.get(request_id)
        return leg if leg is not None and (generation is None or generation == leg.generation) else None

    def admit(self, leg: L) -> None:
        """Begin a leg, unless this generation or a newer one is here or has ended here."""
        if leg.generation <= self._fences.get(leg.request_id, _NO_FENCE)[0]:
            return
        here = self.live.get(leg.request_id)
        if here is None:
            self._begin(leg)
        elif here.generation == leg.generation and not here.forgotten:
            here.repeated()
        elif here.generation < leg.generation or here.forgotten:
            waiting = self._next.get(leg.request_id)
            if waiting is None or waiting.generation < leg.generation:
                self._next[leg.request_id] = leg
            here.abort("the request was placed again")

    def abort(self, message: Abort, now: float) -> bool:
        """End every leg of the request up to this generation. False: there is none, and only the core can say that
        nothing is held."""
        request_id, generation = message.request_id, message.generation
        self._aborts[request_id] = max(generation, self._aborts.get(request_id, -1))
        self._fence(request_id, generation, now)
        waiting = self._next.get(request_id)
        if waiting is not None and waiting.generation <= generation:
            del self._next[request_id]
        leg = self.live.get(request_id)
        if leg is None or leg.generation > generation:
            return False
        leg.abort(message.reason)
        return True

    def forget_all(self, reason: str) -> None:
        """The control plane that placed them is gone. Another one may count generations anew."""
        self._next.clear()
        self._fences.clear()
        for leg in list(self.live.values()):
            leg.forgotten = True
            leg.abort(reason)

    def refused(self, leg: L) -> None:
        """Nothing was held: the same order may come again. To be followed by begin_next."""
        del self.live[leg.request_id]

    def gone(self, effect: Gone, now: float) -> L | None:
        """Take away the leg that this ends, if any; to be followed by answered and begin_next."""
        leg = self.live.get(effect.request_id)
        if leg is None or leg.generation > effect.generation:
            return None
        del self.live[leg.request_id]
        if not leg.forgotten:
            self._fence(leg.request_id, leg.generation, now)
        return leg

    def answered(self, effect: Gone, ended: L | None) -> int | None:
        """The generation of the Abort that this answers; None where none was asked for."""
        aborted = self._aborts.get(effect.request_id)
        if aborted is None:
            return None
        if effect.generation >= aborted or (ended is not None and ended.generation <= aborted):
            return self._aborts.pop(effect.request_id)
        return None

    def begin_next(self, request_id: RequestId) -> None:
        """Begin the leg that waited for this request's last one to end."""
        if self._next and request_id not in self.live and (leg := self._next.pop(request_id, None)) is not None:
            self._begin(leg)

    def _begin(self, leg: L) -> None:
        self.live[leg.request_id] = leg
        if self._began is not None:
            self._began()
        leg.begin()

    def _fence(self, request_id: RequestId, generation: int, now: float) -> None:
        fences = self._fences
        fences[request_id] = max(generation, fences.pop(request_id, _NO_FENCE)[0]), now
        while len(fences) > MAX_FENCES or now - next(iter(fences.values()))[1] > FENCE_S:
            fences.popitem(last=False)
