"""The agent as a process over real sockets: serves, leaves in order, is refused, dies with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nodes.engines.emulated import continuation
from transfer.kv.arena import SHM_DIR, SHM_PREFIX
from transfer.terms import SamplingParams, pack_tokens
from transfer.wire.endpoint import PeerEvent
from transfer.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    KvPeer,
    Message,
    NotWelcome,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    StepOutput,
    Welcome,
)
from transfer.wire.zmq import RouterEndpoint

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


class Control:
    """A control plane of one router: welcomes or refuses, and keeps what it hears."""

    def __init__(self, refusal: str | None = None) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.lost: list[str] = []
        self._refusal, self._changed = refusal, asyncio.Event()
        self.router = RouterEndpoint("tcp://127.0.0.1:0", on_message=self._on_message, on_peer=self._on_peer)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def kinds(self, instance: str) -> list[type[Message]]:
        return [type(message) for name, message in self.heard if name == instance]

    def last(self, kind: type[Message], instance: str) -> Message:
        return [message for name, message in self.heard if name == instance and isinstance(message, kind)][-1]

    def _on_message(self, peer: str, message: Message) -> None:
        self.heard.append((peer, message))
        if isinstance(message, Hello):
            if self._refusal:
                self.router.send(peer, NotWelcome(reason=self._refusal))
            else:
                self.router.send(peer, Welcome(control_epoch=1, role=message.role, heartbeat_s=0.5, lease_s=5.0))
        self._changed.set()

    def _on_peer(self, peer: str, event: PeerEvent) -> None:
        if event is PeerEvent.LOST:
            self.lost.append(peer)
        self._changed.set()


@contextlib.asynccontextmanager
async def control(refusal: str | None = None) -> AsyncIterator[Control]:
    one = Control(refusal)
    await one.router.start()
    try:
        yield one
    finally:
        await one.router.close()


@contextlib.asynccontextmanager
async def agent(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nodes.agent", *argv, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def emulated(address: str, *instances: str) -> list[str]:
    names = [word for instance in instances for word in ("--instance", instance)]
    return ["--control", address, *names, "--engine", "emulated", "--model", "llama-3.1-8b", "--hardware", "H800",
            "--num-blocks", "256", "--speed", "10"]  # fmt: skip


async def test_a_fleet_in_one_process_serves_and_leaves_in_order() -> None:
    async with control() as plane, agent(*emulated(plane.router.address, "p0=prefill", "d0=decode@H20")) as process:
        await plane.until(lambda: Heartbeat in plane.kinds("p0") and Heartbeat in plane.kinds("d0"))
        hello = plane.last(Hello, "d0")
        assert isinstance(hello, Hello)
        assert (hello.hardware.name, hello.num_blocks, hello.engine) == ("H20", 256, "emulated")
        tokens = list(b"Tell me about the sea, and about the ships that are on it.")
        plane.router.send(
            "d0",
            Reserve(request_id="r", generation=1, tokens=pack_tokens(tokens), num_output=0, remote=True, lease_s=5.0,
                    sampling=SamplingParams(max_tokens=12)),
        )  # fmt: skip
        await plane.until(lambda: Reserved in plane.kinds("d0"))
        target = KvPeer(instance_id="d0", epoch=hello.epoch, data_endpoint=hello.data_endpoint, host_id=hello.host_id)
        plane.router.send(
            "p0",
            Prefill(
                request_id="r", generation=1, tokens=pack_tokens(tokens), target=target, have_tokens=0, lease_s=5.0
            ),
        )
        items = lambda: [item for _, m in plane.heard if isinstance(m, StepOutput) for item in m.items]  # noqa: E731
        await plane.until(lambda: any(item.finish for item in items()) and PrefillDone in plane.kinds("p0"))
        assert [token for item in items() for token in item.token_ids] == continuation(tokens, 12)

        process.terminate()
        await plane.until(lambda: {"p0", "d0"} <= set(plane.lost))
        assert Goodbye in plane.kinds("p0")
        assert Goodbye in plane.kinds("d0")
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


async def test_a_refused_agent_prints_the_sentence_and_exits_with_3() -> None:
    async with (
        control("d0 serves another model") as plane,
        agent(*emulated(plane.router.address, "d0=decode")) as process,
    ):
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        assert process.returncode == 3
        assert b"phaseplane node: d0: d0 serves another model" in stderr
        assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--control", "tcp://127.0.0.1:1"], b"--instance is missing"),
        (emulated("tcp://127.0.0.1:1", "d0=decode@H9000"), b"no hardware class 'H9000'"),
        (emulated("not-an-address", "d0=decode"), b"must look like tcp://"),
        (
            ["--control", "tcp://127.0.0.1:1", "--instance", "d0=decode", "--model", "nothing"],
            b"phaseplane pull nothing",
        ),
    ],
)
async def test_a_wrong_setting_is_one_sentence_and_exit_status_2(argv: list[str], sentence: bytes) -> None:
    async with agent(*argv) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert sentence in stderr
    assert b"Traceback" not in stderr


async def test_it_ends_when_its_parent_is_killed() -> None:
    async with control() as plane:
        command = [sys.executable, "-m", "nodes.agent", *emulated(plane.router.address, "d0=decode")]
        starter = (
            "import os, subprocess, sys, time\n"
            f"child = subprocess.Popen({command!r} + ['--parent-pid', str(os.getpid())], stderr=subprocess.DEVNULL)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", starter, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        child = int(await parent.stdout.readline())
        await plane.until(lambda: Heartbeat in plane.kinds("d0"))
        parent.kill()
        await parent.communicate()
        await plane.until(lambda: "d0" in plane.lost)
        async with asyncio.timeout(DEADLINE_S):
            while _alive(child):  # noqa: ASYNC110  (not our child: it cannot be waited for)
                await asyncio.sleep(0.05)
        assert not list(SHM_DIR.glob(f"{SHM_PREFIX}{child}-*"))


async def test_a_killed_agents_memory_is_removed_by_the_next_one() -> None:
    stale = SHM_DIR / f"{SHM_PREFIX}{2**22 - 1}-feedbeef"  # no process has that id
    stale.write_bytes(b"0")
    try:
        async with control() as plane, agent(*emulated(plane.router.address, "d0=decode")) as process:
            await plane.until(lambda: Heartbeat in plane.kinds("d0"))
            assert not stale.exists()
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        stale.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
