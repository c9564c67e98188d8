"""Runs pods' containers as a kubelet would, without images: each in a file system, host name and user of its own, with
the volumes, variables and probes of its manifest. All share one network, so that nothing else can be reached.

Needs root, and a network and mounts of its own: `unshare --net --mount`. Images are replaced by this checkout.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy_manifests import ROOT, Manifest, Manifests, Pod, mebibytes

from transfer.models import models_dir

USER = 10001
HOST_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev", sys.base_prefix, str(ROOT))
IMAGE = Path("/opt/phaseplane")
ADDRESS = "127.0.0.1"
READY_S = 90.0


@dataclass
class Running:
    """A pod's main container."""

    pod: Pod
    name: str
    root: Path
    process: subprocess.Popen[bytes]
    log: Path
    environ: dict[str, str] = field(default_factory=dict)

    def exec(self, command: list[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as a probe or a hook does."""
        enter = ["nsenter", f"--target={self.process.pid}", "--mount", "--uts"]
        return subprocess.run(
            [*enter, *_as_user(self.root), *command], env=self.environ, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def hook(self, seconds: int) -> subprocess.CompletedProcess[str]:
        """The preStop hook, which may take so long."""
        command = self.pod.main["lifecycle"]["preStop"]["exec"]["command"]
        return self.exec([*command[:-1], str(seconds)], timeout_s=seconds + 30)

    def is_ready(self) -> bool:
        probe = self.pod.main["readinessProbe"]
        if "exec" in probe:
            return self.exec(probe["exec"]["command"]).returncode == 0
        return self.answers(probe["httpGet"])

    def answers(self, get: Manifest) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self.pod.main["ports"]}
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}:{ports[get['port']]}{get['path']}", timeout=10):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self, within_s: float) -> int:
        """SIGTERM, after which it must end by itself; its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


class Kubelet:
    """secrets: name -> folder. Every Service is this machine."""

    def __init__(self, directory: Path, manifests: Manifests, secrets: dict[str, Path]) -> None:
        self._directory, self._manifests, self._secrets = directory, manifests, secrets
        self.running: list[Running] = []
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._image = directory / "image"
        self._image.mkdir()
        for name in ("entrypoint.sh", "connector.sh", "addresses.py", "drain.py", "healthy.py"):
            shutil.copy(ROOT / "deploy" / name, self._image)
        shutil.copytree(models_dir(), self._image / "models")
        subprocess.run(["chmod", "-R", "a+rX", self._image], check=True)

    def start(self, workload: str, number: int = 0) -> Running:
        pod = self._manifests.pods[workload]
        name = f"{workload}-{number}"
        root = self._directory / name
        mounts = [*self._system(root), *self._volumes(root, pod)]
        steps = [f"hostname {name}", *(f"mount {mount}" for mount in mounts), f"mount -o remount,bind,ro {root}"]
        run = " ".join(_as_user(root))
        environ = self._environ(pod, name)
        log = self._directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--uts", "sh", "-ec", f'{"; ".join(steps)}; exec {run} "$@"', "sh"),
                    *pod.main["command"],
                ],
                env=environ, stdout=output, stderr=output,
            )  # fmt: skip
        found = Running(pod, name, root, process, log, environ)
        self.running.append(found)
        return found

    def until_ready(self, running: Running) -> None:
        end = time.monotonic() + READY_S
        while not running.is_ready():
            assert running.process.poll() is None, f"{running.name} has ended:\n{running.log.read_text()[-2000:]}"
            assert time.monotonic() < end, f"{running.name} is not ready:\n{running.log.read_text()[-2000:]}"
            time.sleep(0.3)

    def close(self) -> None:
        for one in self.running:
            one.process.kill()
            one.process.wait()

    def _system(self, root: Path) -> Iterator[str]:
        """The image: this machine's programs and this checkout, and nothing else of it."""
        root.mkdir()
        yield f"--bind {root} {root}"
        for folder in HOST_FOLDERS:
            if Path(folder).exists():
                yield f"--rbind {folder} {_made(root, folder)}"
        yield f"--bind {self._image} {_made(root, IMAGE)}"
        etc = _made(root, "/etc")
        services = " ".join(self._manifests.kind("Service"))
        (etc / "hosts").write_text(f"{ADDRESS} localhost {services}\n")
        (etc / "passwd").write_text(f"phaseplane:x:{USER}:{USER}::/tmp:/bin/sh\n")

    def _volumes(self, root: Path, pod: Pod) -> Iterator[str]:
        places = {mount["name"]: mount["mountPath"] for mount in pod.main["volumeMounts"]}
        for volume in [*pod.spec["volumes"], *({"name": claim, "emptyDir": {}} for claim in pod.claims)]:
            place = _made(root, places[volume["name"]])
            folder = self._directory / f"{root.name}.{volume['name']}"
            folder.mkdir()
            if (memory := volume.get("emptyDir", {})).get("medium") == "Memory":
                yield f"-t tmpfs -o size={mebibytes(memory['sizeLimit'])}m,mode=1777 tmpfs {place}"
                continue
            self._fill(folder, volume)
            yield f"--bind {folder} {place}"
            if volume["name"] in ("keys", "config"):
                yield f"-o remount,bind,ro {place}"

    def _fill(self, folder: Path, volume: Manifest) -> None:
        """As fsGroup has it: the group of the pod's user may read secrets and write the rest."""
        files: dict[str, Any] = {}
        if "secret" in volume:
            files = {path.name: path.read_text() for path in self._secrets[volume["secret"]["secretName"]].iterdir()}
        elif "configMap" in volume:
            files = self._manifests.kind("ConfigMap")[volume["configMap"]["name"]]["data"]
        for name, text in files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(volume["secret"]["defaultMode"] if "secret" in volume else 0o644)
            os.chown(folder / name, 0, USER)
        os.chown(folder, 0, USER)
        folder.chmod(0o2777)

    def _environ(self, pod: Pod, name: str) -> dict[str, str]:
        fields = {"metadata.name": name, "status.podIP": ADDRESS}
        image = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PHASEPLANE_HOME": str(IMAGE), "HOME": "/tmp"}
        told = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in pod.main["env"]
        }
        return image | told


@contextmanager
def kubelet(directory: Path, manifests: Manifests, secrets: dict[str, Path]) -> Iterator[Kubelet]:
    """Nothing runs at the end; mounts went with the processes."""
    found = Kubelet(directory, manifests, secrets)
    try:
        yield found
    finally:
        found.close()


def _made(root: Path, place: str | Path) -> Path:
    found = Path(f"{root}{place}")
    found.mkdir(parents=True, exist_ok=True)
    return found


def _as_user(root: Path) -> list[str]:
    return ["/usr/sbin/chroot", f"--userspec={USER}:{USER}", f"--groups={USER}", str(root)]
