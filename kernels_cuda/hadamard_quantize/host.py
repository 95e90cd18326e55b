"""The Hadamard quantiser's CUDA kernels for export: constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host
from jetfire.kernels_cuda.hadamard_quantize import rows
from jetfire.kernels_cuda.hadamard_rows import MOST_COLUMNS, RowsConfig

if TYPE_CHECKING:
    from jetfire.ops.hadamard_quantize import HadamardQuantizeProblem

NOTES = {
    "GROUP": "columns that are transformed together",
    "FACTOR_BITS": "of the float 1/√GROUP",
    "ELEMENTS": "neighbours that a thread has",
    "CHUNKS": "runs of them that a thread has of a tile",
    "LANES": "threads that walk a row",
    "WARPS": "of a block",
    "BLOCKS": "blocks that an SM is to hold, registers for them",
    "PREFETCH": "a tile is read before its predecessor is transformed",
    "X_TYPE": "of x: 0 bf16, 1 fp16, 2 fp32",
    "X_BYTES": "of x, that one access reads",
    "PACKED": "q is written, of two codes per byte",
    "PACKED_BYTES": "of q, that one access writes",
    "WIDE": "codes are written one in a byte",
    "WIDE_BYTES": "of these, that one access writes",
    "GIVEN_X": "what is clipped is seen from x, else from the codes",
    "GIVEN_BITS": "of an element of x, or of a code",
    "GIVEN_BYTES": "of x or the codes, that one access reads",
    "GATHERED": "a row's gradient is the sum of two rows'",
    "G_TYPE": "of dx_hat: 0 bf16, 1 fp16, 2 fp32",
    "G_BYTES": "of dx_hat, that one access reads",
    "DX_TYPE": "of dx, or of what its codes are made of",
    "DX_BYTES": "of dx, that one access writes",
    "OUT_BLOCK": "side of the blocks of dx's codes",
    "STOCHASTIC": "they are rounded stochastically, else to nearest",
}


class RowsHost(Host):
    """Host code for sm_80 and later: a few threads per row."""

    kernel = rows.RowsHadamardQuantize()
    threads = "32 * WARPS"
    template = "hadamard_quantize/rows.j2"
    notes: ClassVar[Mapping[str, str]] = NOTES
    aligned = ("x", "q", "wide", "dx_hat", "dx")

    def multiples(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> dict[str, int]:
        """Return the least n that the code is made for; n may be any multiple of it."""
        matrices = rows.contiguous(problem, config)
        accesses = (8 * matrix.access // matrix.bits for _, matrix in matrices)
        return {"n": max(2, problem.group, *accesses)}

    def reason(self, problem: HadamardQuantizeProblem, config: RowsConfig, dim: str) -> str:
        whole = "whole groups" if problem.group > 1 else "two codes per byte"
        most = max(matrix.access for _, matrix in rows.contiguous(problem, config))
        return f"{whole}, of rows that are accessed in up to {most} bytes"

    def most(self, problem: HadamardQuantizeProblem) -> dict[str, int]:
        return {"n": MOST_COLUMNS}

    def sentences(self, problem: HadamardQuantizeProblem) -> tuple[str, ...]:
        packed = "q holds two codes per byte, the first in its low half."
        wide = "wide holds one code per byte, in its high half; the low one is 0."
        if problem.mode == "bwd":
            gradient = "dx_hat is the gradient to step·codes, which the product multiplied"
            if problem.given == "x":
                return (f"{gradient}; dstep is the step's, row by row.",)
            if problem.out == "int8":
                return packed, f"{gradient}; dx is codes, dx_scale the scale of each of its blocks."
            return wide if problem.given == "wide" else packed, f"{gradient}."
        codes = [packed] if problem.layout != "wide" else []
        if problem.layout != "packed":
            codes.append(wide)
        scale = "scale is the step, NaN where x or the step is not finite; squares are, row by row,"
        return *codes, f"{scale} the sums of the codes' squares."

    def workspace(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> bool:
        return problem.mode == "fwd"

    def values(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> dict[str, Any]:
        return {
            "backward": problem.mode == "bwd",
            "function": self.codes(problem, config)[0].name,
            "given": problem.clipped_by,
            "most_columns": MOST_COLUMNS,
            # Bytes from row to row of what is read, in C.
            "pitch": {
                name: {4: "n / 2", 8: "n"}.get(matrix.bits, f"(int64_t)n * {matrix.bits // 8}")
                for name, matrix in rows.contiguous(problem, config)
            },
            "constants": {"ROWS": (config.rows, "rows of a block")},
        }


HOSTS: Mapping[str, Host] = {"rows": RowsHost()}
