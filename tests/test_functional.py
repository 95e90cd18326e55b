"""The functions that users call: against torch on dequantised tensors, and what they refuse."""

import pytest
import torch
from torch.nn import functional

from jetfire import ops
from jetfire import ops as int8
from jetfire.core.errors import UsageError
from jetfire.ops import Quantized
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

M, N, K, BLOCK = 70, 136, 96, 32


@pytest.fixture
def draw(device):
    """Quantised normal values, and the float64 values that their codes stand for."""
    generator = torch.Generator().manual_seed(0)

    def quantised(m=M, n=N):
        q, scale = quantize(torch.randn(m, n, generator=generator).to(device), BLOCK)
        return Quantized(q, scale, block=BLOCK), dequantize(q, scale, BLOCK, torch.float64)

    return quantised


@pytest.fixture
def seed(device):
    return torch.tensor([0x1234_5678_9ABC], device=device)


def close(x, value, codes):
    """The codes are within `codes` of a code of the value, throughout."""
    step = dequantize(torch.ones_like(x.q), x.scale, BLOCK, torch.float64)
    error = (dequantize(x.q, x.scale, BLOCK, torch.float64) - value).abs()
    assert x.block == BLOCK
    assert x.q.dtype == torch.int8
    assert x.scale.dtype == torch.float32
    assert bool((error <= codes * step * (1 + 1e-6) + 1e-30).all())


# Rounding to nearest is off by half a code; stochastic by less than one.
NEAREST, STOCHASTIC = 0.503, 1.0


def test_found_in_ops():
    for name in dir(int8):
        if name.startswith("int8_"):
            assert getattr(ops, name) is getattr(int8, name)
    with pytest.raises(AttributeError):
        _ = ops.int8_nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_and_back(device, seed, dtype):
    x = torch.randn(M, 2 * N, device=device).to(dtype)[:, :N]
    both = int8.int8_quantize(x, block=BLOCK, layout="both")
    close(both, x.double(), NEAREST)
    assert torch.equal(both.qt, both.q.t())
    assert torch.equal(both.scale_t, both.scale.t())
    transposed = int8.int8_quantize(x, block=BLOCK, layout="qt")
    assert transposed.q is transposed.scale is None
    assert torch.equal(transposed.qt, both.qt)
    assert torch.equal(transposed.scale_t, both.scale_t)
    rounded = int8.int8_quantize(x, block=BLOCK, rounding="stochastic", seed=seed)
    close(rounded, x.double(), STOCHASTIC)
    assert not torch.equal(rounded.q, both.q)
    back = int8.int8_dequantize(both, out="fp32")
    assert back.dtype == torch.float32
    torch.testing.assert_close(back.double(), dequantize(both.q, both.scale, BLOCK, torch.float64))


def test_transpose(draw):
    x, _ = draw()
    xt = int8.int8_transpose(x)
    assert torch.equal(xt.q, x.q.t())
    assert torch.equal(xt.scale, x.scale.t())


def test_a_value_and_its_transpose_are_the_same_tensors(draw):
    x, _ = draw()
    both = Quantized(x.q, x.scale, x.q.t(), x.scale.t(), BLOCK)
    assert both.t.t == both
    assert both.t.q is both.qt
    assert x.tensors == (x.q, x.scale)
    assert both.t.tensors == both.tensors[2:] + both.tensors[:2]
    for layout, tensors in (("q", both[:2]), ("qt", both[2:4]), ("both", both[:4])):
        value = Quantized.of(tensors, layout, BLOCK)
        assert value.tensors == tensors
        assert (value.q is None) == (layout == "qt")


def test_gemm(draw, device, seed):
    a, wide_a = draw(M, K)
    b, wide_b = draw(N, K)
    product = wide_a @ wide_b.t()
    bias = torch.randn(N, device=device)
    c = int8.int8_gemm(a, b, out="fp32", bias=bias)
    torch.testing.assert_close(c.double(), product + bias.double(), rtol=1e-5, atol=1e-4)
    half = int8.int8_gemm(a, b)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), product, rtol=2**-8, atol=1e-3)
    total = torch.randn(M, N, device=device)
    before = total.clone()
    assert int8.int8_gemm(a, b, out="fp32", c=total) is total
    torch.testing.assert_close(total.double(), product + before.double(), rtol=1e-5, atol=1e-4)
    close(int8.int8_gemm(a, b, out="int8"), product, NEAREST)
    rounded = int8.int8_gemm(a, b, out="int8", rounding="stochastic", seed=seed)
    close(rounded, product, STOCHASTIC)


@pytest.mark.parametrize("approximate", ["tanh", "erf"])
def test_gelu(draw, seed, approximate):
    x, wide_x = draw()
    dy, wide_dy = draw()
    leaf = wide_x.requires_grad_()
    y = functional.gelu(leaf, approximate="tanh" if approximate == "tanh" else "none")
    close(int8.int8_gelu(x, approximate=approximate), y.detach(), NEAREST)
    (dx,) = torch.autograd.grad(y, leaf, wide_dy)
    found = int8.int8_gelu_backward(x, dy, approximate=approximate, seed=seed)
    close(found, dx, STOCHASTIC)
    found = int8.int8_gelu_backward(x, dy, approximate=approximate, rounding="nearest")
    close(found, dx, NEAREST)


def test_layernorm(draw, device, seed):
    x, wide_x = draw()
    dy, wide_dy = draw()
    weight, bias = torch.rand(N, device=device) + 0.5, torch.randn(N, device=device)
    leaves = [t.double().requires_grad_() for t in (wide_x, weight, bias)]
    y = functional.layer_norm(leaves[0], [N], leaves[1], leaves[2])
    found, mean, rstd = int8.int8_layernorm(x, weight, bias)
    close(found, y.detach(), NEAREST)
    torch.testing.assert_close(mean.double(), wide_x.mean(1), rtol=1e-5, atol=1e-6)
    again, *given = int8.int8_layernorm(x, weight, bias, mean=mean, rstd=rstd)
    assert torch.equal(given[0], mean)
    assert torch.equal(given[1], rstd)
    close(again, y.detach(), NEAREST)
    expected = torch.autograd.grad(y, leaves, wide_dy)
    dx, dweight, dbias = int8.int8_layernorm_backward(x, dy, weight, mean, rstd, seed=seed)
    close(dx, expected[0], STOCHASTIC)
    torch.testing.assert_close(dweight.double(), expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dbias.double(), expected[2], rtol=1e-4, atol=1e-4)
    stream = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    total, copy, *sums = int8.int8_layernorm_add_backward(
        x, dy, weight, mean, rstd, stream, seed=seed
    )
    both = stream.double() + expected[0]
    torch.testing.assert_close(total.double(), both, rtol=2**-8, atol=1e-4)
    close(copy, total.double(), STOCHASTIC)
    for mine, theirs in zip(sums, (dweight, dbias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_add(draw, device, seed):
    y, wide_y = draw()
    x = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    expected = x.double() + wide_y
    total, copy, mean, rstd = int8.int8_add(x, y)
    torch.testing.assert_close(total.double(), expected, rtol=2**-8, atol=1e-3)
    close(copy, total.double(), NEAREST)
    torch.testing.assert_close(mean.double(), total.double().mean(1), rtol=1e-5, atol=1e-6)
    variance = total.double().var(1, correction=0)
    torch.testing.assert_close(rstd.double(), (variance + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    dx, copy = int8.int8_add_backward(x, y, seed=seed)
    assert torch.equal(dx, total)
    close(copy, dx.double(), STOCHASTIC)


def test_dropout(draw, seed):
    x, wide = draw()
    out = int8.int8_dropout(x, seed, p=0.25)
    value = dequantize(out.q, out.scale, BLOCK, torch.float64)
    kept = out.q != 0
    torch.testing.assert_close(value[kept], wide[kept] / 0.75)
    dropped = ((out.q == 0) & (x.q != 0)).sum() / (x.q != 0).sum()
    assert 0.2 < float(dropped) < 0.3
    assert torch.equal(int8.int8_dropout_backward(x, seed, p=0.25).q, out.q)


def test_keeps_autograd_out(device):
    weight = torch.randn(32, 32, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in int8.int8_quantize(weight).tensors)


def refuse(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


def test_refuses_in_one_line(draw, device):
    x, _ = draw()
    q, scale, *_ = x
    refuse("x is int8: expected bfloat16 or float16 or float32", int8.int8_quantize, q)
    refuse("x is float32: expected int8", int8.int8_dequantize, Quantized(scale, scale))
    refuse(
        "x's scale has shape (3, 5): expected (2, 3) for (70, 136) codes in blocks of 64",
        int8.int8_dequantize,
        Quantized(q, scale, block=64),
    )
    refuse(
        "block=48: expected 32 or 64 or 128", int8.int8_dequantize, Quantized(q, scale, block=48)
    )
    refuse(
        "x has shape (4,): expected two dimensions",
        int8.int8_quantize,
        torch.zeros(4, device=device),
    )
    refuse(
        "x has strides (1, 8): expected a contiguous last dimension; call .contiguous()",
        int8.int8_quantize,
        torch.zeros(4, 8, device=device).t(),
    )
    refuse(
        f"seed: expected an int64 tensor of one element on {q.device}",
        int8.int8_gelu_backward,
        x,
        x,
    )
    refuse("approximate=sigmoid: expected tanh or erf", int8.int8_gelu, x, approximate="sigmoid")
    refuse(
        "dy has shape (32, 32): expected (70, 136)",
        int8.int8_gelu_backward,
        x,
        Quantized(q[:32, :32], scale[:1, :1]),
    )
    refuse(
        "x is on meta: expected cuda or cpu", int8.int8_transpose, Quantized(q.to("meta"), scale)
    )
    one, other = (int8.int8_quantize(torch.ones(9, 9, device=device), block=b) for b in (32, 64))
    message = "dy has block=64: expected 32, as the first has"
    refuse(message, int8.int8_gelu_backward, one, other)
    refuse("a has block=32 and b block=64: expected one block", int8.int8_gemm, one, other)
    alone = int8.int8_quantize(torch.ones(9, 9, device=device), layout="qt")
    message = "x lacks q or scale: expected both (layout=q or both)"
    refuse(message, int8.int8_gelu, alone)
    refuse(
        "x is of type tuple: expected a Quantized, as int8_quantize returns",
        int8.int8_gelu,
        (q, scale),
    )


def test_a_call_with_codes_and_scales_apart_is_told_of_the_value(draw):
    x, _ = draw()
    for args, options in ((x.tensors, {}), ((x,), {"block": BLOCK})):
        with pytest.raises(TypeError) as error:
            int8.int8_gelu(*args, **options)
        (note,) = error.value.__notes__
        assert note == "x: codes, scales and block are one value, as int8_quantize returns"
    with pytest.raises(TypeError) as error:
        int8.int8_quantize(x.q, scale=x.scale)
    assert not hasattr(error.value, "__notes__")


def test_refuses_operands_that_do_not_fit(draw, device):
    a, _ = draw(M, K)
    b, _ = draw(N, K)
    wrong, _ = draw(N, K + 32)
    vector, total = torch.ones(K, device=device), torch.zeros(M, N, device=device)
    refuse("a has k=96 and b k=128: expected one k", int8.int8_gemm, a, wrong)
    refuse("bias is float32 (3,): expected float32 (136,)", int8.int8_gemm, a, b, bias=vector[:3])
    refuse("c is float32: expected bfloat16", int8.int8_gemm, a, b, c=total)
    refuse(
        "c with out=int8: expected out=bf16 or fp16 or fp32",
        int8.int8_gemm,
        a,
        b,
        out="int8",
        c=total,
    )
    refuse(
        "mean and rstd: expected both or neither",
        int8.int8_layernorm,
        a,
        vector,
        vector,
        mean=torch.ones(M),
    )


@pytest.mark.gpu
def test_refuses_mixed_devices(draw):
    x, _ = draw()
    refuse(
        "x's scale is on cpu: expected cuda:0, as the first tensor",
        int8.int8_transpose,
        Quantized(x.q, x.scale.cpu()),
    )
