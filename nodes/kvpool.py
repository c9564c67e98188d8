"""A KV pool of its own: `python -m nodes.kvpool --help`. Any engine may use it through transfer/kv/client.py.

The kv_pool role and its KV port without a control plane. Exit status: 0 after SIGTERM, SIGINT or the parent's end,
1 when a pool that is asked for statistics does not answer, 2 for a wrong setting. SIGUSR1 prints the statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import uvloop

from nodes.kvpool_options import PoolOptions, StatsOptions, parse_pool_options
from nodes.pool.ssd import pool_directory, ssd_config
from nodes.pool.tiers import SsdTier
from nodes.roles.kv_pool import PoolRole
from transfer.errors import ConfigError, InvalidValue, KvError
from transfer.keys import load_data_key
from transfer.kv.arena import HostArena, remove_stale_arenas
from transfer.kv.client import pool_stats
from transfer.kv.links.tcp import TcpKvPort
from transfer.wire.messages import Message

NAME = "kvpool"
EPOCH_BITS = 48
FAILED, MISCONFIGURED = 1, 2
MAX_FILES = 16_384
"""A client on this host takes two (its connection and its memory), a segment of the SSD tier one."""
STOP_S = 8
"""An orderly exit takes at most this long; the kernel ends what hangs longer."""

_log = logging.getLogger("nodes.kvpool")


class PoolProcess:
    """Owns the memory, the port and the role of one pool. `run` serves until told to stop."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self.epoch = secrets.randbits(EPOCH_BITS) | 1

    def stop(self, reason: str) -> None:
        """Leave in order. The first call counts."""
        if not self._stop.is_set():
            _log.info("stopping: %s", reason)
            self._stop.set()
            signal.alarm(STOP_S)

    async def run(self) -> None:
        """Raises InvalidValue for memory, a folder, a file or an address that cannot be had."""
        options = self._options
        key = None if options.data_key_file is None else load_data_key(options.data_key_file)
        arena = HostArena(options.layout, options.num_blocks, shared=True)
        try:
            port = TcpKvPort(
                instance_id=NAME, epoch=self.epoch, arena=arena, host=options.host, port=options.port,
                advertise=options.advertise, auth_key=key, fingerprint=options.fingerprint,
            )  # fmt: skip
            role = PoolRole(NAME, self.epoch, arena, port, _tell_nobody, ssd=await _ssd(options, arena))
            try:
                await port.start()
                role.start()
                port.delegate = role
                with self._signals(role), _watched(options.parent_pid, self), self._ready(port.endpoint):
                    await self._stop.wait()
            finally:
                await role.close()
                await port.close()
        finally:
            arena.close()

    @contextlib.contextmanager
    def _signals(self, role: PoolRole) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGUSR1, _print_stats, role)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    @contextlib.contextmanager
    def _ready(self, endpoint: str) -> Iterator[None]:
        """Say where the pool is, on standard output and in the ready file, which goes with it."""
        options, path = self._options, self._options.ready_file
        ssd = "" if options.ssd_dir is None else f", {options.ssd_bytes} bytes of SSD in {options.ssd_dir}"
        size = options.layout.block_bytes
        if path is not None:
            _write_ready_file(path, {"endpoint": endpoint, "pid": os.getpid(), "block_bytes": size})
        print(f"kv pool at {endpoint}: {options.num_blocks} blocks of {size} bytes in memory{ssd}", flush=True)
        try:
            yield
        finally:
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


async def ask_stats(options: StatsOptions) -> None:
    """Print a running pool's statistics as one line of JSON. Raises KvTransferFailed."""
    stats = await pool_stats(options.endpoint, key_file=options.data_key_file, timeout_s=options.timeout_s)
    _show_stats(stats)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse_pool_options(list(sys.argv[1:] if argv is None else argv))
        level = options.log_level.upper() if isinstance(options, PoolOptions) else "WARNING"
        logging.basicConfig(
            stream=sys.stderr, level=level, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
        )
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(options, StatsOptions):
                uvloop.run(ask_stats(options))
            else:
                _allow_files()
                if removed := remove_stale_arenas():
                    _log.info("removed the KV memory of %d dead processes", removed)
                uvloop.run(_serve(options))
    except InvalidValue as error:
        print(f"error: {error}", file=sys.stderr)
        return MISCONFIGURED
    except KvError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return 0


async def _serve(options: PoolOptions) -> None:
    await PoolProcess(options).run()


async def _ssd(options: PoolOptions, arena: HostArena) -> SsdTier | None:
    if options.ssd_dir is None:
        return None
    config = ssd_config(pool_directory(options.ssd_dir, NAME), options.ssd_bytes, options.layout)
    return await SsdTier.open(config, arena)


def _allow_files() -> None:
    """Raise the soft limit of open files, which is often 1024, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tell_nobody(message: Message) -> None:
    """There is no control plane that keeps a directory."""


def _print_stats(role: PoolRole) -> None:
    _show_stats(role.stats())


def _show_stats(stats: Mapping[str, float]) -> None:
    """They travel as floats, but count."""
    print(json.dumps({name: int(value) for name, value in stats.items()}), flush=True)


@contextlib.contextmanager
def _watched(pid: int | None, process: PoolProcess) -> Iterator[None]:
    """Stop when the parent ends, also by SIGKILL."""
    if pid is None:
        yield
        return
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        process.stop("the parent has ended already")
        yield
        return
    loop.add_reader(descriptor, process.stop, "the parent has ended")
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _write_ready_file(path: Path, content: dict[str, str | int]) -> None:
    if not path.name:
        raise ConfigError(f"{str(path)!r} is not a file; give another with --ready-file")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path} ({error.strerror}); give another file with --ready-file") from None


if __name__ == "__main__":
    sys.exit(main())
