"""Makes the key files that a fleet across several machines needs. `python -m transfer.keys DIR`.

control.key: the control plane's CURVE pair; node.key: the nodes' CURVE pair; data.key: the secret that KV
connections prove to each other. Files are of mode 0600 and existing ones are never overwritten.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from transfer.errors import ConfigError
from transfer.wire.curve import generate_keys, save_keys

CONTROL_KEY, NODE_KEY, DATA_KEY = "control.key", "node.key", "data.key"
DATA_KEY_BYTES = 32


def make_keys(directory: Path) -> str:
    """Write the three files; returns what to set where. Raises ConfigError when one exists or cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {directory}: {error.strerror}") from None
    taken = [name for name in (CONTROL_KEY, NODE_KEY, DATA_KEY) if (directory / name).exists()]
    if taken:
        raise ConfigError(f"{directory} has a {taken[0]} already; name another folder, or delete it first")
    control, node = generate_keys(), generate_keys()
    save_keys(control, directory / CONTROL_KEY)
    save_keys(node, directory / NODE_KEY)
    descriptor = os.open(directory / DATA_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(DATA_KEY_BYTES) + "\n")
    return (
        f'control plane   [server] curve_key_file = "{directory / CONTROL_KEY}"\n'
        f'                curve_allowed = ["{node.public}"]\n'
        f"every node      --curve-key-file {NODE_KEY} --control-public-key='{control.public}'\n"
        f"                --data-key-file {DATA_KEY}\n"
        f"copy {NODE_KEY} and {DATA_KEY} to every node; {CONTROL_KEY} stays with the control plane"
    )


def load_data_key(path: Path) -> bytes:
    """The secret of KV connections. Raises ConfigError for a file that is not one; never shows it."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(f"cannot read the data key {path}: {error.strerror}") from None
    except ValueError:
        key = b""
    if len(key) != DATA_KEY_BYTES:
        raise ConfigError(f"{path} is not a data key; make one with `phaseplane keys DIR`")
    return key


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phaseplane keys", description="Key files for a fleet across machines.")
    parser.add_argument("directory", type=Path, help="where to write them")
    try:
        print(make_keys(parser.parse_args(argv).directory))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
