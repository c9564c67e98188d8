"""One request on one instance: its state table, its tokens and what is computed of them, when it stops.

Decides nothing about other sequences and takes no blocks (batching.py does).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from enum import StrEnum

from nodes.core.blocks import BlockKey, BlockTable
from nodes.core.counted import CountedTokens, made_up_key, own_tokens
from nodes.core.events import Gone, SequenceSpec, Work
from nodes.engines.engine import Sampling
from transfer.errors import IllegalTransition
from transfer.kv.block import block_hashes
from transfer.terms import FinishReason, pack_tokens
from transfer.wire.messages import Holding

_HISTORY = 32


class State(StrEnum):
    WAITING = "waiting"
    """Holds no block: in the queue, new or preempted."""
    RECEIVING = "receiving"
    """Holds blocks; their KV is on its way from another instance."""
    FETCHING = "fetching"
    """Holds blocks; leading ones are on their way from a pool."""
    PREFILLING = "prefilling"
    COMPUTED = "computed"
    """Prefill work that is done; its blocks stay until the receiver has them."""
    RUNNING = "running"
    PAUSED = "paused"
    """Migrating: holds its blocks, takes no step."""
    LEAVING = "leaving"
    """Dropped while the engine still writes its blocks; they return when the step is done."""
    GONE = "gone"


MOVES: dict[State, dict[str, State]] = {
    State.WAITING: {
        "receive": State.RECEIVING,
        "fetch": State.FETCHING,
        "prefill": State.PREFILLING,
        "drop": State.GONE,
    },
    State.RECEIVING: {"kv_ready": State.RUNNING, "drop": State.GONE, "lose": State.GONE},
    State.FETCHING: {
        "arriving": State.PREFILLING,
        "fetched": State.PREFILLING,
        "drop": State.GONE,
        "lose": State.GONE,
    },
    State.PREFILLING: {
        "computed": State.COMPUTED,
        "first_token": State.RUNNING,
        "finish": State.GONE,
        "preempt": State.WAITING,
        "fetch_failed": State.FETCHING,
        "drop": State.GONE,
        "drop_in_step": State.LEAVING,
        "lose": State.GONE,
    },
    State.COMPUTED: {"handed": State.GONE, "drop": State.GONE, "lose": State.GONE},
    State.RUNNING: {
        "finish": State.GONE,
        "preempt": State.WAITING,
        "pause": State.PAUSED,
        "drop": State.GONE,
        "drop_in_step": State.LEAVING,
        "lose": State.GONE,
    },
    State.PAUSED: {"resume": State.RUNNING, "handed": State.GONE, "drop": State.GONE},
    State.LEAVING: {"step_done": State.GONE},
    State.GONE: {},
}

LEASED = (State.RECEIVING, State.FETCHING, State.COMPUTED)
"""States that end when nothing moves for a lease."""
ACTIVE = (State.RECEIVING, State.FETCHING, State.PREFILLING, State.RUNNING, State.PAUSED)
"""States that count against max_running."""


class Sequence:
    """Mutable; owned by the batching core. `tokens` is prompt + output so far, the last `num_output` are output.

    num_computed: leading tokens whose KV is in the table. have_blocks: leading blocks found in the prefix cache
    at the first admission. arriving_blocks: leading blocks up to the last of those on their way while the rest is
    computed (0: none are); KV of all but have_blocks counts only when the fetch or a step with the sequence has ended
    well. valid_blocks: what is left of them when the fetch failed in a step. overlapped: it was once computed beside
    its fetch. rank orders sequences: the lowest is served first and preempted last. owed: answers that must wait until
    a leaving sequence's blocks are free.
    """

    __slots__ = (
        "_holding", "admitted", "arriving_blocks", "banned", "block_size", "deadline", "fetch_blocks",
        "fetched_blocks", "generation", "have_blocks", "history", "in_step", "keys", "max_length", "num_committed",
        "num_computed", "num_output", "num_pushed", "overlapped", "owed", "params", "pause_wanted", "rank",
        "reported_cached", "request_id", "spec", "started", "state", "stops", "table", "tokens", "valid_blocks",
        "work",
    )  # fmt: skip

    def __init__(
        self, spec: SequenceSpec, arrival: int, *, block_size: int, max_length: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """max_length: most tokens, prompt and output, the sequence may ever have on this instance."""
        self.spec, self.request_id, self.generation, self.work = spec, spec.request_id, spec.generation, spec.work
        self.rank = (spec.priority, arrival)
        self.tokens = own_tokens(spec.tokens)
        self.num_output = spec.num_output
        self.params = spec.sampling
        self.block_size, self.max_length = block_size, max_length
        stops = stop_ids(spec, eos_token_ids)
        self.stops, self.banned = frozenset(stops), stops
        self.state = State.WAITING
        self.history: deque[str] = deque(("add",), maxlen=_HISTORY)
        self.table = BlockTable()
        self.keys: list[BlockKey] = list(spec.keys)
        self.num_computed = self.num_committed = self.num_pushed = 0
        self.fetch_blocks = spec.fetch_blocks
        self.have_blocks = self.fetched_blocks = self.arriving_blocks = 0
        self.valid_blocks: int | None = None
        self.overlapped = False
        self.deadline = 0.0
        self.admitted = self.started = self.in_step = self.pause_wanted = False
        self.reported_cached = spec.work is not Work.LOCAL
        self.owed: list[Gone] = []
        self._holding: Holding | None = None

    def move(self, event: str) -> State:
        """Take `event`; returns the new state. Raises IllegalTransition when the table has no such move."""
        to = MOVES[self.state].get(event)
        if to is None:
            raise IllegalTransition(f"request {self.request_id}", self.state, event, tuple(self.history))
        self.history.append(event)
        self.state = to
        return to

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV this work needs: all, but for the last in prefill work (its receiver computes it)."""
        return len(self.tokens) - (self.work is Work.PREFILL)

    @property
    def num_blocks_needed(self) -> int:
        return -(-self.num_to_compute // self.block_size)

    @property
    def num_shareable_blocks(self) -> int:
        """Whole blocks that may come from elsewhere: never the one with the last token."""
        return (len(self.tokens) - 1) // self.block_size

    @property
    def num_blocks_to_fetch(self) -> int:
        return min(self.fetch_blocks, self.num_shareable_blocks)

    @property
    def growth_blocks(self) -> int:
        """Blocks the output still to come may need."""
        if self.work is Work.PREFILL or self.params is None:
            return 0
        return (self.params.max_tokens - self.num_output) // self.block_size + 1

    def leading_keys(self, count: int) -> Iterable[BlockKey]:
        """Keys of the first `count` whole blocks, hashed as they are asked for."""
        return self.keys[:count] if len(self.keys) >= count else map(self.key, range(count))

    def keys_between(self, first: int, last: int) -> list[BlockKey]:
        """Keys of whole blocks [first, last)."""
        if last > first:
            self.key(last - 1)
        return self.keys[first:last]

    def key(self, index: int) -> BlockKey:
        """Key of whole block `index`; each is hashed once."""
        while len(self.keys) <= index:
            root = self.keys[-1].digest if self.keys else self.spec.root
            if type(self.tokens) is CountedTokens:
                self.keys.append(made_up_key(root, self.request_id, len(self.keys)))
                continue
            first = len(self.keys) * self.block_size
            tokens = self.tokens[first : first + self.block_size]
            self.keys.append(BlockKey(block_hashes(tokens, self.block_size, root)[0], pack_tokens(tokens)))
        return self.keys[index]

    def sampling(self) -> Sampling | None:
        """How to draw the token after the last one; `history` is the live list."""
        if self.params is None:
            return None
        banned = self.banned if self.num_output < self.params.min_tokens else ()
        return Sampling(self.params, self.tokens, self.num_output, banned)

    def append(self, token: int) -> FinishReason | None:
        """Take a drawn token. A stop token is kept as output; it ends the sequence only past min_tokens."""
        self.tokens.append(token)
        self.num_output += 1
        params = self.params
        if params is None:
            raise IllegalTransition(f"request {self.request_id}", "prefill work", "a drawn token", tuple(self.history))
        if token in self.stops and self.num_output > params.min_tokens:
            return FinishReason.STOP
        if self.num_output >= params.max_tokens or len(self.tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def report_cached(self) -> int:
        """Prompt tokens that prefix cache and pool saved; said once."""
        self.reported_cached = True
        saved = (self.have_blocks + self.fetched_blocks) * self.block_size
        return min(saved, len(self.spec.tokens) - self.spec.num_output)

    def holding(self) -> Holding:
        """What it holds, for a heartbeat: the last answer again while that has not changed."""
        num_blocks, told = len(self.table.blocks), self._holding
        if told is None or told.num_blocks != num_blocks:
            told = Holding(request_id=self.request_id, generation=self.generation, num_blocks=num_blocks)
            self._holding = told
        return told

    def renew(self, now: float) -> None:
        """The lease starts anew; it matters in the LEASED states."""
        self.deadline = now + self.spec.lease_s

    def restart(self) -> None:
        """After a preemption: nothing is computed any more, and all of prompt and output is local work. Nothing is
        fetched a second time: it may still be in the prefix cache."""
        self.num_computed = self.fetch_blocks = 0
        self.work = Work.LOCAL


class Roster:
    """Every sequence of an instance, by request and by state; within a state in order of rank."""

    def __init__(self) -> None:
        self.live: dict[str, Sequence] = {}
        self.leaving: dict[str, Sequence] = {}
        self.by_state: dict[State, list[Sequence]] = {state: [] for state in State if state is not State.GONE}
        self.waiting = self.by_state[State.WAITING]
        self.prefilling = self.by_state[State.PREFILLING]
        self.running = self.by_state[State.RUNNING]
        self._active = tuple(self.by_state[state] for state in ACTIVE)

    @property
    def num_active(self) -> int:
        return sum(map(len, self._active))

    def add(self, sequence: Sequence) -> None:
        self.live[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_rank)

    def move(self, sequence: Sequence, event: str) -> None:
        """Sequence.move, and keep the lists right. Raises IllegalTransition, changing nothing."""
        before = sequence.state
        to = sequence.move(event)
        self.by_state[before].remove(sequence)
        if to is not State.GONE:
            insort(self.by_state[to], sequence, key=_rank)
        if to is State.LEAVING:
            del self.live[sequence.request_id]
            self.leaving[sequence.request_id] = sequence
        elif to is State.GONE:
            del (self.leaving if before is State.LEAVING else self.live)[sequence.request_id]

    def find(self, request_id: str, generation: int) -> Sequence | None:
        """The live sequence of exactly this generation."""
        sequence = self.live.get(request_id)
        return sequence if sequence is not None and sequence.generation == generation else None

    def everyone(self) -> list[Sequence]:
        """All that may hold blocks: live ones in order of arrival, then those that are leaving."""
        return [*self.live.values(), *self.leaving.values()]


def stop_ids(spec: SequenceSpec, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end this request, without repeats: its own and, unless ignored, the model's end tokens."""
    if spec.sampling is None:
        return ()
    eos = () if spec.sampling.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*spec.sampling.stop_token_ids, *eos)))


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
