"""What the live feed costs: CPU of a control plane with 64 instances, without and with 100 clients of GET /v1/live.

The control plane is the real one, in this process; its nodes are heartbeats with loads that change every second, and
its clients a process of their own. Prints CPU as a share of one core, and bytes of a delta beside those of a snapshot
and of a delta that names every changed instance whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from controlplane.config import Config, load_config
from controlplane.core.events import FromNode
from controlplane.main import Server, start
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.api import FleetState, InstanceView, LiveFrame
from transfer.terms import KvLayout, ModelIdentity, Role
from transfer.wire.messages import PROTOCOL_VERSION, Heartbeat, Hello, LoadReport
from ui.feed import fold
from ui.sse import read_events

MODEL = ModelIdentity(name="m", revision="r", tokenizer="t", vocab_size=2, max_context=131072, eos_token_ids=())
LAYOUT = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16", rope="none")
NUM_BLOCKS = 20_000
SETTLE_S = 2.0
FOLLOW = """
import asyncio, sys, aiohttp, uvloop
async def follow(session, url):
    async with session.get(url + "/v1/live") as response:
        async for _ in response.content.iter_any():
            pass
async def main(url, count):
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(follow(session, url) for _ in range(count)))
uvloop.run(main(sys.argv[1], int(sys.argv[2])))
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each of the two measurements")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(configured(Path(folder)), options.instances, options.clients, options.seconds))
    print(f"{options.instances} instances, {options.seconds:g} s each:")
    print(f"  control plane without clients   {found['alone']:6.2%} of a core ({found['alone_s']:.3f} CPU seconds)")
    print(f"  with {options.clients} clients of the feed    {found['fed']:6.2%} of a core ({found['fed_s']:.3f})")
    print(f"  the feed itself                 {found['fed'] - found['alone']:6.2%} of a core")
    print(f"  bytes: delta {found['delta_bytes']:.0f}, with instances whole {found['whole_bytes']:.0f}, "
          f"snapshot {found['snapshot_bytes']:.0f}")  # fmt: skip
    if options.json is not None:
        keys = {"peer": None, "peer_name": None, "ratio": None}
        rows = [
            {"name": "live feed to 100 clients", "ours": found["fed"] - found["alone"], "unit": "cores", **keys},
            {"name": "bytes of a delta", "ours": found["delta_bytes"], "unit": "bytes", **keys,
             "peer": found["whole_bytes"], "peer_name": "instances whole",
             "ratio": found["whole_bytes"] / found["delta_bytes"]},
        ]  # fmt: skip
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def configured(folder: Path) -> Config:
    chosen = {
        "model.name": "llama-3.1-8b", "model.engine": "emulated", "server.port": "0", "server.wire_port": "0",
        "history.directory": str(folder), "history.flight_recorder": "false",
    }  # fmt: skip
    return load_config(None, {}, chosen)


async def measure(config: Config, num_instances: int, num_clients: int, seconds: float) -> dict[str, float]:
    server = await start(config)
    nodes = Nodes(server, num_instances)
    beating = asyncio.create_task(nodes.run())
    try:
        await asyncio.sleep(SETTLE_S)
        alone_s, alone = await cpu(seconds)
        followers = await asyncio.create_subprocess_exec(sys.executable, "-c", FOLLOW, server.url, str(num_clients))
        try:
            await asyncio.sleep(SETTLE_S)
            fed_s, fed = await cpu(seconds)
        finally:
            followers.kill()
            await followers.wait()
        return {"alone_s": alone_s, "alone": alone, "fed_s": fed_s, "fed": fed} | await sizes(server.url)
    finally:
        beating.cancel()
        await server.close()


async def cpu(seconds: float) -> tuple[float, float]:
    """CPU seconds of this process over a span, and their share of it."""
    began, used = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    spent = time.process_time() - used
    return spent, spent / (time.monotonic() - began)


async def sizes(url: str) -> dict[str, float]:
    """Bytes of a snapshot and, as the median of some, of a delta: as it is, and with its instances whole."""
    deltas: list[int] = []
    wholes: list[int] = []
    state: FleetState | None = None
    snapshot = 0
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/live") as response:
        async for event in read_events(response.content):
            frame = msgspec.json.decode(event.data, type=LiveFrame)
            state = fold(state, frame)
            if frame.kind == "snapshot":
                snapshot = len(event.data)
                continue
            views: dict[str, InstanceView] = {one.id: one for one in state.instances if one.id in frame.ids}
            whole: dict[str, Any] = {
                "seq": frame.seq,
                "kind": "delta",
                "changed": {**frame.changed, "instances": views},
            }
            deltas.append(len(event.data))
            wholes.append(len(msgspec.json.encode(whole)))
            if len(deltas) == 5:
                break
    return {"delta_bytes": statistics.median(deltas), "whole_bytes": statistics.median(wholes),
            "snapshot_bytes": float(snapshot)}  # fmt: skip


class Nodes:
    """Instances that say what nodes say, each once a second, without a network."""

    def __init__(self, server: Server, count: int) -> None:
        self._scheduler, self._random = server.plane.scheduler, random.Random(1)
        self._names = [f"n{number}" for number in range(count)]
        for number, name in enumerate(self._names):
            hardware = preset("H800" if number % 2 else "H20")
            hello = Hello(
                protocol=PROTOCOL_VERSION, instance_id=name, epoch=1, role=Role.PREFILL if number % 2 else Role.DECODE,
                model=MODEL, layout=LAYOUT, engine="emulated", hardware=hardware,
                latency=latency_profile(hardware, shape("llama-3.1-8b")), num_blocks=NUM_BLOCKS,
                data_endpoint="tcp://127.0.0.1:9", host_id=f"host-{number // 8}", token_budget=8192,
            )  # fmt: skip
            self._scheduler.post(FromNode(instance_id=name, message=hello))

    async def run(self) -> None:
        while True:
            for name in self._names:
                self._scheduler.post(FromNode(instance_id=name, message=self._beat()))
                await asyncio.sleep(1.0 / len(self._names))

    def _beat(self) -> Heartbeat:
        draw = self._random.randrange
        load = LoadReport(
            num_running=draw(64), num_waiting=draw(4), queued_prefill_tokens=draw(20_000), num_blocks=NUM_BLOCKS,
            free_blocks=draw(NUM_BLOCKS), cached_blocks=draw(NUM_BLOCKS), step_s=self._random.uniform(0.01, 0.04),
            speed=self._random.uniform(0.9, 1.2),
        )  # fmt: skip
        return Heartbeat(epoch=1, state="ready", load=load)


if __name__ == "__main__":
    sys.exit(main())
