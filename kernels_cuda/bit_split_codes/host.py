"""The CUDA kernel that splits codes, for export: its constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host
from jetfire.kernels_cuda import bit_split_codes
from jetfire.kernels_cuda.bit_split_codes import EACH, RowsConfig
from jetfire.ops.bit_split_codes import MOST_ROWS

if TYPE_CHECKING:
    from jetfire.ops.bit_split_codes import BitSplitCodesProblem

NOTES = {
    "WARPS": "of a block that splits",
    "ACROSS": "of them that lie beside each other",
    "ROWS": "of a warp, whose column sums it leaves once",
    "BLOCK": "rows and columns that share a scale",
    "BITS": "of what is split: 8 make two parts, 4 one",
    "MOST_BITS": "of the float that the largest scale is divided by",
    "SUMS": "each column's sum is written, too",
    "VECTORS": "rows are accessed sixteen codes at a time",
    "SHARED_BYTES": "of a block that splits",
}


class RowsHost(Host):
    """Host code for sm_80 and later: the largest scale is found, then warps split rows."""

    kernel = bit_split_codes.RowsBitSplitCodes()
    template = "bit_split_codes/rows.j2"
    notes: ClassVar[Mapping[str, str]] = NOTES
    aligned = ("q", "parts", "workspace")

    def threads_named(self, problem: BitSplitCodesProblem, config: RowsConfig) -> tuple[str, ...]:
        return "largest_kernel::THREADS", "rows_kernel::THREADS"

    def multiples(self, problem: BitSplitCodesProblem, config: RowsConfig) -> dict[str, int]:
        return {"n": 2 if problem.n % EACH else EACH}

    def reason(self, problem: BitSplitCodesProblem, config: RowsConfig, dim: str) -> str:
        vectors = problem.n % EACH == 0
        return f"rows are read {EACH} codes at a time" if vectors else "two codes per byte"

    def most(self, problem: BitSplitCodesProblem) -> dict[str, int]:
        return {"m": MOST_ROWS} if problem.sums else {}

    def sentences(self, problem: BitSplitCodesProblem) -> tuple[str, ...]:
        packed = "parts holds two codes per byte, the first in its low half"
        if problem.bits == 8:
            parts = (
                f"{packed}: m rows of high parts, then m of low ones.",
                "An element is unit·(14·high + low), low rounded stochastically.",
            )
        else:
            parts = (f"{packed}.", "An element is unit·code, rounded to nearest.")
        squares = "squares are, row by row of parts, the sums of the codes' squares."
        nan = "unit is NaN where a scale is not finite; then all codes are 0 but for the first, 1."
        return *parts, squares, nan

    def workspace(self, problem: BitSplitCodesProblem, config: RowsConfig) -> bool:
        return True

    def values(self, problem: BitSplitCodesProblem, config: RowsConfig) -> dict[str, Any]:
        return {
            "sums": problem.sums,
            "most_rows": MOST_ROWS,
            "constants": {
                "BLOCK": (problem.block, "rows and columns that share a scale"),
                "HEIGHT": (config.height, "rows of a block that splits"),
            },
        }


HOSTS: Mapping[str, Host] = {"rows": RowsHost()}
