"""The codes' Hadamard quantiser for export: its constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host
from jetfire.kernels_cuda import hadamard_quantize_codes, hadamard_rows_host
from jetfire.kernels_cuda.hadamard_rows import RowsConfig
from jetfire.kernels_cuda.hadamard_rows_host import WIDE, packed

if TYPE_CHECKING:
    from jetfire.ops.hadamard_quantize_codes import HadamardQuantizeCodesProblem

NOTES = {
    **hadamard_rows_host.NOTES,
    "BLOCK": "rows and columns of q that share a scale",
    "X_BYTES": "of q, that one access reads",
    "PACKED": "codes are written two in a byte",
    "PACKED_BYTES": "of these, that one access writes",
}


class HadamardQuantizeCodesHost(hadamard_rows_host.RowsHost):
    """Host code of the forward: it has no other direction."""

    kernel = hadamard_quantize_codes.RowsHadamardQuantizeCodes()
    template = "hadamard_quantize_codes/rows.j2"
    notes: ClassVar[Mapping[str, str]] = NOTES
    aligned = ("q", "packed", "wide")

    def argument_bytes(self, problem: HadamardQuantizeCodesProblem) -> int:
        return 88

    def sentences(self, problem: HadamardQuantizeCodesProblem) -> tuple[str, ...]:
        codes = [packed("packed")] if problem.layout != "wide" else []
        if problem.layout != "packed":
            codes.append(WIDE)
        return (
            *codes,
            "unit is the step, NaN where a scale is not finite or the step not finite and above 0; "
            "squares are, row by row, the sums of the codes' squares.",
        )

    def workspace(self, problem: HadamardQuantizeCodesProblem, config: RowsConfig) -> bool:
        return True

    def values(self, problem: HadamardQuantizeCodesProblem, config: RowsConfig) -> dict[str, Any]:
        values = super().values(problem, config)
        constants = {**values["constants"], "BLOCK": (problem.block, NOTES["BLOCK"])}
        return {**values, "constants": constants}


HOSTS: Mapping[str, Host] = {"rows": HadamardQuantizeCodesHost()}
