"""A linear layer whose three products run in per-block INT8 (Jetfire, arXiv 2403.12422, section 4).

What backward needs of the input and the weight is kept as INT8 codes, already transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jetfire.ops import int8_gemm, int8_quantize
from jetfire.ops.errors import UsageError

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _seed(device: torch.device) -> torch.Tensor:
    """A Philox key from torch's own generator, so that torch.manual_seed makes a run repeat."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


class _Int8LinearFunction(torch.autograd.Function):
    """y = x·Wᵀ + b; gradients are quantised stochastically, so both products are unbiased."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int
    ) -> torch.Tensor:
        q, scale, qt, scale_t = int8_quantize(x, block=block, layout="both")
        wq, w_scale, wqt, w_scale_t = int8_quantize(weight, block=block, layout="both")
        ctx.save_for_backward(qt, scale_t, wqt, w_scale_t)
        ctx.block, ctx.has_bias, ctx.dtype = block, bias is not None, _NAMES[x.dtype]
        wide = bias.float() if bias is not None else None
        return int8_gemm(q, scale, wq, w_scale, block=block, out=ctx.dtype, bias=wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        qt, scale_t, wqt, w_scale_t = ctx.saved_tensors
        g, g_scale, gt, g_scale_t = int8_quantize(
            grad.contiguous(),
            block=ctx.block,
            layout="both",
            rounding="stochastic",
            seed=_seed(grad.device),
        )
        dx = int8_gemm(g, g_scale, wqt, w_scale_t, block=ctx.block, out=ctx.dtype)
        dw = int8_gemm(gt, g_scale_t, qt, scale_t, block=ctx.block, out="fp32")
        db = grad.float().sum(0) if ctx.has_bias else None
        return dx, dw, db, None


class Int8Linear(nn.Linear):
    """`torch.nn.Linear` with INT8 products; parameters, state dict and initialisation are its own.

    Args:
        block: 32, 64 or 128, the side of a quantisation block.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, block: int = 32,
                 device: Any = None, dtype: Any = None) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.block = block

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in_features) → (…, out_features), in the autocast dtype if there is one."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        if dtype not in _NAMES:
            raise UsageError(f"Int8Linear: input of {dtype}, expected bfloat16, float16 or float32")
        x = input.to(dtype).reshape(-1, self.in_features)
        if x.stride(1) != 1:
            x = x.contiguous()
        with torch.autocast(kind, enabled=False):
            y = _Int8LinearFunction.apply(x, self.weight, self.bias, self.block)
        return y.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"


def convert(model: nn.Module, block: int, skip: tuple[str, ...] = ()) -> list[str]:
    """Replace every `nn.Linear` of a model by an `Int8Linear` over the same parameters, in place.

    Args:
        skip: names of modules to leave (an output head, say).

    Returns:
        The names of the modules replaced.
    """
    if type(model) is nn.Linear:
        raise UsageError("convert: the model is itself a Linear: expected Int8Linear in its place")
    replaced = []
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name in skip:
            continue
        linear = Int8Linear(
            module.in_features, module.out_features, module.bias is not None, block, device="meta"
        )
        linear.weight, linear.bias = module.weight, module.bias
        linear.train(module.training)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
        replaced.append(name)
    return replaced
