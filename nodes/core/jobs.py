"""What passes between ServedCore and its shell beyond events.py: jobs that an engine batching by itself runs.

The shell performs Launch and Cancel on its ServedEngine (nodes/engines/served.py) and says what became of each job.
"""

from __future__ import annotations

from nodes.core.events import Effect, Event
from nodes.engines.served import Job, Output
from transfer.terms import RequestId, TokenIds

# --- events -------------------------------------------------------------------------------------------------


class Began(Event, frozen=True):
    """The engine has begun to compute."""

    request_id: RequestId
    generation: int


class Saved(Event, frozen=True):
    """KV of one layer of blocks [first, first + count) of the job's table is in the arena."""

    request_id: RequestId
    generation: int
    layer: int
    first: int
    count: int


class Drew(Event, frozen=True):
    request_id: RequestId
    generation: int
    output: Output


class JobOver(Event, frozen=True):
    """Answers every Launch once, after all else of the job: the engine reads and writes none of its blocks any more.
    error: why it could not be served, in a sentence; None: it ended as it should, or was cancelled."""

    request_id: RequestId
    generation: int
    error: str | None = None


class Keep(Event, frozen=True):
    """A request has ended whose KV of `tokens` the engine still has: give it blocks for what of it is not in the arena.
    `name` is the caller's, unique among live ones; answered by Keeping."""

    name: str
    tokens: TokenIds
    root: bytes


class Kept(Event, frozen=True):
    """Answers Keeping with blocks, once the engine has let go of them. is_saved: all of it is in them."""

    name: str
    is_saved: bool


# --- effects ------------------------------------------------------------------------------------------------


class Launch(Effect, frozen=True):
    job: Job


class Cancel(Effect, frozen=True):
    """Abort the job; its blocks are free only with JobOver. Harmless when it has ended meanwhile."""

    request_id: RequestId
    generation: int


class Started(Effect, frozen=True):
    """The prompt is being computed here; said once, of PREFILL and LOCAL work."""

    request_id: RequestId
    generation: int


class Keeping(Effect, frozen=True):
    """blocks: for the whole blocks of its tokens; none where nothing is missing, or no room, or others wait for it. The
    first num_cached have their KV."""

    name: str
    blocks: list[int]
    num_cached: int
