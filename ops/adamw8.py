"""AdamW whose moments are kept in INT8: the update, and the new weight's codes where wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.inplace import refuse_in_place
from jetfire.core.moments import scales
from jetfire.core.operators import Operator, of_step
from jetfire.core.problem import Block, LayoutOrNone
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, names_of, quantized
from jetfire.measure.bounds import OVER, ROUNDING
from jetfire.measure.data import Source
from jetfire.measure.steps import UPDATE, WeightStep, WeightStepProblem, scalars_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_adamw8"]

Wide = Literal["fp32", "bf16"]
MOMENTS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
UPDATED = ("param", *MOMENTS)


@dataclass(frozen=True)
class Adamw8Problem(WeightStepProblem):
    """param (m×n `dtype`) and its moments' codes after a step, and the codes of the new param.

    The moments are int8 m×n with fp32 scales m×⌈n/128⌉. The gradient has the param's dtype. In bf16
    the new param is rounded stochastically, by a seed. The rest is as in `WeightStepProblem`.
    """

    dtype: Wide = "fp32"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without a dtype of fp32, as when there was no other."""
        fields = super().as_dict()
        if self.dtype == "fp32":
            del fields["dtype"]
        return fields


class Adamw8(WeightStep):
    name = "adamw8"
    summary = "AdamW's update of a weight with INT8 moments, and its codes both ways"
    Problem = Adamw8Problem
    contiguous = frozenset(UPDATED)
    untuned = True

    def _moments(self, problem: Adamw8Problem) -> Specs:
        m, n = problem.m, problem.n
        codes, groups = Spec("int8", (m, n)), Spec("fp32", scales(m, n))
        return dict(zip(MOMENTS, (codes, groups, codes, groups), strict=True))

    def reads(self, problem: Any) -> Specs:
        weight = Spec(problem.dtype, (problem.m, problem.n))
        seed = {"seed": Spec("int64", (1,))} if problem.dtype == "bf16" else {}
        given = {**super().reads(problem), "param": weight, "grad": weight}
        return {**given, **self._moments(problem), **seed}

    def writes(self, problem: Any) -> Specs:
        m, n = problem.m, problem.n
        codes = quantized(m, n, problem.block, layout=problem.layout)
        return {"param": Spec(problem.dtype, (m, n)), **self._moments(problem), **codes}

    def drawn(self, problem: Any, source: Source) -> Tensors:
        from jetfire.core.tensors import dtype_of
        from jetfire.reference.adamw8 import first_codes, second_codes

        inputs = super().drawn(problem, source)
        codes = *first_codes(inputs["exp_avg"]), *second_codes(inputs["exp_avg_sq"])
        inputs |= {name: inputs[name].to(dtype_of(problem.dtype)) for name in ("param", "grad")}
        seed = {"seed": source.seed()} if problem.dtype == "bf16" else {}
        return inputs | dict(zip(MOMENTS, codes, strict=True)) | seed

    def updated(self, problem: Adamw8Problem) -> tuple[str, ...]:
        return UPDATED

    def reference(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return the moments' codes, which are exact, and the update in float64 with its bounds.

        The bounds are a few roundings of its terms, and what `UPDATE` says. In bf16 they are what
        the random bits make of these: where both ends come to one number, that is the only one.
        """
        import torch

        from jetfire.reference import adamw8
        from jetfire.reference.adamw import rounded

        p, grad = inputs["param"].float(), inputs["grad"].float()
        kept = {name: inputs[name] for name in MOMENTS}
        if "found_inf" in inputs and float(inputs["found_inf"]) != 0:
            unmoved = {"param_bound": torch.zeros_like(p, dtype=torch.float64)}
            return {"param": p.double(), **kept, **unmoved}
        m, v = adamw8.moments(
            adamw8.first_values(*(kept[name] for name in MOMENTS[:2])),
            adamw8.second_values(*(kept[name] for name in MOMENTS[2:])),
            grad,
            problem.beta1,
            problem.beta2,
            inputs.get("grad_scale"),
        )
        codes = *adamw8.first_codes(m), *adamw8.second_codes(v)
        options = problem.beta1, problem.beta2, problem.eps, problem.decay
        new = adamw8.update(p, m, v, inputs["rate"], inputs["step"], *options)
        beta1, beta2, eps = map(rounded, options[:3])
        lr, t = float(inputs["rate"]), float(inputs["step"])
        size, least = lr / (1 - beta1**t), 4 * 2.0**-149
        denominator = (v.double() / (1 - beta2**t)).sqrt() + eps
        moved = size * m.double().abs()
        bound = (UPDATE * moved + least) / denominator + 3 * ROUNDING * p.double().abs() + least
        largest = m.double().abs() * (max(size, 1.0) / denominator).clamp(min=size)
        bound = bound.nan_to_num(0.0)
        if problem.dtype == "bf16":
            low, high = (
                adamw8.narrowed((new + end).float(), inputs["seed"]).double()
                for end in (-bound, bound)
            )
            new = torch.where(low == high, low, (low + high) / 2)  # of infinity, itself
            bound = ((high - low) / 2).nan_to_num(0.0)
        return {
            "param": new,
            "param_bound": bound,
            "param_over": (largest >= OVER) | torch.isinf(p),
            **dict(zip(MOMENTS, codes, strict=True)),
        }

    def edges(self, problem: Adamw8Problem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw as for fp32's moments, those just made as scales of 0."""
        import torch

        rare = super().edges(problem, inputs, rng)
        for name in ("exp_avg", "exp_avg_sq"):
            if rare.pop(name, None) is not None:
                rare[f"{name}_scale"] = torch.zeros_like(inputs[f"{name}_scale"])
        return rare

    def eager(self, problem: Adamw8Problem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's fused AdamW of fp32's moments, then plain torch's quantisation if any."""
        from jetfire.reference.adamw8 import first_values, second_values

        dtype = inputs["param"].dtype  # torch's has all of one
        m = first_values(inputs["exp_avg"], inputs["exp_avg_scale"]).to(dtype)
        v = second_values(inputs["exp_avg_sq"], inputs["exp_avg_sq_scale"]).to(dtype)
        return super().eager(problem, {**inputs, "exp_avg": m, "exp_avg_sq": v})


OP = Adamw8()

_adamw8 = Operator(
    "adamw8(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_scale, Tensor(d!) exp_avg_sq,"
    " Tensor(e!) exp_avg_sq_scale, Tensor(f!)? q, Tensor(g!)? scale, Tensor(h!)? qt,"
    " Tensor(i!)? scale_t, Tensor grad, Tensor rate, Tensor step, Tensor? grad_scale,"
    " Tensor? found_inf, Tensor? seed, int block, float beta1, float beta2, float eps, float"
    " decay) -> ()",
    derive=of_step,
    dtype_field="dtype",
)


@checked
def int8_adamw8(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
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
    seed: Tensor | None = None,
) -> Quantized | None:
    """Make a step of AdamW in place, and return the new param's codes, rounded to nearest.

    Args:
        param, grad: fp32 m×n, or both bf16, param contiguous. What is written shares no memory
            with another argument.
        exp_avg, exp_avg_sq: the moments' codes, int8 m×n, contiguous; before the first step zeros.
        exp_avg_scale, exp_avg_sq_scale: their scales, fp32 m×⌈n/128⌉, contiguous; at first zeros.
        seed: int64, one element, on param's device: what a bf16 param is rounded by.
        rest: as in `int8_adamw`.
    """
    expect.matrix("param", param, ("float32", "bfloat16"))
    expect.same_shape("grad", grad, param, expect.named(param.dtype))
    expect.contiguous("param", param)
    m, n = param.shape
    moments = dict(
        zip(MOMENTS, (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale), strict=True)
    )
    for i, (name, x) in enumerate(moments.items()):
        dtype, shape = (("int8", (m, n)), ("float32", scales(m, n)))[i % 2]
        expect.exactly(name, x, dtype, shape, param)
        expect.contiguous(name, x)
    scalars = scalars_of(param, rate, step, grad_scale, found_inf)
    expect.choice("block", block, Block)
    expect.choice("layout", layout, LayoutOrNone)
    codes = expect.room(out, m, n, block, layout, param)
    refuse_in_place({"param": param, **moments, **codes}, {"grad": grad, **scalars})
    given = (codes.get(part) for part in names_of())
    seed = expect.seed_on(seed, param) if expect.named(param.dtype) == "bfloat16" else None
    options = block, beta1, beta2, eps, decay
    _adamw8(param, *moments.values(), *given, grad, *scalars.values(), seed, *options)
    if layout == "none":
        return None
    return Quantized.of(tuple(codes.values()), layout, block) if out is None else out
