"""bit_split_codes: the reference against bit_split's properties, kernels against the reference."""

import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.ops import int4_bit_split_codes, int4_bit_split_codes_sums, int8_quantize
from jetfire.reference.bit_split_codes import bit_split_codes, column_sums, unit_of
from jetfire.reference.dequantize import dequantize
from jetfire.reference.nibbles import unpack

OP = registry.get("bit_split_codes")
KERNEL = registry.get_kernel("bit_split_codes", "triton")
CPU = registry.get_kernel("bit_split_codes", "torch")
ROWS = registry.get_kernel("bit_split_codes", "rows")


def seed_of(value):
    return torch.tensor([value], dtype=torch.int64)


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["q"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(problem, inputs, kernel=KERNEL):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, kernel.default(problem, Device.of(inputs["q"])), inputs, outputs)
    return outputs


def codes_of(m, n, block=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=generator) * torch.rand(m, 1, generator=generator)
    return int8_quantize(x, block=block)


def test_the_parts_make_up_the_gradient():
    """Each element to within a unit; each part to four bits without -8; and their squares."""
    codes = codes_of(70, 100)
    x = dequantize(codes.q, codes.scale, 32)
    parts, unit, squares = bit_split_codes(codes.q, codes.scale, 32, seed=seed_of(5))
    parts = unpack(parts)
    assert parts.abs().max() == 7
    assert float(unit) == pytest.approx(float(x.abs().max()) / 98, rel=1e-6)
    error = (14 * parts[:70].double() + parts[70:]) * unit.double() - x
    assert error.abs().max() < unit.double() * (1 + 1e-5)
    assert torch.equal(squares, parts.int().square().sum(1).int())


def test_splitting_is_unbiased():
    """Within four standard errors of an element v units in size, which is floor(v) or one more."""
    codes, draws = codes_of(6, 10), 600
    unit = unit_of(codes.scale, 8)
    v = dequantize(codes.q, codes.scale, 32).double() / unit.double()
    total = torch.zeros_like(v)
    for seed in range(draws):
        parts, *_ = bit_split_codes(codes.q, codes.scale, 32, seed=seed_of(seed))
        parts = unpack(parts).double()
        total += 14 * parts[:6] + parts[6:]
    above = v - v.floor()
    error = (above * (1 - above) / draws).sqrt()
    assert ((total / draws - v).abs() <= 4 * error + 2e-5).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_code_of_any_scale_is_in_range(bits):
    """1/unit and both products are rounded: still 98, or 7, at most, and a few units in 2^24."""
    generator = torch.Generator().manual_seed(0)
    q = torch.tensor([[127, -127]], dtype=torch.int8)
    for exponent in (-99, -20, 0, 60, 120):
        for top in (1 + torch.rand(64, generator=generator)) * 2.0**exponent:
            parts, *_ = bit_split_codes(q, top.reshape(1, 1), 32, bits, seed_of(1))
            found = unpack(parts).int()
            assert found[0].tolist() == [7, -7]
            assert bits == 4 or found[1].abs().max() <= 1


def test_four_bits_are_the_nearest():
    codes = codes_of(40, 30)
    x = dequantize(codes.q, codes.scale, 32)
    parts, unit, _ = bit_split_codes(codes.q, codes.scale, 32, 4)
    assert ((unpack(parts) * unit - x).abs() <= unit / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("block", [32, 128])
def test_column_sums_are_those_of_float64(block):
    """To half of 2^-31 of the unit for each code of a block, and a rounding of the sum."""
    codes = codes_of(300, 70, block)
    unit = unit_of(codes.scale, 8)
    found = column_sums(codes.q, codes.scale, unit, block)
    x = dequantize(codes.q, codes.scale, block).double()
    # A ratio of scales has two roundings of fp32.
    most = 300 * 127 * 2.0**-32 * unit.double() + x.abs().sum(0) * 2.0**-23
    error = (found - x.sum(0)).abs()
    assert (error <= most + found.abs() * 2.0**-24).all()
    assert found.any()


def test_column_sums_do_not_depend_on_the_order_of_blocks():
    codes = codes_of(256, 64)
    unit = unit_of(codes.scale, 8)
    q, scale = codes.q.view(8, 32, 64), codes.scale
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    found = column_sums(q[order].reshape(256, 64), scale[order], unit, 32)
    assert torch.equal(found, column_sums(codes.q, scale, unit, 32))


SHAPES = pytest.mark.parametrize(
    ("m", "n", "block", "data"),
    [
        (1, 2, 32, "normal"),
        (33, 70, 32, "heavy"),
        (140, 144, 64, "gradient"),
        (130, 300, 128, "normal"),
        (5, 1536, 32, "outlier"),
    ],
)


@pytest.mark.parametrize("bits", [8, 4])
@SHAPES
def test_triton_gives_the_reference_bits(device, m, n, block, data, bits):
    problem = OP.Problem(m, n, block=block, bits=bits)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@SHAPES
def test_cuda_gives_the_reference_bits(device, m, n, block, data, bits, sums):
    problem = OP.Problem(m, n, block=block, bits=bits, sums=sums)
    check(problem, OP.inputs(problem, device, data=data), kernel=ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(70, 304), (45, 1100), (100, 4096)])
def test_every_config_of_cuda(device, m, n):
    problem = OP.Problem(m, n, sums=True)
    inputs = OP.inputs(problem, device, data="heavy")
    expected, tried = OP.reference(problem, inputs), 0
    for values in itertools.product(*ROWS.choices.values()):
        config = ROWS.Config(*values)
        if ROWS.legal(problem, config, Device.of(inputs["q"])) is None:
            result = verify(OP, ROWS, problem, config, inputs, expected)
            assert result.ok, f"{config}: {result.message}"
            tried += 1
    assert tried == 36


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(8192, 4096), (8192, 3072), (8191, 1024), (70000, 96)])
def test_whole_layers(device, m, n):
    problem = OP.Problem(m, n, sums=True)
    check(problem, OP.inputs(problem, device, data="gradient"), kernel=ROWS)


@pytest.mark.gpu
def test_replays_in_a_graph(device):
    problem = OP.Problem(300, 640, sums=True)
    inputs = OP.inputs(problem, device, data="heavy")
    outputs, config = OP.outputs(problem, inputs), ROWS.default(problem, Device.of(inputs["q"]))
    launch(ROWS, problem, config, inputs, outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(ROWS, problem, config, inputs, outputs)
    for factor in (0.5, 4.0):
        inputs["scale"].mul_(factor)
        OP.poison(problem, outputs)
        graph.replay()
        assert OP.check(problem, outputs, OP.reference(problem, inputs)).ok


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_cpu_kernel_gives_the_reference_bits(bits, sums):
    problem = OP.Problem(33, 70, bits=bits, sums=sums)
    check(problem, OP.inputs(problem, torch.device("cpu"), data="heavy"), kernel=CPU)


@pytest.mark.parametrize("config", [(1, 256, 1), (16, 128, 2), (8, 512, 16), (32, 128, 4)])
def test_every_config(device, config):
    problem = OP.Problem(37, 304)
    check(problem, OP.inputs(problem, device, data="heavy"), KERNEL.Config(*config))


def on(device):
    """Each kernel with the field of sums that it has, of those that run on a device."""
    return [(KERNEL, False), (ROWS, True)] if device.type == "cuda" else [(KERNEL, False)]


def test_row_strided_views(device):
    """Pairs that lie together, pairs that start at an odd element, rows that do."""
    for kernel, sums in on(device):
        problem = OP.Problem(9, 46, sums=sums)
        inputs = OP.inputs(problem, device)
        wide = OP.inputs(OP.Problem(9, 98), device)["q"].flatten()
        for offset, stride in [(0, 90), (1, 90), (2, 97), (4, 96)]:
            inputs["q"] = wide[offset : offset + 9 * stride].view(9, stride)[:, :46]
            check(problem, inputs, kernel=kernel)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_fault_leaves_one_code_and_no_unit(device, bits):
    problem = OP.Problem(40, 300, bits=bits)
    inputs = OP.inputs(problem, device)
    inputs["scale"][1, 7] = math.nan
    for kernel, sums in on(device):
        check(OP.Problem(40, 300, bits=bits, sums=sums), inputs, kernel=kernel)
    outputs = launched(problem, inputs)
    assert outputs["unit"].isnan().all()
    assert unpack(outputs["parts"]).nonzero().tolist() == [[0, 0]]
    assert outputs["squares"].tolist() == [1] + [0] * (problem.rows - 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros(device, bits):
    problem = OP.Problem(40, 64, bits=bits)
    inputs = OP.inputs(problem, device)
    inputs["scale"].zero_()
    inputs["q"].zero_()
    for kernel, sums in on(device):
        check(OP.Problem(40, 64, bits=bits, sums=sums), inputs, kernel=kernel)
    assert float(launched(problem, inputs)["unit"]) == 0


def test_repeats_bit_for_bit_and_leaves_its_counters_at_zero(device):
    for kernel, sums in on(device):
        problem = OP.Problem(9, 300, sums=sums)
        inputs = OP.inputs(problem, device, data="heavy")
        first = launched(problem, inputs, kernel)
        launched(problem, {**inputs, "scale": inputs["scale"] * 64}, kernel)
        second = launched(problem, inputs, kernel)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_function(device):
    codes = codes_of(40, 64)
    codes = codes._replace(q=codes.q.to(device), scale=codes.scale.to(device))
    found = int4_bit_split_codes(codes, seed=seed_of(3).to(device))
    parts, unit, squares = bit_split_codes(codes.q, codes.scale, 32, 8, seed_of(3).to(device))
    for ours, theirs in zip(
        (found.packed, found.scale, found.squares), (parts, unit, squares), strict=True
    ):
        assert torch.equal(ours, theirs)
    if device.type == "cpu" or ROWS.unfit(Device.of(codes.q)) is None:
        summed, sums = int4_bit_split_codes_sums(codes, seed=seed_of(3).to(device))
        assert torch.equal(summed.packed, parts)
        assert torch.equal(sums, column_sums(codes.q, codes.scale, unit, 32))


def test_what_is_refused():
    with pytest.raises(UsageError, match="n=7: expected an even number"):
        OP.Problem(4, 7)
    with pytest.raises(UsageError, match="bits=6: expected 8 or 4"):
        OP.Problem(4, 8, bits=6)
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((3, 512, 4), "tile_m=3"),
        ((64, 128, 4), "tile_m=64"),
        ((4, 64, 4), "tile_n=64"),
        ((4, 512, 3), "warps=3"),
        ((4, 4096, 4), "128 elements per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None
    summed = OP.Problem(64, 64, sums=True)
    assert KERNEL.legal(summed, KERNEL.default(summed, h200), h200) == "sums=True: expected False"
    assert ROWS.legal(summed, ROWS.default(summed, h200), h200) is None
    assert "at most warps=4" in ROWS.legal(summed, ROWS.Config(4, 8, 16), h200)
    assert "rows=64" in ROWS.legal(summed, ROWS.Config(8, 8, 64), h200)
    with pytest.raises(UsageError, match="m=16777217: expected at most 2\\^24"):
        OP.Problem(2**24 + 1, 64, sums=True)


def test_the_default_of_cuda_has_warps_beside_each_other():
    h200 = target_device((9, 0))
    found = [ROWS.default(OP.Problem(64, n), h200) for n in (2, 1026, 1022, 3072, 4096, 65536)]
    assert [(c.warps, c.across, c.rows) for c in found] == [
        *[(8, 1, 4)] * 2,
        *[(8, 2, 8)] * 2,
        *[(8, 8, 32)] * 2,
    ]
    assert {c.height for c in found} == {32}
