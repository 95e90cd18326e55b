"""Softmax cross-entropy over a vocabulary, and its gradient: the last step of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Gradient, SameBits
from jetfire.core.operators import Differentiable, Operator
from jetfire.core.problem import FloatName, Mode
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.measure.logits import ULP, LogitsOp, LogitsProblem, labelled

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cross_entropy", "cross_entropy_backward"]


@dataclass(frozen=True)
class CrossEntropyProblem(LogitsProblem):
    """fwd: logits (m×n, `dtype`) and targets to loss and lse; bwd: these and dloss to dlogits.

    Columns from `valid` on (if there are any) are padding: they count as −∞, their gradient is 0.
    """

    dtype: FloatName = "bf16"
    mode: Mode = "fwd"
    valid: int | None = None

    @property
    def backward(self) -> bool:
        return self.mode == "bwd"


class CrossEntropy(LogitsOp):
    name = "cross_entropy"
    summary = "softmax cross-entropy of rows of logits, and its gradient"
    Problem = CrossEntropyProblem
    modes = ("fwd", "bwd")

    def writes(self, problem: CrossEntropyProblem) -> Specs:
        if problem.mode == "bwd":
            return {"dlogits": Spec(problem.dtype, (problem.m, problem.n))}
        return dict.fromkeys(("loss", "lse"), Spec("fp32", (problem.m,)))

    def reference(self, problem: CrossEntropyProblem, inputs: Tensors) -> Tensors:
        """Return the outputs in float64, and bounds on what evaluation in fp32 may add."""
        return (_backward if problem.mode == "bwd" else _forward)(problem, inputs)

    def in_place(self, problem: CrossEntropyProblem, inputs: Tensors) -> dict[str, str]:
        return {"dlogits": "logits"} if problem.mode == "bwd" else {}

    def gradients(
        self, problem: CrossEntropyProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """Return none where a target is no column."""
        import torch

        from jetfire.measure import gradient
        from jetfire.reference.cross_entropy import IGNORED

        logits = inputs["logits"].double().requires_grad_()
        targets, dloss = inputs["targets"], inputs["dloss"].double()
        columns = (targets >= 0) & (targets < problem.columns)
        if not bool(((targets == IGNORED) | columns).all()):
            return []
        loss = torch.nn.functional.cross_entropy(
            logits[:, : problem.columns], targets, ignore_index=IGNORED, reduction="none"
        )
        (dlogits,) = gradient.of(loss, dloss, logits)
        # exp(logit − lse) of an lse rounded to fp32
        of_lse = gradient.FP32 + 2.0**-23 * inputs["lse"].double().abs()
        allowed = gradient.HALF[problem.dtype] * dlogits.abs() + (dloss.abs() * of_lse)[:, None]
        return [Gradient("dlogits", outputs["dlogits"], dlogits, allowed + gradient.LEAST)]

    def same_bits(self, problem: CrossEntropyProblem) -> SameBits:
        return "runs" if problem.mode == "fwd" else "configs"


def _forward(problem: CrossEntropyProblem, inputs: Tensors) -> Tensors:
    """Return loss and lse, with bounds for sums of at least 512 columns at a time.

    Σexp(x − max) is relatively off by `ULP`·(1 + |x − max|) per term, on average at most 1 + ln n
    of them; by 2^-24 for each addition in a row, n/512 and some 40 within a tile; and by `ULP` each
    of the at most n/512 times that the maximum rises. lse is off by as much, and by its rounding.
    """
    from jetfire.reference.cross_entropy import forward

    loss, lse = forward(inputs["logits"], inputs["targets"], problem.columns)
    bound = ULP * (48 + problem.n / 256 + lse.abs())
    return {
        "loss": loss,
        "loss_bound": (bound + 2.0**-24 * loss.abs()).nan_to_num(0.0),
        "lse": lse,
        "lse_bound": bound.nan_to_num(0.0, 0.0, 0.0),
    }


def _backward(problem: CrossEntropyProblem, inputs: Tensors) -> Tensors:
    """Return the gradient and its bound, of p = exp(x − lse), p − 1, and their rounding to dtype.

    p is off by a few `ULP`·(1 + |x − lse|), p − 1 by 2^-24 more.
    """
    import torch

    from jetfire.reference.cross_entropy import backward, log_softmax

    logits, lse, dloss, valid = inputs["logits"], inputs["lse"], inputs["dloss"], problem.columns
    gradient = backward(logits, inputs["targets"], lse, dloss, valid)
    bound = log_softmax(logits[:, :valid], lse)
    bound = bound.exp() * (1 + bound.abs().nan_to_num(0.0)) * 4 + 1
    bound = torch.nn.functional.pad(bound, (0, problem.n - valid))
    bound *= ULP * dloss.double().abs()[:, None]
    kind = torch.finfo(logits.dtype)
    bound += kind.eps / 2 * gradient.abs() + kind.smallest_normal * kind.eps
    return {"dlogits": gradient, "dlogits_bound": bound.nan_to_num(0.0, 0.0, 0.0)}


OP = CrossEntropy()


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.valid = inputs
    loss, lse = output
    ctx.mark_non_differentiable(*([lse] if ctx.needs_input_grad[0] else [loss, lse]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, lse)


def _logits_gradient(ctx: Any, dloss: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    if dloss is None:
        return None, None, None
    gradient = _cross_entropy_backward(*ctx.saved_tensors, dloss.contiguous(), ctx.valid)
    return gradient, None, None


_cross_entropy = Differentiable(
    "cross_entropy(Tensor logits, Tensor targets, SymInt? valid) -> (Tensor, Tensor)",
    leaf=0,
    backward=_logits_gradient,
    setup=_keep_logits,
    dtype_field="dtype",
)
_cross_entropy_backward = Operator(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dloss, SymInt?"
    " valid) -> Tensor",
    dtype_field="dtype",
)
# `dlogits` holds the logits, and then their gradient.
_cross_entropy_backward_inplace = Operator(
    "cross_entropy_backward_inplace(Tensor(a!) dlogits, Tensor targets, Tensor lse, Tensor"
    " dloss, SymInt? valid) -> ()",
    dtype_field="dtype",
    renamed={"logits": "dlogits"},
)


@checked
def cross_entropy(
    logits: Tensor, targets: Tensor, *, valid: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] of every row and lse = log Σ exp(logits), fp32, m.

    The loss has a gradient in the logits.

    Args:
        logits: m×n bf16, fp16 or fp32; columns from `valid` on are padding and count as −∞.
        targets: int64, m; −100 gives a loss of 0, and what is no column NaN.
    """
    labelled(logits, targets, valid)
    return _cross_entropy(logits, targets.contiguous(), valid)


@checked
def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    *,
    valid: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Return dloss·(softmax(logits) − one-hot(target)), m×n as the logits; 0 in the padding.

    Args:
        lse: from `cross_entropy`.
        dloss: fp32, m.
        inplace: overwrite the logits, whose rows do not overlap, and return them.
    """
    labelled(logits, targets, valid)
    m = logits.shape[0]
    lse, dloss = expect.vector("lse", lse, m, logits), expect.vector("dloss", dloss, m, logits)
    operands = (logits, targets.contiguous(), lse, dloss, valid)
    if not inplace:
        return _cross_entropy_backward(*operands)
    refuse_in_place({"logits": logits}, {"targets": operands[1], "lse": lse, "dloss": dloss})
    _cross_entropy_backward_inplace(*operands)
    return logits
