"""LayerNorm whose input is kept as INT8 codes (Jetfire, arXiv 2403.12422, section 5.2)."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetfire.core.arguments import checked
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import rows
from jetfire.nn.products import FLOATS, Placed, checked_block, keys_for_backward
from jetfire.ops import (
    int8_dequantize,
    int8_layernorm,
    int8_layernorm_backward,
    int8_quantize,
)


class _Int8LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        seeds: torch.Tensor | None,
        block: Block,
        eps: float,
    ) -> torch.Tensor:
        a = int8_quantize(x, block=block)
        y, mean, rstd = int8_layernorm(a, weight.float(), bias.float(), eps=eps)
        ctx.save_for_backward(a.q, a.scale, weight, mean, rstd, seeds)
        ctx.block, ctx.dtype, ctx.bias_dtype = block, FLOATS[x.dtype], bias.dtype
        return int8_dequantize(y, out=ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, scale, weight, mean, rstd, seeds = ctx.saved_tensors
        g = int8_quantize(
            grads[0].contiguous(), block=ctx.block, rounding="stochastic", seed=seeds[0:1]
        )
        a = Quantized(q, scale, block=ctx.block)
        dx, dweight, dbias = int8_layernorm_backward(
            a, g, weight.float(), mean, rstd, seed=seeds[1:2]
        )
        dx = int8_dequantize(dx, out=ctx.dtype)
        return dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype), None, None, None


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
        with torch.autocast(x.device.type, enabled=False):
            y = _Int8LayerNormFunction.apply(x, self.weight, self.bias, seeds, self.block, self.eps)
        return y.reshape(input.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"
