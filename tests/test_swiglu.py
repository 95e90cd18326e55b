"""swiglu: the reference against torch, the kernels against the reference."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.tensors import names_of
from jetfire.core.workloads import RAGGED
from jetfire.ops import int8_quantize, int8_swiglu_backward
from jetfire.reference import swiglu as reference
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

OP = registry.get("swiglu")
MODES = ["fwd", "bwd"]
CPU = torch.device("cpu")


def problem_of(mode, m=70, n=137, **fields):
    return OP.problems(mode, {"m": m, "n": n, **fields})[0]


def choices(problem, device, tiles=()):
    """The kernels that run here, each with its default config, the Triton one with these too."""
    where = Device.of(torch.empty(0, device=device))
    found = []
    for kernel in registry.kernels("swiglu").values():
        configs = [kernel.default(problem, where)]
        if kernel.space(problem, where):
            configs += [kernel.Config(*tile) for tile in tiles]
        found += [(kernel, c) for c in configs if kernel.legal(problem, c, where) is None]
    assert found
    return found


def verified(problem, device, inputs=None, tiles=(), **kwargs):
    inputs = inputs or OP.inputs(problem, device, **kwargs)
    expected = OP.reference(problem, inputs)
    for kernel, config in choices(problem, device, tiles):
        result = verify(OP, kernel, problem, config, inputs, expected)
        assert result.ok, f"{kernel.name} {config} {problem}: {result.message}"


def test_reference_is_torch():
    """silu and its autograd of torch in float64, over all magnitudes."""
    z = torch.cat([torch.linspace(-40, 40, 4001), torch.logspace(-30, 30, 61)]).double()
    z = torch.cat([z, -z]).requires_grad_()
    y = torch.nn.functional.silu(z)
    torch.testing.assert_close(reference.silu(z), y, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(reference.silu_grad(z.detach()), slope, rtol=1e-12, atol=1e-14)


def test_reference_keeps_the_negative_tail():
    """e^-50 = 1.9287498479639178e-22 (a table's value), and σ(-50) is as good as it."""
    z = torch.tensor([-50.0], dtype=torch.float64)
    assert float(reference.silu(z)) == pytest.approx(-50 * 1.9287498479639178e-22, rel=1e-12)


def test_reference_takes_codes_and_scales():
    torch.manual_seed(0)
    codes = [part for _ in range(3) for part in quantize(torch.randn(40, 70), 32)]
    gate, up, dy = (
        dequantize(q, scale, 32, torch.float64).requires_grad_()
        for q, scale in zip(codes[::2], codes[1::2], strict=True)
    )
    y = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(reference.forward(*codes[:4], 32), y)
    expected = torch.autograd.grad(y, (gate, up), dy)
    for got, want in zip(reference.backward(*codes, 32), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_peers_are_the_reference():
    for mode in MODES:
        problem = problem_of(mode, rounding="nearest")
        inputs = OP.inputs(problem, CPU)
        expected = OP.reference(problem, inputs)
        found = OP.peers(problem, inputs)["eager"]()()
        names = ("q",) if mode == "fwd" else ("dgate", "dup")
        for got, name in zip((found,) if mode == "fwd" else found, names, strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.double(), expected[name], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernels_match_the_reference(device, block, mode, rounding):
    problem = problem_of(mode, block=block, rounding=rounding, layout="both")
    verified(problem, device, data="heavy")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["q", "qt"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 127), (33, 1)])
def test_layouts_and_ragged_shapes(device, mode, layout, m, n):
    problem = problem_of(mode, m, n, layout=layout)
    assert problem.rounding == ("stochastic" if mode == "bwd" else "nearest")
    verified(problem, device, data="outlier")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", ["zeros", "subnormal", "largest", "nonfinite", "shifted"])
def test_where_arithmetic_ends(device, mode, data):
    verified(problem_of(mode, layout="both"), device, data=data)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [1e-25, 1.0, 1e20])
def test_extreme_scales(device, mode, other):
    """Gates of every magnitude, of only negative values and of NaN, beside small and large up."""
    problem = problem_of(mode, 32, 32 * 16)
    torch.manual_seed(0)
    gate = torch.randn(32, 32 * 16).clamp(-3, 3).to(device)
    magnitudes = (1e-28, 1e-10, 1e-3, 1.0, 4.0, 30.0, 300.0, 1e4, 1e12, 1e30, 1e37)
    for i, magnitude in enumerate((*magnitudes, 1.5, 2.5, 30.0, 1e30)):
        gate[:, 32 * i : 32 * (i + 1)] *= magnitude
    gate[:, 32 * 11 : 32 * 15] = -gate[:, 32 * 11 : 32 * 15].abs() - 2.0
    gate[5, -1] = math.nan
    inputs = dict(zip(("gate", "gate_scale"), quantize(gate, 32), strict=True))
    inputs |= zip(("up", "up_scale"), quantize(other * torch.randn_like(gate), 32), strict=True)
    if mode == "bwd":
        inputs |= zip(("dy", "dy_scale"), quantize(torch.randn_like(gate), 32), strict=True)
        inputs["seed"] = torch.tensor([-7], dtype=torch.int64, device=device)
    verified(problem, device, inputs)


def test_gates_that_are_shut_leave_no_nan(device):
    """The product of the scales overflows, and every value is 0."""
    inputs = OP.inputs(problem_of("bwd", 32, 32), device)
    inputs["gate"] = -inputs["gate"].abs().clamp(min=1)
    for name in ("gate", "up", "dy"):
        inputs[f"{name}_scale"].fill_(2.0**70)
    for mode in MODES:
        problem = problem_of(mode, 32, 32)
        for kernel, config in choices(problem, device):
            outputs = OP.outputs(problem, inputs)
            launch(kernel, problem, config, inputs, outputs)
            assert all(not tensor.any() for tensor in outputs.values()), kernel.name


@pytest.mark.parametrize("mode", MODES)
def test_strided_views(device, mode):
    problem = problem_of(mode, 65, 100)
    inputs = OP.inputs(problem, device)
    for name in {"gate", "up", "dy"} & inputs.keys():
        wide = torch.full((65, 160), 77, dtype=torch.int8, device=device)
        wide[:, :100] = inputs[name]
        scale = torch.full((3, 9), torch.nan, dtype=torch.float32, device=device)
        scale[:, :4] = inputs[f"{name}_scale"]
        inputs |= {name: wide[:, :100], f"{name}_scale": scale[:, :4]}
        assert not inputs[name].is_contiguous()
    verified(problem, device, inputs)


@pytest.mark.parametrize(("name", "bad"), [("gate", "both"), ("up", "dgate"), ("dy", "both")])
def test_a_bad_block_shows_where_it_is_used(device, name, bad):
    problem = problem_of("bwd", 70, 70)
    inputs = OP.inputs(problem, device)
    inputs[f"{name}_scale"][1, 0] = math.nan
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        for output in ("dgate", "dup"):
            found = outputs[f"{output}_scale"].isnan().nonzero().tolist()
            assert found == ([[1, 0]] if bad in ("both", output) else [])


@pytest.mark.parametrize("mode", MODES)
def test_smaller_and_larger_tiles(device, mode):
    """What a tile holds does not show in the result, stochastic draws included."""
    problem = problem_of(mode, 64, 128, rounding="stochastic", layout="both")
    verified(problem, device, tiles=((32, 32, 2), (64, 64, 4), (32, 128, 2)), data="gradient")


def test_the_gradients_round_apart(device):
    """Where silu is its argument and up the same, both gradients are: only the draws differ."""
    problem = problem_of("bwd", 64, 96)
    inputs = OP.inputs(problem, device)
    inputs["gate"] = 64 + inputs["gate"].abs() // 2
    inputs["gate_scale"].fill_(1.0)
    inputs |= {"up": inputs["gate"], "up_scale": inputs["gate_scale"]}
    for kernel, config in choices(problem, device):
        outputs = OP.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, outputs)
        differing = (outputs["dgate"] != outputs["dup"]).float().mean()
        assert 0.2 < differing < 0.5, kernel.name  # a third, of draws that are independent


@pytest.mark.parametrize("name", ["dgate", "dup_t"])
def test_a_wrong_code_is_found(name):
    problem = problem_of("bwd", layout="both" if name == "dgate" else "qt")
    inputs = OP.inputs(problem, CPU)
    outputs = OP.outputs(problem, inputs)
    kernel = registry.get_kernel("swiglu", "torch")
    kernel.launch(problem, kernel.Config(), inputs, outputs)
    expected = OP.reference(problem, inputs)
    assert OP.check(problem, outputs, expected).ok
    outputs[name][3, 4] += 2 if outputs[name][3, 4] < 100 else -2
    assert OP.check(problem, outputs, expected).message.startswith(name.split("_")[0])


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_joined_gradients_are_those_of_both(device, layout):
    """dgate beside dup, to the bit, and their transposes under each other."""
    torch.manual_seed(0)
    gate, up, dy = (int8_quantize(torch.randn(70, 128, device=device)) for _ in range(3))
    options = {
        "seed": torch.tensor([5], dtype=torch.int64, device=device),
        "layout": layout,
        "out_block": 64,
    }
    dgate, dup = int8_swiglu_backward(gate, up, dy, **options)
    joined = int8_swiglu_backward(gate, up, dy, joined=True, **options)
    assert joined.block == 64
    tensors = *gate.tensors, *up.tensors, *dy.tensors, options["seed"]
    given = *tensors, 32, "stochastic", layout, 64
    torch.library.opcheck(torch.ops.jetfire.swiglu_backward.joined, given)
    for name in names_of(layout=layout):
        parts = getattr(dgate, name), getattr(dup, name)
        both = torch.cat(parts, dim=0 if name in ("qt", "scale_t") else 1)
        assert torch.equal(getattr(joined, name), both), name


def test_rows_of_outputs_may_lie_apart(device):
    """Each kernel writes what it does otherwise, and nothing beside it."""
    problem = problem_of("bwd", 65, 100, layout="both")
    inputs = OP.inputs(problem, device)
    for kernel, config in choices(problem, device):
        plain, apart = OP.outputs(problem, inputs), {}
        launch(kernel, problem, config, inputs, plain)
        for name, x in plain.items():
            gap = 0 if name.endswith("_t") else x.shape[1]
            wide = x.new_full((x.shape[0], x.shape[1] + gap), 77)
            apart[name] = wide[:, : x.shape[1]]
        launch(kernel, problem, config, inputs, apart)
        for name, x in apart.items():
            assert torch.equal(x, plain[name]), f"{kernel.name}: {name}"
            assert (x._base[:, x.shape[1] :] == 77).all(), f"{kernel.name}: {name}"


def test_joined_gradients_are_of_whole_blocks():
    gate = int8_quantize(torch.randn(32, 96))
    with pytest.raises(UsageError, match="96 columns: expected a multiple of 64"):
        int8_swiglu_backward(gate, gate, gate, rounding="nearest", out_block=64, joined=True)


def test_names_of_outputs():
    problem = problem_of("bwd", 40, 70, layout="both")
    outputs = OP.outputs(problem, OP.inputs(problem, CPU))
    shapes = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    assert shapes == {
        f"{name}{suffix}": shape
        for name in ("dgate", "dup")
        for suffix, shape in (
            ("", (40, 70)),
            ("_scale", (2, 3)),
            ("_t", (70, 40)),
            ("_scale_t", (3, 2)),
        )
    }


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_every_ragged_size(device, mode, block):
    for size in RAGGED:
        for m, n in ((size, 100), (100, size)):
            verified(problem_of(mode, m, n, block=block, layout="both"), device)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_large(device, mode, block):
    verified(problem_of(mode, 4096, 8192, block=block), device, tiles=((128, 128, 16),))
