"""Starts a whole fleet with `phaseplane up` in processes of its own, asks it, kills parts of it, stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parent.parent.parent
CLI = [sys.executable, "-m", "ui.cli"]
START_S = 90.0
REST_S = 15.0


@dataclass
class Fleet:
    """A running fleet. `url` is its HTTP address, `state` its directory with logs, history and flight journal."""

    url: str
    state: Path
    process: subprocess.Popen[str]

    def cli(self, *args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a phaseplane command against this fleet."""
        return subprocess.run(
            [*CLI, *args, "--url", self.url], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False
        )

    def status(self) -> dict[str, Any]:
        run = self.cli("status", "--json")
        assert run.returncode == 0, run.stderr
        state: dict[str, Any] = json.loads(run.stdout)
        return state

    def at_rest(self) -> dict[str, Any]:
        """Wait until nothing is in flight and every engine's heartbeat says that all its blocks are back."""
        end = time.monotonic() + REST_S
        while True:
            state = self.status()
            busy = [
                i["id"] for i in state["instances"] if i["role"] != "kv_pool" and i["free_blocks"] != i["num_blocks"]
            ]
            if not busy and state["in_flight"] == 0 and state["orphaned_kv_blocks"] == 0:
                return state
            assert time.monotonic() < end, (
                f"{state['in_flight']} in flight, {state['orphaned_kv_blocks']} orphaned blocks, "
                f"blocks held on {busy} after {REST_S} s: {self.logs()}"
            )
            time.sleep(0.2)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def epochs(self) -> dict[str, int]:
        """Lives of the instances that are ready now."""
        return {i["id"]: i["epoch"] for i in self.status()["instances"] if i["state"] == "ready"}

    def wait_until_ready(
        self, instances: Sequence[str], than: dict[str, int] | None = None, timeout_s: float = 40
    ) -> None:
        """Wait until every named instance is ready, in another life than in `than` when given."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # the control plane may be down just now
                now = self.epochs()
                if all(name in now and now[name] != (than or {}).get(name) for name in instances):
                    return
            time.sleep(0.2)
        raise AssertionError(f"{instances} did not become ready within {timeout_s} s: {self.logs()}")

    def pids(self, instance: str) -> list[int]:
        """Processes that host `instance` (an agent may host several)."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                hosted = any(a.startswith(f"{instance}=".encode()) for a in argv)
                if hosted and str(self.state).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self, instance: str) -> None:
        self.signal(instance, "KILL")

    def signal(self, instance: str, name: str) -> list[int]:
        """Send SIGNAME to what hosts the instance."""
        pids = self.pids(instance)
        assert pids, f"no process hosts {instance}"
        for pid in pids:
            os.kill(pid, getattr(signal, f"SIG{name}"))
        return pids

    def kill_control(self) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if b"controlplane.main" in argv and str(self.state).encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
        raise AssertionError("no control plane process found")

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted((self.state / "logs").glob("*.log")))


@contextlib.contextmanager
def running(state: Path, *args: str, env: dict[str, str] | None = None, start_s: float = START_S) -> Iterator[Fleet]:
    """`phaseplane up ARGS` on a free port, ready to serve; stopped with SIGTERM at the end."""
    ready, out = state / "ready.json", state / "up.log"
    state.mkdir(parents=True, exist_ok=True)
    command = [*CLI, "up", "--port", "0", "--no-console", "--state", str(state), "--ready-file", str(ready), *args]
    with out.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, cwd=ROOT,
            env={**os.environ, "E2E_STATE": str(state), **(env or {})},
        )  # fmt: skip
    try:
        end = time.monotonic() + start_s
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the fleet did not come up: {out.read_text()}")
            time.sleep(0.05)
        yield Fleet(json.loads(ready.read_text())["url"], state, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"`phaseplane up` did not stop within 20 s: {out.read_text()}") from None


@dataclass
class Answer:
    """What one streamed completion gave: token ids, text, finish reason, error sentence."""

    token_ids: list[int]
    text: str
    finish: str | None
    error: str | None
    usage: dict[str, Any] | None = None


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """One streamed /v1/completions call, with the ids of its tokens."""
    answer = Answer([], "", None, None)
    body = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **body}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            answer.error = f"{response.status} {await response.text()}"
            return answer
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
                continue
            if event.get("usage"):
                answer.usage = event["usage"]
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.token_ids += choice.get("token_ids") or []
                answer.finish = choice["finish_reason"] or answer.finish
    return answer


async def complete_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int = 32) -> list[Answer]:
    """All of them, at most `concurrency` at once, answers in order."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await complete(session, url, body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def ask_and_leave(url: str, bodies: Sequence[dict[str, Any]], rng: random.Random, longest_s: float) -> None:
    """All at once; each client leaves at a moment of its own, before, while or after it is answered."""

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.001, longest_s)):
                await complete(session, url, body)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, body) for body in bodies))
