"""GELU whose input is kept as INT8 codes (Jetfire, arXiv 2403.12422, section 5.1)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.fused import Fused
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import rows
from jetfire.nn.products import FLOATS, checked_block, keys_for_backward
from jetfire.ops import int8_dequantize, int8_gelu, int8_gelu_backward, int8_quantize

Approximate = Literal["tanh", "erf"]
# torch's names of the two forms, and the op's.
_FORMS: dict[str, Approximate] = {"none": "erf", "tanh": "tanh"}


def _forward(x: torch.Tensor, block: Block, approximate: Approximate) -> list[torch.Tensor]:
    """Return gelu(x), and the codes of x."""
    a = int8_quantize(x, block=block)
    y = int8_dequantize(int8_gelu(a, approximate=approximate), out=FLOATS[x.dtype])
    return [y, *a.tensors]


def _backward(
    g: torch.Tensor,
    seeds: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    block: Block,
    approximate: Approximate,
    _: bool,
) -> list[torch.Tensor]:
    """Return the gradient of x."""
    codes = int8_quantize(g, block=block, rounding="stochastic", seed=seeds[0:1])
    a = Quantized(q, scale, block=block)
    dx = int8_gelu_backward(a, codes, approximate=approximate, seed=seeds[1:2])
    return [int8_dequantize(dx, out=FLOATS[g.dtype])]


_gelu = Fused(
    "gelu_layer(Tensor x, int block, str approximate) -> Tensor[]",
    _forward,
    "gelu_layer_backward(Tensor g, Tensor seeds, Tensor q, Tensor scale, int block, str"
    " approximate, bool of_x) -> Tensor[]",
    _backward,
)


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
        y = _gelu((x,), (x,), (seeds,), (self.block, _FORMS[self.approximate]))
        return y.reshape(input.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"
