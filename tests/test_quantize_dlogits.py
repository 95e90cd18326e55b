"""quantize_dlogits: the reference against torch's autograd, kernels against the reference."""

import math

import pytest
import torch
from torch.nn import functional

from jetfire import ops as ours
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.reference.philox import uniform
from jetfire.reference.quantize import quantize, spread
from jetfire.reference.quantize_dlogits import quantize_dlogits

OP = registry.get("quantize_dlogits")
KERNEL = registry.get_kernel("quantize_dlogits", "triton")
CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize(
    "kernel", [KERNEL, registry.get_kernel("quantize_dlogits", "torch")], ids=["triton", "torch"]
)


def placed(kernel, inputs):
    return {n: t.cpu() for n, t in inputs.items()} if kernel.name == "torch" else inputs


def check(kernel, problem, inputs, config=None):
    inputs = placed(kernel, inputs)
    config = config or kernel.default(problem, Device.of(inputs["logits"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def run(kernel, problem, inputs, config=None):
    inputs = placed(kernel, inputs)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    config = config or kernel.default(problem, Device.of(inputs["logits"]))
    launch(kernel, problem, config, inputs, outputs)
    return outputs


@pytest.mark.parametrize("valid", [None, 90, 1])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_reference_is_the_quantised_gradient_of_torch_in_float64(valid, rounding):
    problem = OP.Problem(40, 100, dtype="fp32", valid=valid, rounding=rounding)
    inputs = OP.inputs(problem, CPU, data="outlier")
    inputs["targets"][:3] = -100
    leaf = inputs["logits"].double().requires_grad_()
    loss = functional.cross_entropy(leaf[:, : problem.columns], inputs["targets"], reduction="none")
    (gradient,) = torch.autograd.grad(loss, leaf, inputs["dloss"].double())
    lse = torch.logsumexp(leaf[:, : problem.columns].detach(), 1)
    operands = inputs["logits"], inputs["targets"], lse, inputs["dloss"]
    seed = inputs.get("seed")
    q, scale = quantize_dlogits(*operands, problem.columns, 32, rounding, seed)
    # Where a product is near a tie the last bit of the gradient decides.
    codes, expected = quantize(gradient, 32, rounding, seed)
    torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0.0)
    off = (q.int() - codes.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.001


@BOTH
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("m", "n", "valid", "block"),
    [(1, 1, None, 32), (5, 65, None, 64), (70, 300, 260, 32), (130, 400, 250, 128)],
)
def test_kernels_are_within_their_rounding(device, kernel, dtype, rounding, m, n, valid, block):
    problem = OP.Problem(m, n, block, dtype, rounding, "both", valid)
    for data in ("outlier", "gradient"):
        check(kernel, problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_config_gives_the_same_bits(device, layout, rounding):
    problem = OP.Problem(135, 140, rounding=rounding, layout=layout, valid=131)
    inputs = OP.inputs(problem, device, data="heavy")
    first = None
    tiles = [(32, 32, 1), (32, 128, 2), (64, 64, 4), (64, 128, 4), (128, 128, 8), (256, 32, 16)]
    for tile in tiles:
        config = KERNEL.Config(*tile)
        check(KERNEL, problem, inputs, config)
        outputs = run(KERNEL, problem, inputs, config)
        first = first or outputs
        for name, tensor in outputs.items():
            assert torch.equal(tensor, first[name]), (tile, name)


@BOTH
def test_row_strided_logits(device, kernel):
    problem = OP.Problem(45, 100, layout="both", valid=97)
    inputs = OP.inputs(problem, device)
    wide = torch.full((45, 123), math.nan, dtype=torch.bfloat16, device=device)
    wide[:, 7:107] = inputs["logits"]
    inputs["logits"] = wide[:, 7:107]
    check(kernel, problem, inputs)


@BOTH
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_ignored_rows_padding_and_impossible_targets(device, kernel, rounding):
    problem = OP.Problem(70, 200, dtype="fp32", rounding=rounding, layout="both", valid=120)
    inputs = OP.inputs(problem, device)
    inputs["targets"] %= 120
    inputs["targets"][:8] = -100
    # What an ignored row holds counts for nothing, nor what the padding holds.
    inputs["logits"][0], inputs["logits"][1], inputs["logits"][2] = math.nan, math.inf, -math.inf
    inputs["dloss"][3], inputs["lse"][4] = math.nan, math.nan
    inputs["logits"][:, 120:], inputs["logits"][9, 120:] = 3e38, math.nan
    inputs["targets"][64:68] = torch.tensor([120, -1, 2**32, 2**32 - 100])
    check(kernel, problem, inputs)
    outputs = run(kernel, problem, inputs)
    q, scale = outputs["q"], outputs["scale"]
    assert (q[:8] == 0).all()
    assert (q[:, 120:] == 0).all()
    assert scale[:2, :4].isfinite().all()
    assert (scale[:2, :4] > 0).all()
    assert scale[2, :4].isnan().all()
    assert (q[64:] == 0).all()
    assert (scale[:, 4:] == 0).all()


@BOTH
def test_each_kind_of_wrong_target_is_nan(device, kernel):
    for target in (120, 199, 200, -1, -99, 2**32, 2**32 - 100, -(2**63)):
        problem = OP.Problem(40, 200, valid=120)
        inputs = OP.inputs(problem, device)
        inputs["targets"] %= 120
        inputs["targets"][35] = target
        scale = run(kernel, problem, inputs)["scale"]
        assert scale[0, :4].isfinite().all()
        assert scale[1, :4].isnan().all(), target
        assert (scale[:, 4:] == 0).all()


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_logits(device, kernel, value, dtype):
    """−∞ is a probability of 0; ∞ and NaN make their row NaN, as the lse then is."""
    problem = OP.Problem(40, 140, dtype=dtype, layout="both")
    inputs = OP.inputs(problem, device)
    inputs["targets"][:] = 100
    inputs["logits"][33, 70] = value
    check(kernel, problem, inputs)
    lse = torch.logsumexp(inputs["logits"].double(), 1)
    inputs["lse"] = lse.masked_fill(lse == math.inf, math.nan).float()
    check(kernel, problem, inputs)
    outputs = run(kernel, problem, inputs)
    assert outputs["scale"][0].isfinite().all()
    assert outputs["scale"][1].isfinite().all() == (value == -math.inf)


@BOTH
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_certain_and_impossible_predictions(device, kernel, rounding):
    """A target of probability near 1 is the largest logit, but not the largest gradient."""
    problem = OP.Problem(64, 128, dtype="fp32", rounding=rounding, layout="both")
    inputs = OP.inputs(problem, device)
    inputs["targets"] = torch.arange(64, device=device)
    inputs["logits"].diagonal().add_(12.0)
    inputs["logits"][40:].diagonal().sub_(40.0)
    inputs["lse"] = torch.logsumexp(inputs["logits"].double(), 1).float()
    check(kernel, problem, inputs)


@BOTH
@pytest.mark.parametrize("factor", [1e4, 1e-30, 0.0])
def test_extreme_logits_and_losses(device, kernel, factor):
    problem = OP.Problem(40, 90, dtype="fp32", rounding="stochastic", layout="both")
    inputs = OP.inputs(problem, device)
    check(kernel, problem, {**inputs, "dloss": inputs["dloss"] * factor})
    inputs["logits"] *= factor
    inputs["lse"] = torch.logsumexp(inputs["logits"].double(), 1).float()
    check(kernel, problem, inputs)
    check(kernel, problem, {**inputs, "dloss": inputs["dloss"] * 1e30})


@BOTH
def test_stochastic_codes_are_unbiased_over_seeds(device, kernel):
    """Their mean is the gradient within four of the mean's standard deviations, on average one."""
    problem, draws = OP.Problem(32, 64, dtype="fp32", rounding="stochastic", valid=60), 40
    inputs = OP.inputs(problem, device)
    expected = OP.reference(problem, placed(kernel, inputs))
    t = expected["q"] / spread(expected["scale"], 32, 32, 64)
    total = torch.zeros_like(t)
    for seed in range(draws):
        inputs["seed"] = torch.tensor([seed], device=device)
        total += run(kernel, problem, inputs)["q"]
    spare = (t - t.floor()) * (1 - (t - t.floor()))
    off = (total / draws - t).abs()
    assert (off <= 5 * (spare / draws).sqrt() + 0.02).all()
    assert off.square().sum() <= 1.3 * (spare / draws).sum() + 1e-6


def test_the_draws_of_targets_are_those_of_their_places(device):
    """Every code of a row of equal probabilities, the target's too, is that of its own draw."""
    problem = OP.Problem(64, 64, dtype="fp32", rounding="stochastic", layout="both")
    inputs = OP.inputs(problem, device)
    inputs["logits"], inputs["lse"] = (
        torch.zeros_like(inputs["logits"]),
        torch.full_like(inputs["lse"], math.log(2.0)),
    )
    inputs["dloss"] = torch.linspace(0.1, 1.0, 64, device=device)
    inputs["targets"] = torch.arange(64, device=device).flip(0)
    outputs = run(KERNEL, problem, inputs)
    u = uniform(inputs["seed"], 64, 64).double()
    value = inputs["dloss"].double()[:, None] * (0.5 - torch.eye(64, device=device).flip(1))
    t = value / spread(outputs["scale"], 32, 64, 64).double() + u
    assert (outputs["q"] >= (t - 2e-3).floor()).all()
    assert (outputs["q"] <= (t + 2e-3).floor()).all()
    assert torch.equal(outputs["qt"], outputs["q"].t())


def test_no_rounding_of_the_gradient_in_between(device):
    """The codes are those of fp32 values: of a gradient in BF16 a part of them would differ."""
    problem = OP.Problem(128, 256, layout="both")
    inputs = OP.inputs(problem, device)
    inputs["targets"] %= 32
    outputs = run(KERNEL, problem, inputs)
    names = ("logits", "targets", "lse", "dloss")
    gradient = ours.cross_entropy_backward(*(inputs[name] for name in names))
    q, _ = quantize(gradient, 32)
    exact, _ = quantize_dlogits(*(inputs[name] for name in names), 256, 32)
    assert (outputs["q"] != exact).float().mean() < 0.0005
    assert (q != exact).float().mean() > 0.005


def test_bytes_are_of_what_is_read_and_written():
    problem = OP.Problem(5, 70, rounding="stochastic", layout="both", valid=60)
    inputs = OP.inputs(problem, CPU)
    moved = [*inputs.values(), *OP.outputs(problem, inputs).values()]
    assert OP.bytes(problem) == sum(tensor.nbytes for tensor in moved)


@pytest.mark.parametrize("name", ["q", "scale"])
def test_the_check_sees_a_forgotten_target(name):
    problem = OP.Problem(4, 50, dtype="fp32")
    inputs = OP.inputs(problem, CPU)
    inputs["targets"][:] = 7
    expected = OP.reference(problem, inputs)
    outputs = run(registry.get_kernel("quantize_dlogits", "torch"), problem, inputs)
    assert OP.check(problem, outputs, expected).ok
    if name == "q":
        outputs["q"][2, 7] += 2
    else:
        outputs["scale"][0, 0] *= 1.0001
    assert not OP.check(problem, outputs, expected).ok


def test_what_is_refused():
    with pytest.raises(UsageError, match="valid=0: expected an integer of at least 1"):
        OP.Problem(4, 8, valid=0)
    problem, h200 = OP.Problem(64, 64, 64), target_device((9, 0))
    for config, reason in (
        ((32, 64, 4), "tile_m=32: expected a power of two that is a multiple of 64"),
        ((64, 64, 3), "warps=3"),
        ((256, 256, 4), "512 elements per thread"),
        ((64, 64, 4, 16), "registers=16"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    for block in (32, 64, 128):
        for layout in ("q", "qt", "both"):
            for rounding in ("nearest", "stochastic"):
                for dtype in ("bf16", "fp32"):
                    problem = OP.Problem(256, 256, block, dtype, rounding, layout)
                    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None


@pytest.mark.parametrize("valid", [None, 80])
def test_the_peer_is_the_same_function(valid):
    problem = OP.Problem(64, 128, dtype="fp32", layout="both", valid=valid)
    inputs = OP.inputs(problem, CPU)
    expected = OP.reference(problem, inputs)
    found = OP.peers(problem, inputs)["eager"]()()
    torch.testing.assert_close(found[1], expected["scale"], rtol=1e-4, atol=1e-7)
    t = expected["q"] / spread(expected["scale"], 32, 64, 128)
    assert (found[0] - t.nan_to_num(0.0)).abs().max() < 0.51
    assert torch.equal(found[2], found[0].t())


@pytest.fixture
def rows(device):
    """Logits (a view), targets, lse and dloss of a padded vocabulary of 60."""
    inputs = OP.inputs(OP.Problem(7, 90, dtype="fp32", valid=60), device)
    inputs["targets"][3] = -100
    inputs["logits"] = inputs["logits"][:, :70]
    return tuple(inputs.values())


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_the_function_is_the_gradients(rows, layout):
    gradient = ours.cross_entropy_backward(*rows, valid=60)
    seed = torch.tensor([5], device=gradient.device)
    for options in ({}, {"rounding": "stochastic", "seed": seed}):
        g = ours.int8_cross_entropy_backward(*rows, block=64, valid=60, layout=layout, **options)
        assert g.block == 64
        expected = ours.int8_quantize(gradient, block=64, layout=layout, **options)
        for mine, its in zip(g.tensors, expected.tensors, strict=True):
            assert mine.shape == its.shape
            torch.testing.assert_close(mine.float(), its.float(), rtol=1e-5, atol=1.0)


def test_the_operator(rows):
    seed = torch.tensor([5], device=rows[0].device)
    operands = (*rows, seed, 32, 60, "stochastic", "both")
    torch.library.opcheck(torch.ops.jetfire.quantize_dlogits.default, operands)

    def step(logits):
        return ours.int8_cross_entropy_backward(logits * 1, *rows[1:], valid=60).tensors

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for one, other in zip(compiled(rows[0]), step(rows[0]), strict=True):
        assert torch.equal(one, other)


def test_the_function_refuses_in_one_line(rows):
    logits, targets, lse, dloss = rows
    function = ours.int8_cross_entropy_backward
    for message, given, options in (
        ("logits is int64: expected bfloat16 or float16 or float32", (targets, *rows[1:]), {}),
        (r"targets is int64 \(6,\): expected int64 \(7,\)", (logits, targets[:6], lse, dloss), {}),
        (r"lse is float32 \(6,\): expected float32 \(7,\)", (logits, targets, lse[:6], dloss), {}),
        (r"dloss is float64 \(7,\): expected float32", (*rows[:3], dloss.double()), {}),
        ("valid=71: expected 1 to 70", rows, {"valid": 71}),
        ("block=48: expected 32 or 64 or 128", rows, {"block": 48}),
        ("layout=t: expected q or qt or both", rows, {"layout": "t"}),
        ("seed: expected an int64 tensor", rows, {"rounding": "stochastic"}),
    ):
        with pytest.raises(UsageError, match=message):
            function(*given, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, rounding="stochastic", layout="both")
        check(KERNEL, problem, OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("layout", ["q", "both"])
def test_a_vocabulary(device, block, layout):
    problem = OP.Problem(1000, 50304, block, rounding="stochastic", layout=layout, valid=50257)
    inputs = OP.inputs(problem, device)
    check(KERNEL, problem, inputs)
    for registers in (80, 96, 128):
        config = KERNEL.Config(128, 128, 8, registers)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                run(KERNEL, problem, inputs, config).values(),
                run(KERNEL, problem, inputs).values(),
                strict=True,
            )
        )


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    """Blocks of rows are independent, so some of them alone are compared."""
    m, n = 42752, 50304
    problem = OP.Problem(m, n, layout="both", valid=50257)
    some = OP.Problem(32, n, layout="both", valid=50257)
    small = OP.inputs(some, device)
    inputs = {name: t.repeat(m // 32, *(1,) * (t.dim() - 1)) for name, t in small.items()}
    outputs = run(KERNEL, problem, inputs)
    expected = OP.reference(some, small)
    for top in (0, 2**31 // n // 32 * 32, m - 32):
        found = {
            "q": outputs["q"][top : top + 32],
            "scale": outputs["scale"][top // 32 : top // 32 + 1],
            "qt": outputs["qt"][:, top : top + 32],
            "scale_t": outputs["scale_t"][:, top // 32 : top // 32 + 1],
        }
        result = OP.check(some, found, expected)
        assert result.ok, result.message
