"""The command `phaseplane plan`: starts the offline planner; it needs no fleet, and its process becomes the program.

Plans of a live fleet are of `phaseplane rebalance` (rebalance.py) and of the autopilot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from transfer.traces.generating import KINDS
from ui.options import Command, Config, Json
from ui.programs import arguments, become

PROGRAM = "controlplane.planner"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(plan)


def plan(
    context: typer.Context,
    fleet: Annotated[
        str, typer.Option("--fleet", metavar="NxCLASS,...", help="GPUs there are or may be bought: 8xH800,16xH20.")
    ],
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="NAME",
            help='Like llama-3.1-70b. Several share the fleet: --model "llama-3-70b rate=3 slo=ttft=2,tpot=0.05" ...',
        ),
    ],
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help=f"Or generated:NAME, of {', '.join(KINDS)}.")
    ] = None,
    format: Annotated[
        Literal["mooncake", "azure", "burstgpt", "vllm", "phaseplane", "recording"] | None,
        typer.Option("--format", help="Of the file; by default recognised."),
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="ttft=2,tpot=0.2 or CLASS=ttft:2,tpot:0.2; may repeat.")
    ] = None,
    target: Annotated[float, typer.Option("--target", help="Share of requests within their objectives.")] = 0.9,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Serve it as cheaply as possible; by default as much as possible.")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="$", help="Dollars an hour at most.")] = None,
    current: Annotated[
        str | None, typer.Option("--current", metavar="FLEET", help="There is now: 4xH800@4:prefill,2xH800@4:decode.")
    ] = None,
    num: Annotated[int, typer.Option("--num", min=1, help="Requests simulated at each rate, at least.")] = 500,
    effort: Annotated[int, typer.Option("--effort", min=1, help="How many splits are simulated.")] = 2,
    no_baselines: Annotated[bool, typer.Option("--no-baselines", help="Leave DistServe's algorithms out.")] = False,
    policy: Annotated[
        str | None, typer.Option("--policy", help="How requests are placed; see docs/simulate.md.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal plans.")] = 0,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens of a KV block.")] = 512,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="In plain Python, also where `make fast` has compiled the simulator.")
    ] = False,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the frontier into a file.")] = None,
    json: Json = False,
    config: Config = None,
) -> None:
    """Find the best fleet for traffic, hardware and objectives: split, parallelism, hardware of each role, and why.

    Of several models, each with a rate, also who gets which GPUs, so that the worst served gets the most of its rate.
    """
    become(PROGRAM, arguments(context))
