"""What a connector moves in which step, decided without vLLM, torch or a clock.

`Requests` is the half beside vLLM's scheduler: it knows each request's blocks and what a step computes of it.
`Progress` is the half beside the cache: it knows which KV there is right and which blocks are in the arena already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARAMS = "phaseplane"
"""The key in kv_transfer_params below which ours are: {"job": int, "num_loaded": int, "num_tokens": int}."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of the model's KV heads one worker of a tensor parallel vLLM has. saves: False for all but the first of
    those that have the same heads, where there are fewer heads than workers."""

    heads: range
    saves: bool


def share(rank: int, world_size: int, num_kv_heads: int) -> Share:
    """As vLLM's attention splits its heads; one of the two numbers divides the other."""
    if num_kv_heads < world_size:
        head, copy = divmod(rank, world_size // num_kv_heads)
        return Share(range(head, head + 1), copy == 0)
    count = num_kv_heads // world_size
    return Share(range(rank * count, (rank + 1) * count), saves=True)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a request of ours carries. num_tokens: leading tokens whose KV is wanted in the arena."""

    job: int
    num_loaded: int
    num_tokens: int


@dataclass(slots=True)
class StepItem:
    """One request in one step. blocks: its table in vLLM's cache. start, end: tokens with KV before and after the step.

    load_from: tokens [load_from, start) come from the arena before the step; equal to start: none.
    fresh: the table is new, of a request that is scheduled for the first time or again.
    """

    job: int
    blocks: list[int]
    start: int
    end: int
    load_from: int
    fresh: bool


@dataclass(slots=True)
class _Known:
    ticket: Ticket
    blocks: list[int] = field(default_factory=list)
    num_external: int = 0


class Requests:
    """Requests of ours that vLLM's scheduler knows, by its id. Those without a ticket leave no trace here."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def num_external(self, request_id: str, params: dict[str, Any] | None, num_prompt: int, num_local: int) -> int:
        """Tokens to take from the arena beyond the num_local that vLLM has; the last of a prompt is always computed."""
        known = self._known.get(request_id)
        if known is None:
            ticket = read_ticket(params)
            if ticket is None:
                return 0
            known = self._known[request_id] = _Known(ticket)
        return max(0, min(known.ticket.num_loaded, num_prompt - 1) - num_local)

    def allocated(self, request_id: str, num_external: int) -> None:
        if known := self._known.get(request_id):
            known.num_external = num_external

    def scheduled(
        self, request_id: str, blocks: list[int] | None, start: int, num_new: int, *, fresh: bool
    ) -> StepItem | None:
        """The request's part in a step; None where nothing of it concerns us. blocks: its table when fresh, else what
        is new in it."""
        known = self._known.get(request_id)
        if known is None:
            return None
        if fresh:
            known.blocks = list(blocks or ())
        elif blocks:
            known.blocks += blocks
        num_external, known.num_external = known.num_external, 0
        if not fresh and start >= known.ticket.num_tokens:
            return None
        return StepItem(
            known.ticket.job,
            list(known.blocks),
            start,
            start + num_new,
            start - num_external if fresh else start,
            fresh,
        )

    def finished(self, request_id: str) -> int | None:
        """Its job, where it was ours."""
        known = self._known.pop(request_id, None)
        return known.ticket.job if known is not None else None


@dataclass(slots=True)
class Progress:
    """One job in the cache. block_size: of the arena. num_tokens, save_from: as granted.

    valid: leading tokens whose KV in vLLM's cache is right. A step that starts beyond it computed on KV that failed to
    load, so nothing of it is saved; vLLM repeats it from where the load failed.
    """

    block_size: int
    num_tokens: int
    save_from: int
    valid: int = 0
    saved: int = field(init=False)

    def __post_init__(self) -> None:
        self.saved = self.save_from

    def load_failed(self, at: int) -> None:
        """KV from token `at` on is wrong."""
        self.valid = min(self.valid, at)

    def begin(self, item: StepItem) -> None:
        """Before the step's loads, which load_failed may then take back."""
        if item.fresh:
            self.valid = item.start

    def complete(self, item: StepItem) -> range:
        """Arena blocks, as indices into the job's table, that are complete once the step's KV is written."""
        if item.start > self.valid:
            return range(0)
        self.valid = item.end
        if item.end >= self.num_tokens:
            complete = -(-self.num_tokens // self.block_size)
        else:
            complete = item.end // self.block_size
        first, self.saved = self.saved, max(self.saved, complete)
        return range(first, self.saved)


def num_sound(table: list[int], failed: set[int]) -> int:
    """Leading blocks of a table before one that failed to load: what follows is not what its tokens say."""
    return next((index for index, block in enumerate(table) if block in failed), len(table))


def read_ticket(params: dict[str, Any] | None) -> Ticket | None:
    """None where the request is not ours, or what it carries is no ticket: it is then served without moving KV."""
    found = params.get(PARAMS) if isinstance(params, dict) else None
    if not isinstance(found, dict):
        return None
    values = [found.get(name) for name in ("job", "num_loaded", "num_tokens")]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    return Ticket(*numbers) if len(numbers) == len(values) else None
