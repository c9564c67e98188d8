"""Makes the compiled copy (compiled.py): `make fast`, and `phaseplane simulate` before its first long run.

It takes a minute or two of one core, mypy and a C compiler; where something is missing it says what, and whoever asked
goes on in plain Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from controlplane.sim.compiled import ROOT, copy_dir, sources, use_compiled

TIMEOUT_S = 600.0
KEEP = 3
"""Copies that stay: of other checkouts, and of the code as it was before the last changes."""
LOCK, BUILDING, LIB = "lock", ".building-", "lib"
TRIAL = (
    "--fleet=1xH800:prefill,1xH20:decode,1xH800:mixed,1xCPU:kv_pool", "--model=llama-3.1-8b",
    "--trace=generated:agentic", "--rate=3", "--num=60", "--slo=ttft=5,tpot=.05", "--fault=kill:d0@5+2",
)  # fmt: skip
"""What a new copy has to simulate before anybody uses it."""


def compile_aloud(console: Console, again: bool = False) -> bool:
    """As ensure_copy, telling a person; whether there is a copy now."""
    target = copy_dir()
    if not target.is_dir() and not lacking():
        console.print("compiling the simulator for this run and later ones, a minute or two; --no-compile runs without")
    began = time.monotonic()
    with console.status("compiling") if console.is_terminal else contextlib.nullcontext():
        reason = ensure_copy(target, again=again)
    took_s = time.monotonic() - began
    console.print(f"not compiled, about half as fast: {reason}" if reason else f"compiled in {took_s:.0f} s")
    return not reason


def ensure_copy(target: Path, timeout_s: float = TIMEOUT_S, *, again: bool = False) -> str:
    """Make the copy of the present sources, which is to be copy_dir(), unless it is there. Returns why there is none,
    in words; "" when there is. again: also where it failed before."""
    until, log = time.monotonic() + timeout_s, target.with_suffix(".log")
    if target.is_dir():
        return ""
    if reason := lacking():
        return reason
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent / LOCK, until) as alone:
            if target.is_dir():
                return ""
            if not alone:
                return f"another process has compiled for {timeout_s:.0f} s"
            if log.is_file() and not again:
                return f"it failed before, see {log}; `make fast` tries again"
            return _build(target, log, until)
    except OSError as error:
        return f"{error.filename or target} cannot be written: {error.strerror}"


def lacking() -> str:
    """What this machine has not got, in words; "" when it has all."""
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "that takes mypy and setuptools, which `make install` brings"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler}); install gcc"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"there is no {header}; install Python's headers (python3-dev)"


def compile_into(directory: Path) -> None:
    """Run mypyc and the C compiler, then a few requests with what they made, in this process, whose folder is ROOT.
    Raises SystemExit when one fails; a copy that crashes takes this process with it, and is never used."""
    from mypyc.build import mypycify
    from setuptools import setup

    options = [f"--cache-dir={directory / 'types'}", "--config-file=", "--ignore-missing-imports"]
    names = [str(path.relative_to(ROOT)) for path in sources()]
    extensions = mypycify([*options, *names], opt_level="3", debug_level="0", target_dir=str(directory / "c"))
    os.chdir(directory)  # where no pyproject.toml tells setuptools about another package
    setup(
        name="compiled", packages=[], ext_modules=extensions,
        script_args=["build_ext", f"--build-lib={directory / LIB}", f"--build-temp={directory / 'objects'}"],
    )  # fmt: skip
    if not use_compiled(directory / LIB):
        sys.exit("nothing was compiled")
    from controlplane.sim.program import main

    if status := main(TRIAL):
        sys.exit(status)


def _build(target: Path, log: Path, until: float) -> str:
    """In a folder of its own, then in one move to where it is looked for."""
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=target.parent) as name:
        said = Path(name) / "said"
        command = [sys.executable, "-m", "controlplane.sim.compiling", name]
        if failed := _run(command, said, until - time.monotonic()):
            said.replace(log)
            return f"{failed}, see {log}"
        if copy_dir().name != target.name:
            return "the sources were changed meanwhile; run it again"
        (Path(name) / LIB).rename(target)
    log.unlink(missing_ok=True)
    _forget_old(target)
    return ""


def _run(command: list[str], said: Path, timeout_s: float) -> str:
    """Why it failed, or "". Nothing of it is left running."""
    with said.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )  # fmt: skip
    try:
        status = process.wait(timeout=timeout_s)
        return f"it failed with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _forget_old(newest: Path) -> None:
    """Old copies, logs, and what builders that were killed have left. Whoever still runs with an old copy has loaded
    it."""
    others = [one for one in newest.parent.iterdir() if one.name not in (newest.name, LOCK)]
    others.sort(key=lambda one: (not one.name.startswith(BUILDING), one.stat().st_mtime), reverse=True)
    for one in others[KEEP - 1 :]:
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink()


@contextlib.contextmanager
def _alone(lock: Path, until: float) -> Iterator[bool]:
    """Whether nobody else compiles, waiting for that until a time on the monotonic clock."""
    with lock.open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.2)
            else:
                yield True
                return


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_into(Path(sys.argv[1]))
    else:
        sys.exit(not compile_aloud(Console(stderr=True, soft_wrap=True), again=True))
