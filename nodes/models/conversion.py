"""Turns a GGUF of the Llama family into a Hugging Face-format directory in float32.

Dequantises, undoes the rotary permutation of q and k, and writes configuration and generation settings.
The tokenizer is rebuilt in gguf_tokenizer.py. It neither downloads nor verifies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from nodes.models.gguf_tokenizer import write_tokenizer
from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, IDENTITY_FILE

Weights = dict[str, npt.NDArray[np.float32]]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

WEIGHTS_FILE = "model.safetensors"

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, directory: Path, name: str, progress: Progress | None = None) -> None:
    """Write config, weights, tokenizer, generation settings and identity into the existing `directory`.

    Raises InvalidValue when `path` is not a GGUF of the Llama family or holds a tensor of unknown name.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise InvalidValue(f"{path.name} is not a GGUF file ({error}); pull the model again") from None
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    if metadata.get("general.architecture") != "llama":
        raise InvalidValue(f"{path.name} is of architecture {metadata.get('general.architecture')!r}; only llama works")
    config = _config(metadata)
    weights = _weights(reader, config, progress)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(directory / CONFIG_FILE, config)
    specials = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", specials)
    write_tokenizer(metadata, directory)
    _write_json(directory / IDENTITY_FILE, _identity(directory, name, weights))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": metadata["llama.vocab_size"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _shortest(value: float) -> float:
    """The decimal a float32 was written from: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _weights(reader: Any, config: dict[str, Any], progress: Progress | None) -> Weights:
    weights: Weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            weight = _unpermute(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = _unpermute(weight, config["num_key_value_heads"])
        weights[_hf_name(tensor.name)] = weight
        if progress is not None:
            progress(done, len(reader.tensors))
    return weights


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    stem, _, suffix = rest.partition(".")
    if prefix != "blk" or stem not in _BLOCK_NAMES or suffix != "weight":
        raise InvalidValue(f"the GGUF holds a tensor {name!r} that a Llama model does not have; pull the model again")
    return f"model.layers.{layer}.{_BLOCK_NAMES[stem]}.weight"


def _unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """[heads * head_dim, hidden] from interleaved rotary pairs (GGUF) to halves (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _identity(directory: Path, name: str, weights: Weights) -> dict[str, Any]:
    digest = hashlib.sha256()
    for key in sorted(weights):
        digest.update(f"{key}\0{weights[key].shape}\0".encode())
        digest.update(weights[key].data)
    return {
        "name": name,
        "revision": digest.hexdigest(),
        "tokenizer": hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
        "files": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
