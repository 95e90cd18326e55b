"""softsign: the reference against torch, the kernels against the reference."""

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import verify
from jetfire.reference import softsign as reference
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

OP = registry.get("softsign")


def test_reference_is_torch():
    """Forward and autograd of torch.nn.functional.softsign in float64."""
    (x, x_scale), (dy, dy_scale) = (quantize(3 * torch.randn(40, 70), 32) for _ in range(2))
    wide = dequantize(x, x_scale, 32, torch.float64).requires_grad_()
    y = torch.nn.functional.softsign(wide)
    torch.testing.assert_close(reference.forward(x, x_scale, 32), y)
    (dx,) = torch.autograd.grad(y, wide, dequantize(dy, dy_scale, 32, torch.float64))
    torch.testing.assert_close(reference.backward(x, x_scale, dy, dy_scale, 32), dx)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernels(device, name, mode, rounding):
    kernel = registry.get_kernel("softsign", name)
    problem = OP.Problem(70, 137, mode=mode, rounding=rounding, layout="both")
    inputs = OP.inputs(problem, device, data="heavy")
    where = Device.of(inputs["x"])
    config = kernel.default(problem, where)
    if kernel.legal(problem, config, where) is not None:
        pytest.skip("a CPU kernel")
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, result.message
