"""Leverage-score sampling in CUDA C++: a cluster of thread blocks draws each product's rows.

Triton's kernel has each program read all rows, for its programs cannot meet within a launch, and
takes two launches. The two draws of 8192 tokens take it 16.1 µs on an H100, and this one 12.2, as
both were tuned; and its machine code has 107 KB where this one's has 26.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import CudaKernel, Program

if TYPE_CHECKING:
    from jetfire.ops.sample_rows import SampleRowsProblem

SOURCE = Path(__file__).parent / "cluster.cu"
MOST_ROWS = 16  # of a thread, whose weights are in registers


@dataclass(frozen=True)
class ClusterConfig(Config):
    """Choices of who draws a product's rows: `cluster` thread blocks of `warps` warps."""

    cluster: int = 8
    warps: int = 32

    def rows(self, total: int) -> int:
        """Return how many of so many rows a thread has: a power of two."""
        each = ceil_div(total, 32 * self.warps * self.cluster)
        return 1 << max(0, each - 1).bit_length()


class ClusterSampleRows(CudaKernel):
    op = "sample_rows"
    name = "cluster"
    candidate = True
    least = (9, 0)
    needs = "needs sm_90 or newer, for clusters of blocks"
    Config = ClusterConfig
    choices: ClassVar = {"cluster": (1, 2, 4, 8), "warps": (4, 8, 16, 32)}

    def legal(
        self, problem: SampleRowsProblem, config: ClusterConfig, device: Device
    ) -> str | None:
        if reason := self.unfit(device) or self.outside(config):
            return reason
        total = problem.parts * problem.m
        most = MOST_ROWS * 32 * config.warps * config.cluster
        if total > most:
            return f"{total} rows: expected at most {most}, {MOST_ROWS} to a thread"
        return None

    def default(self, problem: SampleRowsProblem, device: Device) -> ClusterConfig:
        """Return a cluster of eight blocks, and two rows to a thread where there are so many."""
        total, config = problem.parts * problem.m, ClusterConfig(warps=4)
        while config.rows(total) > 2 and config.warps < 32:
            config = ClusterConfig(warps=2 * config.warps)
        return config

    def program(
        self, problem: SampleRowsProblem, config: ClusterConfig, access: None = None
    ) -> Program:
        constants: dict[str, bool | int] = {
            "CLUSTER": config.cluster,
            "WARPS": config.warps,
            "ROWS": config.rows(problem.parts * problem.m),
            "PARTS": problem.parts,
            "SAMPLED": problem.sampled,
            "BOTH": problem.product == "both",
            "WGRAD": problem.product == "wgrad",
        }
        return Program(SOURCE, header(constants), 0, config.warps)

    def programs(self, problem: SampleRowsProblem, config: ClusterConfig) -> list[Program]:
        return [self.program(problem, config)]

    def launch(
        self,
        problem: SampleRowsProblem,
        config: ClusterConfig,
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        blocks = config.cluster * len(problem.products)
        content = _arguments(problem, inputs, outputs)
        self.run(problem, config, None, Device.of(inputs["squares"]), blocks, content)


def _arguments(problem: SampleRowsProblem, inputs: Tensors, outputs: Tensors) -> bytes:
    """Make the struct that the kernel function takes; zeros where a product is not drawn for."""
    found: dict[str, Any] = {**inputs, **outputs}
    pointers = [found.get(name) for name in ("squares", "x_squares", "seed")]
    prefixes = {"dgrad": "", "wgrad": "wgrad_" if problem.product == "both" else ""}
    for name in ("rows", "counts"):
        for product, prefix in prefixes.items():
            pointers.append(found[prefix + name] if product in problem.products else None)
    pointers += [found.get(name) for name in ("weight", "slots", "repeat")]
    rooms = [problem.room(product) for product in ("dgrad", "wgrad")]
    return struct.pack(
        "<10Q4i", *map(address, pointers), *rooms, problem.m, problem.parts * problem.m
    )


KERNELS = (ClusterSampleRows(),)
