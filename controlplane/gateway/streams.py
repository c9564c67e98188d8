"""From decode instances' step outputs to clients: the TokenRouter, and one Stream for each output in progress.

Owns order, fencing and the count of tokens, the clock a client sees, and that each request ends exactly once.
Text is assembler.py; HTTP is sse.py. It decides nothing about placement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.core.events import Ended, Event, Expect, Fail, FirstToken, RequestSpec, Resume
from controlplane.gateway.assembler import Assembler, Piece
from controlplane.gateway.errors import ApiError, told
from transfer.api import Outcome
from transfer.errors import Overloaded
from transfer.said import Said, say
from transfer.terms import RequestId, pack_tokens
from transfer.wire.messages import PrefillDone, StepOutput, TokenItem

SWEEP_EVERY_S = 0.25
GAP_PATIENCE_S = 2.0
"""Tokens of two instances may overtake each other around a migration; a hole that stays this long is an error."""
MAX_PARKED_ITEMS = 256
LINGER_S = 15.0
"""How long an ended stream may wait for its client to take the last bytes."""
WATCHDOG_GRACE_S = 1.0
"""The scheduler core enforces the request's timeout; this watchdog is behind it, in case it does not."""

PART_LOST = say("ended.part_lost")
_OUTCOMES: dict[str, Outcome] = {"overloaded": "rejected", "invalid": "rejected", "timeout": "timed_out"}
_log = logging.getLogger(__name__)


class Client:
    """One connection that waits for one or more streams. drop: cut the connection, whatever it is doing."""

    __slots__ = ("_changed", "drop")

    def __init__(self, drop: Callable[[], None] | None = None) -> None:
        self._changed = asyncio.Event()
        self.drop = drop or _nothing

    def wake(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        """Until something happened since the last wait."""
        await self._changed.wait()
        self._changed.clear()


@dataclass(slots=True, eq=False)
class Stream:
    """One output in progress. A handler takes pieces, writes them, calls TokenRouter.delivered, in this order.

    live: the client reads while tokens come, so times are those of its socket; otherwise those of the tokens.
    """

    spec: RequestSpec
    client: Client
    assembler: Assembler
    live: bool
    num_prompt_tokens: int
    output_ids: list[int] = field(default_factory=list)
    generations: tuple[int, ...] = ()
    parked: dict[int, TokenItem] = field(default_factory=dict)
    parked_at: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    num_unread: int = 0
    num_taken: int = 0
    finish: str | None = None
    error: ApiError | None = None
    outcome: Outcome = "ok"
    by_node: bool = True
    ended_at: float | None = None
    closed: bool = False
    first_at: float | None = None
    last_at: float = 0.0
    max_itl_s: float | None = None
    num_delivered: int = 0
    cached_tokens: int | None = None
    local_cached_tokens: int | None = None

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    def at_most(self, cached_tokens: int) -> int:
        """The prompt's last token is always computed, so a resumed prompt's KV is not all of it saved."""
        return min(cached_tokens, self.num_prompt_tokens - 1)

    def take(self) -> list[Piece]:
        """All pieces that are ready, oldest first."""
        pieces, self.pieces = self.pieces, []
        self.num_taken += self.num_unread
        self.num_unread = 0
        return pieces


class TokenRouter:
    """Every request in progress on this gateway. Idempotent by (request, token index); one Ended for each open()."""

    def __init__(
        self, post: Callable[[Event], None], now: Callable[[], float], *, max_streams: int = 4096,
        max_unread_tokens: int = 4096, on_gap: Callable[[float], None] | None = None,
    ) -> None:  # fmt: skip
        """post: hands an event to the scheduler, never blocks. now: loop time. on_gap: every ITL, seconds."""
        self._post, self._now = post, now
        self._max_streams, self._max_unread = max_streams, max_unread_tokens
        self._on_gap = on_gap or _nothing_of
        self._streams: dict[RequestId, Stream] = {}
        self.num_late_items = 0
        """Items of requests or generations that were not (any more) wanted."""

    def __len__(self) -> int:
        return len(self._streams)

    # --- what a handler calls ---------------------------------------------------------------------------------

    def check_room(self, num_streams: int) -> None:
        """Raises Overloaded when that many more streams would be over max_streams."""
        if len(self._streams) + num_streams > self._max_streams:
            raise Overloaded(f"{len(self._streams)} outputs are in progress, which is the limit; try again", 1.0)

    def open(self, spec: RequestSpec, client: Client, assembler: Assembler, live: bool) -> Stream:
        """Register a request; the caller posts Arrived next and closes it by `delivered` or `abandon`."""
        stream = Stream(spec, client, assembler, live, len(spec.tokens) // 4)
        self._streams[spec.request_id] = stream
        return stream

    def delivered(self, stream: Stream) -> None:
        """What was taken is in the client's socket. Closes the stream if its end was among it."""
        if stream.live and stream.num_taken:
            self._count(stream, stream.num_taken, self._now())
            stream.num_taken = 0
        if stream.ended and (stream.error is not None or not stream.pieces):
            self._close(stream)

    def abandon(self, stream: Stream, reason: Said) -> None:
        """The client is gone. Idempotent, and harmless after the end."""
        if stream.closed:
            return
        if stream.error is None:
            self._end(stream, "cancelled", told(499, reason), by_node=stream.ended and stream.by_node)
        self._close(stream)

    def fail_stream(self, stream: Stream, error: ApiError, outcome: Outcome) -> None:
        """End it with an error unless it has ended; its handler tells the client and calls `delivered`."""
        if not stream.ended:
            self._end(stream, outcome, error, by_node=False)
            stream.client.wake()

    def fail_all(self, error: ApiError) -> None:
        """The server stops: every client gets this as its terminal event."""
        for stream in list(self._streams.values()):
            self.fail_stream(stream, error, "error")

    # --- what the wire and the scheduler call -----------------------------------------------------------------

    def on_step(self, step: StepOutput) -> None:
        """One decode step's tokens, straight from the wire."""
        for item in step.items:
            stream = self._streams.get(item.request_id)
            if stream is None or stream.ended or item.generation not in stream.generations:
                self.num_late_items += 1
            else:
                self._accept(stream, item)

    def on_prefill_done(self, message: PrefillDone) -> None:
        """Tells the usage's cached tokens: those of the first placement, since a later one finds its own work."""
        stream = self._streams.get(message.request_id)
        if stream is not None and stream.cached_tokens is None and message.generation in stream.generations:
            stream.cached_tokens = stream.at_most(message.cached_tokens + message.fetched_tokens)

    def expect(self, effect: Expect) -> None:
        stream = self._streams.get(effect.request_id)
        if stream is not None and effect.generation not in stream.generations:
            stream.generations += (effect.generation,)

    def need_tokens(self, request_id: RequestId) -> Resume | None:
        """Accept nothing more until the next Expect; what the client has or will get. None: it ended meanwhile."""
        stream = self._streams.get(request_id)
        if stream is None or stream.ended:
            return None
        stream.generations = ()
        stream.parked.clear()
        tokens = stream.spec.tokens + pack_tokens(stream.output_ids)
        return Resume(request_id=request_id, tokens=tokens, num_output=len(stream.output_ids))

    def fail(self, effect: Fail) -> None:
        if stream := self._streams.get(effect.request_id):
            error = told(effect.status, effect.said, code=effect.kind, retry_after_s=effect.retry_after_s)
            self.fail_stream(stream, error, _OUTCOMES.get(effect.kind, "error"))

    async def run(self) -> None:
        """The watchdog, until cancelled: nothing stays without an end."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sweep()

    def sweep(self) -> None:
        """Enforce the deadlines that have passed."""
        now = self._now()
        for stream in list(self._streams.values()):
            if stream.ended_at is not None:
                if now > stream.ended_at + LINGER_S:
                    stream.client.drop()
                    self.abandon(stream, say("ended.unread"))
            elif now > stream.spec.arrived_s + stream.spec.timeout_s + WATCHDOG_GRACE_S:
                late = say("ended.unfinished", seconds=f"{stream.spec.timeout_s:g}")
                self.fail_stream(stream, told(504, late, code="timeout"), "timed_out")
            elif stream.parked and now > stream.parked_at + GAP_PATIENCE_S:
                _log.error("request %s lost output token %d on its way", stream.spec.request_id, len(stream.output_ids))
                self.fail_stream(stream, told(500, PART_LOST), "error")

    # --- inside -----------------------------------------------------------------------------------------------

    def _accept(self, stream: Stream, item: TokenItem) -> None:
        """Take what is new of one item, then whatever was parked behind it."""
        following = item
        while True:
            have = len(stream.output_ids)
            if following.index > have:
                self._park(stream, following)
                return
            if stream.generations[0] != following.generation:
                stream.generations = tuple(g for g in stream.generations if g >= following.generation)
            ends_only = following.finish is not None and not following.token_ids and following.index == have
            if following.index + len(following.token_ids) > have or ends_only:
                self._push(stream, following, have - following.index)
            if stream.ended or not stream.parked:
                return
            following = stream.parked.pop(min(stream.parked))

    def _park(self, stream: Stream, item: TokenItem) -> None:
        if not stream.parked:
            stream.parked_at = self._now()
        stream.parked[item.index] = item
        if len(stream.parked) > MAX_PARKED_ITEMS:
            self.fail_stream(stream, told(500, PART_LOST), "error")

    def _push(self, stream: Stream, item: TokenItem, skip: int) -> None:
        token_ids = item.token_ids[skip:]
        logprobs = item.logprobs[skip:] if item.logprobs is not None else None
        piece, used = stream.assembler.feed(token_ids, item.finish, logprobs)
        stream.output_ids.extend(token_ids[:used])
        if item.cached_tokens is not None and stream.cached_tokens is None:
            stream.cached_tokens = stream.local_cached_tokens = stream.at_most(item.cached_tokens)
        if not stream.live:
            self._count(stream, used, self._now())
        if piece is None:
            return
        stream.pieces.append(piece)
        stream.num_unread += len(piece.token_ids)
        if piece.finish is not None:
            stream.finish = piece.finish.value
            # Ended by a stop string although the node goes on: it must be told.
            self._end(stream, "ok", None, by_node=item.finish is not None)
        elif stream.live and stream.num_unread > self._max_unread:
            _log.warning("request %s is cancelled: its client does not read", stream.spec.request_id)
            stream.client.drop()
            self.abandon(stream, say("ended.not_reading"))
            return
        if stream.live or piece.finish is not None:
            stream.client.wake()

    def _count(self, stream: Stream, num_tokens: int, now: float) -> None:
        if stream.first_at is None:
            stream.first_at = now
            self._post(FirstToken(request_id=stream.spec.request_id))
        else:
            gap = now - stream.last_at
            if stream.max_itl_s is None or gap > stream.max_itl_s:
                stream.max_itl_s = gap
            self._on_gap(gap)
        stream.last_at = now
        stream.num_delivered += num_tokens

    def _end(self, stream: Stream, outcome: Outcome, error: ApiError | None, *, by_node: bool) -> None:
        stream.outcome, stream.error, stream.by_node = outcome, error, by_node
        stream.ended_at = self._now()
        stream.parked.clear()
        if not stream.live and error is None:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        if stream.closed:
            return
        stream.closed = True
        del self._streams[stream.spec.request_id]
        arrived, count, first = stream.spec.arrived_s, stream.num_delivered, stream.first_at
        self._post(
            Ended(
                request_id=stream.spec.request_id,
                outcome=stream.outcome,
                finish_reason=stream.finish if stream.outcome == "ok" else None,
                output_tokens=len(stream.output_ids),
                ttft_s=None if first is None else first - arrived,
                tpot_s=None if first is None or count < 2 else (stream.last_at - first) / (count - 1),
                e2e_s=self._now() - arrived,
                max_itl_s=stream.max_itl_s,
                cached_tokens=stream.local_cached_tokens,
                error=None if stream.error is None else str(stream.error),
                error_said=None if stream.error is None else stream.error.said,
                by_node=stream.by_node,
            )
        )


def _nothing() -> None:
    pass


def _nothing_of(_gap: float) -> None:
    pass
