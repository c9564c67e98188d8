"""The prefix directory: longest runs, epochs, gaps, bounds."""

from __future__ import annotations

import random

import pytest

from controlplane.core.directory import Directory, Match
from transfer.wire.messages import CacheEvents

H = [bytes([index]) * 32 for index in range(20)]


def directory(*names: str, size: int = 1000) -> Directory:
    made = Directory(size, 10.0)
    for name in names:
        made.join(name, 1)
    return made


def runs(made: Directory, hashes: list[bytes]) -> dict[str, int]:
    """Leading blocks of each holder, all of them in memory."""
    found = made.match(hashes)
    assert all((one.ssd, one.lead) == (0, one.blocks) for one in found.values())
    return {name: one.blocks for name, one in found.items()}


def stored(made: Directory, name: str, hashes: list[bytes], seq: int = 1, epoch: int = 1, **more: object) -> bool:
    return made.apply(name, CacheEvents(epoch=epoch, seq=seq, stored=tuple(hashes), **more), 0.0)  # type: ignore[arg-type]


def test_the_longest_run_without_a_gap_counts() -> None:
    made = directory("a", "b", "c", "d")
    stored(made, "a", H[:5])
    stored(made, "b", H[:2])
    stored(made, "c", H[1:9])
    stored(made, "d", [H[0], *H[2:6]])
    assert runs(made, H[:10]) == {"a": 5, "b": 2, "d": 1}
    assert list(runs(made, H[:10])) == ["a", "b", "d"]
    assert runs(made, H[:3]) == {"a": 3, "b": 2, "d": 1}
    assert runs(made, []) == {}
    assert runs(made, H[12:]) == {}


def test_removed_blocks_are_not_credited() -> None:
    made = directory("a")
    stored(made, "a", H[:5])
    made.apply("a", CacheEvents(epoch=1, seq=2, removed=(H[2], H[15])), 0.0)
    assert runs(made, H[:5]) == {"a": 2}


def test_a_restarted_engine_is_not_credited_for_its_older_life() -> None:
    """llm-d-router#2853, sglang#39822: epoch per instance life."""
    made = directory("a")
    stored(made, "a", H[:5])
    made.join("a", 2)
    assert runs(made, H[:5]) == {}
    stored(made, "a", H[:5], seq=2, epoch=1)  # the older life's last word, late
    assert runs(made, H[:5]) == {}
    stored(made, "a", H[:1], epoch=2)
    assert runs(made, H[:5]) == {"a": 1}


def test_a_gap_asks_for_a_snapshot_and_credits_nothing_until_then() -> None:
    made = directory("a")
    stored(made, "a", H[:5])
    assert stored(made, "a", H[5:6], seq=3)
    assert runs(made, H) == {}
    assert not stored(made, "a", H[6:7], seq=4), "asked already"
    assert made.apply("a", CacheEvents(epoch=1, seq=5, stored=(H[7],)), 11.0), "asked again after a while"
    assert not stored(made, "a", H[:3], seq=6, snapshot=True)
    assert runs(made, H) == {"a": 3}
    stored(made, "a", H[3:4], seq=7)
    assert runs(made, H) == {"a": 4}


def test_repeated_and_late_events_change_nothing() -> None:
    made = directory("a")
    stored(made, "a", H[:2], seq=1)
    made.apply("a", CacheEvents(epoch=1, seq=2, removed=(H[1],)), 0.0)
    assert not stored(made, "a", H[:2], seq=1)
    assert runs(made, H) == {"a": 1}
    stored(made, "a", H[:4], seq=9, snapshot=True)
    assert not stored(made, "a", H[:1], seq=5, snapshot=True)
    assert runs(made, H) == {"a": 4}


def test_the_size_is_bounded_and_the_least_recently_used_go_first() -> None:
    made = directory("a", "b", size=6)
    stored(made, "a", H[:4])
    runs(made, H[:4])
    stored(made, "b", H[10:13])
    assert len(made) == 6
    assert runs(made, H[:4]) == {"a": 3}, "the tail goes before the head, which the rest is useless without"
    assert runs(made, H[10:13]) == {"b": 3}
    made.drop("a")
    made.drop("b")
    assert len(made) == 0
    made.drop("b")


def test_slots_are_reused_by_other_instances() -> None:
    made = directory("a", "b")
    stored(made, "a", H[:3])
    stored(made, "b", H[:2])
    made.drop("a")
    made.join("c", 1)
    assert runs(made, H) == {"b": 2}
    stored(made, "c", H[:1])
    assert runs(made, H) == {"b": 2, "c": 1}
    assert not made.apply("nobody", CacheEvents(epoch=1, seq=1, stored=(H[0],)), 0.0)


def test_blocks_on_ssd_only_are_told_apart() -> None:
    made = directory("a", "b")
    stored(made, "a", H[:3], stored_ssd=(H[3], H[4]))
    stored(made, "b", H[1:6], stored_ssd=(H[0],))
    assert made.match(H[:6]) == {"a": Match(5, 2, 3), "b": Match(6, 1, 0)}
    assert made.match(H[:2]) == {"a": Match(2, 0, 2), "b": Match(2, 1, 0)}
    stored(made, "a", [H[3]], seq=2)  # read back into memory
    assert made.match(H[:6])["a"] == Match(5, 1, 4)
    made.apply("a", CacheEvents(epoch=1, seq=3, stored_ssd=(H[1],), removed=(H[4],)), 0.0)
    assert made.match(H[:6])["a"] == Match(4, 1, 1)
    stored(made, "a", H[:2], seq=4, snapshot=True, stored_ssd=(H[2],))
    assert made.match(H[:6])["a"] == Match(3, 1, 2)
    made.drop("a")
    made.join("c", 1)  # in its slot: nothing of the other's tiers may stick to it
    stored(made, "c", H[:4])
    assert made.match(H[:6])["c"] == Match(4, 0, 4)


@pytest.mark.parametrize("size", [1000, 14])
@pytest.mark.parametrize("seed", range(12))
def test_matches_are_those_of_a_plain_count(seed: int, size: int) -> None:
    """Random changes of tier, evictions, deaths and, where it is small, the bound: as each holder by itself tells."""
    rng = random.Random(seed)
    names = [f"i{index}" for index in range(9)]
    made = directory(*names, size=size)
    plain: dict[str, dict[bytes, bool]] = {name: {} for name in names}
    seqs = dict.fromkeys(names, 0)
    for _ in range(300):
        name = rng.choice(names)
        if rng.random() < 0.03:
            made.join(name, 1)
            plain[name], seqs[name] = {}, 0
        else:
            touched, snapshot = rng.sample(H, rng.randrange(1, 12)), rng.random() < 0.1
            first, second = sorted(rng.randrange(len(touched) + 1) for _ in range(2))
            memory, ssd, gone = touched[:first], touched[first:second], [] if snapshot else touched[second:]
            seqs[name] += 1
            events = CacheEvents(epoch=1, seq=seqs[name], stored=tuple(memory), stored_ssd=tuple(ssd),
                                 removed=tuple(gone), snapshot=snapshot)  # fmt: skip
            made.apply(name, events, 0.0)
            kept = {} if snapshot else {key: on_ssd for key, on_ssd in plain[name].items() if key not in gone}
            plain[name] = kept | dict.fromkeys(memory, False) | dict.fromkeys(ssd, True)
        prefix = H[: rng.randrange(20)]
        found = made.match(prefix)
        expected = {one: run for one in names if (run := leading(plain[one], prefix))}
        if size > len(H):
            assert {one: match.blocks for one, match in found.items()} == {k: len(run) for k, run in expected.items()}
        for one, match in found.items():
            run = expected[one][: match.blocks]
            assert match == Match(len(run), sum(run), run.index(True) if True in run else len(run))
        assert [one.blocks for one in found.values()] == sorted((one.blocks for one in found.values()), reverse=True)
        assert len(made) <= size
        assert all(tier and not tier & ~made._masks[key] for key, tier in made._ssd.items()), "tiers of nobody"


def leading(held: dict[bytes, bool], prefix: list[bytes]) -> list[bool]:
    """For each leading block that is held: whether on SSD only."""
    run = []
    for key in prefix:
        if key not in held:
            break
        run.append(held[key])
    return run
