"""Which programs make up a fleet, as command lines. Pure: it starts nothing and looks at nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transfer.terms import Role
from ui.errors import UsageFault

EMULATED_PER_PROCESS = 24
"""Emulated instances that share one agent process unless told otherwise."""
MAX_INSTANCES = 1024

DEFAULT_HARDWARE = {"native": "auto", "vllm": "auto", "emulated": "H800,H20"}
DEFAULT_MODEL = {"native": "smollm2-135m", "vllm": "smollm2-135m", "emulated": "llama-3.1-8b"}
_HARDWARE = re.compile(r"@[\w.-]+$")
"""After a URL: what the server has. No host can follow, since a URL with a password is refused."""
MEASURED = "auto"
"""No class: the agent measures the machine it runs on."""
VLLM_RESTART_S = 120.0
"""Requests wait so long for a vLLM that died to be back, where no file of settings says otherwise."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What `up` was asked for. hardware: classes of the prefill and the decode side; mixed and pools count as both.

    joined: servers that run elsewhere, as URL or URL@HARDWARE; each becomes a mixed instance.
    """

    prefill: int
    decode: int
    mixed: int
    pool: int
    engine: str
    model: str
    hardware: tuple[str, str]
    host: str
    port: int
    wire_port: int
    state: Path
    config: Path | None = None
    dtype: str | None = None
    speed: float | None = None
    kv_gib: float | None = None
    ssd_dir: Path | None = None
    ssd_gib: float | None = None
    per_process: int = EMULATED_PER_PROCESS
    joined: tuple[str, ...] = ()
    vllm_python: Path | None = None
    vllm_args: str | None = None
    engine_start_s: float | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One instance. Its id says its hardware, not its role: the role may change. url: of a server that it joins."""

    instance_id: str
    role: str
    hardware: str
    url: str | None = None


def parse_hardware(text: str, engine: str) -> tuple[str, str]:
    """`H800,H20` -> prefill class, decode class; one name stands for both. Raises UsageFault."""
    names = [part.strip() for part in (text or DEFAULT_HARDWARE[engine]).split(",")]
    if not 1 <= len(names) <= 2 or not all(names):
        raise UsageFault(f"--hardware {text!r} must be one class or two (prefill, decode), like H800,H20")
    return names[0], names[-1]


def members(plan: FleetPlan) -> list[Member]:
    """Every instance of the fleet, engines first. Raises UsageFault for a fleet that cannot serve."""
    counts = {"--prefill": plan.prefill, "--decode": plan.decode, "--mixed": plan.mixed, "--pool": plan.pool}
    for flag, count in counts.items():
        if count < 0:
            raise UsageFault(f"{flag} must be 0 or more, got {count}")
    if plan.mixed == 0 and not plan.joined and (plan.prefill == 0 or plan.decode == 0):
        raise UsageFault("a fleet needs --prefill 1 and --decode 1 at least, or --mixed 1")
    if plan.engine == "emulated" and plan.joined:
        raise UsageFault("--join brings a real model, and --engine emulated has none; leave one of them out")
    if (total := sum(counts.values()) + len(plan.joined)) > MAX_INSTANCES:
        raise UsageFault(f"{total} instances are more than {MAX_INSTANCES}; ask for fewer")
    prefill_class, decode_class = plan.hardware
    wanted = (
        (Role.PREFILL, plan.prefill, prefill_class),
        (Role.DECODE, plan.decode, decode_class),
        (Role.MIXED, plan.mixed, prefill_class),
    )
    pool_class = "CPU" if plan.engine == "emulated" else MEASURED
    numbers: dict[str, int] = {}
    found: list[Member] = []
    for role, count, hardware in wanted:
        for _ in range(count):
            stem = "node" if hardware == MEASURED else hardware.lower()
            number = numbers.get(stem, 0)
            numbers[stem] = number + 1
            found.append(Member(f"{stem}-{number}", role.value, hardware))
    found += [Member(f"pool-{number}", Role.KV_POOL.value, pool_class) for number in range(plan.pool)]
    for number, text in enumerate(plan.joined):
        url, _, hardware = text.rpartition("@") if _HARDWARE.search(text) else (text, "", MEASURED)
        found.append(Member(f"url-{number}", Role.MIXED.value, hardware, url))
    return found


def groups(plan: FleetPlan, fleet: Sequence[Member]) -> list[list[Member]]:
    """Which instances share a process: a native one has its own, emulated ones go together."""
    if plan.engine != "emulated":
        return [[member] for member in fleet]
    count = -(-len(fleet) // plan.per_process)
    size = -(-len(fleet) // count)
    return [list(fleet[start : start + size]) for start in range(0, len(fleet), size)]


def threads_each(plan: FleetPlan, cores: int) -> int:
    """Compute threads of each instance that computes here, so that all together fill the cores and no more. Those of
    vLLM wait for one another many times a step, so they leave a core to everybody else."""
    spare = 1 if plan.engine == "vllm" else 0
    return max(1, (cores - spare) // max(1, plan.prefill + plan.decode + plan.mixed))


def control_argv(plan: FleetPlan) -> list[str]:
    """The control plane's command line."""
    argv = [
        *(sys.executable, "-m", "controlplane.main"),
        *("--host", plan.host, "--port", str(plan.port), "--wire-port", str(plan.wire_port)),
        *("--model", plan.model, "--engine", "emulated" if plan.engine == "emulated" else "native"),
        *("--state", str(plan.state)),
    ]
    if plan.config is not None:
        argv += ["--config", str(plan.config)]
    elif plan.engine == "vllm":
        argv += ["--set", f"scheduler.rejoin_grace_s={VLLM_RESTART_S:g}"]
    return argv


def console_argv(url: str, port: int) -> list[str]:
    """The console's command line, for a fleet at `url`. Its API key goes by a variable, which others cannot see."""
    return [sys.executable, "-m", "ui.cli", "console", "--url", url, "--port", str(port)]


def node_argv(
    plan: FleetPlan, group: Sequence[Member], threads: int, parent_pid: int, roles: Mapping[str, str] | None = None
) -> list[str]:
    """An agent's command line. `roles` overrides the roles instances were given at first."""
    url = group[0].url
    argv = [
        *(sys.executable, "-m", "nodes.agent", "--control", f"tcp://127.0.0.1:{plan.wire_port}"),
        *(
            "--engine",
            "openai" if url else plan.engine,
            "--model",
            plan.model,
            "--threads",
            str(threads),
            "--parent-pid",
            str(parent_pid),
        ),
    ]
    for member in group:
        role = (roles or {}).get(member.instance_id, member.role)
        argv += ["--instance", f"{member.instance_id}={role}@{member.hardware}"]
    if url is not None:
        return [*argv, "--engine-url", url]
    if plan.vllm_python is not None:
        argv += ["--vllm-python", str(plan.vllm_python)]
    if plan.vllm_args is not None:
        argv += ["--vllm-args", plan.vllm_args]
    if plan.engine_start_s is not None:
        argv += ["--engine-start-s", f"{plan.engine_start_s:g}"]
    if plan.dtype is not None:
        argv += ["--dtype", plan.dtype]
    if plan.speed is not None:
        argv += ["--speed", str(plan.speed)]
    if plan.kv_gib is not None:
        argv += ["--kv-gib", str(plan.kv_gib)]
    if plan.ssd_dir is not None or plan.ssd_gib is not None:
        argv += ["--ssd-dir", str(plan.ssd_dir or plan.state / "ssd")]
    if plan.ssd_gib is not None:
        argv += ["--ssd-gib", str(plan.ssd_gib)]
    return argv
