"""Where model directories live and which weights exactly they hold. Torch-free: the control plane reads it too.

A model directory is in Hugging Face format (config.json, *.safetensors, tokenizer.json). It does not load weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from transfer.errors import InvalidValue
from transfer.terms import ModelIdentity

IDENTITY_FILE = "phaseplane.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_HASH_CHUNK_BYTES = 1 << 20


def home_dir() -> Path:
    """$PHASEPLANE_HOME, else ~/.cache/phaseplane. Not created here."""
    configured = os.environ.get("PHASEPLANE_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "phaseplane"


def models_dir(home: Path | None = None) -> Path:
    """Where pulled models are kept, below `home` (home_dir() by default)."""
    return (home or home_dir()) / "models"


def model_dir(name_or_path: str | Path) -> Path:
    """The directory of a pulled model's name, or of a path. Raises InvalidValue naming the next command."""
    text = str(name_or_path)
    is_name = "/" not in text and not text.startswith((".", "~")) and text != ""
    if is_name:
        pulled = models_dir() / text
        if (pulled / CONFIG_FILE).is_file():
            return pulled
    path = Path(text).expanduser()
    if text and (path / CONFIG_FILE).is_file():
        return path.resolve()
    if text and path.is_dir():
        raise InvalidValue(f"{path} has no {CONFIG_FILE}; give a directory in Hugging Face format")
    if is_name:
        raise InvalidValue(f"model {text!r} is not in {models_dir()}; run `phaseplane pull {text}`")
    raise InvalidValue(f"there is no model directory {text!r}; run `phaseplane pull smollm2-135m` and name that model")


def read_identity(directory: Path) -> ModelIdentity:
    """Which weights `directory` holds; reads at most a few MB. Raises InvalidValue when a file is missing or wrong.

    A pulled model carries a sha256 over all its weights. For any other directory the revision is a sha256
    over the configuration, every tensor's name, shape and place, and a sample of every tensor's bytes.
    """
    config = read_json(directory / CONFIG_FILE)
    marker = read_json(directory / IDENTITY_FILE) if (directory / IDENTITY_FILE).is_file() else {}
    name = marker.get("name") or directory.resolve().name
    revision = marker.get("revision") or _sampled_revision(directory)
    tokenizer = marker.get("tokenizer") or _file_sha256(directory / TOKENIZER_FILE)
    return ModelIdentity(
        name=str(name),
        revision=str(revision),
        tokenizer=str(tokenizer),
        vocab_size=_positive_int(config, "vocab_size", directory),
        max_context=_positive_int(config, "max_position_embeddings", directory),
        eos_token_ids=_eos_token_ids(directory, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file. Raises InvalidValue when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror or error}; give a complete model directory") from None
    except ValueError as error:
        raise InvalidValue(f"{path} is not JSON ({error}); restore it or pull the model again") from None
    if not isinstance(value, dict):
        raise InvalidValue(f"{path} holds a {type(value).__name__}, not an object; restore it or pull the model again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files in name order. Raises InvalidValue when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidValue(f"{directory} has no *.safetensors file; give a directory with weights in that format")
    return files


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise InvalidValue(f"eos_token_id of {directory} must be an integer or a list of them, got {value!r}")
    return tuple(ids)


def _positive_int(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise InvalidValue(f"{key} in {directory / CONFIG_FILE} must be a positive integer, got {value!r}")
    return value


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_HASH_CHUNK_BYTES):
                digest.update(data)
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror or error}; give a complete model directory") from None
    return digest.hexdigest()


def _sampled_revision(directory: Path) -> str:
    digest = hashlib.sha256((directory / CONFIG_FILE).read_bytes())
    for path in weight_files(directory):
        with path.open("rb") as file:
            _sample_tensors(file, path, digest)
    return digest.hexdigest()


def _sample_tensors(file: BinaryIO, path: Path, digest: hashlib._Hash) -> None:
    """Feed the header and the middle of every tensor of one safetensors file."""
    prefix = file.read(8)
    size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
    header = file.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors = {key: value["data_offsets"] for key, value in json.loads(header).items() if key != "__metadata__"}
        spans = [(int(begin), int(end)) for _, (begin, end) in sorted(tensors.items())]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidValue(f"{path} is not a safetensors file; restore it or pull the model again") from None
    digest.update(header)
    for begin, end in spans:
        middle = begin + max(0, (end - begin - _SAMPLE_BYTES) // 2)
        file.seek(8 + size + middle)
        digest.update(file.read(min(_SAMPLE_BYTES, end - begin)))
