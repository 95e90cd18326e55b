"""The CPU kernels of every op against the references, and that they are chosen on the CPU."""

from typing import get_args

import pytest
import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import choose, verify
from jetfire.core.problem import hints_of
from jetfire.kernels_cpu.common import integers

CPU = torch.device("cpu")
FIELDS = {
    "quantize": [
        {"dtype": d, "rounding": r} for d in ("bf16", "fp32") for r in ("nearest", "stochastic")
    ],
    "dequantize": [{"out": out} for out in ("bf16", "fp16", "fp32")],
    "transpose": [{}],
    "column_sum": [{}],
    "gelu": [
        {"mode": m, "approximate": a, "rounding": r}
        for m in ("fwd", "bwd")
        for a in ("tanh", "erf")
        for r in ("nearest", "stochastic")
    ],
    "layernorm": [
        {"mode": "fwd", "stats": "row"},
        {"mode": "fwd", "stats": "given", "rounding": "stochastic"},
        {"mode": "bwd", "rounding": "nearest"},
        {"mode": "bwd", "rounding": "stochastic"},
    ],
    "add": [{"mode": m, "rounding": r} for m in ("fwd", "bwd") for r in ("nearest", "stochastic")],
    "adamw": [{"guarded": guarded} for guarded in (False, True)],
    "adamw8": [{"guarded": g, "dtype": d} for g, d in ((False, "fp32"), (True, "bf16"))],
    "dropout": [{"mode": m, "p": p} for m in ("fwd", "bwd") for p in (0.0, 0.3)],
}
CASES = [
    pytest.param(name, fields, id=f"{name}-{'-'.join(str(v) for v in fields.values())}")
    for name, found in FIELDS.items()
    for fields in found
]


@pytest.mark.parametrize("k", [0, 1, 32, 2000])
def test_products_of_codes_are_torch_s(k):
    """Of all codes, -128 too; torch's own INT8 product takes no K of 0, and errs for 1."""
    a, b = torch.randint(-128, 128, (2, 37, k), dtype=torch.int8)
    a[0], b[0] = -128, -128
    expected = torch._int_mm(a, b.t().contiguous()) if k > 1 else a.int() @ b.int().t()
    assert torch.equal(integers(a, b), expected)


def test_a_product_has_the_same_bits_under_autocast():
    a, b = (ops.int8_quantize(torch.randn(size, 300), block=32) for size in (70, 40))
    expected = ops.int8_gemm(a, b, out="fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.int8_gemm(a, b, out="fp32"), expected)


def layouts(op):
    """The op's layouts, as problem fields, without codes last; it may have none."""
    known = get_args(hints_of(op.Problem).get("layout"))
    return [{"layout": layout} for layout in reversed(known)] or [{}]


def check(op, problem, data):
    inputs = op.inputs(problem, CPU, data=data)
    kernel = registry.get_kernel(op.name, "torch")
    config = kernel.default(problem, Device.of(torch.empty(0)))
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, f"{problem}: {result.message}"


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_matches_the_reference(name, fields):
    op = registry.get(name)
    for block, layout in zip((32, 64, 128), layouts(op) * 3, strict=False):
        check(op, op.Problem(70, 200, block=block, **fields, **layout), "heavy")


@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (33, 127)])
def test_ragged_shapes_and_every_layout(name, fields, m, n):
    op = registry.get(name)
    for layout in layouts(op):
        check(op, op.Problem(m, n, **fields, **layout), "outlier")


def test_gelu_at_extreme_scales():
    """Where fp32's cubic and square overflow, and where every value is in the negative tail."""
    from jetfire.reference.quantize import quantize

    op = registry.get("gelu")
    for magnitude in (1e-28, 3.0, 1e4, 1e13, 1e30):
        q, scale = quantize(-magnitude * (1 + torch.rand(32, 96)), 32)
        dy, dy_scale = quantize(torch.randn(32, 96), 32)
        q[:, 64:] *= -1
        for mode in ("fwd", "bwd"):
            problem = op.Problem(32, 96, mode=mode)
            kernel = registry.get_kernel("gelu", "torch")
            inputs = {"x": q, "x_scale": scale, "dy": dy, "dy_scale": dy_scale}
            result = verify(op, kernel, problem, kernel.Config(), inputs)
            assert result.ok, f"{mode} {magnitude}: {result.message}"


@pytest.mark.parametrize("name", FIELDS)
def test_chosen_on_the_cpu_and_only_there(name):
    op = registry.get(name)
    problem = op.Problem(32, 32)
    kernel, config = choose(op, problem, Device(kind="cpu"))
    assert kernel.name == "torch"
    assert kernel.legal(problem, config, target_device((9, 0))) == "runs on the CPU only"
