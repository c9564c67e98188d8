"""Rotary position tables (RoFormer, arXiv 2104.09864; Llama 3.1 scaling). They are applied in model.py."""

from __future__ import annotations

import math

import torch

from nodes.engines.native.config import RopeConfig


def rope_tables(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [num_positions, 1, head_dim], for `x * cos + roll(x, head_dim // 2) * sin`.

    The first half of sin is negated, so that a roll takes the place of rotate-half. Computed in float32.
    """
    inverse = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(device, dtype)[:, None], sin.to(device, dtype)[:, None]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim // 2] radians a position, float32."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    return inverse


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    turns = rope.original_max_position / wavelength
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse
