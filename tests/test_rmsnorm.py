"""rmsnorm: the reference against torch's, and kernels against the reference."""

import dataclasses
import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import launch
from jetfire.core.workloads import RAGGED
from jetfire.ops.rmsnorm import _gradients
from jetfire.reference import rmsnorm as reference
from jetfire.reference.dequantize import dequantize
from jetfire.tests import norms

OP = registry.get("rmsnorm")
SHAPES = [(1, 1), (31, 33), (127, 200), (33, 1)]
MODES = ["fwd", "bwd"]
PAIRS = list(itertools.product((32, 64, 128), repeat=2))


def problem_of(mode, **fields):
    return OP.problems(mode, fields)[0]


def choices(problem, device, every=False):
    return norms.choices(OP, problem, device, every)


def verified(problem, device, **kwargs):
    norms.verified(OP, problem, device, **kwargs)


@pytest.mark.parametrize(("m", "n"), [(3, 2), (40, 70), (5, 513)])
def test_reference_is_torch_and_its_autograd(m, n):
    torch.manual_seed(0)
    x = torch.randn(m, n, dtype=torch.float64).requires_grad_()
    weight = torch.randn(n, dtype=torch.float64).requires_grad_()
    dy = torch.randn(m, n, dtype=torch.float64)
    y = torch.nn.functional.rms_norm(x, (n,), weight, 1e-5)
    expected = torch.autograd.grad(y, (x, weight), dy)
    rstd = reference.statistics(x, 1e-5)
    torch.testing.assert_close(reference.forward(x, rstd, weight), y)
    for got, want in zip(reference.backward(x, dy, weight, rstd), expected, strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(_gradients(x, dy, weight, rstd[:, None]), expected, strict=True):
        torch.testing.assert_close(got, want)
    dsum = torch.randn(m, n, dtype=torch.float64)
    y = torch.nn.functional.rms_norm(x, (n,), weight, 1e-5)
    expected = torch.autograd.grad((y, x), (x, weight), (dy, dsum))
    found = reference.backward(x, dy, weight, rstd, dsum)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_op_is_torch_on_dequantised_inputs(mode):
    problem = problem_of(mode, m=40, n=90, rounding="nearest")
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)
    x = dequantize(inputs["x"], inputs["x_scale"], 32, torch.float64).requires_grad_()
    weight = inputs["weight"].double().requires_grad_()
    y = torch.nn.functional.rms_norm(x, (90,), weight, problem.eps)
    if mode == "fwd":
        torch.testing.assert_close(expected["q"], y.detach(), rtol=1e-5, atol=1e-5)
        rstd = (x.detach().square().mean(dim=1) + problem.eps) ** -0.5
        torch.testing.assert_close(expected["rstd"], rstd)
        return
    dy = dequantize(inputs["dy"], inputs["dy_scale"], 32, torch.float64)
    gradients = torch.autograd.grad(y, (x, weight), dy)
    for name, want in zip(("q", "dweight"), gradients, strict=True):
        torch.testing.assert_close(expected[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_kernels_match_the_reference(device, block, mode, m, n):
    problem = problem_of(mode, m=m, n=n, block=block, layout="both")
    verified(problem, device, data="gradient" if mode == "bwd" else "outlier")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_layouts_roundings_and_configs(device, mode, rounding):
    fields = {"m": 70, "n": 100, "block": 32, "rounding": rounding}
    for layout in ("q", "qt", "both"):
        problem = problem_of(mode, layout=layout, **fields)
        verified(problem, device, every=layout == "both", data="heavy")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_pair_of_blocks(device, mode, block, out_block, rounding):
    fields = {"block": block, "out_block": out_block, "rounding": rounding, "layout": "both"}
    problem = problem_of(mode, m=150, n=140, **fields)
    verified(problem, device, data="heavy")


@pytest.mark.parametrize("mode", MODES)
def test_rows_wider_than_a_tile(device, mode):
    verified(problem_of(mode, m=33, n=1100), device, data="outlier")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", ["zeros", "subnormal", "largest", "nonfinite", "one_hot"])
def test_where_arithmetic_ends(device, mode, data):
    verified(problem_of(mode, m=40, n=100, layout="both"), device, data=data)


@pytest.mark.parametrize("mode", MODES)
def test_no_epsilon_and_rows_of_zeros(device, mode):
    """Their rstd is ∞, and what it is multiplied by NaN."""
    problem = problem_of(mode, m=66, n=70, eps=0.0)
    inputs = OP.inputs(problem, device)
    inputs["x"][40] = 0
    if mode == "bwd":
        x = dequantize(inputs["x"], inputs["x_scale"], 32)
        inputs["rstd"] = reference.statistics(x, problem.eps)
    verified(problem, device, inputs=inputs)


@pytest.mark.parametrize("mode", MODES)
def test_strided_views(device, mode):
    problem = problem_of(mode, m=65, n=100)
    inputs = OP.inputs(problem, device)
    for name in {"x", "dy"} & inputs.keys():
        wide = torch.full((65, 160), 77, dtype=torch.int8, device=device)
        wide[:, :100] = inputs[name]
        scale = torch.full((3, 9), torch.nan, dtype=torch.float32, device=device)
        scale[:, :4] = inputs[f"{name}_scale"]
        inputs |= {name: wide[:, :100], f"{name}_scale": scale[:, :4]}
        assert not inputs[name].is_contiguous()
    verified(problem, device, inputs=inputs)


def test_a_bad_block_shows_in_its_rows(device):
    problem = problem_of("fwd", m=70, n=70)
    inputs = OP.inputs(problem, device)
    inputs["x_scale"][1, 0] = float("nan")
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        assert outputs["scale"].isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]
        assert (outputs["q"][32:64] == 0).all()
        assert outputs["rstd"].isnan().nonzero().flatten().tolist() == list(range(32, 64))


def test_rows_of_zeros_beside_others_too_large_to_square(device):
    """Their block's scale squared is infinite; it times 0 must not be what their square is."""
    problem = problem_of("fwd", m=40, n=70)
    inputs = OP.inputs(problem, device)
    inputs["x"][::2] = 0
    inputs["x_scale"].fill_(2.0**100)
    verified(problem, device, inputs=inputs)
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        assert outputs["rstd"][::2].tolist() == pytest.approx([problem.eps**-0.5] * 20)


@pytest.mark.parametrize("name", ["q", "rstd", "dweight"])
def test_a_wrong_output_is_found(name):
    problem = problem_of("bwd" if name == "dweight" else "fwd", m=40, n=70)
    inputs = OP.inputs(problem, torch.device("cpu"))
    outputs = OP.outputs(problem, inputs)
    kernel = registry.get_kernel("rmsnorm", "torch")
    kernel.launch(problem, kernel.Config(), inputs, outputs)
    expected = OP.reference(problem, inputs)
    assert OP.check(problem, outputs, expected).ok
    if name == "q":
        outputs["q"][3, 4] += 2 if outputs["q"][3, 4] < 100 else -2
    else:
        outputs[name][5] *= 1 + 1e-4
    assert name in OP.check(problem, outputs, expected).message


def test_nothing_has_no_statistics():
    problem = problem_of("fwd", m=3, n=4)
    outputs = OP.outputs(problem, OP.inputs(problem, torch.device("cpu")))
    OP.nothing(problem, {}, outputs)
    assert outputs["rstd"].isnan().all()


def test_legal_says_why_not():
    problem = problem_of("fwd", m=64, n=64)
    where = target_device((9, 0))
    for name, wrong in (
        ("gluon", {"tile_n": 48, "warps": 3, "rows": 16, "steps": 64}),
        ("triton", {"tile_m": 48, "tile_n": 16, "warps": 3}),
    ):
        kernel = registry.get_kernel("rmsnorm", name)
        good = kernel.default(problem, where)
        assert kernel.legal(problem, good, where) is None
        for field, value in wrong.items():
            assert field in kernel.legal(
                problem, dataclasses.replace(good, **{field: value}), where
            )
        assert kernel.legal(problem, good, Device(kind="cpu")) is not None


@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("mode", MODES)
def test_every_pair_of_blocks_has_a_default(mode, block, out_block):
    problem = problem_of(mode, m=64, n=64, block=block, out_block=out_block)
    where = target_device((9, 0))
    for name in ("gluon", "triton"):
        kernel = registry.get_kernel("rmsnorm", name)
        assert kernel.legal(problem, kernel.default(problem, where), where) is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_every_ragged_size(device, mode, block):
    for size in RAGGED:
        for m, n in ((size, 100), (100, size)):
            verified(problem_of(mode, m=m, n=n, block=block, layout="both"), device)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
def test_every_pair_of_blocks_in_ragged_sizes(device, mode, block, out_block):
    blocks = {"block": block, "out_block": out_block}
    for m, n in ((1, 1), (31, 300), (33, 127), (129, 64), (257, 1030)):
        for layout in ("q", "qt", "both"):
            problem = problem_of(mode, m=m, n=n, layout=layout, **blocks)
            verified(problem, device, every=True, data="outlier")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_large_and_every_config(device, mode, block):
    verified(problem_of(mode, m=4096, n=8192, block=block), device, every=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_graph_replays_and_streams_agree_with_one_call(device, mode):
    """Run to run the same bits, floats too."""
    problem = problem_of(mode, m=2000, n=3000)
    for kernel, config in choices(problem, device):
        norms.replay(OP, problem, kernel, config, OP.inputs(problem, device))
