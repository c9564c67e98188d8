"""Makes the keys of a fleet of containers, once: `make_keys.py DIR URL [PLACE]`. Nothing happens when they are there.

DIR has a folder for each kind of container, so that each sees its own secrets alone, with a file `env` of what
entrypoint.sh gives the program. URL: where clients in containers find the control plane. PLACE: where containers see
DIR, when it is not there.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import tomllib
from pathlib import Path

from transfer.keys import CONTROL_KEY, DATA_KEY, NODE_KEY, make_keys

CLIENTS, NODES = "local", "nodes"
"""Tenants. Nodes ask to be drained before they stop."""


def make(directory: Path, url: str, place: Path | None = None) -> None:
    """Write the folders control, nodes and clients. The last file written is the sign that all are there."""
    control, nodes, clients = (directory / name for name in ("control", "nodes", "clients"))
    done = clients / "env"
    if done.exists():
        return
    for folder in (control, nodes, clients):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    seen = directory if place is None else place
    api_key, node_api_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory() as work:
        made = Path(work) / "keys"
        make_keys(made)
        public = {name: tomllib.loads((made / name).read_text())["public"] for name in (CONTROL_KEY, NODE_KEY)}
        write(control / CONTROL_KEY, (made / CONTROL_KEY).read_text())
        for name in (NODE_KEY, DATA_KEY):
            write(nodes / name, (made / name).read_text())
    tenants = f'{{ {CLIENTS} = "{api_key}", {NODES} = "{node_api_key}" }}'
    api_keys = f"PHASEPLANE_SERVER_API_KEYS='{tenants}'\n"
    write(control / "whole-fleet.env", api_keys)
    write(
        control / "env",
        f"{api_keys}"
        f"PHASEPLANE_SERVER_CURVE_KEY_FILE={seen / control.name / CONTROL_KEY}\n"
        f"PHASEPLANE_SERVER_CURVE_ALLOWED='[\"{public[NODE_KEY]}\"]'\n",
    )
    write(
        nodes / "env",
        f"PHASEPLANE_CURVE_KEY_FILE={seen / nodes.name / NODE_KEY}\n"
        f"PHASEPLANE_CONTROL_PUBLIC_KEY='{public[CONTROL_KEY]}'\n"
        f"PHASEPLANE_DATA_KEY_FILE={seen / nodes.name / DATA_KEY}\n",
    )
    write(nodes / "api_key", node_api_key)
    # Prometheus reads it as another user; who may mount the volume may read it.
    write(clients / "api_key", api_key, mode=0o644)
    write(done, f"PHASEPLANE_API_KEY={api_key}\nPHASEPLANE_URL={url}\n")


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace the file whole, or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:4]))
