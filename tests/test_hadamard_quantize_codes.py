"""hadamard_quantize_codes: the reference against float64, kernels against the reference."""

import dataclasses
import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.machine_code import audit
from jetfire.kernels_cuda.hadamard_rows import Matrix, RowsConfig, registers
from jetfire.ops import int4_quantize, int4_quantize_codes, int8_dequantize, int8_quantize
from jetfire.reference import hadamard
from jetfire.reference.hadamard_quantize_codes import quantize_codes
from jetfire.reference.nibbles import unpack
from jetfire.tests.audited import loop_of, together

OP = registry.get("hadamard_quantize_codes")
TRITON = registry.get_kernel("hadamard_quantize_codes", "triton")
ROWS = registry.get_kernel("hadamard_quantize_codes", "rows")
# What a thread has of a tile.
SHAPES = [(8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (32, 1)]


@pytest.fixture(params=[TRITON, ROWS], ids=lambda kernel: kernel.name)
def kernel(request, device):
    """Each of a GPU's; of the interpreter Triton's."""
    problem, found = OP.Problem(32, 64), Device.parse(str(device))
    if request.param is ROWS and (reason := ROWS.legal(problem, RowsConfig(), found)):
        pytest.skip(reason)
    return request.param


def check(kernel, problem, inputs, config=None):
    config = config or kernel.default(problem, Device.of(inputs["q"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(kernel, problem, inputs):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, kernel.default(problem, Device.of(inputs["q"])), inputs, outputs)
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
def test_kernels_give_the_reference_bits(device, kernel, m, n, block, group, data, layout):
    problem = OP.Problem(m, n, block=block, group=group, layout=layout)
    check(kernel, problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("layout", ["packed", "wide", "both"])
def test_the_cpu_kernel_gives_the_reference_bits(layout):
    problem = OP.Problem(33, 96, layout=layout)
    kernel = registry.get_kernel("hadamard_quantize_codes", "torch")
    check(kernel, problem, OP.inputs(problem, torch.device("cpu"), data="heavy"))


@pytest.mark.parametrize("config", [(4, 128, 1), (16, 128, 2), (8, 1024, 16), (32, 128, 4)])
def test_every_config_of_triton_s(device, config):
    problem = OP.Problem(45, 608, layout="both")
    check(TRITON, problem, OP.inputs(problem, device, data="heavy"), TRITON.Config(*config))


def test_row_strided_views(device, kernel):
    problem = OP.Problem(40, 64, layout="both")
    inputs = OP.inputs(problem, device)
    wide = OP.inputs(OP.Problem(40, 128), device)["q"].flatten()
    inputs["scale"] = torch.nn.functional.pad(inputs["scale"], (0, 3), value=math.nan)[:, :2]
    for offset, stride in [(0, 90), (1, 97), (4, 96), (2, 66), (8, 88)]:
        inputs["q"] = wide[offset : offset + 40 * stride].view(40, stride)[:, :64]
        check(kernel, problem, inputs)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 9)])
def test_a_fault_shows_in_the_unit(device, kernel, fault, place):
    problem = OP.Problem(40, 320)
    inputs = OP.inputs(problem, device)
    inputs["scale"][place] = fault
    check(kernel, problem, inputs)
    assert launched(kernel, problem, inputs)["unit"].isnan().all()


@pytest.mark.parametrize("fault", [math.nan, math.inf, 2.0**127])
def test_squares_end_where_rows_do(device, kernel, fault):
    """What lies past them is 0, of which a multiplier that is not finite would make −8."""
    for n, group in ((2, 1), (70, 2), (1036, 4)):
        problem = OP.Problem(35, n, group=group, layout="both")
        inputs = OP.inputs(problem, device)
        inputs["scale"].fill_(fault)
        inputs["step"].fill_(2.0**-20)
        check(kernel, problem, inputs)


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf, 2.0**-149])
def test_a_step_that_is_none_gives_zeros(device, kernel, step):
    problem = OP.Problem(40, 64)
    inputs = OP.inputs(problem, device)
    inputs["step"].fill_(step)
    check(kernel, problem, inputs)
    outputs = launched(kernel, problem, inputs)
    assert outputs["unit"].isnan().all()
    assert not outputs["packed"].any()


def test_values_that_overflow_are_clipped(device, kernel):
    problem = OP.Problem(40, 64)
    inputs = OP.inputs(problem, device)
    inputs["scale"].fill_(2.0**120)
    inputs["step"].fill_(2.0**-100)
    check(kernel, problem, inputs)


def test_the_largest_sums_are_exact(device, kernel):
    """Groups of 128 codes of −128, and of both signs: as steps tell them apart."""
    problem = OP.Problem(3, 256, block=128, group=128, layout="both")
    inputs = OP.inputs(problem, device)
    inputs["scale"].fill_(1.0)
    inputs["q"].fill_(-128)
    inputs["q"][1] = 127
    inputs["q"][2, ::2] = 127
    for step in (200.0, 1448.0, 180.0):
        check(kernel, problem, {**inputs, "step": torch.full_like(inputs["step"], step)})


def test_repeats_bit_for_bit_and_leaves_its_counters_at_zero(device, kernel):
    problem = OP.Problem(70, 320, layout="both")
    inputs = OP.inputs(problem, device, data="heavy")
    first = launched(kernel, problem, inputs)
    launched(kernel, problem, {**inputs, "scale": inputs["scale"] * math.nan})
    second = launched(kernel, problem, inputs)
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
        assert reason in TRITON.legal(problem, TRITON.Config(*config), h200)
    assert TRITON.legal(problem, TRITON.default(problem, h200), h200) is None


# The CUDA kernel.


def cubin_of(problem, config, capability=(9, 0), matrices=None):
    matrices = matrices or ROWS.matrices(problem, config)
    return ROWS.program(problem, config, matrices).cubin(capability)


@pytest.mark.parametrize(
    ("fields", "capability", "most"),
    [
        ({"layout": "wide"}, (8, 0), 15),
        ({"layout": "wide"}, (9, 0), 15),
        ({"layout": "packed"}, (9, 0), 15),
        ({"layout": "both"}, (9, 0), 16),
        ({"layout": "both", "block": 128, "group": 128}, (9, 0), 20),
    ],
    ids=str,
)
def test_machine_code(fields, capability, most):
    """Accesses of sixteen bytes, no spills, and few instructions an element in the loop.

    On an H100 DRAM takes 25 µs for 8192×4096, in which there is time for 21.
    """
    problem = OP.Problem(8192, 4096, **fields)
    config = ROWS.default(problem, target_device(capability))
    try:
        found = audit(cubin_of(problem, config, capability))
    except UsageError as error:
        pytest.skip(str(error))
    assert found.spills == found.stack_bytes == 0
    assert found.registers <= registers(config)
    assert len(re.findall(r"LDG\.E\.128", found.sass)) == 2 * config.chunks
    elements = config.elements * config.chunks
    assert 5 * elements < loop_of(found.sass) <= most * elements


def tightest(elements, chunks, prefetch, group):
    """A problem, and a config of so many warps that they only just have the registers."""
    problem = OP.Problem(8192, 4096, block=max(32, group), group=group, layout="both")
    device = target_device((9, 0))
    configs = (
        RowsConfig(elements, chunks, 8, warps=4, blocks=blocks, prefetch=prefetch)
        for blocks in (16, 12, 8, 6, 4)
    )
    return next((problem, c) for c in configs if ROWS.legal(problem, c, device) is None)


def of_any_rows(problem, config):
    """The same of rows that begin anywhere."""
    anywhere = tuple((name, Matrix(x.kind, 1)) for name, x in ROWS.matrices(problem, config))
    return problem, config, (9, 0), anywhere


def test_no_config_spills():
    if reason := unusable():
        pytest.skip(reason)
    cases = [tightest(*shape, True, 32) for shape in SHAPES]
    cases += [tightest(*shape, False, 64) for shape in ((8, 4), (16, 1))]
    cases += [of_any_rows(*cases[i]) for i in (2, 5)]
    for case, found in together(cubin_of, cases).items():
        assert found.spills == 0, case


def unusable():
    """Why the CUDA kernel runs nowhere here; None where it may."""
    return ROWS.legal(OP.Problem(64, 64), RowsConfig(), target_device((9, 0)))


def test_legality_of_rows_has_reasons():
    if reason := unusable():
        pytest.skip(reason)
    device = target_device((8, 0))
    problem = OP.Problem(64, 2048, block=64, group=64)
    for asked, where, fields, word in (
        (problem, dataclasses.replace(device, capability=(7, 5)), {}, "sm_80"),
        (problem, Device(kind="cpu"), {}, "sm_80"),
        (problem, device, {"elements": 4}, "elements=4: expected one of"),
        (problem, device, {"elements": 32}, "128 elements per thread: expected at most 32"),
        (problem, device, {"chunks": 1, "lanes": 4}, "tiles of 32 columns: expected at least"),
        (problem, device, {"blocks": 16}, "registers per thread: blocks=16 of 4 warps leave 32"),
        (OP.Problem(1, 2**25), device, {}, "at most 16777216"),
    ):
        config = dataclasses.replace(RowsConfig(), **fields)
        assert word in ROWS.legal(asked, config, where), (fields, word)


def test_every_problem_has_a_legal_default_that_wastes_little():
    if reason := unusable():
        pytest.skip(reason)
    device = target_device((9, 0))
    for n, block in itertools.product((2, 64, 768, 1600, 4096, 11008), (32, 64, 128)):
        for group in (1, 2, 16, 32, 64, 128):
            if group <= block and n % group == 0:
                problem = OP.Problem(64, n, block=block, group=group)
                config = ROWS.default(problem, device)
                assert ROWS.legal(problem, config, device) is None, problem
                assert -n % config.tile <= max(n / 8, 126), (problem, config)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_config_at_ragged_sizes_is_bit_equal(device, prefetch):
    cases, where = [], Device.parse(str(device))
    groups = [(b, g) for b in (32, 64, 128) for g in (1, 2, 4, 8, 16, 32, 64, 128) if g <= b]
    for i, (shape, lanes) in enumerate(itertools.product(SHAPES, (4, 8, 16, 32))):
        for j, (block, group) in enumerate(groups[i % 3 :: 3]):
            sizes = [k * group for k in (1, 2, 3, 13, 101) if k * group % 2 == 0]
            m, layout = (1, 37, 129, 1000)[j % 4], ("packed", "wide", "both")[(i + j) % 3]
            n = sizes[(i + j) % len(sizes)]
            problem = OP.Problem(m, n, block=block, group=group, layout=layout)
            config = RowsConfig(*shape, lanes, warps=1 << i % 5, blocks=1, prefetch=prefetch)
            if ROWS.legal(problem, config, where) is None:
                cases.append((problem, config))
    assert len(cases) > 100
    ROWS.cubins(*cases[0], where.capability)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: ROWS.cubins(*case, where.capability), cases))
    for problem, config in cases:
        for data in ("heavy", "nonfinite"):
            check(ROWS, problem, OP.inputs(problem, device, data=data), config)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "wide", "both"])
def test_large_ones_are_bit_equal(device, kernel, layout):
    """Of more blocks than a GPU runs at once."""
    for m, n, block, group in ((8192, 4096, 32, 32), (70000, 1024, 128, 128), (16384, 768, 64, 8)):
        problem = OP.Problem(m, n, block=block, group=group, layout=layout)
        check(kernel, problem, OP.inputs(problem, device))


@pytest.mark.gpu
def test_it_can_be_captured(device, kernel):
    problem = OP.Problem(512, 768, layout="both")
    inputs = OP.inputs(problem, device)
    config = kernel.default(problem, Device.parse(str(device)))
    outputs = OP.outputs(problem, inputs)
    kernel.launch(problem, config, inputs, outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(problem, config, inputs, outputs)
    expected = {name: t.clone() for name, t in outputs.items()}
    for _ in range(3):
        OP.poison(problem, outputs)
        graph.replay()
        assert all(torch.equal(t, expected[name]) for name, t in outputs.items())
