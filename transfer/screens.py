"""JSON that only screens ask for: the past as series (GET /v1/series) and the KV detail (GET /v1/kv). No behaviour."""

from __future__ import annotations

from transfer.api import KvView
from transfer.terms import Struct


class Column(Struct, frozen=True):
    """One series, a value for each time of the answer; None where nothing is known. Without `low` and `high`, the
    smallest and largest value within each step, every step held one value."""

    last: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None


class SeriesView(Struct, frozen=True):
    """GET /v1/series?names=a,b&since_s=..&until_s=..&step_s=..; docs/feed.md lists the names.

    times: Unix seconds at which each step begins, step_s apart, the oldest first. series: by name; a name that was
    asked for and is unknown is left out. names: every series there is, where none was asked for.
    """

    step_s: float
    times: tuple[int, ...] = ()
    series: dict[str, Column] = {}
    names: tuple[str, ...] = ()


class LinkView(Struct, frozen=True):
    """KV handed off from one prefill to one decode instance, counted since the control plane started.

    busy_s: seconds in which transfers ran, each by itself; exposed_s: the part that compute did not hide.
    utilisation: bytes of the last window_s / (window_s x the slower end's link bandwidth).
    """

    prefill: str
    decode: str
    num_transfers: int
    num_bytes: int
    busy_s: float
    exposed_s: float
    bytes_per_s: float
    utilisation: float
    window_s: float = 60.0


class PrefixView(Struct, frozen=True):
    """A prompt prefix that was found in KV. name: the beginning of the hash of its last block, never its text.

    num_hits: arrivals whose longest known prefix it was, since it is watched. holders: instances that have it now.
    """

    name: str
    num_tokens: int
    num_blocks: int
    num_hits: int
    holders: tuple[str, ...]
    last_hit_s: float
    """Seconds since the last hit."""


class CacheView(Struct, frozen=True):
    """KV blocks of one instance. evicted: reusable blocks it has dropped since it joined."""

    id: str
    role: str
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    ssd_blocks: int
    ssd_capacity_blocks: int
    num_evicted: int
    num_preemptions: int
    fetch_scale: float = 1.0
    """kv_pool: what fetches from it took of late over what is predicted."""


class KvDetail(Struct, frozen=True):
    """GET /v1/kv. failures: counters since start by name: reservations_refused, prefills_failed, decodes_failed,
    migrations_failed, fetches_missed, copies_failed."""

    hits: KvView
    links: tuple[LinkView, ...]
    prefixes: tuple[PrefixView, ...]
    """The most hit first."""
    caches: tuple[CacheView, ...]
    failures: dict[str, int]
    orphaned_kv_blocks: int
    handoff_bytes: int
