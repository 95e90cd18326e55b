"""LayerNorm whose input is kept as INT8 codes (Jetfire, arXiv 2403.12422, section 5.2)."""

from __future__ import annotations

from operator import index

import torch
from torch import nn

from jetfire.core.arguments import checked
from jetfire.core.fused import Fused
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import as_fp32, rows
from jetfire.nn.products import FLOATS, Placed, checked_block, keys_for_backward
from jetfire.ops import int8_dequantize, int8_layernorm, int8_layernorm_backward, int8_quantize


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, block: Block, eps: float
) -> list[torch.Tensor]:
    """Return LayerNorm of x, the codes of x, and its rows' statistics."""
    a = int8_quantize(x, block=block)
    y, mean, rstd = int8_layernorm(a, weight, bias, eps=eps)
    return [int8_dequantize(y, out=FLOATS[x.dtype]), *a.tensors, mean, rstd]


def _backward(
    g: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    block: Block,
    eps: float,
    *wanted: bool,
) -> list[torch.Tensor]:
    """Return the gradients of x, weight and bias, those that are wanted."""
    codes = int8_quantize(g, block=block, rounding="stochastic", seed=seeds[0:1])
    a = Quantized(q, scale, block=block)
    dx, *of_parameters = int8_layernorm_backward(a, codes, weight, mean, rstd, seed=seeds[1:2])
    found = [int8_dequantize(dx, out=FLOATS[g.dtype])] if wanted[0] else []
    pairs = zip(of_parameters, wanted[1:], strict=True)
    return [*found, *(gradient for gradient, is_wanted in pairs if is_wanted)]


_layernorm = Fused(
    "layernorm_layer(Tensor x, Tensor weight, Tensor bias, int block, float eps) -> Tensor[]",
    _forward,
    "layernorm_layer_backward(Tensor g, Tensor weight, Tensor seeds, Tensor q, Tensor scale,"
    " Tensor mean, Tensor rstd, int block, float eps, bool of_x, bool of_weight, bool of_bias)"
    " -> Tensor[]",
    _backward,
)


class Int8LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension, quantised per block at both ends.

    Backward keeps one byte per element of the input, and two fp32 statistics per row.

    Args:
        block: 32, 64 or 128, the side of a quantisation block.
    """

    @checked
    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        block: int = 32,
        device: Placed = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(index(width), eps=eps, device=device, dtype=dtype)
        self.block = checked_block(block)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, width) to the same, in the autocast dtype if there is one."""
        x = rows(input, self.normalized_shape[0])
        seeds = keys_for_backward(2, x.device, self.training)
        weight, bias = (as_fp32(parameter) for parameter in (self.weight, self.bias))
        leaves, constants = (x, self.weight, self.bias), (self.block, self.eps)
        y = _layernorm(leaves, (x, weight, bias), (weight, seeds), constants)
        return y.reshape(input.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"
