"""The INT8 GEMM's two CUDA kernels for export: their constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host, size_for_16_bytes
from jetfire.kernels_cuda import driver, hopper
from jetfire.kernels_cuda.gemm import mma, wgmma
from jetfire.kernels_cuda.gemm.config import PARTS_A_TILE, WgmmaConfig
from jetfire.kernels_cuda.gemm.mma import MmaConfig
from jetfire.kernels_cuda.gemm.wgmma import TmaOutputs

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

# Scales, biases and seeds may lie anywhere that their elements may.
MATRICES = ("a", "b", "c", "q", "qt")
# Of a whole GH100, which no GPU of sm_90a exceeds; flags of four groups for each.
MOST_PROCESSORS = 144
FLAG_BYTES = 4 * 4 * MOST_PROCESSORS
PROBLEM_NOTES = {
    "BLOCK": "rows and columns that share a scale",
    "OUT_BLOCK": "the same of the codes that are written",
    "OUTPUT": "0 fp32, 1 bf16, 2 fp16, 3 codes and their scales",
    "BIAS": "a bias is added to each row",
    "ACCUMULATE": "the product is added to what C holds",
    "SQUARES": "sums of C's squares are written too",
    "STOCHASTIC": "codes are rounded up or down at random",
    "Q": "codes are written row by row",
    "QT": "codes are written transposed",
    "CHUNK_WARPS": "warps that hold a chunk of rows, sixteen each",
}
REASONS = {
    "m": "rows of qt are written in 16 bytes",
    "n": "rows of the output are written in 16 bytes",
    "k": "rows of a and b are read in {} bytes",
}
WGMMA_NOTES = {
    **PROBLEM_NOTES,
    "TMA_OUT": "C, or its codes, are written by TMA, in whole 16 bytes",
    "TMA_QT": "the transposed codes are",
    "GROUPS": "warp groups that multiply, one below the other",
    "ROWS": "times 64, that each of them has of a tile",
    "TILE_N": "columns of a tile",
    "STAGES": "of 128 of K in shared memory",
    "BUFFERS": "of 8 KiB or more per group, on their way out",
    "CLUSTER_M": "blocks of a cluster that fetch B together",
    "CLUSTER_N": "and A",
    "RASTER": "rows of (cluster) tiles that are walked column by column",
    "IN_FLIGHT": "groups that may multiply at once; 0 for all",
    "BAND": "the rows: 0 all, 1 above a border, 2 below",
    "STREAM": "the last tiles' K is dealt out evenly; blocks share them",
    "MARKED": "a tile's last slot is marked; nobody counts them",
    "TELESCOPED": "sums run on from block to block, see above",
    "INTERLEAVED": "two sums take blocks in turn",
    "CONSUMER_REGISTERS": "of a thread that multiplies",
    "PRODUCER_REGISTERS": "of one that feeds it",
}
MMA_NOTES = {
    **PROBLEM_NOTES,
    "COPY_BYTES": "that one copy of A or B moves; 1 for any alignment",
    "VECTOR_OUT": "C, or its codes, are written in 16 bytes",
    "VECTOR_QT": "the transposed codes are",
    "TILE_M": "rows of a tile",
    "TILE_N": "and its columns",
    "WARPS_M": "warps among which its rows are divided",
    "WARPS_N": "and its columns",
    "STAGES": "of 128 of K in shared memory",
    "MIN_BLOCKS": "that an SM holds, which limits their registers",
    "RASTER": "rows of tiles that are walked column by column",
    "BIASED": "a subtraction makes a float of a sum, see above",
}


def _output_multiples(problem: GemmProblem, out: bool, qt: bool) -> dict[str, int]:
    """Return the multiples that sizes must have so that rows of outputs are written in 16 bytes."""
    found = {"m": 16} if qt else {}
    return {**found, "n": size_for_16_bytes(driver.ELEMENT_BYTES[problem.out])} if out else found


class GemmHost(Host):
    """What both kernels' callers are told."""

    def sentences(self, problem: GemmProblem) -> tuple[str, ...]:
        if not problem.squares:
            return ()
        return ("squares holds Σx² of each 16 rows and 32 columns of c.",)


class WgmmaHost(GemmHost):
    """Host code for sm_90a: tensor maps, persistent blocks, flags and sums for stream-K."""

    kernel = wgmma.WgmmaGemm()
    threads = "128 * (GROUPS + 1)"
    template = "gemm/wgmma.j2"
    notes: ClassVar[Mapping[str, str]] = WGMMA_NOTES
    reasons: ClassVar[Mapping[str, str]] = REASONS
    aligned = (*MATRICES, "workspace")
    tensor_maps = True

    def architecture(self, capability: tuple[int, int]) -> str:
        return "90a"

    def exported(self, config: WgmmaConfig) -> WgmmaConfig:
        """Return the same in clusters of two where larger ones would take two launches.

        The raster, which counts tiles of clusters, covers as many rows as before, if it can.
        """
        if not config.banded:
            return config
        return replace(config.below, raster=min(32, config.raster * config.cluster_m))

    def multiples(self, problem: GemmProblem, config: WgmmaConfig) -> dict[str, int]:
        path = TmaOutputs.contiguous(problem)
        return {**_output_multiples(problem, path.out, path.qt), "k": 16}

    def workspace(self, problem: GemmProblem, config: WgmmaConfig) -> bool:
        return config.stream

    def values(self, problem: GemmProblem, config: WgmmaConfig) -> dict[str, Any]:
        path = TmaOutputs.contiguous(problem)
        element = driver.ELEMENT_BYTES[problem.out]
        return {
            "path": path,
            "parts": PARTS_A_TILE,
            "most_processors": MOST_PROCESSORS,
            "flag_bytes": FLAG_BYTES,
            "constants": {
                "TILE_M": (config.tile_m, "rows and"),
                "TILE_N": (config.tile_n, "columns of a tile"),
                "TILE_K": (hopper.TILE_K, "what is multiplied at a time"),
                "GROUPS": (config.groups, "warp groups that multiply"),
                "CLUSTER_M": (config.cluster_m, "blocks of a cluster that fetch b together"),
                "CLUSTER_N": (config.cluster_n, "and a"),
                "CLUSTER": (config.cluster, "both"),
                "ELEMENT_BYTES": (element, "of an output"),
                "PANEL_COLUMNS": (
                    hopper.panel_bytes(config, element) // element,
                    "of what TMA writes at a time",
                ),
            },
        }


class MmaHost(GemmHost):
    """Host code for sm_80 and later: one block per tile."""

    kernel = mma.MmaGemm()
    template = "gemm/mma.j2"
    notes: ClassVar[Mapping[str, str]] = MMA_NOTES
    reasons: ClassVar[Mapping[str, str]] = REASONS
    aligned = MATRICES

    def multiples(self, problem: GemmProblem, config: MmaConfig) -> dict[str, int]:
        access = self.kernel.access(problem)
        k = {"k": access.copy_bytes} if access.copy_bytes > 1 else {}
        return {**_output_multiples(problem, access.out, access.qt), **k}

    def values(self, problem: GemmProblem, config: MmaConfig) -> dict[str, Any]:
        return {
            "constants": {
                "TILE_M": (config.tile_m, "rows and"),
                "TILE_N": (config.tile_n, "columns of a tile"),
            }
        }


HOSTS: Mapping[str, Host] = {"wgmma": WgmmaHost(), "mma": MmaHost()}
