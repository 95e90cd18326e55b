"""column_sum: the reference against torch, kernels against the reference."""

import math

import pytest
import torch

from jetfire import ops as int8
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.tensors import Quantized
from jetfire.core.workloads import RAGGED
from jetfire.reference.column_sum import column_sum
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

OP = registry.get("column_sum")
KERNEL = registry.get_kernel("column_sum", "triton")


def check(problem, inputs, config=None):
    config = config or KERNEL.default(problem, Device.of(inputs["qt"]))
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


@pytest.mark.parametrize("block", [32, 64, 128])
def test_reference_is_the_gradient_of_a_bias(block):
    """As float64 autograd has it for x·Wᵀ + bias with the quantised gradient of the product."""
    q, scale = quantize(torch.randn(150, 200), block)
    bias = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.linear(
        torch.randn(150, 40).double(), torch.randn(200, 40).double(), bias
    )
    (expected,) = torch.autograd.grad(y, bias, dequantize(q, scale, block, torch.float64))
    found = column_sum(q.t().contiguous(), scale.t().contiguous(), block)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("m", "n", "data"),
    [(1, 1, "normal"), (31, 33, "gradient"), (257, 130, "heavy"), (2100, 9, "gradient")],
)
def test_triton_is_within_the_rounding_of_its_sums(device, block, m, n, data):
    problem = OP.Problem(m, n, block=block)
    check(problem, OP.inputs(problem, device, data=data))


def test_every_config(device):
    problem = OP.Problem(700, 40, block=64)
    inputs = OP.inputs(problem, device, data="outlier")
    for tiles in [(512, 1, 1), (512, 32, 8), (1024, 8, 4), (2048, 2, 16), (128, 4, 1), (64, 16, 2)]:
        check(problem, inputs, KERNEL.Config(*tiles))


@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, offset):
    problem = OP.Problem(96, 45)
    inputs = OP.inputs(OP.Problem(160, 45), device)
    inputs["qt"] = inputs["qt"][:, offset : offset + 96]
    inputs["scale_t"] = inputs["scale_t"][:, :3]
    check(problem, inputs)


def test_extreme_codes_and_scales(device):
    """All of 127 or -127, in blocks of the smallest scale, of 0 and of 2^100."""
    problem = OP.Problem(200, 64)
    inputs = OP.inputs(problem, device)
    inputs["qt"][:32] = 127
    inputs["qt"][32:] = -127
    values = [2.0**-107, 0.0, 2.0**100, 1.0, 1e-6, 3.0, 7e-3]
    inputs["scale_t"][:] = torch.tensor(values, device=device)
    check(problem, inputs)


def test_a_bad_block_shows_in_its_columns_alone(device):
    problem = OP.Problem(100, 100)
    inputs = OP.inputs(problem, device)
    inputs["scale_t"][1, 2] = math.nan
    inputs["qt"][32:64, 64:96] = 0
    check(problem, inputs)
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(inputs["qt"])), inputs, outputs)
    assert outputs["sums"].isnan().nonzero().flatten().tolist() == list(range(32, 64))


def test_repeats_bit_for_bit(device):
    problem = OP.Problem(1000, 40)
    inputs = OP.inputs(problem, device, data="heavy")
    config = KERNEL.default(problem, Device.of(inputs["qt"]))
    found = []
    for _ in range(2):
        outputs = OP.outputs(problem, inputs)
        launch(KERNEL, problem, config, inputs, outputs)
        found.append(outputs["sums"])
    assert torch.equal(*found)


def test_the_check_sees_a_missing_block():
    problem = OP.Problem(4096, 64)
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)
    inputs["qt"][5, 32:64] = 0
    sums = column_sum(inputs["qt"], inputs["scale_t"], 32).float()
    found = OP.check(problem, {"sums": sums}, expected)
    assert not found.ok
    assert "(5,)" in found.message


def test_what_is_refused():
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((96, 4, 4), "tile_m=96"),
        ((512, 64, 4), "tile_n=64"),
        ((512, 4, 3), "warps=3"),
        ((8192, 32, 1), "8192 codes per thread"),
        ((32, 1, 4), "0 codes per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)


def test_the_peer_is_the_sum_of_the_bf16_gradient():
    problem = OP.Problem(45, 100)
    inputs = OP.inputs(problem, torch.device("cpu"))
    expected = OP.reference(problem, inputs)["sums"]
    found = OP.peers(problem, inputs)["eager"]()()
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.1)


def test_the_function_and_its_operator(device):
    q, scale = quantize(torch.randn(70, 136, device=device), 64)
    x = int8.int8_transpose(Quantized(q, scale, block=64)).t
    sums = int8.int8_column_sum(x)
    assert (sums.dtype, sums.shape) == (torch.float32, (136,))
    expected = dequantize(q, scale, 64, torch.float64).sum(0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(torch.ops.jetfire.column_sum.default, (x.qt, x.scale_t, 64))
    compiled = torch.compile(int8.int8_column_sum, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sums)
    with pytest.raises(UsageError, match=r"x\.t's scale has shape \(2, 3\): expected \(3, 2\)"):
        int8.int8_column_sum(x._replace(scale_t=x.scale_t.t().contiguous()))
    with pytest.raises(UsageError, match="x lacks qt or scale_t: expected both"):
        int8.int8_column_sum(Quantized(q, scale, block=64))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size, block):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, block=block)
        check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, n = 65537, 32769
    problem = OP.Problem(m, n)
    inputs = {
        "qt": torch.randint(-127, 128, (n, m), dtype=torch.int8, device=device),
        "scale_t": torch.rand((1025, 2049), device=device),
    }
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(inputs["qt"])), inputs, outputs)
    for top in (0, 16384, 32736, 32768):
        part = {
            "qt": inputs["qt"][top : top + 32],
            "scale_t": inputs["scale_t"][top // 32 : top // 32 + 1],
        }
        some = OP.Problem(m, len(part["qt"]))
        found = {"sums": outputs["sums"][top : top + 32]}
        result = OP.check(some, found, OP.reference(some, part))
        assert result.ok, result.message
