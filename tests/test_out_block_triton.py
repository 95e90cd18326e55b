"""Pairs of blocks (`out_block`) in the Triton kernels of elementwise ops."""

import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import verify

BLOCKS = (32, 64, 128)
ALL = list(itertools.product(BLOCKS, repeat=2))
UNEQUAL = [pair for pair in ALL if pair[0] != pair[1]]
CASES = list(itertools.product(("add", "dropout", "gelu", "swiglu"), ("fwd", "bwd")))
RAGGED = [(1, 1), (31, 257), (129, 32), (128, 128)]


def problem_of(name, mode, pair, m=140, n=200, **fields):
    op = registry.get(name)
    known = op.Problem.__dataclass_fields__
    fields = {key: value for key, value in fields.items() if key in known}
    block, out_block = pair
    shape = {"m": m, "n": n, "block": block, "out_block": out_block}
    return op.problems(mode, {**shape, **fields})[0]


def verified(name, problem, device, data="heavy", config=None, change=lambda inputs: None):
    op, kernel = registry.get(name), registry.get_kernel(name, "triton")
    inputs = op.inputs(problem, device, data=data)
    change(inputs)
    config = config or kernel.default(problem, Device.of(inputs[next(iter(inputs))]))
    found = verify(op, kernel, problem, config, inputs)
    assert found.ok, f"{problem}, {config}, {data}: {found.message}"


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", ALL)
def test_every_pair(device, name, mode, pair):
    for layout, rounding, data in (
        ("both", "stochastic", "nonfinite"),
        ("qt", "nearest", "largest"),
        ("q", "nearest", "heavy"),
    ):
        fields = {"layout": layout, "rounding": rounding}
        fields["approximate"] = "erf" if layout == "q" else "tanh"
        verified(name, problem_of(name, mode, pair, **fields), device, data)


def far_apart(inputs):
    """Draw scales over all magnitudes: those of blocks read into one may be 10^76 apart."""
    generator = torch.Generator().manual_seed(7)
    for name in inputs:
        if name.endswith("scale"):
            exponent = torch.rand(inputs[name].shape, generator=generator).double() * 76 - 38
            inputs[name].copy_(torch.pow(10.0, exponent).float())


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", UNEQUAL)
def test_scales_far_apart(device, name, mode, pair):
    verified(name, problem_of(name, mode, pair), device, change=far_apart)


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", [(32, 128), (128, 32)])
def test_ragged(device, name, mode, pair):
    for m, n in RAGGED:
        verified(name, problem_of(name, mode, pair, m, n, layout="both"), device)


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", [(32, 128), (128, 32), (128, 64)])
@pytest.mark.parametrize("tile", [(32, 32, 2), (64, 256, 8), (256, 128, 16)])
def test_other_tiles(device, name, mode, pair, tile):
    """A tile may be smaller than the blocks that are read, where the op says so.

    gelu has no tile of 256×128: a thread of 16 warps would hold 64 codes.
    """
    problem = problem_of(name, mode, pair, layout="both")
    kernel = registry.get_kernel(name, "triton")
    config = kernel.Config(*tile)
    reason = kernel.legal(problem, config, Device(kind="cuda", capability=(9, 0)))
    if reason is None:
        verified(name, problem, device, config=config)
    else:
        few = name == "gelu" and reason == "64 codes per thread: expected 1 to 32"
        assert tile[0] < max(pair) or few


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", UNEQUAL)
def test_large(device, name, mode, pair):
    for layout, rounding in itertools.product(("q", "qt", "both"), ("nearest", "stochastic")):
        problem = problem_of(name, mode, pair, 4096, 8192, layout=layout, rounding=rounding)
        verified(name, problem, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("pair", UNEQUAL)
@pytest.mark.parametrize("data", ["largest", "nonfinite", "heavy"])
def test_every_ragged_size(device, name, mode, pair, data):
    for size in (1, 31, 33, 127, 129, 255, 300):
        for m, n in ((size, 100), (100, size)):
            verified(name, problem_of(name, mode, pair, m, n, layout="both"), device, data)
