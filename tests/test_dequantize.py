"""dequantize: kernels against the reference, bit for bit."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import verify
from jetfire.core.workloads import RAGGED

OP = registry.get("dequantize")
KERNEL = registry.get_kernel("dequantize", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["q"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
def test_triton_is_bit_equal(device, block, out, m, n):
    problem = OP.Problem(m, n, block=block, out=out)
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, offset):
    problem = OP.Problem(45, 96)
    inputs = OP.inputs(OP.Problem(45, 128), device)
    inputs["q"] = inputs["q"][:, offset : offset + 96]
    inputs["scale"] = inputs["scale"][:, :3]
    check(problem, inputs)


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
def test_special_scales(device, out):
    """Scales of bad, zero, tiny and huge blocks: NaN, 0, fp16's overflow and subnormals."""
    problem = OP.Problem(40, 256, out=out)
    inputs = OP.inputs(problem, device)
    values = [math.nan, 0.0, 2.0**-107, 2.6e36, 1e-7, 3e-5, 515.0, 1000.0]
    inputs["scale"][0] = torch.tensor(values, device=device)
    check(problem, inputs)


def test_every_config_gives_the_same_bits(device):
    problem = OP.Problem(70, 130)
    inputs = OP.inputs(problem, device)
    for tiles in [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 32, 8), (64, 256, 16)]:
        check(problem, inputs, KERNEL.Config(*tiles))


def test_the_peer_is_the_same_product():
    problem = OP.Problem(45, 100)
    inputs = OP.inputs(problem, torch.device("cpu"))
    assert torch.equal(OP.peers(problem, inputs)["eager"]()(), OP.reference(problem, inputs)["x"])


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_ragged(device, size, block):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, block=block)
        check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, n = 65537, 32769
    problem = OP.Problem(m, n)
    inputs = {
        "q": torch.randint(-127, 128, (m, n), dtype=torch.int8, device=device),
        "scale": torch.rand((2049, 1025), device=device),
    }
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, KERNEL.default(problem, Device.of(inputs["q"])), inputs, outputs)
    for top in (0, 32768, 65504, 65536):
        part = {
            "q": inputs["q"][top : top + 32],
            "scale": inputs["scale"][top // 32 : top // 32 + 1],
        }
        expected = OP.reference(problem, part)["x"]
        assert torch.equal(outputs["x"][top : top + 32], expected)
