"""What a KV pool program is told: command line, else PHASEPLANE_KVPOOL_* variables, else defaults."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from transfer.errors import ConfigError, InvalidValue
from transfer.kv.staging import opaque_layout
from transfer.terms import DTYPE_BYTES, KvLayout

ENV_PREFIX = "PHASEPLANE_KVPOOL_"
GIB = 1 << 30
DEFAULT_SSD_GIB = 16.0
MAX_POSITIVE = 1e6
"""GiB, or seconds."""
FINGERPRINT_BYTES = 32
LAYOUT_FLAGS = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "rope")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """One pool. Sizes in bytes and blocks.

    fingerprint: the only one that is served; None: each client's keys carry its own. ssd_dir: where blocks are kept
    that leave memory; None: nowhere. data_key_file: needed beyond loopback. advertise: the host that is printed, where
    it is not `host`.
    """

    layout: KvLayout
    num_blocks: int
    host: str
    port: int
    advertise: str | None
    data_key_file: Path | None
    fingerprint: bytes | None
    ssd_dir: Path | None
    ssd_bytes: int
    ready_file: Path | None
    parent_pid: int | None
    log_level: str


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """`stats`: which pool to ask."""

    endpoint: str
    data_key_file: Path | None
    timeout_s: float


def parse_pool_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> PoolOptions | StatsOptions:
    """Raises ConfigError with a sentence that names the flag or variable. `--help` prints and exits with 0."""
    if argv[:1] == ["stats"]:
        asked = _stats_parser().parse_args(argv[1:])
        return StatsOptions(asked.endpoint, asked.data_key_file, asked.timeout)
    parser = _parser()
    return _checked(parser.parse_args(argv, parser.parse_args(_from_variables(parser, environ))))


def _checked(given: argparse.Namespace) -> PoolOptions:
    layout = _layout(given)
    num_blocks = int(given.dram_gib * GIB) // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(f"one block takes {layout.block_bytes} bytes; raise --dram-gib")
    if given.ssd_gib is not None and given.ssd_dir is None:
        raise ConfigError("--ssd-gib needs a place; give --ssd-dir DIR")
    return PoolOptions(
        layout=layout, num_blocks=num_blocks, host=given.host, port=given.port, advertise=given.advertise,
        data_key_file=given.data_key_file, fingerprint=given.fingerprint, ssd_dir=given.ssd_dir,
        ssd_bytes=int((given.ssd_gib or DEFAULT_SSD_GIB) * GIB), ready_file=given.ready_file,
        parent_pid=given.parent_pid, log_level=given.log_level,
    )  # fmt: skip


def _layout(given: argparse.Namespace) -> KvLayout:
    shape = {name: getattr(given, name) for name in LAYOUT_FLAGS}
    missing = [f"--{name.replace('_', '-')}" for name, value in shape.items() if value is None]
    if given.block_bytes is not None:
        if len(missing) < len(shape):
            raise ConfigError("--block-bytes is for blocks without a layout; give it or the layout, not both")
        try:
            return opaque_layout(given.block_bytes)
        except InvalidValue as error:
            raise ConfigError(f"--block-bytes: {error}") from None
    if len(missing) == len(shape):
        raise ConfigError("say what a block is: --block-bytes N, or the layout with --num-layers, --num-kv-heads, "
                          "--head-dim, --block-size, --dtype and --rope")  # fmt: skip
    if missing:
        raise ConfigError(f"the layout lacks {', '.join(missing)}")
    return KvLayout(**shape)


def _from_variables(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """The variables as flags. Raises ConfigError for one that no option has, or that cannot be read."""
    names = list(vars(parser.parse_args([])))
    flags = []
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in names:
            if name == "config" or name.startswith("stats_"):
                continue  # read by the command line
            nearest = (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names)[0]
            raise ConfigError(f"variable {variable} is not known; did you mean {ENV_PREFIX}{nearest.upper()}?")
        flag = f"--{name.replace('_', '-')}={environ[variable]}"
        try:
            parser.parse_args([flag])
        except ConfigError as error:
            raise ConfigError(f"variable {variable} cannot be used: {error}") from None
        flags.append(flag)
    return flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="phaseplane kvpool", description="A pool of KV blocks that any engine may use; see docs/kv.md.",
        epilog=f"Every option can also be set as {ENV_PREFIX}<NAME>. `stats --endpoint E` asks a running pool.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; beyond loopback a data key is needed")
    add("--port", type=_whole(0, 65535), default=0, help="0, the default: any free one")
    add("--advertise", help="host that is printed, where it is not --host")
    add("--data-key-file", type=Path, help="secret of KV connections, see phaseplane keys")
    add("--block-bytes", type=_whole(2), help="bytes of a block that has no layout")
    for name in LAYOUT_FLAGS[:4]:
        add(f"--{name.replace('_', '-')}", type=_whole(1), help="of the layout of KV")
    add("--dtype", type=_dtype, help=f"of the layout: {', '.join(DTYPE_BYTES)}")
    add("--rope", help="of the layout: position encoding, as the engine names it")
    add("--fingerprint", type=_fingerprint, metavar="HEX", help="serve this one only; default: any")
    add("--dram-gib", type=_positive, default=1.0, help="GiB of memory for blocks, default 1")
    add("--ssd-dir", type=Path, help="folder for blocks that leave memory; they survive a restart")
    add("--ssd-gib", type=_positive, help=f"GiB that folder may take, default {DEFAULT_SSD_GIB:g}")
    add("--ready-file", type=Path, help="written when the pool can be used: JSON with endpoint and pid")
    add("--parent-pid", type=_whole(1), help="end when this process ends")
    add("--log-level", type=_log_level, default="info", help="debug, info, warning or error")
    return parser


def _stats_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="phaseplane kvpool stats", description="Statistics of a running pool, as one line of JSON.")
    parser.add_argument("--endpoint", required=True, help="as the pool printed it, tcp://HOST:PORT")
    parser.add_argument("--data-key-file", type=Path, help="the pool's data key, where it has one")
    parser.add_argument("--timeout", type=_positive, default=10.0, help="longest wait, seconds")
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limits = f"from {least}" + (f" to {most}" if most is not None else "")
            raise argparse.ArgumentTypeError(f"a whole number {limits} is wanted, got {text!r}")
        return value

    return read


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= MAX_POSITIVE:
        raise argparse.ArgumentTypeError(f"a number above 0 and up to {MAX_POSITIVE:g} is wanted, got {text!r}")
    return value


def _dtype(text: str) -> str:
    return _one_of(text, tuple(DTYPE_BYTES))


def _log_level(text: str) -> str:
    return _one_of(text.lower(), ("debug", "info", "warning", "error"))


def _one_of(text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"one of {', '.join(choices)} is wanted, got {text!r}")
    return text


def _fingerprint(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != FINGERPRINT_BYTES:
        raise argparse.ArgumentTypeError(f"{2 * FINGERPRINT_BYTES} hexadecimal digits are wanted, got {text!r}")
    return value
