"""int4_gemm/mma: its machine code on each architecture, its legality, and on a GPU every config."""

import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.kernels_cuda.int4_gemm.mma import MmaConfig
from jetfire.kernels_cuda.mma_tiles import Access
from jetfire.tests.audited import together

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
CAPABILITIES = (AMPERE, (8, 6), ADA, HOPPER)
# Of different families: few or many warps, tall or wide ones, small tiles, short and long rings.
CONFIGS = (
    MmaConfig(128, 128, 2, 4, stages=3),
    MmaConfig(128, 256, 2, 4, stages=2, raster=1),
    MmaConfig(256, 128, 4, 2, stages=2),
    MmaConfig(64, 64, 2, 2, stages=4),
    MmaConfig(64, 32, 2, 2, stages=2, raster=2),
    MmaConfig(128, 64, 2, 2, stages=2, blocks=2),
    MmaConfig(64, 64, 2, 2, stages=2, blocks=3),
    MmaConfig(32, 128, 1, 4, stages=3, raster=32),
    MmaConfig(64, 64, 4, 4, stages=5),
)
# Each operand, product and output at least once.
OPTIONS = (
    {"operands": "packed", "out": "bf16", "bias": True},
    {"operands": "wide", "product": "wgrad", "out": "fp32"},
    {"operands": "wide", "product": "dgrad", "out": "fp16"},
    {"operands": "packed", "product": "dgrad", "out": "fp32"},
    {"operands": "wide", "out": "bf16"},
    {"operands": "packed", "out": "int8", "bias": True},
    {"operands": "wide", "out": "int8"},
)
# Whole tiles; ragged edges; rows of a multiple of 16, 8, 4 and fewer bytes, packed and wide.
SHAPES = (
    (256, 256, 512),
    (259, 144, 1056),
    (272, 131, 1000),
    (97, 66, 344),
    (130, 75, 334),
    (1, 1, 2),
    (17, 9, 6),
)
KERNEL, OP = registry.get_kernel("int4_gemm", "mma"), registry.get("int4_gemm")
ALIGNED = Access()


def cubin_of(problem, config, capability=AMPERE, access=ALIGNED):
    return KERNEL.program(problem, config, access).cubin(capability)


OPERANDS = ("packed", "wide")


def of_operands(operands, capability):
    problem = OP.Problem(8192, 8192, 8192, operands=operands)
    return problem, KERNEL.default(problem, target_device(capability)), capability


@pytest.fixture(scope="module")
def defaults():
    cases = itertools.product(OPERANDS, CAPABILITIES)
    return together(cubin_of, itertools.starmap(of_operands, cases))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("operands", OPERANDS)
def test_machine_code(defaults, capability, operands):
    """s4 or s8 mma, 16-byte asynchronous copies, ldmatrix, no spills.

    The source itself asserts that it counts shared memory as `shared_bytes` does.
    """
    case = of_operands(operands, capability)
    _, config, _ = case
    found = defaults[case]
    # Of the 128 bytes of K in a slot, products of 32 each.
    products = 4 * config.warp_m * config.warp_n // (16 * 8)
    if operands == "wide" or capability < HOPPER:
        shape = "16864.S4.S4" if operands == "packed" else "16832.S8.S8"
        assert found.sass.count(f"IMMA.{shape}") == found.instructions["IMMA"] == products
    else:  # whose tensor cores take no nibbles
        assert "S4" not in found.sass
    assert found.instructions["LDSM"] == 4 * (config.warp_m + config.warp_n) // 16
    assert "LDGSTS.E.BYPASS.LTC128B.128.ZFILL" in found.sass
    assert found.spills == 0
    assert found.stack_bytes == 0
    assert found.registers <= config.registers


ACCESSES = (Access(8, True), Access(4, False), Access(1, False))


def of_output(fields, access):
    problem = OP.Problem(8192, 8192, 8192, **fields)
    return problem, KERNEL.default(problem, target_device(AMPERE)), AMPERE, access


@pytest.fixture(scope="module")
def outputs():
    cases = itertools.product(OPTIONS[:3], ACCESSES)
    return together(cubin_of, itertools.starmap(of_output, cases))


@pytest.mark.parametrize("fields", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("access", ACCESSES, ids=str)
def test_no_output_and_no_alignment_spills(outputs, fields, access):
    """Of the config with the most sums."""
    case = of_output(fields, access)
    assert case[1].sums == 128
    found = outputs[case]
    assert found.spills == 0
    assert found.instructions["IMMA"] == 128


FAMILIES = list(zip(CONFIGS, itertools.cycle(OPTIONS)))


@pytest.fixture(scope="module")
def families():
    cases = [(OP.Problem(4096, 4096, 4096, **fields), config) for config, fields in FAMILIES]
    return together(cubin_of, cases)


@pytest.mark.parametrize(("config", "fields"), FAMILIES, ids=str)
def test_each_family_compiles_without_spills(families, config, fields):
    problem = OP.Problem(4096, 4096, 4096, **fields)
    assert KERNEL.legal(problem, config, target_device(AMPERE)) is None
    assert families[problem, config].spills == 0


def test_what_a_launch_runs_can_be_audited():
    problem = OP.Problem(100, 30, 60)
    config = MmaConfig(64, 64, 2, 2)
    try:
        (cubin,) = KERNEL.cubins(problem, config, ADA)
    except UsageError as error:
        pytest.skip(str(error))
    assert cubin.shared_bytes == KERNEL.shared_bytes(problem, config, ALIGNED)
    assert cubin.warps == 4
    assert cubin.code.startswith(b"\x7fELF")


def test_alignment_is_that_of_the_rows_in_bytes():
    for operands, k, size in (
        ("packed", 96, 16),
        ("packed", 48, 8),
        ("packed", 40, 4),
        ("packed", 36, 1),
        ("wide", 36, 4),
        ("wide", 38, 1),
    ):
        problem = OP.Problem(40, 24, k, operands=operands)
        inputs = OP.inputs(problem, torch.device("cpu"))
        found = KERNEL.access(problem)
        assert found == Access(size, out=True)
        assert KERNEL.access(problem, inputs, OP.outputs(problem, inputs)).copy_bytes >= size
    assert not KERNEL.access(OP.Problem(40, 23, 32)).out
    assert KERNEL.access(OP.Problem(40, 20, 32, out="fp32")).out


def test_legality_has_reasons():
    ampere, ada = target_device(AMPERE), target_device(ADA)
    turing = dataclasses.replace(ampere, capability=(7, 5))
    problem = OP.Problem(256, 256, 256)
    good = MmaConfig(128, 128, 2, 4, stages=3)
    if KERNEL.legal(problem, good, ampere) is not None:
        pytest.skip(KERNEL.legal(problem, good, ampere))
    for asked, device, fields, word in (
        (problem, turing, {}, "sm_80"),
        (problem, Device.parse("cpu"), {}, "sm_80"),
        (problem, ampere, {"stages": 9}, "stages=9"),
        (problem, ada, {"stages": 4}, "shared memory"),
        (
            problem,
            ampere,
            {"tile_m": 64, "tile_n": 64, "warps_n": 2, "stages": 6, "blocks": 2},
            "shared memory",
        ),
        (problem, ampere, {"stages": 2, "blocks": 2}, "registers"),
        (problem, ampere, {"tile_m": 256, "tile_n": 256, "warps_m": 4}, "registers"),
        (problem, ampere, {"warps_m": 1, "warps_n": 2}, "2 warps"),
        (problem, ampere, {"tile_m": 256, "warps_m": 2}, "128 a warp"),
        (problem, ampere, {"tile_m": 32, "warps_m": 4}, "8 a warp"),
        (
            problem,
            ampere,
            {"tile_m": 32, "warps_m": 2, "tile_n": 64, "warps_n": 4, "stages": 2},
            None,
        ),
        (OP.Problem(2**31, 2**31, 2), ampere, {"tile_m": 32, "warps_m": 1}, "2^30 tiles"),
    ):
        reason = KERNEL.legal(asked, dataclasses.replace(good, **fields), device)
        assert reason is None if word is None else word in reason, (fields, word, reason)


@pytest.mark.parametrize("block", [64, 128])
def test_tiles_hold_whole_blocks_of_codes(block):
    ampere = target_device(AMPERE)
    problem = OP.Problem(100, 64, 64, out="int8", out_block=block)
    reason = KERNEL.legal(problem, MmaConfig(64, 32, 2, 2), ampere)
    if reason is not None and "CuPy" in reason:
        pytest.skip(reason)
    assert f"expected a multiple of {block}" in reason
    assert KERNEL.legal(problem, KERNEL.default(problem, ampere), ampere) is None


def test_shared_memory_follows_from_the_layout():
    """By hand: a ring, or at the end sixteen rows a warp."""
    fp32 = OP.Problem(128, 128, 128, out="fp32")
    config = MmaConfig(64, 128, 2, 2, stages=3)
    assert KERNEL.shared_bytes(fp32, config, ALIGNED) == 3 * 192 * 128
    wide = MmaConfig(32, 256, 1, 4, stages=2)
    assert KERNEL.shared_bytes(fp32, dataclasses.replace(wide, tile_n=32), ALIGNED) == 2 * 64 * 128
    assert KERNEL.shared_bytes(fp32, wide, ALIGNED) == 2 * 288 * 128
    codes = OP.Problem(128, 128, 128, out="int8", out_block=64)
    assert KERNEL.shared_bytes(codes, config, ALIGNED) == 3 * 192 * 128 + 4 * 2


def test_every_problem_has_a_legal_default():
    for capability, fields in itertools.product(CAPABILITIES, OPTIONS):
        for m, n, k in (*SHAPES, (8192, 8192, 8192), (65536, 65536, 1024)):
            problem, device = OP.Problem(m, n, k, **fields), target_device(capability)
            reason = KERNEL.legal(problem, KERNEL.default(problem, device), device)
            if reason is not None and "CuPy" in reason:
                pytest.skip(reason)
            assert reason is None, (capability, problem, reason)


def test_hopper_prefers_its_own_kernel():
    names = list(registry.kernels("int4_gemm"))
    assert names.index("wgmma") < names.index("mma")


@pytest.fixture
def gpu(device):
    """The GPU, where this kernel runs on it."""
    problem, found = OP.Problem(64, 64, 64), Device.parse(str(device))
    if (reason := KERNEL.legal(problem, KERNEL.default(problem, found), found)) is not None:
        pytest.skip(reason)
    return device


def check_all(cases, device):
    """Every (problem, config) to the bit; their code is compiled first, on all cores."""
    capability = Device.parse(str(device)).capability
    KERNEL.cubins(*cases[0], capability)  # NVRTC's first use is not safe from several threads
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: KERNEL.cubins(*case, capability), cases))
    for problem, config in cases:
        result = verify(OP, KERNEL, problem, config, OP.inputs(problem, device, data="heavy"))
        assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_family_is_bit_equal(gpu, config):
    found = Device.parse(str(gpu))
    cases = [
        (OP.Problem(*shape, **OPTIONS[(i + j) % len(OPTIONS)]), config)
        for i, shape in enumerate(SHAPES)
        for j in range(2)
    ]
    assert all(KERNEL.legal(*case, found) is None for case in cases)
    check_all(cases, gpu)


@pytest.mark.gpu
def test_every_option_of_the_default_is_bit_equal(gpu):
    """Of more tiles than an H200 has multiprocessors, so that it is the default of large ones."""
    found = Device.parse(str(gpu))
    problems = [OP.Problem(3200, 3000, 1408, **fields) for fields in OPTIONS]
    check_all([(problem, KERNEL.default(problem, found)) for problem in problems], gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [64, 128])
def test_larger_blocks_of_codes_are_bit_equal(gpu, block):
    found, cases = Device.parse(str(gpu)), []
    for (m, n, k), operands in itertools.product(SHAPES, ("packed", "wide")):
        problem = OP.Problem(m, n, k, operands=operands, out="int8", out_block=block, bias=n % 2)
        cases += [(problem, c) for c in CONFIGS if KERNEL.legal(problem, c, found) is None]
    check_all(cases, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 16, 8, 4, 3])
@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_row_strided_views_of_every_alignment(gpu, before, config):
    for fields in OPTIONS:
        problem = OP.Problem(150, 140, 398, **fields)
        inputs = OP.inputs(problem, gpu)
        for name in ("a", "b"):
            # What lies around the rows is no zero, so that a byte too many shows.
            after = 32 - (problem.row_bytes + before) % 16
            wide = torch.nn.functional.pad(inputs[name], (before, after), value=99)
            inputs[name] = wide[:, before : before + problem.row_bytes]
        result = verify(OP, KERNEL, problem, config, inputs)
        assert result.ok, f"{problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 100, 128, 300])
def test_rows_that_are_not_counted_stay_unwritten(gpu, rows):
    problem = OP.Problem(300, 72, 128, operands="wide", product="dgrad")
    inputs = OP.inputs(problem, gpu)
    inputs["counts"][1] = rows
    inputs["weight"].fill_(1.0)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    config = KERNEL.default(problem, Device.parse(str(gpu)))
    KERNEL.launch(problem, config, inputs, outputs)
    assert outputs["c"][rows:].isnan().all()
    assert not outputs["c"][:rows].isnan().any()


@pytest.mark.gpu
def test_it_can_be_captured_and_reads_its_counts_anew(gpu):
    problem = OP.Problem(256, 256, 512, operands="wide", product="wgrad", out="fp32")
    config, inputs = KERNEL.default(problem, Device.parse(str(gpu))), OP.inputs(problem, gpu)
    outputs = OP.outputs(problem, inputs)
    KERNEL.launch(problem, config, inputs, outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.launch(problem, config, inputs, outputs)
    for counts in ((128, 256), (0, 512), (384, 384), (0, 0)):
        inputs["counts"].copy_(torch.tensor(counts, dtype=torch.int32))
        outputs["c"].fill_(torch.nan)
        graph.replay()
        assert OP.check(problem, outputs, OP.reference(problem, inputs)).ok, counts
