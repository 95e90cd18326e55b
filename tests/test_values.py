"""Values where arithmetic ends, through every kernel that runs here; and the checks' own limits.

Zeros, ties, subnormal numbers, overflow, NaN and ±Inf. What accepts them must find what is wrong.
"""

import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import verify
from jetfire.kernels_cpu.common import integers
from jetfire.measure.check import bounded, codes
from jetfire.measure.data import DISTRIBUTIONS, TYPICAL
from jetfire.reference.quantize import quantize, scales, spread

CPU = torch.device("cpu")
SHAPES = [(1, 2, 1), (33, 66, 65), (70, 40, 130), (2, 130, 33)]
PRODUCTS = ("largest/normal", "subnormal/largest", "normal/nonfinite")
# Fields that take other paths, dealt out over the shapes.
FIELDS = {
    "adamw": [{}, {"guarded": True}, {"guarded": True, "layout": "none"}],
    "adamw8": [{}, {"guarded": True, "layout": "none"}, {"dtype": "bf16"}],
    "add": [{"mode": "fwd"}, {"mode": "bwd", "rounding": "stochastic", "layout": "both"}],
    "bit_split": [{}, {"bits": 4, "dtype": "fp16"}],
    "bit_split_codes": [{}, {"bits": 4}, {"sums": True}],
    "cross_entropy": [{"mode": "fwd"}, {"mode": "bwd", "dtype": "fp16"}],
    "dequantize": [{"out": "bf16"}, {"out": "fp16"}],
    "gather_rows": [{}, {"rows": 50, "repeat": True}],
    "gelu": [
        {"mode": "fwd"},
        {"mode": "bwd", "layout": "both"},
        {"mode": "bwd", "approximate": "erf", "rounding": "stochastic"},
    ],
    "gemm": [{"out": "fp32"}, {"out": "int8", "bias": True}, {"out": "fp16", "accumulate": True}],
    "hadamard_gemm": [{"mode": "fwd", "group": 1}, {"mode": "bwd", "group": 2}],
    "hadamard_quantize": [
        {"mode": "fwd", "group": 2, "dtype": "fp16"},
        {"mode": "bwd", "group": 2, "given": "x", "dtype": "fp32"},
        {"mode": "bwd", "group": 2, "given": "wide", "dtype": "fp32"},
        {"mode": "bwd", "group": 2, "out": "int8", "rounding": "stochastic"},
    ],
    "hadamard_quantize_codes": [{"group": 2}],
    "hadamard_restore": [{"group": 2}],
    "int4_gemm": [{}, {"product": "dgrad", "operands": "wide"}],
    "layernorm": [
        {"mode": "fwd"},
        {"mode": "bwd", "layout": "both"},
        {"stats": "given"},
        {"mode": "bwd", "residual": True},
    ],
    "rmsnorm": [{"mode": "fwd"}, {"mode": "bwd"}, {"mode": "bwd", "residual": True}],
    "quantize": [{"dtype": "fp32"}, {"rounding": "stochastic", "layout": "both"}],
    "rope": [{"head": 2}, {"head": 2, "inverse": True, "dtype": "fp32"}],
    "sample_rows": [{}, {"product": "wgrad"}, {"product": "both"}],
}


def problems(op):
    """One of each shape and each of the op's fields, blocks in turn."""
    for i, (m, n, k) in enumerate(SHAPES):
        for fields in FIELDS.get(op.name, [{}]):
            known = op.Problem.__dataclass_fields__
            sizes = {"m": m} | ({"n": n} if "n" in op.dims else {})
            if "k" in op.dims:
                sizes["k"] = k + k % 2 if "4" in op.name or "hadamard" in op.name else k
            block = {"block": (32, 64, 128)[i % 3]} if "block" in known else {}
            yield op.Problem.parse({**sizes, **block, **fields})


def names_of(op):
    """The distributions that other tests have not."""
    found = [name for name in DISTRIBUTIONS if name not in TYPICAL]
    if op.name == "hadamard_gemm":  # of other ops' steps
        return ["largest", "nonfinite"]
    return [*found, *(PRODUCTS if "k" in op.dims else ())]


def right(op, kernel, problem, data, device=CPU):
    inputs = op.inputs(problem, device, seed=len(data), data=data)
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    config = kernel.default(problem, Device.of(torch.empty(0, device=device)))
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, f"{kernel.name} {problem} {data}: {result.message}"
    assert math.isfinite(result.rel_err)
    for name, tensor in kept.items():
        torch.testing.assert_close(inputs[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", registry.names())
def test_on_the_cpu(name):
    op = registry.get(name)
    for kernel in registry.kernels(name).values():
        for problem in problems(op):
            if kernel.legal(
                problem, kernel.default(problem, Device(kind="cpu")), Device(kind="cpu")
            ):
                continue
            for data in names_of(op):
                right(op, kernel, problem, data)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy says so too
@pytest.mark.parametrize(
    "name", [name for name in registry.names() if "triton" in registry.kernels(name)]
)
def test_in_triton(device, name):
    op, kernel = registry.get(name), registry.get_kernel(name, "triton")
    found = list(problems(op))
    count = len(FIELDS.get(name, [{}]))
    for problem in found[count : 2 * count]:
        if getattr(problem, "sums", False):  # which Triton's kernel does not write
            continue
        for data in ("subnormal", "largest", "nonfinite"):
            right(op, kernel, problem, data, device)


def test_integer_products_of_any_depth():
    for m, n in ((1, 1), (1, 2), (2, 1), (3, 5), (33, 17)):
        for k in (0, 1, 2, 3, 31):
            a, b = (torch.randint(-128, 128, (size, k), dtype=torch.int8) for size in (m, n))
            assert torch.equal(integers(a, b).long(), a.long() @ b.long().t())


def test_a_product_s_small_elements_are_not_hidden_by_large_ones():
    """A row of C whose first element is a million times the others."""
    op = registry.get("gemm")
    problem = op.Problem(64, 96, 64, out="bf16")
    inputs = op.inputs(problem, CPU)
    inputs["b_scale"][0] *= 1e6
    expected = op.reference(problem, inputs)
    c = expected["c"].to(torch.bfloat16)
    assert op.check(problem, {"c": c}, expected).ok
    c[5, 90] *= 1.02
    assert not op.check(problem, {"c": c}, expected).ok


def test_overflow_may_show_where_sums_can_reach_it_and_nowhere_else():
    op = registry.get("gemm")
    problem = op.Problem(64, 64, 64, out="fp32")
    inputs = op.inputs(problem, CPU)
    inputs["a_scale"][0] = 2.0**100
    inputs["b_scale"][0] = 2.0**20
    expected = op.reference(problem, inputs)
    c = expected["c"].float()
    assert op.check(problem, {"c": c}, expected).ok
    for at, value, ok in (
        ((3, 4), math.nan, True),
        ((3, 4), -math.inf, True),
        ((3, 40), math.nan, False),
        ((40, 3), math.inf, False),
        ((3, 4), 1e30, False),
    ):
        other = c.clone()
        other[at] = value
        assert op.check(problem, {"c": other}, expected).ok == ok, (at, value)


def test_what_a_dtype_has_no_room_for_is_infinite():
    expected = torch.tensor([1e6, -1e6, 65519.0, 65521.0, math.nan], dtype=torch.float64)
    right = torch.tensor([math.inf, -math.inf, 65504.0, math.inf, math.nan], dtype=torch.float16)
    bound = torch.full((5,), 16.0, dtype=torch.float64)
    assert bounded("x", right, expected, bound).ok
    for i, value in enumerate((65504.0, math.inf, -math.inf, 0.0, math.inf)):
        wrong = right.clone()
        wrong[i] = value
        assert not bounded("x", wrong, expected, bound).ok, i
    over = torch.tensor([False, False, True, False, False])
    assert bounded("x", torch.where(over, math.nan, right), expected, bound, over).ok


@pytest.mark.parametrize("limit", [2.0**-100, torch.finfo(torch.float32).max])
def test_a_block_at_a_limit_may_fall_either_way_but_not_beyond(limit):
    value = torch.zeros(32, 64, dtype=torch.float64)
    value[0, 0], value[0, 32] = limit, limit * (1e-3 if limit > 1 else 1e3)
    q, scale = quantize(value, 32)
    expected = scales(value.float(), 32)[0]
    assert codes("q", q, scale, value, expected, 32).ok
    fallen = torch.where(torch.tensor([[True, False]]), math.nan if limit > 1 else 0.0, scale)
    none = q.clone()
    none[0, 0] = 0
    assert codes("q", none, fallen, value, expected, 32).ok
    assert not codes("q", none, fallen.flip(1), value, expected, 32).ok


ZEROS = [
    ("gemm", {"k": 40, "out": "int8", "layout": "both"}),
    ("gelu", {"mode": "fwd"}),
    ("gelu", {"mode": "bwd", "layout": "qt", "rounding": "stochastic"}),
    ("layernorm", {"mode": "bwd"}),
    ("quantize", {}),
]


@pytest.mark.parametrize("data", ["zeros", "normal"])
@pytest.mark.parametrize(("name", "fields"), ZEROS)
def test_blocks_without_a_scale_have_codes_of_zero(name, fields, data):
    """Whatever the noise, where a kernel's own scale is 0 or NaN."""
    op, kernel = (
        registry.get(name),
        registry.get_kernel(name, "int_mm" if name == "gemm" else "torch"),
    )
    problem = op.Problem(40, 70, **fields)
    inputs = op.inputs(problem, CPU, data=data)
    if data == "normal":
        scale = next(inputs[x] for x in ("a_scale", "dy_scale", "x_scale", "x") if x in inputs)
        scale[-1] = math.nan
    outputs = op.outputs(problem, inputs)
    kernel.launch(problem, kernel.Config(), inputs, outputs)
    expected = op.reference(problem, inputs)
    assert op.check(problem, outputs, expected).ok
    for q, turned in (("q", "qt"), ("qt", "q")):
        if q not in outputs:
            continue
        for code in (55, -1):
            wrong = {**outputs, q: outputs[q].clone()}
            wrong[q][-1, -1] = code
            if turned in outputs:
                wrong[turned] = wrong[q].t().contiguous()
            said = op.check(problem, wrong, expected).message
            assert "first at (39, 69): " in said


def test_sums_that_cancel_may_have_a_scale_within_their_noise():
    """Every sum is 0, and in fp32 perhaps what its terms' rounding leaves."""
    op = registry.get("gemm")
    problem = op.Problem(40, 70, 64, out="int8")
    inputs = op.inputs(problem, CPU)
    for x in ("a", "a_scale", "b", "b_scale"):  # the second block of K is the first, negative
        half = inputs[x].shape[1] // 2
        inputs[x][:, half:] = inputs[x][:, :half] * (-1 if x == "b" else 1)
    for x in ("a_scale", "b_scale"):  # powers of two, so that the reference's sums are exact
        inputs[x] = torch.ldexp(torch.ones_like(inputs[x]), inputs[x].frexp().exponent)
    expected = op.reference(problem, inputs)
    assert not expected["c"].any()
    noise = spread(expected["evaluation"], 32, 40, 70)
    assert bool((noise > 0).all())
    draws = 2 * torch.rand(40, 70, generator=torch.Generator().manual_seed(0)) - 1
    for size, ok in ((0.0, True), (0.9, True), (1.5, False)):
        outputs = dict(zip(("q", "scale"), quantize(size * noise * draws, 32), strict=True))
        assert op.check(problem, outputs, expected).ok == ok, size
    q, scale = quantize(0.9 * noise * draws, 32)
    assert not op.check(problem, {"q": q, "scale": torch.zeros_like(scale)}, expected).ok
    q[3, 4] = -128
    assert not op.check(problem, {"q": q, "scale": scale}, expected).ok


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_products_are_rounded_to_nearest(out):
    """At any size: powers of two, just below them, and subnormal numbers."""
    op = registry.get("gemm")
    problem = op.Problem(64, 96, 32, out=out)
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[out])
    kind = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(64, 96, generator=generator, dtype=torch.float64)
    c[:20] *= kind.smallest_normal * torch.logspace(-2, 2, 20, 2, dtype=torch.float64)[:, None]
    c[20:40] = c[20:40].sign() * torch.logspace(-9, 10, 20, 2, dtype=torch.float64)[:, None]
    c[30:40] *= 1 - kind.eps * torch.rand(10, 96, generator=generator)  # and the binade below
    c = c.float().double()
    none = torch.zeros(2, 3, dtype=torch.float64)
    give = spread(none + 2.0**-30, 32, 64, 96)
    names = ("systematic", "total", "largest")
    expected = {
        "c": c,
        **dict.fromkeys(names, none),
        "evaluation": none + 2.0**-30,
        "over": none > 0,
    }
    for sign in (-1, 0, 1):
        evaluated = (c + sign * give).float()
        evaluated = torch.where((evaluated - c).abs() <= give, evaluated, c.float())
        assert op.check(problem, {"c": evaluated.to(dtype)}, expected).ok
    large = kind.eps * c.abs() > 2.0**-24  # of which the rounding is more than the evaluation's
    zero = torch.zeros((), dtype=dtype)
    down = torch.where(
        c.to(dtype).double().abs() > c.abs(), c.to(dtype).nextafter(zero), c.to(dtype)
    )
    off = (down != c.to(dtype)) & large
    assert int(off.sum()) > 1000
    for at in off.nonzero()[::97].tolist():
        wrong = c.to(dtype)
        wrong[tuple(at)] = down[tuple(at)]
        assert not op.check(problem, {"c": wrong}, expected).ok, at


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_a_whole_product_rounded_toward_zero_is_seen(out):
    """By its norm, where what its terms may be off by hides it in each element."""
    op = registry.get("gemm")
    problem = op.Problem(96, 96, 32, out=out)
    inputs = op.inputs(problem, CPU)
    expected = op.reference(problem, inputs)
    expected["evaluation"] = expected["evaluation"] * 0 + 1.0
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[out])
    nearest = expected["c"].to(dtype)
    toward = torch.where(
        nearest.double().abs() > expected["c"].abs(),
        nearest.nextafter(torch.zeros((), dtype=dtype)),
        nearest,
    )
    assert op.check(problem, {"c": nearest}, expected).ok
    assert "relative error" in op.check(problem, {"c": toward}, expected).message


def test_a_row_s_statistics_are_held_each_to_its_own():
    """The rstd of a quiet row beside loud ones, which a norm over all rows would not see."""
    op = registry.get("layernorm")
    problem = op.Problem(64, 96, mode="fwd")
    inputs = op.inputs(problem, CPU)
    inputs["x_scale"][1] *= 1e4
    outputs, kernel = op.outputs(problem, inputs), registry.get_kernel("layernorm", "torch")
    kernel.launch(problem, kernel.Config(), inputs, outputs)
    expected = op.reference(problem, inputs)
    assert op.check(problem, outputs, expected).ok
    outputs["rstd"][40] *= 1.0001
    assert "rstd" in op.check(problem, outputs, expected).message
