"""What an instance or a pool tells the directory of its cache: changes together, a snapshot when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum

from transfer.wire.messages import CacheEvents, Message

MAX_HASHES = 4096
"""Of one CacheEvents message; a snapshot may hold up to MAX_SNAPSHOT."""
MAX_SNAPSHOT = 200_000


class _Tier(Enum):
    NONE = 0
    SSD = 1
    MEMORY = 2


class CacheFeed:
    """Sequence numbers count from 1 in each epoch and never skip: a lost message shows as a gap."""

    def __init__(self, epoch: int, send: Callable[[Message], None], every_s: float) -> None:
        self._epoch, self._send, self._every_s = epoch, send, every_s
        self._seq = 0
        self._changed: dict[bytes, _Tier] = {}
        self._timer: asyncio.TimerHandle | None = None

    def change(self, stored: Iterable[bytes], removed: Iterable[bytes], stored_ssd: Iterable[bytes] = ()) -> None:
        """Blocks became, or ceased to be, reusable, or are on SSD only now. Told within `every_s`."""
        for tier, hashes in ((_Tier.NONE, removed), (_Tier.SSD, stored_ssd), (_Tier.MEMORY, stored)):
            for h in hashes:
                self._changed[h] = tier
        if self._timer is None and self._changed:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self.flush)

    def flush(self) -> None:
        """Tell what has changed now."""
        self._stop_timer()
        changed, self._changed = list(self._changed.items()), {}
        for start in range(0, len(changed), MAX_HASHES):
            part = changed[start : start + MAX_HASHES]
            told: dict[_Tier, list[bytes]] = {tier: [] for tier in _Tier}
            for h, tier in part:
                told[tier].append(h)
            # From lists: a tuple made of a generator leaves one more in CPython's free list of its size, up to 2000.
            self._tell(
                stored=tuple(told[_Tier.MEMORY]), removed=tuple(told[_Tier.NONE]), stored_ssd=tuple(told[_Tier.SSD])
            )  # fmt: skip

    def snapshot(self, hashes: tuple[bytes, ...], ssd_hashes: tuple[bytes, ...] = ()) -> None:
        """Tell everything there is, oldest first; beyond MAX_SNAPSHOT the oldest are left out, those on SSD first."""
        self._stop_timer()
        self._changed.clear()
        stored = hashes[-MAX_SNAPSHOT:]
        room = MAX_SNAPSHOT - len(stored)
        self._tell(stored=stored, stored_ssd=ssd_hashes[max(0, len(ssd_hashes) - room) :], snapshot=True)

    def close(self) -> None:
        self._stop_timer()

    def _tell(
        self, stored: tuple[bytes, ...], removed: tuple[bytes, ...] = (), stored_ssd: tuple[bytes, ...] = (),
        snapshot: bool = False,
    ) -> None:  # fmt: skip
        self._seq += 1
        self._send(
            CacheEvents(
                epoch=self._epoch, seq=self._seq, stored=stored, removed=removed, snapshot=snapshot,
                stored_ssd=stored_ssd,
            )
        )  # fmt: skip

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
