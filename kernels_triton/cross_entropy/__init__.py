"""Softmax cross-entropy: one row per program forward, in one pass; one tile of a row backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div, dtype_of
from jetfire.kernels_triton.common import IGNORED, exp, to_float
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    power_reason,
    share_reason,
    warps_reason,
)

# Finite, so that a tile of −∞ alone is no NaN: exp2(−∞ − LOWEST) is 0.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True)
class CrossEntropyConfig(Config):
    """A program of `warps` warps takes `tile_n` columns of a row at a time."""

    tile_n: int = 2048
    warps: int = 4


@triton.jit
def absorb(highest, total, x, VECTOR: tl.constexpr):
    """Add a tile's columns to each thread's running maximum and Σexp(x − maximum), [THREADS].

    Of a tile [REPEATS·THREADS·VECTOR] each thread has REPEATS runs of VECTOR neighbours, so that
    nothing moves between threads until the row is done.
    """
    x = tl.reshape(x, (x.shape[0] // (highest.shape[0] * VECTOR), highest.shape[0], VECTOR))
    above = tl.maximum(highest, tl.max(tl.max(x, 2), 0))
    terms = exp(x - above[None, :, None])
    return above, total * exp(highest - above) + tl.sum(tl.sum(terms, 2), 0)


@triton.jit
def forward_kernel(
    logits_ptr,
    targets_ptr,
    loss_ptr,
    lse_ptr,
    N,
    VALID,
    stride,
    TILE_N: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < VALID)
    chosen = tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32)
    highest = tl.full((THREADS,), LOWEST, tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    whole = VALID // TILE_N * TILE_N
    cols = tl.arange(0, TILE_N)
    for col0 in range(0, whole, TILE_N):
        x = tl.load(logits_ptr + col0 + cols).to(tl.float32)
        highest, total = absorb(highest, total, x, VECTOR)
    if whole < VALID:
        cols += whole
        x = tl.load(logits_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < VALID, x, float("-inf"))
        highest, total = absorb(highest, total, x, VECTOR)
    most = tl.max(highest, 0)
    lse = most + tl.log(tl.sum(total * exp(highest - most), 0))
    loss = tl.where(known, lse - chosen, float("nan"))
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(target == IGNORED, 0.0, loss))


@triton.jit
def backward_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    dloss_ptr,
    dlogits_ptr,
    N,
    VALID,
    stride,
    dstride,
    TILE_N: tl.constexpr,
):
    """Write dlogits, which may be the logits: one thread reads and writes an element."""
    across = tl.cdiv(N, TILE_N)
    pid = tl.program_id(0)
    row = (pid // across).to(tl.int64)
    cols = pid % across * TILE_N + tl.arange(0, TILE_N)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    target = tl.load(targets_ptr + row)
    dloss = tl.load(dloss_ptr + row)
    known = (target >= 0) & (target < VALID)
    dloss = tl.where(known, dloss, float("nan"))
    p = exp(x - tl.load(lse_ptr + row))
    at = tl.where(known, target, -1).to(tl.int32)
    gradient = tl.where(cols == at, p - 1.0, p) * dloss
    # An ignored row is 0 whatever it holds, and so is the padding.
    last = tl.where(target == IGNORED, 0, VALID)
    gradient = tl.where(cols < last, gradient, 0.0)
    gradient = to_float(gradient, dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * dstride + cols, gradient, mask=cols < N)


def vector(problem: Any) -> int:
    """Return how many logits 16 bytes hold."""
    return 16 // dtype_of(problem.dtype).itemsize


class TritonCrossEntropy(TritonKernel):
    op = "cross_entropy"
    Config = CrossEntropyConfig
    choices: ClassVar = {
        "tile_n": (512, 1024, 2048, 4096, 8192, 16384),
        "warps": (1, 2, 4, 8, 16, 32),
    }

    def legal(self, problem: Any, config: CrossEntropyConfig, device: Device) -> str | None:
        # Below 512 columns at a time a row's sums are too long for the op's tolerance.
        expected = "a power of two of at least 512"
        return (
            device_reason(device)
            or warps_reason(config, 32)
            or power_reason(config, "tile_n", expected=expected, least=512)
            or share_reason(config.tile_n, config, vector(problem), 64, "columns")
            or grid_reason(problem.m * ceil_div(problem.n, config.tile_n), "a larger tile_n")
        )

    def default(self, problem: Any, device: Device) -> CrossEntropyConfig:
        """Return sixteen BF16 columns per thread in both directions, or as few as the row has."""
        tile_n = max(512, min(2048, triton.next_power_of_2(problem.n)))
        return CrossEntropyConfig(tile_n, tile_n // 512)

    def launches(
        self, problem: Any, config: CrossEntropyConfig, device: Device
    ) -> tuple[Launch, ...]:
        m, given = problem.m, {"VALID": problem.columns}
        if problem.mode == "bwd":
            grid, rows_of = (m * ceil_div(problem.n, config.tile_n),), {"dstride": "dlogits"}
            return (Launch(backward_kernel, grid, problem, config, rows_of, **given),)
        given |= {"THREADS": 32 * config.warps, "VECTOR": vector(problem)}
        return (Launch(forward_kernel, (m,), problem, config, **given),)


KERNELS = (TritonCrossEntropy(),)
