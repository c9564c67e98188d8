"""Reads nested frozen Structs from a TOML file, the environment and the command line; refuses unknown keys.

Knows nothing of what the settings mean. Precedence: command line over environment over file over default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transfer.errors import ConfigError
from transfer.terms import Struct

S = TypeVar("S", bound=Struct)
Tables = dict[str, Any]


def load(
    kind: type[S], file: Path | None, environ: Mapping[str, str], prefix: str, overrides: Mapping[str, str],
    foreign: Sequence[str] = (), aliases: Mapping[str, str] | None = None,
) -> S:  # fmt: skip
    """`kind` filled from the three sources.

    overrides maps dotted keys ("server.port") to text. A variable is called PREFIX + SECTION + "_" + KEY, or
    PREFIX + an alias; others belong to other programs. `foreign` sections of the file are skipped.
    Raises ConfigError with a sentence naming the key, where it came from and the nearest known key.
    """
    tables = _read_file(file) if file is not None else {}
    tables = {name: table for name, table in tables.items() if name not in foreign}
    sources: dict[str, str] = {}
    if file is not None:
        _check_keys(kind, tables, str(file), others=foreign)
    for name, text in sorted(environ.items()):
        short = name.removeprefix(prefix).lower()
        key = (aliases or {}).get(short) or _variable_key(kind, short)
        if name.startswith(prefix) and key is not None:
            _put(kind, tables, key, text, f"variable {name}")
            sources[key] = f"variable {name}"
    for key, text in overrides.items():
        _put(kind, tables, key, text, "the command line")
        sources[key] = "the command line"
    _check_keys(kind, tables, "the configuration")
    try:
        return msgspec.convert(tables, kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        key = _named(kind, tables, path.strip("`."))
        where = next((said for name, said in sources.items() if f"{key}.".startswith(f"{name}.")), str(file))
        raise ConfigError(f"{where}: setting {key} is wrong: {_lower(what)}") from None


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name closest to `name`; `known` must not be empty."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _read_file(path: Path) -> Tables:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _fields(kind: type[Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _check_keys(kind: type[Struct], table: Tables, where: str, path: str = "", others: Sequence[str] = ()) -> None:
    """`others` are known too, but not ours to check."""
    known = _fields(kind)
    for key, value in table.items():
        if key not in known:
            meant = f"{path}{nearest(key, [*known, *others])}"
            raise ConfigError(f"{where} sets {path}{key}, which is not known; did you mean {meant}?")
        if _is_struct(known[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{where} sets {path}{key} to {value!r}, but it is a section: write [{path}{key}]")
            _check_keys(known[key], value, where, f"{path}{key}.")
        elif (item := _dict_of(known[key])) is not None and isinstance(value, dict):
            for name, entry in value.items():
                if not isinstance(entry, dict):
                    raise ConfigError(f"{where} sets {path}{key}.{name} to {entry!r}; write {{{_example(item)} = ...}}")
                _check_keys(item, entry, where, f"{path}{key}.{name}.")


def _named(kind: type[Struct], tables: Tables, path: str) -> str:
    """A path of msgspec's, where it says `[...]` for the key of a mapping, with that key."""
    before, anonymous, after = path.partition("[...]")
    if not anonymous:
        return path
    wanted: Any = kind
    for part in before.split("."):
        wanted, tables = _fields(wanted)[part], tables[part]
    for name, entry in tables.items():
        try:
            msgspec.convert({name: entry}, wanted, strict=False)
        except msgspec.ValidationError:
            return f"{before}.{name}{after}"
    return path


def _variable_key(kind: type[Struct], rest: str) -> str | None:
    """ "server_port" -> "server.port"; None when no section of ours is meant."""
    for section, inner in _fields(kind).items():
        if rest == section:
            return section
        if rest.startswith(f"{section}_"):
            return f"{section}.{rest[len(section) + 1 :]}" if _is_struct(inner) else None
    return None


def _put(kind: type[Struct], tables: Tables, key: str, text: str, where: str) -> None:
    section, _, leaf = key.partition(".")
    known = _fields(kind)
    if section not in known:
        raise ConfigError(f"{where} sets {key}, which is not known; did you mean {nearest(section, [*known])}?")
    if not leaf:
        tables[section] = _value(text, known[section], key, where)
        return
    if not _is_struct(known[section]):
        tables.setdefault(section, {})[leaf] = _value(text, dict, key, where)
        return
    inner = _fields(known[section])
    if leaf not in inner:
        raise ConfigError(f"{where} sets {key}, which is not known; did you mean {section}.{nearest(leaf, [*inner])}?")
    tables.setdefault(section, {})[leaf] = _value(text, inner[leaf], key, where)


def _value(text: str, kind: Any, key: str, where: str) -> Any:
    """Text as it is where a scalar is wanted; otherwise one TOML value."""
    if not _is_compound(kind):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"{where} sets {key} to {text!r}, which is not a TOML value such as {{a = 1}}") from None


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _dict_of(kind: Any) -> type[Struct] | None:
    """The Struct that a dict[str, Struct] holds."""
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.DictType) and isinstance(info.value_type, msgspec.inspect.StructType):
        inner = info.value_type.cls
        return inner if issubclass(inner, Struct) else None
    return None


def _example(kind: type[Struct]) -> str:
    return next(iter(_fields(kind)))


def _is_compound(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    parts = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    compound = (
        msgspec.inspect.DictType, msgspec.inspect.StructType, msgspec.inspect.VarTupleType, msgspec.inspect.ListType,
    )  # fmt: skip
    return any(isinstance(part, compound) for part in parts)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
