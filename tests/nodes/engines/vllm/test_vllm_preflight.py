"""A vLLM that does not fit is refused in a sentence that says what differs and what to do."""

from __future__ import annotations

import msgspec
import pytest

from nodes.engines.vllm.frames import PROTOCOL, Hello
from nodes.engines.vllm.preflight import check_connector, check_server, rope_name
from transfer.errors import InvalidValue
from transfer.terms import KvLayout, ModelIdentity

MODEL = ModelIdentity(name="m", revision="aa", tokenizer="bb", vocab_size=100, max_context=8192)
CONFIG = {"num_hidden_layers": 2, "rope_theta": 100000.0}
HELLO = Hello(
    protocol=PROTOCOL, version="0.32.0", pid=1, model="/models/m", revision="aa", tokenizer="bb", dtype="bfloat16",
    cache_dtype="bfloat16", num_layers=2, num_kv_heads=3, head_dim=64, block_size=64, num_blocks=100, world_size=1,
    max_model_len=4096, device="cpu",
)  # fmt: skip


def test_one_that_fits_gets_the_layout_of_the_native_engine() -> None:
    assert check_connector(HELLO, MODEL, CONFIG, "auto", 32) == KvLayout(
        num_layers=2, num_kv_heads=3, head_dim=64, block_size=32, dtype="bfloat16", rope="theta=100000"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL + 1}, this agent {PROTOCOL};"),
        ({"version": "0.31.4"}, "vLLM 0.31.4 is older than 0.32"),
        ({"version": "main"}, "vLLM main is older than 0.32"),
        ({"obstacle": "its layers keep KV in different shapes"}, "runs /models/m, and its layers keep"),
        ({"missing": ("--no-async-scheduling",)}, "runs without --no-async-scheduling, on which moving KV rests"),
        ({"revision": "cc"}, r"whose weights \(cc\) are not those of m \(aa\)"),
        ({"revision": ""}, "whose weights cannot be told"),
        ({"tokenizer": "cc"}, r"whose tokenizer \(cc\) are not those"),
        ({"dtype": "float16", "cache_dtype": "float16"}, "computes in float16, but dtype bfloat16 is set"),
        ({"cache_dtype": "uint8"}, "keeps KV in uint8"),
        ({"block_size": 16}, "hold 16 tokens, which is no multiple of the fleet's 32"),
        ({"num_layers": 3}, "KV of 3 layers, the model has 2"),
    ],
)
def test_one_that_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        check_connector(msgspec.structs.replace(HELLO, **changes), MODEL, CONFIG, "bfloat16", 32)


def test_the_server_must_be_the_connectors() -> None:
    assert check_server(HELLO, "0.32.0", {"lora": 17, "smollm2": 4096}) == "smollm2"
    with pytest.raises(InvalidValue, match=r"server is vLLM 0\.33\.0, its connector's vLLM is 0.32.0"):
        check_server(HELLO, "0.33.0", {"m": 4096})
    with pytest.raises(InvalidValue, match="serves m, none with the connector's context of 4096"):
        check_server(HELLO, "0.32.0", {"m": 8192})


def test_a_rotation_that_is_not_known_has_a_name_of_its_own() -> None:
    yarn = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    other = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    assert rope_name(yarn, "m").startswith("config=")
    assert rope_name(yarn, "m") != rope_name(other, "m")
