"""Gluon kernels of dequantize whose warps hand a row over in shared memory: with a barrier, or not.

`hurries` reads what the other warps write without waiting for it: consan's to find.
"""

from dataclasses import dataclass
from typing import ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jetfire.core.kernel import Config
from jetfire.kernels_triton.kernel import Launch, TritonKernel

COLUMNS = 128


@gluon.jit
def place(N, TILE: gl.constexpr, layout: gl.constexpr):
    """Return this program's row and columns."""
    across = gl.cdiv(N, TILE)
    row = (gl.program_id(0) // across).to(gl.int64)
    return row, gl.program_id(0) % across * TILE + gl.arange(0, TILE, layout)


@gluon.jit
def fill(
    q_ptr,
    scale_ptr,
    N,
    q_stride,
    scale_stride,
    shared,
    bar,
    BLOCK: gl.constexpr,
    TILE: gl.constexpr,
    layout: gl.constexpr,
):
    row, columns = place(N, TILE, layout)
    inside = columns < N
    q = gl.load(q_ptr + row * q_stride + columns, mask=inside)
    scale = gl.load(scale_ptr + row // BLOCK * scale_stride + columns // BLOCK, mask=inside)
    shared.store(q.to(gl.float32) * scale)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def drain(
    x_ptr,
    N,
    x_stride,
    shared,
    bar,
    WAIT: gl.constexpr,
    TILE: gl.constexpr,
    layout: gl.constexpr,
):
    row, columns = place(N, TILE, layout)
    if WAIT:
        mbarrier.wait(bar, 0)
    gl.store(x_ptr + row * x_stride + columns, shared.load(layout), mask=columns < N)


@gluon.jit
def barrier_kernel(
    q_ptr,
    scale_ptr,
    x_ptr,
    N,
    q_stride,
    scale_stride,
    x_stride,
    BLOCK: gl.constexpr,
    WAIT: gl.constexpr,
    TILE: gl.constexpr,
    layout: gl.constexpr,
):
    shared = gl.allocate_shared_memory(gl.float32, [TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [
            (drain, (x_ptr, N, x_stride, shared, bar, WAIT, TILE, layout)),
            (
                fill,
                (q_ptr, scale_ptr, N, q_stride, scale_stride, shared, bar, BLOCK, TILE, layout),
            ),
        ],
        [4],
        [48],
    )


@dataclass(frozen=True)
class BarrierConfig(Config):
    warps: int = 4


class Waits(TritonKernel):
    op = "dequantize"
    name = "waits"
    Config = BarrierConfig
    wait: ClassVar = True

    def legal(self, problem, config, device):
        if device.kind != "cuda" or device.capability < (9, 0):
            return "needs sm_90 or newer"
        return None if problem.out == "fp32" else f"out={problem.out}: expected fp32"

    def default(self, problem, device):
        return BarrierConfig()

    def launches(self, problem, config, device):
        programs = problem.m * -(-problem.n // COLUMNS)
        layout = gl.BlockedLayout([1], [32], [config.warps], [0])
        given = {"WAIT": self.wait, "TILE": COLUMNS, "layout": layout}
        return (Launch(barrier_kernel, (programs,), problem, config, **given),)


class Hurries(Waits):
    name = "hurries"
    wait: ClassVar = False


KERNELS = (Waits(), Hurries())
