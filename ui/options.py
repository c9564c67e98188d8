"""Options that several commands share, and how --config and the environment feed any option and --help says so."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ui.errors import UsageFault
from ui.settings import CLIENT_KEYS, PREFIX, Entry, check_environment, check_tables, entries, read_tables

NOT_IN_FILES = ("help", "config", "version")


class _Described:
    """Says once, at the end of --help, how variables and keys are called, not beside every option."""

    params: list[Any]
    epilog: str | None
    scope: str = ""
    """Its table in a TOML file and, in capitals, the front of its variables: `bench`, or `bench_prefix`."""

    def describe(self, scope: str) -> None:
        self.scope = scope
        for option in self.options():
            option.show_envvar = False
        own = next((option.name for option in self.options() if option.name not in (*CLIENT_KEYS, *NOT_IN_FILES)), None)
        if own is not None:
            short = f" or {PREFIX}{own.upper()}" if scope == "up" else ""
            self.epilog = (
                f"Each option is also a variable ({PREFIX}{scope.upper()}_{own.upper()}{short}) and a key of [{scope}] "
                f"in a TOML file ({own}). A flag wins over a variable, a variable over the file."
            )

    def options(self) -> Iterator[TyperOption]:
        """Its flags, --help left out."""
        return (param for param in self.params if isinstance(param, TyperOption))

    def settable(self) -> dict[str, TyperOption]:
        """Options that variables and files may set, by name."""
        return {option.name: option for option in self.options() if option.name and option.name not in NOT_IN_FILES}


class Command(_Described, TyperCommand):
    """A command whose options come from flags, variables and files."""

    def __init__(self, name: str | None, **more: Any) -> None:
        super().__init__(name, **more)
        self.describe(name or "")


class CommandGroup(_Described, TyperGroup):
    """A command with options of its own, and others below it whose scope is GROUP_COMMAND."""

    def __init__(self, *, name: str | None = None, **more: Any) -> None:
        super().__init__(name=name, **more)
        self.describe(name or "")
        for below, command in self.commands.items():
            if isinstance(command, Command):
                command.describe(f"{self.scope}_{below}")


def _feed(context: typer.Context, path: Path | None) -> Path | None:
    """Runs before the other options are read: checks variables and file, and gives the options its defaults."""
    commands = {command.scope: command.settable() for command in described(context.find_root().command)}
    names = {name: [*options] for name, options in commands.items()}
    check_environment(os.environ, {name: [*options, "config"] for name, options in names.items()})
    if path is None:
        return None
    tables = read_tables(path)
    check_tables(tables, path, names)
    for name, options in commands.items():
        values = {
            entry.option: _value(entry, options[entry.option], context, path)
            for entry in entries(tables, path, name, names[name])
        }
        if isinstance(context.command, _Described) and name == context.command.scope:
            context.default_map = values
    return path


def span_s(text: str) -> float:
    """90, 90s, 30m, 24h or 2d, in seconds. Raises UsageFault."""
    found = re.fullmatch(r"(\d{1,6})([smhd]?)", text.strip())
    if found is None:
        raise UsageFault(f"{text!r} is no time; give seconds or such as 30m, 24h, 2d")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def described(command: object) -> Iterator[_Described]:
    """The commands at and below one."""
    if isinstance(command, _Described):
        yield command
    for below in getattr(command, "commands", {}).values():
        yield from described(below)


def _value(entry: Entry, option: TyperOption, context: typer.Context, path: Path) -> Any:
    """The value as the option takes it: lists stay for repeatable ones and are joined by commas for others.

    Raises UsageFault naming file and key when it is of another type, or out of range.
    """
    value = entry.value
    if option.multiple:
        value = value if isinstance(value, list) else [value]
    elif isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    kind = option.type_descriptor.annotation
    kind = get_args(kind)[0] if option.multiple else kind
    fits = all(_is_of(kind, part) for part in (value if option.multiple else (value,)))
    fault = _refused(option, value, context) if fits else f"{_WANTED.get(kind, 'text')} is wanted"
    if fault:
        raise UsageFault(f"{path} sets {entry.key} to {_toml(entry.value)}, and that cannot be: {fault}")
    return value


_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a TOML value is of an option's type; a number and its text stand for each other, as in a variable."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind in (int, float) and isinstance(value, str):
        try:
            kind(value)
        except ValueError:
            return False
        return True
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, str) or (kind in (float, str) and isinstance(value, int | float))


def _refused(option: TyperOption, value: Any, context: typer.Context) -> str:
    """Why the option itself does not take it, for example because it is out of range."""
    try:
        option.process_value(context, value)
    except typer.BadParameter as error:
        said = error.message.rstrip(".").removeprefix("Value error, ")
        return said[:1].lower() + said[1:]
    return ""


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="PHASEPLANE_CONFIG",
        is_eager=True,
        callback=_feed,
        help="TOML file; flags and variables win over it.",
    ),
]
Url = Annotated[str, typer.Option("--url", envvar="PHASEPLANE_URL", help="The fleet.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="PHASEPLANE_API_KEY", help="Only for fleets that ask for one.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
