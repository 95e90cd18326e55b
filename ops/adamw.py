"""AdamW on a weight that is multiplied in INT8: the update, and the new weight's codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Check, Model, Value
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import Block, Layout, Problem, at_least_zero
from jetfire.core.tensors import (
    Quantized,
    Spec,
    Specs,
    Tensors,
    names_of,
    quantized,
    with_transpose,
)
from jetfire.measure import peers
from jetfire.measure.bounds import OVER, ROUNDING
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp, draw

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_adamw"]

UPDATED = ("param", "exp_avg", "exp_avg_sq")
STATE = ("param", "grad", "exp_avg", "exp_avg_sq")
# Of the bias corrections and of sqrt.approx and div.full, which are off by 2^-22 and less.
UPDATE = 2.0**-19


@dataclass(frozen=True)
class AdamwProblem(Problem):
    """param, exp_avg and exp_avg_sq (m×n fp32) after a step, and the codes of the new param.

    `guarded` steps have a grad_scale, which divides the gradient, and a found_inf: where it is not
    0 nothing changes (the codes are written all the same). Codes are rounded to nearest.
    """

    block: Block = 32
    layout: Layout = "both"
    guarded: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise UsageError(f"{name}={value}: expected at least 0 and less than 1")
        at_least_zero(self, "eps", "decay")


class Adamw(StandardOp):
    name = "adamw"
    summary = "AdamW's update of a weight, and its codes both ways"
    Problem = AdamwProblem
    contiguous = frozenset(UPDATED)

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": out, "n": inp} for out, inp in model.linears()]

    def reads(self, problem: AdamwProblem) -> Specs:
        scalars = ("rate", "step", "grad_scale", "found_inf")[: 4 if problem.guarded else 2]
        matrix, scalar = Spec("fp32", (problem.m, problem.n)), Spec("fp32", ())
        return dict.fromkeys(STATE, matrix) | dict.fromkeys(scalars, scalar)

    def writes(self, problem: AdamwProblem) -> Specs:
        m, n = problem.m, problem.n
        codes = quantized(m, n, problem.block, layout=problem.layout)
        return dict.fromkeys(UPDATED, Spec("fp32", (m, n))) | codes

    def drawn(self, problem: AdamwProblem, source: Source) -> Tensors:
        """Return the state of a training that is some hundreds of steps old."""
        import torch

        specs = self.reads(problem)
        inputs = draw({name: specs[name] for name in STATE}, source)
        inputs["exp_avg"] *= 0.1
        inputs["exp_avg_sq"] = inputs["exp_avg_sq"].square()
        rate = inputs["param"].new_tensor(1e-3, dtype=torch.float32)
        inputs |= {"rate": rate, "step": 1 + source.integers(1000).float()}
        if problem.guarded:
            inputs |= {"grad_scale": 1 + source.normal().abs(), "found_inf": 0 * rate}
        return inputs

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

    def check(
        self,
        problem: AdamwProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: Tensor | None = None,
    ) -> Check:
        """Hold the update to its bounds, and the codes to the bit: those of the kernel's own."""
        from jetfire.reference.quantize import quantize

        codes = with_transpose(*quantize(outputs["param"], problem.block))
        return super().check(problem, outputs, expected | codes)

    def returned(self, outputs: Mapping[str, Value]) -> dict[str, Value]:
        """Return the codes: the rest is updated in place."""
        return {name: value for name, value in outputs.items() if name not in self.contiguous}

    def edges(self, problem: AdamwProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw any step of a long training; one that is left out; moments that were just made."""
        import torch

        from jetfire.measure import edges

        rare = {
            "rate": edges.throughout(rng, (0.0, 1e-8, 1e-3, 0.1, 1.0), inputs["rate"]),
            "step": edges.throughout(rng, (1, 2, 10, 1000, 10**4, 10**5, 10**6), inputs["step"]),
        }
        if problem.guarded:
            rare["found_inf"] = edges.throughout(rng, (0, 1, 1, 2), inputs["found_inf"])
            rare["grad_scale"] = edges.throughout(
                rng, (1.0, 2.0**16, 2.0**-10), inputs["grad_scale"]
            )
        if rng.random() < 0.5:
            rare |= {name: torch.zeros_like(inputs[name]) for name in ("exp_avg", "exp_avg_sq")}
        return rare

    def eager(self, problem: AdamwProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's fused AdamW, then plain torch's quantisation of what it leaves."""
        step, param = self.fused(problem, inputs)

        def eager() -> Any:
            step()
            return peers.codes(problem, param)

        return eager

    def fused(self, problem: AdamwProblem, inputs: Tensors) -> tuple[Callable[[], object], Tensor]:
        """Return a step of torch's fused AdamW, and the param of its own that it updates."""
        import torch

        param, grad, exp_avg, exp_avg_sq = ([inputs[name].clone()] for name in STATE)

        def step() -> None:
            torch._fused_adamw_(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                [],
                [inputs["step"]],
                lr=inputs["rate"],
                beta1=problem.beta1,
                beta2=problem.beta2,
                weight_decay=problem.decay,
                eps=problem.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=inputs.get("grad_scale"),
                found_inf=inputs.get("found_inf"),
            )

        return step, param[0]


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


def _codes_given(
    param: Shape, q: Shape | None, qt: Shape | None, grad_scale: Shape | None
) -> dict[str, Any]:
    """Return fields: the codes that are given say the layout."""
    m, n = param
    layout = "q" if qt is None else "qt" if q is None else "both"
    return {"m": m, "n": n, "layout": layout, "guarded": grad_scale is not None}


_adamw = Operator(
    "adamw(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? q,"
    " Tensor(e!)? scale, Tensor(f!)? qt, Tensor(g!)? scale_t, Tensor grad, Tensor rate,"
    " Tensor step, Tensor? grad_scale, Tensor? found_inf, int block, float beta1, float"
    " beta2, float eps, float decay) -> ()",
    derive=_codes_given,
)


def step_scalars(
    param: Tensor,
    rate: Tensor,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> dict[str, Tensor | None]:
    """Return a step's scalars by name, in the order of the operators.

    Raises:
        UsageError: one is no fp32 of one element beside param, or one of the last two is missing.
    """
    if (grad_scale is None) != (found_inf is None):
        raise UsageError("grad_scale and found_inf: expected both or neither")
    scalars = {"rate": rate, "step": step, "grad_scale": grad_scale, "found_inf": found_inf}
    for name, scalar in scalars.items():
        if scalar is not None:
            expect.scalar(name, scalar, param)
    return scalars


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
    layout: Layout = "both",
    out: Quantized | None = None,
) -> Quantized:
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
        out: what to write the codes into, of just this block and layout, and return.
    """
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, x in {**state, "grad": grad}.items():
        expect.same_shape(name, x, param)
    for name, x in state.items():
        expect.contiguous(name, x)
    scalars = step_scalars(param, rate, step, grad_scale, found_inf)
    expect.choice("block", block, Block)
    expect.choice("layout", layout, Layout)
    m, n = param.shape
    codes = expect.room(out, m, n, block, layout, param)
    refuse_in_place({**state, **codes}, {"grad": grad, **scalars})
    given = (codes.get(part) for part in names_of())
    options = block, beta1, beta2, eps, decay
    _adamw(*state.values(), *given, grad, *scalars.values(), *options)
    return Quantized.of(tuple(codes.values()), layout, block) if out is None else out
