"""gelu's CUDA kernel: its machine code, legality and choice, and on a GPU every path through it."""

import dataclasses
import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import launch, verify
from jetfire.kernels_cuda.tiles import Access, PartsConfig
from jetfire.reference.quantize import quantize
from jetfire.tests.audited import together

OP = registry.get("gelu")
KERNEL = registry.get_kernel("gelu", "tiles")
SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
LAYOUTS = ("q", "qt", "both")
# Mode, rounding and layout of a training step, in blocks of 32 to 128.
STEP = (("fwd", "nearest", "q"), ("fwd", "nearest", "qt"), ("bwd", "stochastic", "both"))


def problem_of(m=8192, n=4096, **fields):
    return OP.Problem(m, n, **fields)


def compiled(problem, access=None):
    """The machine code of its default config."""
    config = KERNEL.default(problem, SM_90)
    return KERNEL.program(problem, config, access or KERNEL.accesses(problem)).cubin((9, 0))


HOW = (("fwd", "nearest"), ("fwd", "stochastic"), ("bwd", "stochastic"))
ANYWHERE = Access(tma=False, q=1, qt=1)


def crowded(how, approximate, out_block):
    """Of codes in boxes and words, then of any address and size."""
    fields = {"mode": how[0], "rounding": how[1], "approximate": approximate, "layout": "both"}
    problem = problem_of(out_block=out_block, **fields)
    return (problem,), (problem, ANYWHERE)


@pytest.fixture(scope="module")
def crowds():
    choices = itertools.product(HOW, ("tanh", "erf"), (32, 128))
    return together(compiled, [case for chosen in choices for case in crowded(*chosen)])


@pytest.mark.parametrize("out_block", [32, 128])
@pytest.mark.parametrize("approximate", ["tanh", "erf"])
@pytest.mark.parametrize(("mode", "rounding"), HOW)
def test_nothing_spills(crowds, mode, rounding, approximate, out_block):
    """With as many blocks as fit."""
    found, anywhere = (crowds[case] for case in crowded((mode, rounding), approximate, out_block))
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert "UTMALDG" in found.instructions
    # Address arithmetic of bytes may take a few of the registers that products have.
    assert anywhere.spills <= 8


def step(mode, rounding, layout):
    return problem_of(out_block=128, mode=mode, rounding=rounding, layout=layout)


@pytest.fixture(scope="module")
def steps():
    return together(compiled, [(step(*how),) for how in STEP])


@pytest.mark.parametrize(("mode", "rounding", "layout"), STEP)
def test_a_look_up_is_two_instructions(steps, mode, rounding, layout):
    """Of 64 codes per thread: an address and a load each, of bytes where codes decide."""
    found = steps[(step(mode, rounding, layout),)]
    addresses = found.instructions["PRMT"] if mode == "fwd" else found.instructions["IDP"]
    assert found.sass.count("LDS.U8") == (64 if mode == "fwd" else 0)
    # Besides, PRMT packs codes and tables, and transposes; IDP turns 48 codes of dy to floats.
    others = {"q": 48 + 12, "qt": 48 + 12 + 32, "both": 48}[layout]
    assert 64 + others <= addresses <= 64 + others + 8


@pytest.mark.parametrize(("mode", "rounding", "layout"), STEP)
def test_a_tile_has_few_instructions(steps, mode, rounding, layout):
    """All of the code, with what is done once and what is seldom done, per each of 64 codes."""
    found = steps[(step(mode, rounding, layout),)]
    assert sum(found.instructions.values()) / 64 < (28 if mode == "bwd" else 20)


def test_legal_says_why_not():
    problem = problem_of(out_block=128)
    good = KERNEL.default(problem, SM_90)
    assert KERNEL.legal(problem, good, SM_90) is None
    for field, value in {"warps": 4, "stages": 1, "resident": 8}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert KERNEL.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    backward = problem_of(out_block=128, mode="bwd")
    for of, config, reason in (
        (problem, PartsConfig(8, 2, 5), "resident=5: 64 registers per thread do not fit"),
        (backward, PartsConfig(8, 2, 3), "resident=3: 128 registers per thread do not fit"),
        (problem, PartsConfig(8, 4, 4), "resident=4 stages=4: too much shared memory"),
        (problem_of(m=1 << 31), good, f"m={1 << 31}: expected at most 2^30"),
    ):
        assert KERNEL.legal(of, config, SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in KERNEL.legal(problem, good, device)


@pytest.mark.parametrize(
    ("block", "out_block", "mode", "rounding"),
    list(itertools.product(BLOCKS, BLOCKS, ("fwd", "bwd"), ("nearest", "stochastic"))),
)
def test_the_default_is_legal(block, out_block, mode, rounding):
    problem = problem_of(block=block, out_block=out_block, mode=mode, rounding=rounding)
    assert KERNEL.legal(problem, KERNEL.default(problem, SM_90), SM_90) is None


def test_codes_at_any_address_and_pitch():
    problem = problem_of(64, 96, layout="both", mode="bwd")
    inputs = OP.inputs(problem, torch.device("cpu"))
    assert KERNEL.accesses(problem, inputs) == Access(tma=True, q=8, qt=4)
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    aligned = torch.empty(64, 112, dtype=torch.int8)[:, 16:]
    for dy, tma in ((odd, False), (aligned, True), (aligned[:, :95], True)):
        assert KERNEL.accesses(problem, inputs | {"dy": dy}).tma is tma
    assert KERNEL.accesses(problem, inputs, {"q": odd}).q == 1
    assert KERNEL.accesses(problem_of(63, 97)) == Access(tma=False, q=1, qt=1)


def verified(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["x"]))
    assert KERNEL.legal(problem, config, Device.of(inputs["x"])) is None
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(device, block, out_block, warps):
    """Both directions, roundings and forms, over tiles that are whole and that are not."""
    sizes = itertools.cycle([(8192, 4096), (1, 1), (300, 272), (129, 130), (1000, 520), (36, 40)])
    layouts = itertools.cycle(LAYOUTS)
    for mode, rounding, approximate, data in itertools.product(
        ("fwd", "bwd"), ("nearest", "stochastic"), ("tanh", "erf"), ("normal", "heavy")
    ):
        m, n = next(sizes)
        fields = {"mode": mode, "rounding": rounding, "approximate": approximate}
        problem = problem_of(m, n, block=block, out_block=out_block, layout=next(layouts), **fields)
        config = dataclasses.replace(
            KERNEL.default(problem, device_of(device)), warps=warps, resident=1
        )
        verified(problem, OP.inputs(problem, device, data=data), config)


def device_of(device):
    return Device.of(torch.empty(0, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_short_and_long_rings(device, stages, mode):
    problem = problem_of(4096, 3072, out_block=128, mode=mode, layout="both")
    verified(problem, OP.inputs(problem, device), PartsConfig(8, stages, 1))


def extremes(m, n, block, side, device):
    """Blocks of every magnitude, some of few or no values above 0, with a NaN in the last.

    One has a scale so large that no code but 0 could be finite in the units of those beside it.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=generator).clamp(-3, 3)
    magnitudes = (1e-36, 1e-28, 1e-10, 1e-3, 1.0, 4.0, 30.0, 300.0, 1e4, 1e12, 1e30, 1e37, 0.0)
    tiles = itertools.product(range(0, m, side), range(0, n, side))
    for i, (row, column) in enumerate(tiles):
        part = x[row : row + side, column : column + side]
        part *= magnitudes[i % len(magnitudes)]
        if i % 3 == 1:
            part.copy_(-part.abs() - i % 2 * 2.0)
        if i % 5 == 2:
            part.clamp_(-3.0, 0.2)
    x[m - 1, n - 1] = math.nan
    q, scale = quantize(x.to(device), block)
    q[:32, 256:288], scale[0, 256 // block] = 0, 3e38
    return q, scale


@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 128])
@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize("approximate", ["tanh", "erf"])
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_extreme_values(device, mode, approximate, out_block, side):
    """Scales that differ within a block of the output, or between blocks alone."""
    for rounding in ("nearest", "stochastic"):
        fields = {"mode": mode, "approximate": approximate, "rounding": rounding}
        problem = problem_of(512, 640, out_block=out_block, layout="both", **fields)
        inputs = OP.inputs(problem, device)
        inputs["x"], inputs["x_scale"] = extremes(512, 640, 32, side, device)
        if mode == "bwd":
            inputs["dy"], inputs["dy_scale"] = extremes(512, 640, 32, 128, device)
            inputs["dy_scale"][1, 2] = math.inf
        inputs["x_scale"][0, 1] = math.nan
        verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_and_unaligned_codes(device, mode, offset):
    problem = problem_of(300, 1024, out_block=128, mode=mode, layout="both")
    inputs = OP.inputs(problem, device)
    for name in ("x", "dy") if mode == "bwd" else ("x",):
        wide = torch.full((300, 1072), 77, dtype=torch.int8, device=device)
        wide[:, offset : offset + 1024] = inputs[name]
        scale = torch.full((10, 41), torch.nan, dtype=torch.float32, device=device)
        scale[:, 3:35] = inputs[f"{name}_scale"]
        inputs |= {name: wide[:, offset : offset + 1024], f"{name}_scale": scale[:, 3:35]}
    verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("out_block", BLOCKS)
def test_over_its_input(device, out_block, offset):
    """No warp writes what another has yet to read, also where blocks have several tiles each."""
    for m, n in ((70, 130), (4096, 4096)):
        (problem,) = OP.problems("bwd", {"m": m, "n": n, "layout": "both", "out_block": out_block})
        inputs = OP.inputs(problem, device)
        config = KERNEL.default(problem, Device.of(inputs["x"]))
        expected = OP.outputs(problem, inputs)
        launch(KERNEL, problem, config, inputs, expected)
        flat = torch.empty(m * n + offset, dtype=torch.int8, device=device)[offset:]
        dy = flat.view(m, n).copy_(inputs["dy"])
        found = OP.outputs(problem, inputs) | {"q": dy}
        KERNEL.launch(problem, config, inputs | {"dy": dy}, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
def test_a_config_does_not_show_in_the_result(device):
    (problem,) = OP.problems("bwd", {"m": 1000, "n": 2048, "layout": "both", "out_block": 128})
    inputs = OP.inputs(problem, device, data="gradient")
    expected = OP.outputs(problem, inputs)
    launch(KERNEL, problem, PartsConfig(8, 2, 2), inputs, expected)
    for config in (PartsConfig(16, 2, 1), PartsConfig(8, 3, 1)):
        found = OP.outputs(problem, inputs)
        launch(KERNEL, problem, config, inputs, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
