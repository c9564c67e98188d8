"""What an instance or a pool tells the directory of its cache: changes together, a snapshot when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from transfer.wire.messages import CacheEvents, Message

MAX_HASHES = 4096
"""Of one CacheEvents message; a snapshot may hold up to MAX_SNAPSHOT."""
MAX_SNAPSHOT = 200_000


class CacheFeed:
    """Sequence numbers count from 1 in each epoch and never skip: a lost message shows as a gap."""

    def __init__(self, epoch: int, send: Callable[[Message], None], every_s: float) -> None:
        self._epoch, self._send, self._every_s = epoch, send, every_s
        self._seq = 0
        self._changed: dict[bytes, bool] = {}
        self._timer: asyncio.TimerHandle | None = None

    def change(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Blocks became, or ceased to be, reusable. Told within `every_s`."""
        for h in removed:
            self._changed[h] = False
        for h in stored:
            self._changed[h] = True
        if self._timer is None and self._changed:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self.flush)

    def flush(self) -> None:
        """Tell what has changed now."""
        self._stop_timer()
        changed, self._changed = list(self._changed.items()), {}
        for start in range(0, len(changed), MAX_HASHES):
            part = changed[start : start + MAX_HASHES]
            self._tell(stored=tuple(h for h, here in part if here), removed=tuple(h for h, here in part if not here))

    def snapshot(self, hashes: tuple[bytes, ...]) -> None:
        """Tell everything there is, oldest first; the oldest are left out beyond MAX_SNAPSHOT."""
        self._stop_timer()
        self._changed.clear()
        self._tell(stored=hashes[-MAX_SNAPSHOT:], snapshot=True)

    def close(self) -> None:
        self._stop_timer()

    def _tell(self, stored: tuple[bytes, ...], removed: tuple[bytes, ...] = (), snapshot: bool = False) -> None:
        self._seq += 1
        self._send(CacheEvents(epoch=self._epoch, seq=self._seq, stored=stored, removed=removed, snapshot=snapshot))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
