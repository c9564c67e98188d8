"""The command `phaseplane node`: joins instances to a control plane; the agent (nodes/agent.py) reads its options."""

from __future__ import annotations

import typer

from ui.programs import become

PROGRAM = "nodes.agent"


def register(app: typer.Typer) -> None:
    """Add the command to the program. What it is told, --help included, goes on as it is."""
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
        add_help_option=False,
    )(node)


def node(context: typer.Context) -> None:
    """Join an engine, ours, vLLM or any OpenAI-compatible server, to a fleet; `phaseplane node --help` says how."""
    become(PROGRAM, context.args)
