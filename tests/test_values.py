"""Values where arithmetic ends, through every kernel that runs here; and the checks' own limits.

Zeros, ties, subnormal numbers, overflow, NaN and ±Inf. What accepts them must find what is wrong.
"""

import math

import pytest
import torch

from jetfire import ops
from jetfire.kernels_cpu.common import integers
from jetfire.ops.check import bounded, codes
from jetfire.ops.data import DISTRIBUTIONS, TYPICAL
from jetfire.ops.device import Device
from jetfire.ops.run import verify
from jetfire.reference.quantize import quantize, scales

CPU = torch.device("cpu")
SHAPES = [(1, 2, 1), (33, 66, 65), (70, 40, 130), (2, 130, 33)]
PRODUCTS = ("largest/normal", "subnormal/largest", "normal/nonfinite")
# Fields that take other paths, dealt out over the shapes.
FIELDS = {
    "adamw": [{}, {"guarded": True}],
    "add": [{"mode": "fwd"}, {"mode": "bwd", "rounding": "stochastic", "layout": "both"}],
    "bit_split": [{}, {"bits": 4, "dtype": "fp16"}],
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
    ],
    "int4_gemm": [{}, {"product": "dgrad", "operands": "wide"}],
    "layernorm": [{"mode": "fwd"}, {"mode": "bwd", "layout": "both"}, {"stats": "given"}],
    "quantize": [{"dtype": "fp32"}, {"rounding": "stochastic", "layout": "both"}],
    "sample_rows": [{}, {"product": "wgrad"}],
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


@pytest.mark.parametrize("name", ops.names())
def test_on_the_cpu(name):
    op = ops.get(name)
    for kernel in ops.kernels(name).values():
        for problem in problems(op):
            if kernel.legal(
                problem, kernel.default(problem, Device(kind="cpu")), Device(kind="cpu")
            ):
                continue
            for data in names_of(op):
                right(op, kernel, problem, data)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy says so too
@pytest.mark.parametrize("name", [name for name in ops.names() if "triton" in ops.kernels(name)])
def test_in_triton(device, name):
    op, kernel = ops.get(name), ops.get_kernel(name, "triton")
    found = list(problems(op))
    count = len(FIELDS.get(name, [{}]))
    for problem in found[count : 2 * count]:
        for data in ("subnormal", "largest", "nonfinite"):
            right(op, kernel, problem, data, device)


def test_integer_products_of_any_depth():
    for m, n in ((1, 1), (1, 2), (2, 1), (3, 5), (33, 17)):
        for k in (0, 1, 2, 3, 31):
            a, b = (torch.randint(-128, 128, (size, k), dtype=torch.int8) for size in (m, n))
            assert torch.equal(integers(a, b).long(), a.long() @ b.long().t())


def test_a_product_s_small_elements_are_not_hidden_by_large_ones():
    """A row of C whose first element is a million times the others."""
    op = ops.get("gemm")
    problem = op.Problem(64, 96, 64, out="bf16")
    inputs = op.inputs(problem, CPU)
    inputs["b_scale"][0] *= 1e6
    expected = op.reference(problem, inputs)
    c = expected["c"].to(torch.bfloat16)
    assert op.check(problem, {"c": c}, expected).ok
    c[5, 90] *= 1.02
    assert not op.check(problem, {"c": c}, expected).ok


def test_overflow_may_show_where_sums_can_reach_it_and_nowhere_else():
    op = ops.get("gemm")
    problem = op.Problem(64, 64, 64, out="fp32")
    inputs = op.inputs(problem, CPU)
    inputs["a_scale"][0] = 2.0**100
    inputs["b_scale"][0] = 2.0**20
    expected = op.reference(problem, inputs)
    c = expected["c"].float()
    assert op.check(problem, {"c": c}, expected).ok
    for at, value, ok in (
        ((3, 4), math.nan, True), ((3, 4), -math.inf, True), ((3, 40), math.nan, False),
        ((40, 3), math.inf, False), ((3, 4), 1e30, False),
    ):  # fmt: skip
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


def test_a_row_s_statistics_are_held_each_to_its_own():
    """The rstd of a quiet row beside loud ones, which a norm over all rows would not see."""
    op = ops.get("layernorm")
    problem = op.Problem(64, 96, mode="fwd")
    inputs = op.inputs(problem, CPU)
    inputs["x_scale"][1] *= 1e4
    outputs, kernel = op.outputs(problem, inputs), ops.get_kernel("layernorm", "torch")
    kernel.launch(problem, kernel.Config(), inputs, outputs)
    expected = op.reference(problem, inputs)
    assert op.check(problem, outputs, expected).ok
    outputs["rstd"][40] *= 1.0001
    assert "rstd" in op.check(problem, outputs, expected).message
