"""fallback_quantize: kernels against the reference, bit for bit; what second codes are worth."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_triton.tiles import TileConfig
from jetfire.ops import int8_fallback_quantize, int8_quantize
from jetfire.reference.dequantize import dequantize
from jetfire.reference.fallback_quantize import threshold_of
from jetfire.reference.quantize import block_amax, spread

OP = registry.get("fallback_quantize")
KERNELS = ("triton", "torch")


def check(problem, inputs, name="triton", config=None):
    kernel, here = registry.get_kernel("fallback_quantize", name), Device.of(inputs["x"])
    config = config or kernel.default(problem, here)
    if (reason := kernel.legal(problem, config, here)) is not None:
        pytest.skip(reason)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_bit_equal(device, name, block, layout, m, n):
    problem = OP.Problem(m, n, block=block, layout=layout)
    check(problem, OP.inputs(problem, device, data="heavy"), name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_row_strided_views_of_every_dtype(device, dtype):
    problem = OP.Problem(45, 96, block=32, dtype=dtype, layout="both")
    wide = OP.inputs(OP.Problem(45, 128, block=32, dtype=dtype), device, data="outlier")
    check(problem, {**wide, "x": wide["x"][:, 1:97]})


@pytest.mark.parametrize("tile", [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 64, 16)])
def test_every_config_gives_the_same_bits(device, tile):
    problem = OP.Problem(70, 130, block=32, layout="both")
    check(problem, OP.inputs(problem, device, data="heavy"), config=TileConfig(*tile))


@pytest.mark.parametrize("threshold", [0.0, 1.0, math.inf, math.nan])
def test_special_values(device, threshold):
    """Blocks with NaN, ±Inf, zeros, the largest numbers; those that codes hold exactly."""
    problem = OP.Problem(32, 256, block=32, dtype="fp32", layout="both")
    inputs = OP.inputs(problem, device)
    x, largest = inputs["x"], torch.finfo(torch.float32).max
    for i, value in enumerate((math.nan, math.inf, -math.inf, largest)):
        x[7, 32 * i + 9] = value
    x[:, 128:160] = 0
    x[:, 160:192] = 127 * x[:, 160:192].sign()
    x[:, 192:224] *= 2.0**-98
    inputs["threshold"].fill_(threshold)
    check(problem, inputs)


def test_blocks_above_the_threshold_are_held_254_times_as_well(device):
    """They err by half a second step; the others have the codes of `quantize` alone."""
    torch.manual_seed(0)
    x = torch.randn((300, 400), device=device)
    x[200, 300] = 70.0
    first, second = int8_fallback_quantize(x, torch.tensor([20.0], device=device), block=128)
    plain = int8_quantize(x, block=128)
    assert torch.equal(first.q, plain.q)
    assert torch.equal(first.scale, plain.scale)
    assert second.scale.nonzero().tolist() == [[1, 2]]
    value = sum(dequantize(*part[:2], 128, torch.float64) for part in (first, second))
    error = block_amax((value - x.double()).abs(), 128)
    assert float(error[1, 2]) < 0.502 * 70 / 127 / 254
    assert bool((error <= 0.502 * plain.scale)[second.scale == 0].all())
    assert bool((second.q == 0)[spread(second.scale == 0, 128, *x.shape)].all())


@pytest.mark.parametrize("percent", [0, 5, 20, 50])
def test_a_threshold_is_of_a_share(device, percent):
    x = torch.randn((320, 320), device=device)
    second = int8_fallback_quantize(x, threshold_of(x, 32, percent), block=32)[1]
    assert int((second.scale != 0).sum()) == percent


def test_bad_inputs(device):
    x, one = torch.zeros((4, 8), device=device), torch.ones(1, device=device)
    with pytest.raises(UsageError, match="threshold: expected a float32 tensor of one element"):
        int8_fallback_quantize(x, torch.ones(2, device=device))
    with pytest.raises(UsageError, match="layout=t: expected q or qt or both"):
        int8_fallback_quantize(x, one, layout="t")
    with pytest.raises(UsageError, match="block=16: expected 32 or 64 or 128"):
        int8_fallback_quantize(x, one, block=16)
