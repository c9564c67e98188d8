"""The console's one connection to a fleet: the live feed, and a bridge from Streamlit's script threads to its loop.

All sessions share it. The API key stays here and is never sent to a browser.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from transfer.api import ApplyRequest, FleetState
from ui.client import FleetClient
from ui.errors import CliError, Unreachable
from ui.feed import Feed, follow

ASK_S = 30.0
T = TypeVar("T")


class Backend:
    """Open it on the loop that serves: `async with Backend(url, key) as backend`. `ask` is for every other thread."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.client = FleetClient(url, api_key)
        self.feed: Feed = follow(self.client)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self.client.__aenter__()
        self._following = asyncio.create_task(self.feed.run(), name="follow the fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        await self.client.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def state(self) -> FleetState | None:
        """As last heard."""
        return self.feed.state

    @property
    def stale(self) -> bool:
        """Whether the state is too old to act on."""
        return self.feed.stale

    def ask(self, work: Callable[[FleetClient], Awaitable[T]], timeout_s: float = ASK_S) -> T:
        """Run `work` with the client on the loop and wait for it. Raises CliError, also when it takes too long."""
        if self._loop is None or self._loop.is_closed():
            raise CliError("the console is stopping; start it again with `phaseplane console`")

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work(self.client)

        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result(timeout_s + 1.0)
        except (TimeoutError, concurrent.futures.TimeoutError):
            future.cancel()
            raise Unreachable(f"the fleet at {self.url} did not answer within {timeout_s:g} s; try again") from None

    def spawn(self, work: Callable[[FleetClient], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Like `ask`, without waiting: for what a page shows while it goes on."""
        if self._loop is None or self._loop.is_closed():
            raise CliError("the console is stopping; start it again with `phaseplane console`")

        async def whole() -> T:
            return await work(self.client)

        return asyncio.run_coroutine_threadsafe(whole(), self._loop)


def a_change(base_version: int) -> ApplyRequest:
    """The body of an action on the fleet as it was at that version; sending the same one again does nothing more."""
    return ApplyRequest(base_version=base_version, idempotency_key=uuid.uuid4().hex, actor="console")


class _Holder:
    backend: Backend | None = None


def install(backend: Backend | None) -> None:
    """What `serving` gives out from now on: Streamlit's script threads have no other way to be handed it."""
    _Holder.backend = backend


def serving() -> Backend:
    """The backend of this process. Raises CliError when none is open."""
    if _Holder.backend is None:
        raise CliError("no fleet is connected; start the console with `phaseplane console`")
    return _Holder.backend
