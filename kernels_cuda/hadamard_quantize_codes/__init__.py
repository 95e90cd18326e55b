"""The Hadamard quantiser of codes in CUDA C++: rows are walked as `hadamard_quantize`'s are.

Triton's kernel transforms by matrix products, whose results lie otherwise in registers than what
is read and written: moving them is why it takes 35 µs on an H100 for 8192×4096, and DRAM 25.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.hadamard_rows import (
    Matrices,
    Matrix,
    RowsConfig,
    RowsKernel,
    access_of,
    constants,
    idle,
    registers,
)
from jetfire.kernels_cuda.program import Program

if TYPE_CHECKING:
    from jetfire.ops.hadamard_quantize_codes import HadamardQuantizeCodesProblem

SOURCE = Path(__file__).parent / "forward_codes.cu"
KINDS = {"q": "bytes", "packed": "nibbles", "wide": "bytes"}


def _names(problem: HadamardQuantizeCodesProblem) -> list[str]:
    """List the matrices that a launch reads and writes."""
    return ["q", *(("packed", "wide") if problem.layout == "both" else (problem.layout,))]


class RowsHadamardQuantizeCodes(RowsKernel):
    op = "hadamard_quantize_codes"

    def needed_registers(self, problem: HadamardQuantizeCodesProblem, config: RowsConfig) -> int:
        """Return what a thread needs so that nothing spills, as audited on sm_80, sm_89 and sm_90.

        It needs registers for its values, the next tile as it was read, and some for the rest.
        """
        values = config.elements * config.chunks
        ahead = config.prefetch * (values // 4 + 2 * config.chunks)
        return values + ahead + (26 if problem.group > 32 else 18)

    def default(self, problem: HadamardQuantizeCodesProblem, device: Device) -> RowsConfig:
        """Return as many lanes as leave few idle at a row's end, and as many blocks as fit.

        A thread accesses 16 bytes at once, so that a warp's accesses are whole lines; and rows of
        4096 are several tiles, of which the next one is read ahead.
        """
        shapes = [RowsConfig(16, 2, lanes, warps=8) for lanes in (16, 8, 4)]
        few = (shape for shape in shapes if 8 * idle(problem, shape) <= problem.n)
        shape = next(few, min(shapes, key=lambda shape: idle(problem, shape)))
        fitting = (dataclasses.replace(shape, blocks=blocks) for blocks in (4, 3, 2))
        return next(x for x in fitting if self.needed_registers(problem, x) <= registers(x))

    def matrices(self, problem: HadamardQuantizeCodesProblem, config: RowsConfig) -> Matrices:
        return tuple(
            (name, Matrix(KINDS[name], access_of(problem.n, KINDS[name], config.elements)))
            for name in _names(problem)
        )

    def program(
        self, problem: HadamardQuantizeCodesProblem, config: RowsConfig, access: Matrices
    ) -> Program:
        found, none = dict(access), Matrix("bytes", 1)
        aligned = found["q"].access == min(16, config.elements)
        values: dict[str, bool | int] = {
            "BLOCK": problem.block,
            **constants(problem, config, aligned),
            "X_BYTES": found["q"].access,
            "PACKED": "packed" in found,
            "PACKED_BYTES": found.get("packed", none).access,
            "WIDE": "wide" in found,
            "WIDE_BYTES": found.get("wide", none).access,
        }
        return Program(SOURCE, header(values), 0, config.warps)

    def launch(
        self,
        problem: HadamardQuantizeCodesProblem,
        config: RowsConfig,
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        q = inputs["q"]
        access = access_of(problem.n, "bytes", config.elements, q.data_ptr(), q.stride(0))
        matrices = ("q", Matrix("bytes", access)), *self.matrices(problem, config)[1:]  # new ones
        content = _arguments(problem, inputs, outputs)
        blocks = ceil_div(problem.m, config.rows)
        self.run(problem, config, matrices, Device.of(q), blocks, content)


def _arguments(problem: HadamardQuantizeCodesProblem, inputs: Tensors, outputs: Tensors) -> bytes:
    """Make the struct that the kernel function takes."""
    q, scale = inputs["q"], inputs["scale"]
    return struct.pack(
        "<8Q2q2i",
        address(q),
        address(scale),
        address(inputs["step"]),
        address(outputs.get("packed")),
        address(outputs.get("wide")),
        address(outputs["unit"]),
        address(outputs["squares"]),
        address(counters(q.device, 2)),
        q.stride(0),
        scale.stride(0),
        problem.m,
        problem.n,
    )


KERNELS = (RowsHadamardQuantizeCodes(),)
