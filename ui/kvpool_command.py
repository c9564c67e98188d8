"""The command `phaseplane kvpool`: a KV pool of its own, for any engine; it needs no fleet. See docs/kv.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ui.options import Command, CommandGroup, Config
from ui.programs import arguments, become

PROGRAM = "nodes.kvpool"

Key = Annotated[
    Path | None, typer.Option("--data-key-file", help="Secret of KV connections; needed beyond this machine.")
]


def register(app: typer.Typer) -> None:
    """Add the command, and the one below it, to the program."""
    group = typer.Typer(invoke_without_command=True, subcommand_metavar="[COMMAND]", rich_markup_mode=None)
    group.callback(cls=CommandGroup)(kvpool)
    group.command(cls=Command)(stats)
    app.add_typer(group, name="kvpool")


def kvpool(
    context: typer.Context,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; by default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="By default any free one.")] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="Host that is printed; by default --host.")
    ] = None,
    data_key_file: Key = None,
    block_bytes: Annotated[
        int | None, typer.Option("--block-bytes", min=2, help="Blocks of so many bytes, any.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option("--num-layers", help="Or blocks of a layout: its layers.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="Of the layout.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Of the layout.")] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", help="Of the layout: tokens a block.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "uint8"] | None, typer.Option("--dtype", help="Of the layout.")
    ] = None,
    rope: Annotated[str | None, typer.Option("--rope", help="Of the layout: position encoding, by any name.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="HEX", help="Serve this one only; by default any.")
    ] = None,
    dram_gib: Annotated[float | None, typer.Option("--dram-gib", min=0.0, help="GiB of memory; by default 1.")] = None,
    ssd_dir: Annotated[Path | None, typer.Option("--ssd-dir", help="Keep blocks here too, beyond a restart.")] = None,
    ssd_gib: Annotated[
        float | None, typer.Option("--ssd-gib", min=0.0, help="GiB it may take there; by default 16.")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option("--ready-file", help="JSON written once it can be used.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option("--log-level", case_sensitive=False, help="By default info."),
    ] = None,
    config: Config = None,
) -> None:
    """Serve a KV pool in this process until Ctrl-C: memory and SSD that any engine may put blocks into."""
    if context.invoked_subcommand is None:
        become(PROGRAM, arguments(context))


def stats(
    context: typer.Context,
    endpoint: Annotated[str, typer.Option("--endpoint", help="As the pool printed it, tcp://HOST:PORT.")],
    data_key_file: Key = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Longest wait, seconds.")] = 10.0,
    config: Config = None,
) -> None:
    """Print a running pool's sizes and counters as one line of JSON."""
    become(PROGRAM, ["stats", *arguments(context)])
