"""How soon content of a class is asked for again, learned as it happens, and what that makes a block of an age worth.

Follows a sample of all hashes, those long evicted too, so that what it learns does not hang on what was kept. Pure.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from typing import NamedTuple

CAPACITIES_FOLLOWED = 16
"""A sampled hash is followed until so many times the pool's blocks were stored after its last use."""
EPOCHS_A_CAPACITY = 64
"""Ages are counted in epochs; storing as many blocks as the pool has takes so many."""
MAX_FOLLOWED = 32_768
"""Hashes followed at once, some 5 MB."""
AGE_STEP = 1.3
"""An age bucket ends so many times later than it starts."""
PRIOR_BLOCKS = 512
"""How many blocks' evidence the prior weighs: some twenty prompts' worth, for a prompt's blocks share one fate."""
MIN_PRIOR = 64
FIRST_HAZARD = 0.05
HAZARD_FADES = 0.8
"""The prior: a share of FIRST_HAZARD is used again at once, and ever less as they age, which ranks as LRU does."""
MAX_HAZARD = 0.95


class _Use(NamedTuple):
    kind: int
    epoch: int


class ReuseModel:
    """`worth(kind, age)` is the largest rate of hits for the time a block is kept that any horizon promises, given that
    it was last used `age` epochs ago: Gittins' index for the reuse times seen in its class (Gittins, JRSS B 1979; the
    ranking by hit density is Beckmann et al., LHD, NSDI'18, which has no ghosts and takes no horizon).
    """

    def __init__(self, num_blocks: int, num_kinds: int) -> None:
        self._edges = _age_edges(CAPACITIES_FOLLOWED * EPOCHS_A_CAPACITY)
        ends = [*self._edges[1:], 2 * self._edges[-1]]
        self._widths = [end - start for start, end in zip(self._edges, ends, strict=True)]
        share = min(1.0, MAX_FOLLOWED / (CAPACITIES_FOLLOWED * num_blocks))
        self._sampled_below = int(share * (1 << 32))
        self._prior = max(float(MIN_PRIOR), share * PRIOR_BLOCKS)
        self._followed: dict[bytes, _Use] = {}  # the least recently used first
        self._waiting: dict[_Use, int] = {}  # followed hashes by their last use
        self._used = [[0.0] * len(self._edges) for _ in range(num_kinds)]  # by age bucket: ended by another use
        self._ended = [[0.0] * len(self._edges) for _ in range(num_kinds)]  # by age bucket: ended, used or not
        self._worth: list[list[float]] = []
        self.fit(1.0)

    @property
    def num_followed(self) -> int:
        return len(self._followed)

    def use(self, h: bytes, kind: int, epoch: int) -> None:
        """Content was stored or asked for; it is of `kind` from now on."""
        if zlib.crc32(h) >= self._sampled_below:
            return
        followed = self._followed
        if h in followed:
            self._end(h, epoch, used=True)
        followed[h] = use = _Use(kind, epoch)
        self._waiting[use] = self._waiting.get(use, 0) + 1
        while len(followed) > 1:
            oldest = next(iter(followed))
            if len(followed) <= MAX_FOLLOWED and epoch - followed[oldest].epoch < self._edges[-1]:
                break
            self._end(oldest, epoch, used=False)

    def worth(self, kind: int, age: int) -> float:
        return self._worth[kind][bisect_right(self._edges, age) - 1]

    def fit(self, fade: float, epoch: int = 0) -> None:
        """Work out what ages are worth anew from what was seen; then let that fade to a share of `fade`."""
        at_risk = self._at_risk(epoch)
        base = self._base_hazards(at_risk)
        self._worth = []
        for used, risk in zip(self._used, at_risk, strict=True):
            expected = sum(count * hazard for count, hazard in zip(risk, base, strict=True))
            leans = (sum(used) + 0.1 * self._prior) / (expected + 0.1 * self._prior)
            hazards = [
                min(MAX_HAZARD, (num + self._prior * leans * prior) / (count + self._prior))
                for num, count, prior in zip(used, risk, base, strict=True)
            ]
            rates = _best_rates(hazards, self._widths)
            if self._worth:
                rates = [max(pair) for pair in zip(rates, self._worth[-1], strict=True)]
            self._worth.append(rates)
        for table in (self._used, self._ended):
            for row in table:
                row[:] = [value * fade for value in row]

    def _end(self, h: bytes, epoch: int, *, used: bool) -> None:
        use = self._followed.pop(h, None)
        if use is None:
            return
        self._waiting[use] -= 1
        if not self._waiting[use]:
            del self._waiting[use]
        bucket = bisect_right(self._edges, epoch - use.epoch) - 1
        self._ended[use.kind][bucket] += 1
        self._used[use.kind][bucket] += used

    def _at_risk(self, epoch: int) -> list[list[float]]:
        """By kind and age bucket: how many reached that age unused; who is in the bucket now counts half."""
        waiting = [[0.0] * len(self._edges) for _ in self._used]
        for use, count in self._waiting.items():
            waiting[use.kind][bisect_right(self._edges, epoch - use.epoch) - 1] += count
        at_risk: list[list[float]] = []
        for used, ended, now in zip(self._used, self._ended, waiting, strict=True):
            reached, row = 0.0, [0.0] * len(self._edges)
            for bucket in range(len(self._edges) - 1, -1, -1):
                reached += ended[bucket] + now[bucket]
                row[bucket] = max(used[bucket], reached - now[bucket] / 2)
            at_risk.append(row)
        return at_risk

    def _base_hazards(self, at_risk: list[list[float]]) -> list[float]:
        """By age bucket, over all kinds: the share used in it of those that reach it; unseen ages as the one before."""
        base: list[float] = []
        prior = FIRST_HAZARD
        for bucket in range(len(self._edges)):
            num = sum(row[bucket] for row in self._used)
            hazard = (num + self._prior * prior) / (sum(row[bucket] for row in at_risk) + self._prior)
            base.append(min(MAX_HAZARD, hazard))
            prior = hazard * HAZARD_FADES
        return base


def _age_edges(longest: int) -> list[int]:
    """Where age buckets start, in epochs, up to `longest`."""
    edges = [0]
    while edges[-1] < longest:
        edges.append(min(longest, max(edges[-1] + 1, int(edges[-1] * AGE_STEP))))
    return edges


def _best_rates(hazards: list[float], widths: list[int]) -> list[float]:
    """For each bucket: hits for an epoch kept, over the best of all horizons that start there."""
    rates: list[float] = []
    for start in range(len(hazards)):
        alive, hits, kept, best = 1.0, 0.0, 0.0, 0.0
        for hazard, width in zip(hazards[start:], widths[start:], strict=True):
            hits += alive * hazard
            kept += alive * width * (1 - hazard / 2)
            alive *= 1 - hazard
            best = max(best, hits / kept)
        rates.append(best)
    return rates
