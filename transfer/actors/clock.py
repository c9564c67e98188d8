"""An asyncio loop whose clock jumps to the next timer: hours of actor time in milliseconds, the same every run.

For tests and replays. No sockets, threads or processes: what waits for the real world cannot run here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_MAX_IDLE_TURNS = 1_000_000
"""Turns of the loop at one virtual instant before it is called a livelock."""
_RESOLUTION_S = 1e-9


class VirtualClockError(RuntimeError):
    """Virtual time cannot or may not go on; the sentence names the tasks that wait."""


class VirtualClockLoop(asyncio.BaseEventLoop):
    """time() starts at `start` and moves only when nothing is ready, then exactly to the next timer.

    Raises VirtualClockError out of run_until_complete when all wait for ever, when time would pass
    start + limit_s, and when time stands still for a million turns.
    """

    def __init__(self, start: float = 0.0, limit_s: float = float("inf")) -> None:
        super().__init__()
        self._now, self._limit = start, start + limit_s
        self._selector = _Jump(self)
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(start))

    def time(self) -> float:
        return self._now

    def jump(self, timeout: float | None) -> None:
        """What stands in for waiting: called by the loop with the seconds to its next timer, None without one."""
        if timeout is None:
            raise VirtualClockError(f"deadlock at {self._now:g} s: everything waits and no timer is set; {self._who()}")
        if timeout <= 0:
            self._idle_turns += 1
            if self._idle_turns > _MAX_IDLE_TURNS:
                self._idle_turns = 0
                raise VirtualClockError(f"time stands still at {self._now:g} s: something never waits; {self._who()}")
            return
        self._idle_turns = 0
        due = self._scheduled[0].when()
        if due > self._limit:
            raise VirtualClockError(f"virtual time would pass its limit of {self._limit:g} s; {self._who()}")
        self._now = due
        # The loop runs what is due before now + resolution; that sum must differ from now.
        self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(due))

    # What BaseEventLoop asks of its subclasses.
    _scheduled: list[asyncio.TimerHandle]
    _idle_turns = 0

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # call_soon_threadsafe wakes nobody: this loop never sleeps

    def _who(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        return f"pending tasks: {', '.join(names) or 'none'}"


def run_virtual(coro: Coroutine[Any, Any, T], start: float = 0.0, limit_s: float = 3600.0) -> T:
    """asyncio.run in virtual time. Raises VirtualClockError, see VirtualClockLoop; leftover tasks are cancelled."""
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(start, limit_s)) as runner:
        return runner.run(coro)


class _Jump:
    """The selector of a loop that has nothing to select."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        pass


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: VirtualClockLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise VirtualClockError(f"{name} is refused in virtual time, which cannot wait for the real world")

    return refuse


for _name in (
    "run_in_executor", "add_reader", "add_writer", "add_signal_handler", "create_connection", "create_server",
    "create_unix_connection", "create_unix_server", "create_datagram_endpoint", "connect_read_pipe",
    "connect_write_pipe", "subprocess_exec", "subprocess_shell", "sock_recv", "sock_recv_into", "sock_recvfrom",
    "sock_sendall", "sock_sendto", "sock_connect", "sock_accept", "sock_sendfile", "sendfile", "start_tls",
):  # fmt: skip
    setattr(VirtualClockLoop, _name, _refusal(_name))
