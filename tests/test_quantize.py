"""quantize: kernels against the reference, bit for bit."""

import pytest

from jetfire import ops
from jetfire.ops.device import Device
from jetfire.ops.run import verify


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
def test_triton_is_bit_equal(device, block, rounding, layout, m, n):
    op = ops.get("quantize")
    problem = op.Problem(m, n, block=block, rounding=rounding, layout=layout)
    kernel = ops.get_kernel("quantize", "triton")
    inputs = op.inputs(problem, device, data="heavy")
    config = kernel.default(problem, Device.of(inputs["x"]))
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, result.message
