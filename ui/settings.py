"""Where an option's value comes from: the flag, else the environment, else the TOML file, else the default.

Each command reads the table of its name ([up], [bench], ...) and [client] (url, api_key). Other tables are the
control plane's, which refuses what it does not know itself; tables and variables of nobody are refused here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ui.errors import UsageFault

PREFIX = "PHASEPLANE_"
CLIENT_TABLE = "client"
CLIENT_KEYS = ("url", "api_key")
CONTROL_TABLES = ("server", "model", "models", "limits", "history", "scheduler", "classes")
"""The control plane's; PHASEPLANE_<TABLE>_<KEY> are its variables."""
CONTROL_VARIABLES = (
    "host", "port", "wire_host", "wire_port", "ready_file", "parent_pid", "model", "served_name", "engine", "state",
    "classes",
)  # fmt: skip
NODE_VARIABLES = (
    "control", "instances", "engine", "model", "dtype", "device", "hardware", "tp", "kv_gib", "num_blocks",
    "block_size", "token_budget", "max_running", "prefix_cache", "data_host", "data_advertise", "data_key_file",
    "curve_key_file", "control_public_key", "threads", "speed", "jitter", "seed", "mfu", "mbu", "alpha_s", "beta_s",
    "grace_s", "parent_pid", "log_level", "ssd_dir", "ssd_gib", "kv_links", "kv_backend", "vllm_python", "vllm_args",
    "vllm_socket", "max_model_len", "engine_url", "engine_served_name", "engine_key_file", "engine_insecure",
    "engine_start_s", "engine_idle_s",
)  # fmt: skip
"""Short names that the programs `up` starts read by themselves."""
POOL_PREFIX = "kvpool_"
"""Variables of the KV pool program that `up` does not start."""
SHARED_VARIABLES = ("home", "config", "url", "api_key", "engine_key")
KEYS_VARIABLE = f"{PREFIX}SERVER_API_KEYS"
BORROWED = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "model": ("model", "name"),
    "engine": ("model", "engine"),
    "state": ("history", "directory"),
}
"""What `up` takes from the control plane's own tables when [up] does not set it."""

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the file. key: where it stands, like `bench.num`."""

    key: str
    option: str
    value: Any


def read_tables(path: Path) -> Table:
    """The whole file. Raises UsageFault with a sentence."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageFault(f"cannot read the configuration {path} ({error.strerror}); give --config FILE") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path} is not TOML ({error}); mend it, or see docs/configuration.md") from None


def check_tables(tables: Table, path: Path, commands: Mapping[str, Sequence[str]]) -> None:
    """Refuse a table that no program reads, and a key that its command does not have (commands: name -> options)."""
    known = [*commands, CLIENT_TABLE, *CONTROL_TABLES]
    for name in tables:
        if name not in known:
            raise UsageFault(f"{path} sets {name}, which is not known; did you mean [{_nearest(name, known)}]?")
    for name, keys in (*commands.items(), (CLIENT_TABLE, CLIENT_KEYS)):
        for key in _table(tables, name, path):
            if _option(key) not in keys:
                nearest = f"{name}.{_nearest(key, keys)}"
                raise UsageFault(f"{path} sets {name}.{key}, which is not known; did you mean {nearest}?")


def entries(tables: Table, path: Path, command: str, options: Sequence[str]) -> Iterator[Entry]:
    """What the file says for the options of one command; a later entry of the same option wins."""
    for key, value in _table(tables, CLIENT_TABLE, path).items():
        if _option(key) in options:
            yield Entry(f"{CLIENT_TABLE}.{key}", _option(key), value)
    if command == "up":
        for option, (section, key) in BORROWED.items():
            table = _table(tables, section, path)
            if key in table:
                yield Entry(f"{section}.{key}", option, table[key])
    for key, value in _table(tables, command, path).items():
        yield Entry(f"{command}.{key}", _option(key), value)


def check_environment(environ: Mapping[str, str], commands: Mapping[str, Sequence[str]]) -> None:
    """Refuse a PHASEPLANE_* variable that no command, node or control plane reads, naming the nearest."""
    known = {name.upper() for name in (*CONTROL_VARIABLES, *NODE_VARIABLES, *SHARED_VARIABLES)}
    known |= {f"{command}_{option}".upper() for command, options in commands.items() for option in options}
    known |= {option.upper() for option in commands.get("up", ())}
    sections = (*(f"{table.upper()}_" for table in CONTROL_TABLES), POOL_PREFIX.upper())
    for name in sorted(environ):
        short = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and short not in known and not short.startswith(sections):
            bare = short.removeprefix(f"{CLIENT_TABLE}_".upper())  # [client] has variables without its name
            meant = bare if bare in known else _meant_section(short) or _nearest(short, sorted(known))
            raise UsageFault(f"variable {name} is not known; did you mean {PREFIX}{meant}?")


def server_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """A secret that the control plane of these settings accepts; None when it asks for none.

    It reads what the control plane has checked already, so what is malformed counts as none.
    """
    keys: Any = None
    if KEYS_VARIABLE in environ:
        try:
            keys = tomllib.loads(f"value = {environ[KEYS_VARIABLE]}")["value"]
        except tomllib.TOMLDecodeError:
            return None
    elif path is not None:
        keys = _table(read_tables(path), "server", path).get("api_keys")
    secrets = list(keys.values()) if isinstance(keys, dict) else []
    return secrets[0] if secrets and isinstance(secrets[0], str) else None


def _table(tables: Table, name: str, path: Path) -> Table:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise UsageFault(f"{path} sets {name} to {table!r}, but it is a section; write [{name}]")
    return table


def _option(key: str) -> str:
    return key.replace("-", "_")


def _meant_section(short: str) -> str | None:
    """SERVR_PORT -> SERVER_PORT."""
    section, _, key = short.partition("_")
    close = difflib.get_close_matches(section, [table.upper() for table in CONTROL_TABLES], n=1, cutoff=0.8)
    return f"{close[0]}_{key}" if close and key else None


def _nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
