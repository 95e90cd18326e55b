"""layernorm: the reference against torch's, and kernels against the reference."""

import dataclasses
import itertools
import math
import re

import pytest
import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.tensors import with_transpose
from jetfire.core.workloads import RAGGED
from jetfire.reference import layernorm as reference
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

OP = registry.get("layernorm")
SHAPES = [(1, 1), (31, 33), (127, 200), (33, 1)]
CASES = [("fwd", "row"), ("fwd", "given"), ("bwd", "row")]
STREAM = {"residual": True, "layout": "both"}
PAIRS = list(itertools.product((32, 64, 128), repeat=2))


def problem_of(mode, stats, **fields):
    return OP.problems(mode, {"stats": stats, **fields})[0]


def choices(problem, device, every=False):
    """The GPU's kernels that run here, each with its default config, or another one too."""
    where = Device.of(torch.empty(0, device=device))
    found = []
    for kernel in registry.kernels("layernorm").values():
        if kernel.name == "torch":
            continue
        default = kernel.default(problem, where)
        if kernel.name == "tiles":
            other = dataclasses.replace(default, stages=3, resident=1)
        else:
            other = dataclasses.replace(default, tile_n=2 * default.tile_n, warps=2 * default.warps)
        for config in (default, other) if every else (default,):
            if kernel.legal(problem, config, where) is None:
                found.append((kernel, config))
    assert found
    return found


def verified(problem, device, every=False, inputs=None, **kwargs):
    inputs = inputs or OP.inputs(problem, device, **kwargs)
    expected = OP.reference(problem, inputs)
    for kernel, config in choices(problem, device, every):
        result = verify(OP, kernel, problem, config, inputs, expected)
        assert result.ok, f"{kernel.name} {config} {problem}: {result.message}"


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


@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_stream_s_gradient_in_every_pair_of_blocks(device, block, out_block, rounding):
    fields = {"block": block, "out_block": out_block, "rounding": rounding, **STREAM}
    verified(problem_of("bwd", "row", m=150, n=140, **fields), device, data="heavy")


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_stream_s_gradient_of_any_shape(device, layout, m, n):
    problem = problem_of("bwd", "row", m=m, n=n, out_block=128, residual=True, layout=layout)
    for data in ("gradient", "outlier"):
        verified(problem, device, every=layout == "both", data=data)


def streamed(problem, inputs, kernel, config):
    """A launch's outputs."""
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    return outputs


def on_the_cpu():
    kernel = registry.get_kernel("layernorm", "torch")
    return kernel, kernel.Config()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_stream_s_codes_are_those_of_its_gradient(device, rounding):
    """As `add` has them: bit for bit, of the sum as it was rounded."""
    problem = problem_of("bwd", "row", m=70, n=150, out_block=64, rounding=rounding, **STREAM)
    inputs = OP.inputs(problem, device)
    kernel = registry.get_kernel("layernorm", "triton")
    config = kernel.default(problem, Device.of(inputs["x"]))
    outputs = streamed(problem, inputs, kernel, config)
    q, scale = quantize(outputs["dx"].float(), 64, rounding, inputs.get("seed"))
    for name, expected in with_transpose(q, scale).items():
        assert torch.equal(outputs[name], expected), name


def test_a_strided_stream(device):
    problem = problem_of("bwd", "row", m=65, n=96, **STREAM)
    inputs = OP.inputs(problem, device)
    wide = torch.full((65, 131), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 3:99] = inputs["dsum"]
    inputs["dsum"] = wide[:, 3:99]
    assert not inputs["dsum"].is_contiguous()
    verified(problem, device, inputs=inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy says so too
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_stream_shows_in_its_block(device, value):
    problem = problem_of("bwd", "row", m=70, n=70, **STREAM)
    inputs = OP.inputs(problem, device)
    inputs["dsum"][40, 3] = value
    verified(problem, device, inputs=inputs)
    for kernel, config in choices(problem, device):
        outputs = streamed(problem, inputs, kernel, config)
        bad = ~torch.isfinite(outputs["dx"])
        assert bad.nonzero().tolist() == [[40, 3]]
        assert torch.isnan(outputs["dx"][40, 3]) == math.isnan(value)
        assert outputs["scale"].isnan().nonzero().tolist() == [[1, 0]]
        assert (outputs["q"][32:64, :32] == 0).all()
        assert all(outputs[name].isfinite().all() for name in ("dweight", "dbias"))


def test_a_bad_scale_shows_in_a_stream_s_rows(device):
    problem = problem_of("bwd", "row", m=70, n=70, **STREAM)
    inputs = OP.inputs(problem, device)
    inputs["dy_scale"][1, 0] = float("nan")
    verified(problem, device, inputs=inputs)
    for kernel, config in choices(problem, device):
        outputs = streamed(problem, inputs, kernel, config)
        rows = outputs["dx"].isnan().all(1).nonzero().flatten().tolist()
        assert rows == list(range(32, 64))
        assert outputs["dx"][:32].isfinite().all()


def test_a_wrong_sum_and_codes_of_another_are_seen():
    problem = problem_of("bwd", "row", m=40, n=70, **STREAM)
    inputs = OP.inputs(problem, torch.device("cpu"))
    right, expected = streamed(problem, inputs, *on_the_cpu()), OP.reference(problem, inputs)
    assert OP.check(problem, right, expected).ok

    def wrong(dx, of_codes):
        codes = with_transpose(*quantize(of_codes.float(), 32, "stochastic", inputs["seed"]))
        return OP.check(problem, {**right, **codes, "dx": dx}, expected)

    dx = right["dx"]
    assert wrong(dx, dx).ok
    toward = torch.where(
        dx.double().abs() > expected["dx"].abs(), dx.nextafter(torch.zeros_like(dx)), dx
    )
    assert wrong(toward, toward).message.startswith("dx: ")  # rounded toward zero
    assert wrong(inputs["dsum"], inputs["dsum"]).message.startswith("dx: ")
    unrounded = expected["dx"]
    assert not wrong(dx, unrounded + 0.01 * unrounded.abs().max()).ok


def test_a_stream_s_codes_are_unbiased(device):
    problem = problem_of("bwd", "row", m=33, n=70, out_block=64, **STREAM)
    inputs = OP.inputs(problem, device)
    kernel, config = choices(problem, device)[0]
    draws = 300
    total = torch.zeros(33, 70, dtype=torch.float64, device=device)
    for key in range(draws):
        inputs["seed"].fill_(key)
        outputs = streamed(problem, inputs, kernel, config)
        total += dequantize(outputs["q"], outputs["scale"], 64, torch.float64)
    dx = outputs["dx"].double()
    step = dequantize(torch.ones_like(outputs["q"]), outputs["scale"], 64, torch.float64)
    # Hoeffding: of 33·70 means of errors within a step none is farther off, but for 1 in 10^6.
    most = math.sqrt(math.log(2 * 33 * 70 * 1e6) / (2 * draws)) + 1e-3
    error = (total / draws - dx) / step
    assert float(error.abs().max()) < most
    assert float(error.mean().abs()) < 5 / math.sqrt(12 * 33 * 70 * draws) + 1e-3


@pytest.mark.parametrize("out_block", [32, 128])
def test_one_pass_is_nearer_to_the_gradient_than_two(device, out_block):
    """Of LayerNorm's gradient as codes, and its sum with the stream's."""
    problem = problem_of("bwd", "row", m=130, n=140, out_block=out_block, **STREAM)
    inputs = OP.inputs(problem, device)
    exact = OP.reference(problem, inputs)["dx"]
    x, dy = (ops.Quantized(inputs[k], inputs[f"{k}_scale"]) for k in ("x", "dy"))
    given = (inputs[name] for name in ("weight", "mean", "rstd"))
    given, seed, dsum = list(given), inputs["seed"], inputs["dsum"]
    dx, copy, *sums = ops.int8_layernorm_add_backward(
        x, dy, *given, dsum, seed=seed, out_block=out_block
    )
    dq, *same = ops.int8_layernorm_backward(x, dy, *given, seed=seed)
    two, its_copy = ops.int8_add_backward(dsum, dq, seed=seed + 1, out_block=out_block)
    for mine, theirs in zip(sums, same, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    def error(tensor):
        return float((tensor.double() - exact).norm())

    assert error(dx) < 0.5 * error(two)
    values = (dequantize(c.q, c.scale, out_block, torch.float64) for c in (copy, its_copy))
    mine, theirs = map(error, values)
    assert mine < theirs


def test_a_stream_has_a_gradient_alone():
    with pytest.raises(UsageError, match=r"^residual=true mode=fwd: expected mode=bwd$"):
        OP.Problem(64, 64, residual=True)
    plain = problem_of("bwd", "row", m=64, n=64)
    assert "residual" not in str(plain)
    problem = OP.Problem.parse({**plain.as_dict(), "residual": "true"})
    assert problem.as_dict() == {**plain.as_dict(), "residual": True}


def test_a_stream_of_another_shape_or_dtype_is_refused():
    problem = problem_of("bwd", "row", m=40, n=70, residual=True)
    inputs = OP.inputs(problem, torch.device("cpu"))
    x, dy = (ops.Quantized(inputs[k], inputs[f"{k}_scale"]) for k in ("x", "dy"))
    given = [inputs[name] for name in ("weight", "mean", "rstd")]
    for dsum, message in (
        (inputs["dsum"].float(), "dsum is float32: expected bfloat16"),
        (inputs["dsum"][:39], "dsum has shape (39, 70): expected (40, 70)"),
    ):
        with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
            ops.int8_layernorm_add_backward(x, dy, *given, dsum, seed=inputs["seed"])


def test_rows_wider_than_a_chunk_and_a_tile(device):
    """Public Jetfire's backward sums over 128 columns: here every row is 1100 wide."""
    for mode, fields in (("fwd", {}), ("bwd", {}), ("bwd", STREAM)):
        verified(problem_of(mode, "row", m=33, n=1100, **fields), device, data="outlier")


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
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
def test_a_stream_s_gradient_in_ragged_sizes(device, block, out_block):
    blocks = {"block": block, "out_block": out_block}
    for m, n in ((1, 1), (31, 300), (33, 127), (129, 64), (257, 1030), (384, 1600)):
        for layout in ("q", "qt", "both"):
            for rounding in ("nearest", "stochastic"):
                fields = {"layout": layout, "rounding": rounding, "residual": True, **blocks}
                problem = problem_of("bwd", "row", m=m, n=n, **fields)
                verified(problem, device, every=True, data="outlier")


@pytest.mark.gpu
def test_a_large_stream_and_its_replays(device):
    fields = {"block": 32, "out_block": 128, **STREAM}
    verified(problem_of("bwd", "row", m=8192, n=1024, **fields), device, every=True)
    problem = problem_of("bwd", "row", m=2000, n=3000, **fields)
    for kernel, config in choices(problem, device):
        replay(problem, kernel, config, OP.inputs(problem, device))


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
        replay(problem, kernel, config, OP.inputs(problem, device))


def replay(problem, kernel, config, inputs):
    expected = OP.outputs(problem, inputs)
    launch(kernel, problem, config, inputs, expected)
    outputs = [OP.poison(problem, OP.outputs(problem, inputs)) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outputs[:2]:
            launch(kernel, problem, config, inputs, out)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream, out in zip(streams[1:], outputs[2:], strict=True):
            with torch.cuda.stream(stream):
                launch(kernel, problem, config, inputs, out)
    torch.cuda.synchronize()
    for out in outputs:
        for name, tensor in out.items():
            assert torch.equal(tensor, expected[name]), name
