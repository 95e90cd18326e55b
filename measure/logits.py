"""Base of ops on rows of logits and their targets (`LogitsOp`): a language model's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.problem import FloatName, Problem
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VOCABULARY = 50257  # GPT-2's
PADDED = 50304  # to a multiple of 128
ULP = 2.0**-22  # what ex2.approx and lg2.approx are off by, relatively


class LogitsProblem(Problem):
    """A problem of logits (m×n, `dtype`), whose columns from `valid` on are padding, if any are."""

    dtype: FloatName
    valid: int | None

    @property
    def columns(self) -> int:
        """The number of columns that are no padding."""
        return self.n if self.valid is None else min(self.n, self.valid)

    @property
    def backward(self) -> bool:
        """Whether it is of the loss's gradient."""
        return True


class LogitsOp(StandardOp):
    """An op on logits and targets; backward also on each row's lse and the loss's gradient."""

    never_empty = frozenset({"n"})  # no logits, no loss

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return no more columns that count than there are, which the functions refuse."""
        valid = fields.get("valid")
        return {**fields, "valid": None if valid is None else min(valid, fields["n"])}

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": PADDED, "valid": VOCABULARY}]

    def reads(self, problem: Any) -> Specs:
        m, backward = problem.m, ("lse", "dloss") if problem.backward else ()
        specs = {"logits": Spec(problem.dtype, (m, problem.n)), "targets": Spec("int64", (m,))}
        return specs | dict.fromkeys(backward, Spec("fp32", (m,)))

    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Return logits drawn from `data`; one row in 64 is to be ignored.

        With ``nonfinite`` one row in four has a target that is no column, or one of the padding.
        """
        import torch

        from jetfire.reference.cross_entropy import IGNORED, forward

        source, m = Source(data, device, seed), problem.m
        logits = source.floats(m, problem.n, dtype=problem.dtype)
        targets = source.integers(problem.columns, m)
        targets = torch.where(source.integers(64, m) == 0, IGNORED, targets)
        if data == "nonfinite":
            targets[::8], targets[4::8] = problem.columns, -1
        inputs = {"logits": logits, "targets": targets}
        if problem.backward:
            inputs["lse"] = forward(logits, targets, problem.columns)[1].float()
            inputs["dloss"] = source.normal(m)
        return inputs

    def edges(self, problem: Any, inputs: Tensors, rng: Random) -> Tensors:
        """Draw half of the targets from the first column, the last one and none.

        In one case of two some are no column, but in 32 bits the first, or to be ignored. Forward,
        rows lie far from 0.
        """
        import torch

        from jetfire.measure import edges
        from jetfire.reference.cross_entropy import IGNORED

        targets, columns = inputs["targets"].cpu(), problem.columns
        wrong = (-1, columns, 2**32, 2**32 + IGNORED, -(2**63))
        ends = edges.each(rng, (0, columns - 1, IGNORED, *rng.choice(((), wrong))), targets).long()
        kept = edges.each(rng, (0, 1), targets).bool()
        rare = {"targets": torch.where(kept, targets, ends)}
        if not problem.backward:
            # Where a maximum begins at a number, or a sum of exponentials is taken without it.
            far = edges.each(rng, (0.0, -(2.0**15), 2.0**15), inputs["logits"][:, :1])
            rare["logits"] = inputs["logits"].cpu() + far.to(inputs["logits"].dtype)
        else:
            rare["dloss"] = edges.each(rng, (0.0, 1.0, -1.0, 1 / problem.m, 1e4), inputs["dloss"])
        return rare

    def eager(self, problem: Any, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's own in fp32, as autocast has it: backward from the log-softmax it kept."""
        import torch
        from torch.nn import functional

        from jetfire.reference.cross_entropy import IGNORED

        targets, valid = inputs["targets"], problem.columns
        # Of a target that is no column torch makes an assertion that ends all work on the device.
        targets = torch.where((targets >= 0) & (targets < valid), targets, IGNORED)
        logits = inputs["logits"][:, :valid]
        if not problem.backward:
            return lambda: functional.cross_entropy(logits.float(), targets, reduction="none")
        dloss, dtype = inputs["dloss"], logits.dtype
        kept = torch.log_softmax(logits.float(), dim=1)
        # Of what a mean would divide by.
        weight = torch.zeros((), dtype=torch.float32, device=logits.device)

        def backward() -> Any:
            aten = torch.ops.aten
            gradient = aten.nll_loss_backward(dloss, kept, targets, None, 0, -100, weight)
            gradient = aten._log_softmax_backward_data(gradient, kept, 1, torch.float32)
            return functional.pad(gradient.to(dtype), (0, problem.n - valid))

        return backward


def labelled(logits: Tensor, targets: Tensor, valid: int | None) -> None:
    """Check that targets fit logits, and `valid` the logits' columns."""
    expect.matrix("logits", logits, expect.FLOATS)
    expect.same_device("targets", targets, logits)
    rows, columns = logits.shape
    if columns == 0 and rows > 0:
        raise UsageError(f"logits has shape {tuple(logits.shape)}: expected at least one column")
    if expect.named(targets.dtype) != "int64" or targets.shape != (rows,):
        dtype = expect.named(targets.dtype)
        raise UsageError(f"targets is {dtype} {tuple(targets.shape)}: expected int64 {(rows,)}")
    if valid is not None and not 1 <= valid <= columns:
        raise UsageError(f"valid={valid}: expected 1 to {columns}, the columns of logits")
