"""Sizes of known models, from their published configurations. Data only; see shapes.py for what is done with it."""

from __future__ import annotations

from typing import Any

from transfer.profile import ModelShape

MXFP4_BYTES = 0.53125
"""4 bits and an 8-bit scale for each 32."""
FP8: dict[str, Any] = {"weight_bytes_per_param": 1.0}


def dense(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, matrices: int = 3
) -> ModelShape:
    """A model without experts."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        ffn_matrices=matrices,
    )


def routed(
    sizes: tuple[int, int, int, int, int, int, int], experts: tuple[int, int, int], shared: int = 0,
    dense_layers: int = 0, **more: Any,
) -> ModelShape:  # fmt: skip
    """`sizes` as of dense(); experts: how many, how many a token goes to, size of one."""
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
    fields: dict[str, Any] = dict(zip(names, sizes, strict=True))
    fields |= dict(zip(("num_experts", "experts_per_token", "expert_ffn_size"), experts, strict=True))
    return ModelShape(**fields, shared_experts=shared, num_dense_layers=dense_layers, **more)


_MLA: dict[str, Any] = {"kv_lora_rank": 512, "rope_head_dim": 64, "q_lora_rank": 1536, "v_head_dim": 128}
_LLAMA_8B = dense(32, 4096, 32, 8, 128, 14336, 128256)
_LLAMA_70B = dense(80, 8192, 64, 8, 128, 28672, 128256)
_DEEPSEEK_V3 = routed((61, 7168, 128, 128, 128, 18432, 129280), (256, 8, 2048), 1, 3, **_MLA, **FP8)

SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": dense(30, 576, 9, 3, 64, 1536, 49152),
    "qwen2.5-0.5b": dense(24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-7b": dense(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-72b": dense(80, 8192, 64, 8, 128, 29568, 152064),
    "qwen3-0.6b": dense(28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": dense(28, 2048, 16, 8, 128, 6144, 151936),
    "qwen3-4b": dense(36, 2560, 32, 8, 128, 9728, 151936),
    "qwen3-8b": dense(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": dense(40, 5120, 40, 8, 128, 17408, 151936),
    "qwen3-32b": dense(64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-30b-a3b": routed((48, 2048, 32, 4, 128, 6144, 151936), (128, 8, 768)),
    "qwen3-235b-a22b": routed((94, 4096, 64, 4, 128, 12288, 151936), (128, 8, 1536)),
    # Three of four layers are linear attention: a state as large as the KV of 1024 tokens.
    "qwen3.5-397b-a17b": routed(
        (60, 4096, 32, 2, 256, 1024, 248320), (512, 10, 1024), 1, num_window_layers=45, window=1024
    ),
    "mistral-7b": dense(32, 4096, 32, 8, 128, 14336, 32768),
    "mixtral-8x7b": routed((32, 4096, 32, 8, 128, 14336, 32000), (8, 2, 14336)),
    "mixtral-8x22b": routed((56, 6144, 48, 8, 128, 16384, 32768), (8, 2, 16384)),
    "llama-2-70b": dense(80, 8192, 64, 8, 128, 28672, 32000),
    "llama-3.2-1b": dense(16, 2048, 32, 8, 64, 8192, 128256),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-405b": dense(126, 16384, 128, 8, 128, 53248, 128256),
    "llama-3-8b": _LLAMA_8B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": routed((61, 7168, 64, 64, 128, 18432, 163840), (384, 8, 2048), 1, 1, **_MLA, **FP8),
    "glm-4.5": routed((92, 5120, 96, 8, 128, 12288, 151552), (160, 8, 1536), 1, 3),
    "glm-4.5-air": routed((46, 4096, 96, 8, 128, 10944, 151552), (128, 8, 1408), 1, 1),
    "glm-5": routed(
        (78, 6144, 64, 64, 192, 12288, 154880), (256, 8, 2048), 1, 3,
        kv_lora_rank=512, rope_head_dim=64, q_lora_rank=2048, v_head_dim=256, **FP8,
    ),
    "minimax-m2": routed((62, 3072, 48, 8, 128, 1536, 200064), (256, 8, 1536), **FP8),
    "gpt-oss-20b": routed(
        (24, 2880, 64, 8, 64, 2880, 201088), (32, 4, 2880), expert_bytes_per_param=MXFP4_BYTES,
        num_window_layers=12, window=128,
    ),
    "gpt-oss-120b": routed(
        (36, 2880, 64, 8, 64, 2880, 201088), (128, 4, 2880), expert_bytes_per_param=MXFP4_BYTES,
        num_window_layers=18, window=128,
    ),
    "opt-13b": dense(40, 5120, 40, 40, 128, 20480, 50272, 2),
    "opt-66b": dense(64, 9216, 72, 72, 128, 36864, 50272, 2),
    "opt-175b": dense(96, 12288, 96, 96, 128, 49152, 50272, 2),
    "bloom-176b": dense(70, 14336, 112, 112, 128, 57344, 250880, 2),
}  # fmt: skip
ALIASES = {
    "llama2-70b": "llama-2-70b",
    "deepseek-v3.1": "deepseek-v3",
    "kimi-k2.5": "kimi-k2",
    "minimax-m2.5": "minimax-m2",
}
