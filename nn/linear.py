"""A linear layer whose three products run in per-block INT8 (Jetfire, arXiv 2403.12422, section 4).

What backward needs of the input and the weight is kept as INT8 codes, already transposed, but for
those of a weight whose transpose nobody keeps; of the input also in 4 bits, as asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.fused import Fused
from jetfire.core.problem import Block, FloatName
from jetfire.core.tensors import Quantized
from jetfire.nn.fallback import Fallback
from jetfire.nn.made import RenewedByMode
from jetfire.nn.products import (
    FLOATS,
    Int8Weights,
    Placed,
    QuantisedWeight,
    checked_block,
    is_dtensor,
    kept_input,
    keys_for_backward,
    layout_kept,
    one_way,
    own_part,
    quantised_gradient,
    restored_input,
    times_weight,
)
from jetfire.nn.recipes import Kept, checked_kept
from jetfire.ops import int8_column_sum, int8_fallback_gemm, int8_gemm, int8_quantize


def _forward(
    x: torch.Tensor,
    w: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    wt: torch.Tensor | None,
    wt_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    block: Block,
    kept: Kept,
    learns: bool,
    *_: Any,
) -> list[torch.Tensor]:
    """Return y = x·Wᵀ + b, and what backward keeps of x where the weight learns."""
    a = int8_quantize(x, block=block, layout=layout_kept(kept) if learns else "q")
    weight = Quantized(w, w_scale, wt, wt_scale, block)
    y = times_weight(a, weight, out=FLOATS[x.dtype], bias=bias)
    made = kept_input(a, kept, seed) if learns else []
    return [y, *(part for part in made if part is not None)]


def _fallback_forward(
    x: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    r: torch.Tensor,
    r_scale: torch.Tensor,
    w: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    wt: torch.Tensor | None,
    wt_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: Block,
    *_: Any,
) -> list[torch.Tensor]:
    """Return y = x·Wᵀ + b of the two planes of the codes of x."""
    codes, missed = (Quantized(*part, block=block) for part in ((a, a_scale), (r, r_scale)))
    weight = Quantized(w, w_scale, wt, wt_scale, block)
    return [times_weight(codes, weight, missed, out=FLOATS[x.dtype], bias=bias)]


def _backward(
    g: torch.Tensor,
    seed: torch.Tensor,
    wt: torch.Tensor | None,
    wt_scale: torch.Tensor | None,
    w: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    at: torch.Tensor | None,
    at_scale: torch.Tensor | None,
    at_steps: torch.Tensor | None,
    block: Block,
    kept: Kept,
    learns: bool,
    transposed: bool,
    dtype: FloatName,
    *wanted: bool,
) -> list[torch.Tensor]:
    """Return the gradients that are wanted."""
    weight = Quantized(wt, wt_scale, w, w_scale, block)

    def of_the_weight(gt: Quantized) -> torch.Tensor:
        a = restored_input((at, at_scale, at_steps), weight, seed)
        product: torch.Tensor = int8_gemm(*((a, gt) if transposed else (gt, a)), out=dtype)
        return product

    return _gradients(g, seed, weight, block, of_the_weight, *wanted)


def _fallback_backward(
    g: torch.Tensor,
    seed: torch.Tensor,
    wt: torch.Tensor | None,
    wt_scale: torch.Tensor | None,
    w: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    at: torch.Tensor | None,
    at_scale: torch.Tensor | None,
    rt: torch.Tensor | None,
    rt_scale: torch.Tensor | None,
    block: Block,
    transposed: bool,
    dtype: FloatName,
    *wanted: bool,
) -> list[torch.Tensor]:
    """Return the gradients that are wanted, the weight's of both planes of the input's codes."""
    a, r = (Quantized(*part, block=block) for part in ((at, at_scale), (rt, rt_scale)))

    def of_the_weight(gt: Quantized) -> torch.Tensor:
        return int8_fallback_gemm(a, r, gt, out=dtype, transpose=not transposed)

    weight = Quantized(wt, wt_scale, w, w_scale, block)
    return _gradients(g, seed, weight, block, of_the_weight, *wanted)


def _gradients(
    g: torch.Tensor,
    seed: torch.Tensor,
    weight: Quantized,
    block: Block,
    of_the_weight: Callable[[Quantized], torch.Tensor],
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> list[torch.Tensor]:
    """Return the gradients that are wanted.

    The result's gradient is quantised stochastically, so both products are unbiased.

    Args:
        weight: the codes of Wᵀ, in such blocks.
        of_the_weight: makes the weight's gradient of the codes of gᵀ.
    """
    both = of_weight or of_bias
    codes = quantised_gradient(g, block, seed, "both" if both else "q")
    found = []
    if of_x:
        found.append(times_weight(codes, weight, out=FLOATS[g.dtype]))
    if of_weight:
        found.append(of_the_weight(codes.t))
    if of_bias:
        found.append(int8_column_sum(codes))
    return found


# The weight, of a `dtype`, is multiplied by as out×in; `transposed`: it is stored in×out, and so is
# its gradient. There are codes of the weight or of its transpose.
_linear = Fused(
    "linear(Tensor x, Tensor? w, Tensor? w_scale, Tensor? wt, Tensor? wt_scale, Tensor? bias,"
    " Tensor? seed, int block, int kept, bool learns, bool transposed, str dtype) -> Tensor[]",
    _forward,
    "linear_backward(Tensor g, Tensor seed, Tensor? wt, Tensor? wt_scale, Tensor? w,"
    " Tensor? w_scale, Tensor? at, Tensor? at_scale, Tensor? at_steps, int block, int kept,"
    " bool learns, bool transposed, str dtype, bool of_x, bool of_weight, bool of_bias)"
    " -> Tensor[]",
    _backward,
)
_fallback_linear = Fused(
    "fallback_linear(Tensor x, Tensor a, Tensor a_scale, Tensor r, Tensor r_scale, Tensor? w,"
    " Tensor? w_scale, Tensor? wt, Tensor? wt_scale, Tensor? bias, int block, bool transposed,"
    " str dtype) -> Tensor[]",
    _fallback_forward,
    "fallback_linear_backward(Tensor g, Tensor seed, Tensor? wt, Tensor? wt_scale, Tensor? w,"
    " Tensor? w_scale, Tensor? at, Tensor? at_scale, Tensor? rt, Tensor? rt_scale, int block,"
    " bool transposed, str dtype, bool of_x, bool of_weight, bool of_bias) -> Tensor[]",
    _fallback_backward,
)


def applied(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    codes: Quantized,
    training: bool,
    transposed: bool = False,
    fallback: Fallback | None = None,
    kept: Kept = 8,
) -> torch.Tensor:
    """Map (…, in features) to (…, out features), in the autocast dtype if there is one.

    Args:
        weight: what the weight's gradient is of; None where it cannot learn.
        codes: of the weight, out×in, of its transpose, or both.
        transposed: whether the weight is stored in×out.
    """
    outputs, inputs = codes.shape
    x = rows(input, inputs)
    seed = keys_for_backward(1, x.device, training)
    learns = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    leaves = x, weight, bias
    factors = *one_way(codes), None if bias is None else as_fp32(bias)
    saved = seed, *one_way(codes.t)
    dtype = "fp32" if weight is None else FLOATS[weight.dtype]
    if fallback is None:
        constants = codes.block, kept, learns, transposed, dtype
        packing = seed if kept == 4 else None
        y = _linear(leaves, (x, *factors, packing), saved, constants)
    else:
        a, r = fallback(x.detach(), codes.block, "both" if learns else "q")
        y = _fallback_linear(
            leaves,
            (x, a.q, a.scale, r.q, r.scale, *factors),
            (*saved, a.qt, a.scale_t, r.qt, r.scale_t),
            (codes.block, transposed, dtype),
        )
    return y if input.dim() == 2 else y.reshape(*input.shape[:-1], outputs)


class Int8Linear(RenewedByMode, nn.Linear, Int8Weights):
    """`torch.nn.Linear` with INT8 products; parameters, state dict and initialisation are its own.

    Args:
        block: 32, 64 or 128, the side of a quantisation block.
        fallback: the share of the input's blocks that have two planes of codes (`Fallback`); None
            has none.
        kept: bits of what is kept of the input for the weight's gradient: 8, the codes that are
            multiplied; or 4, right in the mean (docs/arithmetic.md), and not with fallback.
    """

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        block: int = 32,
        device: Placed = None,
        dtype: torch.dtype | None = None,
        fallback: float | None = None,
        kept: int = 8,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.block, self.kept = checked_block(block), checked_kept(kept, fallback)
        self.fallback = None if fallback is None else Fallback(fallback, device)
        self._quantised = QuantisedWeight()

    def codes(self) -> Quantized:
        """Return the weight's codes and their transpose, quantised once per optimizer step.

        Of a weight that FSDP2 has gathered as codes there is no transpose.
        """
        return self._quantised.of(self.weight, self.block)

    def int8_weights(self) -> list[tuple[torch.Tensor, QuantisedWeight, Block]]:
        """Return the weight with its codes and block."""
        return [(self.weight, self._quantised, self.block)]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features) to (…, out_features), in the autocast dtype if there is one."""
        if is_dtensor(self.weight):
            from jetfire.nn.tensor_parallel import divided_linear

            return divided_linear(input, self.weight, self.bias, self._multiply)
        return self._applied(input, self.weight, self.bias, self.codes())

    def _multiply(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply by this process's part of the weight: the codes are of the part itself."""
        codes = self._quantised.of(own_part(self.weight), self.block)
        return self._applied(input, weight, bias, codes)

    def _applied(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, codes: Quantized
    ) -> torch.Tensor:
        given = input, weight, bias, codes, self.training
        return applied(*given, False, self.fallback, self.kept)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_precision(self)}"


class Int8Conv1D(RenewedByMode, Int8Weights):
    """x·W + b in INT8, W stored in×out: the linear layer of `transformers`' GPT-2.

    Args:
        weight: in×out; bias: out.
        block: 32, 64 or 128, the side of a quantisation block.
        fallback, kept: as of `Int8Linear`.
    """

    @checked
    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter,
        block: int = 32,
        fallback: float | None = None,
        kept: int = 8,
    ) -> None:
        super().__init__()
        checked_conv1d(weight, bias)
        self.weight, self.bias = weight, bias
        self.block, self.kept = checked_block(block), checked_kept(kept, fallback)
        self.fallback = None if fallback is None else Fallback(fallback, weight.device)
        self._quantised = QuantisedWeight()

    def codes(self) -> Quantized:
        """Return the codes of Wᵀ, out×in, and their transpose, made once per optimizer step.

        Of a weight that FSDP2 has gathered as codes there is the transpose alone.
        """
        return self._quantised.of(self.weight, self.block).t

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, in) to (…, out), in the autocast dtype if there is one."""
        given = input, self.weight, self.bias, self.codes(), self.training
        return applied(*given, True, self.fallback, self.kept)

    def int8_weights(self) -> list[tuple[torch.Tensor, QuantisedWeight, Block]]:
        """Return the weight with its codes and block."""
        return [(self.weight, self._quantised, self.block)]

    def extra_repr(self) -> str:
        inputs, outputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, {_precision(self)}"


def _precision(layer: Int8Linear | Int8Conv1D) -> str:
    """Return the block of a layer for its repr, and what it keeps if that is not its codes."""
    return f"block={layer.block}" + (", kept=4" if layer.kept == 4 else "")


def checked_conv1d(weight: nn.Parameter, bias: nn.Parameter) -> None:
    """Look at the parameters of a linear layer whose weight is stored in×out.

    Raises:
        UsageError: their shapes do not belong together.
    """
    if weight.dim() != 2 or bias.shape != weight.shape[1:]:
        raise UsageError(
            f"weight of shape {tuple(weight.shape)}, bias of {tuple(bias.shape)}: "
            "expected in×out and out"
        )


@checked
def quantised_weights(model: nn.Module) -> dict[nn.Parameter, tuple[QuantisedWeight, Block]]:
    """Return the parameters that a model multiplies by in INT8, their codes and block.

    Not those that are sharded, or no parameters any more (`torch.nn.utils.parametrize`); of a
    parameter that several modules share, the first module's codes.
    """
    found: dict[nn.Parameter, tuple[QuantisedWeight, Block]] = {}
    for module in model.modules():
        if isinstance(module, Int8Weights):
            for weight, cache, block in module.int8_weights():
                if type(weight) is nn.Parameter:
                    found.setdefault(weight, (cache, block))
    return found


def as_fp32(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter in fp32, as kernels take it; without a gradient if it is a copy."""
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()


def rows(input: torch.Tensor, width: int) -> torch.Tensor:
    """Return (…, width) as a matrix with contiguous rows, in the autocast dtype if there is one.

    Raises:
        UsageError: it is no dense tensor, or of another dtype or width.
    """
    if not isinstance(input, torch.Tensor):
        raise UsageError(f"input of type {type(input).__name__}: expected a tensor")
    if input.dtype not in FLOATS:
        raise UsageError(f"input of {input.dtype}: expected bfloat16, float16 or float32")
    if input.is_nested or input.layout != torch.strided:
        layout = "nested" if input.is_nested else str(input.layout).removeprefix("torch.")
        raise UsageError(f"input is {layout}: expected a dense tensor")
    if input.shape[-1:] != (width,):
        raise UsageError(f"input of shape {tuple(input.shape)}: expected {width} columns")
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    x = input.to(dtype).reshape(math.prod(input.shape[:-1]), width)  # -1 could be any of 0 columns
    return x if x.stride(1) == 1 else x.contiguous()
