"""Finds what this machine lacks to run a fleet, each finding with the command that mends it. It changes nothing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from transfer.errors import InvalidValue
from transfer.models import home_dir, model_dir
from ui.client import FleetClient
from ui.errors import ApiError, CliError
from ui.machine import available_memory, port_is_free
from ui.preflight import control_fault

Level = Literal["ok", "warn", "fail"]

MODULES = {
    "aiohttp": "aiohttp", "zmq": "pyzmq", "msgpack": "msgpack", "msgspec": "msgspec", "xxhash": "xxhash",
    "numpy": "numpy", "tokenizers": "tokenizers", "jinja2": "jinja2", "typer": "typer", "rich": "rich",
    "uvloop": "uvloop",
}  # fmt: skip
NATIVE_MODULES = {"torch": "torch", "safetensors": "safetensors", "gguf": "gguf"}

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 3e9
MIN_SHM_BYTES = 512e6
MIN_DISK_BYTES = 1e9
MIN_FILES = 4096
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mend` is the command or step that helps; "" when all is well."""

    level: Level
    name: str
    text: str
    mend: str = ""


async def examine(url: str, api_key: str | None, model: str, state: Path, config: Path | None) -> list[Finding]:
    """Every check, in the order in which they matter. Never raises for what it finds."""
    findings = [
        check_python(sys.version_info[:3]),
        check_modules("packages", MODULES, "pip install phaseplane", "fail"),
        check_modules("native engine", NATIVE_MODULES, "pip install 'phaseplane[native]'", "warn"),
        check_torch(),
        await asyncio.to_thread(check_configuration, config),
        check_cores(os.cpu_count() or 1),
        check_memory(available_memory()),
        check_shm(Path("/dev/shm")),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        check_writable("state directory", state, "--state DIR"),
        check_writable("model cache", home_dir(), "PHASEPLANE_HOME=DIR"),
        check_model(model),
    ]
    return [*findings, *await check_fleet(url, api_key)]


def check_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return Finding("fail", "Python", f"{text} is too old", "install Python 3.11 or newer and run make install")
    return Finding("ok", "Python", text)


def check_modules(name: str, modules: dict[str, str], mend: str, level: Level) -> Finding:
    missing = [package for module, package in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Finding(level, name, f"missing: {', '.join(missing)}", mend)
    return Finding("ok", name, f"{len(modules)} found")


def check_torch() -> Finding:
    """Reads torch's build from its metadata: importing it takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", "torch", "not installed: only emulated engines run", "pip install 'phaseplane[native]'")
    has_gpu = Path("/dev/nvidia0").exists()
    if has_gpu and version.endswith("+cpu"):
        return Finding("warn", "torch", f"{version} ignores this machine's GPU", "pip install torch with CUDA")
    return Finding("ok", "torch", f"{version}{', a GPU is there' if has_gpu else ', no GPU: it runs on the CPU'}")


def check_configuration(file: Path | None) -> Finding:
    """What the control plane itself says of its settings: those of `file`, if any, and of the variables."""
    argv = [sys.executable, "-m", "controlplane.main", *([] if file is None else ["--config", str(file)])]
    fault = control_fault(argv)
    if fault is not None:
        return Finding("fail", "configuration", fault, f"mend {file or 'the variable'}, see docs/configuration.md")
    return Finding("ok", "configuration", "defaults and variables" if file is None else str(file))


def check_cores(count: int) -> Finding:
    if count < 2:
        return Finding(
            "warn", "cores", "1: prefill and decode will share it", "phaseplane up --prefill 0 --decode 0 --mixed 1"
        )
    return Finding("ok", "cores", str(count))


def check_memory(available: float) -> Finding:
    text = f"{available / 1e9:.1f} GB available"
    if available < MIN_MEMORY_BYTES:
        return Finding("warn", "memory", text, "end other programs, or run phaseplane up --engine emulated")
    return Finding("ok", "memory", text)


def check_shm(path: Path) -> Finding:
    if not path.is_dir():
        return Finding("warn", "shared memory", f"{path} is missing: KV goes over TCP", f"mount a tmpfs at {path}")
    free = shutil.disk_usage(path).free
    text = f"{free / 1e9:.1f} GB free in {path}"
    if free < MIN_SHM_BYTES:
        return Finding("warn", "shared memory", text, f"mount -o remount,size=2G {path}")
    return Finding("ok", "shared memory", text)


def check_files(limit: int) -> Finding:
    if 0 <= limit < MIN_FILES:
        return Finding("warn", "open files", f"at most {limit}", f"ulimit -n {MIN_FILES}")
    return Finding("ok", "open files", "unlimited" if limit < 0 else f"at most {limit}")


def check_writable(name: str, path: Path, flag: str) -> Finding:
    """Whether a file can be made below `path`, or below its nearest existing parent."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding("fail", name, f"{path} cannot be written ({error.strerror})", f"use another one: {flag}")
    free = shutil.disk_usage(place).free
    if free < MIN_DISK_BYTES:
        return Finding("warn", name, f"{path} has only {free / 1e6:.0f} MB free", f"free some, or use {flag}")
    return Finding("ok", name, f"{path}, {free / 1e9:.1f} GB free")


def check_model(model: str) -> Finding:
    try:
        return Finding("ok", "model", f"{model} in {model_dir(model)}")
    except InvalidValue as error:
        return Finding("warn", "model", str(error).partition(";")[0], f"phaseplane pull {model}")


async def check_fleet(url: str, api_key: str | None) -> list[Finding]:
    """Either a fleet answers at `url`, or its port must be free for one."""
    try:
        async with FleetClient(url, api_key, ANSWER_S) as client:
            fleet = await client.fleet()
            if not await client.is_ready():
                return [Finding("warn", "fleet", f"{client.url} runs {fleet.xpyd}, not ready yet", "phaseplane status")]
            return [Finding("ok", "fleet", f"{client.url} serves {', '.join(fleet.models)} on {fleet.xpyd}")]
    except ApiError as error:
        return [Finding("fail", "fleet", f"{url} refuses: {error}", "phaseplane doctor --url URL")]
    except CliError as error:
        problem = str(error)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    findings = [Finding("warn", "fleet", problem.partition(";")[0], "phaseplane up")]
    if parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port is not None:
        findings.append(check_port(parts.hostname, parts.port))
    return findings


def check_port(host: str, port: int) -> Finding:
    """Whether a control plane could listen there."""
    if port_is_free(host, port):
        return Finding("ok", "port", f"{port} is free")
    return Finding(
        "fail", "port", f"{port} is taken by another program", f"phaseplane up --port {min(port + 1, 65535)}"
    )
