"""Brings a fleet up on this machine, keeps it up and takes it down: what `phaseplane up` does once it knows what."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.status import Status

from transfer.api import InstanceView
from transfer.terms import Role
from ui.client import FleetClient
from ui.errors import ApiError, CliError
from ui.launch import FleetPlan, Member, console_argv, control_argv, groups, members, node_argv, threads_each
from ui.processes import Child, Supervisor, exit_text
from ui.render import make_console

POLL_S = 0.1
ASK_S = 5.0
CONSOLE_WAIT_S = 30.0
"""Longest wait for the console to listen, so that the address that is told can be opened."""
CONTROL = "the control plane"
CONSOLE = "the console"
SERVING = "ready"


@dataclass(slots=True)
class Fleet:
    """The running programs. wait_s: longest wait until all instances serve. api_key: for asking the control plane.
    console_port: where the console listens, None for none."""

    plan: FleetPlan
    wait_s: float
    ready_file: Path | None = None
    api_key: str | None = None
    console_port: int | None = None
    members: list[Member] = field(default_factory=list)
    _groups: dict[str, list[Member]] = field(default_factory=dict)
    _returning: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By program: watches for one that was started again until it serves."""
    _num_interrupts: int = 0

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.plan.host, self.plan.host)
        return f"http://[{host}]:{self.plan.port}" if ":" in host else f"http://{host}:{self.plan.port}"

    @property
    def console_url(self) -> str | None:
        return None if self.console_port is None else f"http://127.0.0.1:{self.console_port}"

    @property
    def logs(self) -> Path:
        return self.plan.state / "logs"

    async def run(self) -> None:
        """Start, serve until Ctrl-C or SIGTERM, stop. Raises CliError when it cannot start or cannot go on."""
        loop = asyncio.get_running_loop()
        supervisor = Supervisor(say, self._before_restart)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, stop, supervisor)
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._start(supervisor)
            if await self._serves(supervisor, stopping):
                await self._start_console(supervisor, stopping)
                self._write_ready_file()
                self._tell()
                ends: set[asyncio.Future[Any]] = {stopping, supervisor.gave_up}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    raise _ended(supervisor.gave_up.result(), "cannot be kept running")
        finally:
            stopping.cancel()
            self._remove_ready_file()
            for task in self._returning.values():
                task.cancel()
            await asyncio.gather(*self._returning.values(), return_exceptions=True)
            say("stopping")
            await supervisor.stop()
            say("stopped")

    def _on_signal(self, stop: asyncio.Event, supervisor: Supervisor) -> None:
        """The first one stops in order, the second one kills."""
        self._num_interrupts += 1
        stop.set()
        if self._num_interrupts > 1:
            supervisor.kill()

    async def _start(self, supervisor: Supervisor) -> None:
        plan, pid = self.plan, os.getpid()
        self.members = members(plan)
        threads = threads_each(plan, len(os.sched_getaffinity(0)))
        say(f"starting {CONTROL} and {len(self.members)} instances")
        await supervisor.start(Child(CONTROL, control_argv(plan), self.logs / "control.log", essential=True))
        for number, group in enumerate(groups(plan, self.members)):
            alone = len(group) == 1
            name = group[0].instance_id if alone else f"node {number} ({len(group)} instances)"
            log = self.logs / (f"{name}.log" if alone else f"node-{number}.log")
            self._groups[name] = group
            await supervisor.start(Child(name, node_argv(plan, group, threads, pid), log))

    async def _start_console(self, supervisor: Supervisor, stopping: asyncio.Task[bool]) -> None:
        """When all serve: until then it would only take their time. The fleet goes on without it."""
        if self.console_port is None:
            return
        env = {} if self.api_key is None else {"PHASEPLANE_API_KEY": self.api_key}
        log = self.logs / "console.log"
        await supervisor.start(Child(CONSOLE, console_argv(self.url, self.console_port), log, env=env))
        listening = asyncio.create_task(_until_listening(self.console_port))
        await asyncio.wait({listening, stopping}, timeout=CONSOLE_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done() and not stopping.done():
            say(f"{CONSOLE} does not listen after {CONSOLE_WAIT_S:g} s; its log is {log}")
        listening.cancel()

    async def _serves(self, supervisor: Supervisor, stopping: asyncio.Task[bool]) -> bool:
        """True when all serve, False when asked to stop. Raises CliError when a program ended or is late."""
        waiting = asyncio.create_task(self._until_serving())
        everything: set[asyncio.Future[Any]] = {waiting, stopping, supervisor.first_death}
        try:
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if stopping.done():
            return False
        if supervisor.first_death.done():
            raise _ended(supervisor.first_death.result(), "did not start")
        waiting.result()
        supervisor.may_restart = True
        return True

    async def _until_serving(self) -> None:
        wanted = {member.instance_id for member in self.members}
        missing = sorted(wanted)
        console = make_console(sys.stderr)
        with contextlib.suppress(TimeoutError), Status(_progress(0, len(wanted)), console=console) as status:
            async with asyncio.timeout(self.wait_s), FleetClient(self.url, self.api_key, ASK_S) as client:
                while True:
                    missing = sorted(wanted - {view.id for view in await _serving(client)})
                    status.update(_progress(len(wanted) - len(missing), len(wanted)))
                    if not missing and await client.is_ready():
                        return
                    await asyncio.sleep(POLL_S)
        raise CliError(
            f"{len(missing)} of {len(wanted)} instances ({', '.join(missing[:3])}) do not serve in {self.wait_s:g} s; "
            f"see the logs in {self.logs}, or allow more time with `phaseplane up --wait {self.wait_s * 2:g}`"
        )

    async def _before_restart(self, child: Child) -> None:
        """A node that starts again takes the roles the fleet gave it last, not those it began with."""
        if child.name == CONSOLE:
            return
        group = self._groups.get(child.name)
        lives: dict[str, int] = {}
        if group is not None:
            with contextlib.suppress(CliError):
                async with FleetClient(self.url, self.api_key, ASK_S) as client:
                    fleet = await client.fleet()
                lives = {view.id: view.epoch for view in fleet.instances}
                roles = {view.id: view.role for view in fleet.instances if view.role in set(Role)}
                threads = threads_each(self.plan, len(os.sched_getaffinity(0)))
                child.argv = node_argv(self.plan, group, threads, os.getpid(), roles)
        if (earlier := self._returning.get(child.name)) is not None:
            earlier.cancel()
        self._returning[child.name] = asyncio.create_task(self._say_back(child.name, group or self.members, lives))

    async def _say_back(self, name: str, group: list[Member], lives: dict[str, int]) -> None:
        """Say so when all of `group` serve again, none of them in a life (epoch) that it had in `lives`."""
        wanted = {member.instance_id for member in group}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wait_s), FleetClient(self.url, self.api_key, ASK_S) as client:
                while True:
                    found = {view.id: view for view in await _serving(client) if view.id in wanted}
                    if len(found) == len(wanted) and all(lives.get(id) != view.epoch for id, view in found.items()):
                        roles = sorted({view.role for view in found.values()})
                        what = f"serving {' and '.join(roles)}" if name != CONTROL else "and all instances with it"
                        say(f"{name} is back, {what}")
                        return
                    await asyncio.sleep(POLL_S)
        say(f"{name} has not come back within {self.wait_s:g} s; see the logs in {self.logs}")

    def _tell(self) -> None:
        """Where everything is, on standard output."""
        url, plan = self.url, self.plan
        at = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
        body = json.dumps(
            {
                "model": Path(plan.model).name,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
                "stream": True,
            }
        )
        key = "" if self.api_key is None else ' -H "Authorization: Bearer $PHASEPLANE_API_KEY"'
        console = "" if self.console_url is None else f"  console {self.console_url}\n"
        asks = "" if self.api_key is None else "; set PHASEPLANE_API_KEY to a secret of server.api_keys"
        print(
            f"serving {Path(plan.model).name} on {split(self.members)} at {url}{asks}\n"
            f"  ask     curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
            f"  chat    phaseplane chat{at}\n"
            f"  status  phaseplane status{at}\n"
            f"{console}"
            f"  logs    {self.logs}\n"
            f"  nodes   join at tcp://127.0.0.1:{plan.wire_port}\n"
            "Ctrl-C stops everything",
            flush=True,
        )

    def _write_ready_file(self) -> None:
        if self.ready_file is None:
            return
        text = json.dumps({"url": self.url, "pid": os.getpid(), "console": self.console_url}) + "\n"
        draft = self.ready_file.with_name(f".{self.ready_file.name}.{os.getpid()}")
        try:
            self.ready_file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.ready_file)
        except OSError as error:
            raise CliError(
                f"cannot write {self.ready_file} ({error.strerror}); give another file with --ready-file"
            ) from None

    def _remove_ready_file(self) -> None:
        if self.ready_file is not None:
            with contextlib.suppress(OSError):
                self.ready_file.unlink(missing_ok=True)


@contextlib.contextmanager
def own_state(directory: Path) -> Iterator[None]:
    """Hold the state directory for this fleet. Raises CliError when another one has it or it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "up.lock").open("w")
    except OSError as error:
        raise CliError(f"cannot write {directory} ({error.strerror}); choose another with --state DIR") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CliError(
                f"another fleet uses {directory}; stop it, or start this one with `phaseplane up --state DIR`"
            ) from None
        yield


def split(fleet: list[Member]) -> str:
    """`2P1D`, as the fleet itself would call it, and its pool nodes."""
    count = {role: sum(member.role == role for member in fleet) for role in Role}
    text = f"{count[Role.PREFILL]}P{count[Role.DECODE]}D"
    if count[Role.MIXED]:
        mixed = f"{count[Role.MIXED]}M"
        text = mixed if text == "0P0D" else f"{text}+{mixed}"
    return f"{text} with {count[Role.KV_POOL]} KV pool nodes" if count[Role.KV_POOL] else text


def say(text: str) -> None:
    """A line about what happens, on standard error."""
    print(text, file=sys.stderr, flush=True)


async def _until_listening(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(POLL_S)


async def _serving(client: FleetClient) -> list[InstanceView]:
    """The instances that serve; none while the control plane is not there yet."""
    try:
        fleet = await client.fleet()
    except ApiError as error:
        if error.status == 401:
            raise
        return []
    except CliError:
        return []
    return [view for view in fleet.instances if view.state == SERVING]


def _progress(num_serving: int, num_wanted: int) -> str:
    return f"{num_serving} of {num_wanted} instances serve"


def _ended(end: tuple[Child, int], what: str) -> CliError:
    child, code = end
    word = child.last_word.rstrip(".")
    hint = "" if "`phaseplane " in word else "; run `phaseplane doctor`"
    return CliError(f"{child.name} {what} ({exit_text(code)}): {word}{hint}; its log is {child.log}")
