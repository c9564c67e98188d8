"""Anything in any order: random work, small arenas, drops, pauses, migrations, late engines. The harness checks that
every KV read was written and is right, every output equals the reference, and every block comes back."""

from __future__ import annotations

from random import Random

import msgspec
from batching_harness import Harness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from requests_kit import PREFIXES, ROOTS, config, params, reference, spec

from nodes.core.events import (
    Drop,
    Fetched,
    Gone,
    Grow,
    Grown,
    Handed,
    KvReady,
    NotAdmitted,
    Pause,
    Pin,
    Renew,
    Resume,
    Tick,
    Unpin,
    Work,
)
from nodes.core.sequence import State
from transfer.terms import FinishReason

prompts = st.builds(
    lambda prefix, tail: [*prefix, *tail],
    st.sampled_from(PREFIXES),
    st.lists(st.integers(0, 6), min_size=1, max_size=14),
)
samplings = st.builds(
    params,
    max_tokens=st.integers(1, 14),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,), (3, 6)]),
)
picks = st.integers(0, 1_000)


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 18),
        budget=st.integers(3, 12),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        prefix_cache=st.sampled_from([True, True, False]),
        max_context=st.sampled_from([20, 40]),
        max_running=st.integers(1, 3),
    )
    def build(self, num_blocks, budget, watermark, prefix_cache, max_context, max_running) -> None:
        self.h = Harness(
            config(
                num_blocks=num_blocks, token_budget=budget, watermark=watermark, prefix_cache=prefix_cache,
                max_context=max_context, max_running=max_running, max_waiting=3,
            )
        )  # fmt: skip
        self.num_added = self.num_failed = self.num_undone = 0
        self.dropped: set[tuple[str, int]] = set()
        self.lost: set[tuple[str, int]] = set()

    # --- who is where ---

    def keys(self, *states: State) -> list[tuple[str, int]]:
        return [key for key in self.h.records if self.h.core.state_of(*key) in states]

    def pick(self, number: int, *states: State) -> tuple[str, int] | None:
        keys = self.keys(*states)
        return keys[number % len(keys)] if keys else None

    # --- requests come ---

    @rule(
        prompt=prompts, sampling=samplings, work=st.sampled_from(list(Work)), priority=st.integers(0, 1),
        root=st.sampled_from(ROOTS), fetch=st.integers(0, 4), resumed=st.integers(0, 5),
    )  # fmt: skip
    def add(self, prompt, sampling, work, priority, root, fetch, resumed) -> None:
        self.num_added += 1
        fetch = 0 if work is Work.RECEIVE else fetch
        one = spec(f"s{self.num_added}", prompt, work, priority=priority, root=root, fetch_blocks=fetch)
        if work is not Work.PREFILL:
            one = msgspec.structs.replace(one, sampling=sampling)
            if len(prompt) < self.h.config.max_length:
                output = reference(one, self.h.config.max_length)[0][:-1][:resumed]
                one = msgspec.structs.replace(one, tokens=prompt + output, num_output=len(output))
        self.h.add(one)

    @rule(number=picks)
    def repeat_add(self, number: int) -> None:
        key = self.pick(number, *[state for state in State if state is not State.LEAVING])
        if key is not None:
            one = self.h.record(*key)
            admitted, blocks, have = one.admitted, one.blocks, one.have
            self.h.add(one.spec)
            assert one.admitted == admitted + (admitted > 0)
            assert have == one.have or self.h.core.load(0.0).num_preemptions
            one.admitted, one.blocks, one.have = admitted, blocks, have

    @rule(number=picks, work=st.sampled_from([Work.LOCAL, Work.RECEIVE]))
    def newer_generation(self, number: int, work: Work) -> None:
        key = self.pick(number, State.RUNNING, State.RECEIVING, State.PREFILLING, State.WAITING, State.PAUSED)
        if key is None:
            return
        old = self.h.record(*key)
        if old.spec.sampling is None:
            return
        self.dropped.add(key)
        self.h.add(
            spec(
                key[0], list(old.tokens), work, generation=key[1] + 1, num_output=old.num_output, root=old.spec.root,
                sampling=old.spec.sampling,
            )
        )  # fmt: skip

    # --- KV comes ---

    @rule(number=picks)
    def kv_ready(self, number: int) -> None:
        if key := self.pick(number, State.RECEIVING):
            self.h.deliver_kv(*key)

    @rule(number=picks, more=st.integers(1, 9))
    def migrated(self, number: int, more: int) -> None:
        """The source generated on while the reservation was made: newer tokens come, maybe more blocks."""
        key = self.pick(number, State.RECEIVING)
        if key is None:
            return
        one = self.h.record(*key)
        output = reference(one.spec, self.h.config.max_length)[0][:-1][: one.num_output + more]
        tokens = one.tokens[: len(one.tokens) - one.num_output] + output
        needed = -(-(len(tokens) - 1) // self.h.size)
        effects = self.h.send(Grow(request_id=key[0], generation=key[1], num_blocks=needed))
        grown = [effect for effect in effects if isinstance(effect, Grown)]
        if not grown:
            assert one.lost
            self.lost.add(key)
            return
        one.tokens = tokens
        self.h.write_kv(one, grown[0].blocks, one.have, tokens)
        self.h.send(KvReady(request_id=key[0], generation=key[1], tokens=tokens, num_output=len(output)))

    @rule(number=picks, found=st.integers(0, 4))
    def fetched(self, number: int, found: int) -> None:
        key = self.pick(number, State.FETCHING)
        if key is None:
            return
        one = self.h.record(*key)
        found = min(found, one.spec.fetch_blocks, (len(one.tokens) - 1) // self.h.size)
        one.fetched = max(0, found - one.have)
        self.h.write_kv(one, one.blocks, one.have, one.tokens[: max(found, one.have) * self.h.size + 1])
        self.h.send(Fetched(request_id=key[0], generation=key[1], num_blocks=found))

    def arriving(self) -> list[tuple[str, int]]:
        return [key for key in self.keys(State.PREFILLING) if self.h.record(*key).arriving]

    @rule(number=picks, found=st.integers(0, 4))
    def fetch_begins(self, number: int, found: int) -> None:
        if key := self.pick(number, State.FETCHING):
            self.h.arriving(key[0], found, key[1])

    @rule(number=picks)
    def last_layer_lands(self, number: int) -> None:
        if keys := self.arriving():
            one = self.h.record(*keys[number % len(keys)])
            if not one.fetch_failed:
                self.h.land(one)

    @rule(number=picks)
    def fetch_succeeds(self, number: int) -> None:
        """Also after a step has proved it: the core is told late, or twice."""
        keys = [key for key in self.keys(State.PREFILLING, State.COMPUTED) if self.h.record(*key).landed]
        if keys:
            self.h.fetch_ended(self.h.record(*keys[number % len(keys)]))

    @rule(number=picks, left=st.integers(0, 2))
    def fetch_fails(self, number: int, left: int) -> None:
        keys = [key for key in self.arriving() if not self.h.record(*key).landed]
        if keys:
            one = self.h.record(*keys[number % len(keys)])
            if not one.fetch_failed:
                self.h.fetch_ended(one, min(left, one.arriving - 1))
                self.num_failed += one.fetch_failed

    @precondition(lambda self: self.h.plan is not None)
    @rule(number=picks)
    def gate_is_late(self, number: int) -> None:
        """A step gives up before its fetch has: the sequence waits for the fetch's end again."""
        if waited_for := self.h.waited_for():
            one = waited_for[number % len(waited_for)]
            failed = [other for other in waited_for if other is one or other.fetch_failed]
            was = [(other, other.fetch_failed) for other in failed]
            self.h.abandon_step(failed)
            for other, had_failed in was:
                state = self.h.core.state_of(other.spec.request_id, other.spec.generation)
                assert state is (State.PREFILLING if had_failed else State.FETCHING)
            self.num_undone += 1

    # --- steps ---

    @precondition(lambda self: self.h.plan is None)
    @rule()
    def begin_step(self) -> None:
        self.h.begin_step()

    @precondition(lambda self: self.h.plan is not None)
    @rule()
    def end_step(self) -> None:
        self.h.end_step()

    @precondition(lambda self: self.h.plan is None)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.h.step()

    # --- pause and resume ---

    @rule(number=picks)
    def pause(self, number: int) -> None:
        if key := self.pick(number, State.RUNNING, State.PREFILLING, State.PAUSED):
            self.h.send(Pause(request_id=key[0], generation=key[1]))

    @rule(number=picks)
    def resume(self, number: int) -> None:
        if key := self.pick(number, State.PAUSED):
            self.h.record(*key).paused = False
            self.h.send(Resume(request_id=key[0], generation=key[1]))

    # --- requests go ---

    @rule(number=picks)
    def handed(self, number: int) -> None:
        if key := self.pick(number, State.COMPUTED, State.PAUSED):
            self.dropped.add(key)
            self.h.send(Handed(request_id=key[0], generation=key[1]))

    @rule(number=picks)
    def drop(self, number: int) -> None:
        if key := self.pick(number, *[state for state in State if state is not State.LEAVING]):
            self.dropped.add(key)
            self.h.send(Drop(request_id=key[0], generation=key[1], reason="test"))

    @rule(number=picks)
    def renew(self, number: int) -> None:
        if key := self.pick(number, State.RECEIVING, State.FETCHING, State.COMPUTED):
            self.h.send(Renew(request_id=key[0], generation=key[1]))

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.h.now += seconds
        for effect in self.h.send(Tick()):
            if isinstance(effect, Gone):
                assert effect.lost
                self.lost.add((effect.request_id, effect.generation))

    @rule(number=picks, count=st.integers(1, 3))
    def pin(self, number: int, count: int) -> None:
        hashes = self.h.core.cached_hashes()
        if hashes:
            first = number % len(hashes)
            self.h.send(Pin(name=f"pin{number % 2}", hashes=hashes[first : first + count], lease_s=4.0))

    @rule(number=picks)
    def unpin(self, number: int) -> None:
        self.h.send(Unpin(name=f"pin{number % 2}"))

    # --- what always holds; the harness checks the rest with every event ---

    @invariant()
    def nobody_ends_twice(self) -> None:
        for one in getattr(self, "h", Harness()).records.values():
            assert one.refused + one.gone <= 1
            assert one.admitted <= 1

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        h = self.h
        for _ in range(300):
            if h.plan is not None:
                h.end_step()
            for key in self.keys(State.PAUSED):
                h.record(*key).paused = False
                h.send(Resume(request_id=key[0], generation=key[1]))
            for key in self.keys(State.RECEIVING):
                h.deliver_kv(*key)
            for key in self.keys(State.FETCHING):
                h.send(Fetched(request_id=key[0], generation=key[1], num_blocks=0))
            for key in self.keys(State.COMPUTED):
                self.dropped.add(key)
                h.send(Handed(request_id=key[0], generation=key[1]))
            for name in ("pin0", "pin1"):
                h.send(Unpin(name=name))
            if h.step() is None and h.core.idle:
                break
        h.assert_at_rest()
        self.nobody_ends_twice()
        for key, one in h.records.items():
            # Told only now where an older generation of it was in the step that ran when its lease was over.
            lapsed = one.lost is not None and one.lost.startswith("lease over")
            if not one.refused and not lapsed and key not in self.dropped | self.lost:
                self.assert_right(one)

    def assert_right(self, one) -> None:
        output, finish = reference(one.spec, self.h.config.max_length)
        assert (one.output, one.finish) == (output, finish)
        assert isinstance(one.finish, FinishReason)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_refused_request_leaves_nothing_behind() -> None:
    h = Harness(config(num_blocks=3, max_context=12))
    h.add(spec("a", [1] * 9, sampling=params(2)))
    assert any(isinstance(effect, NotAdmitted) for effect in h.add(spec("b", [2] * 5)))
    h.run()
    h.assert_at_rest()


def random_run(seed: int, num_actions: int) -> AnyOrder:
    """A long and crowded life, which the state machine above (short, and shrunk when it fails) seldom reaches."""
    rng = Random(seed)
    machine = AnyOrder()
    machine.build(
        num_blocks=rng.randint(3, 18), budget=rng.randint(4, 12), watermark=rng.choice([0.0, 0.1]),
        prefix_cache=rng.random() < 0.8, max_context=rng.choice([20, 40]), max_running=4,
    )  # fmt: skip
    machine.h.config.checked()
    for _ in range(num_actions):
        number, action = rng.randrange(1000), rng.random()
        if action < 0.14:
            sampling = params(
                rng.randint(1, 24), min_tokens=rng.randint(0, 4), ignore_eos=rng.random() < 0.8,
                stop_token_ids=rng.choice([(), (), (3,)]),
            )  # fmt: skip
            prompt = [*rng.choice(PREFIXES), *rng.choices(range(7), k=rng.randint(1, 6))]
            machine.add(
                prompt, sampling, rng.choice(list(Work)), rng.randint(0, 1), rng.choice(ROOTS), rng.randint(0, 3),
                rng.randint(0, 3),
            )  # fmt: skip
        elif action < 0.22:
            machine.fetch_begins(number, rng.randint(1, 4))
        elif action < 0.27:
            rng.choice([machine.last_layer_lands, machine.fetch_succeeds])(number)
        elif action < 0.32:
            machine.fetch_fails(number, rng.randint(0, 2))
        elif action < 0.60:
            if machine.h.plan is None:
                machine.begin_step()
            elif rng.random() < 0.6 or not machine.h.waited_for():
                machine.end_step()
            else:
                machine.gate_is_late(number)
        elif action < 0.68:
            machine.kv_ready(number)
        elif action < 0.72:
            machine.migrated(number, rng.randint(1, 9))
        elif action < 0.78:
            rng.choice([machine.fetched, machine.pin])(number, rng.randint(1, 4))
        elif action < 0.96:
            rng.choice([machine.handed, machine.handed, machine.resume, machine.pause, machine.unpin])(number)
        elif action < 0.985:
            machine.time_passes(rng.choice([1.0, 6.0]))
        else:
            rng.choice([machine.drop, machine.repeat_add, machine.renew])(number)
            machine.newer_generation(number, Work.LOCAL)
    machine.teardown()
    return machine


def test_long_random_lives_end_right_and_reach_every_corner() -> None:
    machines = [random_run(seed, 400) for seed in range(80)]
    records = [one for machine in machines for one in machine.h.records.values()]
    seen = {
        "preempted": sum(machine.h.core.load(0.0).num_preemptions for machine in machines),
        "finished": sum(one.finish is not None for one in records),
        "computed": sum(one.computed is not None for one in records),
        "from cache": sum(one.have > 0 for one in records),
        "fetched": sum(one.fetched > 0 for one in records),
        "fetched where it generates": sum(one.fetched > 0 and one.num_output > 0 for one in records),
        "fetched beside compute": sum(one.landed for one in records),
        "fetch failed in a step": sum(machine.num_failed for machine in machines),
        "gate late": sum(machine.num_undone for machine in machines),
        "refused": sum(one.refused for one in records),
        "lost": sum(one.lost is not None for one in records),
        "dropped": sum(len(machine.dropped) for machine in machines),
    }
    assert min(seen.values()) >= 20, seen
