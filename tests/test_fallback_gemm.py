"""fallback_gemm: kernels against float64, and what fallback is worth with outliers."""

import dataclasses
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_triton.fallback_gemm import FallbackGemmConfig
from jetfire.ops import int8_fallback_gemm, int8_fallback_quantize, int8_gemm, int8_quantize
from jetfire.reference.dequantize import dequantize
from jetfire.reference.fallback_quantize import threshold_of

OP = registry.get("fallback_gemm")


def check(name, problem, inputs, config=None):
    kernel, here = registry.get_kernel("fallback_gemm", name), Device.of(inputs["a"])
    config = config or kernel.default(problem, here)
    if (reason := kernel.legal(problem, config, here)) is not None:
        pytest.skip(reason)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, result.message


@pytest.mark.parametrize("name", ["triton", "int_mm"])
@pytest.mark.parametrize(("percent", "transpose"), [(0, False), (20, True), (50, False)])
@pytest.mark.parametrize(
    ("block", "m", "n", "k"), [(32, 70, 40, 130), (32, 33, 65, 96), (128, 130, 70, 300)]
)
def test_kernels_match_float64(device, name, percent, transpose, block, m, n, k):
    fields = {"out": "fp32", "bias": True, "percent": percent, "transpose": transpose}
    problem = OP.Problem(m, n, k, block=block, **fields)
    check(name, problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("config", [(32, 1, 2, 1), (64, 4, 3, 4), (128, 8, 2, 8)])
def test_every_config(device, config):
    problem = OP.Problem(100, 170, 200, block=32, percent=50)
    check("triton", problem, OP.inputs(problem, device), FallbackGemmConfig(*config))


def test_row_strides_and_a_second_plane_everywhere_or_in_the_last_block(device):
    problem = OP.Problem(64, 64, 160, block=32, out="fp32")
    inputs = OP.inputs(problem, device)
    for name in ("a", "r", "b"):
        wide = torch.randint(-127, 128, (64, 200), dtype=torch.int8, device=device)
        inputs[name] = wide[:, 7:167]
    for last in (False, True):
        inputs["r_scale"] = torch.rand(2, 5, device=device)
        inputs["r_scale"][:, : 4 * last] = 0.0
        check("triton", problem, inputs)


def test_the_reference_is_the_sum_of_two_products(device):
    problem = OP.Problem(50, 40, 100, block=32, bias=True, percent=50)
    inputs = OP.inputs(problem, device, data="outlier")
    a, r, b = (
        dequantize(inputs[name], inputs[f"{name}_scale"], 32, torch.float64) for name in "arb"
    )
    exact = a @ b.t() + r @ b.t() + inputs["bias"].double()
    torch.testing.assert_close(OP.reference(problem, inputs)["c"], exact, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 40, 33), (40, 0, 33), (40, 33, 0)])
def test_no_elements(device, m, n, k):
    x, b = torch.zeros((m, k), device=device), int8_quantize(torch.zeros((n, k), device=device))
    codes = int8_fallback_quantize(x, torch.ones(1, device=device), block=32)
    bias = torch.randn(n, device=device)
    found = int8_fallback_gemm(*codes, b, out="fp32", bias=bias)
    assert torch.equal(found, bias.expand(m, n))
    found = int8_fallback_gemm(*codes, b, out="fp32", bias=bias, transpose=True)
    assert torch.equal(found, bias.expand(m, n).t())


def test_a_problem_that_the_kernel_does_not_take():
    kernel, here = registry.get_kernel("fallback_gemm", "triton"), Device.parse("cpu")
    problem = OP.Problem(32, 32, 4097 * 32, block=32)
    config = kernel.default(problem, here)
    here = dataclasses.replace(here, interpreted=True)
    expected = "k=131104: expected at most 131072 in blocks of 32"
    assert kernel.legal(problem, config, here) == expected
    narrow = dataclasses.replace(config, tile_n=64)
    expected = "tile_n=64: expected a power of two that is a multiple of 128"
    assert kernel.legal(dataclasses.replace(problem, block=128), narrow, here) == expected


def decibels(value, exact):
    return 10 * math.log10(float(exact.square().sum() / (value - exact).square().sum()))


def test_planted_outliers_cost_nothing_with_fallback(device):
    """A block with an outlier errs like all others, or less; without fallback it decides."""
    torch.manual_seed(0)
    x, w = (torch.randn((rows, 1024), device=device) for rows in (384, 128))
    b, exact = int8_quantize(w, block=128), x.double() @ w.double().t()
    plain = decibels(int8_gemm(int8_quantize(x, block=128), b, out="fp32").double(), exact)
    x[5, 70] = x[300, 900] = 100.0
    exact = x.double() @ w.double().t()
    off = decibels(int8_gemm(int8_quantize(x, block=128), b, out="fp32").double(), exact)
    codes = int8_fallback_quantize(x, threshold_of(x, 128, 8), block=128)
    on = decibels(int8_fallback_gemm(*codes, b, out="fp32").double(), exact)
    assert plain > 36
    assert off < plain - 8
    assert on > plain


def test_bad_inputs(device):
    x = torch.ones((4, 64), device=device)
    a, r = int8_fallback_quantize(x, torch.ones(1, device=device), block=32)
    with pytest.raises(UsageError, match="a has block=32 and b block=64: expected one block"):
        int8_fallback_gemm(a, r, int8_quantize(x, block=64))
    with pytest.raises(UsageError, match=r"r has shape \(3, 64\): expected \(4, 64\)"):
        int8_fallback_gemm(a, int8_quantize(x[:3], block=32), a)
    with pytest.raises(UsageError, match="a has k=64 and b k=32: expected one k"):
        int8_fallback_gemm(a, r, int8_quantize(x[:, :32].contiguous(), block=32))
    with pytest.raises(UsageError, match="out=int8: expected bf16 or fp16 or fp32"):
        int8_fallback_gemm(a, r, a, out="int8")
