"""A linear layer whose three products are of 4-bit codes (arXiv 2306.11987).

Forward: input and weight are transformed by Hadamard matrices along the features they share, where
the two transforms cancel, and rounded to multiples of a step. Backward: the output's gradient is
split into two 4-bit parts, of whose rows as many as there are tokens are drawn, each with a
probability as its norm is, so that both gradients are unbiased. Or it stays whole, as INT8 codes:
Hopper multiplies two 4-bit parts in twice the time of the byte that they add up to.

The paper learns its steps (LSQ, Esser et al. 2020), from the first batch's on. Here each is
measured on what it rounds (`int4_measured_step`). In training from scratch that grows several times
over, and learned steps were slow to follow: docs/training.md.

What backward keeps of an input is its codes, half a byte per element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.once import once_differentiable
from jetfire.core.problem import Block, Codes, FloatName, Group, Layout
from jetfire.core.tensors import Quantized, Quantized4
from jetfire.nn.int4_gradient import KEYS, Rounded, Split, Whole, checked_tokens, float_of
from jetfire.nn.linear import checked_conv1d, rows
from jetfire.nn.made import MadeOfWeight, RenewedByMode, off_meta
from jetfire.nn.products import FLOATS, Placed, checked_weight, keys_for_backward
from jetfire.nn.recipes import DEFAULT, GRADIENT_BLOCK, Gradient, Int4, as_group
from jetfire.ops import (
    int4_gather_rows,
    int4_measured_step,
    int4_quantize,
    int4_quantize_backward,
    int4_quantize_codes,
    int4_restore,
    int8_dequantize,
)
from jetfire.ops.int4_gemm import int4_gemm
from jetfire.reference import hadamard

Tensor = torch.Tensor
# About so many rows of a first batch tell its group.
_SEARCHED_ROWS = 4096
# The buffer of a layer that searches its group: that group, fp32 (1,); 0 before the first batch.
SEARCHED = "searched"
# What layers had while their steps were learned; states of then still load, without these.
EARLIER = ("step_x", "step_w", "calibration")


class Int4Setting(NamedTuple):
    """What the two passes of a product know beside their tensors.

    Attributes:
        transposed: whether the weight is stored in×out, and so its gradient.
    """

    gradient: Gradient
    group: Group
    transposed: bool

    def block(self, flow: Block) -> Block:
        """Return the side of the blocks in which a product takes its output's gradient as codes.

        Args:
            flow: of what flows between products.
        """
        return GRADIENT_BLOCK if self.gradient == "int8" else flow

    @property
    def layout(self) -> Layout:
        """The layout of its output's gradient as codes: parts are made without the transpose's."""
        return "both" if self.gradient == "int8" else "q"


class Int4Product(NamedTuple):
    """All of a product but its input, in the order in which autograd is given it.

    Attributes:
        weight, bias: the layer's; no bias where it has none.
        seeds: the keys of its gradient's rounding and drawing; None where no backward follows.
        q, scale: the weight's wide codes, and their step.
        qt: the wide codes of its transpose; but for a whole gradient INT8 codes of what they stand
            for, transformed back, whose scales are `scale_t`, in blocks of `GRADIENT_BLOCK`.
    """

    weight: Tensor
    bias: Tensor | None
    seeds: Tensor | None
    q: Tensor
    scale: Tensor
    qt: Tensor
    scale_t: Tensor | None
    setting: Int4Setting


class Int4Kept(NamedTuple):
    """What a product's backward reads.

    Attributes:
        packed, x_scale, squares: the input's codes, packed, their step, and the rows' squares.
        weight: for its dtype; and autograd refuses a backward where it changed since forward.

    The rest is as in `Int4Product`.
    """

    packed: Tensor
    x_scale: Tensor
    squares: Tensor
    weight: Tensor
    bias: Tensor | None
    seeds: Tensor
    q: Tensor
    scale: Tensor
    qt: Tensor
    scale_t: Tensor | None

    @property
    def codes(self) -> Quantized4:
        """The weight's wide codes, which tell what was clipped of it."""
        return Quantized4(None, self.q, self.scale)

    @property
    def transpose(self) -> Quantized4 | Quantized:
        """The codes of the weight's transpose, which its output's gradient is multiplied by."""
        if self.scale_t is None:
            return Quantized4(None, self.qt, self.scale)
        return Quantized(self.qt, self.scale_t, block=GRADIENT_BLOCK)


def multiply(
    x: Tensor | Quantized, by: Int4Product, block: Block | None = None
) -> tuple[Any, Int4Kept | None]:
    """Return x·Wᵀ + b, and what its backward keeps; None where none follows.

    Args:
        x: floats, of which y has the dtype; or codes, then y is bf16.
        block: the side of the blocks in which y is codes; None for floats.
    """
    codes = _quantised(x, by, "wide" if by.seeds is None else "both")
    y = _times_weight(codes, by, float_of(x), block)
    return y, None if by.seeds is None else _kept_of(codes, by)


def multiply_alone(
    x: Tensor | Quantized, by: Int4Product, block: Block | None = None
) -> tuple[Any, Tensor]:
    """Return x·Wᵀ + b as `multiply` does, and the step of x's codes.

    Of the same x and that step `keep` makes what its backward reads.
    """
    codes = _quantised(x, by, "wide")
    return _times_weight(codes, by, float_of(x), block), codes.scale


def keep(x: Tensor | Quantized, by: Int4Product, step: Tensor) -> Int4Kept:
    """Return what a product's backward reads."""
    return _kept_of(_quantised(x, by, "packed", step), by)


def _times_weight(codes: Quantized4, by: Int4Product, out: FloatName, block: Block | None) -> Any:
    wide_bias = None if by.bias is None else by.bias.float()
    more: dict[str, Any] = {"out": out} if block is None else {"out": "int8", "out_block": block}
    return int4_gemm(codes, Quantized4(None, by.q, by.scale), bias=wide_bias, **more)


def _kept_of(codes: Quantized4, by: Int4Product) -> Int4Kept:
    assert by.seeds is not None
    assert codes.packed is not None
    assert codes.squares is not None
    of_x = codes.packed, codes.scale, codes.squares
    return Int4Kept(*of_x, by.weight, by.bias, by.seeds, by.q, by.scale, by.qt, by.scale_t)


def _quantised(
    x: Tensor | Quantized, by: Int4Product, layout: Codes, step: Tensor | None = None
) -> Quantized4:
    """Return the 4-bit codes of a product's input; of codes, where a group lies in their blocks."""
    more: dict[str, Any] = {"group": by.setting.group, "layout": layout}
    step = int4_measured_step(x) if step is None else step
    if isinstance(x, Quantized):
        if by.setting.group <= x.block:
            return int4_quantize_codes(x, step, **more)
        x = int8_dequantize(x)
    return int4_quantize(x, step, **more)


def multiply_backward(
    dy: Tensor | Quantized,
    kept: Int4Kept,
    setting: Int4Setting,
    wants_x: bool,
    wants: Int4Product,
    rounded: Rounded | None = None,
) -> tuple[Any, ...]:
    """Return the gradients of a product's input and of each field of `Int4Product`.

    Args:
        dy: of its output, m×n: floats, of which the input's has the dtype; or codes in the layout
            and blocks that the setting says, then it is bf16.
        wants_x, wants: whether each of them is wanted; None is returned for those that are not.
        rounded: makes the input's gradient codes.
    """
    x = Quantized4(kept.packed, None, kept.x_scale, kept.squares)
    gradient: Whole | Split
    if setting.gradient == "int8":
        gradient = Whole.of(dy, kept.seeds)
    else:
        x_squares = kept.squares if wants.weight else None
        more = wants_x, x_squares, bool(wants.bias)
        gradient = Split.of(dy, setting.gradient, kept.seeds, *more)
    dx = dw = db = None
    if wants_x:
        dx = gradient.of_input(kept.transpose, x, setting.group, rounded)
    if wants.weight:
        dw_hat = gradient.transposed_times(x, FLOATS[kept.weight.dtype])
        dw = int4_quantize_backward(dw_hat, q=kept.codes, group=setting.group)
        dw = dw.t() if setting.transposed else dw
    if wants.bias:
        assert kept.bias is not None
        db = gradient.column_sum().to(kept.bias.dtype)
    return dx, dw, db, *[None] * (len(wants) - 2)


class _Int4LinearFunction(torch.autograd.Function):
    """y = x·Wᵀ + b from codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *by: Any) -> Any:
        product = Int4Product(*by)
        y, kept = multiply(x, product)
        if kept is not None:
            ctx.save_for_backward(*kept)
        ctx.setting = product.setting
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, *wants = ctx.needs_input_grad
        kept = Int4Kept(*ctx.saved_tensors)
        return multiply_backward(grads[0], kept, ctx.setting, wants_x, Int4Product(*wants))


def _out_by_in(weight: Tensor, transposed: bool) -> Tensor:
    """Return the matrix with contiguous rows of inputs."""
    rows = weight.detach()
    rows = rows.t() if transposed else rows
    return rows if rows.stride(1) == 1 else rows.contiguous()


# Of a weight q, scale, qt and scale_t, as `Int4Product` has them.
_WeightCodes = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Int4Layer(RenewedByMode):
    """What the layers share: the group of the transform, and the weight's codes.

    Attributes:
        searched: only where the group is searched, fp32, one element: what the first batch asked
            for; 0 before it.
    """

    weight: Tensor
    bias: Any
    searched: Tensor
    transposed = False

    def _begin(self, int4: Int4) -> None:
        """Check the sizes, once the weight is there."""
        outputs, inputs = self._sizes()
        reason = int4.why_not(inputs, outputs)
        if reason is not None:
            raise UsageError(reason)
        self.int4, device = int4, self.weight.device
        if int4.group == "search":
            self.register_buffer(SEARCHED, torch.zeros(1, dtype=torch.float32, device=device))
        self._searched: Group | None = None
        self._codes: MadeOfWeight[_WeightCodes] = MadeOfWeight()

    def _sizes(self) -> tuple[int, int]:
        """Return how many outputs and inputs there are."""
        outputs, inputs = self.weight.shape[:: -1 if self.transposed else 1]
        return outputs, inputs

    @property
    def group(self) -> Group | None:
        """The number of inputs that a transform mixes; None until a first batch says it."""
        return self._searched if self.int4.group == "search" else self.int4.group

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out), in the autocast dtype if there is one."""
        outputs, inputs = self._sizes()
        x = rows(input, inputs)
        checked_tokens(len(x), self.int4.gradient)
        seeds = keys_for_backward(KEYS, x.device, self.training)
        y: Tensor = _Int4LinearFunction.apply(x, *self.product(x.detach, seeds))
        return y.reshape(*input.shape[:-1], outputs)

    def product(self, x: Callable[[], Tensor], seeds: Tensor | None) -> Int4Product:
        """Return the product with the weight as it is now.

        Args:
            x: gives the input, which a group is searched on.
            seeds: `KEYS` keys, where a backward may follow.
        """
        checked_weight(self.weight)
        with torch.autocast(self.weight.device.type, enabled=False):
            group = self.group or self._search(x())
            q, scale, qt, scale_t = self._codes_of(group)
        setting = Int4Setting(self.int4.gradient, group, self.transposed)
        given = self.weight, self.bias, seeds if torch.is_grad_enabled() else None
        return Int4Product(*given, q, scale, qt, scale_t, setting)

    def _codes_of(self, group: Group) -> _WeightCodes:
        """Return the weight's codes, made once per optimizer step."""
        weight, whole = self.weight, self.int4.gradient == "int8"

        def make() -> _WeightCodes:
            matrix = _out_by_in(weight, self.transposed)
            layout: Codes = "wide" if whole else "both"
            w = int4_quantize(matrix, int4_measured_step(matrix), group=group, layout=layout)
            assert w.wide is not None
            if whole:
                return w.wide, w.scale, *int4_restore(w, group=group, block=GRADIENT_BLOCK)[:2]
            wt = int4_gather_rows(w, transpose=True, wide=True)
            assert wt.wide is not None
            return w.wide, w.scale, wt.wide, None

        return self._codes.found(weight, group, make)

    @torch.compiler.disable
    @torch.no_grad()
    def _search(self, x: Tensor) -> Group:
        """Return the group that a batch asks for, kept if this is training.

        Processes that train together keep what the first one does. It keeps nothing of a batch
        that is zero throughout or not finite: the next one is asked.
        """
        x = x[:: max(1, len(x) // _SEARCHED_ROWS)]
        group = hadamard.search_group(x)
        if not self.training:
            return as_group(group)
        kept = (x.any() & x.isfinite().all()) * group  # 0 keeps nothing
        if dist.is_available() and dist.is_initialized():
            dist.broadcast(kept, 0)
        if int(kept):
            self.searched = off_meta(self.searched, x.device)
            self.searched.fill_(kept)
            self._searched = group = as_group(int(kept))
        return as_group(group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as any module; where a state has no group, the next batch is the first."""
        searching, name = self.int4.group == "search", prefix + SEARCHED
        if searching and name not in state_dict:
            # Where the layer was made on meta, the weight that comes says the device.
            weight = state_dict.get(f"{prefix}weight", self.searched)
            state_dict[name] = off_meta(torch.zeros_like(self.searched), weight.device)
        for passed_over in EARLIER if searching else (*EARLIER, SEARCHED):
            state_dict.pop(prefix + passed_over, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if searching:
            loaded = 0 if self.searched.is_meta else int(self.searched)
            self._searched = as_group(loaded) if loaded else None

    def extra_repr(self) -> str:
        outputs, inputs = self._sizes()
        return (
            f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}, "
            f"group={self.int4.group}, gradient={self.int4.gradient}"
        )


def is_int4_state(name: str) -> bool:
    """Return whether a state dict's entry is INT4 layers' own, as they are or once were."""
    return name.rpartition(".")[2] in (SEARCHED, *EARLIER)


class Int4Linear(_Int4Layer, nn.Linear):
    """`torch.nn.Linear` with products of 4-bit codes.

    Parameters and initialisation are its own, and so is the state dict, but for a searched group.

    Args:
        int4: the group of its transform, and how it treats gradients.
    """

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        int4: Int4 = DEFAULT,
        device: Placed = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._begin(int4)

    @classmethod
    def over(cls, linear: nn.Linear, int4: Int4) -> Int4Linear:
        """Return a layer with the parameters of another."""
        new = cls(
            linear.in_features, linear.out_features, linear.bias is not None, int4, device="meta"
        )
        new.weight, new.bias = linear.weight, linear.bias
        new._begin(int4)
        return new

    def reset_parameters(self) -> None:
        """Reset as a linear layer; a group is searched anew."""
        nn.Linear.reset_parameters(self)
        if hasattr(self, SEARCHED):
            self.searched.zero_()
            self._searched = None


class Int4Conv1D(_Int4Layer):
    """x·W + b of 4-bit codes, W stored in×out: the linear layer of `transformers`' GPT-2.

    Args:
        weight: in×out; bias: out.
    """

    transposed = True

    @checked
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, int4: Int4 = DEFAULT) -> None:
        super().__init__()
        checked_conv1d(weight, bias)
        self.weight, self.bias = weight, bias
        self._begin(int4)
