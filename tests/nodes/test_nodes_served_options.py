"""What an agent with an engine that batches by itself is told: which settings go together, where a key comes from."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from nodes import making_served
from nodes.engines.vllm.engine import VllmOptions
from nodes.making import engine_maker
from nodes.making_served import engine_key, stored_dtype
from nodes.options import parse_options
from transfer.errors import ConfigError, InvalidValue

BASE = ["--control", "tcp://127.0.0.1:5555"]
MIXED, DECODE = [*BASE, "--instance", "s0=mixed"], [*BASE, "--instance", "s0=decode"]
URL = ["--engine", "openai", "--engine-url"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([*MIXED, "--engine", "openai"], "say where with --engine-url"),
        ([*DECODE, *URL, "http://127.0.0.1:1"], "give its instance the role mixed, not decode"),
        ([*MIXED, *URL, "http://127.0.0.1:1", "--instance", "s1=mixed"], "hosts one instance, got 2"),
        ([*DECODE, "--engine", "vllm"], "needs one of --vllm-python"),
        ([*DECODE, "--engine", "vllm", "--vllm-python", "p", "--engine-url", "u"], "needs one of --vllm-python"),
        ([*DECODE, "--engine", "vllm", "--engine-url", "http://127.0.0.1:1"], "--vllm-socket go together"),
        ([*DECODE, "--engine-url", "http://127.0.0.1:1"], "--engine-url is for --engine vllm or openai"),
        ([*DECODE, "--vllm-python", "p"], "--vllm-python is for --engine vllm or openai"),
        ([*MIXED, *URL, "http://127.0.0.1:1", "--engine-idle-s", "0"], "--engine-idle-s must be a number above 0"),
        ([*DECODE, "--vllm-args", "'open"], "--vllm-args cannot be split into arguments"),
        ([*DECODE, "--engine-key", "sk-secret"], "unrecognized arguments: --engine-key"),
    ],
)
def test_what_does_not_go_together_is_named(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(argv, {})
    assert sentence in str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    return tmp_path


@pytest.mark.parametrize(
    ("url", "more", "sentence"),
    [
        ("http://10.0.0.7:8000", [], "allow it on a network of your own with --engine-insecure yes"),
        ("http://sgl.example", ["--engine-insecure", "no"], "sgl.example is another machine"),
        ("https://10.0.0.7", [], "say what it has with --hardware"),
        ("http://10.0.0.7", ["--engine-insecure", "yes"], "say what it has with --hardware"),
        ("ftp://127.0.0.1", [], "must be like http://127.0.0.1:8080"),
        ("http://127.0.0.1:x", [], "must be like http://127.0.0.1:8080"),
        ("http://me:secret@127.0.0.1", [], "must hold no password"),
        ("http://127.0.0.1", ["--engine-key-file", "/no/such/file"], "cannot read the key file /no/such/file"),
    ],
)
def test_a_url_that_cannot_be_joined_is_refused_before_anything_starts(
    url: str, more: list[str], sentence: str, model: Path
) -> None:
    options = parse_options([*MIXED, *URL, url, *more, "--model", str(model)], {})
    with pytest.raises(InvalidValue) as caught:
        engine_maker(options, options.instances[0])
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("http://127.0.0.1:8080/v1", []), ("http://localhost", []), ("http://[::1]:80", []),
        ("https://10.0.0.7", ["--hardware", "H20"]),
        ("http://10.0.0.7", ["--hardware", "H20", "--engine-insecure", "yes"]),
    ],
)  # fmt: skip
def test_a_url_that_can_be_joined(url: str, more: list[str], model: Path) -> None:
    options = parse_options([*MIXED, *URL, url, *more, "--model", str(model)], {})
    assert callable(engine_maker(options, options.instances[0]))


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    argv = [*MIXED, *URL, "http://127.0.0.1"]
    assert engine_key(parse_options(argv, {}), {}) is None
    assert engine_key(parse_options(argv, {}), {"PHASEPLANE_ENGINE_KEY": "sk-1"}) == "sk-1"
    file = tmp_path / "key"
    file.write_text("sk-2\n")
    options = parse_options([*argv, "--engine-key-file", str(file)], {})
    assert engine_key(options, {"PHASEPLANE_ENGINE_KEY": "sk-1"}) == "sk-2"
    for wrong in ("", "two keys", "sk-é"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="must hold one key"):
            engine_key(options, {})


async def test_vllm_is_told_what_the_agent_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[VllmOptions] = []

    async def start(options: VllmOptions) -> argparse.Namespace:
        told.append(options)
        return argparse.Namespace()

    monkeypatch.setattr("nodes.engines.vllm.engine.start_vllm", start)
    options = parse_options(
        [*DECODE, "--engine", "vllm", "--vllm-python", "/opt/v/bin/python", "--vllm-args", "--enforce-eager --seed '7'",
         "--max-model-len", "4096", "--block-size", "32", "--kv-gib", "2", "--dtype", "bfloat16", "--hardware", "H20",
         "--model", str(model), "--engine-start-s", "1800"], {},
    )  # fmt: skip
    await making_served.served_maker(options, model, None)()
    (one,) = told
    assert (one.python, one.url, one.socket) == (Path("/opt/v/bin/python"), None, None)
    assert one.args == ("--enforce-eager", "--seed", "7")
    assert (one.max_model_len, one.block_size, one.kv_bytes, one.dtype) == (4096, 32, 2 << 30, "bfloat16")
    assert one.start_timeout_s == 1800.0


def test_a_pool_beside_vllm_keeps_kv_as_vllm_does(tmp_path: Path) -> None:
    for said, dtype in (
        ('{"torch_dtype": "float16"}', "float16"),
        ('{"dtype": "float32"}', "bfloat16"),
        ("{}", "bfloat16"),
    ):
        (tmp_path / "config.json").write_text(said)
        assert stored_dtype(tmp_path) == dtype
