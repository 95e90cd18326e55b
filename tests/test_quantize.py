"""quantize: kernels against the reference, bit for bit."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.tensors import Quantized
from jetfire.core.workloads import RAGGED
from jetfire.ops import int8_quantize

OP = registry.get("quantize")
KERNEL = registry.get_kernel("quantize", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["x"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
def test_triton_is_bit_equal(device, block, rounding, layout, m, n):
    problem = OP.Problem(m, n, block=block, rounding=rounding, layout=layout)
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views_of_every_dtype(device, dtype, rounding, offset):
    """A view into wider rows, aligned and not."""
    problem = OP.Problem(45, 96, dtype=dtype, rounding=rounding, layout="both")
    wide = OP.inputs(OP.Problem(45, 128, dtype=dtype, rounding=rounding), device, data="outlier")
    check(problem, {**wide, "x": wide["x"][:, offset : offset + 96]})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_special_values(device, dtype, rounding):
    """Blocks with NaN, ±Inf, zeros, subnormals, the largest numbers, both sides of 2^-100."""
    problem = OP.Problem(32, 352, dtype=dtype, rounding=rounding, layout="both")
    inputs = OP.inputs(problem, device)
    x = inputs["x"]
    largest = torch.finfo(x.dtype).max
    for i, value in enumerate((math.nan, math.inf, -math.inf)):
        x[7, 32 * i + 9] = value
    x[:, 96:128] = 0
    x[:, 128:160] *= torch.finfo(x.dtype).smallest_normal / 8
    x[:, 160:192] = torch.where(x[:, 160:192] > 0, largest, -largest)
    x[:, 192:224] = 2.0**-100
    x[:, 224:256] = 2.0**-100 * (1 - torch.finfo(x.dtype).eps / 2)
    x[:, 256:288] = -(2.0**-100) * (1 + torch.finfo(x.dtype).eps)
    x[:, 288:320] *= 2.0**100
    x[3, 330] = math.nan
    x[4, 340] = math.inf
    check(problem, inputs)


def test_scales_are_correctly_rounded_for_every_exponent(device):
    """127/amax and amax/127 over amax from 2^-100 to the largest, through a code of 127·x/amax."""
    exponents = torch.arange(-100, 128, device=device).float()
    mantissa = 1 + torch.rand((32, 228), device=device).div(1.0001)
    x = (mantissa * torch.exp2(exponents)).repeat_interleave(32, 1).contiguous()
    x *= torch.rand_like(x) * 0.5 + 0.5
    problem = OP.Problem(*x.shape, dtype="fp32", rounding="stochastic")
    seed = torch.tensor([5], device=device)
    check(problem, {"x": x, "seed": seed})


@pytest.mark.parametrize("layout", ["q", "both"])
def test_every_config_gives_the_same_bits(device, layout):
    problem = OP.Problem(70, 130, rounding="stochastic", layout=layout)
    inputs = OP.inputs(problem, device)
    tiles = [(32, 32, 1), (32, 128, 4, 40), (64, 64, 2, 64), (128, 32, 8), (64, 256, 16)]
    for tile in tiles:
        check(problem, inputs, KERNEL.Config(*tile))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tile_m": 48}, "tile_m=48: expected a power of two that is a multiple of 32"),
        ({"tile_n": 16}, "tile_n=16: expected a power of two that is a multiple of 32"),
        ({"warps": 3}, "warps=3: expected 1, 2, 4, 8, 16 or 32"),
        ({"registers": 16}, "registers=16: expected 24 to 255"),
        ({"registers": 65, "warps": 32}, "registers=65 warps=32: an SM has 65536 registers"),
        ({"tile_m": 256, "tile_n": 256, "warps": 1}, "2048 elements per thread"),
    ],
)
def test_an_illegal_config_is_refused_with_its_reason(device, config, reason):
    problem = OP.Problem(64, 64)
    inputs = OP.inputs(problem, device)
    with pytest.raises(UsageError, match=reason):
        launch(KERNEL, problem, KERNEL.Config(**config), inputs, OP.outputs(problem, inputs))


@pytest.mark.parametrize("registers", [64, 255])
def test_a_program_may_take_all_registers_of_an_sm(registers):
    """As 32 warps of 64 registers do; 255 is no limit."""
    config = KERNEL.Config(64, 64, 32, registers)
    assert KERNEL.legal(OP.Problem(64, 64), config, target_device((9, 0))) is None


def test_peers_quantise_alike():
    """The torch peer's codes are the reference's but for its roundings in BF16."""
    problem = OP.Problem(100, 200, layout="both")
    inputs = OP.inputs(problem, torch.device("cpu"))
    q, scale, qt, scale_t = OP.peers(problem, inputs)["eager"]()()
    expected = OP.reference(problem, inputs)
    assert int((q.int() - expected["q"].int()).abs().max()) <= 1
    assert torch.equal(qt, q.t())
    assert torch.allclose(scale, expected["scale"])
    assert torch.equal(scale_t, scale.t())


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_ragged(device, size, block, layout, rounding):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, block=block, rounding=rounding, layout=layout)
        check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.gpu
def test_every_reciprocal_is_correctly_rounded(device):
    """All 2^23 mantissas of amax, at exponents of both branches, one 32×32 block each."""
    mantissas = torch.arange(0, 2**23, 61, device=device, dtype=torch.int32)
    for exponent in (127 - 100, 127, 127 + 64, 127 + 127):
        amax = (mantissas | exponent << 23).view(torch.float32)
        x = torch.zeros((32, 32 * len(amax)), device=device)
        x[0, ::32] = amax
        x[1:, :] = torch.rand((31, 1), device=device) * amax.repeat_interleave(32)
        check(OP.Problem(*x.shape, dtype="fp32"), {"x": x})


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["q", "qt"])
def test_more_than_two_to_the_31_elements(device, layout):
    """65537×32769: the last rows' offsets need 64 bits."""
    m, n = 65537, 32769
    problem = OP.Problem(m, n, layout=layout, rounding="stochastic")
    x = torch.empty((m, n), dtype=torch.bfloat16, device=device)
    for rows in x.split(4096):
        rows.normal_()
    inputs = {"x": x, "seed": torch.tensor([3], device=device)}
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(x)), inputs, outputs)
    name = {"q": ("q", "scale"), "qt": ("qt", "scale_t")}[layout]
    q, scale = (outputs[k] if layout == "q" else outputs[k].t() for k in name)
    from jetfire.reference.philox import random_u16
    from jetfire.reference.quantize import scales, spread

    for top in (0, 32768, 65536 - 32, 65536):
        part = x[top : top + 32].float()
        expected_scale, multiplier = scales(part, 32)
        u = random_u16(inputs["seed"], len(part), n, row0=top).float() / 65536
        codes = (part * spread(multiplier, 32, *part.shape) + u).floor().clamp(-127, 127)
        assert torch.equal(q[top : top + 32], codes.to(torch.int8))
        assert torch.equal(scale[top // 32 : top // 32 + 1], expected_scale)


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_codes_are_written_where_one_says(device, layout):
    x, options = torch.randn(40, 70, device=device), {"block": 64, "layout": layout}
    expected = int8_quantize(x, **options)
    room = Quantized(*(None if t is None else torch.empty_like(t) for t in expected[:4]), block=64)
    assert int8_quantize(x, **options, out=room) is room
    for found, part in zip(room.tensors, expected.tensors, strict=True):
        assert torch.equal(found, part)


def test_room_that_does_not_fit_is_refused():
    room = int8_quantize(torch.randn(40, 70))
    for x, options in ((torch.randn(40, 71), {}), (torch.randn(40, 70), {"layout": "both"})):
        with pytest.raises(UsageError, match=r"^out: expected q int8 \(40, 7"):
            int8_quantize(x, **options, out=room)
    x = torch.randn(40, 70)
    shared = Quantized(x.view(torch.int8)[:, :70], room.scale)
    with pytest.raises(UsageError, match="contiguous"):
        int8_quantize(x, out=shared)
