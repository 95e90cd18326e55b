"""gemm/mma: its machine code on three architectures, its legality, and on a GPU every option."""

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
from jetfire.kernels_cuda.gemm.mma import MmaConfig
from jetfire.kernels_cuda.mma_tiles import Access
from jetfire.reference.gemm import gemm
from jetfire.reference.quantize import quantize
from jetfire.tests.audited import together

BLOCKS = (32, 64, 128)
CAPABILITIES = ((8, 0), (8, 9), (9, 0))
STOCHASTIC = {"out": "int8", "layout": "both", "rounding": "stochastic", "bias": True}
# Of different families: few or many warps, tall or wide ones, small tiles, short and long rings.
CONFIGS = (
    MmaConfig(128, 128, 2, 4, stages=3),
    MmaConfig(128, 128, 4, 2, stages=2, promotion="biased", raster=1),
    MmaConfig(64, 64, 2, 2, stages=4),
    MmaConfig(64, 32, 2, 2, stages=2, raster=2),
    MmaConfig(256, 64, 4, 4, stages=2, promotion="biased"),
    MmaConfig(128, 64, 2, 2, stages=2, blocks=2),
    MmaConfig(32, 128, 1, 4, stages=3, raster=32),
)
# What each config is asked in turn; the first that it can do.
OPTIONS = (
    {"out": "fp32"},
    STOCHASTIC,
    {"out": "bf16", "bias": True},
    {"out": "int8"},
    {"out": "fp32", "accumulate": True, "bias": True},
    {"out": "int8", "layout": "qt"},
    {"out": "fp16", "accumulate": True},
    {"out": "bf16", "accumulate": True},
    {"out": "fp32", "squares": True},
)
# Codes in blocks of another side than the products'.
UNEQUAL = list(itertools.permutations(BLOCKS, 2))
CODES = (STOCHASTIC, {"out": "int8"}, {"out": "int8", "layout": "qt", "rounding": "stochastic"})
# Whole tiles; ragged edges; rows of a multiple of 16, 8, 4 and 1 bytes; less than one block.
SHAPES = (
    (256, 256, 512),
    (259, 144, 272),
    (272, 131, 1000),
    (97, 66, 332),
    (130, 75, 333),
    (1, 1, 1),
    (17, 9, 5),
)
KERNEL, OP = registry.get_kernel("gemm", "mma"), registry.get("gemm")
ALIGNED = Access(qt=True)


def cubin_of(problem, config, capability=(8, 0), access=ALIGNED):
    return KERNEL.program(problem, config, access).cubin(capability)


def of_block(block, capability):
    problem = OP.Problem(4096, 4096, 4096, block=block)
    return problem, KERNEL.default(problem, target_device(capability)), capability


@pytest.fixture(scope="module")
def defaults():
    return together(cubin_of, itertools.starmap(of_block, itertools.product(BLOCKS, CAPABILITIES)))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_machine_code(defaults, capability, block):
    """s8 mma, 16-byte asynchronous copies, ldmatrix, no spills; the shared memory that was said.

    The source itself asserts that it counts shared memory as `shared_bytes` does.
    """
    case = of_block(block, capability)
    _, config, _ = case
    found = defaults[case]
    # Products of 16x8x32 in a slot's 128 of K, the loop over whose blocks is not unrolled.
    products = config.warp_m * config.warp_n * block // (16 * 8 * 32)
    assert found.instructions["IMMA"] == products
    assert found.instructions["LDSM"] == (config.warp_m + config.warp_n) * block // (16 * 32)
    assert "LDGSTS.E.BYPASS.LTC128B.128.ZFILL" in found.sass
    assert found.spills == 0
    assert found.stack_bytes == 0
    assert found.registers <= config.registers


OUTPUTS = (
    (STOCHASTIC, ALIGNED),
    (STOCHASTIC, Access(1, False, False)),
    ({"out": "fp32", "accumulate": True, "bias": True}, Access(4, True, False)),
)


def of_output(fields, access, capability):
    problem = OP.Problem(4096, 4096, 4096, block=128, **fields)
    return problem, KERNEL.default(problem, target_device(capability)), capability, access


@pytest.fixture(scope="module")
def outputs():
    cases = [of_output(*output, capability) for output in OUTPUTS for capability in CAPABILITIES]
    return together(cubin_of, cases)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("fields", "access"), OUTPUTS, ids=str)
def test_no_output_and_no_alignment_spills(outputs, capability, fields, access):
    found = outputs[of_output(fields, access, capability)]
    assert found.spills == 0
    assert found.instructions["IMMA"] > 0


def unequal(block, out_block):
    problem = OP.Problem(4096, 4096, 4096, block=block, out_block=out_block, **STOCHASTIC)
    return problem, KERNEL.default(problem, target_device((8, 0)))


@pytest.fixture(scope="module")
def unequals():
    return together(cubin_of, itertools.starmap(unequal, UNEQUAL))


@pytest.mark.parametrize(("block", "out_block"), UNEQUAL)
def test_codes_in_other_blocks_do_not_spill(unequals, block, out_block):
    problem, config = unequal(block, out_block)
    assert KERNEL.legal(problem, config, target_device((8, 0))) is None
    assert unequals[problem, config].spills == 0


OF_FAMILIES = OP.Problem(4096, 4096, 4096, block=32)


@pytest.fixture(scope="module")
def families():
    return together(cubin_of, [(OF_FAMILIES, config) for config in CONFIGS])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_family_compiles_without_spills(families, config):
    assert KERNEL.legal(OF_FAMILIES, config, target_device((8, 0))) is None
    assert families[OF_FAMILIES, config].spills == 0


def test_what_a_launch_runs_can_be_audited():
    problem = OP.Problem(100, 30, 60, out="int8", layout="both")
    config = MmaConfig(64, 64, 2, 2)
    try:
        (cubin,) = KERNEL.cubins(problem, config, (8, 9))
    except UsageError as error:
        pytest.skip(str(error))
    assert cubin.shared_bytes == KERNEL.shared_bytes(problem, config, Access(4, False, False))
    assert cubin.warps == 4
    assert cubin.code.startswith(b"\x7fELF")


def test_legality_has_reasons():
    ampere, ada, turing = target_device((8, 0)), target_device((8, 9)), target_device((8, 0))
    turing = dataclasses.replace(turing, capability=(7, 5))
    problem = OP.Problem(256, 256, 256, block=128)
    good = MmaConfig(128, 128, 2, 4, stages=3)
    int8 = OP.Problem(256, 256, 256, block=128, out="int8")
    coarse = OP.Problem(256, 256, 256, block=32, out="int8", out_block=128)
    fine = OP.Problem(256, 256, 256, block=128, out="int8", out_block=32)
    if KERNEL.legal(problem, good, ampere) is not None:
        pytest.skip(KERNEL.legal(problem, good, ampere))
    for asked, device, fields, word in (
        (problem, turing, {}, "sm_80"),
        (problem, Device.parse("cpu"), {}, "sm_80"),
        (problem, ampere, {"stages": 9}, "stages=9"),
        (problem, ada, {"stages": 4}, "shared memory"),
        (OP.Problem(8, 8, 8), ampere, {"tile_m": 64, "stages": 5, "blocks": 2}, "shared memory"),
        (problem, ampere, {"stages": 2, "blocks": 2}, "registers"),
        (problem, ampere, {"warps_m": 1, "warps_n": 2}, "2 warps"),
        (problem, ampere, {"tile_m": 256, "warps_m": 2}, "128 a warp"),
        (problem, ampere, {"tile_n": 256}, "128 sums"),
        (problem, ampere, {"tile_m": 32, "warps_m": 4}, "8 a warp"),
        (int8, ampere, {"tile_m": 64}, "multiple of 128"),
        (coarse, ampere, {"tile_m": 64}, "multiple of 128"),
        (OP.Problem(2**31, 2**31, 1), ampere, {"tile_m": 32, "warps_m": 1}, "2^30 tiles"),
    ):
        config = dataclasses.replace(good, **fields)
        assert word in KERNEL.legal(asked, config, device), (fields, word)
    assert KERNEL.legal(fine, dataclasses.replace(good, tile_m=64), ampere) is None


def test_shared_memory_follows_from_the_layout():
    """By hand: a ring, its scales, and at the end what outgrows the ring, and a maximum a block."""
    fp32 = OP.Problem(128, 128, 128, block=32, out="fp32")
    config = MmaConfig(64, 128, 2, 2, stages=3)
    assert KERNEL.shared_bytes(fp32, config, ALIGNED) == 3 * (192 * 128 + 4 * (2 + 4) * 4)
    both = OP.Problem(128, 128, 128, block=64, out="int8", layout="both")
    assert KERNEL.shared_bytes(both, config, ALIGNED) == 3 * (192 * 128 + 2 * (1 + 2) * 4) + 2 * 4
    other = dataclasses.replace(both, out_block=32)
    assert (
        KERNEL.shared_bytes(other, config, ALIGNED)
        == KERNEL.shared_bytes(both, config, ALIGNED) + (2 * 4 - 2) * 4
    )
    narrow = dataclasses.replace(config, tile_m=32, tile_n=32, stages=2)  # 16x16 a warp
    assert KERNEL.shared_bytes(fp32, narrow, ALIGNED) == 2 * (64 * 128 + 4 * 2 * 4)


def test_every_problem_has_a_legal_default():
    for capability, block in itertools.product(CAPABILITIES, BLOCKS):
        for fields, (m, n, k) in itertools.product(OPTIONS, (*SHAPES, (8192, 8192, 8192))):
            problem, device = OP.Problem(m, n, k, block=block, **fields), target_device(capability)
            reason = KERNEL.legal(problem, KERNEL.default(problem, device), device)
            if reason is not None and "CuPy" in reason:
                pytest.skip(reason)
            assert reason is None, (capability, problem, reason)


@pytest.fixture
def gpu(device):
    """The GPU, where this kernel runs on it."""
    problem, found = OP.Problem(64, 64, 64), Device.parse(str(device))
    if (reason := KERNEL.legal(problem, KERNEL.default(problem, found), found)) is not None:
        pytest.skip(reason)
    return device


def wrong(problem, config, inputs):
    """What is wrong with one call, by the op's tolerance and to the bit; empty if nothing is."""
    check = verify(OP, KERNEL, problem, config, inputs)
    if not check.ok:
        return f"{problem}, {config}: {check.message}"
    c = gemm(*(inputs[x] for x in ("a", "a_scale", "b", "b_scale")), problem.block)
    c += inputs["bias"] if problem.bias else 0
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, config, inputs, outputs)
    if problem.out == "int8":
        q, scale = quantize(c, problem.out_block, problem.rounding, inputs.get("seed"))
        expected = {"q": q, "scale": scale, "qt": q.t(), "scale_t": scale.t()}
    else:
        c = (c + inputs["c"].float()) if problem.accumulate else c
        expected = {"c": c.to(outputs["c"].dtype)}
    for name, right in expected.items():
        if name in outputs and not torch.equal(outputs[name], right):
            return f"{problem}, {config}: {int((outputs[name] != right).sum())} of {name} differ"
    return ""


def check_all(cases, device):
    """Every (problem, config) to the bit; their code is compiled first, on all cores."""
    capability = Device.parse(str(device)).capability
    KERNEL.cubins(*cases[0], capability)  # NVRTC's first use is not safe from several threads
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: KERNEL.cubins(*case, capability), cases))
    for problem, config in cases:
        message = wrong(problem, config, OP.inputs(problem, device, data="heavy"))
        assert not message, message


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_family_is_bit_equal(gpu, config):
    cases, found = [], Device.parse(str(gpu))
    for block, (i, shape) in itertools.product(BLOCKS, enumerate(SHAPES)):
        turn = i + block // 32
        problems = (
            OP.Problem(*shape, block=block, **fields) for fields in (*OPTIONS[turn:], *OPTIONS)
        )
        able = [p for p in problems if KERNEL.legal(p, config, found) is None]
        cases += [(problem, config) for problem in able[:1]]
    assert len(cases) >= 2 * len(SHAPES)  # of the blocks, 128 may be too many for a tile
    check_all(cases, gpu)


@pytest.mark.gpu
def test_every_option_of_the_default_is_bit_equal(gpu):
    """Of more tiles than an H200 has multiprocessors, so that it is the default of large ones."""
    problems = [
        OP.Problem(1600, 1500, 208, block=block, **fields)
        for block, fields in itertools.product(BLOCKS, OPTIONS)
    ]
    found = Device.parse(str(gpu))
    check_all([(problem, KERNEL.default(problem, found)) for problem in problems], gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "out_block"), UNEQUAL)
def test_codes_in_other_blocks_are_bit_equal(gpu, block, out_block):
    cases, found = [], Device.parse(str(gpu))
    tiles = [(config, shape) for shape in SHAPES for config in (*CONFIGS, None)]
    for i, (config, shape) in enumerate(tiles):
        fields = {**CODES[i % len(CODES)], "block": block, "out_block": out_block}
        problem = OP.Problem(*shape, **fields)
        config = config or KERNEL.default(problem, found)
        if KERNEL.legal(problem, config, found) is None:
            cases.append((problem, config))
    assert len(cases) >= 2 * len(SHAPES)
    check_all(cases, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 16, 8, 4, 3])
@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_row_strided_views_of_every_alignment(gpu, before, config):
    problem = OP.Problem(150, 140, 333, block=32, out="fp32")
    inputs = OP.inputs(problem, gpu)
    for name in ("a", "b"):
        # What lies around the rows is no zero, so that a byte too many shows.
        wide = torch.nn.functional.pad(inputs[name], (before, 16 - 333 % 16 + 16), value=99)
        inputs[name] = wide[:, before : before + 333]
    assert not (message := wrong(problem, config, inputs)), message


@pytest.mark.gpu
def test_it_can_be_captured(gpu):
    problem = OP.Problem(256, 256, 256, out="fp32")
    config, inputs = KERNEL.default(problem, Device.parse(str(gpu))), OP.inputs(problem, gpu)
    outputs = OP.outputs(problem, inputs)
    KERNEL.launch(problem, config, inputs, outputs)
    torch.cuda.synchronize()
    expected = outputs["c"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.launch(problem, config, inputs, outputs)
    outputs["c"].zero_()
    graph.replay()
    assert torch.equal(outputs["c"], expected)
