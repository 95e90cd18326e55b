"""The norms' gradient where it joins that of the residual stream."""

import itertools
import math
import re

import pytest
import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch
from jetfire.core.tensors import with_transpose
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize
from jetfire.tests.norms import choices, replay, verified

PAIRS = list(itertools.product((32, 64, 128), repeat=2))
SHAPES = [(1, 1), (31, 33), (127, 200), (33, 1)]


@pytest.fixture(params=["layernorm", "rmsnorm"])
def op(request):
    return registry.get(request.param)


def problem_of(op, **fields):
    return op.problems("bwd", {"residual": True, "layout": "both", **fields})[0]


@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_stream_s_gradient_in_every_pair_of_blocks(op, device, block, out_block, rounding):
    fields = {"block": block, "out_block": out_block, "rounding": rounding}
    verified(op, problem_of(op, m=150, n=140, **fields), device, data="heavy")


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_stream_s_gradient_of_any_shape(op, device, layout, m, n):
    problem = problem_of(op, m=m, n=n, out_block=128, layout=layout)
    for data in ("gradient", "outlier"):
        verified(op, problem, device, every=layout == "both", data=data)


def streamed(op, problem, inputs, kernel, config):
    """A launch's outputs."""
    outputs = op.poison(problem, op.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    return outputs


def on_the_cpu(op):
    kernel = registry.get_kernel(op.name, "torch")
    return kernel, kernel.Config()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_stream_s_codes_are_those_of_its_gradient(op, device, rounding):
    """As `add` has them: bit for bit, of the sum as it was rounded."""
    problem = problem_of(op, m=70, n=150, out_block=64, rounding=rounding)
    inputs = op.inputs(problem, device)
    kernel = registry.get_kernel(op.name, "triton")
    config = kernel.default(problem, Device.of(inputs["x"]))
    outputs = streamed(op, problem, inputs, kernel, config)
    q, scale = quantize(outputs["dx"].float(), 64, rounding, inputs.get("seed"))
    for name, expected in with_transpose(q, scale).items():
        assert torch.equal(outputs[name], expected), name


def test_a_strided_stream(op, device):
    problem = problem_of(op, m=65, n=96)
    inputs = op.inputs(problem, device)
    wide = torch.full((65, 131), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 3:99] = inputs["dsum"]
    inputs["dsum"] = wide[:, 3:99]
    assert not inputs["dsum"].is_contiguous()
    verified(op, problem, device, inputs=inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy says so too
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_stream_shows_in_its_block(op, device, value):
    problem = problem_of(op, m=70, n=70)
    inputs = op.inputs(problem, device)
    inputs["dsum"][40, 3] = value
    verified(op, problem, device, inputs=inputs)
    for kernel, config in choices(op, problem, device):
        outputs = streamed(op, problem, inputs, kernel, config)
        bad = ~torch.isfinite(outputs["dx"])
        assert bad.nonzero().tolist() == [[40, 3]]
        assert torch.isnan(outputs["dx"][40, 3]) == math.isnan(value)
        assert outputs["scale"].isnan().nonzero().tolist() == [[1, 0]]
        assert (outputs["q"][32:64, :32] == 0).all()
        assert all(outputs[name].isfinite().all() for name in op.sums["m"])


def test_a_bad_scale_shows_in_a_stream_s_rows(op, device):
    problem = problem_of(op, m=70, n=70)
    inputs = op.inputs(problem, device)
    inputs["dy_scale"][1, 0] = float("nan")
    verified(op, problem, device, inputs=inputs)
    for kernel, config in choices(op, problem, device):
        outputs = streamed(op, problem, inputs, kernel, config)
        rows = outputs["dx"].isnan().all(1).nonzero().flatten().tolist()
        assert rows == list(range(32, 64))
        assert outputs["dx"][:32].isfinite().all()


def test_a_wrong_sum_and_codes_of_another_are_seen(op):
    problem = problem_of(op, m=40, n=70)
    inputs = op.inputs(problem, torch.device("cpu"))
    right, expected = streamed(op, problem, inputs, *on_the_cpu(op)), op.reference(problem, inputs)
    assert op.check(problem, right, expected).ok

    def wrong(dx, of_codes):
        codes = with_transpose(*quantize(of_codes.float(), 32, "stochastic", inputs["seed"]))
        return op.check(problem, {**right, **codes, "dx": dx}, expected)

    dx = right["dx"]
    assert wrong(dx, dx).ok
    toward = torch.where(
        dx.double().abs() > expected["dx"].abs(), dx.nextafter(torch.zeros_like(dx)), dx
    )
    assert wrong(toward, toward).message.startswith("dx: ")  # rounded toward zero
    assert wrong(inputs["dsum"], inputs["dsum"]).message.startswith("dx: ")
    unrounded = expected["dx"]
    assert not wrong(dx, unrounded + 0.01 * unrounded.abs().max()).ok


def test_a_stream_s_codes_are_unbiased(op, device):
    """On a CPU of the kernel that is no interpreter's: their bits are alike."""
    problem = problem_of(op, m=33, n=70, out_block=64)
    inputs = op.inputs(problem, device)
    kernel = registry.get_kernel(op.name, "triton" if device.type == "cuda" else "torch")
    config = kernel.default(problem, Device.of(inputs["x"]))
    draws = 300
    total = torch.zeros(33, 70, dtype=torch.float64, device=device)
    for key in range(draws):
        inputs["seed"].fill_(key)
        outputs = streamed(op, problem, inputs, kernel, config)
        total += dequantize(outputs["q"], outputs["scale"], 64, torch.float64)
    dx = outputs["dx"].double()
    step = dequantize(torch.ones_like(outputs["q"]), outputs["scale"], 64, torch.float64)
    # Hoeffding: of 33·70 means of errors within a step none is farther off, but for 1 in 10^6.
    most = math.sqrt(math.log(2 * 33 * 70 * 1e6) / (2 * draws)) + 1e-3
    error = (total / draws - dx) / step
    assert float(error.abs().max()) < most
    assert float(error.mean().abs()) < 5 / math.sqrt(12 * 33 * 70 * draws) + 1e-3


@pytest.mark.parametrize("out_block", [32, 128])
def test_one_pass_is_nearer_to_the_gradient_than_two(op, device, out_block):
    """Two: of the norm's gradient as codes, and of its sum with the stream's."""
    problem = problem_of(op, m=130, n=140, out_block=out_block)
    inputs = op.inputs(problem, device)
    exact = op.reference(problem, inputs)["dx"]
    x, dy = (ops.Quantized(inputs[k], inputs[f"{k}_scale"]) for k in ("x", "dy"))
    given = [inputs[name] for name in ("weight", *op.statistics)]
    seed, dsum = inputs["seed"], inputs["dsum"]
    joins, alone = (getattr(ops, f"int8_{op.name}{form}_backward") for form in ("_add", ""))
    dx, copy, *sums = joins(x, dy, *given, dsum, seed=seed, out_block=out_block)
    dq, *same = alone(x, dy, *given, seed=seed)
    two, its_copy = ops.int8_add_backward(dsum, dq, seed=seed + 1, out_block=out_block)
    for mine, theirs in zip(sums, same, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    def error(tensor):
        return float((tensor.double() - exact).norm())

    assert error(dx) < 0.5 * error(two)
    values = (dequantize(c.q, c.scale, out_block, torch.float64) for c in (copy, its_copy))
    mine, theirs = map(error, values)
    assert mine < theirs


def test_a_stream_has_a_gradient_alone(op):
    with pytest.raises(UsageError, match=r"^residual=true mode=fwd: expected mode=bwd$"):
        op.Problem(64, 64, residual=True)
    plain = problem_of(op, m=64, n=64, residual=False)
    assert "residual" not in str(plain)
    problem = op.Problem.parse({**plain.as_dict(), "residual": "true"})
    assert problem.as_dict() == {**plain.as_dict(), "residual": True}


def test_a_stream_of_another_shape_or_dtype_is_refused(op):
    problem = problem_of(op, m=40, n=70)
    inputs = op.inputs(problem, torch.device("cpu"))
    x, dy = (ops.Quantized(inputs[k], inputs[f"{k}_scale"]) for k in ("x", "dy"))
    given = [inputs[name] for name in ("weight", *op.statistics)]
    joins = getattr(ops, f"int8_{op.name}_add_backward")
    for dsum, message in (
        (inputs["dsum"].float(), "dsum is float32: expected bfloat16"),
        (inputs["dsum"][:39], "dsum has shape (39, 70): expected (40, 70)"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            joins(x, dy, *given, dsum, seed=inputs["seed"])


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
def test_a_stream_s_gradient_in_ragged_sizes(op, device, block, out_block):
    """Each size in one layout and rounding: all are 216 programs, six minutes to compile."""
    sizes = ((1, 1), (31, 300), (33, 127), (129, 64), (257, 1030), (384, 1600))
    ways = itertools.product(("q", "qt", "both"), ("nearest", "stochastic"))
    for (m, n), (layout, rounding) in zip(sizes, ways, strict=True):
        fields = {"layout": layout, "rounding": rounding, "block": block, "out_block": out_block}
        problem = problem_of(op, m=m, n=n, **fields)
        verified(op, problem, device, every=True, data="outlier")


@pytest.mark.gpu
def test_a_large_stream_and_its_replays(op, device):
    fields = {"block": 32, "out_block": 128}
    verified(op, problem_of(op, m=8192, n=1024, **fields), device, every=True)
    problem = problem_of(op, m=2000, n=3000, **fields)
    for kernel, config in choices(op, problem, device):
        replay(op, problem, kernel, config, op.inputs(problem, device))
