"""The row kernels' configuration, legality and launch: forward.cu, backward.cu and its codes."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.hadamard_rows import (
    MOST_ELEMENTS,
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
    import torch

    from jetfire.ops.hadamard_quantize import HadamardQuantizeProblem

FORWARD = Path(__file__).parent / "forward.cu"
BACKWARD = Path(__file__).parent / "backward.cu"
BACKWARD_CODES = Path(__file__).parent / "backward_codes.cu"
TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # hadamard_rows.cuh


def _kind(x: torch.Tensor, packed: bool) -> str:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return names.get(str(x.dtype).removeprefix("torch."), "nibbles" if packed else "bytes")


def matrices_of(
    problem: HadamardQuantizeProblem, config: RowsConfig, inputs: Tensors, outputs: Tensors
) -> Matrices:
    """Return a launch's matrices by name."""
    found = []
    for name in _names(problem):
        x = inputs[name] if name in inputs else outputs[name]
        kind = _kind(x, packed=name == "q")
        places = x.data_ptr(), x.stride(0) * x.itemsize
        found.append((name, Matrix(kind, access_of(problem.n, kind, config.elements, *places))))
    return tuple(found)


def _names(problem: HadamardQuantizeProblem) -> list[str]:
    """List the matrices that a launch reads and writes."""
    if problem.mode == "bwd":
        return ["dx_hat", problem.clipped_by, "dx"]
    codes = {"packed": ["q"], "wide": ["wide"], "both": ["q", "wide"]}
    return ["x", *codes[problem.layout]]


def _of_codes(problem: HadamardQuantizeProblem, config: RowsConfig) -> int:
    """Return what a thread needs besides for random bits, scales and addresses of codes.

    Registers of what is read ahead serve for that, but for a few. Each chunk has its own scale.
    """
    if not config.prefetch:
        return 10 if problem.dtype == "fp32" else 25
    if config.chunks == 4:
        return 34
    return 6 if config.elements * config.chunks == MOST_ELEMENTS else 2


def parted(problem: HadamardQuantizeProblem, config: RowsConfig) -> str | None:
    """Return why a block of the codes would be several thread blocks' or runs'; None if it is not.

    The largest magnitude of a block is found by threads that can meet.
    """
    if problem.out != "int8":
        return None
    run = config.lanes * config.elements
    for what, count in (("rows", config.rows), ("columns to a run", run)):
        if count % problem.out_block:
            return f"{count} {what}: expected a multiple of out_block={problem.out_block}"
    return None


def _shapes(problem: HadamardQuantizeProblem) -> list[RowsConfig]:
    """Return configs to choose a default from, those of the most lanes first.

    Forward a thread has 64 bytes of a row, so that groups of 16 or 32 are its own. Backward it
    writes as much as it reads: 16 or 32 bytes, so that a warp's accesses are whole sectors. Of
    codes it has 16 or 32 neighbours in one block, whose scale each thread makes; and thread blocks
    have just the rows of a block.
    """
    if problem.out == "int8":
        return [
            RowsConfig(elements, 1, lanes, warps)
            for elements in (16, 32)
            for lanes in (16, 8, 4)
            if (warps := lanes * problem.out_block // 32) <= 16
        ]
    if problem.mode == "bwd":
        elements, chunks = 8, 4 if problem.group > 512 else 2
    else:
        elements = 64 // driver.ELEMENT_BYTES[problem.dtype]
        chunks = 32 // elements
    return [RowsConfig(elements, chunks, lanes) for lanes in (32, 16, 8, 4)]


class RowsHadamardQuantize(RowsKernel):
    op = "hadamard_quantize"

    def needed_registers(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> int:
        """Return what a thread needs so that nothing spills, as audited on sm_80, sm_89 and sm_90.

        It needs registers for its values, what they are made of, the next tile as it was read, and
        some for the rest.
        """
        values, single = config.elements * config.chunks, problem.dtype == "fp32"
        words = values * driver.ELEMENT_BYTES[problem.dtype] // 4
        if problem.mode == "fwd":
            sums = 8 if 1 < problem.group < 32 else 0  # sums of groups, to check them
            rest = 24 if single or not config.prefetch else 12 + 4 * config.chunks
            return values + config.prefetch * words + rest + sums
        parts = words * (2 if problem.gathered else 1)
        if problem.given == "x":
            rest = 88 if single else 64
            return values + parts + config.prefetch * (parts + words) + rest
        rest = (36 if single else 24) + (4 if problem.gathered else 0)
        if problem.out == "int8":
            rest += _of_codes(problem, config)
        codes = values // (4 if problem.given == "wide" else 8)
        if config.prefetch:
            rest += parts + codes
        elif single and problem.given == "wide":
            rest += 2 * codes  # beside 32 values in fp32 they do not fit in 80 registers
        return max(values, parts) + rest

    def refused(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> str | None:
        return parted(problem, config)

    def default(self, problem: HadamardQuantizeProblem, device: Device) -> RowsConfig:
        """Return as many lanes as leave few idle at a row's end.

        The next tile is read ahead where that leaves room for sixteen warps.
        """
        configs = [
            config
            for config in _shapes(problem)
            if config.tile >= problem.group and parted(problem, config) is None
        ]
        few = (config for config in configs if 8 * idle(problem, config) <= problem.n)
        config = next(few, min(configs, key=lambda config: idle(problem, config)))
        fitting = (
            dataclasses.replace(config, blocks=blocks, prefetch=prefetch)
            for prefetch, least in ((True, 16), (False, 1))
            for blocks in (8, 6, 4, 3, 2, 1)
            if blocks * config.warps >= least
        )
        return next(x for x in fitting if self.needed_registers(problem, x) <= registers(x))

    def matrices(self, problem: HadamardQuantizeProblem, config: RowsConfig) -> Matrices:
        kinds = {"q": "nibbles", "wide": "bytes"}
        kinds |= {"dx": "bytes"} if problem.out == "int8" else {}
        pairs = [(name, kinds.get(name, problem.dtype)) for name in _names(problem)]
        return tuple(
            (name, Matrix(kind, access_of(problem.n, kind, config.elements)))
            for name, kind in pairs
        )

    def program(
        self, problem: HadamardQuantizeProblem, config: RowsConfig, access: Matrices
    ) -> Program:
        found, none = dict(access), Matrix("bf16", 1)
        x = found.get("x", none)
        aligned = min(matrix.access for matrix in found.values()) >= 4
        values = {**constants(problem, config, aligned), "X_TYPE": TYPES[x.kind]}
        if problem.mode == "fwd":
            values |= {
                "X_BYTES": x.access,
                "PACKED": "q" in found,
                "PACKED_BYTES": found.get("q", none).access,
                "WIDE": "wide" in found,
                "WIDE_BYTES": found.get("wide", none).access,
            }
            return Program(FORWARD, header(values), 0, config.warps)
        given = found[problem.clipped_by]
        values |= {
            "GIVEN_X": problem.given == "x",
            "GIVEN_BITS": given.bits,
            "GIVEN_BYTES": given.access,
            "GATHERED": problem.gathered,
            "G_TYPE": TYPES[found["dx_hat"].kind],
            "G_BYTES": found["dx_hat"].access,
            "DX_TYPE": TYPES[problem.dtype if problem.out == "int8" else found["dx"].kind],
            "DX_BYTES": found["dx"].access,
        }
        if problem.out != "int8":
            return Program(BACKWARD, header(values), 0, config.warps)
        values |= {
            "OUT_BLOCK": problem.out_block,
            "STOCHASTIC": problem.rounding == "stochastic",
        }
        return Program(BACKWARD_CODES, header(values), 0, config.warps)

    def launch(
        self,
        problem: HadamardQuantizeProblem,
        config: RowsConfig,
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        first = inputs["dx_hat" if problem.mode == "bwd" else "x"]
        matrices = matrices_of(problem, config, inputs, outputs)
        if problem.out == "int8":
            pack = _codes_arguments
        else:
            pack = _backward_arguments if problem.mode == "bwd" else _forward_arguments
        blocks = ceil_div(problem.m, config.rows)
        content = pack(problem, inputs, outputs)
        self.run(problem, config, matrices, Device.of(first), blocks, content)


def _pitch(x: torch.Tensor) -> int:
    return x.stride(0) * x.itemsize


def _forward_arguments(
    problem: HadamardQuantizeProblem, inputs: Tensors, outputs: Tensors
) -> bytes:
    address, x = driver.address, inputs["x"]
    return struct.pack(
        "<7Qq2i",
        address(x),
        address(inputs["step"]),
        address(outputs.get("q")),
        address(outputs.get("wide")),
        address(outputs["scale"]),
        address(outputs["squares"]),
        address(counters(x.device, 2)),
        _pitch(x),
        problem.m,
        problem.n,
    )


def _backward_arguments(
    problem: HadamardQuantizeProblem, inputs: Tensors, outputs: Tensors
) -> bytes:
    address, dx_hat = driver.address, inputs["dx_hat"]
    given, slots = inputs[problem.clipped_by], inputs.get("slots")
    return struct.pack(
        "<7Q3q2i",
        address(dx_hat),
        address(given),
        address(inputs.get("step")),
        address(slots),
        address(inputs.get("unit")),
        address(outputs["dx"]),
        address(outputs.get("dstep")),
        _pitch(dx_hat),
        _pitch(given),
        0 if slots is None else slots.stride(0),
        problem.m,
        problem.n,
    )


def _codes_arguments(problem: HadamardQuantizeProblem, inputs: Tensors, outputs: Tensors) -> bytes:
    address, dx_hat = driver.address, inputs["dx_hat"]
    given, slots = inputs["q"], inputs.get("slots")
    return struct.pack(
        "<7Q3q2i",
        address(dx_hat),
        address(given),
        address(slots),
        address(inputs.get("unit")),
        address(inputs.get("seed")),
        address(outputs["dx"]),
        address(outputs["dx_scale"]),
        _pitch(dx_hat),
        _pitch(given),
        0 if slots is None else slots.stride(0),
        problem.m,
        problem.n,
    )
