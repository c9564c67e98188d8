"""From runs of neighbouring blocks to the memory they are in: pieces to gather, scatter, copy and checksum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from transfer.kv.arena import KvArena, MappedArena
from transfer.kv.table import Run

COPY_BYTES = 128 << 10
"""At a time when what was copied is summed too, so that it is read back from the nearest cache."""
BARE_COPY_BYTES = 512 << 10
"""At a time otherwise: the fastest where it was measured; larger ones go past the cache and are a tenth slower."""

Halves = tuple[memoryview, memoryview]
"""K and V of every block of one layer."""


def halves(arena: KvArena | MappedArena, layer: int) -> Halves:
    return arena.views(layer, 0, arena.num_blocks)


def pieces(both: Halves, runs: Sequence[Run], slab_bytes: int) -> list[memoryview]:
    """The memory of `runs` in the order it travels: K of all of them, then V of all of them."""
    spans = [(block * slab_bytes, (block + count) * slab_bytes) for block, count in runs]
    k, v = both
    return [k[start:stop] for start, stop in spans] + [v[start:stop] for start, stop in spans]


def checksum(parts: Iterable[memoryview]) -> int:
    """XXH3-64 of the parts, one after the other."""
    digest = xxhash.xxh3_64()
    update = digest.update
    for part in parts:
        update(part)
    return digest.intdigest()


def copy_runs(
    source: Halves, source_runs: Sequence[Run], target: Halves, runs: Sequence[Run], slab_bytes: int, *, summed: bool
) -> int | None:
    """Copy equally many blocks, in order, from runs of one arena to runs of another.

    Returns the checksum of what was copied, read back piece by piece while it is in the cache; None unless `summed`.
    """
    digest = xxhash.xxh3_64() if summed else None
    spans = _spans(source_runs, runs, slab_bytes, COPY_BYTES if summed else BARE_COPY_BYTES)
    for from_half, to_half in zip(source, target, strict=True):
        for at, start, size in spans:
            to_half[start : start + size] = from_half[at : at + size]
            if digest is not None:
                digest.update(to_half[start : start + size])
    return None if digest is None else digest.intdigest()


def _spans(source_runs: Sequence[Run], runs: Sequence[Run], slab_bytes: int, most: int) -> list[tuple[int, int, int]]:
    """(source offset, target offset, bytes) of one half: as few copies as both sides' runs allow, up to `most` each."""
    spans = []
    following = iter(source_runs)
    have = at = 0
    for block, count in runs:
        start, left = block * slab_bytes, count * slab_bytes
        while left:
            if not have:
                first, length = next(following)
                at, have = first * slab_bytes, length * slab_bytes
            size = min(have, left, most)
            spans.append((at, start, size))
            start, at, have, left = start + size, at + size, have - size, left - size
    return spans
