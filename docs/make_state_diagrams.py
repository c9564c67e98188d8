"""Draws docs/states.md from the state tables of the code. Run `python docs/make_state_diagrams.py` after a change.

tests/docs/test_docs.py fails while the file differs from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from controlplane.core.instance import instance_diagram
from controlplane.core.lifecycle import request_diagram
from controlplane.core.machine import mermaid
from controlplane.core.steps import step_diagram
from nodes.core.instance import MOVES as NODE_MOVES
from nodes.core.instance import InstanceState as NodeState
from transfer.kv.stream import RECEIVE_TABLE, SEND_TABLE

OUTPUT = Path(__file__).with_name("states.md")

HEAD = """\
# States

Every state machine is a table in the code, and this file is drawn from those tables by
`docs/make_state_diagrams.py`. A move that is not in its table raises `IllegalTransition` with the object's history.
"""


def main() -> int:
    OUTPUT.write_text(render(), encoding="utf-8")
    return 0


def render() -> str:
    """The whole document."""
    sections = (
        (
            "A request, in the scheduler",
            "From arrival to the one terminal event its client gets.",
            "controlplane/core/lifecycle.py",
            request_diagram(),
        ),
        (
            "An instance, in the control plane",
            "What the control plane believes of one life of one instance.",
            "controlplane/core/instance.py",
            instance_diagram(),
        ),
        (
            "An instance, on its node",
            "What the node itself says in every heartbeat.",
            "nodes/core/instance.py",
            mermaid(NODE_MOVES, NodeState.STARTING),
        ),
        (
            "A step of a rebalance",
            "One role switch; a failed one leaves the instance serving in its old role.",
            "controlplane/core/steps.py",
            step_diagram(),
        ),
        (
            "A KV stream, sending side",
            "One push of KV: a handoff, a migration or a store.",
            "transfer/kv/stream.py",
            draw(SEND_TABLE, "offered"),
        ),
        (
            "A KV stream, receiving side",
            "Nobody is told before every slab has arrived and its checksum is right.",
            "transfer/kv/stream.py",
            draw(RECEIVE_TABLE, "granted"),
        ),
    )
    parts = [f"\n## {title}\n\n{text} Table: `{source}`.\n\n```mermaid\n{drawn}```\n"
             for title, text, source, drawn in sections]  # fmt: skip
    return HEAD + "".join(parts)


def draw(table: Mapping[tuple[str, str], str], start: str) -> str:
    """The diagram of a table that maps (state, event) to the next state."""
    names = dict.fromkeys([state for state, _ in table] + list(table.values()))
    states = StrEnum("states", [(name, name) for name in names])
    moves = {state: {event: states(to) for (source, event), to in table.items() if source == state} for state in states}
    return mermaid(moves, states(start))


if __name__ == "__main__":
    raise SystemExit(main())
