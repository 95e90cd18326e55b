"""dropout: the reference against what dropout must do, kernels against it, bit for bit."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.core.workloads import RAGGED
from jetfire.reference.dequantize import dequantize
from jetfire.reference.dropout import drop_threshold, dropout
from jetfire.reference.quantize import quantize

OP = registry.get("dropout")
KERNEL = registry.get_kernel("dropout", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["q"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_reference_drops_a_share_and_keeps_the_mean(p):
    q, scale = quantize(torch.ones(512, 512), 64)
    out, out_scale = dropout(q, scale, p, torch.tensor([11]))
    kept = float((out != 0).double().mean())
    assert abs(kept - (1 - p)) <= 4 * math.sqrt(p * (1 - p)) / 512 + 2.0**-16
    assert torch.equal(out[out != 0], q[out != 0])
    x = dequantize(out, out_scale, 64, torch.float64)
    assert torch.allclose(x[out != 0], torch.tensor(1 / (1 - p), dtype=torch.float64), rtol=1e-4)
    assert abs(float(x.mean()) - 1) < 4 * math.sqrt(p / (1 - p)) / 512 + 1e-4


def test_reference_draws_one_mask_for_a_seed():
    q, scale = quantize(torch.randn(100, 100) + 10, 32)
    gradient, g_scale = quantize(torch.randn(100, 100) - 10, 32)
    seed = torch.tensor([5])
    forward, backward = dropout(q, scale, 0.3, seed)[0], dropout(gradient, g_scale, 0.3, seed)[0]
    assert torch.equal(forward == 0, backward == 0)
    assert not torch.equal(forward, dropout(q, scale, 0.3, seed + 1)[0])


def test_threshold_leaves_something_to_keep():
    assert drop_threshold(0.0) == 0
    assert drop_threshold(0.5) == 32768
    assert drop_threshold(math.nextafter(1.0, 0.0)) == 65535


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_probabilities_outside_are_refused(p):
    with pytest.raises(UsageError, match=r"expected a probability in \[0, 1\)"):
        OP.Problem(4, 4, p=p)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (31, 33), (127, 200)])
def test_triton_is_bit_equal(device, block, layout, m, n):
    for problem in OP.problems("bwd", {"m": m, "n": n, "block": block, "layout": layout}):
        assert problem.mode == "bwd"
        check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.999999])
def test_every_probability(device, p):
    problem = OP.Problem(45, 70, p=p)
    inputs = OP.inputs(problem, device)
    inputs["scale"][0] = torch.tensor([math.nan, 0.0, 1e-30], device=device)
    check(problem, inputs)


@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, offset):
    problem = OP.Problem(45, 96)
    inputs = OP.inputs(OP.Problem(45, 128), device)
    inputs["q"] = inputs["q"][:, offset : offset + 96]
    inputs["scale"] = inputs["scale"][:, :3]
    check(problem, inputs)


def test_every_config_gives_the_same_bits(device):
    problem = OP.Problem(70, 130, layout="both")
    inputs = OP.inputs(problem, device)
    for tiles in [(32, 32, 1), (32, 128, 4), (64, 64, 2), (128, 32, 8), (64, 256, 16)]:
        check(problem, inputs, KERNEL.Config(*tiles))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_the_peer_drops_a_share(mode):
    problem = OP.Problem(100, 200, mode=mode, p=0.25)
    inputs = OP.inputs(problem, torch.device("cpu"))
    y = OP.peers(problem, inputs)["eager"]()()
    kept = y != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.03
    x = inputs["q"].to(torch.bfloat16)
    assert torch.allclose(y[kept], x[kept] / 0.75, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("layout", ["q", "both"])
def test_ragged(device, size, layout):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, layout=layout)
        check(problem, OP.inputs(problem, device))
