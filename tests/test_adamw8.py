"""adamw8: codes of moments to the bit, the update against float64, and beside torch's own."""

import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.ops import int8_adamw8, int8_quantize
from jetfire.reference.adamw8 import (
    first_codes,
    first_values,
    narrowed,
    second_codes,
    second_values,
)

OP = registry.get("adamw8")
KERNEL = registry.get_kernel("adamw8", "triton")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["param"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


# The codes


def test_a_code_is_the_nearest_root():
    """Of all that there are, found in float64."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randn((3, 128), generator=generator) * 10.0 ** torch.arange(-8, -2, 2)[:3, None]
    q, scale = first_codes(m)
    roots = torch.arange(-127, 128) * m.abs().amax(1, keepdim=True).double().sqrt() / 127
    exact = m.double().abs().sqrt() * m.sign()
    assert torch.equal(q.long(), (exact[:, :, None] - roots[:, None]).abs().argmin(2) - 127)
    assert torch.allclose(scale[:, 0].double(), roots[:, -1] / 127, rtol=1e-7)
    q, scale = second_codes(m.square())
    levels = torch.arange(1, 255) * m.abs().amax(1, keepdim=True).double().sqrt() / 254
    exact = m.double().abs().sqrt()
    assert torch.equal(q.long(), (exact[:, :, None] - levels[:, None]).abs().argmin(2) - 126)


def test_codes_of_what_codes_stand_for_are_these_codes():
    every = torch.arange(-127, 128, dtype=torch.int8).view(1, -1).expand(4, 255)
    scale = torch.tensor([1e-9, 3e-5, 1.0, 7e3]).view(4, 1).expand(4, 2)
    assert torch.equal(first_codes(first_values(every[:, :128], scale[:, :1]))[0], every[:, :128])
    high = every[:, 127:]  # a group that holds its largest code
    assert torch.equal(second_codes(second_values(high, scale))[0][:, :128], high[:, :128])


def test_no_code_of_a_second_moment_stands_for_zero():
    v = torch.zeros((1, 128))
    v[0, 0] = 1.0
    q, scale = second_codes(v)
    assert q.tolist() == [[127] + [-126] * 127]
    assert second_values(q, scale)[0, 1] == pytest.approx(254.0**-4)


def test_a_group_without_a_finite_number_above_zero():
    m = torch.zeros((3, 130))
    m[0, 5], m[1, 5] = math.nan, math.inf
    for codes in (first_codes, second_codes):
        q, scale = codes(m)
        assert not q[:, :128].any()
        assert scale[:2, 0].isnan().all()
        assert not scale[2].any()
        assert not scale[:, 1].any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_a_moment_is_kept_to_some_hundredths(spread):
    """Of all from a thousandth of their group's largest, whose sizes are log-normal."""
    generator = torch.Generator().manual_seed(1)
    m = torch.randn((64, 128), generator=generator)
    m *= (spread * torch.randn((64, 128), generator=generator)).exp()
    kept, v = first_values(*first_codes(m)), m.square()
    of_root = second_values(*second_codes(v)).sqrt() / v.sqrt() - 1
    large = m.abs() > m.abs().amax(1, keepdim=True) / 1000
    assert float((kept / m - 1)[large].abs().mean()) < 0.05
    assert float(of_root[large].abs().mean()) < 0.03


def linear(x, levels, least):
    """The numbers that codes in proportion to x stand for, with a scale for each group."""
    groups = x.unflatten(1, (-1, 128))
    scale = groups.abs().amax(2, keepdim=True) / levels
    codes = (groups / scale).round()
    return (codes if least is None else codes.clamp(min=least)).mul(scale).flatten(1)


def updates_off(first, second):
    """How far updates are from those of fp32's moments, each step's moments through codes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1.5 * torch.randn((64, 256), generator=generator)).exp()
    m = kept_m = v = kept_v = torch.zeros(64, 256)
    off = whole = 0.0
    for step in range(1, 61):
        g = sizes * torch.randn((64, 256), generator=generator)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        new_m, new_v = 0.9 * kept_m + 0.1 * g, 0.95 * kept_v + 0.05 * g * g
        if step > 20:
            right, got = m / (v.sqrt() + 1e-8), new_m / (new_v.sqrt() + 1e-8)
            unit = (1 - 0.95**step) ** 0.5 / (1 - 0.9**step)
            off += float(((got - right) * unit).square().sum())
            whole += float((right * unit).square().sum())
        kept_m, kept_v = first(new_m), second(new_v)
    return math.sqrt(off / whole)


def test_updates_are_nearer_than_with_codes_in_proportion():
    """The figures in the reference's docstring."""
    ours = updates_off(
        lambda m: first_values(*first_codes(m)), lambda v: second_values(*second_codes(v))
    )
    roots, with_zeros = (
        updates_off(
            lambda m: linear(m, 127, None), lambda v, low=low: linear(v.sqrt(), 254, low).square()
        )
        for low in (1, None)
    )
    assert ours == pytest.approx(0.25, abs=0.01)
    assert roots == pytest.approx(0.62, abs=0.01)
    assert with_zeros == pytest.approx(17, abs=1)


# The kernels


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (33, 50), (70, 160), (129, 128)])
def test_any_shape(device, block, m, n):
    problem = OP.Problem(m, n, block=block)
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.filterwarnings("ignore:invalid value")  # of NaN and ∞
@pytest.mark.parametrize(
    ("tile_n", "slices", "stages"),
    [(128, 1, 1), (128, 4, 1), (256, 2, 1), (128, 8, 2), (256, 4, 3)],
)
def test_slices_of_a_block(device, tile_n, slices, stages):
    problem = OP.Problem(140, 300, block=128)
    config = KERNEL.Config(128, tile_n, 16, slices=slices, stages=stages)
    inputs = OP.inputs(problem, device, data="outlier")
    inputs["grad"][100, 7], inputs["grad"][130, 200] = math.nan, math.inf
    check(problem, inputs, config)


@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize("m", [5, 128, 130])
def test_slices_beyond_the_last_row(device, m, slices):
    problem = OP.Problem(m, 200, block=128)
    inputs = OP.inputs(problem, device, data="gradient")
    check(problem, inputs, KERNEL.Config(128, 256, 16, slices=slices))


@pytest.mark.parametrize("row", [0, 40, 127])
def test_one_number_decides_its_block_s_scale_whichever_slice_holds_it(device, row):
    problem, config = OP.Problem(128, 256, block=128), KERNEL.Config(128, 256, 16, slices=8)
    for value, expected in ((2.0**60, 2.0**60 / 127), (math.inf, math.nan), (math.nan, math.nan)):
        inputs = OP.inputs(problem, device)
        inputs["param"][row, 130], inputs["grad"][row, 130] = value, 0.0
        inputs["exp_avg"][row] = 0
        outputs = OP.outputs(problem, inputs)
        launch(KERNEL, problem, config, inputs, outputs)
        for scale in (outputs["scale"].flatten(), outputs["scale_t"].flatten()):
            assert scale[1].item() == pytest.approx(expected, rel=0.01, nan_ok=True)
            assert 0 < scale[0].item() < 1
        assert outputs["q"][:, 128:].any().item() == math.isfinite(value)


def test_repeats_bit_for_bit_and_leaves_its_counters_at_zero(device, monkeypatch):
    given = []

    def counters(device, count):
        given.append(torch.zeros(count, dtype=torch.int32, device=device))
        return given[-1]

    monkeypatch.setattr("jetfire.kernels_triton.adamw8.counters", counters)
    found = []
    for layout in ("none", "both", "both"):
        problem = OP.Problem(140, 300, block=64, layout=layout)
        inputs = OP.inputs(problem, device)
        outputs = OP.outputs(problem, inputs)
        launch(KERNEL, problem, KERNEL.Config(64, 256, 8, slices=4), inputs, outputs)
        found.append(outputs)
    assert [x.numel() for x in given] == [3 * 2 * (1 + 4)] * 2  # without codes there are none
    assert not any(x.any() for x in given)
    assert all(torch.equal(x, found[1][name]) for name, x in found[2].items())


def test_tiles_hold_whole_groups():
    device = Device(kind="cuda", capability=(9, 0))
    reason = KERNEL.legal(OP.Problem(64, 64), KERNEL.Config(32, 64, 4), device)
    assert reason == "tile_n=64: expected a multiple of the moments' 128"


def test_parts_are_read_ahead_of_tiles_in_slices_that_leave_room():
    device, problem = Device(kind="cuda", capability=(9, 0)), OP.Problem(128, 1024, block=128)
    for slices, stages, tile_n, reason in (
        (1, 2, 128, "stages=2: expected 1, or 2 or 3 of a tile in slices"),
        (8, 4, 128, "stages=4: expected 1, or 2 or 3 of a tile in slices"),
        (8, 3, 512, "stages=3 tile_n=512: expected tile_n of at most 256"),
        (8, 3, 256, None),
    ):
        config = KERNEL.Config(128, tile_n, 16, slices=slices, stages=stages)
        assert KERNEL.legal(problem, config, device) == reason


@pytest.mark.parametrize(
    ("capability", "block", "n", "stages"),
    [
        ((9, 0), 128, 1024, 3),
        ((9, 0), 64, 1024, 3),
        ((9, 0), 32, 1024, 1),
        ((9, 0), 128, 1000, 1),
        ((8, 0), 128, 1024, 3),
        ((8, 9), 128, 1024, 1),  # 100 KiB of shared memory, of 164
    ],
)
def test_defaults_read_ahead_where_four_programs_have_room(capability, block, n, stages):
    device, problem = target_device(capability), OP.Problem(1024, n, block=block)
    config = KERNEL.default(problem, device)
    assert config.stages == stages
    assert KERNEL.legal(problem, config, device) is None


@pytest.mark.parametrize("data", ["outlier", "gradient"])
@pytest.mark.parametrize("layout", ["none", "q", "qt"])
def test_layouts_and_guards(device, layout, data):
    problem = OP.Problem(45, 160, layout=layout, guarded=True)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_found_inf_leaves_all_as_it_was(device, name):
    kernel = registry.get_kernel("adamw8", name)
    problem = OP.Problem(40, 140, guarded=True)
    inputs = OP.inputs(problem, device if name == "triton" else torch.device("cpu"))
    inputs["found_inf"].fill_(1)
    inputs["grad_scale"].fill_(math.nan)
    inputs["grad"][3, 5] = math.inf
    check(problem, inputs, kernel=kernel)


@pytest.mark.filterwarnings("ignore:invalid value")  # 0/0, in the padding
def test_from_nothing_and_without_eps(device):
    problem = OP.Problem(5, 130, eps=0.0)
    inputs = OP.inputs(problem, device)
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        inputs[name].zero_()
    check(problem, inputs)


def test_row_strided_gradient(device):
    problem = OP.Problem(33, 130)
    inputs = OP.inputs(problem, device)
    wide = torch.full((33, 138), math.nan, device=device)
    wide[:, 8:] = inputs["grad"]
    check(problem, inputs | {"grad": wide[:, 8:]})


def test_bytes():
    """Of an element: 2 of moments and 8/128 of their scales, both ways, and 12 of the rest."""
    problem = OP.Problem(4096, 4096, layout="none")
    scalars = 8
    assert OP.bytes(problem) == 4096**2 * (2 * (2 + 8 / 128) + 12) + scalars


@pytest.mark.parametrize("layout", ["none", "qt"])
def test_the_peer_makes_the_same_step(device, layout):
    problem = OP.Problem(40, 140, layout=layout)
    inputs = OP.inputs(problem, device)
    expected = OP.reference(problem, inputs)["param"]
    step, param = OP.fused(
        problem,
        inputs
        | {
            "exp_avg": first_values(inputs["exp_avg"], inputs["exp_avg_scale"]),
            "exp_avg_sq": second_values(inputs["exp_avg_sq"], inputs["exp_avg_sq_scale"]),
        },
    )
    step()
    assert torch.allclose(param.double(), expected, rtol=1e-5, atol=1e-7)
    assert (OP.eager(problem, inputs)() is None) == (layout == "none")


# A weight in bf16


def test_rounding_to_bf16_is_right_in_the_mean_and_leaves_what_bf16_holds():
    seed = torch.tensor([7])
    kept = torch.randn(64, 256).bfloat16().float()
    kept[0, :4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    assert torch.equal(narrowed(kept, seed).float(), kept)
    assert narrowed(torch.full((1, 9), math.nan), seed).isnan().all()
    payload = torch.tensor([[0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    assert narrowed(payload, seed).isnan().all()
    between = torch.full((512, 512), 1 + 2.0**-9)  # a quarter of the way to the next number
    for sign in (1, -1):
        found = narrowed(sign * between, seed).float() * sign
        assert set(found.unique().tolist()) == {1.0, 1 + 2.0**-7}
        share = float((found > 1).float().mean())
        assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / between.numel()))


@pytest.mark.parametrize("data", ["outlier", "gradient"])
@pytest.mark.parametrize("layout", ["none", "both"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (33, 50), (70, 160)])
def test_a_weight_in_bf16(device, layout, data, m, n):
    problem = OP.Problem(m, n, layout=layout, dtype="bf16", guarded=n == 50)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize(("tile_n", "slices", "stages"), [(128, 1, 1), (128, 4, 2), (256, 2, 1)])
def test_slices_of_a_block_in_bf16(device, tile_n, slices, stages):
    problem = OP.Problem(140, 300, block=128, dtype="bf16")
    config = KERNEL.Config(128, tile_n, 16, slices=slices, stages=stages)
    check(problem, OP.inputs(problem, device, data="outlier"), config)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_weight_in_bf16_that_is_not_finite(device):
    problem = OP.Problem(40, 140, dtype="bf16")
    inputs = OP.inputs(problem, device)
    inputs["grad"][3, 5], inputs["param"][7, 9], inputs["param"][30, 130] = math.nan, math.inf, 3e38
    check(problem, inputs)


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_found_inf_leaves_a_weight_in_bf16(device, name):
    kernel = registry.get_kernel("adamw8", name)
    problem = OP.Problem(40, 140, guarded=True, dtype="bf16")
    inputs = OP.inputs(problem, device if name == "triton" else torch.device("cpu"))
    inputs["found_inf"].fill_(1)
    inputs["grad"][3, 5] = math.inf
    check(problem, inputs, kernel=kernel)


def bf16_and_wide(m, n, device, **fields):
    """Inputs of a weight in bf16, and the same numbers in fp32."""
    narrow = OP.inputs(OP.Problem(m, n, dtype="bf16", **fields), device)
    floats = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in narrow.items()}
    return [{name: x.clone() for name, x in given.items()} for given in (narrow, floats)]


def test_a_weight_in_bf16_is_fp32_s_rounded_to_the_bit(device):
    """So is its moments' update, and its codes are those of the weight in bf16."""
    narrow, floats = bf16_and_wide(70, 300, device)
    seed = floats.pop("seed")
    codes = int8_adamw8(**narrow, block=64)
    int8_adamw8(**floats, block=64)
    assert torch.equal(narrow["param"], narrowed(floats["param"], seed))
    assert bool((narrow["param"].float() != floats["param"].bfloat16().float()).any())
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        assert torch.equal(narrow[name], floats[name])
    expected = int8_quantize(narrow["param"], block=64, layout="both")
    assert all(map(torch.equal, codes.tensors, expected.tensors))


def test_small_updates_of_a_weight_in_bf16_are_made_in_the_mean(device):
    """Each is an eighth of the last place: rounded to nearest, none would ever be made."""
    param = torch.ones((64, 128), dtype=torch.bfloat16, device=device)
    grad, moments = torch.ones_like(param), start(64, 128, device)
    rate = torch.tensor(2.0**-11, device=device)
    for step in range(1, 33):
        count, seed = torch.tensor(float(step), device=device), torch.tensor([step], device=device)
        options = {"decay": 0.0, "layout": "none", "seed": seed}
        int8_adamw8(param, grad, *moments, rate, count, **options)
    # 32 updates of 2^-11 each, of which a few may be made below 1, in steps half as large.
    assert float(param.float().mean()) == pytest.approx(1 - 2.0**-6, abs=1e-3)


def test_a_weight_in_bf16_moves_half_as_many_bytes():
    problem = OP.Problem(4096, 4096, layout="none", dtype="bf16")
    assert OP.bytes(problem) == 4096**2 * (2 * (2 + 8 / 128) + 6) + 8 + 8


# The function


def start(m, n, device):
    codes = [torch.zeros((m, n), dtype=torch.int8, device=device) for _ in range(2)]
    groups = [torch.zeros((m, -(-n // 128)), device=device) for _ in range(2)]
    return [x for pair in zip(codes, groups, strict=True) for x in pair]


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_follows_torch_s_adamw(device, beta2):
    """The first step's update to 1e-5, the others' to 5% in the norm."""
    generator = torch.Generator(device).manual_seed(3)
    param = torch.randn((40, 200), device=device, generator=generator)
    theirs = param.clone().requires_grad_()
    rate = torch.tensor(1e-2, device=device)
    options = {"betas": (0.9, beta2), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([theirs], lr=rate, fused=True, **options)
    moments = start(40, 200, device)
    for step in range(1, 31):
        grad = torch.randn((40, 200), device=device, generator=generator) + 0.5
        before, own = theirs.detach().clone(), param.clone()
        theirs.grad = grad.clone()
        optimizer.step()
        count = torch.tensor(float(step), device=device)
        int8_adamw8(param, grad, *moments, rate, count, beta2=beta2, decay=0.0, layout="none")
        moved = theirs.detach() - before
        error = float((param - own - moved).norm() / moved.norm())
        assert error < (1e-5 if step == 1 else 0.05), f"step {step}"


def test_writes_in_place_and_gives_the_codes(device):
    problem = OP.Problem(40, 140)
    inputs = OP.inputs(problem, device)
    param, version = inputs["param"], inputs["param"]._version
    codes = int8_adamw8(**inputs, block=64)
    assert param._version > version
    expected = int8_quantize(param, block=64, layout="both")
    assert all(map(torch.equal, codes.tensors, expected.tensors))
    again = int8_adamw8(**inputs, block=64, out=codes)
    assert again is codes
    expected = int8_quantize(param, block=64, layout="both")
    assert all(map(torch.equal, codes.tensors, expected.tensors))
    assert int8_adamw8(**inputs, layout="none") is None


def test_bad_inputs(device):
    inputs = OP.inputs(OP.Problem(4, 130), device)
    wide = torch.zeros((4, 256), dtype=torch.int8, device=device)
    refused = [
        ({"grad": inputs["grad"][:, :7]}, r"grad has shape \(4, 7\): expected \(4, 130\)"),
        (
            {"exp_avg": inputs["exp_avg"].float()},
            r"exp_avg is float32 \(4, 130\): expected int8 \(4, 130\)",
        ),
        ({"exp_avg": wide[:, :130]}, r"exp_avg has strides \(256, 1\): expected a contiguous"),
        (
            {"exp_avg_sq_scale": inputs["exp_avg_sq_scale"][:, :1]},
            r"exp_avg_sq_scale is float32 \(4, 1\): expected float32 \(4, 2\)",
        ),
        ({"found_inf": torch.ones((), device=device)}, "grad_scale and found_inf: expected both"),
        ({"param": inputs["param"].half()}, "param is float16: expected float32 or bfloat16"),
        ({"param": inputs["param"].bfloat16()}, "grad is float32: expected bfloat16"),
        (
            {name: inputs[name].bfloat16() for name in ("param", "grad")},
            "seed: expected an int64 tensor of one element",
        ),
        ({"layout": "packed"}, "layout=packed: expected none or q or qt or both"),
        (
            {"layout": "none", "out": int8_quantize(inputs["param"], layout="both")},
            "out with layout=none: expected None, as no codes are written",
        ),
        ({"beta2": 1.0}, "beta2=1.0: expected at least 0 and less than 1"),
    ]
    for change, message in refused:
        with pytest.raises(UsageError, match=message):
            int8_adamw8(**{**inputs, **change})
    for one, other in itertools.pairwise(("param", "exp_avg_scale", "exp_avg_sq_scale")):
        shared = inputs[one].flatten()[: inputs[other].numel()].view(inputs[other].shape)
        with pytest.raises(UsageError, match=f"{other} and {one} share memory"):
            int8_adamw8(**{**inputs, other: shared})
