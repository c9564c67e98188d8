"""Linear layers with the residual sum a decoder needs. On CPU the weights are packed once for oneDNN.

Packed, a matrix-vector product reads memory at full speed (more than twice that of the plain layout), float32
products run at twice the speed, and the residual is added in float32 before the result is rounded.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

_PACK_FOR_ROWS = 512
"""The layout chosen for this many rows is as quick for one row; the layout for one row is slow for many."""


class Linear(Protocol):
    """y = x W^T + b. x [num_tokens, in_features], y and other [num_tokens, out_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """y + other. `other` may be overwritten."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The quickest Linear for the weight's device. weight [out_features, in_features], bias [out_features]."""
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


class DenseLinear:
    """Plain torch operators: CUDA, and CPUs without oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other.add_(self(x))


class PackedLinear:
    """Weights in oneDNN's own blocked layout. The original weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._run_with = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run_with(x, other, self._weight, self._bias, "add")
        return y


def _can_pack(dtype: torch.dtype) -> bool:
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
