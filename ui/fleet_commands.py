"""The commands that talk to a running fleet: status, rebalance, undo, chat, why, and doctor."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from transfer.api import Plan, Prediction, RequestRecord
from ui import rebalance as plans
from ui.ask import show
from ui.chat import Conversation, Turn, ask_interruptible, pick_model
from ui.client import DEFAULT_URL, FleetClient
from ui.doctor import examine
from ui.errors import EXIT_INTERRUPTED, CliError
from ui.insight import present
from ui.machine import state_dir
from ui.options import ApiKey, Command, Config, Json, Url
from ui.plan_view import run_plan
from ui.rebalance import OnPlan
from ui.render import make_console, print_json, show_fleet, show_request

T = TypeVar("T")

PlanTimeout = Annotated[float, typer.Option("--timeout", min=1.0, help="Longest wait for the plan to end, seconds.")]

NUM_LOOKED_AT = 500
"""Finished requests among which `why` looks for one that missed."""

Measure = Annotated[bool, typer.Option("--measure/--no-measure", help="Wait for the measured effect (10 s).")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (status, rebalance, undo, chat, why, doctor):
        app.command(cls=Command)(command)


def status(url: Url = DEFAULT_URL, json: Json = False, api_key: ApiKey = None, config: Config = None) -> None:
    """Show the fleet: instances, goodput, attainment."""
    show(FleetClient.fleet, show_fleet, url, api_key, json)


def rebalance(
    xpyd: Annotated[str, typer.Argument(metavar="XPYD", help="The split wanted, for example 1P2D.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    timeout: PlanTimeout = 600.0, measure: Measure = True, json: Json = False,
    url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Change the split of prefill and decode instances without dropping a request."""
    follow = plans.Follow(timeout, measure)
    _carry_out(lambda client, show: plans.rebalance(client, xpyd, dry_run, follow, show), url, api_key, json)


def undo(
    plan_id: Annotated[str, typer.Argument(metavar="PLAN", help="The plan to take back, as rebalance named it.")],
    timeout: PlanTimeout = 600.0, measure: Measure = True, json: Json = False,
    url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Apply the inverse of a plan."""
    follow = plans.Follow(timeout, measure)
    _carry_out(lambda client, show: plans.undo(client, plan_id, follow, show), url, api_key, json)


def chat(
    question: Annotated[str | None, typer.Argument(help="Ask once and leave; without it, a conversation.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="By default the first the fleet serves.")] = None,
    system: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Talk to the fleet. Ctrl-C stops an answer, /quit leaves; a question may also be piped in."""

    async def work() -> None:
        async with FleetClient(url, api_key) as client:
            served = await pick_model(client, model)
            talk = Conversation(client, served, max_tokens, temperature, system)
            asked = question
            if asked is None and not sys.stdin.isatty():
                asked = sys.stdin.read().strip()
                if not asked:
                    raise CliError("there is no question on standard input; run `phaseplane chat QUESTION`")
            if asked is not None:
                turn = await _answer(talk, asked)
                if turn.stopped:
                    raise typer.Exit(EXIT_INTERRUPTED)
                return
            print(f"{served} at {client.url}; /quit leaves, Ctrl-C stops an answer")
            await _converse(talk)

    asyncio.run(work())


def why(
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST", help="The id of an answer; without it, the newest that missed objectives."),
    ] = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Explain one finished request: where it ran, where its time went, what else was considered.

    Without an id: the newest that missed its objectives. `phaseplane top` (3) and the console list them.
    """

    async def find(client: FleetClient) -> RequestRecord:
        if request_id is not None:
            return await client.request_record(request_id)
        found = await client.requests(NUM_LOOKED_AT)
        missed = next((record for record in found if record.good is False), None)
        if missed is None:
            raise CliError("no finished request missed its objectives; give the id of an answer")
        return await client.request_record(missed.request_id)

    show(find, show_request, url, api_key, json)


def doctor(
    url: Url = DEFAULT_URL,
    model: Annotated[str, typer.Option("--model", help="The model that should be there.")] = "smollm2-135m",
    state: Annotated[Path | None, typer.Option("--state", help="Where logs and history go.")] = None,
    json: Json = False,
    api_key: ApiKey = None,
    config: Config = None,
) -> None:
    """Find what is missing on this machine or wrong in a configuration, each with the command that mends it."""
    findings = asyncio.run(examine(url, api_key, model, state or state_dir(), config))
    if json:
        print_json([{"level": f.level, "name": f.name, "text": f.text, "mend": f.mend} for f in findings])
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            mend = f"-> {finding.mend}" if finding.mend else ""
            table.add_row(finding.level, finding.name, finding.text, mend)
        make_console().print(table)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _carry_out(
    act: Callable[[FleetClient, OnPlan], Awaitable[Plan]], url: str, api_key: str | None, json: bool
) -> None:
    """Have the fleet at `url` carry out a plan, and show how it goes."""

    async def work(show: OnPlan) -> tuple[Prediction, Plan]:
        async with FleetClient(url, api_key) as client:
            return present(await client.fleet()), await act(client, show)

    run_plan(work, json, url)


async def _converse(talk: Conversation) -> None:
    """Questions from the terminal until /quit, Ctrl-D, or Ctrl-C at the prompt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's own would not interrupt input()
    while True:
        try:
            question = input("> ").strip()  # noqa: ASYNC250 - nothing else runs while the user types
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question in ("/quit", "/exit"):
            return
        if not question:
            continue
        try:
            await _answer(talk, question)
        except CliError as error:
            print(f"error: {error}", file=sys.stderr)


async def _answer(talk: Conversation, question: str) -> Turn:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    turn = await ask_interruptible(talk, question, write)
    write("\n")
    print(f"[{turn.summary()}]", file=sys.stderr)
    return turn
