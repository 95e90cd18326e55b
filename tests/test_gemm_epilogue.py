"""The ends of `wgmma`'s tiles of codes, run on the host: a thread there for each of a block's."""

import ctypes

import pytest
import torch

from jetfire.core import registry
from jetfire.kernels_cuda.gemm.config import WgmmaConfig
from jetfire.kernels_cuda.gemm.wgmma import TmaOutputs, program
from jetfire.reference.quantize import quantize
from jetfire.tests.host_cuda import built, needs_a_compiler

SEED = 0x0123456789ABCDEF

pytestmark = needs_a_compiler


def problem(config, out_block, rounding="stochastic", layout="q", bias=True, ragged=16):
    """Two tiles across, neither of all their rows, nor the second of all its columns."""
    m, n = config.tile_m - 16, 2 * config.tile_n - ragged
    return registry.get("gemm").Problem(
        m=m,
        n=n,
        k=128,
        block=128,
        out_block=out_block,
        out="int8",
        rounding=rounding,
        layout=layout,
        bias=bias,
    )


def sums_of(m, n):
    """Sums with blocks of zeros, of tiny elements, and with NaN and infinity in some."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=draw) * torch.randn(m, n, generator=draw).exp2()
    x[:32, :32] = 0.0
    x[-1] *= 2.0**-118
    x[m // 2 :, n // 2 :] *= 2.0**-90
    x[40, 5] = float("nan")
    x[3, 40] = float("-inf")
    return x


def check(library, problem):
    m, n, block = problem.m, problem.n, problem.out_block
    x = sums_of(m, n)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)) if problem.bias else None
    seed = torch.tensor([SEED])
    down, across = -(-m // block), -(-n // block)
    q, qt = torch.full((m, n), 99, dtype=torch.int8), torch.full((n, m), 99, dtype=torch.int8)
    scale, scale_t = torch.full((down, across), -1.0), torch.full((across, down), -1.0)
    library.finish(
        *(ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in (x, bias)),
        m,
        n,
        *(ctypes.c_void_p(t.data_ptr()) for t in (seed, q, scale, qt, scale_t)),
    )
    codes, scales = quantize(x if bias is None else x + bias, block, problem.rounding, seed)
    assert codes.abs().max() == 127
    if problem.layout != "qt":
        assert torch.equal(q, codes)
        torch.testing.assert_close(scale, scales, rtol=0, atol=0, equal_nan=True)
    if problem.layout != "q":
        assert torch.equal(qt, codes.T)
        torch.testing.assert_close(scale_t, scales.T, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("config", "out_block", "fields"),
    [
        (WgmmaConfig(3, 1, 128), 32, {}),
        (WgmmaConfig(3, 1, 128), 32, {"rounding": "nearest"}),
        (WgmmaConfig(2, 1, 64), 64, {"layout": "both"}),
        (WgmmaConfig(2, 1, 128), 128, {"layout": "qt"}),
        (WgmmaConfig(1, 2, 192, 3), 64, {"layout": "both"}),
        (WgmmaConfig(1, 1, 96), 32, {"bias": False}),
        (WgmmaConfig(1, 2, 32), 32, {}),
        (WgmmaConfig(1, 1, 64), 32, {"ragged": 13, "layout": "both"}),
    ],
    ids=str,
)
def test_codes_and_scales_are_the_reference_s(tmp_path, config, out_block, fields):
    case = problem(config, out_block, **fields)
    path = TmaOutputs.of(case, 16 * (case.layout != "qt"), 16 * (case.layout != "q"))
    check(built(tmp_path, program(case, config, path), "epilogue.cu"), case)


def test_scales_are_divided_right_at_every_mantissa_and_codes_held_to_127(tmp_path):
    config = WgmmaConfig(1, 1, 64)
    of = program(problem(config, 32), config, TmaOutputs(True, False))
    library = built(tmp_path, of, "epilogue.cu")
    assert [library.wrong_scales(exponent) for exponent in (27, 28, 127, 253, 254)] == [0] * 5
    held = ctypes.c_int()
    assert library.wrong_codes(ctypes.c_uint64(0), ctypes.byref(held)) == 0
    assert held.value > 0
