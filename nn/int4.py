"""A linear layer whose three products are of 4-bit codes (arXiv 2306.11987).

Forward: input and weight are transformed by Hadamard matrices along the features they share, where
the two transforms cancel, and rounded to steps that are learned (LSQ, Esser et al. 2020). Backward:
the output's gradient is split into two 4-bit parts, of whose rows as many as there are tokens are
drawn, each with a probability as its norm is, so that both gradients are unbiased.

What backward keeps of an input is its codes, half a byte per element, and for the step's own
gradient one in `SAMPLED` of its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import FloatName
from jetfire.core.tensors import Quantized, Quantized4
from jetfire.nn.linear import checked_conv1d, rows
from jetfire.nn.made import MadeOfWeight
from jetfire.nn.products import (
    FLOATS,
    Placed,
    backward_may_follow,
    checked_weight,
    held,
    keys_for_backward,
)
from jetfire.nn.recipes import DEFAULT, Gradient, Int4, as_group
from jetfire.ops import (
    int4_bit_split,
    int4_bit_split_codes,
    int4_gather_rows,
    int4_quantize,
    int4_quantize_backward,
    int4_quantize_codes,
    int4_sample_rows,
    int8_column_sum,
    int8_dequantize,
)
from jetfire.ops.hadamard_quantize import Codes, Group
from jetfire.ops.int4_gemm import MOST_K, int4_gemm
from jetfire.ops.sample_rows import Keep, Parts, SampledRows, capacity
from jetfire.reference.hadamard import initial_step, search_group, transform

Tensor = torch.Tensor
SAMPLED = 64  # in bf16 that many rows are 1/32 byte per element
# Codes reach 7: LSQ scales a step's gradient by 1/√(7·elements).
_TOP = 7
# A step stays above this part of the first batch's, whatever an optimizer makes of it.
_FLOOR = 2.0**-20
# Of the first batch: enough for the mean of so many times its columns.
_CALIBRATING = 4096
# Keys of a product's backward: for the gradient's parts, and for the rows of each of its products.
KEYS = 3
# What a layer has beside a linear layer's own parameters.
STATE = ("step_x", "step_w", "calibration")


def _kept(gradient: str) -> tuple[Parts, Keep]:
    """Parts of a gradient, and which of their rows are kept."""
    return 1 if gradient == "nearest" else 2, "half" if gradient == "sampled" else "all"


def _most_tokens(gradient: str) -> int:
    parts, keep = _kept(gradient)
    room = MOST_K["wgrad"]
    return bisect_right(range(room + 1), room, key=lambda m: capacity(m, parts, "wgrad", keep)) - 1


# Tokens whose weight gradient's integer sums fit in 32 bits.
MOST_TOKENS = {gradient: _most_tokens(gradient) for gradient in get_args(Gradient)}


class Int4Setting(NamedTuple):
    """What the two passes of a product know beside their tensors.

    Attributes:
        transposed: whether the weight is stored in×out, and so its gradient.
    """

    gradient: str
    group: Group
    transposed: bool


class Int4Product(NamedTuple):
    """All of a product but its input, in the order in which autograd is given it.

    Attributes:
        weight, bias: the layer's; no bias where it has none.
        step_x, step_w: fp32, one element each. `step_w` is there for its gradient alone.
        sample: the rows that the gradient of `step_x` sees; None where no backward follows.
        seeds: the keys of that backward's `_Split`.
        q, qt, scale: the weight's wide codes, those of its transpose, and the step of both.
    """

    weight: Tensor
    bias: Tensor | None
    step_x: Tensor
    step_w: Tensor
    sample: Tensor | None
    seeds: Tensor | None
    q: Tensor
    qt: Tensor
    scale: Tensor
    setting: Int4Setting


class Int4Kept(NamedTuple):
    """What a product's backward reads.

    Attributes:
        packed, x_scale, squares: the input's codes, packed, their step, and the rows' squares.
        some: of the input the rows that `sample` names, bf16.
    """

    packed: Tensor
    x_scale: Tensor
    squares: Tensor
    some: Tensor
    weight: Tensor
    bias: Tensor | None
    sample: Tensor
    seeds: Tensor
    qt: Tensor
    scale: Tensor


def multiply(x: Tensor | Quantized, by: Int4Product) -> tuple[Tensor, Int4Kept | None]:
    """Return x·Wᵀ + b, and what its backward keeps; None where none follows.

    Args:
        x: floats, of which y has the dtype; or codes, then y is bf16.
    """
    codes = _quantised(x, by, "wide" if by.sample is None else "both")
    y = _times_weight(codes, by, _float_of(x))
    return y, None if by.sample is None else _kept_of(x, codes, by)


def multiply_alone(x: Tensor | Quantized, by: Int4Product) -> Tensor:
    """Return x·Wᵀ + b. What its backward reads, `keep` makes of the same input."""
    return _times_weight(_quantised(x, by, "wide"), by, _float_of(x))


def keep(x: Tensor | Quantized, by: Int4Product) -> Int4Kept:
    """Return what a product's backward reads."""
    return _kept_of(x, _quantised(x, by, "packed"), by)


def _times_weight(codes: Quantized4, by: Int4Product, out: FloatName) -> Tensor:
    wide_bias = None if by.bias is None else by.bias.float()
    return int4_gemm(codes, Quantized4(None, by.q, by.scale), bias=wide_bias, out=out)


def _kept_of(x: Tensor | Quantized, codes: Quantized4, by: Int4Product) -> Int4Kept:
    assert by.sample is not None
    assert by.seeds is not None
    assert codes.packed is not None
    assert codes.squares is not None
    of_x = codes.packed, codes.scale, codes.squares, _rows_of(x, by.sample)
    return Int4Kept(*of_x, by.weight, by.bias, by.sample, by.seeds, by.qt, by.scale)


def _float_of(x: Tensor | Quantized) -> FloatName:
    """Return the dtype that is made of a product's operand."""
    return "bf16" if isinstance(x, Quantized) else FLOATS[x.dtype]


def _quantised(x: Tensor | Quantized, by: Int4Product, layout: Codes) -> Quantized4:
    """Return the 4-bit codes of a product's input; of codes, where a group lies in their blocks."""
    more: dict[str, Any] = {"group": by.setting.group, "layout": layout}
    if isinstance(x, Quantized):
        if by.setting.group <= x.block:
            return int4_quantize_codes(x, by.step_x, **more)
        x = int8_dequantize(x)
    return int4_quantize(x, by.step_x, **more)


def _rows_of(x: Tensor | Quantized, sample: Tensor) -> Tensor:
    """Return the rows that are named, bf16."""
    if not isinstance(x, Quantized):
        return x.index_select(0, sample).to(torch.bfloat16)
    assert x.q is not None
    assert x.scale is not None
    scale = x.scale.index_select(0, sample // x.block)
    wide = scale[:, :, None].expand(-1, -1, x.block).flatten(1)[:, : x.q.shape[1]]
    return (x.q.index_select(0, sample) * wide).to(torch.bfloat16)


def multiply_backward(
    dy: Tensor | Quantized,
    kept: Int4Kept,
    setting: Int4Setting,
    wants_x: bool,
    wants: Int4Product,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a product's input and of each field of `Int4Product`.

    Args:
        dy: of its output, m×n: floats, of which the input's has the dtype; or codes with those of
            the transpose, then it is bf16.
        wants_x, wants: whether each of them is wanted; None is returned for those that are not.
    """
    x = Quantized4(kept.packed, None, kept.x_scale, kept.squares)
    split = _Split.of(dy, setting.gradient, kept.seeds)
    dx = dw = db = dstep_x = dstep_w = None
    if wants_x or wants.step_x:
        dx_hat, slots = split.times(Quantized4(None, kept.qt, kept.scale), _float_of(dy))
        gathered = {"group": setting.group, "unit": split.codes.scale}
        if wants_x:
            dx = int4_quantize_backward(dx_hat, q=x, slots=slots, **gathered)
        if wants.step_x:
            _, of_rows = int4_quantize_backward(
                dx_hat,
                x=kept.some.to(dx_hat.dtype),
                step=kept.x_scale,
                slots=slots.index_select(0, kept.sample),
                **gathered,
            )
            tokens = max(1, len(kept.packed))  # of none the sum is 0
            share = tokens / max(1, len(kept.sample))
            dstep_x = _lsq(of_rows, share, tokens * kept.qt.shape[0])
        del dx_hat
    if wants.weight or wants.step_w:
        dw_hat = split.transposed_times(x, FLOATS[kept.weight.dtype])
        of_weight = _out_by_in(kept.weight, setting.transposed)
        dw, of_rows = int4_quantize_backward(
            dw_hat, x=of_weight, step=kept.scale, group=setting.group
        )
        dstep_w = _lsq(of_rows, 1.0, kept.weight.numel())
        dw = dw.t() if setting.transposed else dw
    if wants.bias:
        assert kept.bias is not None
        db = _column_sum(dy).to(kept.bias.dtype)
    return dx, dw, db, dstep_x, dstep_w, *[None] * 6


def _column_sum(dy: Tensor | Quantized) -> Tensor:
    return int8_column_sum(dy) if isinstance(dy, Quantized) else dy.sum(0, dtype=torch.float32)


class _Int4LinearFunction(torch.autograd.Function):
    """y = x·Wᵀ + b from codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *by: Any) -> Tensor:
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


def multiplied(x: Tensor, by: Int4Product) -> Tensor:
    """Return x·Wᵀ + b in the dtype of x, with gradients."""
    y: Tensor = _Int4LinearFunction.apply(x, *by)
    return y


class _Split(NamedTuple):
    """An output's gradient in 4-bit parts: unit·(14·hi + lo), or unit·lo alone.

    Attributes:
        codes: hi's rows above lo's; the unit is their scale.
    """

    codes: Quantized4
    parts: Parts
    keep: Keep
    seeds: Tensor

    @classmethod
    def of(cls, gradient: Tensor | Quantized, how: str, seeds: Tensor) -> _Split:
        """Return that of m×n; `seeds` are `KEYS`: for its parts, and for each product's rows."""
        parts, keep = _kept(how)
        bits: Literal[8, 4] = 8 if parts == 2 else 4
        if isinstance(gradient, Quantized):
            codes = int4_bit_split_codes(gradient, bits=bits, seed=seeds[0:1])
        else:
            codes = int4_bit_split(gradient.contiguous(), bits=bits, seed=seeds[0:1])
        return cls(codes, parts, keep, seeds)

    def _draw(self, seed: Tensor, x_squares: Tensor | None = None) -> SampledRows:
        assert self.codes.squares is not None
        return int4_sample_rows(
            self.codes.squares, x_squares=x_squares, parts=self.parts, keep=self.keep, seed=seed
        )

    def times(self, wt: Quantized4, out: FloatName) -> tuple[Tensor, Tensor]:
        """Return the gradient's kept rows times the weight, and where each token's are."""
        rows, counts, weight, slots, _ = self._draw(self.seeds[1:2])
        assert slots is not None
        kept = int4_gather_rows(self.codes, rows=rows, counts=counts, wide=True)
        return int4_gemm(kept, wt, weight=weight, counts=counts, out=out), slots

    def transposed_times(self, x: Quantized4, out: FloatName) -> Tensor:
        """Return Gᵀ·X of the input's packed codes."""
        rows, counts, _, _, repeat = self._draw(self.seeds[2:3], x.squares)
        gt = int4_gather_rows(self.codes, rows=rows, counts=counts, repeat=repeat, transpose=True)
        xt = int4_gather_rows(x, rows=rows, counts=counts, transpose=True)
        return int4_gemm(gt, xt, counts=counts, out=out)


def sampled(x: Tensor, gradient: Gradient, training: bool) -> Tensor | None:
    """Return the rows that a step's gradient sees, one in `SAMPLED`; None if no backward follows.

    They are int64, with replacement: without would take a sort. Not by `randint`: what is drawn
    from nothing a compiler may draw anew in backward, and so it may what is not `held`.

    Args:
        x: of as many rows as there are tokens.

    Raises:
        UsageError: these are too many for backward.
    """
    found = None
    if backward_may_follow(training):
        uniform = held(torch.rand_like(x[: -(-len(x) // SAMPLED), 0], dtype=torch.float32))
        found = (uniform * len(x)).long().clamp(max=len(x) - 1)
    if not torch.is_grad_enabled():
        return None
    if len(x) > (most := MOST_TOKENS[gradient]):
        raise UsageError(
            f"{len(x)} tokens at once: expected at most {most}, whose sums fit in 32 bits"
        )
    return found


def _lsq(of_rows: Tensor, share: float, elements: int) -> Tensor:
    """Return a step's gradient from those of rows, which are one in `share`, as LSQ scales it."""
    return of_rows.sum().view(1) * (share / math.sqrt(_TOP * elements))


def _out_by_in(weight: Tensor, transposed: bool) -> Tensor:
    """Return the matrix with contiguous rows of inputs."""
    rows = weight.detach()
    rows = rows.t() if transposed else rows
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Int4Layer(nn.Module):
    """What the layers share: steps, their calibration, the weight's codes.

    What is learned is how much greater a step is than the first batch's, from 1 on: an optimizer
    that moves every number by about its rate, as AdamW does, would move a weight's step of 0.01 by
    a tenth at a time.

    Attributes:
        step_x, step_w: fp32, one element: the input's and the weight's step in those units.
        calibration: fp32: the two steps of the first batch, and the group; zeros before it.
    """

    weight: Tensor
    bias: Any
    calibration: Tensor
    transposed = False

    def _begin(self, int4: Int4) -> None:
        """Make the steps, once the weight is there."""
        outputs, inputs = self._sizes()
        reason = int4.why_not(inputs, outputs)
        if reason is not None:
            raise UsageError(reason)
        self.int4, device = int4, self.weight.device
        self.step_x = nn.Parameter(torch.ones(1, dtype=torch.float32, device=device))
        self.step_w = nn.Parameter(torch.ones(1, dtype=torch.float32, device=device))
        self.register_buffer("calibration", torch.zeros(3, dtype=torch.float32, device=device))
        self._group: Group | None = None  # None before the first batch
        self._codes: MadeOfWeight[tuple[Quantized4, Quantized4]] = MadeOfWeight()

    def _sizes(self) -> tuple[int, int]:
        """Return how many outputs and inputs there are."""
        outputs, inputs = self.weight.shape[:: -1 if self.transposed else 1]
        return outputs, inputs

    @property
    def group(self) -> Group | None:
        """The number of inputs that a transform mixes; None until the first batch says it."""
        return self._group if self.int4.group == "search" else self.int4.group

    @property
    def steps(self) -> tuple[Tensor, Tensor] | None:
        """The input's and the weight's, fp32, one element each; None before the first batch."""
        if self._group is None:
            return None
        step_x, step_w = (factors_of([self])[0] * self.calibration[:2].float()).detach().split(1)
        return step_x, step_w

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out), in the autocast dtype if there is one."""
        outputs, inputs = self._sizes()
        x = rows(input, inputs)
        sample = sampled(x.detach(), self.int4.gradient, self.training)
        seeds = keys_for_backward(KEYS, x.device, self.training)
        y = multiplied(x, self.product(x.detach, sample, seeds))
        return y.reshape(*input.shape[:-1], outputs)

    def product(
        self,
        x: Callable[[], Tensor],
        sample: Tensor | None,
        seeds: Tensor | None,
        factors: Tensor | None = None,
    ) -> Int4Product:
        """Return the product with the weight as it is now.

        Args:
            x: gives the input, which the first batch is asked for.
            sample: as `sampled` has it; seeds: `KEYS` keys, where a backward may follow.
            factors: as `factors_of` has them, or made here.
        """
        checked_weight(self.weight)
        with torch.autocast(self.weight.device.type, enabled=False):
            group, first = self._group, self.calibration.clone()  # DDP writes to buffers
            if group is None:
                group, first = self._first_batch(x())
            if factors is None:
                (factors,) = factors_of([self])
            step_x, step_w = (factors * first[:2].float()).split(1)
            w, wt = self._codes_of(step_w, group)
        assert w.wide is not None
        assert wt.wide is not None
        setting = Int4Setting(self.int4.gradient, group, self.transposed)
        given = self.weight, self.bias, step_x, step_w, sample, seeds
        return Int4Product(*given, w.wide, wt.wide, w.scale, setting)

    def _codes_of(self, step: Tensor, group: Group) -> tuple[Quantized4, Quantized4]:
        """Return the weight's wide codes and their transpose, made once per optimizer step."""
        weight = self.weight

        def make() -> tuple[Quantized4, Quantized4]:
            matrix = _out_by_in(weight, self.transposed)
            w = int4_quantize(matrix, step.detach(), group=group, layout="both")
            wt = int4_gather_rows(w, transpose=True, wide=True)
            return Quantized4(None, w.wide, w.scale), wt

        # Codes made in a CUDA graph are there only once it is replayed, and it must renew its own.
        key = (group, self._group, _capturing(weight))
        return self._codes.found(weight, key, make, self.step_w)

    @torch.compiler.disable
    @torch.no_grad()
    def _first_batch(self, x: Tensor) -> tuple[Group, Tensor]:
        """Return the group and calibration that a batch asks for, kept if this is training.

        Processes that train together take the mean of their steps. Nothing is kept of a batch or a
        weight that is zero throughout or not finite: the next one is asked.
        """
        together = self.training and dist.is_available() and dist.is_initialized()
        x = x[:: max(1, len(x) // _CALIBRATING)]
        wanted = self.int4.group
        group = as_group(search_group(x)) if wanted == "search" else wanted
        if together and wanted == "search":
            choice = torch.tensor(group, dtype=torch.int64, device=x.device)
            dist.broadcast(choice, 0)
            group = as_group(int(choice))
        steps = [
            initial_step(transform(matrix, group))
            for matrix in (x, _out_by_in(self.weight, self.transposed))
        ]
        found = torch.cat([*steps, torch.full_like(steps[0], group)])
        if together:
            dist.all_reduce(found)
            found /= dist.get_world_size()
        # As it is kept, in a layer of BF16 say: checkpointing runs this batch again.
        found = found.to(self.calibration.dtype)
        usable = (found > 0) & found.isfinite()
        if self.training and not _capturing(x) and bool(usable.all()):
            self.calibration.copy_(found)
            self._group = group
        return group, torch.where(usable, found, 1.0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as any module; a linear layer's has no steps: the next batch is the first."""
        if not any(prefix + name in state_dict for name in STATE):
            for name, value in zip(STATE, (1.0, 1.0, 0.0), strict=True):
                state_dict[prefix + name] = torch.full_like(getattr(self, name), value)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        wanted = self.int4.group
        loaded = 0 if self.calibration.is_meta else int(self.calibration[2])
        self._group = None
        if loaded:
            self._group = as_group(loaded) if wanted == "search" else wanted

    def extra_repr(self) -> str:
        outputs, inputs = self._sizes()
        return (
            f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}, "
            f"group={self.int4.group}, gradient={self.int4.gradient}"
        )


def factors_of(layers: Sequence[_Int4Layer]) -> tuple[Tensor, ...]:
    """Return each layer's two factors, never 0 or below; where one is, autograd minds its sign.

    Of all layers in as many launches as of one.
    """
    factors = torch.cat([factor for layer in layers for factor in (layer.step_x, layer.step_w)])
    return (factors.float().abs() + _FLOOR).split(2)


def _capturing(tensor: Tensor) -> bool:
    """Return whether what is launched on its device becomes part of a CUDA graph."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def is_int4_state(name: str) -> bool:
    """Return whether a state dict's entry is one that INT4 layers have, linear layers not."""
    return name.rpartition(".")[2] in STATE


class Int4Linear(_Int4Layer, nn.Linear):
    """`torch.nn.Linear` with products of 4-bit codes; parameters are its own and the two steps.

    Its initialisation is the linear layer's, and a state dict of one loads: then, as at the start,
    the steps are those of the first batch in training. Before it, evaluation takes its own.

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
        """Reset as a linear layer; the next batch in training is the first again."""
        nn.Linear.reset_parameters(self)
        if hasattr(self, "calibration"):
            nn.init.ones_(self.step_x)
            nn.init.ones_(self.step_w)
            self.calibration.zero_()
            self._group = None


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
