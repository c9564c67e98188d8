"""Makes engines that batch by themselves from an agent's options: vLLM, or any OpenAI-compatible server by its URL."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from nodes.engines.openai.engine import READY_S, OpenAiOptions, start_openai
from nodes.engines.openai.upstream import checked_url, is_loopback
from nodes.engines.served import ServedEngine
from nodes.options import ENV_PREFIX, AgentOptions
from transfer.errors import ConfigError, InvalidValue
from transfer.models import CONFIG_FILE, read_json
from transfer.profile import HardwareProfile
from transfer.terms import DTYPE_BYTES

GIB = 1 << 30
KEY_VARIABLE = f"{ENV_PREFIX}ENGINE_KEY"
MAX_KEY_CHARS = 4096

MakeServed = Callable[[], Awaitable[ServedEngine]]


def served_maker(options: AgentOptions, directory: Path, hardware: HardwareProfile | None) -> MakeServed:
    """hardware None: the machine this runs on, if the engine does. Raises InvalidValue for what is wrong now."""
    maker = _openai if options.engine == "openai" else _vllm
    return maker(options, directory, hardware)


def _openai(options: AgentOptions, directory: Path, hardware: HardwareProfile | None) -> MakeServed:
    url = checked_url(options.engine_url or "", options.engine_insecure)
    if hardware is None and not is_loopback(urlsplit(url).hostname or ""):
        raise InvalidValue(f"{url} is another machine and its hardware cannot be measured from here; say what it has "
                           "with --hardware, for example H20")  # fmt: skip
    made = OpenAiOptions(
        url=url, model_dir=directory, served_name=options.engine_served_name, key=engine_key(options),
        insecure=options.engine_insecure, block_size=options.block_size, num_blocks=options.num_blocks,
        max_running=options.max_running, hardware=hardware, ready_s=options.engine_start_s or READY_S,
        idle_s=options.engine_idle_s,
    )  # fmt: skip
    return lambda: start_openai(made)


def _vllm(options: AgentOptions, directory: Path, hardware: HardwareProfile | None) -> MakeServed:
    from nodes.engines.vllm.engine import START_S, VllmOptions, start_vllm

    made = VllmOptions(
        model_dir=directory, python=Path(options.vllm_python) if options.vllm_python else None,
        url=options.engine_url, socket=Path(options.vllm_socket) if options.vllm_socket else None,
        dtype=options.dtype, block_size=options.block_size, num_blocks=options.num_blocks,
        kv_bytes=int((options.kv_gib or 1.0) * GIB), max_model_len=options.max_model_len, threads=options.threads,
        args=options.vllm_args, hardware=hardware, start_timeout_s=options.engine_start_s or START_S,
    )  # fmt: skip
    return lambda: start_vllm(made)


def engine_key(options: AgentOptions, environ: Mapping[str, str] = os.environ) -> str | None:
    """The server's API key: the file's, else the variable's. Raises ConfigError when the file cannot be read."""
    if options.engine_key_file is None:
        return environ.get(KEY_VARIABLE) or None
    path = Path(options.engine_key_file)
    try:
        with path.open(encoding="utf-8") as file:
            key = file.read(MAX_KEY_CHARS).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read the key file {path} ({why}); give a file that holds the key alone") from None
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(f"{path} must hold one key on one line, and nothing else")
    return key


def stored_dtype(directory: Path) -> str:
    """What vLLM computes in when it is not told: the dtype that the weights are kept in, half precision for float32."""
    config = read_json(directory / CONFIG_FILE)
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if stored in DTYPE_BYTES and stored != "float32" else "bfloat16"
