"""Gathered rows of packed codes on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import NoConfig, TorchKernel
from jetfire.reference.gather_rows import gather_rows


class TorchGatherRows(TorchKernel):
    op = "gather_rows"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return ``codes`` of the rows that are wanted."""
        rows, counts, repeat = (inputs.get(name) for name in ("rows", "counts", "repeat"))
        return {"codes": gather_rows(inputs["q"], rows, counts, repeat, wide=problem.wide)}

    def launch(self, problem: Any, config: NoConfig, inputs: Tensors, outputs: Tensors) -> None:
        with torch.no_grad():
            codes = self.compute(problem, inputs)["codes"]
            out = outputs["codes"].t() if problem.transpose else outputs["codes"]
            out[: len(codes)].copy_(codes)


KERNELS = (TorchGatherRows(),)
