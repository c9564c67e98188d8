"""The command `phaseplane simulate`: starts the simulator; it needs no fleet, and its process becomes the program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from transfer.traces.generating import KINDS
from ui.options import Command, Config, Json
from ui.programs import arguments, become

PROGRAM = "controlplane.sim"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(simulate)


def simulate(
    context: typer.Context,
    fleet: Annotated[
        str,
        typer.Option("--fleet", metavar="NxCLASS[@GPUS]:ROLE,...", help="8xH800:prefill,8xH20:decode,2xCPU:kv_pool."),
    ],
    model: Annotated[str, typer.Option("--model", help="For example llama-3.1-70b.")],
    trace: Annotated[
        str, typer.Option("--trace", metavar="FILE", help=f"Or generated:NAME, of {', '.join(KINDS)}.")
    ] = "generated:conversation",
    format: Annotated[
        Literal["mooncake", "azure", "burstgpt", "vllm", "phaseplane", "recording"] | None,
        typer.Option("--format", help="Of the file; by default recognised."),
    ] = None,
    trace_start: Annotated[float, typer.Option("--trace-start", min=0.0, help="Skip so many seconds of it.")] = 0.0,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second; by default as recorded.")] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="How many; by default all.")] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="So many seconds of the trace.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="ttft=2,tpot=0.2 or CLASS=ttft:2,tpot:0.2; may repeat.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="How requests are placed; see docs/simulate.md.")
    ] = None,
    reject: Annotated[
        Literal["never", "hopeless", "objective"] | None,
        typer.Option("--reject", help="Early 429: what would time out (hopeless, the default), or miss its objective."),
    ] = None,
    autopilot: Annotated[
        Literal["off", "advise", "auto"] | None,
        typer.Option("--autopilot", help="Role switches for goodput: not looked for (the default), proposed, or made."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal results.")] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="kill:d0@60+30 (dies at 60 s, back after 30), slow:d0x3@60+120, mute:@60+10."),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens of a KV block.")] = 512,
    stepwise: Annotated[bool, typer.Option("--stepwise", help="Simulate each step by itself: slower, equal.")] = False,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="In plain Python: equal, about half as fast.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw rates and TTFT over time here.")] = False,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw them, TPOT and use, too.")] = None,
    json: Json = False,
    config: Config = None,
) -> None:
    """Predict goodput, attainment and cost of a fleet that need not exist, on recorded or generated traffic."""
    become(PROGRAM, arguments(context))
