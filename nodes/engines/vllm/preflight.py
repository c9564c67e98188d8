"""Whether a vLLM can be what it is to be here, from what its connector and server say. Pure; refuses in sentences."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from nodes.engines.native.config import parse_rope
from nodes.engines.vllm.frames import PROTOCOL, Hello
from transfer.errors import InvalidValue
from transfer.terms import DTYPE_BYTES, KvLayout, ModelIdentity

OLDEST = (0, 32)
"""The connector's interface and return_token_ids are as we use them from here on."""


def check_connector(
    hello: Hello, model: ModelIdentity, config: dict[str, Any], dtype: str, block_size: int
) -> KvLayout:
    """The arena's layout for this vLLM. config: the model's config.json. dtype: wanted, or "auto". block_size: of the
    arena. Raises InvalidValue, in one sentence, where they do not go together."""
    if hello.protocol != PROTOCOL:
        raise InvalidValue(
            f"vLLM's connector speaks protocol {hello.protocol}, this agent {PROTOCOL}; "
            "give vLLM the same release of phaseplane"
        )
    found = re.match(r"(\d+)\.(\d+)", hello.version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidValue(f"vLLM {hello.version} is older than {oldest}, the first that is supported; upgrade it")
    if hello.obstacle:
        raise InvalidValue(f"vLLM runs {hello.model}, and {hello.obstacle}; join it by URL, without moving KV")
    if hello.missing:
        raise InvalidValue(f"vLLM runs without {', '.join(hello.missing)}, on which moving KV rests; start it so")
    _check_model(hello, model, config)
    if dtype not in ("auto", hello.dtype):
        raise InvalidValue(f"vLLM computes in {hello.dtype}, but dtype {dtype} is set; start it with --dtype {dtype}")
    if hello.cache_dtype != hello.dtype or hello.dtype not in DTYPE_BYTES:
        raise InvalidValue(
            f"vLLM keeps KV in {hello.cache_dtype} and computes in {hello.dtype}; start it with --kv-cache-dtype auto"
        )
    if hello.block_size % block_size:
        raise InvalidValue(
            f"vLLM's blocks hold {hello.block_size} tokens, which is no multiple of the fleet's {block_size}; "
            f"start it with --block-size {block_size} or a multiple"
        )
    return KvLayout(
        num_layers=hello.num_layers, num_kv_heads=hello.num_kv_heads, head_dim=hello.head_dim, block_size=block_size,
        dtype=hello.dtype, rope=rope_name(config, model.name),
    )  # fmt: skip


def check_worker(first: Hello, other: Hello) -> None:
    """Raises InvalidValue unless both are workers of one vLLM, by what they say of it."""
    differ = [
        f"{name} ({getattr(other, name)}, the first says {getattr(first, name)})"
        for name in Hello.__struct_fields__
        if name not in ("rank", "pid") and getattr(other, name) != getattr(first, name)
    ]
    if differ:
        raise InvalidValue(f"workers of one vLLM differ in {', '.join(differ)}; start all of it anew")


def check_server(hello: Hello, version: str, models: dict[str, int]) -> str:
    """The name that the server takes for the model. Raises InvalidValue where it is not the connector's vLLM."""
    if version != hello.version:
        raise InvalidValue(
            f"the server is vLLM {version}, its connector's vLLM is {hello.version}; give the URL of the one whose "
            "connector has this socket"
        )
    served = [name for name, longest in models.items() if longest in (0, hello.max_model_len)]
    if not served:
        raise InvalidValue(
            f"the server serves {', '.join(models) or 'no model'}, none with the connector's context of "
            f"{hello.max_model_len} tokens; give the URL of the one whose connector has this socket"
        )
    return served[0]


def rope_name(config: dict[str, Any], where: str) -> str:
    """As the native engine names the rotation; for one that it does not know, a digest of all that is said of it."""
    try:
        return parse_rope(config, where).description
    except InvalidValue:
        said = {key: config.get(key) for key in ("rope_theta", "rope_scaling", "rope_parameters")}
        return "config=" + hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _check_model(hello: Hello, model: ModelIdentity, config: dict[str, Any]) -> None:
    if not hello.revision:
        raise InvalidValue(
            f"vLLM serves {hello.model!r}, whose weights cannot be told; start it with a model directory in "
            "Hugging Face format"
        )
    for name, theirs, ours in (
        ("weights", hello.revision, model.revision), ("tokenizer", hello.tokenizer, model.tokenizer),
    ):  # fmt: skip
        if theirs != ours:
            raise InvalidValue(
                f"vLLM serves {hello.model}, whose {name} ({theirs[:12]}) are not those of {model.name} ({ours[:12]}); "
                "start it with that model"
            )
    layers = config.get("num_hidden_layers")
    if layers != hello.num_layers:
        raise InvalidValue(
            f"vLLM keeps KV of {hello.num_layers} layers, the model has {layers}; turn speculative decoding off"
        )
