"""Prefix hits by tier, which of them were worth their fetch, and how fast each pool really is."""

from __future__ import annotations

from controlplane.core.desk import Desk
from controlplane.core.fetching import Fetch, rescaled
from controlplane.core.instance import Instance
from controlplane.core.lifecycle import Request
from transfer.api import KvView
from transfer.wire.messages import PrefillDone

MISSES_FORGIVEN = 4
"""In a row, and quick: blocks are evicted between placement and fetch. A pool that goes on so does not have what it
says, and each miss from then on counts as twice the delay of the one before."""


def local_done(desk: Desk, request: Request, cached_tokens: int) -> None:
    """A request ended of whose prompt nobody reported: what it found, it found where it ran."""
    if request.chosen is not None and request.cached_tokens is None:
        desk.count("looked_up_tokens", request.num_prompt)
        desk.count("hit_device_tokens", cached_tokens)


def prefill_done(desk: Desk, request: Request, one: Instance, message: PrefillDone) -> None:
    """Learn from one placement's KV, made on instance `one`; count it if it is the request's first. To be called before
    that is noted."""
    chosen = request.chosen
    if chosen is None:
        return
    fetch, fetched, ssd_tokens = chosen.fetch, max(0, message.fetched_tokens), 0
    if fetch is not None:
        ssd_tokens = _ssd_tokens(fetch, message)
        if message.fetch_s > 0.0:
            _learn(desk, fetch, message, ssd_tokens)
    if request.cached_tokens is not None:
        return
    request.fetched_tokens = fetched
    desk.count("looked_up_tokens", request.num_prompt)
    desk.count("hit_device_tokens", max(0, message.cached_tokens))
    desk.count("hit_ssd_tokens", ssd_tokens)
    desk.count("hit_dram_tokens", fetched - ssd_tokens)
    if fetched and message.fetch_exposed_s < saved_s(one, message):
        desk.count("useful_tokens", fetched)


def saved_s(one: Instance, message: PrefillDone) -> float:
    """Predicted seconds that computing the fetched tokens, too, would have added."""
    profile, cached, fetched = one.profile, max(0, message.cached_tokens), max(0, message.fetched_tokens)
    computed = max(0, message.computed_tokens)
    whole_s = profile.prefill_s(computed + fetched, cached)
    return (whole_s - profile.prefill_s(computed, cached + fetched)) * one.speed


def kv_view(desk: Desk) -> KvView:
    count = desk.counters.get
    return KvView(
        looked_up_tokens=count("looked_up_tokens", 0), device_tokens=count("hit_device_tokens", 0),
        pool_dram_tokens=count("hit_dram_tokens", 0), pool_ssd_tokens=count("hit_ssd_tokens", 0),
        useful_tokens=count("useful_tokens", 0), replicated_blocks=count("replicated_blocks", 0),
    )  # fmt: skip


def _ssd_tokens(fetch: Fetch, message: PrefillDone) -> int:
    """Of the fetched tokens, those believed to have come from SSD: blocks in memory lead, so the last ones."""
    size = fetch.path.block_size
    in_memory = (fetch.new_blocks - fetch.ssd_blocks) * size
    return min(fetch.ssd_blocks * size, max(0, message.fetched_tokens - in_memory))


def _learn(desk: Desk, fetch: Fetch, message: PrefillDone, ssd_tokens: int) -> None:
    """Correct the pool's predicted speed. A fetch that brought nothing counts only where it was slow as well, or the
    last of many."""
    pool, path = desk.fleet.live(fetch.pool.id, fetch.pool.epoch), fetch.path
    if pool is None:
        return
    if message.fetched_tokens > 0:
        pool.missed = 0
        num_blocks, num_ssd = max(1, message.fetched_tokens // path.block_size), ssd_tokens // path.block_size
        ratio = message.fetch_s / path.seconds(num_blocks - num_ssd, num_ssd)
    else:
        whole_s = path.seconds(fetch.new_blocks - fetch.ssd_blocks, fetch.ssd_blocks)
        pool.missed += 1
        desk.count("fetches_missed")
        doubled = 2.0 ** min(pool.missed - MISSES_FORGIVEN, MISSES_FORGIVEN * 2)
        ratio = max(pool.fetch_scale, message.fetch_s / whole_s, doubled)
    pool.fetch_scale = rescaled(pool.fetch_scale, ratio)
