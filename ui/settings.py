"""Where an option's value comes from: the flag, else the environment, else the TOML file, else the default.

Each command reads the table of its name ([up], [bench], ...) and [client] (url, api_key). Other tables are the
control plane's, which refuses what it does not know itself.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ui.errors import UsageFault

PREFIX = "PHASEPLANE_"
CLIENT_TABLE = "client"
CLIENT_KEYS = ("url", "api_key")
BORROWED = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "model": ("model", "name"),
    "engine": ("model", "engine"),
    "state": ("history", "directory"),
}
"""What `up` takes from the control plane's own tables when [up] does not set it."""

Table = dict[str, Any]


def read_tables(path: Path) -> Table:
    """The whole file. Raises UsageFault with a sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageFault(f"cannot read the configuration {path} ({error.strerror}); give --config FILE") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path} is not TOML ({error}); mend it, or see docs/configuration.md") from None


def defaults_for(path: Path, command: str, known: Sequence[str], repeatable: Sequence[str] = ()) -> Table:
    """Option name -> value for one command; `repeatable` options keep lists, and one value stands for a list of one.

    Unknown keys raise UsageFault naming the nearest one.
    """
    tables = read_tables(path)
    own = _table(tables, command, path, repeatable)
    client = _table(tables, CLIENT_TABLE, path)
    for name, table, keys in ((command, own, known), (CLIENT_TABLE, client, CLIENT_KEYS)):
        for key in table:
            if key not in keys:
                nearest = f"{name}.{_nearest(key, keys)}"
                raise UsageFault(f"{path} sets {name}.{key}, which is not known; did you mean {nearest}?")
    values = {key: value for key, value in client.items() if key in known}
    if command == "up":
        values |= _borrowed(tables, path)
    return values | own


def check_environment(environ: Mapping[str, str], command: str, known: Sequence[str]) -> None:
    """Refuse PHASEPLANE_<COMMAND>_<OPTION> for an option the command does not have."""
    prefix = f"{PREFIX}{command.upper()}_"
    for name in sorted(environ):
        option = name.removeprefix(prefix).lower()
        if name.startswith(prefix) and option not in known:
            nearest = f"{prefix}{_nearest(option, known).upper()}"
            raise UsageFault(f"variable {name} is not known; did you mean {nearest}?")


def _table(tables: Table, name: str, path: Path, repeatable: Sequence[str] = ()) -> Table:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise UsageFault(f"{path} sets {name} to {table!r}, but it is a section; write [{name}]")
    values: Table = {}
    for key, value in table.items():
        option = key.replace("-", "_")
        if option in repeatable:
            values[option] = value if isinstance(value, list) else [value]
        else:
            values[option] = _flat(value)
    return values


def _flat(value: Any) -> Any:
    """A list of strings may stand for a comma-separated value."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return value


def _borrowed(tables: Table, path: Path) -> Table:
    values: Table = {}
    for option, (section, key) in BORROWED.items():
        table = _table(tables, section, path)
        if key in table:
            values[option] = table[key]
    return values


def _nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
