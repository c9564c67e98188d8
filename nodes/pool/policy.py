"""Which block a pool gives up first, and which is worth a write to SSD: a pure object behind a protocol.

Told what is stored, read and removed; never touches bytes. The default is policy_reuse.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from nodes.pool.policy_reuse import ReusePolicy
from transfer.errors import InvalidValue


class EvictionPolicy(Protocol):
    """Deterministic; `now` is the caller's clock in seconds."""

    def stored(self, h: bytes, parent: bytes | None, now: float, user: str | None = None) -> None:
        """A block became evictable content. parent: the previous in its chain, if known. user: the request whose KV it
        is, if known: whatever one request puts and gets is one use."""

    def hit(self, h: bytes, now: float, user: str | None = None) -> None:
        """It was asked for, or put again."""

    def removed(self, h: bytes) -> None:
        """It is gone, by eviction or otherwise. Idempotent."""

    def victims(self) -> Iterator[bytes]:
        """Best victim first; nothing may change while it is read. The caller skips pinned ones, then calls removed."""

    def wanted(self, h: bytes) -> bool:
        """Worth a write to SSD."""


class LruPolicy:
    """Least recently used first; everything is worth a write."""

    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}

    def stored(self, h: bytes, parent: bytes | None, now: float, user: str | None = None) -> None:
        self._order.pop(h, None)
        self._order[h] = None

    def hit(self, h: bytes, now: float, user: str | None = None) -> None:
        if h in self._order:
            del self._order[h]
            self._order[h] = None

    def removed(self, h: bytes) -> None:
        self._order.pop(h, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)

    def wanted(self, h: bytes) -> bool:
        return True


DEFAULT_POLICY = "reuse"
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"reuse": ReusePolicy, "lru": lambda num_blocks: LruPolicy()}
"""By name: makes one for a pool of so many blocks."""


def make_policy(num_blocks: int, name: str = DEFAULT_POLICY) -> EvictionPolicy:
    """Raises InvalidValue for a name that is not there."""
    if name not in POLICIES:
        raise InvalidValue(f"there is no eviction policy {name!r}; take one of {', '.join(POLICIES)}")
    return POLICIES[name](num_blocks)
