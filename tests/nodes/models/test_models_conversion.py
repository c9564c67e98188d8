"""A GGUF becomes the model it was made from: weights bit for bit in float32, tokenizer and template usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from nodes.models.conversion import convert_gguf
from nodes.models.pull import is_complete, pull
from transfer.errors import InvalidValue
from transfer.models import read_identity

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def vocabulary() -> list[str]:
    """Specials, the byte alphabet, and merged tokens, one of digits that must never be used."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he", "hel", "12"]


def permute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """From halves to interleaved pairs, as GGUF stores q and k: row j of a half moves to row 2 j (+ 1)."""
    rows = weight.shape[0] // num_heads
    permuted = np.empty_like(weight)
    for head in range(num_heads):
        for j in range(rows // 2):
            permuted[head * rows + 2 * j] = weight[head * rows + j]
            permuted[head * rows + 2 * j + 1] = weight[head * rows + rows // 2 + j]
    return permuted


def write_gguf(path: Path, architecture: str = "llama", extra: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny Llama as GGUF; returns its weights by their Hugging Face names."""
    rng = np.random.default_rng(1)
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "he l", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (len(tokens), HIDDEN), 0),
        "model.norm.weight": ("output_norm.weight", (HIDDEN,), 0),
    }
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        shapes[ours + "input_layernorm.weight"] = (theirs + "attn_norm.weight", (HIDDEN,), 0)
        shapes[ours + "post_attention_layernorm.weight"] = (theirs + "ffn_norm.weight", (HIDDEN,), 0)
        shapes[ours + "self_attn.q_proj.weight"] = (theirs + "attn_q.weight", (HIDDEN, HIDDEN), HEADS)
        shapes[ours + "self_attn.k_proj.weight"] = (theirs + "attn_k.weight", (kv_size, HIDDEN), KV_HEADS)
        shapes[ours + "self_attn.v_proj.weight"] = (theirs + "attn_v.weight", (kv_size, HIDDEN), 0)
        shapes[ours + "self_attn.o_proj.weight"] = (theirs + "attn_output.weight", (HIDDEN, HIDDEN), 0)
        shapes[ours + "mlp.gate_proj.weight"] = (theirs + "ffn_gate.weight", (FFN, HIDDEN), 0)
        shapes[ours + "mlp.up_proj.weight"] = (theirs + "ffn_up.weight", (FFN, HIDDEN), 0)
        shapes[ours + "mlp.down_proj.weight"] = (theirs + "ffn_down.weight", (HIDDEN, FFN), 0)
    weights = {}
    for ours, (theirs, shape, heads) in shapes.items():
        weights[ours] = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(theirs, permute(weights[ours], heads) if heads else weights[ours])
    if extra:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    weights = write_gguf(tmp_path / "tiny.gguf")
    directory = tmp_path / "tiny"
    directory.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", directory, "tiny")
    return directory, weights


def test_weights_and_settings_are_those_of_the_gguf(converted: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    directory, weights = converted
    found = load_file(directory / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (100000.0, 1e-5, 8)
    assert config["tie_word_embeddings"] is True
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.num_key_value_heads == KV_HEADS
    assert is_complete(directory)


def test_tokenizer_splits_digits_keeps_specials_and_has_the_template(
    converted: tuple[Path, dict[str, np.ndarray[Any, Any]]],
) -> None:
    directory, _ = converted
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("hello 123<|im_end|>") == ["hel", "l", "o", "Ġ", "1", "2", "3", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("naïve 🚲 好").input_ids) == "naïve 🚲 好"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hel"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhel<|im_end|>\n"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)


def test_identity_follows_the_weights(converted: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path) -> None:
    directory, _ = converted
    identity = read_identity(directory)
    assert identity.name == "tiny"
    assert identity.max_context == 128
    again = tmp_path / "again"
    again.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", again, "tiny")
    assert read_identity(again) == identity


def test_other_architectures_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", architecture="gemma")
    with pytest.raises(InvalidValue, match="architecture 'gemma'; only llama"):
        convert_gguf(tmp_path / "a.gguf", tmp_path, "a")
    write_gguf(tmp_path / "b.gguf", extra=True)
    with pytest.raises(InvalidValue, match=r"blk\.0\.attn_sinks\.weight"):
        convert_gguf(tmp_path / "b.gguf", tmp_path, "b")


@pytest.mark.weights
def test_the_pulled_model_is_whole_and_a_second_pull_says_so(
    smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull("smollm2-135m") == smollm2_dir
    assert "is there already" in capsys.readouterr().err
    identity = read_identity(smollm2_dir)
    assert identity.name == "smollm2-135m"
    assert (identity.vocab_size, identity.max_context, identity.eos_token_ids) == (49152, 8192, (2,))
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    text = "def f(x): return x ** 2  # 平方 🚲 1024\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pull_from_nothing_gives_the_same_model(smollm2_dir: Path, tmp_path: Path) -> None:
    assert read_identity(pull("smollm2-135m", tmp_path)) == read_identity(smollm2_dir)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m"]
