"""quantize_qkv: kernels against the reference, bit for bit."""

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.ops import int8_quantize, int8_quantize_qkv

OP = registry.get("quantize_qkv")
KERNEL = registry.get_kernel("quantize_qkv", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["query"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("m", "width"), [(1, 1), (33, 50), (70, 160)])
def test_tiles_that_lie_in_several_parts(device, block, rounding, m, width):
    problem = OP.Problem(m, width, block=block, rounding=rounding, layout="both")
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tiles_within_a_part(device, layout, dtype):
    problem = OP.Problem(70, 256, dtype=dtype, rounding="stochastic", layout=layout)
    check(problem, OP.inputs(problem, device))


def test_row_strided_parts(device):
    """The three as slices of wider rows, each with a stride of its own."""
    problem = OP.Problem(45, 64, layout="both")
    inputs = OP.inputs(problem, device)
    for i, name in enumerate(("query", "key", "value")):
        wide = torch.zeros((45, 64 + 8 * i), dtype=torch.bfloat16, device=device)
        wide[:, 8 * i :] = inputs[name]
        inputs[name] = wide[:, 8 * i :]
    check(problem, inputs)


def test_special_values_stay_in_their_block(device):
    problem = OP.Problem(64, 32, layout="both")
    inputs = OP.inputs(problem, device)
    inputs["key"][5, 7] = float("nan")
    inputs["value"][40, 3] = float("inf")
    inputs["query"][:32] = 0
    check(problem, inputs)


def test_equals_quantize_of_the_copy(device):
    x = torch.randn((96, 3 * 48), device=device).bfloat16()
    seed = torch.tensor([7], device=device)
    options = {"block": 32, "rounding": "stochastic", "seed": seed, "layout": "both"}
    ours, theirs = int8_quantize_qkv(*x.split(48, dim=1), **options), int8_quantize(x, **options)
    assert ours.block == theirs.block == 32
    for mine, its in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(mine, its)


def test_bad_inputs(device):
    x = torch.zeros((4, 8), device=device)
    with pytest.raises(UsageError, match=r"key has shape \(4, 4\): expected \(4, 8\)"):
        int8_quantize_qkv(x, x[:, :4], x)
    with pytest.raises(UsageError, match="value is bfloat16: expected float32"):
        int8_quantize_qkv(x, x, x.bfloat16())
