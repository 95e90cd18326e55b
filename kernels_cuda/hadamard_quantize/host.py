"""The Hadamard quantiser's CUDA kernels for export: constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host
from jetfire.kernels_cuda import hadamard_rows_host
from jetfire.kernels_cuda.hadamard_quantize import rows
from jetfire.kernels_cuda.hadamard_rows import RowsConfig
from jetfire.kernels_cuda.hadamard_rows_host import WIDE, packed

if TYPE_CHECKING:
    from jetfire.ops.hadamard_quantize import HadamardQuantizeProblem

NOTES = {
    **hadamard_rows_host.NOTES,
    "X_TYPE": "of x: 0 bf16, 1 fp16, 2 fp32",
    "X_BYTES": "of x, that one access reads",
    "PACKED": "q is written, of two codes per byte",
    "PACKED_BYTES": "of q, that one access writes",
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


class HadamardQuantizeHost(hadamard_rows_host.RowsHost):
    """Host code of both directions."""

    kernel = rows.RowsHadamardQuantize()
    template = "hadamard_quantize/rows.j2"
    notes: ClassVar[Mapping[str, str]] = NOTES
    aligned = ("x", "q", "wide", "dx_hat", "dx")

    def argument_bytes(self, problem: HadamardQuantizeProblem) -> int:
        return 88 if problem.mode == "bwd" else 72

    def sentences(self, problem: HadamardQuantizeProblem) -> tuple[str, ...]:
        if problem.mode == "bwd":
            gradient = "dx_hat is the gradient to step·codes, which the product multiplied"
            if problem.given == "x":
                return (f"{gradient}; dstep is the step's, row by row.",)
            if problem.out == "int8":
                codes = f"{gradient}; dx is codes, dx_scale the scale of each of its blocks."
                return packed("q"), codes
            return WIDE if problem.given == "wide" else packed("q"), f"{gradient}."
        written = [packed("q")] if problem.layout != "wide" else []
        if problem.layout != "packed":
            written.append(WIDE)
        scale = "scale is the step, NaN where x or the step is not finite; squares are, row by row,"
        return *written, f"{scale} the sums of the codes' squares."

    def workspace(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> bool:
        return problem.mode == "fwd"

    def values(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> dict[str, Any]:
        return super().values(problem, config) | {
            "backward": problem.mode == "bwd",
            "given": problem.clipped_by,
            # Bytes from row to row of what is read, in C.
            "pitch": {
                name: {4: "n / 2", 8: "n"}.get(matrix.bits, f"(int64_t)n * {matrix.bits // 8}")
                for name, matrix in self.kernel.matrices(problem, config)
            },
        }


HOSTS: Mapping[str, Host] = {"rows": HadamardQuantizeHost()}
