"""The command `phaseplane bench`: reads its options, shows progress, prints the report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from ui import bench_kv, bench_prefix
from ui.bench import LAG_WARNING_S, Bench, BenchOptions, OnProgress, Progress, run_interruptible
from ui.client import DEFAULT_URL, FleetClient
from ui.errors import EXIT_FAILED, EXIT_INTERRUPTED, UsageFault
from ui.measure import BenchReport
from ui.options import ApiKey, CommandGroup, Config, Json, Url
from ui.render import make_console, print_json, show_bench
from ui.workload import Load, parse_classes, parse_slos, parse_span

TELL_EVERY_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the command, and those below it, to the program."""
    group = typer.Typer(invoke_without_command=True, subcommand_metavar="[COMMAND]", rich_markup_mode=None)
    group.callback(cls=CommandGroup)(bench)
    bench_kv.register(group)
    bench_prefix.register(group)
    app.add_typer(group, name="bench")


def bench(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second; default 1, or as recorded with --trace.")
    ] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="How many; by default 100, or all.")] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="Offer requests for so many seconds.")] = None,
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", metavar="N|A-B", help="Tokens a prompt.")] = "128",
    output_tokens: Annotated[str, typer.Option("--output-tokens", metavar="N|A-B", help="Tokens an answer.")] = "64",
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Azure, BurstGPT, Mooncake, vLLM bench, ours, or generated:NAME."),
    ] = None,
    trace_start: Annotated[float, typer.Option("--trace-start", min=0.0, help="Skip so many seconds of it.")] = 0.0,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", help="JSONL of prompt or prompt_token_ids, max_tokens, expect.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the answers as a prompts file.")] = None,
    classes: Annotated[str, typer.Option("--classes", help="Traffic classes, like chat:0.7,batch:0.3.")] = "",
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", help="ttft:2,tpot:0.2 or CLASS=ttft:2,tpot:0.2; by default the fleet's own."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="By default the first the fleet serves.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Longest wait for one answer, seconds.")] = 600.0,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds offer equal load.")] = 0,
    json: Json = False,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Offer a load and measure TTFT, TPOT, goodput and attainment; fails when an answer failed or was wrong."""
    if context.invoked_subcommand is not None:
        return
    if rate is not None and not rate > 0:
        raise UsageFault(f"--rate must be above 0, got {rate:g}; inf sends everything at once")
    if duration is not None and not duration > 0:
        raise UsageFault(f"--duration must be above 0 seconds, got {duration:g}")
    if trace is not None and prompts_file is not None:
        raise UsageFault("--trace and --prompts-file both say what to send; give one of them")
    load = Load(
        rate=rate, num=num, duration_s=duration,
        prompt_tokens=parse_span(prompt_tokens, "--prompt-tokens"),
        output_tokens=parse_span(output_tokens, "--output-tokens"),
        trace=trace, trace_start_s=trace_start, prompts_file=prompts_file,
        classes=parse_classes(classes), seed=seed, temperature=temperature,
    )  # fmt: skip
    options = BenchOptions(load, model, parse_slos(slo or []), timeout, save)
    with _progress() as on_progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report, interrupted = runner.run(_run(url, api_key, options, on_progress))
    if json:
        print_json(report)
    else:
        show_bench(make_console(), report)
    _warn(report, interrupted)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.errors:
        raise typer.Exit(EXIT_FAILED)


async def _run(
    url: str, api_key: str | None, options: BenchOptions, on_progress: OnProgress
) -> tuple[BenchReport, bool]:
    async with FleetClient(url, api_key) as client:
        run = Bench(client, options, on_progress)
        return await run_interruptible(run), run.interrupted


def _warn(report: BenchReport, interrupted: bool) -> None:
    """What a reader of the numbers must know."""
    if interrupted:
        print("interrupted: requests in flight were cancelled", file=sys.stderr)
    if report.max_lag_s > LAG_WARNING_S:
        print(
            f"warning: this client sent up to {report.max_lag_s * 1000:.0f} ms late; the delay counts in TTFT, "
            "so use a lower --rate or a faster machine",
            file=sys.stderr,
        )
    if report.clamped:
        print(f"warning: {report.clamped} requests were shortened to fit the model's context", file=sys.stderr)


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar on a terminal; a line every 10 s elsewhere."""
    console = make_console(sys.stderr)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            text = f"{progress.sent} sent, {progress.failed} failed, answered"
            bars.update(task, total=progress.planned, completed=progress.ended, description=text)

        yield show


def _lines() -> Callable[[Progress], None]:
    told_at: list[float] = []

    def show(progress: Progress) -> None:
        now = asyncio.get_running_loop().time()
        if not told_at:
            told_at.append(now)
        elif now - told_at[-1] >= TELL_EVERY_S:
            told_at[:] = [now]
            print(
                f"{progress.sent} of {progress.planned} sent, {progress.ended} ended, {progress.failed} failed",
                file=sys.stderr,
                flush=True,
            )

    return show
