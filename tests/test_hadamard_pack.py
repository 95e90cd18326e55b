"""hadamard_pack: kernels against the reference, bit for bit; what 4 bits keep of INT8 codes."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_triton.tiles import TileConfig
from jetfire.ops import int4_pack
from jetfire.reference import hadamard_pack as reference
from jetfire.reference.hadamard import matrix
from jetfire.reference.hadamard_pack import hadamard_pack
from jetfire.reference.nibbles import unpack
from jetfire.reference.quantize import quantize

OP = registry.get("hadamard_pack")
KERNELS = ("triton", "torch")


def check(problem, inputs, name="triton", config=None):
    kernel, here = registry.get_kernel("hadamard_pack", name), Device.of(inputs["q"])
    config = config or kernel.default(problem, here)
    if (reason := kernel.legal(problem, config, here)) is not None:
        pytest.skip(reason)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def restored(packed, steps):
    """The integers that packed codes stand for, by a product in float64."""
    codes = unpack(packed).double().unflatten(1, (-1, 32)) * steps.double()[:, :, None]
    h = (reference.signs()[:, None].double() * matrix(32)).to(packed.device)
    return (codes @ h.t() * (32**0.5 / 7)).flatten(1)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (5, 64), (127, 200)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_bit_equal(device, name, m, n):
    problem = OP.Problem(m, n)
    check(problem, OP.inputs(problem, device, data="heavy"), name)


@pytest.mark.parametrize("tile", [(32, 32, 1), (32, 256, 4), (64, 64, 2), (128, 64, 16)])
def test_every_config_gives_the_same_bits(device, tile):
    problem = OP.Problem(70, 130)
    check(problem, OP.inputs(problem, device), config=TileConfig(*tile))


def test_row_strided_codes(device):
    problem = OP.Problem(45, 96)
    inputs = OP.inputs(OP.Problem(45, 128), device)
    check(problem, {**inputs, "q": inputs["q"][:, 1:97]})


def test_the_largest_sums(device):
    """Codes of ±127 alone, in the signs of a row of the matrix: one number, of 32·127."""
    h = reference.signs() * (matrix(32)[5] * 32**0.5).float()
    q = torch.stack((127 * h, -127 * h, 0 * h)).to(device, torch.int8)
    problem = OP.Problem(3, 32)
    inputs = {**OP.inputs(problem, device), "q": q}
    check(problem, inputs)
    packed, steps = hadamard_pack(q, inputs["seed"])
    assert steps.flatten().tolist() == [127, 127, 0]
    assert unpack(packed)[:, 5].tolist() == [7, -7, 0]
    assert int(unpack(packed).abs().sum()) == 14


def test_the_mean_is_what_was_packed(device):
    torch.manual_seed(0)
    q = torch.randint(-127, 128, (4, 96), dtype=torch.int8, device=device)
    q[1] = 40 + q[1] // 8  # with a mean
    q[2, ::7] = 127  # with outliers
    draws = 2000
    packed, steps = int4_pack(q.repeat(draws, 1), torch.tensor([5], device=device))
    error = restored(packed, steps).unflatten(0, (draws, 4)) - q.double()
    deviation = error.std(0)
    assert float(deviation.max()) > 1
    assert bool((error.mean(0).abs() < 5 * deviation / math.sqrt(draws) + 1e-3).all())


def test_a_mean_costs_no_more_than_none(monkeypatch):
    """By the signs, without which GELU's outputs lose 1.3 dB more."""
    torch.manual_seed(0)
    normal, seed = torch.randn((256, 512)), torch.tensor([1])

    def decibels(x):
        q = quantize(x, 128)[0]
        error = restored(*hadamard_pack(q, seed)) - q.double()
        return 10 * math.log10(q.double().square().sum() / error.square().sum())

    outputs = torch.nn.functional.gelu(normal)
    assert decibels(normal) > 16.5
    assert (found := decibels(outputs)) > 16.5
    monkeypatch.setattr(reference, "signs", lambda: torch.ones(32))
    assert decibels(outputs) == pytest.approx(found - 1.3, abs=0.2)


def test_bytes_per_element(device):
    q = torch.zeros((256, 512), dtype=torch.int8, device=device)
    size = sum(t.nbytes for t in int4_pack(q, torch.tensor([1], device=device)))
    assert size == 256 * 512 * (1 / 2 + 1 / 32)


def test_bad_inputs(device):
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(UsageError, match="q is float32: expected int8"):
        int4_pack(torch.zeros((4, 8), device=device), seed)
    with pytest.raises(UsageError, match="seed: expected an int64 tensor of one element"):
        int4_pack(torch.zeros((4, 8), dtype=torch.int8, device=device), seed.float())
