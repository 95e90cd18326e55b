"""Base of a step of AdamW on a weight, and its codes where wanted (`WeightStep`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.errors import UsageError
from jetfire.core.op import Check, Model, Value
from jetfire.core.problem import Block, LayoutOrNone, Problem, at_least_zero
from jetfire.core.tensors import Spec, Specs, Tensors, with_transpose
from jetfire.measure import peers
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp, draw

if TYPE_CHECKING:
    from torch import Tensor

STATE = ("param", "grad", "exp_avg", "exp_avg_sq")
# Of the bias corrections and of sqrt.approx and div.full, which are off by 2^-22 and less.
UPDATE = 2.0**-19


@dataclass(frozen=True)
class WeightStepProblem(Problem):
    """A weight (m×n) and its moments after a step, and the codes of the new weight.

    `guarded` steps have a grad_scale, which divides the gradient, and a found_inf: where it is not
    0 nothing changes (the codes are written all the same). Codes are rounded to nearest. With the
    layout `none` there are none, and `block` is of no matter.
    """

    block: Block = 32
    layout: LayoutOrNone = "both"
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

    @property
    def quantises(self) -> bool:
        """Whether codes of the new weight are written."""
        return self.layout != "none"


class WeightStep(StandardOp):
    """A step in place, of moments in fp32 unless an op keeps them otherwise."""

    matched: ClassVar[tuple[str, ...]] = (*StandardOp.matched, "quantises")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": out, "n": inp} for out, inp in model.linears()]

    def reads(self, problem: Any) -> Specs:
        scalars = ("rate", "step", "grad_scale", "found_inf")[: 4 if problem.guarded else 2]
        matrix, scalar = Spec("fp32", (problem.m, problem.n)), Spec("fp32", ())
        return dict.fromkeys(STATE, matrix) | dict.fromkeys(scalars, scalar)

    def drawn(self, problem: Any, source: Source) -> Tensors:
        """Return the state of a training that is some hundreds of steps old."""
        import torch

        inputs = draw(dict.fromkeys(STATE, Spec("fp32", (problem.m, problem.n))), source)
        inputs["exp_avg"] *= 0.1
        inputs["exp_avg_sq"] = inputs["exp_avg_sq"].square()
        rate = inputs["param"].new_tensor(1e-3, dtype=torch.float32)
        inputs |= {"rate": rate, "step": 1 + source.integers(1000).float()}
        if problem.guarded:
            inputs |= {"grad_scale": 1 + source.normal().abs(), "found_inf": 0 * rate}
        return inputs

    def check(
        self, problem: Any, outputs: Tensors, expected: Tensors, noise: Tensor | None = None
    ) -> Check:
        """Hold the update to its bounds, and the codes to the bit: those of the kernel's own."""
        from jetfire.reference.quantize import quantize

        if problem.quantises:
            codes = with_transpose(*quantize(outputs["param"], problem.block))
            expected = expected | codes
        return super().check(problem, outputs, expected)

    def returned(self, outputs: Mapping[str, Value]) -> dict[str, Value]:
        """Return the codes: the rest is updated in place."""
        return {name: value for name, value in outputs.items() if name not in self.contiguous}

    def edges(self, problem: Any, inputs: Tensors, rng: Random) -> Tensors:
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

    def eager(self, problem: Any, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's fused AdamW, then plain torch's quantisation of what it leaves, if any."""
        step, param = self.fused(problem, inputs)
        if not problem.quantises:
            return step

        def eager() -> Any:
            step()
            return peers.codes(problem, param)

        return eager

    def fused(self, problem: Any, inputs: Tensors) -> tuple[Callable[[], object], Tensor]:
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


def scalars_of(
    param: Tensor, rate: Tensor, step: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
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
