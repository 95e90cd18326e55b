"""How exact a layer's products are in INT8 and FP8, on the operands that one batch gives it.

SQNR is 10·log10(‖C‖²/‖Ĉ − C‖²) in dB, of each of the three products y = x·Wᵀ, dx = g·W and
dW = gᵀ·x: C is the fp32 product of the operands before they are quantised, Ĉ that of the codes. In
INT8 the gradient is rounded stochastically, as training has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jetfire.core.problem import Block
from jetfire.gpt2.training.step import autocast
from jetfire.measure.peers import to_e4m3
from jetfire.models.layers import CPU, weight_of
from jetfire.models.sources import Batch
from jetfire.models.step import loss_of
from jetfire.ops import int8_quantize
from jetfire.reference.dequantize import dequantize

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FP8 = {"fp8_tensorwise": None, "fp8_rowwise": 1}
MOST = 999.0


@dataclass(frozen=True)
class Sqnr:
    """The SQNR in dB of a layer's output, its input's gradient and its weight's."""

    y: float
    dx: float
    dw: float

    @property
    def least(self) -> float:
        return min(self.y, self.dx, self.dw)

    @property
    def worst(self) -> str:
        """Which product it is the least of."""
        return min(("y", "dx", "dw"), key=lambda name: getattr(self, name))


def _decibels(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the SQNR, `MOST` of a product without error and −`MOST` of one that is not finite."""
    signal = float(exact.double().square().sum())
    noise = float((got - exact).double().square().sum())
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -MOST
    if noise == 0 or signal == 0:
        return MOST if noise == 0 else -MOST
    return max(-MOST, min(MOST, 10 * math.log10(signal / noise)))


def of_products(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, blocks: Mapping[str, Block]
) -> dict[str, Sqnr]:
    """Return the SQNR by recipe and by `FP8`'s names.

    Args:
        x, w, g: m×k, n×k and m×n, as a layer has them.
        blocks: by recipe, the side of its blocks.
    """
    wide = [tensor.detach().float().contiguous() for tensor in (x, w, g)]
    exact = _three(wide, _product)
    got = {name: _in_int8(x, w, g, block) for name, block in blocks.items()}
    for name, rows in FP8.items():
        got[name] = _three(wide, _fp8(rows))
    return {
        name: Sqnr(*(_decibels(c, right) for c, right in zip(three, exact, strict=True)))
        for name, three in got.items()
    }


def _three(operands: Sequence[torch.Tensor], product: Product) -> list[torch.Tensor]:
    """Return y, dx and dW of x, W and g by a product of A and B that is A·Bᵀ."""
    x, w, g = operands
    return [product(x, w), product(g, w.t()), product(g.t(), x.t())]


def _in_int8(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, block: Block) -> list[torch.Tensor]:
    """Return the products of what codes stand for: those of the codes but for roundings in fp32.

    A transpose has the same codes, as blocks are square.
    """
    seed = torch.zeros(1, dtype=torch.int64, device=g.device)
    codes = [int8_quantize(tensor.detach().contiguous(), block=block) for tensor in (x, w)]
    codes.append(
        int8_quantize(g.detach().contiguous(), block=block, rounding="stochastic", seed=seed)
    )
    pairs = (one.tensors for one in codes)
    return _three([dequantize(q, scale, block) for q, scale in pairs], _product)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.t()


def _fp8(rows: int | None) -> Product:
    """Return a product of operands in e4m3, a scale for so many rows of each; None for all."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        codes, scale = to_e4m3(tensor, rows or tensor.shape[0], tensor.shape[1])
        return codes.float() * (scale if rows else scale.reshape(()))

    return lambda a, b: _product(rounded(a), rounded(b))


def of_layers(
    model: nn.Module,
    batch: Batch,
    names: Collection[str],
    blocks: Mapping[str, Block],
    most: int | None = None,
) -> dict[str, dict[str, Sqnr]]:
    """Return by layer's name the SQNR of its products on one batch, the first call's.

    Parameters are left without gradients, so that what a step holds is activations alone.

    Args:
        names: of linear layers.
        most: how many rows and features of an operand are taken, the first ones; None takes all.
    """
    found: dict[str, dict[str, Sqnr]] = {}
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def hook(name: str, module: Any, given: Sequence[Any], output: torch.Tensor) -> torch.Tensor:
        if not output.requires_grad:  # nothing before it learns
            # No leaf, or the model could not overwrite it.
            output = output.detach().requires_grad_().clone()
        x = given[0].detach()

        def take(gradient: torch.Tensor) -> None:
            if name not in found:
                inputs, outputs = x.shape[-1], gradient.shape[-1]
                whole = x.reshape(-1, inputs), weight_of(module), gradient.reshape(-1, outputs)
                a, w, g = (tensor[:most, :most] for tensor in whole)
                found[name] = of_products(a.to(g.dtype), w, g, blocks)

        output.register_hook(take)
        return output

    handles = [
        module.register_forward_hook(lambda *args, name=name: hook(name, *args))
        for name, module in model.named_modules()
        if name in names
    ]
    try:
        device = next((p.device for p in model.parameters()), CPU)
        loss_of(model, batch, autocast(device)).backward()
    finally:
        for handle in handles:
            handle.remove()
    return found
