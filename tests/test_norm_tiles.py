"""The norms' CUDA kernel: its machine code, legality and choice, and on a GPU every path."""

import dataclasses
import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose, launch, verify
from jetfire.core.machine_code import audits
from jetfire.kernels_cuda import tiles
from jetfire.kernels_cuda.norm_tiles import (
    PREFIXES,
    NormTilesConfig,
    accesses,
    blocks_per_strip,
    registers,
)
from jetfire.kernels_cuda.tiles import Access
from jetfire.tests.audited import together

SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
# Each op, and its gradient where it joins that of the residual stream.
FORMS = {
    "layernorm": ("layernorm", {}),
    "rmsnorm": ("rmsnorm", {}),
    "layernorm residual": ("layernorm", {"residual": True}),
    "rmsnorm residual": ("rmsnorm", {"residual": True}),
}
LAYOUTS = tuple(itertools.product(("q", "qt", "both"), ("nearest", "stochastic")))

pytestmark = pytest.mark.parametrize("form", FORMS)


def op_of(form):
    return registry.get(FORMS[form][0])


def kernel_of(form):
    return registry.get_kernel(FORMS[form][0], "tiles")


def problem_of(form, m=8192, n=1024, **fields):
    fields = {"block": 32, "out_block": 128, **FORMS[form][1], **fields}
    return op_of(form).problems("bwd", {"m": m, "n": n, **fields})[0]


def compiled(form, which, problem, config, access=None):
    access = access or accesses(problem)
    try:
        return kernel_of(form).by_launch(problem, config, access)[which].cubin((9, 0))
    except UsageError as error:
        pytest.skip(str(error))


def crowd(problem, warps):
    """Return a config with as many blocks of so many warps as an SM has registers for, up to 3."""
    config = NormTilesConfig(warps)
    fitting = [tiles.fitting(warps, registers(launch, problem, config)) for launch in PREFIXES]
    return dataclasses.replace(
        config, sums_resident=min(3, fitting[0]), resident=min(3, fitting[1])
    )


def crowded(form, warps, out_block):
    """Both functions of codes in boxes and words, then of any address and size."""
    problem = problem_of(form, out_block=out_block, layout="both", rounding="stochastic")
    config = crowd(problem, warps)
    ragged = problem_of(form, 8191, 1021, out_block=out_block, layout="both")
    odd = Access(tma=False, stream=2, q=1, qt=1)
    even = [(form, which, problem, config, None) for which in PREFIXES]
    return [*even, *((form, which, ragged, config, odd) for which in PREFIXES)]


@pytest.fixture(scope="module")
def crowds():
    choices = itertools.product(FORMS, (8, 16), BLOCKS)
    return together(compiled, [case for chosen in choices for case in crowded(*chosen)])


def test_the_gradient_waits_for_the_sums_beside_which_it_starts(crowds, form):
    """Its fence (CCTL) drops what L1 may hold from before the sums."""
    both = [(which, found) for (of, which, *_), found in crowds.items() if of == form]
    assert {which for which, _ in both} == {"sums", "gradient"}
    for which, found in both:
        second = which == "gradient"
        assert ("PREEXIT" in found.instructions) is not second
        assert ("ACQBULK" in found.instructions) is second
        assert ("CCTL" in found.instructions) is second


@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize("warps", [8, 16])
def test_nothing_spills(crowds, form, warps, out_block):
    """With as many blocks as fit."""
    found = [crowds[case] for case in crowded(form, warps, out_block)]
    for one in found[:2]:
        assert (one.spills, one.stack_bytes) == (0, 0), one.registers
        assert "UTMALDG" in one.instructions
    # Address arithmetic of bytes may take a few of the registers that products have.
    assert [one.spills <= 8 for one in found[2:]] == [True, True]


def laid_out(form, layout, rounding):
    problem = problem_of(form, layout=layout, rounding=rounding)
    return form, "gradient", problem, kernel_of(form).default(problem, SM_90)


@pytest.fixture(scope="module")
def layouts():
    choices = itertools.product(FORMS, LAYOUTS)
    return together(compiled, [laid_out(form, *layout) for form, layout in choices])


@pytest.mark.parametrize(("layout", "rounding"), LAYOUTS)
def test_no_layout_or_rounding_spills(layouts, form, layout, rounding):
    found = layouts[laid_out(form, layout, rounding)]
    assert found.spills == 0, found.registers


def test_a_tile_has_few_instructions(form):
    """All of the code, with what is done once, per each of a thread's 32 or 64 codes in it."""
    problem = problem_of(form, layout="both", rounding="stochastic")
    config = NormTilesConfig()
    sums, gradient = audits([compiled(form, which, problem, config) for which in PREFIXES])
    assert sum(sums.instructions.values()) / 32 < 31
    assert sum(gradient.instructions.values()) / 64 < 44


def test_legal_says_why_not(form):
    problem, kernel = problem_of(form), kernel_of(form)
    good = NormTilesConfig()
    assert kernel.legal(problem, good, SM_90) is None
    for field, value in {"warps": 4, "stages": 1, "resident": 4, "sums_stages": 5}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert kernel.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    for wrong, reason in (
        ({"warps": 16, "resident": 2}, "resident=2: 80 registers per thread do not fit"),
        ({"stages": 4, "resident": 2}, "resident=2 stages=4: too much shared memory"),
        (
            {"sums_stages": 3, "sums_resident": 3},
            "sums_resident=3 sums_stages=3: too much shared memory",
        ),
    ):
        config = dataclasses.replace(good, **{"sums_resident": 1, **wrong})
        assert kernel.legal(problem, config, SM_90) == reason
    for other, reason in (
        (op_of(form).problems("fwd", {"m": 64, "n": 64})[0], "mode=fwd: expected bwd"),
        (problem_of(form, m=1 << 31), f"m={1 << 31}: expected at most 2^30"),
    ):
        assert kernel.legal(other, good, SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in kernel.legal(problem, good, device)


@pytest.mark.parametrize(("block", "out_block"), list(itertools.product(BLOCKS, BLOCKS)))
def test_the_default_is_legal(form, block, out_block):
    problem = problem_of(form, block=block, out_block=out_block)
    kernel = kernel_of(form)
    assert kernel.legal(problem, kernel.default(problem, SM_90), SM_90) is None


@pytest.mark.parametrize(("m", "n"), [(8192, 1024), (8192, 4096), (300, 70), (1, 100000)])
def test_blocks_that_add_up_run_at_once(form, m, n):
    """Each has a tile at least, and there is one at least per strip of columns."""
    problem = problem_of(form, m=m, n=n)
    config = kernel_of(form).default(problem, SM_90)
    each, strips, most = blocks_per_strip(problem, config, 132), -(-n // 128), -(-m // 128)
    assert 1 <= each <= most
    room = config.sums_resident * 132
    assert each * strips <= max(room, strips)
    assert each == most or (each + 1) * strips > room


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_the_choice_for_a_problem_that_no_one_tuned(form):
    problem = problem_of(form, m=8192, n=4000)
    assert choose(op_of(form), problem, SM_90)[0].name == "tiles"


def test_numbers_at_any_address_and_pitch(form):
    problem = problem_of(form, 64, 96, layout="both")
    inputs = op_of(form).inputs(problem, torch.device("cpu"))
    assert accesses(problem, inputs) == Access(tma=True, stream=16, q=8, qt=4)
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    aligned = torch.empty(64, 112, dtype=torch.int8)[:, 16:]
    for dy, tma in ((odd, False), (aligned, True)):
        assert accesses(problem, inputs | {"dy": dy}).tma is tma
    assert accesses(problem, inputs, {"q": odd}).q == 1
    assert accesses(problem_of(form, 63, 97)) == Access(tma=False, stream=2, q=1, qt=1)
    if "residual" in form:
        odd = torch.empty(64 * 96 + 1, dtype=torch.bfloat16)[1:].view(64, 96)
        assert accesses(problem, inputs | {"dsum": odd}).stream == 2
        assert accesses(problem, inputs, {"dx": odd}).stream == 2


def device_of(device):
    return Device.of(torch.empty(0, device=device))


def verified(form, problem, inputs, config=None):
    where = Device.of(inputs["x"])
    config = config or kernel_of(form).default(problem, where)
    assert kernel_of(form).legal(problem, config, where) is None
    result = verify(op_of(form), kernel_of(form), problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize("out_block", BLOCKS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(form, device, block, out_block, warps):
    """Roundings and layouts, over tiles that are whole and that are not."""
    sizes = ((8192, 1024), (1, 1), (300, 272), (129, 130), (1000, 520), (36, 40), (515, 4096))
    layouts = itertools.cycle(LAYOUTS)
    for (m, n), data in itertools.product(sizes, ("heavy", "gradient")):
        layout, rounding = next(layouts)
        fields = {"block": block, "out_block": out_block, "layout": layout, "rounding": rounding}
        problem = problem_of(form, m, n, **fields)
        inputs = op_of(form).inputs(problem, device, data=data)
        verified(form, problem, inputs, crowd(problem, warps))


@pytest.mark.gpu
@pytest.mark.parametrize(("stages", "resident"), [(2, 2), (3, 1), (4, 1)])
def test_short_and_long_rings(form, device, stages, resident):
    """Of many turns each: 96 tiles down, and rows of 24 of them."""
    problem = problem_of(form, 12288, 3072, layout="both")
    config = NormTilesConfig(8, stages, resident, stages, resident)
    verified(form, problem, op_of(form).inputs(problem, device), config)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(100, 20000), (100000, 100)])
def test_long_rows_and_columns(form, device, m, n):
    """More tiles across than blocks at once, or one strip alone."""
    problem = problem_of(form, m, n, layout="both")
    verified(form, problem, op_of(form).inputs(problem, device, data="heavy"))


@pytest.mark.gpu
@pytest.mark.parametrize("out_block", BLOCKS)
def test_extreme_values(form, device, out_block):
    """Scales far from one another, and some that are not finite."""
    for rounding, mode in itertools.product(("nearest", "stochastic"), ("scales", "not finite")):
        fields = {"out_block": out_block, "layout": "both", "rounding": rounding}
        problem = problem_of(form, 512, 640, **fields)
        inputs = op_of(form).inputs(problem, device)
        generator = torch.Generator().manual_seed(0)
        for name in ("x_scale", "dy_scale"):
            powers = torch.randint(-40, 40, inputs[name].shape, generator=generator)
            if mode == "scales":
                inputs[name] *= 2.0 ** powers.to(device)
        if mode == "not finite":
            inputs["x_scale"][0, 1] = inputs["dy_scale"][5, 2] = math.nan
            if "residual" in form:
                inputs["dsum"][300, 200], inputs["dsum"][400, 1] = math.nan, math.inf
        verified(form, problem, inputs)


@pytest.mark.gpu
def test_a_factor_out_of_range_meets_small_weights(form, device):
    """The scale of dy times rstd is 2^130, and times a weight, too, 2^110 at the most."""
    problem = problem_of(form, 300, 272, layout="both")
    inputs = op_of(form).inputs(problem, device)
    inputs["dy_scale"].fill_(2.0**120)
    inputs["x_scale"].fill_(2.0**-17)
    inputs["rstd"].fill_(2.0**10)
    inputs["weight"].mul_(2.0**-20)
    if "mean" in inputs:
        inputs["mean"].fill_(2.0**-12)
    verified(form, problem, inputs)


def steep(form, device):
    """Rows whose slope is beyond 2^128 and meets no x that makes it too large a gradient.

    The second block's x is so small that its part of dx is; dy is 0 there.
    """
    problem = problem_of(form, 32, 64, out_block=32, layout="both")
    inputs = op_of(form).inputs(problem, device)
    for name in ("x", "dy"):
        inputs[name].zero_()
        inputs[name][:, 0] = 100
    inputs["x"][:, 40] = 3
    inputs["x_scale"].copy_(torch.tensor([[2.0**-10, 2.0**-60]]))
    inputs["dy_scale"].fill_(2.0**115)
    inputs["weight"].fill_(1.0)
    inputs["rstd"].fill_(2.0**8)
    if "mean" in inputs:
        inputs["mean"].zero_()
    return problem, inputs


def test_a_slope_out_of_range_leaves_the_reference_finite(form):
    """So that a kernel is held to it."""
    problem, inputs = steep(form, torch.device("cpu"))
    expected = op_of(form).reference(problem, inputs)
    over = expected["dx_over"][:, 32:] if problem.residual else expected["q_over"][:, 1]
    assert expected["q"][:, 32:].isfinite().all()
    assert not over.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiles", "gluon"])
def test_a_slope_out_of_range(form, device, name):
    kernel = registry.get_kernel(FORMS[form][0], name)
    problem, inputs = steep(form, device)
    config = kernel.default(problem, Device.of(inputs["x"]))
    result = verify(op_of(form), kernel, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_and_unaligned(form, device, offset):
    problem = problem_of(form, 300, 1024, layout="both")
    inputs = op_of(form).inputs(problem, device)
    for name in ("x", "dy", "dsum"):
        if name not in inputs:
            continue
        wide = torch.full((300, 1072), 77, dtype=inputs[name].dtype, device=device)
        wide[:, offset : offset + 1024] = inputs[name]
        inputs[name] = wide[:, offset : offset + 1024]
    for name in ("x_scale", "dy_scale"):
        scale = torch.full((10, 41), torch.nan, dtype=torch.float32, device=device)
        scale[:, 3:35] = inputs[name]
        inputs[name] = scale[:, 3:35]
    verified(form, problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("out_block", BLOCKS)
def test_over_its_input(form, device, out_block):
    """No warp writes what another has yet to read: q over dy, and dx over dsum."""
    for m, n in ((70, 130), (8192, 1024)):
        problem = problem_of(form, m, n, layout="both", out_block=out_block)
        op, kernel = op_of(form), kernel_of(form)
        inputs = op.inputs(problem, device)
        config = kernel.default(problem, Device.of(inputs["x"]))
        expected = op.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, expected)
        again = inputs | {name: inputs[name].clone() for name in ("dy", "dsum") if name in inputs}
        found = op.outputs(problem, inputs) | {"q": again["dy"]}
        if "residual" in form:
            found["dx"] = again["dsum"]
        kernel.launch(problem, config, again, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
def test_a_result_is_the_same_in_every_run(form, device):
    problem = problem_of(form, 20000, 1024, layout="both")
    op, kernel = op_of(form), kernel_of(form)
    inputs = op.inputs(problem, device)
    config = kernel.default(problem, Device.of(inputs["x"]))
    expected, found = op.outputs(problem, inputs), op.outputs(problem, inputs)
    launch(kernel, problem, config, inputs, expected)
    for _ in range(20):
        launch(kernel, problem, config, inputs, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
