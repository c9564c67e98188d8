"""A role and an engine that can be wrong in one way only: by what the batching core told them.

The engine is a deterministic function: the KV of a position is a digest of every token up to it, the next token a
function of that digest. The arena is a dict (block, slot) -> digest, wiped when a block changes hands, so that any
read of KV that was not written, or was overwritten, is seen at once. Used by all tests of nodes/core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from requests_kit import PROMPT, config, digests, next_token, reference, spec

from nodes.core.batching import BatchCore
from nodes.core.events import (
    Add,
    Admitted,
    Arriving,
    Cached,
    CannotPause,
    Computed,
    Effect,
    Emit,
    Event,
    Fetched,
    Gone,
    HandsChanged,
    KvReady,
    NotAdmitted,
    Paused,
    SequenceSpec,
    StepDone,
    StepPlan,
    StepUndone,
    Work,
)
from nodes.core.residency import BatchConfig
from nodes.core.sequence import State
from nodes.engines.engine import Chunk, Sampled
from transfer.terms import FinishReason


def running(h: Harness, name: str = "a", tokens: list[int] = PROMPT, **changes: object) -> None:
    h.add(spec(name, tokens, **changes))
    h.step()


@dataclass
class Record:
    """What the harness saw of one generation of one request."""

    spec: SequenceSpec
    tokens: list[int]
    admitted: int = 0
    refused: int = 0
    gone: int = 0
    lost: str | None = None
    finish: FinishReason | None = None
    blocks: list[int] = field(default_factory=list)
    have: int = 0
    fetched: int = 0
    arriving: int = 0
    """Leading blocks that the core was told are on their way, until a step or the fetch has ended."""
    landed: bool = False
    fetch_failed: bool = False
    pushed: list[int] = field(default_factory=list)
    computed: Computed | None = None
    paused: bool = False
    cached_tokens: list[int | None] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.num_output :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.spec.tokens) + self.spec.num_output


class Harness:
    def __init__(self, settings: BatchConfig | None = None) -> None:
        self.config = settings or config()
        self.core = BatchCore(self.config)
        self.size = self.config.block_size
        self.now = 0.0
        self.arena: dict[tuple[int, int], bytes] = {}
        self.records: dict[tuple[str, int], Record] = {}
        self.plan: StepPlan | None = None
        self.in_step: list[tuple[Chunk, Record, list[int]]] = []
        self.index: dict[bytes, int] = {}
        self.held_by_digest: dict[bytes, bytes] = {}
        self.num_steps = 0
        self.num_preempted = 0

    # --- the role -------------------------------------------------------------------------------------------

    def add(self, one: SequenceSpec) -> list[Effect]:
        self.records.setdefault((one.request_id, one.generation), Record(one, list(one.tokens)))
        return self.send(Add(spec=one))

    def send(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._perform(effect)
        self.check()
        return effects

    def record(self, request_id: str, generation: int = 1) -> Record:
        return self.records[request_id, generation]

    def check(self) -> None:
        load = self.core.load(self.now)
        assert self.core.check() == 0
        assert load.leaked_blocks == 0
        assert set(self.index) == set(self.core.cached_hashes())

    def deliver_kv(self, request_id: str, generation: int = 1, record: Record | None = None) -> list[Effect]:
        """Play the sender: write KV of all tokens but the last into the reservation, then say so."""
        one = record or self.record(request_id, generation)
        self.write_kv(one, one.blocks, one.have, one.tokens)
        return self.send(KvReady(request_id=request_id, generation=generation))

    def write_kv(self, one: Record, blocks: list[int], first_block: int, tokens: list[int]) -> None:
        kv = digests(tokens, one.spec.root)
        for position in range(first_block * self.size, len(tokens) - 1):
            self.arena[blocks[position // self.size], position % self.size] = kv[position]

    # --- a fetch beside compute -----------------------------------------------------------------------------

    def arriving(self, request_id: str, num_blocks: int, generation: int = 1) -> list[Effect]:
        """`num_blocks` leading blocks will come. The core may start the rest, or leave it to Fetched."""
        one = self.record(request_id, generation)
        effects = self.send(Arriving(request_id=request_id, generation=generation, num_blocks=num_blocks))
        if self.core.state_of(request_id, generation) is State.PREFILLING:
            whole = (len(one.tokens) - 1) // self.size
            one.arriving, one.landed = min(num_blocks, one.spec.fetch_blocks, whole), False
            assert one.have < one.arriving <= whole
        return effects

    def land(self, one: Record) -> None:
        """The last layer of the fetch is in place: gates pass."""
        self.write_kv(one, one.blocks, one.have, one.tokens[: one.arriving * self.size + 1])
        one.landed = True

    def fetch_ended(self, one: Record, num_blocks: int | None = None) -> list[Effect]:
        """Fetched: all that was arriving, or, with `num_blocks` given, a failure that leaves as many."""
        if num_blocks is None:
            if one.arriving:
                self.land(one)
                one.fetched, one.arriving = one.arriving - one.have, 0
            num_blocks = one.have + one.fetched
        else:
            assert not one.landed
            self.write_kv(one, one.blocks, one.have, one.tokens[: max(num_blocks, one.have) * self.size + 1])
            one.fetched = max(0, num_blocks - one.have)
            in_step = any(other is one for _, other, _ in self.in_step)
            one.fetch_failed = in_step
            one.arriving = one.arriving if in_step else 0
        request_id, generation = one.spec.request_id, one.spec.generation
        return self.send(Fetched(request_id=request_id, generation=generation, num_blocks=num_blocks))

    def waited_for(self) -> list[Record]:
        """Who holds the running step back: live, with blocks on their way."""
        return [
            one
            for _, one, _ in self.in_step
            if one.arriving and not one.landed and self.core.state_of(one.spec.request_id, one.spec.generation)
        ]

    def abandon_step(self, failed: list[Record]) -> list[Effect]:
        """The gate raised for `failed`: what the step was to write is garbage now."""
        assert self.plan is not None
        for chunk, one, _ in self.in_step:
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                self.arena[chunk.block_table[position // self.size], position % self.size] = b"half"
            if any(one is other for other in failed):
                one.arriving, one.fetch_failed = 0, False
        self.plan, self.in_step = None, []
        return self.send(StepUndone(failed=tuple(one.spec.request_id for one in failed)))

    # --- the engine -----------------------------------------------------------------------------------------

    def begin_step(self) -> StepPlan | None:
        assert self.plan is None
        self.plan = self.core.next_step(self.now)
        if self.plan is None:
            return None
        plan = self.plan
        self.num_preempted += len(plan.preempted)
        assert 0 < sum(len(chunk.tokens) for chunk in plan.chunks) <= self.config.token_budget
        assert plan.arriving == [
            chunk.request_id for chunk in plan.chunks if self.records[chunk.request_id, self._live(chunk)].arriving
        ]
        assert not plan.arriving or not self.core.running_ids, "decodes wait for a pool"
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks) <= self.config.max_running
        live = {(h.request_id): h.generation for h in self.core.holdings()}
        for chunk in plan.chunks:
            one = self.records[chunk.request_id, live[chunk.request_id]]
            end = chunk.start + len(chunk.tokens)
            assert chunk.tokens == one.tokens[chunk.start : end] != []
            assert len(chunk.block_table) * self.size >= end
            if chunk.sampling is not None:
                assert list(chunk.sampling.history) == one.tokens
                assert end == len(one.tokens)
                assert chunk.sampling.num_output == one.num_output
            self.in_step.append((chunk, one, list(one.tokens)))
        return plan

    def end_step(self) -> list[Effect]:
        """The engine works as late as it may: everything that happened since the plan is in its way. What it waits
        for has failed, or comes now."""
        assert self.plan is not None
        waited_for = self.waited_for()
        if failed := [one for one in waited_for if one.fetch_failed]:
            return self.abandon_step(failed)
        for one in waited_for:
            self.land(one)
        wild = {chunk.request_id for chunk, one, _ in self.in_step if one.arriving and not one.landed}  # dropped
        written: dict[tuple[int, int], str] = {}
        sampled: dict[str, Sampled] = {}
        for chunk, one, tokens in self.in_step:
            kv = digests(tokens, one.spec.root)
            for position in range(chunk.start if chunk.request_id not in wild else 0):
                cell = chunk.block_table[position // self.size], position % self.size
                assert self.arena.get(cell) == kv[position], f"{chunk.request_id} reads wrong KV at {position}"
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                cell = chunk.block_table[position // self.size], position % self.size
                assert cell not in written, f"{chunk.request_id} and {written[cell]} write one cell"
                written[cell] = chunk.request_id
        for chunk, one, tokens in self.in_step:
            kv = digests(tokens, one.spec.root)
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                cell = chunk.block_table[position // self.size], position % self.size
                self.arena[cell] = kv[position] if chunk.request_id not in wild else b"wild"
            if one.landed and one.arriving:
                one.fetched, one.arriving = one.arriving - one.have, 0
            if chunk.sampling is not None:
                sampled[chunk.request_id] = Sampled(next_token(kv[len(tokens) - 1], chunk.sampling.banned))
        self._take_pushes(wild)
        self.plan, self.in_step = None, []
        self.num_steps += 1
        return self.send(StepDone(sampled=sampled, duration_s=0.01))

    def step(self) -> StepPlan | None:
        plan = self.begin_step()
        if plan is not None:
            self.end_step()
        return plan

    def run(self, limit: int = 2000) -> None:
        """Steps until there is nothing to compute."""
        for _ in range(limit):
            if self.step() is None:
                return
        raise AssertionError(f"still computing after {limit} steps")

    # --- checks ---------------------------------------------------------------------------------------------

    def assert_result(self, request_id: str, generation: int = 1) -> None:
        one = self.record(request_id, generation)
        output, finish = reference(one.spec, self.config.max_length)
        assert (one.output, one.finish, one.gone) == (output, finish, 1)

    def assert_pushed_once(self, one: Record) -> None:
        """Every block of tokens[:-1] is streamed once: valid ones by the role at once, the others by pushes."""
        needed = -(-(len(one.spec.tokens) - 1) // self.size)
        assert one.pushed == list(range(one.have + one.fetched, needed))

    def assert_at_rest(self) -> None:
        assert self.core.idle
        assert self.core.holdings() == ()
        load = self.core.load(self.now)
        assert (load.free_blocks, load.num_running, load.num_waiting) == (self.config.num_blocks, 0, 0)
        for one in self.records.values():
            assert one.refused + one.gone == 1, one

    def _live(self, chunk: Chunk) -> int:
        return next(h.generation for h in self.core.holdings() if h.request_id == chunk.request_id)

    def _take_pushes(self, wild: set[str]) -> None:
        assert self.plan is not None
        tables = {chunk.request_id: (chunk.block_table, one) for chunk, one, _ in self.in_step}
        for push in self.plan.pushes:
            if push.request_id in wild:
                continue
            table, one = tables[push.request_id]
            assert push.generation == one.spec.generation
            kv = digests(one.spec.tokens, one.spec.root)
            for index in range(push.first_block, push.first_block + push.count):
                one.pushed.append(index)
                for position in range(index * self.size, min((index + 1) * self.size, len(kv) - 1)):
                    assert self.arena.get((table[index], position % self.size)) == kv[position], "empty block pushed"

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, HandsChanged):
            for block in effect.blocks:
                for slot in range(self.size):
                    self.arena.pop((block, slot), None)
            return
        if isinstance(effect, Cached):
            self._mirror(effect)
            return
        if not isinstance(effect, Admitted | NotAdmitted | Emit | Computed | Gone | Paused | CannotPause):
            return
        one = self.records[effect.request_id, effect.generation]
        if isinstance(effect, Admitted):
            self._admitted(one, effect)
        elif isinstance(effect, NotAdmitted):
            one.refused += 1
        elif isinstance(effect, Computed):
            assert one.computed is None
            one.computed = effect
            total = effect.computed_tokens + effect.cached_tokens + effect.fetched_tokens
            assert total == len(one.spec.tokens) - (one.spec.work is Work.PREFILL)
            if one.spec.work is Work.PREFILL:
                self.assert_pushed_once(one)
        elif isinstance(effect, Paused):
            self._paused(one, effect)
        elif isinstance(effect, Emit):
            assert (one.finish, one.gone, one.paused) == (None, 0, False)
            assert effect.index == one.num_output
            one.tokens.extend(effect.token_ids)
            one.finish = effect.finish
            one.cached_tokens.append(effect.cached_tokens)
            assert one.output == reference(one.spec, self.config.max_length)[0][: one.num_output]
        elif isinstance(effect, Gone):
            one.gone += 1
            one.lost = effect.lost

    def _admitted(self, one: Record, effect: Admitted) -> None:
        one.admitted += 1
        one.blocks, one.have = effect.blocks, effect.have_blocks
        assert one.have * self.size < len(one.spec.tokens), "the last token must be computed"
        kv = digests(one.spec.tokens, one.spec.root)
        for position in range(one.have * self.size):
            assert self.arena.get((one.blocks[position // self.size], position % self.size)) == kv[position]

    def _paused(self, one: Record, effect: Paused) -> None:
        one.paused = True
        assert (effect.tokens, effect.num_output) == (one.tokens, one.num_output)
        kv = digests(effect.tokens, one.spec.root)
        for position in range(len(kv) - 1):
            cell = effect.blocks[position // self.size], position % self.size
            assert self.arena.get(cell) == kv[position], "a paused sequence lacks KV"

    def _mirror(self, effect: Cached) -> None:
        for digest in effect.removed:
            self.index.pop(digest, None)
        for digest, block in effect.stored.items():
            kv = self.arena[block, self.size - 1]
            assert self.held_by_digest.setdefault(digest, kv) == kv, "a hash names two different contents"
            self.index[digest] = block
