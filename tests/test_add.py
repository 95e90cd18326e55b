"""add: sums and codes bit for bit, row statistics to tolerance, forward and backward."""

import dataclasses

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.reference import add as reference
from jetfire.reference.dequantize import dequantize
from jetfire.reference.layernorm import statistics
from jetfire.reference.quantize import quantize
from jetfire.tests.norms import replay

OP = registry.get("add")
KERNEL = registry.get_kernel("add", "triton")
SHAPES = [(1, 1), (31, 33), (127, 200), (33, 1)]


def configs(problem, device):
    """The default, and tiles of several blocks each way."""
    default = KERNEL.default(problem, Device.of(torch.empty(0, device=device)))
    block = problem.block
    wide = dataclasses.replace(default, tile_m=block, tile_n=2 * block, warps=8)
    return [default, wide, dataclasses.replace(wide, tile_m=2 * block, tile_n=block)]


def verified(problem, device, config=None, **kwargs):
    inputs = OP.inputs(problem, device, **kwargs)
    result = verify(OP, KERNEL, problem, config or configs(problem, device)[0], inputs)
    assert result.ok, f"{problem}: {result.message}"


def test_reference_is_the_sum_rounded_once():
    x = torch.randn(40, 70).bfloat16()
    y, y_scale = quantize(torch.randn(40, 70), 32)
    exact = x.double() + dequantize(y, y_scale, 32, torch.float64)
    total = reference.add(x, y, y_scale, 32).double()
    # Half a unit in the last of bf16's eight bits (2^-8), and fp32's roundings on the way.
    assert ((total - exact).abs() <= exact.abs() * (2.0**-8 + 2.0**-22) + 2.0**-24).all()


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_triton_equals_reference(device, block, mode, m, n):
    [problem] = OP.problems(mode, {"m": m, "n": n, "block": block, "layout": "both"})
    for data in ("outlier", "gradient"):
        verified(problem, device, data=data)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
def test_layouts_roundings_and_configs(device, mode, rounding, layout):
    fields = {"m": 40, "n": 150, "rounding": rounding, "layout": layout}
    [problem] = OP.problems(mode, fields)
    for config in configs(problem, device):
        verified(problem, device, config, data="heavy")


def test_backward_rounds_stochastically_unless_told():
    assert OP.problems("bwd", {"m": 1, "n": 1})[0].rounding == "stochastic"
    assert OP.problems("bwd", {"m": 1, "n": 1, "rounding": "nearest"})[0].rounding == "nearest"
    assert OP.problems("fwd", {"m": 1, "n": 1})[0].rounding == "nearest"


def test_strided_views_and_constant_rows(device):
    problem = OP.Problem(65, 100, eps=1e-3)
    inputs = OP.inputs(problem, device)
    for name in ("x", "y"):
        wide = torch.zeros(65, 160, dtype=inputs[name].dtype, device=device)
        wide[:, :100] = inputs[name]
        wide[7] = 0
        wide[9] = 64
        inputs[name] = wide[:, :100]
    inputs["y_scale"] = torch.full_like(inputs["y_scale"], 0.25)
    result = verify(OP, KERNEL, problem, configs(problem, device)[0], inputs)
    assert result.ok, result.message
    assert not inputs["x"].is_contiguous()


def test_an_inf_shows_in_its_block_and_row(device):
    problem = OP.Problem(40, 80)
    inputs = OP.inputs(problem, device)
    inputs["x"][3, 50] = float("inf")
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, configs(problem, device)[0], inputs, outputs)
    assert outputs["scale"].isnan().tolist() == [[False, True, False], [False, False, False]]
    assert (outputs["q"][:32, 32:64] == 0).all()
    assert outputs["rstd"].isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("block", [32, 128])
def test_every_ragged_size(device, mode, block):
    for size in RAGGED:
        for m, n in ((size, 100), (100, size)):
            verified(
                OP.problems(mode, {"m": m, "n": n, "block": block, "layout": "both"})[0], device
            )


@pytest.mark.gpu
def test_graph_replays_and_streams_agree_with_one_call(device):
    """The counters are left at zero by every launch, and no two launches in flight share any."""
    problem = OP.Problem(1000, 3000)
    replay(OP, problem, KERNEL, configs(problem, device)[0], OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_more_than_two_to_the_31_elements(device, mode):
    """Blocks are independent, so the first and last rows alone are compared."""
    m, n = 2**20 + 77, 2**11 + 3
    [problem] = OP.problems(mode, {"m": m, "n": n, "rounding": "nearest"})
    stream, branch = ("x", "y") if mode == "fwd" else ("dsum", "dq")
    inputs = {
        stream: torch.empty(m, n, dtype=torch.bfloat16, device=device).normal_(),
        branch: torch.empty(m, n, dtype=torch.int8, device=device).random_(-127, 128),
        f"{branch}_scale": torch.rand(-(-m // 32), -(-n // 32), device=device) / 64,
    }
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, configs(problem, device)[0], inputs, outputs)
    top = 2**31 // n // 32 * 32
    for first, last in ((0, 64), (top - 64, top + 64), (m // 32 * 32 - 64, m)):
        part = {k: v[first:last] for k, v in inputs.items() if not k.endswith("scale")}
        part[f"{branch}_scale"] = inputs[f"{branch}_scale"][first // 32 : -(-last // 32)]
        some = dataclasses.replace(problem, m=last - first)
        got = {
            k: v[first // 32 : -(-last // 32)] if k == "scale" else v[first:last]
            for k, v in outputs.items()
        }
        result = OP.check(some, got, OP.reference(some, part))
        assert result.ok, result.message


def test_statistics_are_those_of_the_rounded_sum(device):
    problem = OP.Problem(33, 257)
    inputs = OP.inputs(problem, device, data="outlier")
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, configs(problem, device)[0], inputs, outputs)
    mean, rstd = statistics(outputs["sum"].double(), problem.eps)
    torch.testing.assert_close(outputs["mean"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs["rstd"].double(), rstd, rtol=1e-5, atol=0.0)
