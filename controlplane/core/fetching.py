"""How much of a prefix to fetch from a pool while the rest is computed: whichever split is done first, by prediction.

Pure arithmetic. An instance where nothing decodes fetches layer by layer beside its first step, so the two overlap
(Mooncake, FAST'25, section 5.2, read both ways: KV that arrives in order of layers is waited for one layer at a time).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from controlplane.core.config import CoreConfig
from controlplane.core.directory import Match
from controlplane.core.instance import Instance

SCALE_WEIGHT = 0.2
MIN_SCALE, MAX_SCALE = 0.1, 100.0
PRECISION = 64
"""To which part (1/n) of what could be fetched the balance is found."""
FEW_LEFT = 4, 8, 16, 32
"""Blocks that may take no longer to compute than one token."""


class Path:
    """From one pool to one instance, for one request. link: bytes a second between them; have: blocks there already."""

    __slots__ = ("_block_bytes", "_config", "_link", "_match", "_ssd_link", "block_size", "have", "pool")

    def __init__(
        self, config: CoreConfig, pool: Instance, match: Match, have: int, block_size: int, token_bytes: float,
        link: float,
    ) -> None:  # fmt: skip
        """token_bytes: of the KV of one token, in all layers."""
        self._config, self._match, self._link = config, match, link
        self._block_bytes, self._ssd_link = block_size * token_bytes, min(link, config.ssd_bytes_per_s)
        self.pool, self.have, self.block_size = pool, have, block_size

    @property
    def lead(self) -> int:
        """Blocks before the first that is on SSD only."""
        return self._match.lead

    def fetch(self, blocks: int) -> Fetch:
        """The fetch of leading `blocks`, which are more than it has."""
        ssd = min(self._match.ssd, max(0, blocks - max(self.have, self._match.lead)))
        fetch_s = self.seconds(blocks - self.have - ssd, ssd) * self.pool.fetch_scale
        return Fetch(self, blocks, ssd, fetch_s)

    def seconds(self, num_memory: int, num_ssd: int) -> float:
        """Declared seconds to fetch so many blocks of each tier, before what was measured corrects it."""
        size = self._block_bytes
        return self._config.fetch_latency_s + num_memory * size / self._link + num_ssd * size / self._ssd_link


class Fetch(NamedTuple):
    """Leading `blocks` come from the pool, but for those the instance has.

    ssd_blocks: how many of them are read from SSD first, at most. fetch_s: predicted, from start to end.
    """

    path: Path
    blocks: int
    ssd_blocks: int
    fetch_s: float

    @property
    def pool(self) -> Instance:
        return self.path.pool

    @property
    def new_blocks(self) -> int:
        return self.blocks - self.path.have


class Overlap:
    """A fetch beside the computing of what comes after it, on one instance.

    num_tokens: to be made in all. budget: most tokens of one step; the fetch overlaps the first step, unless others
    decode in it (beside False), and queue_s of waiting for compute before that.
    """

    __slots__ = (
        "_block_size", "_budget", "_compute_s", "_latency_s", "_num_layers", "_num_tokens", "_queue_s", "beside",
    )  # fmt: skip

    def __init__(
        self, compute_s: Callable[[int, int], float], num_tokens: int, block_size: int, budget: int, num_layers: int,
        latency_s: float, queue_s: float = 0.0, *, beside: bool = True,
    ) -> None:  # fmt: skip
        """compute_s(num_new, num_cached): predicted seconds."""
        self._compute_s, self._num_tokens, self._block_size = compute_s, num_tokens, block_size
        self._budget, self._num_layers = budget or num_tokens, num_layers
        self._latency_s, self._queue_s, self.beside = latency_s, queue_s, beside

    @property
    def one_step(self) -> int:
        """The fewest blocks after which what is left is computed in one step."""
        return -(-max(0, self._num_tokens - self._budget) // self._block_size)

    def hides(self, fetch: Fetch) -> bool:
        """Whether the queue and the first step take as long as the fetch beside them."""
        return fetch.fetch_s - self._latency_s - self._queue_s <= self._first_s(fetch.blocks)

    def total_s(self, fetch: Fetch) -> float:
        """From the end of the queue until all tokens have KV: the longer of both and one layer of the shorter."""
        cached, layers = fetch.blocks * self._block_size, self._num_layers
        left, fetch_s = self._num_tokens - cached, max(0.0, fetch.fetch_s - self._queue_s)
        if left <= 0:
            return fetch_s
        compute_s, first_s = self._compute_s(left, cached), self._first_s(fetch.blocks)
        latency_s = min(self._latency_s, fetch_s)
        begun_s = latency_s + (fetch_s - latency_s) / layers
        return max(begun_s + compute_s, fetch_s + (first_s / layers if fetch_s else 0.0) + compute_s - first_s)

    def _first_s(self, blocks: int) -> float:
        """Of the step beside the fetch."""
        if not self.beside:
            return 0.0
        cached = blocks * self._block_size
        return self._compute_s(min(self._num_tokens - cached, self._budget), cached)


def best_fetch(path: Path, overlap: Overlap, most: int) -> tuple[float, Fetch]:
    """(seconds, fetch) of the best number of leading blocks in (have, most].

    The time falls or rises evenly between a few corners, so that only those are weighed: all; where fetch and compute
    take equally long; where what is left fills one step; where SSD begins; and, with nothing beside the fetch, where
    less left would not be computed sooner, as weights are read for one token as for many.
    """
    best = path.fetch(most)
    best_s = overlap.total_s(best)
    if overlap.hides(best):
        return best_s, best  # less of it would only mean more compute
    low, high = path.have + 1, most
    near = max(1, (most - path.have) // PRECISION)
    while high - low >= near:  # the fewest blocks whose fetch takes longer than the compute beside it
        middle = (low + high) // 2
        if overlap.hides(path.fetch(middle)):
            low = middle + 1
        else:
            high = middle
    tried, corners = most, [low - 1, low, high, overlap.one_step, path.lead]
    if not overlap.beside:
        corners += [most - left for left in FEW_LEFT]
    for blocks in sorted(corners, reverse=True):
        if path.have < blocks < tried:
            fetch, tried = path.fetch(blocks), blocks
            if (total_s := overlap.total_s(fetch)) < best_s:
                best_s, best = total_s, fetch
    return best_s, best


def rescaled(scale: float, ratio: float) -> float:
    """A pool's measured / declared fetch time after one more measurement `ratio`, clamped."""
    ratio = min(MAX_SCALE, max(MIN_SCALE, ratio))
    return min(MAX_SCALE, max(MIN_SCALE, scale + SCALE_WEIGHT * (ratio - scale)))
