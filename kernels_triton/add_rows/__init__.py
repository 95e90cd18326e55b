"""Rows added to those of a table: sums of runs of equal ids, then of the runs that borders cut.

A program takes some places of an order that brings equal ids together, and some columns. It adds
each run that begins there to the run's row of the table. What reaches in from the program before it
leaves as one row of `parts`; those of a run are added up in order by a second launch. So each row
has one program at a time, and every sum its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import device_reason, grid_reason, power_reason

# Of the second launch: rows of `parts` at once, 16 to each of its warps, four columns per thread.
# The most frequent of 16384 tokens may have a hundred programs of 32.
PARTS, PARTS_N, PARTS_WARPS = 64, 128, 4


@dataclass(frozen=True)
class AddRowsConfig(Config):
    """A program of `warps` warps adds `rows` positions of `tile_n` columns, `batch` at a time.

    A batch's rows, of the gradient and of the table, are on their way together.
    """

    rows: int = 32
    tile_n: int = 256
    batch: int = 8
    warps: int = 1


@triton.jit
def ids_at(ids_ptr, order_ptr, first, K, COUNT: tl.constexpr):
    """Return positions and ids, int64, at COUNT places of the order; -1 where there is no place."""
    positions, ids = (), ()
    for i in tl.static_range(COUNT):
        inside = (first + i >= 0) & (first + i < K)
        positions = positions + (tl.load(order_ptr + first + i, mask=inside, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(COUNT):
        ids = ids + (tl.load(ids_ptr + positions[i], mask=positions[i] >= 0, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return positions, ids


@triton.jit
def add_runs_kernel(
    table_ptr,
    ids_ptr,
    order_ptr,
    gradient_ptr,
    parts_ptr,
    into_ptr,
    onward_ptr,
    M,
    N,
    K,
    table_stride,
    stride,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Add the runs that begin among ROWS places; write what reaches in, and which run goes on.

    Args:
        parts_ptr: fp32, programs×N: the sum of the run that began before, where there is one.
        into_ptr, onward_ptr: int64, by program: the id of that run, and of one that began here and
            goes on in the next; -1 for none.
    """
    across = tl.cdiv(N, TILE_N)
    program = (tl.program_id(0) // across).to(tl.int64)
    col0 = tl.program_id(0) % across * TILE_N
    cols = col0 + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_N,), tl.float32)
    own = program < 0  # whether the run began here
    for start in range(0, ROWS, BATCH):
        first = program * ROWS + start
        positions, ids = ids_at(ids_ptr, order_ptr, first - 1, K, BATCH + 2)
        rows, sums, adds, leaves = (), (), (), ()
        for i in tl.static_range(1, BATCH + 1):
            at = gradient_ptr + positions[i] * stride + cols
            rows = rows + (tl.load(at, mask=(cols < N) & (positions[i] >= 0), other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(1, BATCH + 1):
            own = own | (ids[i] != ids[i - 1])
            ends = (ids[i] != ids[i + 1]) | (start + i == ROWS)
            add = ends & own & (ids[i] >= 0) & (ids[i] < M)
            at = table_ptr + ids[i] * table_stride + cols
            sums = sums + (tl.load(at, mask=(cols < N) & add, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
            adds = adds + (add,)  # type: ignore[assignment]  # noqa: RUF005
            leaves = leaves + (ends & (own == 0),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(BATCH):
            before = tl.where(ids[i + 1] != ids[i], 0.0, total)
            total = before + rows[i].to(tl.float32)
            at = table_ptr + ids[i + 1] * table_stride + cols
            tl.store(at, sums[i] + total, mask=(cols < N) & adds[i])
            tl.store(parts_ptr + program * N + cols, total, mask=(cols < N) & leaves[i])
        if col0 == 0:
            if start == 0:
                tl.store(into_ptr + program, tl.where(ids[0] == ids[1], ids[1], -1))
            if start + BATCH == ROWS:
                on = adds[BATCH - 1] & (ids[BATCH] == ids[BATCH + 1])
                tl.store(onward_ptr + program, tl.where(on, ids[BATCH], -1))


@triton.jit
def add_parts_kernel(
    table_ptr,
    parts_ptr,
    into_ptr,
    onward_ptr,
    N,
    PROGRAMS,
    table_stride,
    PARTS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Add to a row what the programs after the one in which its run began have left of the run."""
    across = tl.cdiv(N, TILE_N)
    program = tl.program_id(0) // across
    id = tl.load(onward_ptr + program)
    if id < 0:
        return
    cols = tl.program_id(0) % across * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_N,), tl.float32)
    at, found = program + 1, PARTS
    while found == PARTS:
        parts = at + tl.arange(0, PARTS)
        mine = tl.load(into_ptr + parts, mask=parts < PROGRAMS, other=-1) == id
        places = parts_ptr + (parts.to(tl.int64)[:, None] * N + cols[None, :])
        inside = mine[:, None] & (cols < N)[None, :]
        total += tl.sum(tl.load(places, mask=inside, other=0.0), 0)
        at += PARTS
        found = tl.sum(mine.to(tl.int32), 0)
    row = table_ptr + id * table_stride + cols
    tl.store(row, tl.load(row, mask=cols < N) + total, mask=cols < N)


class TritonAddRows(TritonKernel):
    op = "add_rows"
    Config = AddRowsConfig
    choices: ClassVar = {
        "rows": (8, 16, 32, 64, 128),
        "tile_n": (64, 128, 256, 512, 1024),
        "batch": (2, 4, 8, 16),
        "warps": (1, 2, 4),
    }

    def legal(self, problem: Any, config: AddRowsConfig, device: Device) -> str | None:
        if (reason := device_reason(device)) is not None:
            return reason
        for name, most in (("rows", 256), ("tile_n", 4096), ("batch", config.rows), ("warps", 16)):
            expected = f"a power of two of at most {most}"
            if reason := power_reason(config, name, expected=expected, most=most):
                return reason
        per_thread = config.tile_n // (32 * config.warps) * config.batch
        if not 1 <= per_thread <= 64:
            return f"{per_thread} sums per thread in a batch: expected 1 to 64"
        across = ceil_div(problem.n, min(PARTS_N, config.tile_n))
        programs = ceil_div(problem.k, config.rows) * across
        return grid_reason(programs, "more rows or a larger tile_n", "programs")

    def default(self, problem: Any, device: Device) -> AddRowsConfig:
        """Return programs of one warp, whose threads load 16 bytes of a gradient's row at once."""
        most = 128 if problem.dtype == "fp32" else 256
        return AddRowsConfig(tile_n=min(most, max(32, triton.next_power_of_2(problem.n))))

    def launches(self, problem: Any, config: AddRowsConfig, device: Device) -> tuple[Launch, ...]:
        programs = ceil_div(problem.k, config.rows)
        runs = (programs * ceil_div(problem.n, config.tile_n),)
        parts = (programs * ceil_div(problem.n, PARTS_N),)
        given = {"PROGRAMS": programs, "PARTS": PARTS, "TILE_N": PARTS_N, "num_warps": PARTS_WARPS}
        found = (
            Launch(add_runs_kernel, runs, problem, config, {"stride": "gradient"}),
            Launch(add_parts_kernel, parts, problem, config, **given),
        )
        return found if programs > 1 else found[:1]

    def tensors(
        self, problem: Any, config: AddRowsConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        n, programs, device = problem.n, ceil_div(problem.k, config.rows), outputs["table"].device
        parts = torch.empty((programs, n), dtype=torch.float32, device=device)
        into, onward = torch.empty((2, programs), dtype=torch.int64, device=device)
        return {**inputs, **outputs, "parts": parts, "into": into, "onward": onward}


KERNELS = (TritonAddRows(),)
