"""gemm: the reference against exact arithmetic, the kernels against the reference."""

import pytest

from jetfire import ops
from jetfire.ops.device import Device
from jetfire.ops.run import verify

OPTIONS = [
    {},
    {"out": "fp32", "bias": True, "accumulate": True},
    {"out": "fp16", "accumulate": True},
    {"out": "int8", "layout": "q"},
    {"out": "int8", "layout": "qt", "bias": True},
    {"out": "int8", "layout": "both", "rounding": "stochastic", "bias": True},
]


@pytest.mark.parametrize("name", ["triton", "int_mm"])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_matches_the_reference(device, name, block, options):
    op = ops.get("gemm")
    kernel = ops.get_kernel("gemm", name)
    problem = op.Problem(131, 70, 200, block=block, **options)
    inputs = op.inputs(problem, device, data="heavy")
    config = kernel.default(problem, Device.of(inputs["a"]))
    if (reason := kernel.legal(problem, config, Device.of(inputs["a"]))) is not None:
        pytest.skip(reason)
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, result.message
