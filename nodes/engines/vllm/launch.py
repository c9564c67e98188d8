"""Starts `vllm serve` in an environment of its own, with our connector, and ends it. It dies with this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import nodes
import transfer
from nodes.engines.vllm import child
from transfer.errors import EngineFailed, InvalidValue

CONNECTOR = "PhaseplaneConnector"
CONNECTOR_MODULE = "nodes.engines.vllm.connector"
BLOCK_MULTIPLE = 32
"""vLLM's CPU attention takes blocks of a multiple of this; elsewhere such a size is as good as another."""
STOP_S = 10.0
TAIL_BYTES = 4000
_ERROR = re.compile(r"\b[A-Za-z_][\w.]*Error\b")
_OURS = (nodes, transfer)
_NOT_PASSED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_ALONE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


class Child:
    """The started process, its log and how to end it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self, *, has_served: bool) -> str:
        """Returns, with a sentence, when the process has ended. has_served: its log may quote prompts by now, and the
        sentence names its error only."""
        status = await self._process.wait()
        said = tail(self.log)
        if has_served:
            found = _ERROR.search(said)
            said = f"{found[0] if found else 'no error named'} (see {self.log})"
        return f"vLLM (pid {self.pid}) ended with status {status}: {said}"

    async def stop(self) -> None:
        """Idempotent. Asks the server to end its workers and itself, and after at most STOP_S kills what is left."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


def command(
    python: Path, model_dir: Path, socket: Path, uds: Path, *, name: str, dtype: str, block_size: int,
    max_model_len: int | None, args: tuple[str, ...],
) -> list[str]:  # fmt: skip
    """`vllm serve` with what we need; `args` come last and win."""
    transfer_config = {
        "kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), "launched": True},
    }  # fmt: skip
    line = [
        str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), "--uds", str(uds),
        "--served-model-name", name, "--dtype", dtype, "--block-size", str(math.lcm(block_size, BLOCK_MULTIPLE)),
        "--generation-config", "vllm", "--scheduling-policy", "priority", "--no-async-scheduling",
        "--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(transfer_config),
    ]  # fmt: skip
    if max_model_len is not None:
        line += ["--max-model-len", str(max_model_len)]
    return [*line, *args]


async def launch(line: list[str], directory: Path, log: Path, env: Mapping[str, str]) -> Child:
    """Start it in a session of its own. directory: private; packages that vLLM imports of ours are linked there.

    Raises InvalidValue when the interpreter cannot be run, EngineFailed when the process cannot be started.
    """
    python = Path(line[0])
    if not os.access(python, os.X_OK):
        raise InvalidValue(f"{python} cannot be run; give the Python of an environment that has vllm")
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    environment |= _ALONE | dict(env) | {"PYTHONPATH": str(_packages(directory))}
    with log.open("ab") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                str(python), str(child.__file__), str(os.getpid()), *line, env=environment, cwd=directory,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EngineFailed(f"cannot start {python}: {error.strerror}") from None
    return Child(process, log)


def tail(log: Path) -> str:
    """The last line of a log that tells of an error, or else its last, and where the rest is."""
    try:
        data = log.read_bytes()[-TAIL_BYTES:]
    except OSError:
        return f"see {log}"
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"{(errors or lines or ['it said nothing'])[-1][:300]} (see {log})"


def _packages(directory: Path) -> Path:
    """A directory with our packages alone: where they are installed, all of our environment would come along."""
    root = directory / "packages"
    root.mkdir(mode=0o700, exist_ok=True)
    for package in _OURS:
        with contextlib.suppress(FileExistsError):
            (root / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return root
