"""The command `phaseplane up`: reads its options, checks the machine, pulls the model, and hands over to ui/up.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import typer

from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, model_dir, read_json
from ui import console_command
from ui import up_options as options
from ui.errors import CliError, UsageFault
from ui.launch import DEFAULT_MODEL, EMULATED_PER_PROCESS, FleetPlan, control_argv, members, parse_hardware
from ui.machine import available_memory, free_port, port_is_free, state_dir
from ui.options import Command, Config
from ui.preflight import control_fault
from ui.settings import server_key
from ui.up import Fleet, own_state, say

RUNTIME_BYTES = 450e6
"""What torch and Python take in each native process beside its weights."""
DEFAULT_KV_BYTES = 1 << 30
LOOPBACK = "127.0.0.1"
CONSOLE_PORT = 8501


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(up)


def up(
    prefill: options.Prefill = 1,
    decode: options.Decode = 1,
    mixed: options.Mixed = 0,
    pool: options.Pool = 0,
    engine: options.Engine = "native",
    join: options.Join = None,
    vllm_python: options.VllmPython = None,
    vllm_args: options.VllmArgs = None,
    model: options.Model = None,
    hardware: options.Hardware = "",
    host: options.Host = LOOPBACK,
    port: options.Port = 8000,
    dtype: options.Dtype = None,
    speed: options.Speed = None,
    kv_gib: options.KvGib = None,
    ssd_dir: options.SsdDir = None,
    ssd_gib: options.SsdGib = None,
    per_process: options.PerProcess = EMULATED_PER_PROCESS,
    state: options.State = None,
    ready_file: options.ReadyFile = None,
    wait: options.Wait = 180.0,
    no_console: options.NoConsole = False,
    console_port: options.ConsolePort = CONSOLE_PORT,
    config: Config = None,
) -> None:
    """Start a fleet on this machine and keep it up until Ctrl-C."""
    for flag, value in (("--speed", speed), ("--kv-gib", kv_gib), ("--ssd-gib", ssd_gib)):
        if value is not None and not value > 0:
            raise UsageFault(f"{flag} must be above 0, got {value:g}; leave it out for the default")
    chosen = _choose_port(host, port)
    place = state or state_dir() / f"port-{chosen}"
    plan = FleetPlan(
        prefill=prefill, decode=decode, mixed=mixed, pool=pool, engine=engine, model=model or DEFAULT_MODEL[engine],
        hardware=parse_hardware(hardware, engine), host=host, port=chosen, wire_port=free_port(LOOPBACK),
        state=place.expanduser().absolute(), config=config, dtype=dtype, speed=speed, kv_gib=kv_gib,
        ssd_dir=ssd_dir and ssd_dir.expanduser().absolute(), ssd_gib=ssd_gib, per_process=per_process,
        joined=tuple(join or ()), vllm_python=vllm_python and vllm_python.expanduser().absolute(), vllm_args=vllm_args,
        engine_start_s=wait if engine == "vllm" else None,
    )  # fmt: skip
    members(plan)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # of an `up` that was killed and could not remove it
    if (fault := control_fault(control_argv(plan))) is not None:
        raise UsageFault(f"{fault.rstrip('.')}; nothing was started: mend {config or 'it'} and run it again")
    if (vllm_python is None) == (engine == "vllm"):
        raise UsageFault("--engine vllm and --vllm-python FILE go together: which environment has vllm")
    if engine != "emulated":
        _have_model(plan.model)
        plan = replace(plan, dtype=plan.dtype or _stored_dtype(plan.model))
    if engine == "native":
        _check_memory(plan)
    with own_state(plan.state):
        console = None if no_console else _console_port(console_port)
        asyncio.run(Fleet(plan, wait, ready_file, server_key(config, os.environ), console).run())


def _choose_port(host: str, port: int) -> int:
    """The port, if it can be listened on. Raises CliError naming it and another one to try."""
    try:
        if port == 0:
            return free_port(host)
        if port_is_free(host, port):
            return port
    except OSError as error:
        raise CliError(f"cannot listen on {host} ({error.strerror}); use --host {LOOPBACK}") from None
    other = port + 1 if port < 65535 else 8000
    raise CliError(
        f"port {port} on {host} is in use; see who serves there with `phaseplane status --url http://{host}:{port}`, "
        f"or run `phaseplane up --port {other}`"
    )


def _console_port(port: int) -> int | None:
    """Where the console will listen: a free port when that one is taken, None where Streamlit is not installed."""
    if not console_command.is_installed():
        say(f"no console: {console_command.MISSING}")
        return None
    return port if port and port_is_free(LOOPBACK, port) else free_port(LOOPBACK)


def _have_model(model: str) -> None:
    """Pull the weights unless they are there. Raises CliError for a directory that is none; exits as the pull did."""
    try:
        model_dir(model)
    except InvalidValue as error:
        if "/" in model or model.startswith((".", "~")):
            raise CliError(str(error)) from None
        code = subprocess.run([sys.executable, "-m", "nodes.models.pull", model], check=False).returncode
        if code:
            raise typer.Exit(1 if code > 0 else 130) from None


def _stored_dtype(model: str) -> str | None:
    """The dtype its weights are kept in: running them in another one would change answers. None: the engine chooses."""
    config = read_json(model_dir(model) / CONFIG_FILE)
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if stored in ("float32", "bfloat16", "float16") else None


def _check_memory(plan: FleetPlan) -> None:
    """Refuse a fleet whose weights and KV cannot fit, before anything is started."""
    weights = sum(path.stat().st_size for path in model_dir(plan.model).glob("*.safetensors"))
    count = plan.prefill + plan.decode + plan.mixed
    kv = DEFAULT_KV_BYTES if plan.kv_gib is None else plan.kv_gib * (1 << 30)
    needed = count * (weights + RUNTIME_BYTES + kv) + plan.pool * kv
    available = available_memory()
    if needed > available:
        raise CliError(
            f"{count} native instances of {plan.model} need about {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB "
            "are available; ask for fewer instances or less --kv-gib, or run `phaseplane up --engine emulated`"
        )
