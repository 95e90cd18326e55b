"""hadamard_unpack: kernels against the reference, bit for bit; the mean is what was packed."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_triton.tiles import TileConfig
from jetfire.ops import int4_pack, int4_unpack, int8_dequantize, int8_quantize

OP = registry.get("hadamard_unpack")
KERNELS = ("triton", "torch")


def check(problem, inputs, name="triton", config=None):
    kernel, here = registry.get_kernel("hadamard_unpack", name), Device.of(inputs["packed"])
    config = config or kernel.default(problem, here)
    if (reason := kernel.legal(problem, config, here)) is not None:
        pytest.skip(reason)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_bit_equal(device, name, block, m, n):
    problem = OP.Problem(m, n, block=block)
    check(problem, OP.inputs(problem, device, data="heavy"), name)


@pytest.mark.parametrize("tile", [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 64, 16)])
def test_every_config_gives_the_same_bits(device, tile):
    problem = OP.Problem(70, 130)
    check(problem, OP.inputs(problem, device), config=TileConfig(*tile))


def test_row_strided_tensors(device):
    problem = OP.Problem(45, 96)
    inputs = OP.inputs(OP.Problem(45, 128), device)
    parts = {"packed": (1, 49), "steps": (1, 4), "scale": (1, 4)}
    check(problem, inputs | {name: inputs[name][:, slice(*at)] for name, at in parts.items()})


def test_scales_of_any_size(device):
    """NaN, 0, the least that quantising makes, and a large one."""
    problem = OP.Problem(32, 160, block=32)
    inputs = OP.inputs(problem, device)
    inputs["scale"][0, :4] = torch.tensor([math.nan, 0.0, 2.0**-107, 2.0**114])
    check(problem, inputs)
    scale = OP.reference(problem, inputs)["scale_t"].flatten()
    assert scale.isnan().tolist() == [True, False, False, False, False]
    assert float(scale[1]) == 0


@pytest.mark.parametrize("n", [96, 75])
def test_the_mean_is_what_was_packed(device, n):
    """Over seeds of both; the other codes of a block are of the same mean, not of equal bits."""
    torch.manual_seed(0)
    x = int8_quantize(torch.randn((64, n), device=device).exp(), block=32)
    seeds = torch.arange(800, device=device)
    found = []
    for a, b in seeds.view(-1, 2, 1):
        xt = int4_unpack(*int4_pack(x.q, a), x.scale, b, n=n, block=32)
        found.append(int8_dequantize(xt, out="fp32"))
    error = (torch.stack(found) - int8_dequantize(x, out="fp32").t()).double()
    deviation = error.std(0)
    assert bool((error.mean(0).abs() < 5.5 * deviation / math.sqrt(len(found))).all())


def test_bad_inputs(device):
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    x = int8_quantize(torch.zeros((4, 8), device=device))
    packed, steps = int4_pack(x.q, seed)
    with pytest.raises(UsageError, match=r"steps is float32 \(4, 1\): expected int8 \(4, 1\)"):
        int4_unpack(packed, steps.float(), x.scale, seed, n=8)
    with pytest.raises(UsageError, match=r"packed is int8 \(4, 16\): expected int8 \(4, 32\)"):
        int4_unpack(packed, steps, x.scale, seed, n=40)
    with pytest.raises(UsageError, match="block=16: expected 32 or 64 or 128"):
        int4_unpack(packed, steps, x.scale, seed, n=8, block=16)
    with pytest.raises(UsageError, match="seed: expected an int64 tensor"):
        int4_unpack(packed, steps, x.scale, seed.float(), n=8)
