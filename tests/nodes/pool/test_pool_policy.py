"""The eviction policies: victims, determinism, bounds, what is learnt, and what is worth a write to SSD."""

from __future__ import annotations

import random

import pytest

from nodes.pool import reuse
from nodes.pool.policy import DEFAULT_POLICY, POLICIES, EvictionPolicy, LruPolicy, make_policy
from nodes.pool.policy_reuse import ReusePolicy
from nodes.pool.reuse import ReuseModel
from transfer.errors import InvalidValue


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(64, request.param)


def drive(policy: EvictionPolicy, seed: int, calls: int, capacity: int) -> list[bytes]:
    """Random stores, hits and removals as a pool makes them; checks the victims against a plain set throughout."""
    rng, held, evicted = random.Random(seed), set[bytes](), list[bytes]()
    for _ in range(calls):
        h, action = key(rng.randrange(3 * capacity)), rng.random()
        if action < 0.6:
            if len(held) == capacity and h not in held:
                evicted.append(next(policy.victims()))
                policy.removed(evicted[-1])
                held.remove(evicted[-1])
            policy.stored(h, None, 0.0)
            held.add(h)
        elif action < 0.9:
            policy.hit(h, 0.0)
        else:
            policy.removed(h)
            held.discard(h)
        if rng.random() < 0.05:
            victims = list(policy.victims())
            assert len(victims) == len(held)
            assert set(victims) == held
    return evicted


@pytest.mark.parametrize("seed", range(5))
def test_victims_are_what_is_stored_each_once_and_nothing_removed(policy: EvictionPolicy, seed: int) -> None:
    assert drive(policy, seed, 2000, 64)


def test_equal_calls_give_equal_victims() -> None:
    runs = [drive(make_policy(64), 7, 5000, 64) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != drive(make_policy(64), 8, 5000, 64)


def test_unknown_content_may_be_hit_and_removed(policy: EvictionPolicy) -> None:
    policy.hit(key(1), 0.0)
    policy.removed(key(1))
    policy.removed(key(1))
    assert list(policy.victims()) == []


def test_lru_lists_the_least_recently_used_first() -> None:
    policy = LruPolicy()
    for number in range(3):
        policy.stored(key(number), None, 0.0)
    policy.hit(key(0), 1.0)
    assert list(policy.victims()) == [key(1), key(2), key(0)]


def test_the_default_ranks_as_lru_until_it_has_learnt() -> None:
    policy = make_policy(64)
    for number in range(60):
        policy.stored(key(number), None, 0.0)
    assert list(policy.victims()) == [key(number) for number in range(60)]


def test_content_used_again_and_again_outlives_a_scan() -> None:
    policy, held = make_policy(256), dict[bytes, None]()
    popular = [key(number) for number in range(20)]

    def ask(h: bytes) -> None:
        if h in held:
            policy.hit(h, 0.0)
            return
        if len(held) == 256:
            victim = next(policy.victims())
            policy.removed(victim)
            del held[victim]
        policy.stored(h, None, 0.0)
        held[h] = None

    for number in range(8000):
        ask(key(1000 + number))
        if number % 12 == 0:
            ask(popular[number // 12 % len(popular)])
    assert sum(h in held for h in popular) == len(popular)
    assert set(list(policy.victims())[:200]).isdisjoint(popular)


def test_ssd_wants_what_was_used_twice_even_before_its_eviction() -> None:
    policy = make_policy(64)
    policy.stored(key(1), None, 0.0)
    assert not policy.wanted(key(1))
    policy.hit(key(1), 0.0)
    assert not policy.wanted(key(1)), "a use at once after it was stored is the same use"
    policy.removed(key(1))
    policy.stored(key(1), None, 0.0)
    assert policy.wanted(key(1))
    policy.removed(key(1))
    assert policy.wanted(key(1))
    assert not policy.wanted(key(2))


def test_ssd_wants_what_two_requests_used_however_close_together() -> None:
    """Where nothing new is stored an epoch never ends: what is used again and again would never be kept."""
    policy = make_policy(64 * 100)
    for number in range(4):
        policy.stored(key(number), None, 0.0, "first")
        policy.hit(key(number), 0.0, "first")
        assert not policy.wanted(key(number)), "one request puts and gets: one use"
    policy.hit(key(0), 0.0, "second")
    policy.hit(key(1), 0.0)
    assert [policy.wanted(key(number)) for number in range(4)] == [True, False, False, False]
    policy.hit(key(0), 0.0, "first")
    assert policy.wanted(key(0))


def test_who_used_a_block_is_known_in_later_epochs() -> None:
    policy = ReusePolicy(64)  # an epoch a block
    policy.stored(key(1), None, 0.0, "first")
    policy.hit(key(1), 0.0, "second")
    policy.stored(key(2), None, 0.0)
    policy.hit(key(1), 0.0, "second")
    assert policy._entries[key(1)].again
    assert policy._entries[key(1)].user == "first"


def test_the_ranking_counts_uses_by_epoch_whoever_they_are_of() -> None:
    plain, told = make_policy(6400), make_policy(6400)
    for number in range(300):
        for policy, user in ((plain, None), (told, f"r{number}")):
            policy.stored(key(number), None, 0.0, user)
            policy.hit(key(number // 2), 0.0, user)
    assert list(plain.victims()) == list(told.victims())


def test_memory_is_bounded_by_what_is_stored_and_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MAX_FOLLOWED", 500)
    policy = ReusePolicy(100)
    for number in range(20_000):
        if number >= 100:
            policy.removed(key(number - 100))
        policy.stored(key(number), None, 0.0)
    assert len(policy._entries) == 100
    assert sum(map(len, policy._groups.values())) == 100
    assert len(policy._groups) <= 110
    assert 100 < policy._model.num_followed <= 500
    assert sum(policy._model._waiting.values()) == policy._model.num_followed


def test_the_model_learns_when_content_comes_back() -> None:
    model = ReuseModel(1000, 2)
    for number in range(6000):  # each is used again 20 epochs later, once
        epoch = number // 15
        model.use(key(number), 0, epoch)
        if number >= 300:
            model.use(key(number - 300), 1, epoch)
    model.fit(1.0, 400)
    assert model.worth(0, 18) > 2 * model.worth(0, 0), "about to come back"
    assert model.worth(0, 18) > 4 * model.worth(0, 60), "has not come back when it should have"
    assert all(model.worth(1, age) >= model.worth(0, age) for age in range(200)), "heads never go before tails"


def test_what_was_learnt_fades() -> None:
    model = ReuseModel(1000, 1)
    for number in range(3000):
        model.use(key(number % 100), 0, number // 10)
    model.fit(0.0, 300)
    learnt = model.worth(0, 10)
    model.fit(1.0, 300)
    assert model.worth(0, 10) < learnt / 2


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidValue, match="no eviction policy 'fifo'; take one of reuse, lru"):
        make_policy(10, "fifo")
    assert DEFAULT_POLICY in POLICIES
