"""Rows added to those of a table on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import InPlaceKernel


class TorchAddRows(InPlaceKernel):
    op = "add_rows"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Add rows to the table itself, in the positions' order, and return it.

        Raises:
            UsageError: an id is no row.
        """
        ids = inputs["ids"]
        wrong = ids[(ids < 0) | (ids >= problem.m)]
        if len(wrong):
            raise UsageError(
                f"ids has {int(wrong[0])}: expected 0 to {problem.m - 1}, rows of the table"
            )
        return {"table": inputs["table"].index_add_(0, ids, inputs["gradient"].float())}


KERNELS = (TorchAddRows(),)
