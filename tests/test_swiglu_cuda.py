"""swiglu's CUDA kernel: machine code, legality and choice, and on a GPU every path through it."""

import dataclasses
import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import choose, launch, verify
from jetfire.kernels_cuda.swiglu import SwigluConfig
from jetfire.kernels_cuda.tiles import Access
from jetfire.reference.quantize import quantize
from jetfire.tests.audited import together

OP = registry.get("swiglu")
KERNEL = registry.get_kernel("swiglu", "tiles")
SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
LAYOUTS = ("q", "qt", "both")
HOW = tuple(itertools.product(("fwd", "bwd"), ("nearest", "stochastic")))
INPUTS = ("gate", "up", "dy")
ANYWHERE = Access(tma=False, q=1, qt=1)


def problem_of(mode="fwd", m=8192, n=4096, **fields):
    return OP.problems(mode, {"m": m, "n": n, **fields})[0]


def compiled(problem, config, access=None):
    return KERNEL.program(problem, config, access or KERNEL.accesses(problem)).cubin((9, 0))


def fullest(problem, warps, looked_up):
    """A config of as many blocks as fit."""
    configs = (SwigluConfig(warps, 2, resident, looked_up) for resident in (4, 3, 2, 1))
    return next(c for c in configs if KERNEL.legal(problem, c, SM_90) is None)


def crowded(how, out_block, warps, looked_up):
    """Of codes in boxes and words, then where silu is looked up of any address and size."""
    fields = {"mode": how[0], "rounding": how[1], "layout": "both"}
    problem = problem_of(**fields, block=32, out_block=out_block)
    config = fullest(problem, warps, looked_up)
    return (problem, config), *([(problem, config, ANYWHERE)] if looked_up else [])


# How silu is made has nothing to do with how many warps there are, nor with addresses.
CHOICES = (8, True), (16, True), (8, False)
CROWDS = tuple((how, block, *one) for how in HOW for block in BLOCKS for one in CHOICES)


@pytest.fixture(scope="module")
def crowds():
    return together(compiled, [case for chosen in CROWDS for case in crowded(*chosen)])


@pytest.mark.parametrize(("how", "out_block", "warps", "looked_up"), CROWDS)
def test_nothing_spills(crowds, how, out_block, warps, looked_up):
    """With as many blocks as fit."""
    found, *anywhere = (crowds[case] for case in crowded(how, out_block, warps, looked_up))
    # There two registers that are the same for all tiles are loaded once in each.
    few = how == ("bwd", "stochastic") and out_block == 64
    assert found.spills <= (2 if few else 0), found.registers
    assert "UTMALDG" in found.instructions
    assert all(one.spills == 0 for one in anywhere)


def laid_out(layout, block):
    problem = problem_of("bwd", layout=layout, block=block, out_block=128)
    return problem, KERNEL.default(problem, SM_90)


@pytest.fixture(scope="module")
def layouts():
    return together(compiled, [laid_out(*case) for case in itertools.product(LAYOUTS, BLOCKS)])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_spills(layouts, layout, block):
    found = layouts[laid_out(layout, block)]
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers


# Of a training step: how, layout, and how often silu or silu' is looked up for an element.
STEP = ((HOW[0], "both", 1), (HOW[1], "both", 1), (HOW[3], "both", 2))


def step(how, layout, looked_up):
    problem = problem_of(how[0], rounding=how[1], layout=layout, block=32, out_block=128)
    return problem, dataclasses.replace(KERNEL.default(problem, SM_90), looked_up=looked_up)


@pytest.fixture(scope="module")
def steps():
    choices = itertools.product(STEP, (True, False))
    return together(compiled, [step(*case[:2], looked_up) for case, looked_up in choices])


@pytest.mark.parametrize(("how", "layout", "times"), STEP)
def test_a_look_up_is_two_instructions(steps, how, layout, times):
    """Of 64 codes per thread: an address and a load each; or for silu two of the special unit."""
    found = steps[step(how, layout, True)]
    formula = steps[step(how, layout, False)]
    assert 64 * times <= found.sass.count("LDS R") < 64 * times + 32
    # Besides, 48 of 64 codes of `up` or `dy`, and 64 products of both, are made with IDP.
    others = 48 if how[0] == "fwd" else 48 + 64
    assert found.instructions["IDP"] == 64 * times + others
    assert formula.instructions["MUFU"] >= 2 * 64
    assert formula.sass.count("LDS R") < 64 * (times - 1) + 32


@pytest.mark.parametrize(("how", "layout", "times"), STEP)
def test_a_tile_has_few_instructions(steps, how, layout, times):
    """All of the code, with what is done once and what is seldom done, per each of 64 codes."""
    found = steps[step(how, layout, True)]
    most = {HOW[0]: 20, HOW[1]: 26, HOW[3]: 47}[how]
    assert sum(found.instructions.values()) / 64 < most


def test_legal_says_why_not():
    problem = problem_of(out_block=128)
    good = KERNEL.default(problem, SM_90)
    assert KERNEL.legal(problem, good, SM_90) is None
    for field, value in {"warps": 4, "stages": 1, "resident": 8}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert KERNEL.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    backward = problem_of("bwd", out_block=128)
    for of, config, reason in (
        (problem, SwigluConfig(8, 2, 3), "resident=3: 128 registers per thread do not fit"),
        (backward, SwigluConfig(16, 2, 2), "resident=2: 80 registers per thread do not fit"),
        (backward, SwigluConfig(8, 3, 2), "resident=2 stages=3: too much shared memory"),
        (problem_of(m=1 << 31), good, f"m={1 << 31}: expected at most 2^30"),
    ):
        assert KERNEL.legal(of, config, SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in KERNEL.legal(problem, good, device)


@pytest.mark.parametrize(
    ("block", "out_block", "how"), list(itertools.product(BLOCKS, BLOCKS, HOW))
)
def test_the_default_is_legal(block, out_block, how):
    problem = problem_of(how[0], block=block, out_block=out_block, rounding=how[1])
    assert KERNEL.legal(problem, KERNEL.default(problem, SM_90), SM_90) is None


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_it_is_no_one_s_choice_before_it_is_tuned(mode):
    assert choose(OP, problem_of(mode, m=8192, n=4000), SM_90)[0].name == "triton"


def test_codes_at_any_address_and_pitch():
    problem = problem_of("bwd", 64, 96, layout="both")
    inputs = OP.inputs(problem, torch.device("cpu"))
    outputs = OP.outputs(problem, inputs)
    assert KERNEL.accesses(problem, inputs, outputs) == Access(tma=True, q=8, qt=4)
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    aligned = torch.empty(64, 112, dtype=torch.int8)[:, 16:]
    for dy, tma in ((odd, False), (aligned, True), (aligned[:, :95], True)):
        assert KERNEL.accesses(problem, inputs | {"dy": dy}).tma is tma
    for dup, q in ((odd, 1), (aligned, 8), (torch.empty(64, 100, dtype=torch.int8)[:, :96], 1)):
        assert KERNEL.accesses(problem, inputs, outputs | {"dup": dup}).q == q
    assert KERNEL.accesses(problem_of("bwd", 63, 97)) == ANYWHERE


def device_of(device):
    return Device.of(torch.empty(0, device=device))


def verified(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["gate"]))
    assert KERNEL.legal(problem, config, Device.of(inputs["gate"])) is None
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(device, block, out_block, warps):
    """Both directions and roundings, over tiles that are whole and that are not."""
    sizes = itertools.cycle([(8192, 4096), (1, 1), (300, 272), (129, 130), (1000, 520), (36, 40)])
    layouts = itertools.cycle(LAYOUTS)
    for (mode, rounding), looked_up, data in itertools.product(
        HOW, (True, False), ("normal", "heavy")
    ):
        m, n = next(sizes)
        fields = {"block": block, "out_block": out_block, "rounding": rounding}
        problem = problem_of(mode, m, n, layout=next(layouts), **fields)
        config = dataclasses.replace(
            KERNEL.default(problem, device_of(device)),
            warps=warps,
            resident=1,
            looked_up=looked_up,
        )
        verified(problem, OP.inputs(problem, device, data=data), config)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_short_and_long_rings(device, stages, mode):
    problem = problem_of(mode, 4096, 3072, out_block=128, layout="both")
    verified(problem, OP.inputs(problem, device), SwigluConfig(8, stages, 1))


def extremes(m, n, side, device, seed):
    """Blocks of every magnitude, some of few or no values above 0, with a NaN in the last.

    One has a scale so large that no code but 0 could be finite in the units of those beside it.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=generator).clamp(-3, 3)
    magnitudes = (1e-36, 1e-28, 1e-10, 1e-3, 1.0, 4.0, 30.0, 300.0, 1e4, 1e12, 1e30, 1e37, 0.0)
    tiles = itertools.product(range(0, m, side), range(0, n, side))
    for i, (row, column) in enumerate(tiles):
        part = x[row : row + side, column : column + side]
        part *= magnitudes[(i + seed * 5) % len(magnitudes)]
        if i % 3 == 1:
            part.copy_(-part.abs() - i % 2 * 2.0)
    x[m - 1, n - 1] = math.nan
    q, scale = quantize(x.to(device), 32)
    q[:32, 256:288], scale[0, 8] = 0, 3e38
    return q, scale


@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 128])
@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize(("mode", "rounding"), HOW)
def test_extreme_values(device, mode, rounding, out_block, side):
    """Scales that differ within a block of the output, or between blocks alone."""
    problem = problem_of(mode, 512, 640, out_block=out_block, layout="both", rounding=rounding)
    inputs = OP.inputs(problem, device)
    for seed, name in enumerate(INPUTS[:2] if mode == "fwd" else INPUTS):
        of = 128 if name == "dy" else side
        inputs[name], inputs[f"{name}_scale"] = extremes(512, 640, of, device, seed)
    inputs["gate_scale"][0, 1], inputs["up_scale"][1, 2] = math.nan, math.inf
    verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_and_unaligned_codes(device, mode, offset):
    problem = problem_of(mode, 300, 1024, out_block=128, layout="both")
    inputs = OP.inputs(problem, device)
    for name in INPUTS[:2] if mode == "fwd" else INPUTS:
        wide = torch.full((300, 1072), 77, dtype=torch.int8, device=device)
        wide[:, offset : offset + 1024] = inputs[name]
        scale = torch.full((10, 41), torch.nan, dtype=torch.float32, device=device)
        scale[:, 3:35] = inputs[f"{name}_scale"]
        inputs |= {name: wide[:, offset : offset + 1024], f"{name}_scale": scale[:, 3:35]}
    verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_config_does_not_show_in_the_result(device, mode):
    fields = {"block": 32, "out_block": 128, "layout": "both", "rounding": "stochastic"}
    problem = problem_of(mode, 1000, 2048, **fields)
    inputs = OP.inputs(problem, device, data="gradient")
    expected = OP.outputs(problem, inputs)
    launch(KERNEL, problem, SwigluConfig(8, 2, 2), inputs, expected)
    for config in (SwigluConfig(16, 2, 1), SwigluConfig(8, 3, 1), SwigluConfig(8, 2, 2, False)):
        found = OP.outputs(problem, inputs)
        launch(KERNEL, problem, config, inputs, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
