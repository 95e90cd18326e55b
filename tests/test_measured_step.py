"""measured_step: the reference against its definition, kernels against the reference."""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.ops import int4_measured_step, int8_quantize
from jetfire.reference.dequantize import dequantize
from jetfire.reference.measured_step import LEAST, MOST_ROWS, OF_RMS, measured_step, rows_read

OP = registry.get("measured_step")
KERNEL = registry.get_kernel("measured_step", "triton")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["x"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(problem, inputs, config=None):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    config = config or KERNEL.default(problem, Device.of(inputs["x"]))
    launch(KERNEL, problem, config, inputs, outputs)
    return outputs["step"]


@pytest.mark.parametrize("m", [1, 2, 511, 512, 1023, 1024, 1536, 8192, 100_000])
def test_rows_are_spread_over_a_matrix_at_an_odd_distance(m):
    rows = range(m)[rows_read(m)]
    assert rows.step % 2 == 1
    assert min(m, MOST_ROWS // 2) <= len(rows) <= max(MOST_ROWS, 1023)
    assert rows[0] < rows.step
    assert m - rows[-1] <= rows.step
    if m < 2 * MOST_ROWS:
        assert rows == range(m)


def test_the_reference_is_a_share_of_the_root_mean_square():
    x = torch.randn(300, 40, dtype=torch.float64) * 3
    assert float(measured_step(x)) == pytest.approx(OF_RMS * float(x.pow(2).mean()) ** 0.5)
    tall = x.repeat(40, 1)
    assert float(measured_step(tall)) == pytest.approx(float(measured_step(x)), rel=0.02)
    assert float(measured_step(torch.zeros(3, 4, dtype=torch.float64))) == LEAST


@pytest.mark.parametrize("kernel", ["triton", "torch"])
@pytest.mark.parametrize(
    ("m", "n", "dtype", "block", "data"),
    [
        (1, 2, "int8", 32, "normal"),
        (70, 100, "int8", 64, "heavy"),
        (3000, 333, "int8", 128, "gradient"),
        (2000, 70, "bf16", 32, "heavy"),
        (9, 2100, "fp32", 32, "outlier"),
        (600, 64, "fp16", 32, "normal"),
    ],
)
def test_kernels_are_within_the_rounding_of_their_sums(device, kernel, m, n, dtype, block, data):
    if kernel == "torch":
        device = torch.device("cpu")
    problem = OP.Problem(m, n, dtype=dtype, block=block)
    chosen = registry.get_kernel("measured_step", kernel)
    check(problem, OP.inputs(problem, device, data=data), kernel=chosen)


def test_the_check_sees_a_row_that_is_left_out(device):
    problem = OP.Problem(64, 256, dtype="fp32")
    inputs = OP.inputs(problem, device)
    expected = OP.reference(problem, inputs)
    inputs["x"][37] = 0
    assert not OP.check(problem, {"step": launched(problem, inputs)}, expected).ok


@pytest.mark.parametrize("config", [(1, 256, 1), (8, 256, 2), (2, 2048, 8), (4, 512, 4)])
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_every_config(device, dtype, config):
    problem = OP.Problem(1100, 900, dtype=dtype, block=128)
    check(problem, OP.inputs(problem, device, data="heavy"), KERNEL.Config(*config))


def test_row_strided_views(device):
    problem = OP.Problem(70, 46)
    inputs = OP.inputs(problem, device)
    wide = OP.inputs(OP.Problem(70, 97), device)["x"]
    for offset in (0, 1, 50):
        inputs["x"] = wide[:, offset : offset + 46]
        check(problem, inputs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_what_is_not_finite_shows(device, dtype, bad):
    problem = OP.Problem(40, 64, dtype=dtype)
    inputs = OP.inputs(problem, device)
    inputs["x" if dtype == "fp32" else "x_scale"][1, 1] = bad
    if dtype == "int8":
        inputs["x"].fill_(1)
    check(problem, inputs)
    assert not bool(launched(problem, inputs).isfinite())


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_zeros_have_the_least_step(device, dtype):
    problem = OP.Problem(40, 64, dtype=dtype)
    inputs = {name: torch.zeros_like(t) for name, t in OP.inputs(problem, device).items()}
    assert float(launched(problem, inputs)) == LEAST


def test_repeats_bit_for_bit_and_leaves_its_counter_at_zero(device):
    problem = OP.Problem(3000, 3000)
    inputs = OP.inputs(problem, device, data="heavy")
    first = launched(problem, inputs)
    launched(problem, {**inputs, "x_scale": inputs["x_scale"] * 64})
    assert torch.equal(launched(problem, inputs), first)


def test_the_function_and_its_operator(device):
    x = torch.randn(70, 96, device=device)
    codes = int8_quantize(x, block=64)
    of_codes = dequantize(codes.q, codes.scale, 64, torch.float64)
    for given, values in ((x, x.double()), (codes, of_codes)):
        step = int4_measured_step(given)
        assert (step.dtype, step.shape) == (torch.float32, (1,))
        torch.testing.assert_close(step.double(), measured_step(values), rtol=1e-5, atol=0)
        compiled = torch.compile(int4_measured_step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(given), step)
    assert float(int4_measured_step(x[:0])) == LEAST
    operator = torch.ops.jetfire.measured_step.default
    torch.library.opcheck(operator, (x, None, 32))
    torch.library.opcheck(operator, (codes.q, codes.scale, 64))
    with pytest.raises(UsageError, match="x is float64: expected bfloat16 or float16 or float32"):
        int4_measured_step(x.double())


def test_what_is_refused():
    with pytest.raises(UsageError, match=r"dtype=int4 .*expected one of bf16"):
        OP.Problem(4, 8, dtype="int4")
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((3, 512, 4), "tile_m=3"),
        ((16, 256, 4), "tile_m=16"),
        ((4, 128, 4), "tile_n=128"),
        ((4, 512, 3), "warps=3"),
        ((8, 2048, 4), "128 elements per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None
