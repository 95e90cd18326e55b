"""fallback_gemm's CUDA kernel: steps and whole launches on the host, machine code, and on a GPU."""

import ctypes
import dataclasses
import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import choose, verify
from jetfire.kernels_cuda.fallback_gemm import wgmma
from jetfire.kernels_cuda.fallback_gemm.wgmma import FallbackConfig, program
from jetfire.reference.fallback_gemm import side_by_side
from jetfire.reference.gemm import gemm, gemm_telescoped
from jetfire.tests.audited import together
from jetfire.tests.host_cuda import launches_here, libraries, needs_a_compiler

OP = registry.get("fallback_gemm")
KERNEL = registry.get_kernel("fallback_gemm", "wgmma")
HOPPER = target_device((9, 0))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Which blocks fall back: none, all, one in the middle, the last, some.
PATTERNS = ("none", "all", "one", "last", "some")
NO_CUPY = "needs CuPy: pip install 'jetfire[cuda]'"


def second_scales(pattern, down, count, generator):
    """Scales ⌈m/128⌉×⌈k/128⌉ of a second plane: zeros, or most above the first one's."""
    scales = torch.rand((down, count), generator=generator) + 0.01
    falls = torch.zeros((down, count), dtype=torch.bool)
    if pattern == "all":
        falls[:] = True
    elif pattern == "some":
        falls = torch.rand((down, count), generator=generator) < 0.3
    elif pattern != "none":
        falls[down // 2, -1 if pattern == "last" else count // 2] = True
    return scales * falls / 4


def drawn(problem, pattern, device="cpu", seed=0):
    """Any codes, in a second plane also where nothing falls back, and scales of many sizes.

    They are small enough for fp16.
    """
    generator = torch.Generator().manual_seed(seed)
    count = -(-problem.k // 128)
    inputs = {}
    for name, rows in (("a", problem.m), ("r", problem.m), ("b", problem.n)):
        shape = rows, problem.k
        inputs[name] = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        exponents = torch.randn((-(-rows // 128), count), generator=generator) - 6
        inputs[f"{name}_scale"] = exponents.exp2()
    inputs["r_scale"] = second_scales(pattern, len(inputs["a_scale"]), count, generator)
    if problem.bias:
        inputs["bias"] = torch.randn(problem.n, generator=generator)
    return {name: x.to(device) for name, x in inputs.items()}


def steps_of(falls, top, bottom):
    """The blocks of K that rows take, by which blocks fall back: those of the second plane last."""
    bands = falls[top // 128 : -(-bottom // 128)]
    count = falls.shape[1]
    return [*range(count), *(count + i for i in range(count) if bands[:, i].any())]


def expected(problem, config, inputs):
    """C as the schedule rounds it."""
    a, r, b = ((inputs[name], inputs[f"{name}_scale"]) for name in "arb")
    joined = side_by_side(*a, *r, *b, 128)
    if config.schedule == "exact":
        c = gemm(*joined, 128)
    else:
        c = torch.cat(list(telescoped(joined, r[1] != 0, problem.m, config.plane_rows)))
    c = c + inputs["bias"] if problem.bias else c
    return (c.t() if problem.transpose else c).to(DTYPES[problem.out])


def telescoped(joined, falls, m, rows):
    """C of the rows of one tile after another, each of its own steps."""
    codes_a, scales_a, codes_b, scales_b = joined
    for top in range(0, m, rows):
        bottom = min(top + rows, m)
        steps, bands = steps_of(falls, top, bottom), slice(top // 128, -(-bottom // 128))
        left, right = (x.unflatten(1, (-1, 128))[:, steps].flatten(1) for x in (codes_a, codes_b))
        whole = slice(128 * bands.start, 128 * bands.stop)
        c = gemm_telescoped(left[whole], scales_a[bands][:, steps], right, scales_b[:, steps], 128)
        yield c[top - whole.start : bottom - whole.start]


# --- on the host ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return libraries(tmp_path_factory, "fallback_gemm.cu")


@pytest.fixture
def host(library):
    with launches_here(wgmma, library):
        yield


LAUNCHES = [
    # Rows of one block, and of two where the tile is taller than one; edges everywhere.
    ({"planes": "rows"}, {"out": "fp32"}, (130, 70, 520), "one"),
    ({"planes": "rows", "groups": 3, "stages": 4, "in_flight": 2}, {}, (200, 64, 300), "last"),
    ({"planes": "columns", "stages": 5}, {"bias": True}, (136, 72, 650), "none"),
    ({"groups": 2, "tile_n": 192}, {"out": "fp32", "bias": True}, (196, 64, 300), "one"),
    ({"planes": "rows", "buffers": 2}, {"transpose": True}, (136, 72, 384), "all"),
    ({}, {"transpose": True, "bias": True, "out": "fp32"}, (132, 60, 100), "none"),
    ({}, {"bias": True}, (70, 35, 260), "all"),  # rows that the copy engine cannot write
]


@needs_a_compiler
@pytest.mark.parametrize("schedule", ["exact", "telescoped"])
@pytest.mark.parametrize(("choice", "fields", "sizes", "pattern"), LAUNCHES, ids=str)
def test_launches_on_the_host_have_the_schedule_s_bits(
    host, schedule, choice, fields, sizes, pattern
):
    small = FallbackConfig(groups=1, tile_n=64, stages=3)
    config = dataclasses.replace(small, schedule=schedule, **choice)
    problem = OP.Problem(*sizes, **fields)
    assert KERNEL.legal(problem, config, HOPPER) in (None, NO_CUPY)
    for seed, falling in enumerate(("some", pattern)):
        inputs = drawn(problem, falling, seed=seed)
        outputs = OP.poison(problem, OP.outputs(problem, inputs))
        KERNEL.launch(problem, config, inputs, outputs)
        assert torch.equal(outputs["c"], expected(problem, config, inputs)), falling
        noise = KERNEL.noise(problem, config, inputs)
        checked = OP.check(problem, outputs, OP.reference(problem, inputs), noise)
        assert checked.ok, checked.message


@needs_a_compiler
@pytest.mark.parametrize("tile_n", [64, 192])
@pytest.mark.parametrize(
    ("rows", "count", "share"),
    [(1, 1, 1.0), (128, 1, 0.0), (500, 3, 0.5), (300, 33, 0.1), (193, 64, 1.0), (64, 1024, 0.01)],
)
def test_steps_are_those_of_every_block_that_a_tile_s_rows_lie_in(
    library, tile_n, rows, count, share
):
    code = library(program(OP.Problem(128, 128, 128), FallbackConfig(1, 1, tile_n, 3), True))
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand((-(-rows // 128), count), generator=generator) + 0.01
    falls = torch.rand(scales.shape, generator=generator) < share
    scales *= falls
    room = (ctypes.c_int * (2 * count))()
    for top in range(0, rows, tile_n):
        found = code.steps(ctypes.c_void_p(scales.data_ptr()), top, rows, 128 * count, room)
        assert room[:found] == steps_of(falls, top, min(top + tile_n, rows)), top


# --- legality, cost and machine code -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "choice", "reason"),
    [
        ({"block": 32}, {}, "block=32: expected 128"),
        ({"k": 131073}, {}, "k=131073: expected at most 131072"),
        ({}, {"cluster_n": 2}, "cluster_n=2 planes=columns: expected 1, or its blocks would"),
        ({}, {"planes": "rows", "cluster_m": 2}, "cluster_m=2 planes=rows: expected 1"),
        ({}, {"tile_n": 96}, "tile_n=96 planes=columns: expected a multiple of 64"),
        ({"transpose": True}, {"planes": "rows", "tile_n": 96}, "tile_n=96 planes=rows: expected"),
        ({}, {"stages": 8}, "352512 bytes of shared memory: sm_90 has "),
        ({}, {"tile_n": 192}, "192 sums per thread: 3 groups have registers for 128"),
        ({}, {"groups": 2, "in_flight": 2}, "in_flight=2: expected fewer than 2 groups"),
    ],
)
def test_legal_says_why_not(fields, choice, reason):
    problem = OP.Problem(**{"m": 256, "n": 256, "k": 256, **fields})
    config = dataclasses.replace(FallbackConfig(3, 1, 128, 4), **choice)
    if (found := KERNEL.legal(problem, config, HOPPER)) == NO_CUPY:
        pytest.skip(found)
    assert found is not None
    assert found.startswith(reason)


def test_the_default_costs_what_falls_back():
    """A tile's columns lie in one block: its steps are more by the share that falls back."""
    cost = {}
    for percent in (0, 5, 20, 50):
        problem = OP.Problem(8192, 8192, 8192, percent=percent)
        config = KERNEL.default(problem, HOPPER)
        assert (config.groups, config.tile_n) == (3, 128)
        assert config.bands() == 1 or percent == 0
        cost[percent] = KERNEL.estimate(problem, config, HOPPER)
    assert cost[5] <= 1.06 * cost[0]
    assert cost[20] <= 1.21 * cost[0]


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_comes_before_the_portable_one_where_it_runs():
    device = dataclasses.replace(HOPPER, name="an unknown GPU")
    for block, name in ((128, "wgmma"), (64, "triton")):
        assert choose(OP, OP.Problem(512, 512, 512, block), device)[0].name == name


FIELDS = (
    {},
    {"transpose": True},
    {"out": "fp32", "bias": True},
    {"out": "fp32", "bias": True, "transpose": True},
)
# `cluster`: blocks that take the same steps.
TILES = (
    {"groups": 3, "tile_n": 128, "stages": 4, "buffers": 2, "in_flight": 2},
    {"groups": 2, "tile_n": 192, "stages": 4},
    {"groups": 3, "tile_n": 128, "cluster": 2, "raster": 1},
    {"groups": 1, "tile_n": 64, "rows": 2, "stages": 3},
)


def config_of(tile, planes, schedule):
    fields = dict(tile)
    cluster = {"cluster_n" if planes == "rows" else "cluster_m": fields.pop("cluster", 1)}
    return FallbackConfig(planes=planes, schedule=schedule, **fields, **cluster)


PLANES = ("rows", "columns")


def cubin_of(problem, config, tma_out):
    return program(problem, config, tma_out=tma_out).cubin((9, 0))


def of_fields(planes, at):
    other = planes == "columns"  # which has the other schedule of each tile
    schedule = "exact" if at % 2 == other else "telescoped"
    config = config_of(TILES[(at + 2 * other) % 4], planes, schedule)
    return OP.Problem(4096, 4096, 4096, **FIELDS[at]), config, at > 0


@pytest.fixture(scope="module")
def audits():
    cases = itertools.product(PLANES, range(len(FIELDS)))
    return together(cubin_of, itertools.starmap(of_fields, cases))


@pytest.mark.parametrize(("at", "fields"), list(enumerate(FIELDS)), ids=str)
@pytest.mark.parametrize("planes", PLANES)
def test_machine_code(audits, planes, at, fields):
    """wgmma, four of 32 of K per 64 rows, two boxes a step for either plane, and no spills."""
    case = of_fields(planes, at)
    problem, config, tma_out = case
    assert KERNEL.legal(problem, config, HOPPER) in (None, NO_CUPY)
    found = audits[case]
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert found.instructions["IGMMA"] == 4 * config.rows
    assert found.instructions["UTMALDG"] == 2
    assert ("UTMASTG" in found.instructions) == tma_out


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def hopper(device):
    """The GPU, where `wgmma` runs on it."""
    problem, here = OP.Problem(256, 256, 256), Device.parse(str(device))
    if (reason := KERNEL.legal(problem, KERNEL.default(problem, here), here)) is not None:
        pytest.skip(reason)
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("planes", ["rows", "columns"])
@pytest.mark.parametrize("schedule", ["exact", "telescoped"])
@pytest.mark.parametrize("sizes", [(384, 512, 1024), (300, 200, 555), (129, 1000, 4500), (7, 9, 5)])
def test_every_pattern_has_the_schedule_s_bits(hopper, planes, schedule, sizes):
    outputs = itertools.cycle(
        [{}, {"out": "fp32", "bias": True}, {"transpose": True}, {"out": "fp16", "transpose": True}]
    )
    here = Device.parse(str(hopper))
    for tile, (seed, pattern) in itertools.product(TILES, enumerate(PATTERNS)):
        config = config_of(tile, planes, schedule)
        problem = OP.Problem(*sizes, **next(outputs))
        assert KERNEL.legal(problem, config, here) is None
        inputs = drawn(problem, pattern, hopper, seed)
        result = verify(OP, KERNEL, problem, config, inputs)
        assert result.ok, (problem, config, pattern, result.message)
        outputs_of = OP.poison(problem, OP.outputs(problem, inputs))
        KERNEL.launch(problem, config, inputs, outputs_of)
        assert torch.equal(outputs_of["c"], expected(problem, config, inputs)), (config, pattern)


@pytest.mark.gpu
@pytest.mark.parametrize("percent", [0, 5, 20, 50])
def test_the_default_is_right_on_what_a_bench_draws(hopper, percent):
    problem = OP.Problem(1024, 768, 1536, percent=percent)
    inputs = OP.inputs(problem, hopper)
    config = KERNEL.default(problem, Device.parse(str(hopper)))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, result.message


@pytest.mark.gpu
def test_operands_that_tma_cannot_read_are_copied(hopper):
    problem = OP.Problem(130, 70, 300, out="fp32")
    inputs = drawn(problem, "some", hopper)
    config = FallbackConfig(2, 1, 64, 4)
    wanted = expected(problem, config, inputs)
    for name in "arb":
        wide = torch.zeros((len(inputs[name]), 311), dtype=torch.int8, device=hopper)
        wide[:, 7:307] = inputs[name]
        inputs[name] = wide[:, 7:307]
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, config, inputs, outputs)
    assert torch.equal(outputs["c"], wanted)
