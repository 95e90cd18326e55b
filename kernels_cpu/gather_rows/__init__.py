"""Gathered and widened rows of packed codes on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.kernels_cpu.common import NoConfig, TorchKernel
from jetfire.ops.op import Tensors
from jetfire.reference.gather_rows import gather_rows


class TorchGatherRows(TorchKernel):
    op = "gather_rows"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """``wide``, of the rows that are wanted."""
        rows, counts, repeat = (inputs.get(name) for name in ("rows", "counts", "repeat"))
        return {"wide": gather_rows(inputs["q"], rows, counts, repeat)}

    def launch(self, problem: Any, config: NoConfig, inputs: Tensors, outputs: Tensors) -> None:
        with torch.no_grad():
            wide = self.compute(problem, inputs)["wide"]
            out = outputs["wide"].t() if problem.transpose else outputs["wide"]
            out[: len(wide)].copy_(wide)


KERNELS = (TorchGatherRows(),)
