"""layernorm: the reference against torch's, and kernels against the reference."""

import dataclasses
import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import launch
from jetfire.core.workloads import RAGGED
from jetfire.reference import layernorm as reference
from jetfire.reference.dequantize import dequantize
from jetfire.tests import norms

OP = registry.get("layernorm")
SHAPES = [(1, 1), (31, 33), (127, 200), (33, 1)]
CASES = [("fwd", "row"), ("fwd", "given"), ("bwd", "row")]
PAIRS = list(itertools.product((32, 64, 128), repeat=2))


def problem_of(mode, stats, **fields):
    return OP.problems(mode, {"stats": stats, **fields})[0]


def choices(problem, device, every=False):
    return norms.choices(OP, problem, device, every)


def verified(problem, device, **kwargs):
    norms.verified(OP, problem, device, **kwargs)


@pytest.mark.parametrize(("m", "n"), [(3, 2), (40, 70), (5, 513)])
def test_reference_is_torch_and_its_autograd(m, n):
    torch.manual_seed(0)
    x = torch.randn(m, n, dtype=torch.float64).requires_grad_()
    weight = torch.randn(n, dtype=torch.float64).requires_grad_()
    bias = torch.randn(n, dtype=torch.float64).requires_grad_()
    dy = torch.randn(m, n, dtype=torch.float64)
    y = torch.nn.functional.layer_norm(x, (n,), weight, bias, 1e-5)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    mean, rstd = reference.statistics(x, 1e-5)
    torch.testing.assert_close(reference.forward(x, mean, rstd, weight, bias), y)
    for got, want in zip(reference.backward(x, dy, weight, mean, rstd), expected, strict=True):
        torch.testing.assert_close(got, want)
    dsum = torch.randn(m, n, dtype=torch.float64)
    y = torch.nn.functional.layer_norm(x, (n,), weight, bias, 1e-5)
    expected = torch.autograd.grad((y, x), (x, weight, bias), (dy, dsum))
    found = reference.backward(x, dy, weight, mean, rstd, dsum)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("mode", "stats"), CASES)
def test_op_is_torch_on_dequantised_inputs(mode, stats):
    problem = problem_of(mode, stats, m=40, n=90, rounding="nearest")
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)
    x = dequantize(inputs["x"], inputs["x_scale"], 32, torch.float64).requires_grad_()
    weight = inputs["weight"].double().requires_grad_()
    bias = inputs.get("bias", torch.zeros(90)).double().requires_grad_()
    y = torch.nn.functional.layer_norm(x, (90,), weight, bias, problem.eps)
    if mode == "fwd":
        torch.testing.assert_close(expected["q"], y.detach(), rtol=1e-5, atol=1e-5)
        return
    dy = dequantize(inputs["dy"], inputs["dy_scale"], 32, torch.float64)
    gradients = torch.autograd.grad(y, (x, weight, bias), dy)
    for name, want in zip(("q", "dweight", "dbias"), gradients, strict=True):
        torch.testing.assert_close(expected[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("mode", "stats"), CASES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_triton_matches_reference(device, block, mode, stats, m, n):
    problem = problem_of(mode, stats, m=m, n=n, block=block, layout="both")
    verified(problem, device, data="gradient" if mode == "bwd" else "outlier")


@pytest.mark.parametrize(("mode", "stats"), CASES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_layouts_roundings_and_configs(device, mode, stats, rounding):
    fields = {"m": 70, "n": 100, "block": 32, "rounding": rounding}
    for layout in ("q", "qt", "both"):
        problem = problem_of(mode, stats, layout=layout, **fields)
        verified(problem, device, every=layout == "both", data="heavy")


@pytest.mark.parametrize(("mode", "stats"), CASES)
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_pair_of_blocks(device, mode, stats, block, out_block, rounding):
    fields = {"block": block, "out_block": out_block, "rounding": rounding, "layout": "both"}
    problem = problem_of(mode, stats, m=150, n=140, **fields)
    verified(problem, device, data="heavy")


def test_rows_wider_than_a_chunk_and_a_tile(device):
    """Public Jetfire's backward sums over 128 columns: here every row is 1100 wide."""
    for mode in ("fwd", "bwd"):
        verified(problem_of(mode, "row", m=33, n=1100), device, data="outlier")


@pytest.mark.parametrize("stats", ["row", "given"])
def test_strided_views_and_constant_rows(device, stats):
    """A constant row is its bias: 64·2^-8 and its mean are exact, so nothing is left to scale."""
    problem = problem_of("fwd", stats, m=65, n=100)
    inputs = OP.inputs(problem, device)
    wide = torch.zeros(65, 160, dtype=torch.int8, device=device)
    wide[:, :100] = inputs["x"]
    wide[7], wide[9] = 0, 64
    inputs["x"] = wide[:, :100]
    inputs["x_scale"] = torch.full_like(inputs["x_scale"], 2.0**-8)
    if stats == "given":
        x = dequantize(inputs["x"], inputs["x_scale"], 32)
        inputs["mean"], inputs["rstd"] = reference.statistics(x, problem.eps)
    assert not inputs["x"].is_contiguous()
    verified(problem, device, inputs=inputs)
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        y = dequantize(outputs["q"], outputs["scale"], 32)
        step = dequantize(torch.ones_like(outputs["q"]), outputs["scale"], 32)
        for row in (7, 9):
            assert ((y[row] - inputs["bias"]).abs() <= 0.501 * step[row]).all()


def test_strided_gradients(device):
    problem = problem_of("bwd", "row", m=33, n=64)
    inputs = OP.inputs(problem, device)
    for name in ("x", "dy"):
        wide = torch.zeros(33, 96, dtype=torch.int8, device=device)
        wide[:, :64] = inputs[name]
        inputs[name] = wide[:, :64]
    verified(problem, device, inputs=inputs)


def test_a_bad_block_shows_in_its_rows(device):
    problem = problem_of("fwd", "row", m=70, n=70)
    inputs = OP.inputs(problem, device)
    inputs["x_scale"][1, 0] = float("nan")
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        assert outputs["scale"].isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]
        assert (outputs["q"][32:64] == 0).all()
        assert outputs["mean"].isnan().nonzero().flatten().tolist() == list(range(32, 64))


def test_rows_of_zeros_beside_others_too_large_to_square(device):
    """Their block's scale squared is infinite; it times 0 must not be what their variance is."""
    problem = problem_of("fwd", "row", m=40, n=70)
    inputs = OP.inputs(problem, device)
    inputs["x"][::2] = 0
    inputs["x_scale"].fill_(2.0**100)
    verified(problem, device, inputs=inputs)
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        assert (outputs["mean"][::2] == 0).all()
        assert outputs["rstd"][::2].tolist() == pytest.approx([problem.eps**-0.5] * 20)


def test_legal_says_why_not():
    problem = problem_of("fwd", "row", m=64, n=64)
    where = target_device((9, 0))
    for name, wrong in (
        ("gluon", {"tile_n": 48, "warps": 3, "rows": 16, "steps": 64}),
        ("triton", {"tile_m": 48, "tile_n": 16, "warps": 3}),
    ):
        kernel = registry.get_kernel("layernorm", name)
        good = kernel.default(problem, where)
        assert kernel.legal(problem, good, where) is None
        for field, value in wrong.items():
            assert field in kernel.legal(
                problem, dataclasses.replace(good, **{field: value}), where
            )
        assert kernel.legal(problem, good, Device(kind="cpu")) is not None


@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_every_pair_of_blocks_has_a_default(mode, block, out_block):
    problem = problem_of(mode, "row", m=64, n=64, block=block, out_block=out_block)
    where = target_device((9, 0))
    for name in ("gluon", "triton"):
        kernel = registry.get_kernel("layernorm", name)
        assert kernel.legal(problem, kernel.default(problem, where), where) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "stats"), CASES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_every_ragged_size(device, mode, stats, block):
    for size in RAGGED:
        for m, n in ((size, 100), (100, size)):
            verified(problem_of(mode, stats, m=m, n=n, block=block, layout="both"), device)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "stats"), CASES)
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
def test_every_pair_of_blocks_in_ragged_sizes(device, mode, stats, block, out_block):
    blocks = {"block": block, "out_block": out_block}
    for m, n in ((1, 1), (31, 300), (33, 127), (129, 64), (257, 1030)):
        for layout in ("q", "qt", "both"):
            problem = problem_of(mode, stats, m=m, n=n, layout=layout, **blocks)
            verified(problem, device, every=True, data="outlier")


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "stats"), CASES)
def test_large_and_every_config(device, mode, stats):
    problem = problem_of(mode, stats, m=4096, n=8192, block=64)
    verified(problem, device, every=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "stats"), CASES)
def test_graph_replays_and_streams_agree_with_one_call(device, mode, stats):
    """Run to run the same bits, floats too."""
    problem = problem_of(mode, stats, m=2000, n=3000)
    for kernel, config in choices(problem, device):
        norms.replay(OP, problem, kernel, config, OP.inputs(problem, device))
