"""Other projects' KV movers and stores, timed: `PYTHON nodes/benches/peers.py KIND --bytes N`, in a Python with them.

Imports nothing of ours. Prints {"ready": ...} when it can be measured; then, for each line on standard input, moves
N bytes once there and once back between two processes and prints {"write_s": ..., "read_s": ...}. Ends with its input.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
WAIT_S = 60.0

Timed = Callable[[], float]


@contextmanager
def mooncake_engine(num_bytes: int) -> Iterator[tuple[Timed, Timed]]:
    """Mooncake's transfer engine over TCP; the other process holds the target memory."""
    engine, address, _memory = _mooncake_memory(num_bytes)
    with _helper("mooncake-engine", num_bytes) as helper:
        target = helper.hear()

        def move(how: str) -> float:
            started = time.perf_counter()
            if getattr(engine, how)(target["session"], address, target["address"], num_bytes) != 0:
                raise SystemExit(f"mooncake's {how} failed")
            return time.perf_counter() - started

        yield lambda: move("transfer_sync_write"), lambda: move("transfer_sync_read")


def mooncake_engine_helper(num_bytes: int, _: int | None) -> None:
    engine, address, _memory = _mooncake_memory(num_bytes)
    _say({"session": f"{HOST}:{engine.get_rpc_port()}", "address": address})
    sys.stdin.read()


@contextmanager
def nixl(num_bytes: int) -> Iterator[tuple[Timed, Timed]]:
    """NIXL's UCX backend, over TCP with UCX_TLS=tcp in the environment."""
    agent, descriptors, _memory = _nixl_memory("opener", num_bytes)
    with _helper("nixl", num_bytes) as helper:
        target = helper.hear()
        name = agent.add_remote_agent(base64.b64decode(target["metadata"]))
        theirs = agent.deserialize_descs(base64.b64decode(target["descriptors"]))

        def move(how: str) -> float:
            started = time.perf_counter()
            handle = agent.initialize_xfer(how, descriptors, theirs, name)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            taken_s = time.perf_counter() - started
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise SystemExit(f"nixl's {how} ended as {state}")
            return taken_s

        yield lambda: move("WRITE"), lambda: move("READ")


def nixl_helper(num_bytes: int, _: int | None) -> None:
    agent, descriptors, _memory = _nixl_memory("target", num_bytes)
    _say(
        {
            "metadata": base64.b64encode(agent.get_agent_metadata()).decode(),
            "descriptors": base64.b64encode(agent.get_serialized_descs(descriptors)).decode(),
        }
    )
    sys.stdin.read()


@contextmanager
def mooncake_store(num_bytes: int) -> Iterator[tuple[Timed, Timed]]:
    """Mooncake Store: a master, a process that lends memory, and this client. put and get of one value."""
    yield from _store(num_bytes, registered=False)


@contextmanager
def mooncake_store_registered(num_bytes: int) -> Iterator[tuple[Timed, Timed]]:
    """As mooncake_store, with put_from and get_into of registered memory."""
    yield from _store(num_bytes, registered=True)


def _store(num_bytes: int, *, registered: bool) -> Iterator[tuple[Timed, Timed]]:
    port = _free_port()
    binary = Path(_module("mooncake").__file__).parent / "mooncake_master"
    command = [str(binary), f"--rpc_port={port}", f"--rpc_address={HOST}", f"--metrics_host={HOST}",
               f"--metrics_port={_free_port()}"]  # fmt: skip
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_port(port, master)
        with _helper("mooncake-store", num_bytes, port) as helper:
            helper.hear()
            client = _store_client(port, segment_bytes=0, buffer_bytes=2 * num_bytes + (64 << 20))
            memory, address = _memory(num_bytes)
            client.register_buffer(address, num_bytes)
            names = (f"value-{number}" for number in range(1 << 30))
            last = [""]

            def put() -> float:
                if last[0]:
                    client.remove(last[0], True)
                last[0] = next(names)
                started = time.perf_counter()
                args = (address, num_bytes) if registered else (memory,)
                code = (client.put_from if registered else client.put)(last[0], *args)
                taken_s = time.perf_counter() - started
                if code != 0:
                    raise SystemExit(f"mooncake store's put failed with {code}")
                return taken_s

            def get() -> float:
                started = time.perf_counter()
                got = client.get_into(last[0], address, num_bytes) if registered else len(client.get(last[0]))
                taken_s = time.perf_counter() - started
                if got != num_bytes:
                    raise SystemExit(f"mooncake store's get returned {got}")
                return taken_s

            yield put, get
            client.close()
    finally:
        master.kill()
        master.wait()


def mooncake_store_helper(num_bytes: int, port: int | None) -> None:
    client = _store_client(port or 0, segment_bytes=4 * num_bytes + (256 << 20), buffer_bytes=16 << 20)
    _say({"lending": True})
    sys.stdin.read()
    client.close()


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[int, int | None], None]]] = {
    "mooncake-engine": (mooncake_engine, mooncake_engine_helper),
    "nixl": (nixl, nixl_helper),
    "mooncake-store": (mooncake_store, mooncake_store_helper),
    "mooncake-store-registered": (mooncake_store_registered, mooncake_store_helper),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--port", type=int, help="of the store's master (for the helper process)")
    parser.add_argument("--helper", action="store_true", help="be the other process")
    options = parser.parse_args()
    measured, help_out = KINDS[options.kind]
    if options.helper:
        help_out(options.bytes, options.port)
        return 0
    with measured(options.bytes) as (write, read):
        _say({"ready": options.kind})
        for _ in sys.stdin:
            _say({"write_s": write(), "read_s": read()})
    return 0


class _Helper:
    """The other process of a pair; ends when its input does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def hear(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # peers log to standard output
                return json.loads(line)
        raise SystemExit("the peer's other process ended before it was ready")


@contextmanager
def _helper(kind: str, num_bytes: int, port: int | None = None) -> Iterator[_Helper]:
    command = [sys.executable, __file__, kind, "--bytes", str(num_bytes), "--helper"]
    command += [] if port is None else ["--port", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Helper(process)
    finally:
        process.kill()
        process.communicate()


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _memory(num_bytes: int) -> tuple[Any, int]:
    """Touched memory and its address."""
    array = _module("numpy").frombuffer(mmap.mmap(-1, num_bytes), "uint8")
    array[:] = 7
    return array, array.ctypes.data


def _mooncake_memory(num_bytes: int) -> tuple[Any, int, Any]:
    engine = _module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("mooncake's transfer engine did not start")
    memory, address = _memory(num_bytes)
    if engine.register_memory(address, num_bytes) != 0:
        raise SystemExit("mooncake's transfer engine did not take the memory")
    return engine, address, memory


def _nixl_memory(name: str, num_bytes: int) -> tuple[Any, Any, Any]:
    api = _module("nixl._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    memory, address = _memory(num_bytes)
    agent.register_memory([(address, num_bytes, 0, "kv")], "DRAM")
    return agent, agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM"), memory


def _store_client(port: int, *, segment_bytes: int, buffer_bytes: int) -> Any:
    client = _module("mooncake.store").MooncakeDistributedStore()
    name = f"{HOST}:{_free_port()}"
    code = client.setup(name, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", f"{HOST}:{port}")
    if code != 0:
        raise SystemExit(f"mooncake store's client did not start ({code})")
    return client


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit("mooncake's master did not start")


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("UCX_TLS", "tcp")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    sys.exit(main())
