"""The prefix directory: longest runs, epochs, gaps, bounds."""

from __future__ import annotations

from controlplane.core.directory import Directory
from transfer.wire.messages import CacheEvents

H = [bytes([index]) * 32 for index in range(20)]


def directory(*names: str, size: int = 1000) -> Directory:
    made = Directory(size, 10.0)
    for name in names:
        made.join(name, 1)
    return made


def stored(made: Directory, name: str, hashes: list[bytes], seq: int = 1, epoch: int = 1, **more: object) -> bool:
    return made.apply(name, CacheEvents(epoch=epoch, seq=seq, stored=tuple(hashes), **more), 0.0)  # type: ignore[arg-type]


def test_the_longest_run_without_a_gap_counts() -> None:
    made = directory("a", "b", "c", "d")
    stored(made, "a", H[:5])
    stored(made, "b", H[:2])
    stored(made, "c", H[1:9])
    stored(made, "d", [H[0], *H[2:6]])
    assert made.match(H[:10]) == {"a": 5, "b": 2, "d": 1}
    assert list(made.match(H[:10])) == ["a", "b", "d"]
    assert made.match(H[:3]) == {"a": 3, "b": 2, "d": 1}
    assert made.match([]) == {}
    assert made.match(H[12:]) == {}


def test_removed_blocks_are_not_credited() -> None:
    made = directory("a")
    stored(made, "a", H[:5])
    made.apply("a", CacheEvents(epoch=1, seq=2, removed=(H[2], H[15])), 0.0)
    assert made.match(H[:5]) == {"a": 2}


def test_a_restarted_engine_is_not_credited_for_its_older_life() -> None:
    """llm-d-router#2853, sglang#39822: epoch per instance life."""
    made = directory("a")
    stored(made, "a", H[:5])
    made.join("a", 2)
    assert made.match(H[:5]) == {}
    stored(made, "a", H[:5], seq=2, epoch=1)  # the older life's last word, late
    assert made.match(H[:5]) == {}
    stored(made, "a", H[:1], epoch=2)
    assert made.match(H[:5]) == {"a": 1}


def test_a_gap_asks_for_a_snapshot_and_credits_nothing_until_then() -> None:
    made = directory("a")
    stored(made, "a", H[:5])
    assert stored(made, "a", H[5:6], seq=3)
    assert made.match(H) == {}
    assert not stored(made, "a", H[6:7], seq=4), "asked already"
    assert made.apply("a", CacheEvents(epoch=1, seq=5, stored=(H[7],)), 11.0), "asked again after a while"
    assert not stored(made, "a", H[:3], seq=6, snapshot=True)
    assert made.match(H) == {"a": 3}
    stored(made, "a", H[3:4], seq=7)
    assert made.match(H) == {"a": 4}


def test_repeated_and_late_events_change_nothing() -> None:
    made = directory("a")
    stored(made, "a", H[:2], seq=1)
    made.apply("a", CacheEvents(epoch=1, seq=2, removed=(H[1],)), 0.0)
    assert not stored(made, "a", H[:2], seq=1)
    assert made.match(H) == {"a": 1}
    stored(made, "a", H[:4], seq=9, snapshot=True)
    assert not stored(made, "a", H[:1], seq=5, snapshot=True)
    assert made.match(H) == {"a": 4}


def test_the_size_is_bounded_and_the_least_recently_used_go_first() -> None:
    made = directory("a", "b", size=6)
    stored(made, "a", H[:4])
    made.match(H[:4])
    stored(made, "b", H[10:13])
    assert len(made) == 6
    assert made.match(H[:4]) == {"a": 3}, "the tail goes before the head, which the rest is useless without"
    assert made.match(H[10:13]) == {"b": 3}
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
    assert made.match(H) == {"b": 2}
    stored(made, "c", H[:1])
    assert made.match(H) == {"b": 2, "c": 1}
    assert not made.apply("nobody", CacheEvents(epoch=1, seq=1, stored=(H[0],)), 0.0)
