"""The INT4 GEMM's two CUDA kernels for export: their constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host, size_for_16_bytes
from jetfire.core.kept_rows import MOST_K
from jetfire.kernels_cuda import driver, hopper
from jetfire.kernels_cuda.int4_gemm import mma, wgmma
from jetfire.kernels_cuda.int4_gemm.config import WgmmaConfig
from jetfire.kernels_cuda.int4_gemm.mma import MmaConfig

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

PROBLEM_NOTES = {
    "PRODUCT": "0 a forward's, 1 an input's gradient, 2 a weight's",
    "OUTPUT": "0 fp32, 1 bf16, 2 fp16, 3 codes and their scales",
    "OUT_BLOCK": "rows and columns of codes that share a scale",
    "Q": "codes are written",
    "QT": "their transpose is",
    "STOCHASTIC": "codes are rounded up or down at random",
    "BIAS": "a bias is added to each row",
    "SHIFTED": "codes lie in the high halves of their bytes",
    "CHUNK_WARPS": "warps that hold a chunk of rows, sixteen each",
}
REASONS = {
    "n": "rows of the output are written in 16 bytes",
    "k": "rows of a and b are read in 16 bytes",
}
WGMMA_NOTES = {
    **PROBLEM_NOTES,
    "PACKED": "codes lie two in a byte",
    "TMA_OUT": "C, or its codes, are written by TMA, in whole 16 bytes",
    "GROUPS": "warp groups that multiply, one below the other",
    "ROWS": "times 64, that each of them has of a tile",
    "TILE_N": "columns of a tile",
    "STAGES": "of 128 of K in shared memory",
    "BUFFERS": "of 8 KiB a group, on their way out",
    "CLUSTER_M": "blocks of a cluster that fetch B together",
    "CLUSTER_N": "and A",
    "RASTER": "rows of (cluster) tiles that are walked column by column",
    "SPLIT": "parts of K with blocks of their own",
    "CONSUMER_REGISTERS": "of a thread that multiplies",
    "PRODUCER_REGISTERS": "of one that feeds it",
}
MMA_NOTES = {
    **PROBLEM_NOTES,
    "NIBBLES": "codes lie two in a byte",
    "COPY_BYTES": "that one copy of A or B moves: 16, 8, 4, or 1 for any alignment",
    "VECTOR_OUT": "C, or its codes, are written in 16 bytes",
    "TILE_M": "rows of a tile",
    "TILE_N": "and its columns",
    "WARPS_M": "warps among which its rows are divided",
    "WARPS_N": "and its columns",
    "STAGES": "of 128 bytes of K in shared memory",
    "MIN_BLOCKS": "blocks that an SM is to hold, registers for them",
    "RASTER": "rows of tiles that are walked column by column",
}
# Launches of the kernels beside the product: blocks per multiprocessor, threads per block.
SMALL_BLOCKS, SMALL_THREADS = 16, 256


def sentences(problem: Int4GemmProblem) -> tuple[str, ...]:
    """Describe the tensors where their shapes do not."""
    if problem.operands == "packed":
        codes = "Codes lie two in a byte of a and b, the first in its low half."
    elif problem.shifted:
        codes = "Codes lie one in a byte of a and b, in its high half; the low one is 0."
    else:
        codes = "A byte of a or b is a code, of a times how often its row was repeated."
    counted = {
        "fwd": (),
        "dgrad": (
            "Row i of the product is multiplied by weight[i]. Rows of c from counts[1] on may hold "
            "anything.",
        ),
        "wgrad": (
            "The first counts[0] of k count 14 times, those from there to counts[1] once, the rest "
            "is not read. Counts are multiples of 128.",
        ),
    }[problem.product]
    return (codes, *counted)


class Int4GemmHost(Host):
    """Host code that both kernels share."""

    def most(self, problem: Int4GemmProblem) -> dict[str, int]:
        return {"k": MOST_K[problem.product]}

    def sentences(self, problem: Int4GemmProblem) -> tuple[str, ...]:
        return sentences(problem)


class WgmmaHost(Int4GemmHost):
    """Host code for sm_90a: packed codes are unpacked before, raw sums of a split added after."""

    kernel = wgmma.WgmmaInt4Gemm()
    template = "int4_gemm/wgmma.j2"
    notes: ClassVar[Mapping[str, str]] = WGMMA_NOTES
    aligned = ("a", "b", "c", "q", "workspace")
    tensor_maps = True
    zeros = False

    def architecture(self, capability: tuple[int, int]) -> str:
        return "90a"

    def threads_named(self, problem: Int4GemmProblem, config: WgmmaConfig) -> tuple[str, ...]:
        groups = "gemm_kernel::GROUPS" if self.workspace(problem, config) else "GROUPS"
        small = str(SMALL_THREADS)
        before = (small,) if problem.operands == "packed" else ()
        return (*before, f"128 * ({groups} + 1)", *((small,) if config.split > 1 else ()))

    def multiples(self, problem: Int4GemmProblem, config: WgmmaConfig) -> dict[str, int]:
        """Return the multiple that k must be of, since TMA reads rows where they are not copied."""
        element = driver.ELEMENT_BYTES[problem.out]
        by_tma = config.split == 1 and self._tma_out(problem)
        n = {"n": size_for_16_bytes(element)} if by_tma else {}
        return {**n, "k": 2 if problem.operands == "packed" else 16}

    def reason(self, problem: Int4GemmProblem, config: WgmmaConfig, dim: str) -> str:
        if dim == "k" and problem.operands == "packed":
            return "two codes per byte"
        return REASONS[dim]

    def workspace(self, problem: Int4GemmProblem, config: WgmmaConfig) -> bool:
        return problem.operands == "packed" or config.split > 1

    def values(self, problem: Int4GemmProblem, config: WgmmaConfig) -> dict[str, Any]:
        split = config.split > 1
        element = 4 if split else driver.ELEMENT_BYTES[problem.out]
        return {
            "packed": problem.operands == "packed",
            "split": split,
            "tma_out": split or self._tma_out(problem),
            "most_k": MOST_K[problem.product],
            "small_blocks": SMALL_BLOCKS,
            "constants": {
                "TILE_M": (config.tile_m, "rows and"),
                "TILE_N": (config.tile_n, "columns of a tile"),
                "TILE_K": (hopper.TILE_K, "what is multiplied at a time"),
                "CLUSTER_M": (config.cluster_m, "blocks of a cluster that fetch b together"),
                "CLUSTER_N": (config.cluster_n, "and a"),
                "CLUSTER": (config.cluster, "both"),
                "SPLIT": (config.split, "parts of k with blocks of their own"),
                "ELEMENT_BYTES": (element, "of what is written"),
                "PANEL_COLUMNS": (
                    hopper.panel_bytes(config, element) // element,
                    "of what TMA writes at a time",
                ),
            },
        }

    def _tma_out(self, problem: Int4GemmProblem) -> bool:
        """Return what a C at a multiple of 16 bytes would have."""
        return wgmma._tma_out(problem, 16)


class MmaHost(Int4GemmHost):
    """Host code for sm_80 and later: one block per tile."""

    kernel = mma.MmaInt4Gemm()
    template = "int4_gemm/mma.j2"
    notes: ClassVar[Mapping[str, str]] = MMA_NOTES
    aligned = ("a", "b", "c", "q")

    def multiples(self, problem: Int4GemmProblem, config: MmaConfig) -> dict[str, int]:
        access = self.kernel.access(problem)
        n = {"n": size_for_16_bytes(driver.ELEMENT_BYTES[problem.out])} if access.out else {}
        codes = 2 if problem.operands == "packed" else 1
        return {**n, "k": max(2, codes * access.copy_bytes)}

    def reason(self, problem: Int4GemmProblem, config: MmaConfig, dim: str) -> str:
        if dim == "k" and (copied := self.kernel.access(problem).copy_bytes) < 16:
            return (
                "an even number" if copied == 1 else f"rows of a and b are read in {copied} bytes"
            )
        return REASONS[dim]

    def values(self, problem: Int4GemmProblem, config: MmaConfig) -> dict[str, Any]:
        return {
            "packed": problem.operands == "packed",
            "most_k": MOST_K[problem.product],
            "constants": {
                "TILE_M": (config.tile_m, "rows and"),
                "TILE_N": (config.tile_n, "columns of a tile"),
            },
        }


HOSTS: Mapping[str, Host] = {"wgmma": WgmmaHost(), "mma": MmaHost()}
