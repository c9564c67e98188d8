"""The command `phaseplane console`: reads its options and hands over to ui/console/server.py."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from ui.client import DEFAULT_URL, clean_url
from ui.errors import CliError
from ui.options import ApiKey, Command, Config, Url

NEEDED = "streamlit"
MISSING = "the console needs Streamlit, which is not installed; run `pip install 'phaseplane[console]'`"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(console)


def is_installed() -> bool:
    return importlib.util.find_spec(NEEDED) is not None


def console(
    host: Annotated[str, typer.Option("--host", help="Where to listen; beyond loopback visitors need the key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8501,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Another name that it answers to on loopback.")
    ] = None,
    config: Config = None,
) -> None:
    """Show the fleet in a browser and act on it: live figures, rebalance, requests, KV, planner."""
    if not is_installed():
        raise CliError(MISSING)
    from ui.console.server import Serving, serve

    wanted = Serving(clean_url(url), api_key, host, port, tuple(allowed_host or ()))
    serve(wanted, lambda own: print(f"console at {own} for the fleet at {wanted.url}; Ctrl-C stops it", flush=True))
