"""Model directories are found by name or path, and their identity changes with whatever changes KV."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from transfer.errors import InvalidValue
from transfer.models import model_dir, models_dir, read_identity

CONFIG: dict[str, Any] = {"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}


def write_model(directory: Path, config: dict[str, Any] = CONFIG, fill: bytes = b"\1", tokenizer: str = "{}") -> Path:
    """A directory with one tensor of 40,000 bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [100, 100], "data_offsets": [0, 40000]}}).encode()
    data = struct.pack("<Q", len(header)) + header + fill * 40000
    (directory / "model.safetensors").write_bytes(data)
    return directory


def test_a_name_is_looked_up_in_the_cache_and_a_path_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEPLANE_HOME", str(tmp_path / "home"))
    pulled = write_model(models_dir() / "tiny")
    elsewhere = write_model(tmp_path / "elsewhere")
    assert model_dir("tiny") == pulled == tmp_path / "home" / "models" / "tiny"
    assert model_dir(elsewhere) == elsewhere
    with pytest.raises(InvalidValue, match="run `phaseplane pull other`"):
        model_dir("other")
    with pytest.raises(InvalidValue, match=r"no model directory '/nowhere/x'.*phaseplane pull smollm2-135m"):
        model_dir("/nowhere/x")
    with pytest.raises(InvalidValue, match=r"has no config\.json"):
        model_dir(tmp_path)
    with pytest.raises(InvalidValue, match="phaseplane pull"):
        model_dir("")


def test_identity_is_stable_and_names_the_model(tmp_path: Path) -> None:
    first = read_identity(write_model(tmp_path / "a"))
    assert first == read_identity(tmp_path / "a")
    assert (first.name, first.vocab_size, first.max_context, first.eos_token_ids) == ("a", 100, 64, (2,))
    copy = read_identity(write_model(tmp_path / "b"))
    assert (copy.revision, copy.tokenizer) == (first.revision, first.tokenizer)


def test_identity_changes_with_weights_config_and_tokenizer(tmp_path: Path) -> None:
    base = read_identity(write_model(tmp_path / "base"))
    tuned = read_identity(write_model(tmp_path / "tuned", fill=b"\2"))
    other_config = read_identity(write_model(tmp_path / "config", config=CONFIG | {"rope_theta": 5}))
    other_tokenizer = read_identity(write_model(tmp_path / "tokenizer", tokenizer="[]"))
    assert len({base.revision, tuned.revision, other_config.revision}) == 3
    assert other_tokenizer.revision == base.revision
    assert other_tokenizer.tokenizer != base.tokenizer


def test_a_pulled_models_own_identity_is_taken(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    marker = {"name": "smollm2-135m", "revision": "ab" * 32, "tokenizer": "cd" * 32, "files": {}}
    (directory / "phaseplane.json").write_text(json.dumps(marker), encoding="utf-8")
    generation = {"eos_token_id": [2, 7]}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    identity = read_identity(directory)
    assert (identity.name, identity.revision, identity.tokenizer) == ("smollm2-135m", "ab" * 32, "cd" * 32)
    assert identity.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"max_position_embeddings": 64}, "vocab_size in .* must be a positive integer, got None"),
        (CONFIG | {"vocab_size": "big"}, "got 'big'"),
        (CONFIG | {"eos_token_id": "</s>"}, "eos_token_id .* must be an integer"),
    ],
)
def test_a_wrong_config_is_a_sentence(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    directory = write_model(tmp_path / "model", config=config)
    with pytest.raises(InvalidValue, match=sentence):
        read_identity(directory)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", b"{", "is not JSON"),
        ("config.json", b"[]", "holds a list, not an object"),
        ("config.json", None, "cannot read"),
        ("tokenizer.json", None, "cannot read"),
        ("model.safetensors", None, r"has no \*\.safetensors"),
        ("model.safetensors", b"\xff" * 20, "is not a safetensors file"),
        ("model.safetensors", b"\x02", "is not a safetensors file"),
    ],
)
def test_a_damaged_directory_is_a_sentence(tmp_path: Path, file: str, content: bytes | None, sentence: str) -> None:
    directory = write_model(tmp_path / "model")
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_bytes(content)
    with pytest.raises(InvalidValue, match=sentence):
        read_identity(directory)
