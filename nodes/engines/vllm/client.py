"""The connector's end of the link to its agent: says what it is, maps the arena, keeps what it has been granted.

Nothing in the arena is touched but under `lock` and for a job that is granted at that moment, so that a revocation,
once answered, holds whatever vLLM does afterwards. A lost agent takes every grant with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nodes.engines.vllm.frames import (
    FromConnector,
    Grant,
    Hello,
    Refused,
    Revoke,
    Revoked,
    Unpacker,
    Welcome,
    from_agent,
    pack,
)
from transfer.errors import PhaseplaneError, ProtocolError
from transfer.kv.arena import MappedArena

log = logging.getLogger("vllm.phaseplane")

RETRY_S = 0.1
PARENT_EVERY_S = 1.0
SEND_TIMEOUT_S = 10.0
GRANT_WAIT_S = 2.0
"""A grant is sent before its request, but by another way."""
READ_BYTES = 1 << 16


class LinkClient:
    """Runs a thread. launched: vLLM was started by the agent and ends with it; otherwise it waits for another agent."""

    def __init__(self, path: Path, hello: Hello, *, launched: bool, on_arena: Callable[[MappedArena], None]) -> None:
        self._path, self._hello, self._launched, self._on_arena = path, hello, launched, on_arena
        self._grants: dict[int, Grant] = {}
        self._last_job = 0
        self._socket: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._is_closed = False
        self._parent = os.getppid()
        self.lock = threading.Condition()
        self.arena: MappedArena | None = None
        self._thread = threading.Thread(target=self._run, name="phaseplane-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def granted(self, job: int) -> Grant | None:
        """What the job may use now. Call it under `lock`, and use it before the lock is let go."""
        return self._grants.get(job)

    def wait_granted(self, job: int) -> bool:
        """Whether the job's grant is there, or comes soon: numbers rise, so one below the last was taken back. Takes
        the lock itself."""
        with self.lock:
            self.lock.wait_for(lambda: job <= self._last_job or self._socket is None, GRANT_WAIT_S)
            return job in self._grants

    def send(self, frame: FromConnector) -> None:
        """From any thread. A link that takes nothing for SEND_TIMEOUT_S is closed, which the reader notices."""
        with self._send_lock:
            if self._socket is None:
                return
            try:
                self._socket.sendall(pack(frame))
            except OSError as error:
                log.warning("the link to the agent at %s failed: %s", self._path, error)
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with self._send_lock, contextlib.suppress(OSError):
            self._is_closed = True
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        said = ""
        while not self._is_closed:
            try:
                self._serve()
                said = ""
            except (OSError, PhaseplaneError) as error:
                if str(error) != said:  # it may take an agent hours to come
                    said = str(error)
                    log.warning("no link to an agent at %s: %s", self._path, said)
            self._forget()
            if self._launched and not self._is_closed:
                log.error("the agent that started this vLLM is gone; vLLM ends")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(RETRY_S)

    def _serve(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(str(self._path))
            link.settimeout(SEND_TIMEOUT_S)
            with self._send_lock:  # whoever closes comes before all of this, or finds the socket
                if self._is_closed:
                    return
                link.sendall(pack(self._hello))
                self._socket = link
            unpacker, readable = Unpacker(), select.poll()
            readable.register(link, select.POLLIN)
            while True:
                if not readable.poll(PARENT_EVERY_S * 1000):
                    if self._launched and os.getppid() != self._parent:
                        raise ProtocolError("vLLM's server is gone")
                    continue
                data = link.recv(READ_BYTES)
                if not data:
                    return
                for body in unpacker.feed(data):
                    self._take(body)

    def _take(self, body: bytes) -> None:
        match from_agent(body):
            case Welcome(arena=handle):
                arena = MappedArena(handle, writable=True)
                self._on_arena(arena)
                with self.lock:
                    self.arena = arena
            case Refused(reason=reason):
                raise ProtocolError(f"the agent refuses this vLLM: {reason}")
            case Grant() as grant:
                with self.lock:
                    self._grants[grant.job], self._last_job = grant, grant.job
                    self.lock.notify_all()
            case Revoke(job=job):
                with self.lock:
                    self._grants.pop(job, None)
                self.send(Revoked(job=job))

    def _forget(self) -> None:
        with self._send_lock:
            self._socket = None
        with self.lock:
            self._grants.clear()
            self._last_job = 0
            if self.arena is not None:
                self.arena.close()
                self.arena = None
            self.lock.notify_all()
