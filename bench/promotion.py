"""What a promotion costs: speed beside SQNR for each K per promotion and each schedule.

A product with a scale for every block of K cannot stay on the tensor cores: once a block its int32
sums are promoted to fp32 and scaled. The curve's points are the blocks 32, 64 and 128 with each
schedule of that promotion, on several kinds of data; each is timed on its own data's operands, in
one run with the peers, whose operands are cast from the same floats.

Errors are of the whole output, not of a sample: 8192³ in float64 takes an H200 some 20 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from jetfire.core.launch import run
from jetfire.core.tensors import Tensors
from jetfire.measure import peers as peer_ops
from jetfire.measure.check import relative_error
from jetfire.measure.plan import Case
from jetfire.measure.results import Row
from jetfire.measure.runner import Choice, Runner


def sqnr(out: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Return 10·log10(‖truth‖²/‖out − truth‖²) in dB: of the whole, and the rows' median.

    The whole is decided by its largest rows; a row that is all zeros has no ratio.

    Args:
        out: m×n of any float; truth: m×n float64.
    """
    slabs = zip(out.split(1024), truth.split(1024), strict=True)
    noise = torch.cat([(o.double() - t).square().sum(dim=1) for o, t in slabs])
    power = torch.cat([t.square().sum(dim=1) for t in truth.split(1024)])
    rows = (power / noise)[power > 0]
    return _decibels(power.sum() / noise.sum()), _decibels(rows.median())


def _decibels(ratio: torch.Tensor) -> float:
    value = float(ratio)
    return 10 * math.log10(value) if value > 0 else -math.inf if value == 0 else math.nan


class PromotionRunner(Runner):
    """Measures a product as a `Runner` does, and what its outputs are worth."""

    def _floats(self, case: Case, index: int) -> Tensors:
        """Return the operands before they were quantised, of one set of inputs."""
        where, options = self.device.torch_device, self.options
        return case.op.floats(case.problem, where, options.seed + index, options.data)

    def _factories(
        self, case: Case, inputs: Sequence[Tensors]
    ) -> list[Mapping[str, peer_ops.Factory]]:
        sets = [self._floats(case, i) for i in range(len(inputs))]
        return [peer_ops.gemm_of(floats["a"], floats["b"]) for floats in sets]

    def _measure(self, case: Case, legal: Sequence[Choice]) -> list[Row]:
        rows = super()._measure(case, legal)
        floats = self._floats(case, 0)
        truth = floats["a"].double() @ floats["b"].double().t()
        factories = peer_ops.gemm_of(floats["a"], floats["b"])
        inputs = case.op.inputs(
            case.problem, self.device.torch_device, self.options.seed, self.options.data
        )
        exact = case.op.reference(case.problem, inputs)["c"]
        found = []
        for row, choice in zip(rows[: len(legal)], legal, strict=True):
            if row.ok:
                whole, middle = sqnr(_product(case, choice, inputs), truth)
                error = self._schedule_error(case, choice, inputs, exact)
                row = replace(row, sqnr_db=whole, row_sqnr_db=middle, schedule_err=error)
            found.append(row)
        for row in rows[len(legal) :]:
            whole, middle = sqnr(factories[row.kernel]()(), truth)
            found.append(replace(row, sqnr_db=whole, row_sqnr_db=middle))
        return [replace(row, curve="promotion") for row in found]

    def _schedule_error(
        self, case: Case, choice: Choice, inputs: Tensors, exact: torch.Tensor
    ) -> float | None:
        """Return the error of the schedule's sums, which rounding to BF16 would hide."""
        wide = Case(case.op, replace(case.problem, out="fp32"))
        if choice.kernel.legal(wide.problem, choice.config, self.device) is not None:
            return None
        return relative_error(_product(wide, choice, inputs), exact)


def _product(case: Case, choice: Choice, inputs: Tensors) -> torch.Tensor:
    return run(case.op, choice.kernel, case.problem, choice.config, inputs)["c"]
