"""gelu: the reference against torch, the kernel against the reference."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import verify
from jetfire.measure.check import codes
from jetfire.reference import gelu as reference
from jetfire.reference.quantize import quantize

TORCH_NAME = {"tanh": "tanh", "erf": "none"}
OP = registry.get("gelu")


def check(problem, inputs, config=None):
    kernel = registry.get_kernel("gelu", "triton")
    config = config or kernel.default(problem, Device.of(inputs["x"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, result.message


@pytest.mark.parametrize("approximate", ["tanh", "erf"])
def test_reference_is_torch(approximate):
    """Forward and autograd of torch.nn.functional.gelu in float64, over all magnitudes."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-30, 30, 61)]).double()
    x = torch.cat([x, -x]).requires_grad_()
    y = torch.nn.functional.gelu(x, approximate=TORCH_NAME[approximate])
    # torch's negative tail cancels: 1 + tanh and 1 + erf lose what is far below 1.
    torch.testing.assert_close(reference.gelu(x, approximate), y, rtol=1e-12, atol=1e-14)
    # Where torch's x² overflows its derivative is NaN; the limit is 0 or 1.
    small = x.detach().abs() < 1e6
    (slope,) = torch.autograd.grad(y.sum(), x)
    mine = reference.gelu_grad(x.detach(), approximate)
    torch.testing.assert_close(mine[small], slope[small], rtol=1e-12, atol=1e-14)
    assert torch.equal(mine[~small], (x[~small] > 0).double())


def test_reference_keeps_the_negative_tail():
    """Φ(-10) = 7.619853024160526e-24 (a table's value), far below 1 − erf's resolution."""
    x = torch.tensor([-10.0], dtype=torch.float64)
    assert float(reference.gelu(x, "erf")) == pytest.approx(-7.619853024160526e-23, rel=1e-12)


def test_reference_takes_codes_and_scales():
    q, scale = quantize(torch.randn(40, 70), 32)
    dy, dy_scale = quantize(torch.randn(40, 70), 32)
    rows, columns = torch.arange(40) // 32, torch.arange(70) // 32
    x = (q.double() * scale.double()[rows][:, columns]).requires_grad_()
    y = torch.nn.functional.gelu(x)
    torch.testing.assert_close(reference.forward(q, scale, 32, "erf"), y)
    upstream = dy.double() * dy_scale.double()[rows][:, columns]
    (dx,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(reference.backward(q, scale, dy, dy_scale, 32, "erf"), dx)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("approximate", ["tanh", "erf"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_triton(device, block, mode, approximate, rounding):
    problem = OP.Problem(
        70, 137, block=block, mode=mode, approximate=approximate, rounding=rounding, layout="both"
    )
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("layout", ["q", "qt"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 127), (33, 1)])
def test_triton_layouts_and_ragged_shapes(device, mode, layout, m, n):
    (problem,) = OP.problems(mode, {"m": m, "n": n, "layout": layout})
    assert problem.rounding == ("stochastic" if mode == "bwd" else "nearest")
    check(problem, OP.inputs(problem, device, data="outlier"))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("approximate", ["tanh", "erf"])
def test_triton_at_extreme_scales(device, mode, approximate):
    """Blocks of every magnitude, of only negative values and of NaN, as a strided view."""
    problem = OP.Problem(32, 32 * 14, mode=mode, approximate=approximate)
    x = torch.randn(32, 32 * 14, device=device).clamp(-3, 3)
    magnitudes = (1e-28, 1e-10, 1e-3, 1.0, 4.0, 30.0, 300.0, 1e4, 1e12, 1e30, 1e37)
    for i, magnitude in enumerate((*magnitudes, 1.5, 2.5)):
        x[:, 32 * i : 32 * (i + 1)] *= magnitude
    x[:, 32 * 11 : 32 * 13] = -x[:, 32 * 11 : 32 * 13].abs() - 2.0
    x[5, -1] = math.nan
    q, scale = quantize(x, 32)
    wide = torch.zeros(32, 32 * 16, dtype=torch.int8, device=device)
    wide[:, : 32 * 14] = q
    inputs = {"x": wide[:, : 32 * 14], "x_scale": scale}
    if mode == "bwd":
        inputs["dy"], inputs["dy_scale"] = quantize(torch.randn_like(x), 32)
    check(problem, inputs)


def test_triton_in_smaller_and_larger_tiles(device):
    """What a tile holds does not show in the result, stochastic draws included."""
    kernel = registry.get_kernel("gelu", "triton")
    (problem,) = OP.problems("bwd", {"m": 64, "n": 128})
    inputs = OP.inputs(problem, device, data="gradient")
    for tile in ((32, 32, 1), (64, 64, 4), (32, 128, 2)):
        check(problem, inputs, kernel.Config(*tile))


def test_a_code_has_four_registers():
    """With fewer, ptxas spills at some tiles, and at one of them its code is wrong."""
    kernel, device = registry.get_kernel("gelu", "triton"), target_device((9, 0))
    (problem,) = OP.problems("bwd", {"m": 8192, "n": 4096, "layout": "both"})
    for tile in ((64, 256, 8), (64, 256, 16), (64, 256, 32)):
        assert kernel.legal(problem, kernel.Config(*tile), device) is None
    for tile, each, most in (((64, 512, 16), 64, 32), ((64, 512, 32), 32, 16)):
        reason = f"{each} codes per thread: expected 1 to {most}"
        assert kernel.legal(problem, kernel.Config(*tile), device) == reason


@pytest.mark.parametrize("tile", [(32, 32, 16), (64, 64, 4), (32, 128, 2)])
def test_triton_over_its_input(device, tile):
    """No thread writes what another has yet to read, however few elements each has."""
    kernel = registry.get_kernel("gelu", "triton")
    (problem,) = OP.problems("bwd", {"m": 70, "n": 130, "layout": "both"})
    inputs, config = OP.inputs(problem, device), kernel.Config(*tile)
    assert kernel.legal(problem, config, Device.of(inputs["x"])) is None
    expected = OP.outputs(problem, inputs)
    kernel.launch(problem, config, inputs, expected)
    found = OP.outputs(problem, inputs) | {"q": inputs["dy"]}
    kernel.launch(problem, config, inputs, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_wrong_code_is_found(device):
    """The check's slack is far below the half code that a misrounding takes."""
    problem = OP.Problem(32, 32)
    inputs = OP.inputs(problem, device)
    expected = OP.reference(problem, inputs)
    q, scale = quantize(expected["q"], 32)
    assert codes("q", q, scale, expected["q"], expected["scale"], 32).ok
    q[3, 4] += 1 if q[3, 4] < 127 else -1
    assert not codes("q", q, scale, expected["q"], expected["scale"], 32).ok
