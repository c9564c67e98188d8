"""Anything in any order: no block leaks, whatever Began, Saved, Drew, JobOver, Drop, Tick, KvReady and Fetched come in.

The harness checks with every event that none changes hands while the engine has it; and what finishes is right.
"""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from requests_kit import PREFIXES, ROOTS, params, reference, spec
from served_harness import SIZE, Key, ServedHarness, served_config

from nodes.core.events import (
    Arriving,
    Drop,
    Fetched,
    Grow,
    Grown,
    Handed,
    KvReady,
    Pause,
    Pin,
    Renew,
    Tick,
    Unpin,
    Work,
)
from nodes.core.jobs import Began, Drew, JobOver, Saved
from nodes.core.sequence import State
from nodes.engines.served import Output


class Life:
    """One random life of an instance. dropped, lost: what need not finish."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        shares = self.rng.random() < 0.85
        self.h = ServedHarness(
            served_config(
                num_blocks=self.rng.randint(4, 24) if shares else 1, capacity_blocks=self.rng.randint(4, 30),
                max_context=self.rng.choice([20, 40]), max_running=self.rng.randint(1, 4), max_waiting=3,
                shares_kv=shares, prefix_cache=shares and self.rng.random() < 0.8,
            )
        )  # fmt: skip
        self.num_added = self.num_kept = 0
        self.dropped: set[Key] = set()
        self.failed: set[Key] = set()

    def keys(self, *states: State) -> list[Key]:
        return [key for key in self.h.records if self.h.core.state_of(*key) in states]

    def pick(self, *states: State) -> Key | None:
        keys = self.keys(*states)
        return self.rng.choice(keys) if keys else None

    def pick_job(self) -> Key | None:
        return self.rng.choice(list(self.h.jobs)) if self.h.jobs else None

    # --- what may happen ------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        self.num_added += 1
        work = rng.choice(list(Work))
        prompt = [*rng.choice(PREFIXES), *rng.choices(range(7), k=rng.randint(1, 8))]
        one = spec(
            f"s{self.num_added}", prompt, work, root=rng.choice(ROOTS), priority=rng.randint(0, 1),
            fetch_blocks=0 if work is Work.RECEIVE else rng.choice([0, 0, 1, 3]),
        )  # fmt: skip
        if work is not Work.PREFILL:
            one = msgspec.structs.replace(one, sampling=params(rng.randint(1, 14)))
        self.h.add(one)

    def repeat(self) -> None:
        if key := self.pick(*State):
            one = self.h.records[key]
            told = one.num_admitted
            self.h.add(one.spec)
            if self.h.core.state_of(*key) is State.WAITING:
                assert one.num_admitted == told
            one.num_admitted = told

    def newer_generation(self) -> None:
        key = self.pick(State.WAITING, State.RECEIVING, State.FETCHING, State.PREFILLING, State.RUNNING, State.COMPUTED)
        if key is not None:
            self.dropped.add(key)
            self.h.add(msgspec.structs.replace(self.h.records[key].spec, generation=key[1] + 1))

    def kv_ready(self) -> None:
        if key := self.pick(State.RECEIVING):
            self.h.deliver(*key)

    def migrated(self) -> None:
        key = self.pick(State.RECEIVING)
        if key is None:
            return
        one = self.h.records[key]
        output = reference(one.spec, self.h.config.max_length)[0][:-1][: self.rng.randint(1, 6)]
        tokens = [*one.spec.tokens, *output]
        effects = self.h.send(Grow(request_id=key[0], generation=key[1], num_blocks=-(-(len(tokens) - 1) // SIZE)))
        grown = [effect for effect in effects if isinstance(effect, Grown)]
        if grown:
            one.tokens, one.blocks, one.output = tokens, grown[0].blocks, list(output)
            self.h.write_kv(one, one.have, len(tokens) - 1)
            self.h.send(KvReady(request_id=key[0], generation=key[1], tokens=tokens, num_output=len(output)))

    def fetched(self) -> None:
        key = self.pick(State.FETCHING)
        if key is None:
            return
        one = self.h.records[key]
        found = min(self.rng.randint(0, 3), one.spec.fetch_blocks, (len(one.tokens) - 1) // SIZE)
        if found > one.have:
            self.h.write_kv(one, one.have, found * SIZE)
            self.h.send(Arriving(request_id=key[0], generation=key[1], num_blocks=found))
        self.h.send(Fetched(request_id=key[0], generation=key[1], num_blocks=found))

    def begin(self) -> None:
        if key := self.pick_job():
            self.h.begin(*key)

    def save(self) -> None:
        key = self.pick_job()
        if key is not None and (left := self.h.unsaved(key)):
            self.h.save(key, *self.rng.choice(left))

    def draw(self) -> None:
        key = self.pick_job()
        if key is not None and not self.h.jobs[key].finished:
            self.h.draw(key, self.rng.randint(1, 4))

    def over(self) -> None:
        """Well, with an error, without a word, or at last after it was cancelled."""
        key = self.pick_job()
        if key is None:
            return
        if self.rng.random() < 0.7:
            self.h.finish(key)
            return
        if not self.h.jobs[key].finished:
            self.failed.add(key)
        self.h.over(key, self.rng.choice([None, "the engine refused it"]))

    def strange(self) -> None:
        """Of generations and requests that are not here: nothing comes of it."""
        name = self.rng.choice(["nobody", *(key[0] for key in self.h.records)])
        before = self.h.core.holdings()
        for event in (
            Began(request_id=name, generation=99), Saved(request_id=name, generation=99, layer=0, first=0, count=1),
            Drew(request_id=name, generation=99, output=Output((1,))), JobOver(request_id=name, generation=99),
            KvReady(request_id=name, generation=99), Fetched(request_id=name, generation=99, num_blocks=1),
            Renew(request_id=name, generation=99),
        ):  # fmt: skip
            assert self.h.send(event) == []
        assert self.h.core.holdings() == before
        self.h.send(Pause(request_id=name, generation=1))

    def drop(self) -> None:
        if key := self.pick(*State):
            self.dropped.add(key)
            self.h.send(Drop(request_id=key[0], generation=key[1], reason="test"))

    def handed(self) -> None:
        if key := self.pick(State.COMPUTED):
            self.dropped.add(key)
            self.h.send(Handed(request_id=key[0], generation=key[1]))

    def time(self) -> None:
        self.h.now += self.rng.choice([1.0, 6.0])
        self.h.send(Tick())

    def pin(self) -> None:
        name = f"pin{self.rng.randint(0, 1)}"
        if self.rng.random() < 0.5:
            self.h.send(Unpin(name=name))
        elif hashes := self.h.core.cached_hashes():
            first = self.rng.randrange(len(hashes))
            self.h.send(Pin(name=name, hashes=hashes[first : first + 2], lease_s=4.0))

    def keep(self) -> None:
        name = f"keep{self.rng.randint(0, 1)}"
        if name in self.h.keeps:
            self.h.kept(name, is_saved=self.rng.random() < 0.7)
            return
        ended = [key for key, one in self.h.records.items() if one.finish is not None]
        if ended and self.h.config.shares_kv:
            self.num_kept += bool(self.h.keep(name, self.rng.choice(ended[-3:])).blocks)

    def act(self) -> None:
        actions = {
            self.add: 14, self.repeat: 3, self.newer_generation: 2, self.kv_ready: 6, self.migrated: 2, self.fetched: 6,
            self.begin: 5, self.save: 20, self.draw: 14, self.over: 7, self.strange: 1, self.drop: 3, self.handed: 4,
            self.time: 2, self.pin: 3, self.keep: 12,
        }  # fmt: skip
        self.rng.choices(list(actions), list(actions.values()))[0]()

    # --- and at the end -------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        h = self.h
        for _ in range(200):
            for key in list(h.jobs):
                h.finish(key)
            for key in self.keys(State.RECEIVING):
                h.deliver(*key)
            for key in self.keys(State.FETCHING):
                h.send(Fetched(request_id=key[0], generation=key[1], num_blocks=0))
            for key in self.keys(State.COMPUTED):
                self.dropped.add(key)
                h.send(Handed(request_id=key[0], generation=key[1]))
            for name in ("pin0", "pin1"):
                h.send(Unpin(name=name))
            for name in list(h.keeps):
                h.kept(name)
            if h.core.idle:
                break
        assert h.core.idle
        assert not h.core.holdings()
        assert h.core._pool.num_references == h.core.check() == 0
        for key, one in h.records.items():
            assert one.gone != (one.refused is not None), key
            if one.finish is not None or (one.gone and one.lost is None and key not in self.dropped | self.failed):
                assert (one.output, one.finish) == reference(one.spec, h.config.max_length)


def live(seed: int, num_actions: int = 120) -> Life:
    life = Life(seed)
    for _ in range(num_actions):
        life.act()
    life.come_to_rest()
    return life


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_no_block_leaks_whatever_order_things_come_in(first: int) -> None:
    lives = [live(seed) for seed in range(first, first + 20)]
    records = [one for life in lives for one in life.h.records.values()]
    seen = {
        "finished": sum(one.finish is not None for one in records),
        "computed": sum(one.computed is not None for one in records),
        "from cache": sum(one.have > 0 for one in records),
        "refused": sum(one.refused is not None for one in records),
        "lost": sum(one.lost is not None for one in records),
        "dropped": sum(len(life.dropped) for life in lives),
        "failed": sum(len(life.failed) for life in lives),
        "kept": sum(life.num_kept for life in lives),
    }
    assert min(seen.values()) >= 10, seen


@pytest.mark.slow
def test_many_long_lives() -> None:
    for seed in range(1000, 1300):
        live(seed, 400)
