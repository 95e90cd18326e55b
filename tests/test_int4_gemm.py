"""int4_gemm: the reference against integers, the kernels against the reference to the bit."""

import dataclasses
import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import MOST_K, capacity
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import LAYERS, MODELS
from jetfire.measure import peers
from jetfire.measure.data import TYPICAL
from jetfire.ops.int4_gemm import sampled
from jetfire.reference import int4_gemm as reference
from jetfire.reference.nibbles import narrow, pack, unpack, widen
from jetfire.reference.quantize import quantize

OP = registry.get("int4_gemm")
KERNELS = ("int_mm", "mma", "wgmma")
OUTPUTS = ("bf16", "fp16", "fp32")
# Operands and products that there are.
KINDS = (
    ("packed", "fwd"),
    ("wide", "fwd"),
    ("packed", "dgrad"),
    ("wide", "dgrad"),
    ("wide", "wgrad"),
)
# One element; ragged edges, of rows of any number of bytes; whole tiles; K beyond a wgrad's counts.
SHAPES = ((1, 1, 2), (17, 9, 10), (97, 33, 334), (130, 75, 1286), (128, 128, 256), (259, 144, 1300))
CPU = torch.device("cpu")


def case(name, problem, device):
    """A kernel's default config, or skip where the kernel does not take the problem."""
    kernel, found = registry.get_kernel("int4_gemm", name), Device.parse(str(device))
    config = kernel.default(problem, found)
    if (reason := kernel.legal(problem, config, found)) is not None:
        pytest.skip(reason)
    return kernel, config


def check(name, problem, inputs):
    kernel, config = case(name, problem, inputs["a"].device)
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"
    assert result.rel_err == 0.0


def run(name, problem, inputs):
    kernel, config = case(name, problem, inputs["a"].device)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    return outputs["c"]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("operands", ["packed", "wide"])
def test_codes_are_those_of_the_fp32_product(device, name, block, operands):
    """Not rounded to BF16 between: to the bit, of NaN and infinite blocks too."""
    fields = {"operands": operands, "out": "int8", "out_block": block}
    for i, (shape, data) in enumerate(itertools.product(SHAPES, (*TYPICAL, "nonfinite"))):
        problem = OP.Problem(*shape, **fields, bias=i % 2 == 0)
        inputs = OP.inputs(problem, device, seed=i, data=data)
        if problem.bias and data == "nonfinite":
            inputs["a_scale"].fill_(0.5)
            inputs["b_scale"].fill_(2.0**-9)
            inputs["bias"][-1] = (math.inf, math.nan)[i % 2]
        check(name, problem, inputs)


def test_the_reference_of_codes_is_the_quantisers():
    problem = OP.Problem(70, 130, 64, operands="wide", out="int8", out_block=64, bias=True)
    inputs = OP.inputs(problem, CPU)
    c = OP.reference(dataclasses.replace(problem, out="fp32", out_block=32), inputs)["c"]
    q, scale = quantize(c, 64)
    expected = OP.reference(problem, inputs)
    assert torch.equal(expected["q"], q)
    assert torch.equal(expected["scale"], scale)
    wrong = {"q": q.clone(), "scale": scale}
    wrong["q"][69, 129] += 1
    assert not OP.check(problem, wrong, expected).ok


def test_a_block_of_codes_counts_only_where_codes_are_written():
    """So what was saved before there was the field has the same text."""
    assert "out_block" not in OP.Problem(64, 64, 64).as_dict()
    codes = OP.Problem(64, 64, 64, out="int8", out_block=64)
    assert codes.as_dict()["out_block"] == 64
    assert OP.fitted({"m": 8, "out": "bf16", "out_block": 64}) == {"m": 8, "out": "bf16"}
    assert OP.bytes(codes) == 2 * 64 * 32 + 8 + 64 * 64 + 4


def test_nibbles_are_twos_complement_and_the_first_is_low():
    codes = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(codes, codes).flatten().view(2, 256)
    assert torch.equal(widen(codes).int(), 16 * codes.int())
    assert torch.equal(narrow(widen(codes)), codes)
    packed = pack(pairs)
    assert (packed.dtype, packed.shape) == (torch.int8, (2, 128))
    assert torch.equal(unpack(packed), pairs)
    for byte, (low, high) in zip(
        packed.flatten().tolist(), pairs.view(-1, 2).tolist(), strict=True
    ):
        assert byte % 256 == low % 16 + 16 * (high % 16)


def test_reference_sums_are_those_of_python_integers():
    """Sums that fp32 cannot hold are rounded once, then scaled in fp32."""
    k = 1 << 20
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 8, (2, k), dtype=torch.int8, generator=generator)
    a[1] = -8
    b = torch.randint(-8, 8, (3, k), dtype=torch.int8, generator=generator)
    b[1], b[2] = -8, -8
    b[2, 0] = -7  # odd beyond 2^24
    sums = [[sum(x * y for x, y in zip(r, s, strict=True)) for s in b.tolist()] for r in a.tolist()]
    assert reference.product(a, b).tolist() == sums
    assert sums[1][2] == 2**26 - 8
    scale, other = torch.tensor([0.37]), torch.tensor([1.9e-3])
    factor = scale * other
    expected = torch.tensor(sums, dtype=torch.int64).float() * factor
    assert torch.equal(reference.forward(a, scale, b, other), expected)


def test_reference_weighs_rows_and_parts():
    codes = torch.Generator().manual_seed(0)
    a = torch.randint(-7, 8, (6, 256), dtype=torch.int8, generator=codes)
    b = torch.randint(-8, 8, (5, 256), dtype=torch.int8, generator=codes)
    one, half = torch.ones(1), torch.tensor([0.5])
    exact = a.double() @ b.double().t()
    weight = torch.tensor([14.0, 28.0, 1.0, 2.0, math.nan, math.nan])
    counts = torch.tensor([2, 4], dtype=torch.int32)
    rows = reference.dgrad(a, one, b, half, weight, counts)
    assert torch.equal(rows.double(), 0.5 * weight[:4, None].double() * exact[:4])
    parts = torch.tensor([128, 256], dtype=torch.int32)
    high, low = (a[:, p].double() @ b[:, p].double().t() for p in (slice(128), slice(128, 256)))
    assert torch.equal(reference.wgrad(a, one, b, half, parts).double(), 0.5 * (14 * high + low))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("operands", "product"), KINDS)
def test_kernels_equal_the_reference(device, name, operands, product):
    for i, (shape, data) in enumerate(itertools.product(SHAPES, (*TYPICAL, "nonfinite"))):
        bias = product == "fwd" and i % 2 == 0
        problem = OP.Problem(
            *shape, operands=operands, product=product, out=OUTPUTS[i % 3], bias=bias
        )
        check(name, problem, OP.inputs(problem, device, seed=i, data=data))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "counts",
    [(0, 0), (0, 128), (128, 128), (256, 384), (128, 640), (0, 1280), (1280, 1280)],
    ids=str,
)
def test_a_weights_gradient_reads_nothing_beyond_its_counts(device, name, counts):
    """Bytes there are random; where nothing is counted the sums are zeros."""
    problem = OP.Problem(70, 50, 1290, operands="wide", product="wgrad", out="fp32")
    inputs = OP.inputs(problem, device)
    inputs["counts"] = torch.tensor(counts, dtype=torch.int32, device=device)
    inputs["a"].clamp_(-112, 112)
    inputs["b"].clamp_(-8, 7)
    end = counts[1]
    inputs["a"][:, end:], inputs["b"][:, end:] = -128, 127
    check(name, problem, inputs)
    if end == 0:
        assert run(name, problem, inputs).count_nonzero() == 0


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [0, 1, 64, 127, 128, 129, 300])
def test_an_inputs_gradient_has_the_rows_that_are_counted(device, name, rows):
    problem = OP.Problem(300, 72, 130, operands="wide", product="dgrad")
    inputs = OP.inputs(problem, device)
    inputs["counts"][1] = rows
    inputs["weight"] = torch.rand(300, device=device) + 1
    inputs["weight"][rows:] = math.nan
    check(name, problem, inputs)
    assert not run(name, problem, inputs)[:rows].isnan().any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("product", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("fault", [math.nan, math.inf, 0.0])
def test_a_scales_fault_shows(device, name, product, fault):
    """NaN everywhere, even of sums over nothing; infinity where a sum is not zero."""
    problem = OP.Problem(40, 24, 256, operands="wide", product=product, out="fp32")
    inputs = OP.inputs(problem, device)
    inputs["a_scale"].fill_(fault)
    check(name, problem, inputs)
    rows = 40 if product != "dgrad" else sampled(problem)[1]
    if fault == 0.0:
        assert run(name, problem, inputs)[:rows].count_nonzero() == 0
    else:
        assert not run(name, problem, inputs)[:rows].isfinite().any()
    if product == "wgrad" and fault != 0.0:
        inputs["counts"].zero_()
        assert run(name, problem, inputs).isnan().all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("operands", ["packed", "wide"])
def test_extreme_sums_are_exact(device, name, operands):
    """Of -8·-8 and of -8·7 alone, of the largest K; in fp16 they overflow to infinity."""
    k = MOST_K["fwd"] // 2 * 2
    for out in ("fp32", "fp16"):
        problem = OP.Problem(20, 16, k, operands=operands, out=out)
        inputs = OP.inputs(OP.Problem(20, 16, 2, operands=operands, out=out), device)
        b = torch.full((16, k), -8, dtype=torch.int8, device=device)
        b[8:] = 7
        b[0, 0], b[9, 1] = -7, 6
        a = torch.full((20, k), -8, dtype=torch.int8, device=device)
        stored = widen if operands == "wide" else pack
        inputs["a"], inputs["b"] = stored(a), stored(b)
        inputs["a_scale"].fill_(0.7)
        inputs["b_scale"].fill_(0.3)
        check(name, problem, inputs)


@pytest.mark.parametrize("name", KERNELS)
def test_the_largest_weights_gradient_is_exact(device, name):
    """Codes of 7 repeated 16 times on -8, all high, as deep as 32 bits hold."""
    k = MOST_K["wgrad"] // 128 * 128
    problem = OP.Problem(17, 8, k, operands="wide", product="wgrad", out="fp32")
    inputs = OP.inputs(OP.Problem(17, 8, 128, operands="wide", product="wgrad", out="fp32"), device)
    inputs["a"] = torch.full((17, k), 112, dtype=torch.int8, device=device)
    inputs["b"] = torch.full((8, k), -8, dtype=torch.int8, device=device)
    inputs["a"][3] = -112
    inputs["counts"].fill_(k)
    check(name, problem, inputs)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("operands", "product"), KINDS)
@pytest.mark.parametrize("before", [0, 3, 4, 8, 16])
def test_row_strided_views(device, name, operands, product, before):
    """What lies around the rows is no zero, so that a byte too many shows."""
    problem = OP.Problem(65, 40, 270, operands=operands, product=product, out="fp32")
    inputs = OP.inputs(problem, device)
    for operand in ("a", "b"):
        wide = torch.nn.functional.pad(inputs[operand], (before, 48 - before), value=99)
        inputs[operand] = wide[:, before : before + problem.row_bytes]
    check(name, problem, inputs)


def test_the_check_is_to_the_bit_and_of_counted_rows_alone():
    problem = OP.Problem(100, 30, 64, operands="wide", product="dgrad", out="fp32")
    inputs = OP.inputs(problem, CPU)
    expected, rows = OP.reference(problem, inputs), sampled(problem)[1]
    assert rows == 88
    c = torch.full((100, 30), math.nan)
    c[:rows] = expected["c"]
    assert OP.check(problem, {"c": c}, expected).ok
    c[rows - 1, 29] = torch.nextafter(c[rows - 1, 29], torch.tensor(math.inf))
    wrong = OP.check(problem, {"c": c}, expected)
    assert not wrong.ok
    assert "(87, 29)" in wrong.message
    c[rows - 1, 29] = math.nan  # left unwritten
    assert not OP.check(problem, {"c": c}, expected).ok


@pytest.mark.parametrize("data", TYPICAL)
@pytest.mark.parametrize(("operands", "product"), KINDS)
def test_inputs_are_codes_with_what_the_counts_ask(operands, product, data):
    problem = OP.Problem(640, 64, 1302, operands=operands, product=product)
    inputs = OP.inputs(problem, CPU, data=data)
    again = OP.inputs(problem, CPU, data=data)
    assert all(torch.equal(inputs[name].nan_to_num(), again[name].nan_to_num()) for name in inputs)
    a, b = inputs["a"], inputs["b"]
    assert (a.shape, b.shape) == ((640, problem.row_bytes), (64, problem.row_bytes))
    if operands == "packed":
        a, b = unpack(a), unpack(b)
    elif problem.shifted:
        a, b = narrow(a), narrow(b)
    rows = depth = None
    if product == "fwd":
        assert "counts" not in inputs
    else:
        high, end = inputs["counts"].tolist()
        assert (high, end) == sampled(problem)
        assert 0 < high < end
        rows, depth = (end, None) if product == "dgrad" else (None, end)
    a, b = a[:rows, :depth], b[:, :depth]
    assert -8 <= b.min() < b.max() <= 7
    if product == "wgrad":
        assert 7 < a.max() <= 112
        assert a.min() >= -112
        assert high % 128 == end % 128 == 0
        assert inputs["a"][:, end:].unique().numel() > 200  # garbage
    else:
        assert -8 <= a.min() < a.max() <= 7
    if product == "dgrad":
        assert (inputs["weight"][:end] >= 1).all()
        assert inputs["weight"][:high].min() >= 14


def test_bytes_are_counted_without_memory():
    problem = OP.Problem(1024, 512, 2048, bias=True)
    assert OP.bytes(problem) == 1024 * 1024 + 512 * 1024 + 8 + 2048 + 1024 * 512 * 2
    dgrad = OP.Problem(1024, 512, 2048, operands="wide", product="dgrad", out="fp32")
    assert OP.bytes(dgrad) == 1536 * 2048 + 8 + 8 + 4 * 1024 + 1024 * 512 * 4
    assert OP.flops(problem) == OP.flops(dgrad) == 2 * 1024 * 512 * 2048
    ninth = OP.Problem(64, 64, 9 * 128, operands="wide", product="wgrad")
    assert OP.flops(ninth) == 2 * 64 * 64 * 8 * 128


def test_backward_is_dgrad_and_wgrad_of_the_rows_that_sampling_keeps():
    fields = {"m": 1000, "n": 300, "k": 200, "bias": True, "out": "fp16"}
    dgrad, wgrad = OP.problems("bwd", fields)
    rows, depth = (capacity(1000, 2, product, "half") for product in ("dgrad", "wgrad"))
    assert dgrad == OP.Problem(rows, 200, 300, operands="wide", product="dgrad", out="fp16")
    assert wgrad == OP.Problem(300, 200, depth, operands="wide", product="wgrad", out="fp16")
    assert OP.problems("bwd", {"m": 1000, "n": 300, "k": 200})[1].out == "fp32"
    assert OP.problems("fwd", fields) == [OP.Problem(**fields)]
    with pytest.raises(UsageError, match="mode=bwd product=dgrad"):
        OP.problems("bwd", {**fields, "bias": False, "product": "dgrad"})
    with pytest.raises(UsageError, match="no mode 'both'"):
        OP.problems("both", fields)


def test_shapes_are_those_of_the_linear_layers():
    found = OP.shapes(MODELS["gpt2-124m"])
    assert found[0] == {"m": 8192, "n": 2304, "k": 768}
    assert len(found) == 4
    (first, *_, last) = LAYERS["int4-paper"]
    assert OP.shapes(first) == [{"m": 4608, "n": 5120, "k": 6144}]
    assert OP.shapes(last) == [{"m": 15360, "n": 8704, "k": 10752}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"k": 5}, "k=5: expected an even number"),
        ({"k": 5, "operands": "wide"}, "k=5: expected an even number"),
        ({"bias": True, "product": "dgrad"}, "bias=true product=dgrad: expected product=fwd"),
        ({"product": "wgrad"}, "operands=packed product=wgrad: expected operands=wide"),
        ({"k": 2**17}, "k=131072: expected at most 131071"),
        ({"k": 171198, "operands": "wide", "product": "wgrad"}, "expected at most 171196"),
        ({"out": "int4"}, "out=int4 .*: expected one of bf16, fp16, fp32, int8"),
        ({"out": "int8", "product": "dgrad"}, "out=int8 product=dgrad: expected product=fwd"),
        ({"out": "int8", "out_block": 16}, "out_block=16: expected 32 or 64 or 128"),
        ({"out_block": 64}, "out_block=64 out=bf16: expected out=int8"),
    ],
)
def test_what_is_refused(fields, says):
    with pytest.raises(UsageError, match=says):
        OP.Problem.parse({"m": 4, "n": 4, "k": 4, **fields})


def test_peers_are_libraries_products_of_what_is_counted():
    assert next(iter(peers.int4_gemm(64, 64, 64, torch.device("cuda")))) == "cublas_fp16"
    problem = OP.Problem(16, 24, 9 * 128, operands="wide", product="wgrad")
    found = OP.peers(problem, OP.inputs(problem, CPU))
    assert found["fp32_matmul"]()().shape == (16, 24)
    dgrad = dataclasses.replace(problem, product="dgrad")
    assert OP.peers(dgrad, OP.inputs(dgrad, CPU))["bf16_matmul"]()().shape == (14, 24)


def test_the_cpu_kernel_is_of_the_cpu_alone():
    kernel = registry.get_kernel("int4_gemm", "int_mm")
    problem = OP.Problem(64, 64, 64)
    config = kernel.default(problem, Device.parse("cpu"))
    assert kernel.legal(problem, config, target_device((9, 0))) == "runs on the CPU only"
    assert kernel.cubins(problem, config, (9, 0)) is None
