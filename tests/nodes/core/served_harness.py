"""A role and an engine that batches by itself, which can be wrong in one way only: by what ServedCore told them.

KV of a position is a digest of every token up to it (batching_harness), kept for each layer and block of the arena and
wiped when a block changes hands; the engine draws from what it loads, so that wrong KV gives wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from requests_kit import digests, next_token

from nodes.core.events import (
    Add,
    Admitted,
    Cached,
    CannotPause,
    Computed,
    Effect,
    Emit,
    Event,
    Gone,
    HandsChanged,
    KvReady,
    NotAdmitted,
    SequenceSpec,
)
from nodes.core.jobs import Began, Cancel, Drew, JobOver, Keep, Keeping, Kept, Launch, Saved, Started
from nodes.core.served import ServedCore
from nodes.core.served_residency import ServedConfig
from nodes.engines.served import Job, Output
from transfer.terms import FinishReason

SIZE, LAYERS = 4, 2
Key = tuple[str, int]


def served_config(**changes: object) -> ServedConfig:
    base = {
        "num_blocks": 16, "block_size": SIZE, "max_context": 48, "max_running": 8, "max_waiting": 8,
        "capacity_blocks": 64, "num_layers": LAYERS, "watermark": 0.0,
    }  # fmt: skip
    return ServedConfig(**{**base, **changes})


@dataclass
class Record:
    """What was told of one generation of a request."""

    spec: SequenceSpec
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    have: int = 0
    fetched: int = 0
    num_admitted: int = 0
    num_started: int = 0
    refused: NotAdmitted | None = None
    gone: bool = False
    lost: str | None = None
    computed: Computed | None = None
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Running:
    job: Job
    saved: set[tuple[int, int]] = field(default_factory=set)
    num_drawn: int = 0
    finished: bool = False
    cancelled: bool = False
    states: list[bytes] | None = None


class ServedHarness:
    def __init__(self, config: ServedConfig | None = None) -> None:
        self.config = config or served_config()
        self.core = ServedCore(self.config)
        self.now = 0.0
        self.kv: dict[tuple[int, int], list[bytes | None]] = {}
        self.records: dict[Key, Record] = {}
        self.jobs: dict[Key, Running] = {}
        self.keeps: dict[str, tuple[list[bytes], Keeping]] = {}
        """By name, KV of the tokens and the blocks for it."""

    def record(self, name: str, generation: int = 1) -> Record:
        return self.records[name, generation]

    def send(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._perform(effect)
        assert self.core.check() == 0
        assert self.core.load(self.now).leaked_blocks == 0
        return effects

    def add(self, spec: SequenceSpec) -> list[Effect]:
        key = (spec.request_id, spec.generation)
        if key not in self.records or self.records[key].refused:
            self.records[key] = Record(spec, list(spec.tokens))
        return self.send(Add(spec=spec))

    # --- what a role does -----------------------------------------------------------------------------------

    def write_kv(self, one: Record, first: int, num_tokens: int) -> None:
        """KV of tokens from block `first` on, up to `num_tokens`, comes into its blocks from outside."""
        states = digests(one.tokens[:num_tokens], one.spec.root)
        for index in range(first, -(-num_tokens // SIZE)):
            for layer in range(LAYERS):
                self.kv[layer, one.blocks[index]] = _padded(states[index * SIZE : (index + 1) * SIZE])

    def deliver(self, name: str, generation: int = 1) -> list[Effect]:
        one = self.record(name, generation)
        self.write_kv(one, one.have, len(one.tokens) - 1)
        return self.send(KvReady(request_id=name, generation=generation))

    # --- what the engine does -------------------------------------------------------------------------------

    def begin(self, name: str, generation: int = 1) -> list[Effect]:
        return self.send(Began(request_id=name, generation=generation))

    def unsaved(self, key: Key) -> list[tuple[int, int]]:
        """(layer, index into the job's blocks), in an order that no engine has."""
        running = self.jobs[key]
        wanted = [(layer, index) for index in range(running.job.save_from, len(running.job.blocks))
                  for layer in reversed(range(LAYERS))]  # fmt: skip
        return [pair for pair in wanted if pair not in running.saved]

    def save(self, key: Key, layer: int, index: int) -> list[Effect]:
        running, root = self.jobs[key], self.records[key].spec.root
        states = digests(running.job.tokens[:-1], root)
        self.kv[layer, running.job.blocks[index]] = _padded(states[index * SIZE : (index + 1) * SIZE])
        running.saved.add((layer, index))
        return self.send(Saved(request_id=key[0], generation=key[1], layer=layer, first=index, count=1))

    def save_all(self, key: Key) -> None:
        for layer, index in self.unsaved(key):
            self.save(key, layer, index)

    def draw(self, key: Key, count: int = 1) -> list[Effect]:
        """Next output tokens, from the KV that was loaded; finish is on the last. Nothing where only KV is wanted."""
        running = self.jobs[key]
        params, job = running.job.sampling, running.job
        if params is None:
            return self.send(Drew(request_id=key[0], generation=key[1], output=Output((), finish=FinishReason.LENGTH)))
        if running.states is None:
            running.states = self._load(key)
        tokens: list[int] = []
        finish = None
        while len(tokens) < count and finish is None:
            token = next_token(running.states[-1])
            tokens.append(token)
            running.states.append(digests([token], running.states[-1])[0])
            running.num_drawn += 1
            length = len(job.tokens) + running.num_drawn
            if job.num_output + running.num_drawn >= params.max_tokens or length >= self.config.max_length:
                finish = FinishReason.LENGTH
        running.finished = finish is not None
        return self.send(Drew(request_id=key[0], generation=key[1], output=Output(tuple(tokens), finish=finish)))

    def over(self, key: Key, error: str | None = None) -> list[Effect]:
        del self.jobs[key]
        return self.send(JobOver(request_id=key[0], generation=key[1], error=error))

    def finish(self, key: Key) -> list[Effect]:
        """All that is left of a job, well."""
        running = self.jobs[key]
        if running.cancelled:
            return self.over(key)
        self.save_all(key)
        while not running.finished:
            self.draw(key, 3)
            running.finished = running.finished or running.job.sampling is None
        return self.over(key)

    def keep(self, name: str, key: Key) -> Keeping:
        """A request has ended: its answer is to be saved beside its prompt."""
        one = self.records[key]
        tokens = [*one.spec.tokens[: len(one.spec.tokens) - one.spec.num_output], *one.output][:-1]
        effects = self.send(Keep(name=name, tokens=tokens, root=one.spec.root))
        keeping = next(effect for effect in effects if isinstance(effect, Keeping))
        if keeping.blocks:
            states = digests(tokens, one.spec.root)
            for index, block in enumerate(keeping.blocks[: keeping.num_cached]):
                assert self.kv[0, block] == states[index * SIZE : (index + 1) * SIZE]
            self.keeps[name] = (states, keeping)
        return keeping

    def kept(self, name: str, *, is_saved: bool = True) -> list[Effect]:
        states, keeping = self.keeps.pop(name)
        for index in range(keeping.num_cached, len(keeping.blocks) if is_saved else keeping.num_cached):
            for layer in range(LAYERS):
                self.kv[layer, keeping.blocks[index]] = [*states[index * SIZE : (index + 1) * SIZE]]
        return self.send(Kept(name=name, is_saved=is_saved))

    def _load(self, key: Key) -> list[bytes]:
        job = self.jobs[key].job
        loaded: list[bytes] = []
        for index in range(-(-job.num_loaded // SIZE)):
            slabs = [self.kv[layer, job.blocks[index]] for layer in range(LAYERS)]
            assert all(slab == slabs[0] for slab in slabs)
            loaded += [state for state in slabs[0] if state is not None]
        loaded = loaded[: job.num_loaded]
        assert len(loaded) == job.num_loaded, "KV was promised that is not there"
        root = self.records[key].spec.root
        return loaded + digests(job.tokens[job.num_loaded :], loaded[-1] if loaded else root)

    # --- effects --------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case HandsChanged():
                self._changed(effect)
            case Cached():
                for block in effect.stored.values():
                    assert all(None not in self.kv[layer, block] for layer in range(LAYERS))
            case Launch():
                self._launched(effect.job)
            case Cancel():
                self.jobs[effect.request_id, effect.generation].cancelled = True
            case Gone():
                self._gone(effect)
            case Emit():
                one = self.records[effect.request_id, effect.generation]
                assert effect.index == one.spec.num_output + len(one.output)
                one.output += effect.token_ids
                one.finish = effect.finish
            case Admitted() | NotAdmitted() | Computed() | Started():
                self._told(effect)
            case CannotPause():
                assert effect.reason
            case _:
                assert type(effect).__name__ in ("Grown", "Keeping", "Pinned", "Unpinned")

    def _changed(self, effect: HandsChanged) -> None:
        in_use = {block for running in self.jobs.values() for block in running.job.blocks}
        in_use |= {block for _, keeping in self.keeps.values() for block in keeping.blocks}
        assert not in_use & set(effect.blocks), "a block that the engine still reads or writes got a new owner"
        for block in effect.blocks:
            for layer in range(LAYERS):
                self.kv[layer, block] = [None] * SIZE

    def _launched(self, job: Job) -> None:
        assert all(name != job.request_id for name, _ in self.jobs), "two jobs of one request"
        one = self.records[job.request_id, job.generation]
        assert job.tokens == one.tokens
        assert len(job.blocks) == -(-(len(job.tokens) - 1) // SIZE) * self.config.shares_kv
        expected = digests(job.tokens[: job.num_loaded], one.spec.root)
        for position, state in enumerate(expected):
            for layer in range(LAYERS):
                assert self.kv[layer, job.blocks[position // SIZE]][position % SIZE] == state
        assert job.save_from * SIZE <= job.num_loaded or job.save_from == len(job.blocks)
        self.jobs[job.request_id, job.generation] = Running(job)

    def _gone(self, effect: Gone) -> None:
        for (name, generation), _ in self.jobs.items():
            assert name != effect.request_id or generation > effect.generation, "Gone while the engine has its blocks"
        for (name, generation), one in self.records.items():
            if name == effect.request_id and generation <= effect.generation and not one.refused:
                one.gone, one.lost = True, effect.lost or one.lost

    def _told(self, effect: Admitted | NotAdmitted | Computed | Started) -> None:
        one = self.records[effect.request_id, effect.generation]
        match effect:
            case Admitted():
                one.num_admitted += 1
                one.blocks, one.have = effect.blocks, effect.have_blocks
            case NotAdmitted():
                one.refused = effect
            case Computed():
                assert one.computed is None
                one.computed = effect
            case Started():
                one.num_started += 1


def _padded(states: list[bytes]) -> list[bytes | None]:
    return [*states, *[None] * (SIZE - len(states))]
