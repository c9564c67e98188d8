"""Programs that `up` starts: small real processes that die, hang, say too much and lose their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ui_fakes import eventually
from ui_kit import SLEEP, is_alive

from ui import processes
from ui.processes import Child, RotatingLog, Supervisor


def child(tmp_path: Path, program: str, name: str = "it", **more: object) -> Child:
    return Child(name, [sys.executable, "-c", program], tmp_path / f"{name}.log", **more)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(eventually, holds, 10.0)


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


async def test_a_killed_child_starts_again_and_it_says_so(tmp_path):
    said: list[str] = []
    recalled: list[str] = []

    async def recall(dead: Child) -> None:
        recalled.append(dead.name)

    supervisor = Supervisor(said.append, recall)
    supervisor.may_restart = True
    one = child(tmp_path, SLEEP)
    await supervisor.start(one)
    first = one.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: one.pid != first)
    assert "killed by SIGKILL" in said[0]
    assert recalled == ["it"]
    second = one.pid
    await supervisor.stop()
    assert second is not None
    assert not is_alive(second)


async def test_a_child_that_keeps_dying_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MAX_RESTARTS", 2)
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.may_restart = True
    program = "import sys; print('noise'); print('error: it is broken', file=sys.stderr); sys.exit(3)"
    await supervisor.start(child(tmp_path, program, essential=True))
    async with asyncio.timeout(20):
        dead, code = await supervisor.gave_up
    assert (dead.name, code, dead.last_word) == ("it", 3, "it is broken")
    assert len(said) == 3
    assert "it is broken" in said[-1]
    assert (tmp_path / "it.log").read_text().count("noise") == 3
    await supervisor.stop()


async def test_a_child_that_dies_while_starting_ends_the_start(tmp_path):
    supervisor = Supervisor(lambda _: None)
    await supervisor.start(child(tmp_path, "raise SystemExit(4)"))
    async with asyncio.timeout(10):
        _, code = await supervisor.first_death
    assert code == 4
    await supervisor.stop()


async def test_stop_kills_what_ignores_it(tmp_path):
    supervisor = Supervisor(lambda _: None)
    one, two = child(tmp_path, STUBBORN, "one"), child(tmp_path, SLEEP, "two")
    await supervisor.start(one)
    await supervisor.start(two)
    await until(lambda: bool(one.last_lines))
    pids = [one.pid, two.pid]
    began = time.monotonic()
    await supervisor.stop(grace_s=0.3)
    assert time.monotonic() - began < 5
    assert not any(is_alive(pid) for pid in pids if pid is not None)


def test_children_die_with_a_killed_parent(tmp_path):
    program = (
        "import asyncio, sys, pathlib\n"
        "from ui.processes import Child, Supervisor\n"
        "async def main():\n"
        "    s = Supervisor(print)\n"
        f"    c = Child('it', [sys.executable, '-c', {SLEEP!r}], pathlib.Path({str(tmp_path)!r}) / 'it.log')\n"
        "    await s.start(c)\n"
        "    print(c.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert eventually(lambda: not is_alive(pid))


def test_a_log_is_bounded_by_two_files(tmp_path):
    log = RotatingLog(tmp_path / "x.log", max_bytes=100)
    for number in range(50):
        log.write(b"line %03d\n" % number)
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    assert (tmp_path / "x.log").read_text().endswith("line 049\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]
