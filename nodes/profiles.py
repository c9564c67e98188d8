"""Latency profiles that `phaseplane calibrate` fitted on this machine, as JSON files named by what they hold for.

Files only; fits nothing. A file that cannot be read, or is of another release's form, counts as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from transfer.models import home_dir
from transfer.profile import LatencyProfile
from transfer.terms import Struct

log = logging.getLogger(__name__)


class ProfileKey(Struct, frozen=True):
    """What a fit holds for. device: the processor's or accelerator's name; software: versions that make it fast."""

    model: str
    dtype: str
    device: str
    num_threads: int
    software: str
    hardware: str = ""
    """The class the node was told that it is; empty where it measures itself."""


class StoredProfile(Struct, frozen=True):
    """at_s: Unix time of the fit; num_steps: steps that were measured."""

    key: ProfileKey
    latency: LatencyProfile
    at_s: float
    num_steps: int


def profile_path(key: ProfileKey) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
    return home_dir() / "profiles" / f"{digest}.json"


def load_profile(key: ProfileKey) -> StoredProfile | None:
    """The fit for exactly this key, or None."""
    path = profile_path(key)
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredProfile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("cannot use the latency profile %s (%s); run `phaseplane calibrate` again", path, error)
        return None
    return stored if stored.key == key else None


def save_profile(stored: StoredProfile) -> Path:
    """Replace what is kept for this key, atomically. Raises OSError."""
    path = profile_path(stored.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(stored), indent=2))
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
