"""hadamard_restore: the reference against what codes stand for, kernels against the reference."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_triton.tiles import TileConfig
from jetfire.ops import int4_quantize, int4_restore, int8_dequantize
from jetfire.reference import hadamard
from jetfire.reference.hadamard_restore import hadamard_restore
from jetfire.reference.nibbles import narrow

OP = registry.get("hadamard_restore")
KERNEL = registry.get_kernel("hadamard_restore", "triton")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["wide"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("group", [1, 16, 64, 256])
def test_the_reference_is_what_the_codes_stand_for(group):
    """To within half a step of INT8: of a block's largest number over 127."""
    problem = OP.Problem(70, 256, group=group, block=32)
    inputs = OP.inputs(problem, torch.device("cpu"))
    exact = hadamard.transform(narrow(inputs["wide"]).double() * inputs["step"].double(), group)
    qt, scale_t = hadamard_restore(**inputs, group=group, block=32)
    unit = scale_t.t().double().repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)
    assert ((qt.t() * unit - exact).abs() <= unit * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize(
    ("m", "n", "group", "block"),
    [(1, 2, 2, 32), (70, 96, 32, 128), (33, 200, 8, 64), (130, 256, 128, 128), (9, 33, 1, 32)],
)
def test_kernels_give_the_reference_bits(device, kernel, m, n, group, block):
    device = torch.device("cpu") if kernel == "torch" else device
    problem = OP.Problem(m, n, group=group, block=block)
    chosen = registry.get_kernel("hadamard_restore", kernel)
    check(problem, OP.inputs(problem, device, data="heavy"), kernel=chosen)


@pytest.mark.parametrize("group", [256, 1024])
def test_groups_wider_than_a_tile(device, group):
    problem = OP.Problem(40, 1024, group=group)
    check(problem, OP.inputs(problem, device, data="outlier"))


@pytest.mark.parametrize("tile", [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 64, 16)])
@pytest.mark.parametrize("group", [32, 128])
def test_every_config_gives_the_same_bits(device, tile, group):
    problem = OP.Problem(70, 256, group=group, block=32)
    check(problem, OP.inputs(problem, device), TileConfig(*tile))


def test_what_an_sm_has_no_room_for_is_refused():
    """Of registers, and of shared memory for a transform."""
    device = target_device((9, 0))

    def why(tile, group):
        return KERNEL.legal(OP.Problem(64, 1024, group=group, block=32), TileConfig(*tile), device)

    assert "expected one of the two to be at most 128" in why((64, 256, 16), 256)
    assert "warps=32" in why((256, 128, 32), 1024)
    assert why((256, 128, 16), 1024) is None
    assert why((32, 1024, 16), 32) is None


def test_row_strided_codes(device):
    problem = OP.Problem(45, 96)
    inputs = OP.inputs(OP.Problem(45, 160), device)
    for offset in (0, 1, 64):
        check(problem, inputs | {"wide": inputs["wide"][:, offset : offset + 96]})


@pytest.mark.parametrize("step", [0.0, math.nan, math.inf])
def test_a_step_that_is_none_shows_in_all_scales(device, step):
    problem = OP.Problem(40, 64)
    inputs = OP.inputs(problem, device)
    inputs["step"].fill_(step)
    check(problem, inputs)
    scale = OP.reference(problem, inputs)["scale_t"]
    assert bool((scale == 0).all() if step == 0 else (~scale.isfinite()).all())


def test_the_function_and_its_operator(device):
    x = torch.randn(70, 96, device=device)
    codes = int4_quantize(x, torch.tensor([0.3352], device=device), layout="wide")
    restored = int8_dequantize(int4_restore(codes), out="fp32")
    assert restored.shape == (96, 70)
    assert float((restored.t() - x).norm() / x.norm()) < 0.13
    arguments = (codes.wide, codes.scale, 32, 128)
    torch.library.opcheck(torch.ops.jetfire.hadamard_restore.default, arguments)
    compiled = torch.compile(int4_restore, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(codes).q, int4_restore(codes).q)
    with pytest.raises(UsageError, match="x lacks wide codes: expected layout=wide or both"):
        int4_restore(codes._replace(wide=None))


def test_what_is_refused():
    with pytest.raises(UsageError, match="group=32 with n=40: expected a divisor of n"):
        OP.Problem(4, 40)
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (((64, 128, 8), "tile_m=64"), ((128, 128, 3), "warps=3")):
        assert reason in KERNEL.legal(problem, TileConfig(*config), h200)
    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None
