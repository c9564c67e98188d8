"""The command `phaseplane calibrate`: fits the latency model to an engine on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ui import up_options as options
from ui.options import Command, Config
from ui.programs import arguments, become

PROGRAM = "nodes.calibrate"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(calibrate)


def calibrate(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", help="A pulled model's name, or a directory; by default smollm2-135m.")
    ] = None,
    engine: Annotated[Literal["native", "vllm"] | None, typer.Option("--engine", help="Ours, or vLLM.")] = None,
    vllm_python: options.VllmPython = None,
    vllm_args: options.VllmArgs = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None, typer.Option("--dtype", help="As `up` is told.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, typer.Option("--device", help="As `up` is told.")] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Of each instance: `up` divides the cores among native instances."),
    ] = None,
    kv_gib: Annotated[
        float | None, typer.Option("--kv-gib", min=0.0, help="KV memory of the steps that are timed; by default 1.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.0, help="How long to time steps; by default 60.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
    config: Config = None,
) -> None:
    """Fit the latency model to the engine on this machine, which should be idle; engines that start later use it."""
    become(PROGRAM, arguments(context))
