"""Which pool a prefix is written to: shares by weight, little movement, and rest for one that refuses."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from roles_harness import Fleet, prompt, virtual

from nodes.roles.writer import KNOWN_FOR_S, MAX_REST_S, REST_S, _pool, _rendezvous
from transfer.errors import Refused
from transfer.kv.port import KvOffer
from transfer.wire.messages import PoolMap, PoolPeer

PREFIXES = [hashlib.sha256(bytes([index % 256, index // 256])).digest() for index in range(6000)]


def peer(name: str, weight: float = 1.0) -> PoolPeer:
    return PoolPeer(instance_id=name, epoch=1, data_endpoint=f"inproc://{name}", host_id=name, weight=weight)


def chosen(*peers: PoolPeer) -> list[str]:
    pools = tuple(_pool(one) for one in peers)
    return [_rendezvous(prefix, pools).instance_id for prefix in PREFIXES]


OLD = [peer("k0"), peer("k1"), peer("k2")]


@pytest.mark.parametrize("weight", [0.1, 0.55, 1.0])
def test_a_new_node_among_three_old_ones_gets_its_weights_share(weight: float) -> None:
    """Mooncake#3688: an empty new node attracts every write."""
    after = Counter(chosen(*OLD, peer("new", weight)))
    expected = weight / (3.0 + weight)
    assert after["new"] / len(PREFIXES) == pytest.approx(expected, rel=0.15)
    for one in OLD:
        assert after[one.instance_id] / len(PREFIXES) == pytest.approx((1.0 - expected) / 3, rel=0.1)


def test_only_the_share_of_what_changed_moves() -> None:
    steps = [chosen(*OLD), *(chosen(*OLD, peer("new", weight)) for weight in (0.1, 0.4, 0.7, 1.0))]
    for before, after in itertools.pairwise(steps):
        assert all(now in (was, "new") for was, now in zip(before, after, strict=True))
    gone = chosen(*OLD[:2], peer("new"))
    assert all(now == was for was, now in zip(steps[-1], gone, strict=True) if was != "k2")


def test_equal_weights_are_shared_evenly_whatever_their_size() -> None:
    assert chosen(*OLD) == chosen(*(peer(one.instance_id, 0.3) for one in OLD))
    shares = Counter(chosen(*OLD))
    assert all(count / len(PREFIXES) == pytest.approx(1 / 3, rel=0.1) for count in shares.values())


def refuse(fleet: Fleet, name: str) -> list[float]:
    """From now on the pool takes nothing; the times at which it was asked."""
    asked: list[float] = []

    def kv_offered(offer: KvOffer) -> Sequence[int]:
        asked.append(asyncio.get_running_loop().time())
        raise Refused("every block is pinned")

    fleet.pool(name).kv_offered = kv_offered  # type: ignore[method-assign]
    return asked


async def serve(fleet: Fleet, seconds: float, first_seed: int) -> None:
    """A request with a prompt of its own twice a second."""
    for number in range(int(2 * seconds)):
        name, tokens = f"r{first_seed + number}", prompt(40, seed=first_seed + number)
        await fleet.control.hand_off(name, tokens, max_tokens=1)
        await fleet.control.text(name, tokens, 1)
        await asyncio.sleep(0.5)


@virtual
async def test_a_full_pool_is_left_alone_for_longer_and_longer_and_the_other_takes_its_prefixes() -> None:
    async with Fleet("p0", "d0", "k0", "k1") as fleet:
        asked = refuse(fleet, "k0")
        await serve(fleet, 60.0, 1000)
        writer = fleet.shell("p0").writer
        assert 6 <= len(asked) <= 12, "both engines write; each asks again after 2, 4, 8, 16 and 32 s at the earliest"
        assert writer.num_failed <= 6
        assert fleet.pool("k1").store.cached_blocks > 100
        assert writer.num_dropped == 0


@virtual
async def test_a_pool_that_takes_again_gets_its_prefixes_again() -> None:
    async with Fleet("p0", "d0", "k0") as fleet:
        asked = refuse(fleet, "k0")
        await serve(fleet, 3.0, 2000)
        assert asked
        writer = fleet.shell("p0").writer
        assert writer.num_dropped > 0, "where no other pool is, what comes meanwhile is left out"
        del fleet.pool("k0").kv_offered
        await asyncio.sleep(3 * REST_S)
        await serve(fleet, 2.0, 3000)
        assert fleet.pool("k0").store.cached_blocks > 0
        assert writer._rests == {}


@virtual
async def test_a_new_life_of_a_pool_is_asked_at_once() -> None:
    async with Fleet("p0", "d0", "k0") as fleet:
        refuse(fleet, "k0")
        await serve(fleet, 10.0, 4000)
        writer = fleet.shell("p0").writer
        assert writer._rests["k0"].next_s > REST_S
        fleet.crash("k0")
        fleet._supervisor.spawn("k0/2", lambda: fleet._make("k0"))
        epoch = writer._pools[0].peer.epoch
        await fleet.control.until(lambda: writer._pools[0].peer.epoch != epoch, "the new life in the pool map")
        assert writer._rests == {}
        await serve(fleet, 2.0, 5000)
        assert fleet.pool("k0").store.cached_blocks > 0


@virtual
async def test_other_weights_forget_nothing_that_was_learned_of_the_pools() -> None:
    async with Fleet("p0", "d0", "k0", "k1") as fleet:
        writer = fleet.shell("p0").writer
        await serve(fleet, 5.0, 6000)
        now = asyncio.get_running_loop().time()
        known = writer._known.count(now)
        assert known > 0
        writer._refused(writer._pools[0].peer, asyncio.get_running_loop().time())
        message = PoolMap(pools=tuple(
            PoolPeer(instance_id=one.peer.instance_id, epoch=one.peer.epoch, data_endpoint=one.peer.data_endpoint,
                     host_id=one.peer.host_id, weight=0.5) for one in writer._pools))  # fmt: skip
        writer.set_pools(message)
        assert writer._known.count(now) == known
        assert list(writer._rests) == ["k0"]
        for _ in range(20):
            writer._refused(writer._pools[0].peer, 0.0)
        assert writer._rests["k0"].next_s == writer._rests["k0"].until_s == MAX_REST_S


@virtual
async def test_what_the_pool_had_long_ago_is_forgotten() -> None:
    """Memory is that of the last minute's blocks, not of all there ever were."""
    async with Fleet("p0", "d0", "k0") as fleet:
        await serve(fleet, 10.0, 5000)
        known = fleet.shell("p0").writer._known
        now = asyncio.get_running_loop().time
        assert known.count(now()) > 20
        await asyncio.sleep(KNOWN_FOR_S + 1.0)
        await serve(fleet, 0.5, 6000)
        await asyncio.sleep(1.0)
        assert 0 < known.count(now()) <= 10
