"""AdamW on a weight: the update, and the new weight's codes where wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.inplace import refuse_in_place
from jetfire.core.operators import Operator, of_step
from jetfire.core.problem import Block, LayoutOrNone
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, names_of, quantized
from jetfire.measure.bounds import OVER, ROUNDING
from jetfire.measure.steps import UPDATE, WeightStep, WeightStepProblem, scalars_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_adamw"]

UPDATED = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamwProblem(WeightStepProblem):
    """param, exp_avg and exp_avg_sq (m×n fp32) after a step, and the codes of the new param."""


class Adamw(WeightStep):
    name = "adamw"
    summary = "AdamW's update of a weight, and its codes both ways"
    Problem = AdamwProblem
    contiguous = frozenset(UPDATED)

    def writes(self, problem: AdamwProblem) -> Specs:
        m, n = problem.m, problem.n
        codes = quantized(m, n, problem.block, layout=problem.layout)
        return dict.fromkeys(UPDATED, Spec("fp32", (m, n))) | codes

    def updated(self, problem: AdamwProblem) -> tuple[str, ...]:
        return UPDATED

    def reference(self, problem: AdamwProblem, inputs: Tensors) -> Tensors:
        """Return the update in float64, and bounds on what evaluation in fp32 may add."""
        import torch

        from jetfire.reference.adamw import adamw

        options = {name: getattr(problem, name) for name in ("beta1", "beta2", "eps", "decay")}
        given: dict[str, Any] = {**inputs, **options}
        new = adamw(**given)
        expected = dict(zip(UPDATED, new, strict=True))
        bounds = _bounds(problem, inputs, expected)
        # Decay by subtraction makes a NaN of it, by a factor none: either shows.
        bounds["param_over"] |= torch.isinf(inputs["param"])
        return expected | bounds


def _bounds(problem: AdamwProblem, inputs: Tensors, expected: Tensors) -> Tensors:
    """Return a few roundings of the terms of each sum; the update's besides as `UPDATE` says.

    ``param_over``: where the update may overflow, or a part of it on its way, though the new
    param, in which it meets a param of the other sign, would not.

    The gradient has been scaled with two roundings, its square has five. What is below 2^-126 is
    rounded to 2^-149: of v that moves the denominator by up to the root, and of the rate times m
    it is divided by the denominator.
    """
    import torch

    from jetfire.reference.adamw import rounded

    names = [f"{name}_bound" for name in UPDATED]
    if "found_inf" in inputs and float(inputs["found_inf"]) != 0:
        none = {f"{name}_bound": 0 * expected[name] for name in UPDATED}
        return none | {"param_over": torch.zeros_like(expected["param"], dtype=torch.bool)}
    beta1, beta2, eps = map(rounded, (problem.beta1, problem.beta2, problem.eps))
    p, g, m = (inputs[name].double().abs() for name in ("param", "grad", "exp_avg"))
    if problem.guarded:
        g = g / inputs["grad_scale"].double()
    least = 4 * 2.0**-149  # a few absolute roundings
    of_m = 4 * ROUNDING * (beta1 * m + (1 - beta1) * g) + least
    v = expected["exp_avg_sq"]
    of_v = 8 * ROUNDING * v + least
    lr, t = float(inputs["rate"]), float(inputs["step"])
    step, root = lr / (1 - beta1**t), (1 - beta2**t) ** -0.5
    denominator = v.sqrt() * root + eps
    moved = UPDATE + root * ((v + least).sqrt() - v.sqrt()).nan_to_num(0.0) / denominator
    of_p = (step * (of_m + moved * expected["exp_avg"].abs()) + least) / denominator
    bounds = (of_p + 3 * ROUNDING * p + least, of_m, of_v)
    found = {name: bound.nan_to_num(0.0) for name, bound in zip(names, bounds, strict=True)}
    # The update, and what may come first: the quotient alone, or the rate times the moment.
    largest = expected["exp_avg"].abs() * (max(step, 1.0) / denominator).clamp(min=step)
    return found | {"param_over": largest >= OVER}


OP = Adamw()

_adamw = Operator(
    "adamw(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? q,"
    " Tensor(e!)? scale, Tensor(f!)? qt, Tensor(g!)? scale_t, Tensor grad, Tensor rate,"
    " Tensor step, Tensor? grad_scale, Tensor? found_inf, int block, float beta1, float"
    " beta2, float eps, float decay) -> ()",
    derive=of_step,
)


@checked
def int8_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    step: Tensor,
    *,
    block: Block = 32,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.01,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    layout: LayoutOrNone = "both",
    out: Quantized | None = None,
) -> Quantized | None:
    """Make a step of AdamW in place, and return the new param's codes, rounded to nearest.

    Args:
        param, grad, exp_avg, exp_avg_sq: fp32 m×n, all but grad contiguous. What is written shares
            no memory with another argument.
        rate, step: fp32, one element; `step` counts this one too. Below 1 it is refused on a CPU;
            on a GPU, which nothing waits for, what it gives is NaN.
        decay: decoupled: param is multiplied by 1 − rate·decay first.
        grad_scale, found_inf: fp32, one element; both or neither. The gradient is divided by the
            one; where the other is not 0 nothing changes, and the codes are those of param as it
            is.
        layout: `none` for no codes of the param: None is returned, and `block` is of no matter.
        out: what to write the codes into, of just this block and layout, and return.
    """
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, x in {**state, "grad": grad}.items():
        expect.same_shape(name, x, param)
    for name, x in state.items():
        expect.contiguous(name, x)
    scalars = scalars_of(param, rate, step, grad_scale, found_inf)
    expect.choice("block", block, Block)
    expect.choice("layout", layout, LayoutOrNone)
    m, n = param.shape
    codes = expect.room(out, m, n, block, layout, param)
    refuse_in_place({**state, **codes}, {"grad": grad, **scalars})
    given = (codes.get(part) for part in names_of())
    options = block, beta1, beta2, eps, decay
    _adamw(*state.values(), *given, grad, *scalars.values(), *options)
    if layout == "none":
        return None
    return Quantized.of(tuple(codes.values()), layout, block) if out is None else out
