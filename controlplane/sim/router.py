"""The gateway's TokenRouter (controlplane/gateway/streams.py) without clients, text or a loop: counts and times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controlplane.core.events import Ended, Event, Expect, Fail, FirstToken, RequestSpec, Resume
from transfer.api import Outcome
from transfer.errors import IllegalTransition
from transfer.said import Said, say
from transfer.terms import FinishReason, RequestId

if TYPE_CHECKING:
    from controlplane.sim.stepper import Stepper

_OUTCOMES: dict[str, Outcome] = {"overloaded": "rejected", "invalid": "rejected", "timeout": "timed_out"}
TOKEN_BYTES = 4


class Stream:
    """One request in progress. count: tokens delivered; num_output: how many it will be in all. stepper: whose steps
    deliver them; some that have ended may not be counted yet (Stepper.settle)."""

    __slots__ = (
        "cached_tokens", "count", "first_at", "generations", "last_at", "max_itl_s", "num_output", "request_id", "spec",
        "stepper",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, num_output: int) -> None:
        self.spec, self.request_id, self.num_output = spec, spec.request_id, num_output
        self.generations: tuple[int, ...] = ()
        self.count = 0
        self.first_at: float | None = None
        self.last_at = 0.0
        self.max_itl_s: float | None = None
        self.cached_tokens: int | None = None
        self.stepper: Stepper | None = None


class Router:
    """Posts FirstToken and exactly one Ended for every open()."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self.streams: dict[RequestId, Stream] = {}

    def open(self, spec: RequestSpec, num_output: int) -> None:
        self.streams[spec.request_id] = Stream(spec, num_output)

    def expect(self, effect: Expect) -> None:
        stream = self.streams.get(effect.request_id)
        if stream is not None and effect.generation not in stream.generations:
            stream.generations += (effect.generation,)

    def need_tokens(self, request_id: RequestId) -> Resume | None:
        """What was delivered; nothing more is accepted until the next Expect. None: it has ended meanwhile."""
        stream = self._settled(request_id)
        if stream is None:
            return None
        stream.generations = ()
        tokens = bytes(len(stream.spec.tokens) + TOKEN_BYTES * stream.count)
        return Resume(request_id=request_id, tokens=tokens, num_output=stream.count)

    def fail(self, effect: Fail, now: float) -> None:
        stream = self._settled(effect.request_id)
        if stream is not None:
            self._end(stream, _OUTCOMES.get(effect.kind, "error"), None, now, error=effect.said)

    def give_up(self, now: float) -> None:
        """The simulation ends: whoever is still here has waited too long."""
        for request_id in list(self.streams):
            stream = self._settled(request_id)
            if stream is not None:
                self._end(stream, "timed_out", None, now, error=say("ended.not_simulated"))

    # --- tokens -----------------------------------------------------------------------------------------------

    def token(
        self, request_id: RequestId, generation: int, index: int, finish: FinishReason | None,
        cached_tokens: int | None, stepper: Stepper, now: float,
    ) -> None:  # fmt: skip
        """One token of one step. What is late or was delivered by another instance before is dropped."""
        stream = self.streams.get(request_id)
        if stream is None or generation not in stream.generations or index < stream.count:
            return
        if index > stream.count:
            raise IllegalTransition(f"request {request_id}", f"{stream.count} tokens delivered", f"token {index}")
        if cached_tokens is not None and stream.cached_tokens is None:
            stream.cached_tokens = min(cached_tokens, len(stream.spec.tokens) // TOKEN_BYTES - 1)
        stream.stepper = stepper
        self.next_token(stream, generation, now)
        if finish is not None:
            self._end(stream, "ok", finish, now, error=None)

    def next_token(self, stream: Stream, generation: int, now: float) -> None:
        """One more token, of a generation that is good."""
        if stream.generations[0] != generation:
            stream.generations = tuple(one for one in stream.generations if one >= generation)
        stream.count += 1
        if stream.first_at is None:
            stream.first_at = now
            self._post(FirstToken(request_id=stream.request_id))
        else:
            gap = now - stream.last_at
            if stream.max_itl_s is None or gap > stream.max_itl_s:
                stream.max_itl_s = gap
        stream.last_at = now

    def more_tokens(self, stream: Stream, generation: int, count: int, first: float, gap: float, last: float) -> None:
        """A token of each of `count` steps that ended between `first` and `last`; gap: the longest between them. The
        stream's last token is not among them; its first one is the only one if it is."""
        if generation not in stream.generations:
            return
        if count == 1:
            self.next_token(stream, generation, last)
            return
        if stream.generations[0] != generation:
            stream.generations = tuple(one for one in stream.generations if one >= generation)
        stream.count += count
        gap = max(gap, first - stream.last_at)
        if stream.max_itl_s is None or gap > stream.max_itl_s:
            stream.max_itl_s = gap
        stream.last_at = last

    # --- inside -----------------------------------------------------------------------------------------------

    def _settled(self, request_id: RequestId) -> Stream | None:
        stream = self.streams.get(request_id)
        if stream is not None and stream.stepper is not None:
            stream.stepper.settle()
        return stream

    def _end(
        self, stream: Stream, outcome: Outcome, finish: FinishReason | None, now: float, *, error: Said | None
    ) -> None:
        del self.streams[stream.request_id]
        arrived, count, first = stream.spec.arrived_s, stream.count, stream.first_at
        self._post(
            Ended(
                request_id=stream.request_id,
                outcome=outcome,
                finish_reason=None if finish is None else finish.value,
                output_tokens=count,
                ttft_s=None if first is None else first - arrived,
                tpot_s=None if first is None or count < 2 else (stream.last_at - first) / (count - 1),
                e2e_s=now - arrived,
                max_itl_s=stream.max_itl_s,
                cached_tokens=stream.cached_tokens,
                error=None if error is None else str(error),
                error_said=error,
                by_node=finish is not None,
            )
        )
