"""gemm: the reference against exact arithmetic, the kernels against the reference."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.core.workloads import RAGGED
from jetfire.kernels_cuda.noise import telescoped_noise
from jetfire.measure.check import settled
from jetfire.measure.data import TYPICAL
from jetfire.ops import int8_gemm, int8_quantize
from jetfire.reference.dequantize import dequantize
from jetfire.reference.gemm import fma, gemm, gemm_float64, gemm_telescoped
from jetfire.reference.quantize import quantize, spread
from jetfire.reference.transpose import transpose

BLOCKS = (32, 64, 128)
OPTIONS = (
    {},
    {"out": "fp32", "bias": True, "accumulate": True},
    {"out": "fp32", "squares": True},
    {"out": "fp16", "accumulate": True},
    {"out": "int8", "layout": "q"},
    {"out": "int8", "layout": "qt", "bias": True},
    {"out": "int8", "layout": "both", "rounding": "stochastic", "bias": True},
)
# Of codes, for products in blocks of one side and codes in blocks of another.
CODES = (
    {"layout": "q"},
    {"layout": "qt", "rounding": "stochastic"},
    {"layout": "both", "rounding": "stochastic", "bias": True},
)
UNEQUAL = list(itertools.permutations(BLOCKS, 2))
KERNELS = ("gluon", "triton", "int_mm", "wgmma", "mma")
EXACT_KERNELS = ("gluon", "triton", "wgmma", "mma")


def exact_config(kernel, problem, device):
    """The default config, of the schedule that rounds as the reference does."""
    config = kernel.default(problem, device)
    plain = {"schedule": "exact", "stream": False}
    known = {name: value for name, value in plain.items() if hasattr(config, name)}
    return dataclasses.replace(config, **known)


def run(name, problem, inputs):
    """Check one kernel with its default config, or skip where it is not legal."""
    kernel, op = registry.get_kernel("gemm", name), registry.get("gemm")
    device = Device.of(inputs["a"])
    config = kernel.default(problem, device)
    if (reason := kernel.legal(problem, config, device)) is not None:
        pytest.skip(reason)
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, result.message


def launch(name, problem, inputs):
    kernel, op = registry.get_kernel("gemm", name), registry.get("gemm")
    device = Device.of(inputs["a"])
    config = exact_config(kernel, problem, device)
    if (reason := kernel.legal(problem, config, device)) is not None:
        pytest.skip(reason)
    outputs = op.poison(problem, op.outputs(problem, inputs))
    kernel.launch(problem, config, inputs, outputs)
    return outputs


def to_fp32(value: Fraction) -> float:
    """The fp32 nearest to a fraction, ties to even, from exact comparisons."""
    guess = np.float32(float(value))
    around = (
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    )
    finite = [x for x in around if np.isfinite(x)]
    return float(min(finite, key=lambda x: (abs(Fraction(float(x)) - value), x.view(np.int32) & 1)))


def test_fma_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(3000, generator=generator) for _ in range(3))
    c[:1000] = -(a * b)[:1000]  # all but the product's own rounding cancels
    c[1000:1500] *= 2.0**-30
    a[1500:2000] *= 2.0**-80
    b[1500:2000] *= 2.0**-60  # subnormal results
    c[1500:2000] *= 2.0**-140
    a[2000:], b[2000:] = 1 + 2.0**-12, 1 + 2.0**-12  # half a unit, but for the addend
    c[2000:] = c[2000:].sign() * 2.0 ** torch.randint(-60, -24, (1000,), generator=generator)
    exact = [
        to_fp32(Fraction(x) * Fraction(y) + Fraction(z))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert fma(a, b, c).tolist() == exact


def test_fma_passes_faults_on():
    inf, nan = float("inf"), float("nan")
    x = fma(torch.tensor([inf, nan, 0.0]), torch.tensor([1.0, 1.0, inf]), torch.tensor([1.0] * 3))
    assert x[0] == inf
    assert torch.isnan(x[1:]).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_reference_products_are_exact(block):
    op = registry.get("gemm")
    inputs = op.inputs(op.Problem(5, 4, 150, block=block), torch.device("cpu"), data="outlier")
    a, a_scale, b, b_scale = (inputs[name] for name in ("a", "a_scale", "b", "b_scale"))
    c, c64 = gemm(a, a_scale, b, b_scale, block), gemm_float64(a, a_scale, b, b_scale, block)
    for i in range(5):
        for j in range(4):
            exact, rounded = Fraction(0), 0.0
            for at in range(0, 150, block):
                part = slice(at, at + block)
                inner = sum(
                    x * y for x, y in zip(a[i, part].tolist(), b[j, part].tolist(), strict=True)
                )
                s_a, s_b = a_scale[0, at // block].item(), b_scale[0, at // block].item()
                exact += Fraction(s_a) * Fraction(s_b) * inner
                scale = to_fp32(Fraction(s_a) * Fraction(s_b))
                rounded = to_fp32(Fraction(scale) * inner + Fraction(rounded))
            assert c[i, j].item() == rounded
            assert c64[i, j].item() == pytest.approx(float(exact), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("block", BLOCKS)
def test_reference_is_the_product_of_what_the_codes_stand_for(block):
    op = registry.get("gemm")
    inputs = op.inputs(op.Problem(70, 90, 300, block=block), torch.device("cpu"), data="heavy")
    a, a_scale, b, b_scale = (inputs[name] for name in ("a", "a_scale", "b", "b_scale"))
    wide = (
        dequantize(a, a_scale, block, torch.float64),
        dequantize(b, b_scale, block, torch.float64),
    )
    expected = wide[0] @ wide[1].t()
    torch.testing.assert_close(gemm_float64(a, a_scale, b, b_scale, block), expected)
    difference = gemm(a, a_scale, b, b_scale, block).double() - expected
    assert difference.norm() <= 2e-7 * expected.norm()


def telescoped_in_fractions(a_scale, b_scale, inner, block, chains):
    """One element's telescoped sum, from its scales and its integer sums of each block."""
    largest = sum(math.frexp(max(scale))[1] - 1 for scale in (a_scale, b_scale))
    shift = max(22, min(124 - largest, 250))
    products = [to_fp32(Fraction(x) * Fraction(y)) for x, y in zip(a_scale, b_scale, strict=True)]
    grid = [round(Fraction(product) * 2**shift / 2**104) for product in products]
    value, added, window = 0.0, Fraction(0), chains * 512
    for b, scale in enumerate(grid):
        # A window's blocks, of which the last one of each chain is followed by nothing.
        first, end = b * block // window * (window // block), (b + 1) * block
        after = b + chains
        goes_on = after < len(grid) and after * block // window == b * block // window
        factor = (scale - (grid[after] if goes_on else 0)) * 2**104
        running = sum(inner[first + (b - first) % chains : b + 1 : chains])
        value = to_fp32(factor * Fraction(2**23 + running, 2**149) + Fraction(value))
        added += factor * Fraction(2**23, 2**149)
        if b == len(grid) - 1 or end % 1024 == 0:
            value, added = to_fp32(Fraction(value) - added), Fraction(0)
    return to_fp32(Fraction(value) * Fraction(2**149, 2**shift))


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("data", ["heavy", "gradient"])
def test_telescoped_sums_are_rounded_as_they_are_defined(block, data, chains):
    op = registry.get("gemm")
    k = 2700
    inputs = op.inputs(op.Problem(3, 2, k, block=block), torch.device("cpu"), data=data)
    a, a_scale, b, b_scale = (inputs[name] for name in ("a", "a_scale", "b", "b_scale"))
    c = gemm_telescoped(a, a_scale, b, b_scale, block, chains)
    scales = a_scale[0].tolist(), b_scale[0].tolist()
    for i in range(3):
        for j in range(2):
            terms = [x * y for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True)]
            inner = [sum(terms[at : at + block]) for at in range(0, k, block)]
            assert c[i, j].item() == telescoped_in_fractions(*scales, inner, block, chains)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("data", TYPICAL)
@pytest.mark.parametrize("k", [31, 500, 2100])
def test_telescoped_sums_err_within_their_bound(block, data, k, chains):
    op = registry.get("gemm")
    problem = op.Problem(100, 130, k, block=block, out="fp32")
    inputs = op.inputs(problem, torch.device("cpu"), data=data)
    operands = [inputs[name] for name in ("a", "a_scale", "b", "b_scale")]
    c, exact = gemm_telescoped(*operands, block, chains), gemm_float64(*operands, block)
    noise = telescoped_noise(inputs, block, chains=chains)
    error = (c.double() - exact).abs()
    used = (error / spread(noise, block, 100, 130)).nan_to_num(0.0)
    assert used.max() <= 1
    assert used.max() > 0.05  # a bound so loose would check nothing
    assert op.check(problem, {"c": c}, op.reference(problem, inputs), noise).ok
    if data == "normal":
        assert error.norm() <= 1e-3 * exact.norm()


def unbounded(down, across):
    """What `check` needs of a product without any error of its own, by block."""
    none = torch.zeros(down, across, dtype=torch.float64)
    names = ("evaluation", "systematic", "total", "largest")
    return {**dict.fromkeys(names, none), "over": none > 0}


def test_a_kernels_own_noise_widens_the_tolerance_and_no_more():
    op = registry.get("gemm")
    noise = torch.tensor([[0.5, 0.0], [0.0, 0.25]], dtype=torch.float64)
    exact = torch.randn(40, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = spread(noise, 32, 40, 50)
    problem = op.Problem(40, 50, 32, out="fp32")
    none = unbounded(2, 2)
    for factor, ok in ((0.99, True), (1.01, False)):
        assert op.check(problem, {"c": exact + factor * wide}, {"c": exact, **none}, noise).ok == ok
    assert not op.check(problem, {"c": exact + wide / 99}, {"c": exact, **none}).ok
    bad = exact.clone()
    bad[3, 3] = float("nan")
    assert not op.check(problem, {"c": bad}, {"c": exact, **none}, noise).ok
    zero = torch.zeros_like(exact)
    assert op.check(problem, {"c": 0.99 * wide}, {"c": zero, **none}, noise).ok
    assert not op.check(problem, {"c": bad * 0}, {"c": zero, **none}, noise).ok


@pytest.mark.parametrize(("seed", "data"), [(2, "alternating"), (10, "constant")])
@pytest.mark.parametrize("m", [1, 40])
def test_equal_terms_are_rounded_alike(seed, data, m):
    """A right kernel's sums of 1437 blocks, which are off by more than as many random roundings."""
    op, kernel = registry.get("gemm"), registry.get_kernel("gemm", "int_mm")
    problem = op.Problem(m, m, 45962, out="fp32")
    inputs = op.inputs(problem, torch.device("cpu"), seed, data)
    config = kernel.default(problem, Device.parse("cpu"))
    result = verify(op, kernel, problem, config, inputs)
    assert result.rel_err > 1e-5
    assert result.ok, result.message


def test_a_sum_that_may_have_either_sign_may_overflow_to_either():
    """fp16 has no room for what terms of 1e33 leave when they cancel, give or take 1e31."""
    expected = torch.tensor([-1e29, -1e29, -1e29, -1e33, 70000.0], dtype=torch.float64)
    out = torch.tensor([torch.inf, -torch.inf, 0.0, torch.inf, -torch.inf], dtype=torch.float16)
    give = torch.tensor([1e31, 1e31, 1e31, 1e31, 1.0], dtype=torch.float64)
    assert settled(out, expected, give).tolist() == [True, True, False, False, False]


def test_noise_widens_codes_and_scales():
    op = registry.get("gemm")
    problem = op.Problem(64, 64, 32, out="int8")
    value = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = {"q": value, "scale": quantize(value, 32)[1], **unbounded(2, 2)}
    noise = expected["scale"].double() * torch.tensor([[0.25, 0.25], [0.25, 0.0]])  # of a code
    moved = value + 0.99 * spread(noise, 32, 64, 64)
    outputs = dict(zip(("q", "scale"), quantize(moved, 32), strict=True))
    assert op.check(problem, outputs, expected, noise).ok
    assert not op.check(problem, outputs, expected, noise / 4).ok
    assert not op.check(problem, outputs, expected).ok
    outputs["q"][40, 40] += 1  # where there is no noise
    assert not op.check(problem, outputs, expected, noise).ok


def test_backward_problems_are_the_gradients_of_a_linear_layer():
    op = registry.get("gemm")
    dgrad, wgrad = op.problems("bwd", {"m": 40, "n": 50, "k": 60, "bias": True, "out": "int8"})
    assert (dgrad.rounding, dgrad.out, dgrad.bias) == ("stochastic", "int8", False)
    assert (wgrad.out, wgrad.accumulate, wgrad.rounding) == ("fp32", True, "nearest")
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*s, generator=generator) for s in ((40, 60), (50, 60), (40, 50)))
    (xq, xs), (wq, ws), (gq, gs) = (quantize(t, 32) for t in (x, w, g))
    x64, w64, g64 = (dequantize(*t, 32, torch.float64) for t in ((xq, xs), (wq, ws), (gq, gs)))
    x64.requires_grad_()
    w64.requires_grad_()
    (x64 @ w64.t()).backward(g64)
    dx = gemm_float64(gq, gs, *transpose(wq, ws), 32)
    dw = gemm_float64(*transpose(gq, gs), *transpose(xq, xs), 32)
    assert dx.shape == (dgrad.m, dgrad.n)
    assert dw.shape == (wgrad.m, wgrad.n)
    torch.testing.assert_close(dx, x64.grad)
    torch.testing.assert_close(dw, w64.grad)


@pytest.mark.parametrize(
    "fields",
    [
        {"accumulate": True, "out": "int8"},
        {"rounding": "stochastic"},
        {"layout": "both", "out": "fp32"},
        {"squares": True},
        {"squares": True, "out": "fp32", "bias": True},
        {"squares": True, "out": "fp32", "accumulate": True},
        {"block": 16},
        {"m": 0},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(fields):
    with pytest.raises(UsageError):
        registry.get("gemm").Problem.parse({"m": 8, "n": 8, "k": 8, **fields})


def test_each_sum_of_squares_is_held_to_what_was_written():
    op = registry.get("gemm")
    problem = op.Problem(33, 70, 40, out="fp32", squares=True)
    inputs = op.inputs(problem, torch.device("cpu"))
    expected = op.reference(problem, inputs)
    c = expected["c"].float()
    parts = torch.nn.functional.pad(c, (0, 26, 0, 15)).view(3, 16, 3, 32)
    squares = parts.square().sum((1, 3))
    assert op.check(problem, {"c": c, "squares": squares}, expected).ok
    for place in ((0, 0), (2, 2), (1, 2)):
        for factor in (1.001, 0.0, math.nan):
            wrong = squares.clone()
            wrong[place] *= factor
            assert not op.check(problem, {"c": c, "squares": wrong}, expected).ok


def test_squares_with_a_bias_are_refused_in_a_line(device):
    a = int8_quantize(torch.ones(64, 64, device=device))
    with pytest.raises(UsageError) as raised:
        int8_gemm(a, a, out="fp32", squares=True, bias=torch.ones(64, device=device))
    assert str(raised.value) == "squares with bias is of type torch.Tensor: expected bias=None"


def test_only_sums_of_squares_may_differ_between_configs():
    """Triton adds up in an order that follows the tile and the warps (the last bit, on an H100)."""
    op = registry.get("gemm")
    said = [op.same_bits(op.Problem(64, 64, 64, out="fp32", squares=of)) for of in (False, True)]
    assert said == ["configs", "runs"]


@pytest.mark.parametrize("name", KERNELS)
def test_faults_show_in_their_sums_of_squares(device, name):
    op = registry.get("gemm")
    problem = op.Problem(100, 90, 208, out="fp32", squares=True)
    inputs = op.inputs(problem, device)
    inputs["a_scale"][1, 2] = float("nan")  # of rows 32…63, within K
    inputs["b_scale"][2, -1] = float("inf")  # of columns 64…89
    run(name, problem, inputs)
    squares = launch(name, problem, inputs)["squares"]
    assert squares.shape == (7, 3)
    assert torch.isnan(squares[2:4]).all()
    finite = torch.isfinite(squares)
    assert finite[[0, 1, 4, 5, 6], :2].all()
    assert not finite[:, 2].any()


def test_fp16_may_overflow_and_underflow():
    op = registry.get("gemm")
    problem = op.Problem(2, 2, 32, out="fp16")
    expected = {"c": torch.tensor([[1e6, -1e-9], [1.0, 65520.0]], dtype=torch.float64)}
    expected |= unbounded(1, 1)
    right = torch.tensor([[float("inf"), 0.0], [1.0, 65504.0]], dtype=torch.float16)
    assert op.check(problem, {"c": right}, expected).ok
    for i, j, value in ((0, 0, 65504.0), (0, 1, 1e-4), (1, 0, 1.01), (0, 0, float("-inf"))):
        wrong = right.clone()
        wrong[i, j] = value
        assert not op.check(problem, {"c": wrong}, expected).ok


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_matches_the_reference(device, name, block, options):
    problem = registry.get("gemm").Problem(131, 70, 208, block=block, **options)
    run(name, problem, registry.get("gemm").inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("block", "out_block"), UNEQUAL)
@pytest.mark.parametrize("options", CODES, ids=str)
def test_codes_in_other_blocks_match_the_reference(device, name, block, out_block, options):
    op = registry.get("gemm")
    for m, n, k in ((131, 70, 208), (65, 272, 96), (1, 33, 300)):
        problem = op.Problem(m, n, k, block=block, out_block=out_block, out="int8", **options)
        run(name, problem, op.inputs(problem, device, data="heavy"))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (31, 33, 127), (129, 1, 31), (2, 130, 65)])
@pytest.mark.parametrize(
    "options",
    [{"out": "fp32"}, {"out": "fp32", "squares": True}, {"out": "int8", "layout": "both"}],
    ids=str,
)
def test_ragged_shapes(device, name, m, n, k, options):
    problem = registry.get("gemm").Problem(m, n, k, block=64, **options)
    run(name, problem, registry.get("gemm").inputs(problem, device))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("pad", [16, 3])
def test_row_strided_views(device, name, pad):
    op = registry.get("gemm")
    problem = op.Problem(70, 40, 96, out="fp32")
    inputs = op.inputs(problem, device)
    for x in ("a", "b"):
        inputs[x] = torch.nn.functional.pad(inputs[x], (pad, 5 * pad), value=99)[:, pad : pad + 96]
    run(name, problem, inputs)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("out", ["fp32", "int8"])
def test_faults_show_in_their_blocks_and_nowhere_else(device, name, out):
    op = registry.get("gemm")
    problem = op.Problem(100, 90, 208, out=out, bias=True)
    inputs = op.inputs(problem, device)
    inputs["a_scale"][1, 2] = float("nan")  # of rows 32…63, within K
    inputs["b_scale"][2, -1] = float("nan")  # of columns 64…89, in the last, partial block of K
    run(name, problem, inputs)
    outputs = launch(name, problem, inputs)
    bad = torch.zeros(4, 3, dtype=torch.bool, device=device)
    bad[1], bad[:, 2] = True, True
    if out == "int8":
        assert torch.equal(torch.isnan(outputs["scale"]), bad)
        assert not outputs["q"][32:64].any()
    else:
        assert torch.equal(torch.isnan(outputs["c"][::32, ::32]), bad)


@pytest.mark.parametrize("name", KERNELS)
def test_zero_blocks_give_zeros(device, name):
    op = registry.get("gemm")
    problem = op.Problem(64, 64, 96, out="int8", layout="both")
    inputs = op.inputs(problem, device)
    inputs["a"][:32], inputs["a_scale"][:1] = 0, 0.0
    run(name, problem, inputs)
    outputs = launch(name, problem, inputs)
    assert not outputs["q"][:32].any()
    assert not outputs["scale"][0].any()
    assert outputs["q"][32:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT_KERNELS)
@pytest.mark.parametrize(("block", "out_block"), list(itertools.product(BLOCKS, repeat=2)))
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_sums_and_codes_are_bit_equal_on_a_gpu(device, name, block, out_block, rounding):
    op = registry.get("gemm")
    fields = {"block": block, "bias": True}
    codes = {"out": "int8", "out_block": out_block, "rounding": rounding, "layout": "both"}
    problem = op.Problem(300, 400, 1008, **codes, **fields)
    inputs = op.inputs(problem, device, data="heavy")
    run(name, problem, inputs)
    c = gemm(inputs["a"], inputs["a_scale"], inputs["b"], inputs["b_scale"], block)
    c += inputs["bias"]
    floats = launch(name, op.Problem(300, 400, 1008, out="fp32", **fields), inputs)
    assert torch.equal(floats["c"], c)
    q, scale = quantize(c, out_block, rounding, inputs.get("seed"))
    outputs = launch(name, problem, inputs)
    for found, expected in (("q", q), ("scale", scale), ("qt", q.t()), ("scale_t", scale.t())):
        assert torch.equal(outputs[found], expected), found


@pytest.mark.parametrize("name", ["int_mm", "triton"])
def test_a_cpu_rounds_the_product_and_the_sum_apart(name):
    """What README says: not the FMA of a GPU, which differs by 1e-7."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is not chosen")
    problem = registry.get("gemm").Problem(40, 33, 512, out="fp32")
    inputs = registry.get("gemm").inputs(problem, torch.device("cpu"))
    a, a_scale, b, b_scale = (inputs[x] for x in ("a", "a_scale", "b", "b_scale"))
    expected = torch.zeros(40, 33)
    for i in range(16):
        part = slice(32 * i, 32 * i + 32)
        inner = (a[:, part].double() @ b[:, part].double().t()).float()
        expected += spread(a_scale[:, i, None] * b_scale[None, :, i], 32, 40, 33) * inner
    c = launch(name, problem, inputs)["c"]
    assert torch.equal(c, expected)
    fused = gemm(a, a_scale, b, b_scale, 32)
    assert 2e-8 < float((c - fused).norm() / fused.norm()) < 5e-7


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT_KERNELS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", RAGGED)
@pytest.mark.parametrize("dim", ["m", "n", "k"])
def test_each_ragged_size_in_each_dimension(device, name, block, size, dim):
    op = registry.get("gemm")
    for options in ({"out": "fp32"}, {"out": "int8", "layout": "both"}):
        problem = op.Problem(**{"m": 112, "n": 112, "k": 112, dim: size}, block=block, **options)
        run(name, problem, op.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT_KERNELS)
def test_more_than_two_to_the_31_elements(device, name):
    op = registry.get("gemm")
    m, n, k = 70000, 64, 32768
    assert m * k > 2**31
    small = op.inputs(op.Problem(m // 50, n, k, block=128, out="fp32"), device)
    problem = op.Problem(m, n, k, block=128, out="fp32")
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device, generator=generator)
    a_scale = torch.rand(-(-m // 128), k // 128, device=device, generator=generator)
    c = launch(name, problem, {**small, "a": a, "a_scale": a_scale})["c"]
    assert torch.isfinite(c).all()
    for top in (0, 32768, 65536 - 128, m - m % 128):
        rows = slice(top, min(m, top + 128))
        scale = a_scale[top // 128 : top // 128 + 1]
        expected = gemm(a[rows], scale, small["b"], small["b_scale"], 128)
        assert torch.equal(c[rows], expected)


# What each config of `wgmma` is asked in turn; the first that it can do.
FAMILY_OPTIONS = (
    {"out": "fp32"},
    {"out": "int8", "layout": "both", "rounding": "stochastic", "bias": True},
    {"out": "bf16", "bias": True},
    {"out": "int8"},
    {"out": "fp32", "accumulate": True},
    {"out": "int8", "layout": "qt"},
    {"out": "fp16", "accumulate": True, "bias": True},
    {"out": "fp32", "squares": True},
)
# Whole tiles, ragged edges, rows of no multiple of 16 bytes, less than one block, many windows.
FAMILY_SHAPES = ((384, 384, 1024), (259, 400, 1072), (300, 131, 555), (17, 9, 5), (130, 200, 4500))
FAMILY_DATA = ("heavy", "normal", "outlier", "gradient")


def wgmma_cases(block, schedule, device):
    """A legal problem, config and kind of data for each way to cut a tile."""
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    fields = itertools.product((1, 2, 3), (1, 2), (64, 96, 128, 192), ((1, 1), (1, 2), (2, 1)))
    for i, (groups, rows, tile_n, (cluster_m, cluster_n)) in enumerate(fields):
        m, n, k = FAMILY_SHAPES[i % len(FAMILY_SHAPES)]
        turn = i % len(FAMILY_OPTIONS)
        asked = [*FAMILY_OPTIONS[turn:], *FAMILY_OPTIONS[:turn]]
        if block == 128:  # which few configs can requantise
            asked.sort(key=lambda options: options["out"] != "int8")
        for options in asked:
            problem = op.Problem(m, n, k, block=block, **options)
            config = dataclasses.replace(
                kernel.default(problem, device),
                groups=groups,
                rows=rows,
                tile_n=tile_n,
                stages=3,
                cluster_m=cluster_m,
                cluster_n=cluster_n,
                schedule=schedule,
                stream=False,
                in_flight=0,
            )
            if kernel.legal(problem, config, device) is None:
                yield problem, config, FAMILY_DATA[i % len(FAMILY_DATA)]
                break


def wgmma_pairs(block, out_block, device):
    """Legal problems, configs and kinds of data for each tile that can requantise.

    Of all schedules, groups that multiply at once and, by some tiles, groups that take turns.
    """
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    tiles = itertools.product((1, 2, 3, 4), (1, 2), (32, 64, 96, 128, 192))
    for i, (groups, rows, tile_n) in enumerate(tiles):
        shape, options = FAMILY_SHAPES[i % len(FAMILY_SHAPES)], CODES[i % len(CODES)]
        problem = op.Problem(*shape, block=block, out_block=out_block, out="int8", **options)
        schedules = ("telescoped", "exact", "interleaved")
        for schedule, in_flight in itertools.product(schedules, {0, i % 3}):
            config = kernel.Config(
                groups=groups,
                rows=rows,
                tile_n=tile_n,
                stages=3,
                in_flight=in_flight,
                schedule=schedule,
            )
            if kernel.legal(problem, config, device) is None:
                yield problem, config, FAMILY_DATA[i % len(FAMILY_DATA)]


def test_blocks_of_32_requantise_in_every_tile_of_a_float_output():
    from jetfire.core.device import target_device

    device = target_device((9, 0))
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    for block, (m, n, k) in itertools.product(BLOCKS, ((8192, 8192, 8192), (300, 64, 4096))):
        floats = op.Problem(m, n, k, block=block)
        if (reason := kernel.legal(floats, kernel.default(floats, device), device)) is not None:
            pytest.skip(reason)
        for layout in ("q", "qt", "both"):
            codes = op.Problem(m, n, k, block=block, out="int8", out_block=32, layout=layout)
            assert kernel.default(codes, device) == kernel.default(floats, device)
            tiles = itertools.product((1, 2, 3, 4), (1, 2), (32, 64, 96, 128, 192))
            for groups, rows, tile_n in tiles:
                config = kernel.Config(groups=groups, rows=rows, tile_n=tile_n, stages=3)
                expected = kernel.legal(floats, config, device)
                assert kernel.legal(codes, config, device) == expected
    codes = op.Problem(256, 256, 256, block=32, out="int8", out_block=128)
    for fields, word in (
        ({"groups": 3}, "tile_m=192: expected a multiple of 128"),
        ({"groups": 2, "tile_n": 96}, "tile_n=96: expected a multiple of 128"),
        ({"groups": 1}, "tile_m=64: expected a multiple of 128"),
    ):
        assert word in kernel.legal(codes, kernel.Config(**fields), device)


def wgmma_reason(device):
    problem = registry.get("gemm").Problem(256, 256, 256)
    kernel = registry.get_kernel("gemm", "wgmma")
    return kernel.legal(problem, kernel.default(problem, device), device)


@pytest.fixture
def hopper(device):
    """The GPU, where `wgmma` runs on it."""
    if (reason := wgmma_reason(Device.parse(str(device)))) is not None:
        pytest.skip(reason)
    return device


def wrong_of_wgmma(problem, config, data, device):
    """What is wrong with one call, against the tolerance and to the bit; empty if nothing is."""
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    inputs = op.inputs(problem, device, data=data)
    check = verify(op, kernel, problem, config, inputs)
    if not check.ok:
        return f"{problem}, {config}, {data}: {check.message}"
    operands = [inputs[x] for x in ("a", "a_scale", "b", "b_scale")]
    if config.telescoped:
        c = gemm_telescoped(*operands, problem.block, config.chains)
    else:
        c = gemm(*operands, problem.block)
    c += inputs["bias"] if problem.bias else 0
    outputs = op.poison(problem, op.outputs(problem, inputs))
    kernel.launch(problem, config, inputs, outputs)
    if problem.out == "int8":
        q, scale = quantize(c, problem.out_block, problem.rounding, inputs.get("seed"))
        expected = {"q": q, "scale": scale, "qt": q.t(), "scale_t": scale.t()}
    else:
        c = (c + inputs["c"].float()) if problem.accumulate else c
        expected = {"c": c.to(outputs["c"].dtype)}
    for name, right in expected.items():
        if name in outputs and not torch.equal(outputs[name], right):
            differ = int((outputs[name] != right).sum())
            return f"{problem}, {config}, {data}: {differ} of {name} differ from the schedule's own"
    return ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "block"),
    [*itertools.product(("exact", "telescoped"), BLOCKS), ("interleaved", 128)],
)
def test_every_way_to_cut_a_tile_rounds_as_its_schedule_does(hopper, block, schedule):
    cases = list(wgmma_cases(block, schedule, Device.parse(str(hopper))))
    assert len(cases) >= (18 if schedule == "interleaved" else 31)
    assert {p.out for p, _, _ in cases} == {"fp32", "bf16", "fp16", "int8"}
    check_wgmma(cases, hopper)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "out_block"), UNEQUAL)
def test_every_way_to_cut_a_tile_requantises_in_other_blocks(hopper, block, out_block):
    cases = list(wgmma_pairs(block, out_block, Device.parse(str(hopper))))
    assert len(cases) >= (4 if out_block == 128 else 20)
    check_wgmma(cases, hopper)


def check_wgmma(cases, device):
    def work(case):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return wrong_of_wgmma(*case, device)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # which compile at once
        wrong = [found for found in pool.map(work, cases) if found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 1001])
@pytest.mark.parametrize("schedule", ["exact", "telescoped"])
def test_a_captured_launch_reads_its_inputs_anew(hopper, k, schedule):
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    problem = op.Problem(500, 300, k, block=32, out="fp32", bias=True)
    config = dataclasses.replace(
        kernel.default(problem, Device.parse(str(hopper))), schedule=schedule
    )
    inputs, others = (op.inputs(problem, hopper, seed=seed) for seed in (0, 1))
    outputs = op.outputs(problem, inputs)
    kernel.launch(problem, config, inputs, outputs)  # loads the module, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(problem, config, inputs, outputs)
    for values in (op.inputs(problem, hopper, seed=0), others):
        for name, tensor in values.items():
            inputs[name].copy_(tensor)
        op.poison(problem, outputs)
        graph.replay()
        noise = kernel.noise(problem, config, inputs)
        result = op.check(problem, outputs, op.reference(problem, values), noise)
        assert result.ok, result.message


def many_launches(problem, config, inputs, expected, device):
    """A hundred launches on a stream of their own, each into poisoned outputs; what is wrong."""
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        differ = torch.zeros((), dtype=torch.int64, device=device)
        outputs = op.outputs(problem, inputs)
        for _ in range(100):
            op.poison(problem, outputs)
            kernel.launch(problem, config, inputs, outputs)
            differ += (outputs["c"] != expected).sum()
    return differ


def stream_cases(device):
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    for m, n, k, block in ((700, 500, 1024, 128), (300, 900, 777, 32)):
        problem = op.Problem(m, n, k, block=block, out="fp32")
        inputs = op.inputs(problem, device)
        expected = gemm(*(inputs[x] for x in ("a", "a_scale", "b", "b_scale")), block)
        config = exact_config(kernel, problem, Device.parse(str(device)))
        yield problem, config, inputs, expected, device


@pytest.mark.gpu
def test_two_streams_do_not_disturb_each_other(hopper):
    wrong = [many_launches(*case) for case in list(stream_cases(hopper))]
    assert [int(w) for w in wrong] == [0, 0]


@pytest.mark.gpu
def test_two_threads_do_not_disturb_each_other(hopper):
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda case: int(many_launches(*case)), list(stream_cases(hopper)))
        assert list(found) == [0, 0]


@pytest.mark.gpu
def test_a_launch_follows_its_tensors_to_their_device(hopper):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() != other.index
    if (reason := wgmma_reason(Device.parse("cuda:1"))) is not None:
        pytest.skip(reason)
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    for problem, config, inputs, expected, _ in stream_cases(other):
        outputs = op.poison(problem, op.outputs(problem, inputs))
        kernel.launch(problem, config, inputs, outputs)
        assert torch.cuda.current_device() != other.index
        assert torch.equal(outputs["c"], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 1001])
def test_a_launch_does_not_synchronise(hopper, k):
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    problem = op.Problem(500, 300, k, out="int8", layout="both", rounding="stochastic", block=64)
    config = kernel.default(problem, Device.parse(str(hopper)))
    inputs = op.inputs(problem, hopper)
    outputs = op.poison(problem, op.outputs(problem, inputs))
    kernel.launch(problem, config, inputs, outputs)
    busy = torch.zeros(4096, 4096, device=hopper)
    busy = busy @ busy  # makes cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy
        kernel.launch(problem, config, inputs, outputs)
        assert not torch.cuda.current_stream().query(), "the launch waited for what was before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    noise = kernel.noise(problem, config, inputs)
    result = op.check(problem, outputs, op.reference(problem, inputs), noise)
    assert result.ok, result.message


def test_a_config_that_cannot_run_is_refused_with_a_reason():
    from jetfire.core.device import target_device

    op = registry.get("gemm")
    problem = op.Problem(256, 256, 256, block=128)
    triton, gluon = registry.get_kernel("gemm", "triton"), registry.get_kernel("gemm", "gluon")
    hopper, ada = target_device((9, 0)), target_device((8, 9))
    for kernel, device, fields, word in (
        (triton, hopper, {"tile_m": 64}, "tile_m=64"),
        (triton, hopper, {"tile_m": 256, "tile_n": 256}, "sums per thread"),
        (triton, ada, {"stages": 5}, "shared memory"),
        (gluon, ada, {}, "sm_90"),
        (gluon, hopper, {"stages": 9}, "stages=9"),
    ):
        config = kernel.Config.parse({**kernel.default(problem, device).as_dict(), **fields})
        assert word in kernel.legal(problem, config, device)
    odd = op.Problem(256, 256, 100)
    assert "multiple of 16" in gluon.legal(odd, gluon.default(odd, hopper), hopper)


AUDIT = """
import json, sys
from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.machine_code import audit
op, problems = registry.get("gemm"), json.loads(sys.argv[1])
for name, arch, fields in problems:
    kernel, problem = registry.get_kernel("gemm", name), op.Problem(4096, 4096, 4096, **fields)
    config = kernel.default(problem, target_device(tuple(arch)))
    (cubin,) = kernel.cubins(problem, config, tuple(arch))
    a = audit(cubin)
    print(json.dumps({"spills": a.spills, "shared": a.shared_bytes, **a.instructions}))
"""


def test_machine_code_of_the_defaults():
    """s8 wgmma on sm_90, s8 mma elsewhere, and no register spills."""
    pytest.importorskip("triton.backends.nvidia")
    cases = [("triton", arch, {"block": 32}) for arch in ((8, 0), (8, 9), (9, 0), (10, 0))]
    cases += [("gluon", (9, 0), {"block": block}) for block in BLOCKS]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    audits = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(audits) == len(cases)
    for (_, arch, fields), found in zip(cases, audits, strict=True):
        assert found["spills"] == 0, (arch, fields)
        assert found.get("IGMMA" if tuple(arch) == (9, 0) else "IMMA", 0) > 0, (arch, fields)


def test_the_hopper_kernel_expects_its_default_to_be_the_fastest_of_what_it_knows():
    from jetfire.core.device import target_device

    device = target_device((9, 0))
    kernel, op = registry.get_kernel("gemm", "wgmma"), registry.get("gemm")
    for shape in ((8192, 1024, 4096), (616, 2080, 1024), (1504, 2752, 11168)):
        problem = op.Problem(*shape, block=32, out="fp32", accumulate=True)
        default = kernel.default(problem, device)
        least = kernel.estimate(problem, default, device)
        for other in ({"groups": 3, "tile_n": 128}, {"groups": 2, "tile_n": 64}):
            config = kernel.Config(stream=False, schedule="telescoped", **other)
            assert kernel.estimate(problem, config, device) >= least
    assert kernel.estimate(problem, kernel.Config(rows=2, groups=1, tile_n=64), device) is None
