"""ZeroMQ sockets on an asyncio loop without zmq.asyncio: one shared context, edge-triggered draining, monitors.

Does not know what the frames mean.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import resource
import struct
from collections.abc import Callable

import zmq

from transfer.errors import ConfigError
from transfer.wire.codec import MAX_MESSAGE_BYTES

MAX_SOCKETS = 8192
_MAX_FILES = 16384
BATCH = 128
"""Messages one wakeup may take before the loop's other work has its turn."""
_monitor_ids = itertools.count()

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]


def shared_context() -> ZmqContext:
    """The context of this process: one I/O thread, room for MAX_SOCKETS sockets."""
    return _context_of(os.getpid())


def new_context() -> ZmqContext:
    """A context with room for MAX_SOCKETS sockets; raises this process's soft limit of open files to match."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    context: ZmqContext = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


@functools.lru_cache(maxsize=1)
def _context_of(pid: int) -> ZmqContext:
    return new_context()


def new_socket(context: ZmqContext, kind: int, queue_size: int) -> ZmqSocket:
    """A socket that holds at most queue_size messages a peer each way (0: no limit) and drops them when closed.

    Raises ConfigError when this process may open no more files or sockets.
    """
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot open another socket ({error}); raise the limit of open files (ulimit -n)") from None
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue_size)
    socket.setsockopt(zmq.RCVHWM, queue_size)
    socket.setsockopt(zmq.IPV6, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 64)
    return socket


class Pump:
    """Calls `take` for every message of a socket, on the running loop.

    The descriptor of a ZeroMQ socket signals changes, not readability, and any call on the socket may
    swallow a signal: so a drain goes on until the socket is empty, and whoever sends calls `kick`.
    `take` reads one message without blocking and raises zmq.Again when there is none.
    """

    def __init__(self, socket: ZmqSocket, take: Callable[[], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self.closed = False
        self._loop.add_reader(self._fd, self.drain)
        self.kick()

    def kick(self) -> None:
        """Look for messages on the loop's next turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._kicked)

    def drain(self) -> bool:
        """Take up to a batch of messages. True: nothing is left; otherwise the rest follows next turn."""
        emptied = False
        try:
            for _ in range(BATCH):
                if self.closed:
                    return True
                self._take()
        except zmq.Again:
            emptied = True
        finally:
            # Also when a callback raised: no new signal would come for messages that are here already.
            if not emptied and not self.closed:
                self.kick()
        return emptied

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)

    def _kicked(self) -> None:
        self._scheduled = False
        if not self.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.drain()


class Monitor:
    """Connection events of a socket, on the running loop. Close it before the socket.

    libzmq's I/O thread blocks while a monitor's queue is full or has no reader, hence no bound on the
    queue (the few event kinds asked for are rare) and the order in `close`.
    """

    def __init__(self, context: ZmqContext, socket: ZmqSocket, events: int, on_event: Callable[[int], None]) -> None:
        self._watched, self._on_event = socket, on_event
        address = f"inproc://phaseplane-monitor-{next(_monitor_ids)}"
        self._pair = new_socket(context, zmq.PAIR, queue_size=0)
        socket.monitor(address, events)
        self._pair.connect(address)
        self._pump = Pump(self._pair, self._take)

    def close(self) -> None:
        if not self._pump.closed:
            self._pump.close()
            self._watched.disable_monitor()
            self._pair.close()

    def _take(self) -> None:
        head = self._pair.recv(zmq.NOBLOCK)
        while self._pair.getsockopt(zmq.RCVMORE):
            self._pair.recv(zmq.NOBLOCK)
        self._on_event(struct.unpack("=H", head[:2])[0])
