"""transpose: kernels against the reference, bit for bit."""

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import verify
from jetfire.core.workloads import RAGGED

OP = registry.get("transpose")
KERNEL = registry.get_kernel("transpose", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["q"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("m", "n"), [(1, 1), (31, 33), (127, 200), (200, 127), (64, 100), (100, 64)]
)
def test_triton_is_bit_equal(device, block, m, n):
    problem = OP.Problem(m, n, block=block)
    check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, offset):
    problem = OP.Problem(48, 96)
    inputs = OP.inputs(OP.Problem(48, 128), device)
    inputs["q"] = inputs["q"][:, offset : offset + 96]
    inputs["scale"] = inputs["scale"][:, :3]
    check(problem, inputs)


def test_every_code_survives(device):
    """All 256 bytes, at every position of a word."""
    problem = OP.Problem(64, 260)
    inputs = OP.inputs(problem, device)
    codes = torch.arange(64 * 260, device=device) * 37 % 256 - 128
    check(problem, {**inputs, "q": codes.to(torch.int8).reshape(64, 260)})


def test_every_config_gives_the_same_bits(device):
    problem = OP.Problem(70, 130)
    inputs = OP.inputs(problem, device)
    for tiles in [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 32, 8), (64, 256, 16)]:
        check(problem, inputs, KERNEL.Config(*tiles))


def test_the_peer_transposes():
    problem = OP.Problem(45, 100)
    inputs = OP.inputs(problem, torch.device("cpu"))
    peer = OP.peers(problem, inputs)["eager"]()()
    assert torch.equal(peer, inputs["q"].t().to(torch.bfloat16))
    assert peer.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_ragged(device, size, block):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, block=block)
        check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(65537, 32769), (65536, 32772)])
def test_more_than_two_to_the_31_elements(device, m, n):
    problem = OP.Problem(m, n)
    blocks = (-(-m // 32), -(-n // 32))
    inputs = {
        "q": torch.randint(-127, 128, (m, n), dtype=torch.int8, device=device),
        "scale": torch.rand(blocks, device=device),
    }
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, KERNEL.default(problem, Device.of(inputs["q"])), inputs, outputs)
    assert torch.equal(outputs["qt"], inputs["q"].t())
    assert torch.equal(outputs["scale_t"], inputs["scale"].t())
