"""The reference quantisation against facts that need none of our code."""

import math

import numpy as np
import pytest
import torch

from jetfire.core import registry
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize
from jetfire.reference.transpose import transpose

BLOCKS = [32, 64, 128]
SEED = torch.tensor([7])


@pytest.fixture(autouse=True)
def _same_values_every_run():
    torch.manual_seed(0)


def blocks_of(x, block):
    """Each block and its index, ragged ones at the edges as they are."""
    for i in range(0, x.shape[0], block):
        for j in range(0, x.shape[1], block):
            yield (i // block, j // block), x[i : i + block, j : j + block]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("data", ["normal", "outlier", "heavy", "gradient"])
def test_nearest_is_within_half_a_step(block, data):
    problem = registry.get("quantize").Problem(130, 200, block=block, dtype="fp32")
    x = registry.get("quantize").inputs(problem, torch.device("cpu"), data=data)["x"]
    q, scale = quantize(x, block)
    q64, x64, scales = q.numpy().astype(np.float64), x.numpy().astype(np.float64), scale.numpy()
    assert np.abs(q64).max() <= 127
    for (at, xb), (_, qb) in zip(blocks_of(x64, block), blocks_of(q64, block), strict=True):
        step = float(scales[at])
        assert step == np.float32(np.abs(xb).max()) / np.float32(127)
        # The product's two roundings in fp32 move a tie by at most 127·2^-23 of a step.
        assert np.abs(xb - qb * step).max() <= step * (0.5 + 127 * 2.0**-23)
        assert np.abs(xb).max() == 0 or np.abs(qb).max() == 127


@pytest.mark.parametrize("block", BLOCKS)
def test_stochastic_is_within_a_step(block):
    x = torch.randn(130, 200)
    q, scale = quantize(x, block, "stochastic", SEED)
    error = dequantize(q, scale, block, torch.float64) - x.double()
    bound = dequantize(torch.ones_like(q), scale, block, torch.float64)
    assert bool((error.abs() <= bound * (1 + 1e-4)).all())
    assert int(q.min()) >= -127
    assert int(q.max()) <= 127
    assert not torch.equal(q, quantize(x, block)[0])


def test_stochastic_is_unbiased():
    """The mean over seeds of q·scale is x, within four standard errors; of all elements, too."""
    x = torch.randn(32, 64)
    seeds = 2000
    total = torch.zeros(x.shape, dtype=torch.float64)
    for seed in range(seeds):
        q, scale = quantize(x, 32, "stochastic", torch.tensor([seed * 0x9E3779B97F4A7C15 % 2**63]))
        total += q
    t = x.double() / dequantize(torch.ones_like(q), scale, 32, torch.float64)
    fraction = t - t.floor()
    error = total / seeds - t
    # Draws of 16 bits know a fraction to 2^-16, and fall short of it by half of that on average.
    deviation = (fraction * (1 - fraction) / seeds).sqrt() + 2.0**-16
    z = error / deviation
    assert float((z.abs() > 4).double().mean()) < 5e-3
    assert abs(float(error.sum())) < 4 * float(deviation.square().sum().sqrt())


def test_ties_go_to_even():
    x = torch.zeros(32, 32)
    x[0, 0] = 127.0  # so that the scale is 1
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 3.5, 4.5])
    x[1, : len(ties)] = ties
    q, scale = quantize(x, 32)
    assert float(scale) == 1.0
    assert q[1, : len(ties)].tolist() == [0, 2, 2, 0, -2, -2, 126, -126, 4, 4]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_special_blocks(rounding):
    """Nine blocks of 32×32 in a row, each of one kind, apart from what its neighbours hold."""
    largest = float(np.finfo(np.float32).max)
    x = torch.randn(32, 288).clamp(-3, 3)
    x[:, 0:32] = 0.0
    x[:, 32:64] *= 1e-40  # subnormal
    x[:, 64:96] = 2.0**-100
    x[:, 96:128] = float(np.nextafter(np.float32(2.0**-100), np.float32(0)))
    x[5, 130] = math.nan
    x[5, 170] = math.inf
    x[5, 200] = -math.inf
    x[:, 224:256] = largest * torch.sign(x[:, 224:256])
    q, scale = quantize(x, 32, rounding, SEED)
    by_block = [q[:, i : i + 32] for i in range(0, 288, 32)]
    for zero in (0, 1, 3):
        assert float(scale[0, zero]) == 0.0
        assert not by_block[zero].any()
    assert float(scale[0, 2]) == np.float32(2.0**-100) / np.float32(127)
    assert by_block[2].eq(127).all()
    for bad in (4, 5, 6):
        assert math.isnan(float(scale[0, bad]))
        assert not by_block[bad].any()
    assert float(scale[0, 7]) == np.float32(largest) / np.float32(127)
    assert by_block[7].abs().eq(127).all()
    assert by_block[8].abs().max() == 127


def test_the_lowest_code_is_never_produced():
    """127/amax rounds up for about half of all amax; then amax itself scales beyond 127."""
    amax = 1 + torch.arange(2048) / 2048
    x = -amax.repeat_interleave(32).expand(32, -1).contiguous()
    for rounding in ("nearest", "stochastic"):
        q, _ = quantize(x, 32, rounding, SEED)
        assert int(q.min()) == -127


@pytest.mark.parametrize("block", BLOCKS)
def test_transposing_commutes_with_quantising(block):
    x = torch.randn(100, 170)
    q, scale = quantize(x, block)
    qt, scale_t = transpose(q, scale)
    again, again_scale = quantize(x.t().contiguous(), block)
    assert torch.equal(qt, again)
    assert torch.equal(scale_t, again_scale)


def test_ragged_edges_are_logical_zeros():
    x = torch.randn(45, 70)
    padded = torch.zeros(64, 96)
    padded[:45, :70] = x
    q, scale = quantize(x, 32)
    wide, wide_scale = quantize(padded, 32)
    assert torch.equal(q, wide[:45, :70])
    assert torch.equal(scale, wide_scale)
    assert not wide[45:].any()


def test_stochastic_rounding_needs_a_seed():
    with pytest.raises(ValueError, match="needs a seed"):
        quantize(torch.ones(4, 4), 32, "stochastic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_rounds_once(dtype):
    q, scale = quantize(torch.randn(40, 70), 32)
    x = dequantize(q, scale, 32, dtype)
    for (at, qb), (_, xb) in zip(blocks_of(q, 32), blocks_of(x, 32), strict=True):
        exact = qb.numpy().astype(np.float64) * float(scale[at])
        product = torch.from_numpy(exact.astype(np.float32))
        assert torch.equal(xb, product.to(dtype))
