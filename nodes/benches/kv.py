"""`phaseplane bench kv`: our KV transfer, SSD tier and pool, each beside what the machine or another project does.

Ours and a peer's are measured in turn, in one run; the medians count. Peers may listen on every address, so with them
the whole run moves into a network namespace of its own, where only loopback is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from nodes.benches.measuring import GB, Line, Peer, PeerFailed, alternate, line, say
from nodes.benches.movers import Case, Movers
from nodes.benches.pooled import BLOCK_BYTES, FINGERPRINT, Ssd, Value, pool_process
from transfer.errors import ConfigError, PhaseplaneError
from transfer.kv.client import KvPoolClient

VALUE_BYTES = 64 << 20
SSD_BYTES = 128 << 20
NUM_BLOCKS = 256
POOL_BYTES = 1 << 30
BUSY_SHARE = 0.5
PARTS = ("tcp", "shm", "ssd", "pool")
INSIDE = "--inside"
SOCKET, MEMCPY, FILE = "blocking socket", "memcpy", "plain file"
ENGINE, NIXL = "mooncake-engine", "nixl"
STORE, STORE_REGISTERED = "mooncake-store", "mooncake-store-registered"
PEER_NAMES = {
    ENGINE: "Mooncake transfer engine, TCP", NIXL: "NIXL, UCX over TCP",
    STORE: "Mooncake Store put/get", STORE_REGISTERED: "Mooncake Store put_from/get_into",
}  # fmt: skip

Medians = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class BenchOptions:
    """only: of PARTS. peers_python: None: no other project is measured. directory: None: where temporary files go."""

    only: tuple[str, ...]
    rounds: int
    peers_python: Path | None
    directory: Path | None


async def over_tcp(options: BenchOptions) -> list[Line]:
    """Pushes and fetches over loopback TCP."""
    async with Movers(NUM_BLOCKS) as movers, AsyncExitStack() as stack:
        mover = await movers.open(Case("tcp", shm=False))
        peers = await _peers(stack, options, (ENGINE, NIXL), movers.num_bytes)
        ways = {"ours": mover.both, SOCKET: movers.over_socket} | {kind: peer.run for kind, peer in peers.items()}
        taken = await alternate(options.rounds, ways)
        lines = [_beside("tcp_push", "ours", SOCKET, "write", taken, movers.num_bytes)]
        for kind in peers:
            lines.append(_beside("tcp_push", "ours", kind, "write", taken, movers.num_bytes))
            lines.append(_beside("tcp_fetch", "ours", kind, "read", taken, movers.num_bytes))
    return lines


async def over_shm(options: BenchOptions) -> list[Line]:
    """Pushes and fetches in shared memory."""
    async with Movers(NUM_BLOCKS) as movers:
        mover = await movers.open(Case("shm", shm=True))
        checked = await movers.open(Case("shm_checksum", shm=True, checksum=True))
        ways = {"ours": mover.both, "checked": checked.both, MEMCPY: movers.by_memcpy}
        taken = await alternate(options.rounds, ways)
        return [
            _beside("shm_push", "ours", MEMCPY, "write", taken, movers.num_bytes),
            _line("shm_fetch", "ours", "read", MEMCPY, "write", taken, movers.num_bytes),
            _beside("shm_push_checksum", "checked", MEMCPY, "write", taken, movers.num_bytes),
        ]


async def to_ssd(options: BenchOptions) -> list[Line]:
    """The SSD tier, checksums and all, and a plain file beside it."""
    with tempfile.TemporaryDirectory(prefix="phaseplane-bench-", dir=options.directory) as folder:
        async with Ssd(Path(folder), SSD_BYTES, options.rounds) as ssd:
            taken = await alternate(options.rounds, {"ours": ssd.tier, FILE: ssd.plain})
    return [_beside(f"ssd_{way}", "ours", FILE, way, taken, SSD_BYTES) for way in ("write", "read")]


async def through_pool(options: BenchOptions) -> list[Line]:
    """A 64 MiB value to a pool process and back: from own memory and in place, in shared memory and over TCP."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(pool_process(POOL_BYTES))
        value = Value(VALUE_BYTES)
        ways: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {}
        for name, shm in (("pool", True), ("pool_tcp", False)):
            client = KvPoolClient(
                endpoint, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT, staging_bytes=2 * VALUE_BYTES, shm=shm
            )
            await stack.enter_async_context(client)
            ways[name] = lambda client=client: value.through(client)  # type: ignore[misc]
            ways[f"{name}_in_place"] = lambda client=client: value.in_place(client)  # type: ignore[misc]
        ours = list(ways)
        peers = await _peers(stack, options, (STORE, STORE_REGISTERED), VALUE_BYTES)
        taken = await alternate(options.rounds, ways | {kind: peer.run for kind, peer in peers.items()})
    lines = []
    for name in ours:
        kind = STORE_REGISTERED if name.endswith("in_place") else STORE
        for way in ("put", "get"):
            lines.append(_beside(f"{name}_{way}", name, kind, _SIDES[way], taken, VALUE_BYTES))
        lines.append(_beside(f"{name}_round_trip", name, kind, "both", _summed(taken), 2 * VALUE_BYTES))
    return lines


_SIDES = {"put": "write", "get": "read"}
MEASURE: dict[str, Callable[[BenchOptions], Awaitable[list[Line]]]] = {
    "tcp": over_tcp, "shm": over_shm, "ssd": to_ssd, "pool": through_pool,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="phaseplane bench kv", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers-python", type=Path, help="a Python that has Mooncake and NIXL")
    parser.add_argument("--directory", type=Path, help="where SSD and files are measured")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args(given)
    try:
        options = _checked(told)
        if options.peers_python is not None and not told.inside:
            _move_into_namespace(given)
        _warn_of_load()
        for part in options.only:
            say(f"measuring {part}, {options.rounds} rounds")
            for result in uvloop.run(_measured(part, options)):
                print(result.json() if told.json else result.text(), flush=True)
    except KeyboardInterrupt:
        return 130
    except PhaseplaneError as error:
        say(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _measured(part: str, options: BenchOptions) -> list[Line]:
    return await MEASURE[part](options)


def _checked(told: argparse.Namespace) -> BenchOptions:
    only = tuple(name.strip() for name in told.only.split(","))
    wrong = next((name for name in only if name not in PARTS), None)
    if wrong is not None:
        raise ConfigError(f"--only names {wrong!r}; give some of {', '.join(PARTS)}")
    if told.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {told.rounds}")
    if told.peers_python is not None and not os.access(told.peers_python, os.X_OK):
        raise ConfigError(f"--peers-python {told.peers_python} cannot be run; give a Python that has the peers")
    if told.directory is not None and not told.directory.is_dir():
        raise ConfigError(f"--directory {told.directory} is not a folder")
    return BenchOptions(only, told.rounds, told.peers_python, told.directory)


def _move_into_namespace(given: list[str]) -> None:
    """Become the same program where there is nothing but loopback; where that cannot be, say so and go on."""
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    can = unshare and ip and subprocess.run([unshare, *flags, "true"], check=False, capture_output=True).returncode == 0
    if unshare is None or ip is None or not can:
        say("note: no network namespace can be made here; peers may listen on every address of this machine meanwhile")
        return
    script = 'ip link set lo up && exec "$@"'
    program = [sys.executable, "-m", "nodes.benches.kv", *given, INSIDE]
    os.execv(unshare, [unshare, *flags, "sh", "-c", script, "sh", *program])


def _warn_of_load() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_SHARE * cores:
        say(f"note: this machine is busy (load {load:.1f} on {cores} cores); ratios suffer, run it again idle")


async def _peers(stack: AsyncExitStack, options: BenchOptions, kinds: Sequence[str], num_bytes: int) -> dict[str, Peer]:
    """Those that start; the others are named on standard error."""
    started: dict[str, Peer] = {}
    if options.peers_python is None:
        return started
    for kind in kinds:
        try:
            started[kind] = await stack.enter_async_context(Peer(options.peers_python, kind, num_bytes))
        except PeerFailed as error:
            say(f"note: {error}")
    return started


def _beside(name: str, ours: str, peer: str, way: str, taken: Medians, num_bytes: int) -> Line:
    return _line(name, ours, way, peer, way, taken, num_bytes)


def _line(name: str, ours: str, way: str, peer: str, peer_way: str, taken: Medians, num_bytes: int) -> Line:
    theirs = num_bytes / taken[peer][peer_way] / GB if peer in taken else None
    return line(name, num_bytes / taken[ours][way] / GB, PEER_NAMES.get(peer, peer), theirs)


def _summed(taken: Medians) -> dict[str, dict[str, float]]:
    return {name: {"both": sum(ways.values())} for name, ways in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
