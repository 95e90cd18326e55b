"""hadamard_quantize_codes: the reference against float64, kernels against the reference."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.ops import int4_quantize, int4_quantize_codes, int8_dequantize, int8_quantize
from jetfire.reference import hadamard
from jetfire.reference.hadamard_quantize_codes import quantize_codes
from jetfire.reference.nibbles import unpack

OP = registry.get("hadamard_quantize_codes")
KERNEL = registry.get_kernel("hadamard_quantize_codes", "triton")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["q"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(problem, inputs):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(inputs["q"])), inputs, outputs)
    return outputs


@pytest.mark.parametrize(("block", "group"), [(32, 1), (32, 32), (64, 4), (128, 128)])
def test_codes_are_those_of_float64(block, group):
    """But where a value is nearly a tie."""
    generator = torch.Generator().manual_seed(0)
    codes = int8_quantize(torch.randn(70, 256, generator=generator), block=block)
    x = int8_dequantize(codes, out="fp32").double()
    h = torch.block_diag(*[hadamard.matrix(group)] * (256 // group))
    step = hadamard.initial_step((x @ h).float()) / 2
    q, unit, squares = quantize_codes(codes.q, codes.scale, step, block, group)
    v = x @ h / step
    tie = ((v % 1.0) - 0.5).abs() < 1e-4
    assert torch.equal(unit, step)
    assert torch.equal(q.double()[~tie], v.round().clamp(-8, 7)[~tie])
    assert torch.equal(squares, q.int().square().sum(1).int())
    assert q.min() == -8


@pytest.mark.parametrize("layout", ["packed", "wide", "both"])
@pytest.mark.parametrize(
    ("m", "n", "block", "group", "data"),
    [
        (1, 2, 32, 1, "normal"),
        (33, 70, 32, 2, "heavy"),
        (70, 288, 32, 32, "gradient"),
        (130, 320, 64, 64, "outlier"),
        (40, 384, 128, 128, "normal"),
        (37, 1056, 128, 8, "normal"),
    ],
)
def test_triton_gives_the_reference_bits(device, m, n, block, group, data, layout):
    problem = OP.Problem(m, n, block=block, group=group, layout=layout)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("layout", ["packed", "wide", "both"])
def test_the_cpu_kernel_gives_the_reference_bits(layout):
    problem = OP.Problem(33, 96, layout=layout)
    kernel = registry.get_kernel("hadamard_quantize_codes", "torch")
    check(problem, OP.inputs(problem, torch.device("cpu"), data="heavy"), kernel=kernel)


@pytest.mark.parametrize("config", [(4, 128, 1), (16, 128, 2), (8, 1024, 16), (32, 128, 4)])
def test_every_config(device, config):
    problem = OP.Problem(45, 608, layout="both")
    check(problem, OP.inputs(problem, device, data="heavy"), KERNEL.Config(*config))


def test_row_strided_views(device):
    problem = OP.Problem(9, 64)
    inputs = OP.inputs(problem, device)
    wide = OP.inputs(OP.Problem(9, 128), device)["q"].flatten()
    for offset, stride in [(0, 90), (1, 97), (4, 96)]:
        inputs["q"] = wide[offset : offset + 9 * stride].view(9, stride)[:, :64]
        check(problem, inputs)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 9)])
def test_a_fault_shows_in_the_unit(device, fault, place):
    problem = OP.Problem(40, 320)
    inputs = OP.inputs(problem, device)
    inputs["scale"][place] = fault
    check(problem, inputs)
    assert launched(problem, inputs)["unit"].isnan().all()


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf, 2.0**-149])
def test_a_step_that_is_none_gives_zeros(device, step):
    problem = OP.Problem(40, 64)
    inputs = OP.inputs(problem, device)
    inputs["step"].fill_(step)
    check(problem, inputs)
    outputs = launched(problem, inputs)
    assert outputs["unit"].isnan().all()
    assert not outputs["packed"].any()


def test_values_that_overflow_are_clipped(device):
    problem = OP.Problem(40, 64)
    inputs = OP.inputs(problem, device)
    inputs["scale"].fill_(2.0**120)
    inputs["step"].fill_(2.0**-100)
    check(problem, inputs)


def test_repeats_bit_for_bit_and_leaves_its_counters_at_zero(device):
    problem = OP.Problem(70, 320, layout="both")
    inputs = OP.inputs(problem, device, data="heavy")
    first = launched(problem, inputs)
    launched(problem, {**inputs, "scale": inputs["scale"] * math.nan})
    second = launched(problem, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_codes_are_those_of_what_they_stand_for(device):
    """A float is rounded in between: few codes differ, by one."""
    generator = torch.Generator().manual_seed(0)
    x = int8_quantize(torch.randn(64, 256, generator=generator).to(device))
    step = torch.full((1,), 0.3, device=device)
    found = int4_quantize_codes(x, step, layout="both")
    plain = int4_quantize(int8_dequantize(x, out="fp32"), step, layout="both")
    ours, theirs = (unpack(codes.packed).int() for codes in (found, plain))
    assert (ours - theirs).abs().max() <= 1
    assert (ours != theirs).double().mean() < 1e-3
    assert torch.equal(found.scale, plain.scale)
    assert torch.equal(found.wide.int(), ours << 4)


def test_what_is_refused():
    with pytest.raises(UsageError, match="group=32: expected a power of two"):
        OP.Problem(4, 70)
    with pytest.raises(UsageError, match="group=64: expected at most block=32"):
        OP.Problem(4, 64, group=64)
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((3, 512, 4), "tile_m=3"),
        ((64, 128, 4), "tile_m=64"),
        ((4, 64, 4), "tile_n=64"),
        ((4, 512, 3), "warps=3"),
        ((2, 128, 1), "8 transforms in a tile"),
        ((4, 1024, 16), "warps=16: expected at most 8 for 128 transforms"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None
