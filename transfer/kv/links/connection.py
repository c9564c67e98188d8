"""One connected socket as a Link: gathers frames into sendmsg, scatters received payload with recvmsg."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transfer.errors import KvError, KvTransferFailed, PhaseplaneError
from transfer.kv.frames import STAGING_BYTES, Bye, FrameReader, FrameSink, encode_frame, scratch
from transfer.kv.links.context import log
from transfer.kv.links.sending import OutFrame

WRITE_BYTES = 512 << 10
"""Frames are gathered up to this size for one sendmsg: what was just summed is still in the cache when it is sent."""
TURNS = 4
"""Reads or writes of one connection before the loop may serve somebody else."""
SMALL_READ_BYTES = 64 << 10
MAX_BUFFERS = 1024
LINGER_S = 1.0


@dataclass(slots=True)
class _Writing:
    """A frame on its way out: what of it is unsent."""

    stream: int
    parts: deque[memoryview]
    number: int = 0
    begun: bool = False


class FrameHost(FrameSink, Protocol):
    """Whose frames a connection carries: a session, or one of several lanes of it."""

    def next_frame(self) -> OutFrame | None:
        """The next frame to write, or None."""

    def goodbye(self, error: KvError) -> Bye:
        """What the peer is told when the connection ends."""

    def broken(self, error: Exception) -> None:
        """What was received cannot be, or a role failed; `lost` follows."""

    def lost(self, error: KvError) -> None:
        """The connection has ended."""


class TcpConnection:
    """Link over one connected socket. Reads and writes whenever the loop says the socket can, once it serves a host.

    on_hung_up: the socket is closed, maybe a moment after the host was told that it is lost.
    """

    striped = False
    _host: FrameHost
    _reader: FrameReader

    def __init__(self, sock: socket.socket, on_hung_up: Callable[[TcpConnection], None]) -> None:
        self._sock, self._fd = sock, sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._on_hung_up = on_hung_up
        self._out: deque[_Writing] = deque()
        self._out_bytes = 0
        self._waking = self._writing = self._closed = False
        self._inside_write = self._inside_read = self._resuming = False
        self._linger: asyncio.TimerHandle | None = None

    def serve(self, host: FrameHost) -> None:
        """Begin to read and write; called once."""
        self._host = host
        self._reader = FrameReader(host)
        self._loop.add_reader(self._fd, self._readable)

    def wake(self) -> None:
        if not (self._waking or self._writing or self._closed):
            self._waking = True
            self._loop.call_soon(self._writable)

    def flush(self) -> None:
        if not (self._inside_write or self._writing):
            self._writable()

    def divert(self, stream: int, link: int | None = None) -> None:
        self._reader.divert(stream)

    def drop(self, stream: int) -> None:
        self.drop_numbers(stream)

    def drop_numbers(self, stream: int) -> dict[int, None]:
        """As drop; returns the numbers of the frames that will not be sent."""
        kept: deque[_Writing] = deque()
        dropped: dict[int, None] = {}
        for frame in self._out:
            if frame.stream != stream:
                kept.append(frame)
            elif frame.begun:  # the rest must follow, from a copy: the memory is somebody else's from now on
                frame.parts = deque(memoryview(bytes(part)) for part in frame.parts)
                kept.append(frame)
            else:
                self._out_bytes -= sum(part.nbytes for part in frame.parts)
                dropped[frame.number] = None
        self._out = kept
        return dropped

    def close(self, error: KvError) -> None:
        self._end(error)
        self.hang_up()

    def _end(self, error: KvError) -> None:
        """No stream goes on, and the peer is told why."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._say_goodbye(error)
        self._out.clear()
        self._host.lost(error)

    def _end_politely(self, error: KvError) -> None:
        """As close, when the peer is at fault: hear it out for a moment, as a reset would make it miss why."""
        if self._closed:
            return
        self._end(error)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.hang_up()
            return
        self._loop.add_reader(self._fd, self._discard)
        self._linger = self._loop.call_later(LINGER_S, self.hang_up)

    def _discard(self) -> None:
        try:
            if self._sock.recvmsg_into(scratch(STAGING_BYTES))[0]:
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # it hung up
        self.hang_up()

    def hang_up(self) -> None:
        """Close the socket at once, without a word. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._linger is not None:
            self._linger.cancel()
            self._loop.remove_reader(self._fd)
        self._sock.close()
        self._on_hung_up(self)

    def _readable(self) -> None:
        if not self._resuming:  # else what was read before must be taken first
            self._protected(self._receive)

    def _receive(self) -> None:
        self._inside_read = True
        try:
            for _ in range(TURNS):
                count = self._sock.recvmsg_into(self._reader.buffers())[0]
                if not count:
                    self.close(KvTransferFailed("the peer closed the connection"))
                    return
                self._advance(count)
                if self._closed or self._resuming or count < SMALL_READ_BYTES:
                    return
        finally:
            self._inside_read = False

    def _advance(self, count: int) -> None:
        self._resuming = self._reader.advance(count)
        if self._resuming:
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._inside_read = True
            self._protected(lambda: self._advance(0))
            self._inside_read = False

    def _writable(self) -> None:
        self._waking = False
        if self._closed or self._inside_write:
            return
        self._inside_write = True
        try:
            self._protected(self._transmit)
        finally:
            self._inside_write = False

    def _transmit(self) -> None:
        try:
            for _ in range(TURNS):
                self._refill()
                if not self._out:
                    self._want_writable(False)
                    return
                if not self._send():
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            if not self._inside_read:
                self._receive()  # the peer may have said why before it hung up
            raise
        self._want_writable(True)

    def _protected(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong ends this connection, and only this."""
        try:
            work()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(KvTransferFailed(f"the connection was lost: {error}"))
        except PhaseplaneError as error:
            log.warning("closing a KV connection: %s", error)
            self._host.broken(error)
            self._end_politely(error if isinstance(error, KvError) else KvTransferFailed(str(error)))
        except Exception as error:  # noqa: BLE001 - supervision boundary: no half-read connection may stay behind
            log.exception("a role failed while it was handed KV; its connection is closed")
            self._host.broken(error)
            self._end_politely(KvTransferFailed(f"the role behind the KV port failed: {type(error).__name__}"))

    def _refill(self) -> None:
        gathered = 0  # KV bytes, also of mapped slabs: the receiver should start on the first before we name the last
        while self._out_bytes < WRITE_BYTES and gathered < WRITE_BYTES:
            frame = self._host.next_frame()
            if frame is None:
                return
            self._out.append(_Writing(frame.stream, deque(frame.parts), frame.number))
            self._out_bytes += sum(part.nbytes for part in frame.parts)
            gathered += frame.kv_bytes

    def _send(self) -> bool:
        """One gathering write; False when the socket took less than it was given."""
        parts = [part for frame in self._out for part in frame.parts][:MAX_BUFFERS]
        sent = self._sock.sendmsg(parts)
        self._out_bytes -= sent
        while self._out:
            frame = self._out[0]
            frame.begun = frame.begun or sent > 0
            while frame.parts and sent >= frame.parts[0].nbytes:
                sent -= frame.parts.popleft().nbytes
            if frame.parts:
                if sent:
                    frame.parts[0] = frame.parts[0][sent:]
                return False
            self._out.popleft()
        return True

    def _want_writable(self, wanted: bool) -> None:
        if wanted != self._writing and not self._closed:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)

    def _say_goodbye(self, error: KvError) -> None:
        """Best effort: tell the peer why, unless a frame is half sent."""
        if not (self._out and self._out[0].begun):
            with contextlib.suppress(OSError):
                self._sock.send(encode_frame(self._host.goodbye(error)))
