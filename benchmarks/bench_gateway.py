"""What Phaseplane adds to a request: TTFT and the control plane's CPU, over a zero-time engine, beside a plain proxy.

Four servers take a streamed request of 8 tokens in turn, round after round: a stub that answers at once (the floor),
an aiohttp reverse proxy in front of it (the peer: it forwards and decides nothing), and Phaseplane with one mixed
instance and with a prefill and a decode instance, whose KV crosses between them. Ours includes the nodes' part: every
prompt is new, tokenised, scheduled, batched and, by the pair, handed off. A ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import ClientSession, TCPConnector, web

MODEL = "llama-3.1-8b"
NUM_TOKENS = 8
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
START_S = 30.0
PROXY = "aiohttp reverse proxy"
_numbers = itertools.count()


@dataclass
class Target:
    """One server. pid: whose CPU counts; None where it does not."""

    port: int
    pid: int | None
    ttft_s: list[float] = field(default_factory=list)
    cpu_s: dict[int, list[float]] = field(default_factory=lambda: {1: [], 16: []})
    per_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="of one target in one round at one concurrency")
    parser.add_argument("--serve", choices=("stub", "proxy"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(stub if options.serve == "stub" else proxy(options.upstream), options.port))
        return 0
    with targets() as found:
        uvloop.run(measure(found, options.rounds, options.requests))
        rows = list(results(found))
    for row in rows:
        print(f"{row['name']:34} {row['ours']:9.3f} {row['unit']:6} {row['peer_name']} {row['peer']:9.3f}  "
              f"{row['ratio']:.2f}x")  # fmt: skip
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


@contextmanager
def targets() -> Iterator[dict[str, Target]]:
    """Start every server, wait until each answers, stop them all."""
    here, children = [sys.executable, __file__], list[subprocess.Popen[bytes]]()
    stub_port, proxy_port, *ours = free_ports(6)
    with tempfile.TemporaryDirectory() as state:

        def start(*command: str) -> subprocess.Popen[bytes]:
            with Path(state, f"{len(children)}.log").open("wb") as log:
                children.append(subprocess.Popen(command, stderr=log, stdout=log, cwd=Path(__file__).parent.parent))
            return children[-1]

        try:
            start(*here, "--serve", "stub", "--port", str(stub_port))
            peer = start(*here, "--serve", "proxy", "--port", str(proxy_port), "--upstream", str(stub_port))
            found = {"direct": Target(stub_port, None), "proxy": Target(proxy_port, peer.pid)}
            fleets = {"mixed": ("m0=mixed",), "pair": ("p0=prefill", "d0=decode")}
            for place, (name, instances) in enumerate(fleets.items()):
                port, wire = ours[2 * place], ours[2 * place + 1]
                common = ("--model", MODEL, "--engine", "emulated")
                python = (sys.executable, "-m")
                addresses = ("--port", str(port), "--wire-port", str(wire), "--state", f"{state}/{name}")
                control = start(*python, "controlplane.main", *common, *addresses)
                flags = [flag for instance in instances for flag in ("--instance", instance)]
                node = ("--control", f"tcp://127.0.0.1:{wire}", "--speed", "inf", "--parent-pid", str(os.getpid()))
                start(*python, "nodes.agent", *common, *node, *flags)
                found[name] = Target(port, control.pid)
            uvloop.run(wait_for(found))
            yield found
        finally:
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait(15)


async def wait_for(found: dict[str, Target]) -> None:
    """Until every target streams a whole answer. Raises SystemExit naming the one that does not."""
    for name, target in found.items():
        deadline = time.monotonic() + START_S
        while True:
            try:
                await asyncio.wait_for(requests(target.port, 1, []), 5)
                break
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{name} did not answer within {START_S:g} s") from None
                await asyncio.sleep(0.2)


async def measure(found: dict[str, Target], rounds: int, num_requests: int) -> None:
    """Every target once a round, at concurrency 1 and 16; the first round only warms up."""
    for number in range(rounds + 1):
        for target in found.values():
            for concurrency in (1, 16):
                ttft_s = list[float]()
                cpu, started = cpu_s(target.pid), time.perf_counter()
                each = num_requests // concurrency
                await asyncio.gather(*(requests(target.port, each, ttft_s) for _ in range(concurrency)))
                wall = time.perf_counter() - started
                if number == 0:
                    continue
                target.cpu_s[concurrency].append((cpu_s(target.pid) - cpu) / len(ttft_s))
                if concurrency == 1:
                    target.ttft_s.append(statistics.median(ttft_s))
                else:
                    target.per_s.append(len(ttft_s) / wall)


def results(found: dict[str, Target]) -> Iterator[dict[str, Any]]:
    """The rows: medians over rounds."""
    floor, peer = statistics.median(found["direct"].ttft_s), found["proxy"]
    for name in ("mixed", "pair"):
        ours = found[name]
        yield row(f"gateway_{name}_added_ttft_c1", *(statistics.median(t.ttft_s) - floor for t in (ours, peer)))
        for concurrency in (1, 16):
            cpu = (statistics.median(target.cpu_s[concurrency]) for target in (ours, peer))
            yield row(f"gateway_{name}_cpu_per_request_c{concurrency}", *cpu)
        rate, theirs = statistics.median(ours.per_s), statistics.median(peer.per_s)
        yield {
            "name": f"gateway_{name}_requests_c16", "ours": round(rate, 1), "peer": round(theirs, 1),
            "peer_name": PROXY, "unit": "req/s", "ratio": round(rate / theirs, 3),
        }  # fmt: skip


def row(name: str, ours_s: float, peer_s: float) -> dict[str, Any]:
    """A time, lower is better: the ratio is how many times ours fits into the peer's."""
    return {
        "name": name, "ours": round(ours_s * 1e3, 4), "peer": round(peer_s * 1e3, 4), "peer_name": PROXY, "unit": "ms",
        "ratio": round(peer_s / ours_s, 3),
    }  # fmt: skip


async def requests(port: int, count: int, ttft_s: list[float]) -> None:
    """`count` requests one after the other on one connection, by the bytes, so that the client costs little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _ in range(count):
            sent = next_request()
            started = time.perf_counter()
            writer.write(sent)
            await reader.readuntil(b"data: {")
            ttft_s.append(time.perf_counter() - started)
            await reader.readuntil(b"[DONE]\n\n")
            await reader.readuntil(b"0\r\n\r\n")
    finally:
        writer.close()


def next_request() -> bytes:
    """A prompt that no cache holds, of always the same length."""
    prompt = f"{next(_numbers):08d} {PROMPT}"
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(wanted).encode()
    return f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def cpu_s(pid: int | None) -> float:
    """CPU seconds of all threads of a process so far."""
    if pid is None:
        return 0.0
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(handler: Handler, port: int) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def stub(request: web.Request) -> web.StreamResponse:
    """An engine that needs no time."""
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for place in range(NUM_TOKENS):
        choice = {"index": 0, "text": "x", "finish_reason": "length" if place == NUM_TOKENS - 1 else None}
        await response.write(b"data: " + json.dumps({"model": MODEL, "choices": [choice]}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def proxy(upstream: int) -> Handler:
    """Forwards to one upstream, chunk by chunk, over kept connections."""
    sessions: list[ClientSession] = []

    async def forward(request: web.Request) -> web.StreamResponse:
        if not sessions:
            sessions.append(ClientSession(connector=TCPConnector(limit=0)))
        url = f"http://127.0.0.1:{upstream}/v1/completions"
        async with sessions[0].post(url, data=await request.read()) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    return forward


if __name__ == "__main__":
    sys.exit(main())
