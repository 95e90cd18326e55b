"""GELU whose input is kept as INT8 codes (Jetfire, arXiv 2403.12422, section 5.1)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import rows
from jetfire.nn.products import FLOATS, checked_block, keys_for_backward
from jetfire.ops import int8_dequantize, int8_gelu, int8_gelu_backward, int8_quantize

# torch's names of the two forms, and the op's.
_FORMS: dict[str, Literal["tanh", "erf"]] = {"none": "erf", "tanh": "tanh"}


class _Int8GELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        seeds: torch.Tensor | None,
        block: Block,
        approximate: Literal["tanh", "erf"],
    ) -> torch.Tensor:
        a = int8_quantize(x, block=block)
        ctx.save_for_backward(a.q, a.scale, seeds)
        ctx.block, ctx.approximate, ctx.dtype = block, approximate, FLOATS[x.dtype]
        return int8_dequantize(int8_gelu(a, approximate=approximate), out=ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, scale, seeds = ctx.saved_tensors
        g = int8_quantize(
            grads[0].contiguous(), block=ctx.block, rounding="stochastic", seed=seeds[0:1]
        )
        a = Quantized(q, scale, block=ctx.block)
        dx = int8_gelu_backward(a, g, approximate=ctx.approximate, seed=seeds[1:2])
        return int8_dequantize(dx, out=ctx.dtype), None, None, None


class Int8GELU(nn.GELU):
    """`torch.nn.GELU`, quantised per block at both ends; backward keeps one byte per element.

    Args:
        approximate: "none" (erf) or "tanh", as torch names them.
        block: 32, 64 or 128, the side of a quantisation block.
    """

    @checked
    def __init__(self, approximate: str = "tanh", block: int = 32) -> None:
        if approximate not in _FORMS:
            raise UsageError(f"approximate={approximate!r}: expected 'none' or 'tanh'")
        super().__init__(approximate)
        self.block = checked_block(block)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, n) to the same, in the autocast dtype if there is one."""
        x = rows(input, input.shape[-1] if input.dim() else 1)
        seeds = keys_for_backward(2, x.device, self.training)
        with torch.autocast(x.device.type, enabled=False):
            y = _Int8GELUFunction.apply(x, seeds, self.block, _FORMS[self.approximate])
        return y.reshape(input.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"
