"""column_sum: the reference against torch, kernels against the reference."""

import math

import pytest
import torch

from jetfire import ops as int8
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose, launch, verify
from jetfire.core.tensors import Quantized
from jetfire.core.workloads import RAGGED
from jetfire.reference.column_sum import column_sum
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

OP = registry.get("column_sum")
KERNELS = {
    "qt": registry.get_kernel("column_sum", "triton"),
    "q": registry.get_kernel("column_sum", "strips"),
}
both_layouts = pytest.mark.parametrize("layout", KERNELS)


def default(problem, inputs):
    """The kernel that takes a problem, and its default config."""
    kernel = KERNELS[problem.layout]
    return kernel, kernel.default(problem, Device.of(next(iter(inputs.values()))))


def check(problem, inputs, config=None):
    kernel, usual = default(problem, inputs)
    config = config or usual
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def transposed(inputs):
    """The codes and the scales of the transpose, as views."""
    if "qt" in inputs:
        return inputs["qt"], inputs["scale_t"]
    return inputs["q"].t(), inputs["scale"].t()


def launched(problem, inputs):
    kernel, config = default(problem, inputs)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    return outputs["sums"]


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


@both_layouts
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(
    ("m", "n", "data"),
    [(1, 1, "normal"), (31, 33, "gradient"), (257, 130, "heavy"), (2100, 9, "gradient")],
)
def test_triton_is_within_the_rounding_of_its_sums(device, block, m, n, data, layout):
    problem = OP.Problem(m, n, block=block, layout=layout)
    check(problem, OP.inputs(problem, device, data=data))


def test_every_config(device):
    problem = OP.Problem(700, 40, block=64)
    inputs = OP.inputs(problem, device, data="outlier")
    for tiles in [(512, 1, 1), (512, 32, 8), (1024, 8, 4), (2048, 2, 16), (128, 4, 1), (64, 16, 2)]:
        check(problem, inputs, KERNELS["qt"].Config(*tiles))


def test_every_config_of_strips(device):
    problem = OP.Problem(700, 208, block=64, layout="q")
    inputs = OP.inputs(problem, device, data="outlier")
    for tiles in [(64, 1, 64, 1), (64, 32, 4, 4), (128, 8, 32, 2), (512, 1, 16, 1), (256, 2, 1, 8)]:
        check(problem, inputs, KERNELS["q"].Config(*tiles))


def test_more_strips_than_are_added_up_at_once(device):
    """The last program adds 8 of the 9 strips' sums, and then one."""
    problem = OP.Problem(260, 300, layout="q")
    check(problem, OP.inputs(problem, device, data="heavy"), KERNELS["q"].Config(256, 1, 32, 1))


@both_layouts
@pytest.mark.parametrize("offset", [0, 1])
def test_row_strided_views(device, offset, layout):
    problem = OP.Problem(96, 45, layout=layout)
    if layout == "qt":
        inputs = OP.inputs(OP.Problem(160, 45), device)
        inputs["qt"] = inputs["qt"][:, offset : offset + 96]
        inputs["scale_t"] = inputs["scale_t"][:, :3]
    else:
        inputs = OP.inputs(OP.Problem(96, 160, layout="q"), device)
        inputs["q"] = inputs["q"][:, offset : offset + 45]
        inputs["scale"] = inputs["scale"][:, :2]
    check(problem, inputs)


@both_layouts
def test_extreme_codes_and_scales(device, layout):
    """All of 127 or -127, in blocks of the smallest scale, of 0 and of 2^100."""
    problem = OP.Problem(200, 64, layout=layout)
    inputs = OP.inputs(problem, device)
    qt, scale_t = transposed(inputs)
    qt[:32] = 127
    qt[32:] = -127
    values = [2.0**-107, 0.0, 2.0**100, 1.0, 1e-6, 3.0, 7e-3]
    scale_t[:] = torch.tensor(values, device=device)
    check(problem, inputs)


@both_layouts
def test_a_bad_block_shows_in_its_columns_alone(device, layout):
    problem = OP.Problem(100, 100, layout=layout)
    inputs = OP.inputs(problem, device)
    qt, scale_t = transposed(inputs)
    scale_t[1, 2] = math.nan
    qt[32:64, 64:96] = 0
    check(problem, inputs)
    bad = launched(problem, inputs).isnan().nonzero().flatten().tolist()
    assert bad == list(range(32, 64))


@both_layouts
def test_repeats_bit_for_bit(device, layout):
    problem = OP.Problem(1000, 40, layout=layout)
    inputs = OP.inputs(problem, device, data="heavy")
    assert torch.equal(launched(problem, inputs), launched(problem, inputs))


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
        kernel = KERNELS["qt"]
        assert reason in kernel.legal(problem, kernel.Config(*config), h200)
    strips, q = KERNELS["q"], OP.Problem(64, 64, block=64, layout="q")
    for config, reason in (
        ((96, 8, 32, 4), "tile_n=96"),
        ((32, 8, 32, 4), "tile_n=32"),
        ((256, 3, 32, 4), "blocks=3"),
        ((256, 8, 24, 4), "rows=24"),
        ((256, 8, 128, 4), "rows=128"),
        ((256, 8, 32, 3), "warps=3"),
        ((256, 16, 32, 4), "32 columns per thread"),
    ):
        assert reason in strips.legal(q, strips.Config(*config), h200)


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_each_layout_has_a_kernel_of_its_own():
    h200 = target_device((9, 0))
    for layout, other in (("qt", "q"), ("q", "qt")):
        problem = OP.Problem(8192, 4096, layout=layout)
        assert choose(OP, problem, h200)[0] is KERNELS[layout]
        kernel = KERNELS[other]
        reason = kernel.legal(problem, kernel.default(problem, h200), h200)
        assert reason == f"layout={layout}: expected {other}"


def test_the_transpose_s_text_is_as_before_there_was_another_layout():
    assert str(OP.Problem(45, 100)) == "m=45 n=100 block=32"
    assert str(OP.Problem(45, 100, layout="q")) == "m=45 n=100 block=32 layout=q"


@both_layouts
def test_the_peer_is_the_sum_of_the_bf16_gradient(layout):
    problem = OP.Problem(45, 100, layout=layout)
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
    with pytest.raises(UsageError, match="x lacks q or scale: expected both"):
        int8.int8_column_sum(Quantized(None, None, x.qt, None, 64))


def test_the_function_takes_codes_without_a_transpose(device):
    q, scale = quantize(torch.randn(70, 136, device=device), 64)
    x = Quantized(q, scale, block=64)
    sums = int8.int8_column_sum(x)
    assert (sums.dtype, sums.shape) == (torch.float32, (136,))
    expected = dequantize(q, scale, 64, torch.float64).sum(0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(torch.ops.jetfire.column_sum.q, (q, scale, 64))
    compiled = torch.compile(int8.int8_column_sum, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sums)
    with pytest.raises(UsageError, match=r"x's scale has shape \(3, 2\): expected \(2, 3\)"):
        int8.int8_column_sum(x._replace(scale=scale.t().contiguous()))


@both_layouts
@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size, block, layout):
    for m, n in [(size, 100), (100, size)]:
        problem = OP.Problem(m, n, block=block, layout=layout)
        check(problem, OP.inputs(problem, device))


@both_layouts
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, layout):
    m, n = 65537, 32769
    problem, transpose = OP.Problem(m, n, layout=layout), layout == "qt"
    shape, blocks = ((n, m), (1025, 2049)) if transpose else ((m, n), (2049, 1025))
    codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    names = ("qt", "scale_t") if transpose else ("q", "scale")
    inputs = dict(zip(names, (codes, torch.rand(blocks, device=device)), strict=True))
    sums, (qt, scale_t) = launched(problem, inputs), transposed(inputs)
    for top in (0, 16384, 32736, 32768):
        part = {"qt": qt[top : top + 32], "scale_t": scale_t[top // 32 : top // 32 + 1]}
        some = OP.Problem(m, len(part["qt"]))
        found = {"sums": sums[top : top + 32]}
        result = OP.check(some, found, OP.reference(some, part))
        assert result.ok, result.message
