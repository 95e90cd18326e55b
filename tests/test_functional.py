"""The functions that users call: against torch on dequantised tensors, and what they refuse."""

import pytest
import torch
from torch.nn import functional

from jetfire import ops
from jetfire import ops as int8
from jetfire.core.errors import UsageError
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize

M, N, K, BLOCK = 70, 136, 96, 32


@pytest.fixture
def draw(device):
    """Codes, scales and the float64 values they stand for, of normal values."""
    generator = torch.Generator().manual_seed(0)

    def quantised(m=M, n=N):
        q, scale = quantize(torch.randn(m, n, generator=generator).to(device), BLOCK)
        return q, scale, dequantize(q, scale, BLOCK, torch.float64)

    return quantised


@pytest.fixture
def seed(device):
    return torch.tensor([0x1234_5678_9ABC], device=device)


def close(pair, value, codes):
    """(q, scale) is within `codes` of a code of the value, throughout."""
    q, scale = pair
    step = dequantize(torch.ones_like(q), scale, BLOCK, torch.float64)
    error = (dequantize(q, scale, BLOCK, torch.float64) - value).abs()
    assert q.dtype == torch.int8
    assert scale.dtype == torch.float32
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
    q, scale, qt, scale_t = int8.int8_quantize(x, block=BLOCK, layout="both")
    close((q, scale), x.double(), NEAREST)
    assert torch.equal(qt, q.t())
    assert torch.equal(scale_t, scale.t())
    transposed = int8.int8_quantize(x, block=BLOCK, layout="qt")
    assert torch.equal(transposed[0], qt)
    assert torch.equal(transposed[1], scale_t)
    rounded = int8.int8_quantize(x, block=BLOCK, rounding="stochastic", seed=seed)
    close(rounded, x.double(), STOCHASTIC)
    assert not torch.equal(rounded[0], q)
    back = int8.int8_dequantize(q, scale, block=BLOCK, out="fp32")
    assert back.dtype == torch.float32
    torch.testing.assert_close(back.double(), dequantize(q, scale, BLOCK, torch.float64))


def test_transpose(draw):
    q, scale, _ = draw()
    qt, scale_t = int8.int8_transpose(q, scale, block=BLOCK)
    assert torch.equal(qt, q.t())
    assert torch.equal(scale_t, scale.t())


def test_gemm(draw, device, seed):
    a, a_scale, wide_a = draw(M, K)
    b, b_scale, wide_b = draw(N, K)
    operands, product = (a, a_scale, b, b_scale), wide_a @ wide_b.t()
    bias = torch.randn(N, device=device)
    c = int8.int8_gemm(*operands, block=BLOCK, out="fp32", bias=bias)
    torch.testing.assert_close(c.double(), product + bias.double(), rtol=1e-5, atol=1e-4)
    half = int8.int8_gemm(*operands, block=BLOCK)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), product, rtol=2**-8, atol=1e-3)
    total = torch.randn(M, N, device=device)
    before = total.clone()
    assert int8.int8_gemm(*operands, block=BLOCK, out="fp32", c=total) is total
    torch.testing.assert_close(total.double(), product + before.double(), rtol=1e-5, atol=1e-4)
    close(int8.int8_gemm(*operands, block=BLOCK, out="int8"), product, NEAREST)
    close(
        int8.int8_gemm(*operands, block=BLOCK, out="int8", rounding="stochastic", seed=seed),
        product,
        STOCHASTIC,
    )


@pytest.mark.parametrize("approximate", ["tanh", "erf"])
def test_gelu(draw, seed, approximate):
    x, x_scale, wide_x = draw()
    dy, dy_scale, wide_dy = draw()
    leaf = wide_x.requires_grad_()
    y = functional.gelu(leaf, approximate="tanh" if approximate == "tanh" else "none")
    close(int8.int8_gelu(x, x_scale, block=BLOCK, approximate=approximate), y.detach(), NEAREST)
    (dx,) = torch.autograd.grad(y, leaf, wide_dy)
    options = {"block": BLOCK, "approximate": approximate}
    found = int8.int8_gelu_backward(x, x_scale, dy, dy_scale, **options, seed=seed)
    close(found, dx, STOCHASTIC)
    found = int8.int8_gelu_backward(x, x_scale, dy, dy_scale, **options, rounding="nearest")
    close(found, dx, NEAREST)


def test_layernorm(draw, device, seed):
    x, x_scale, wide_x = draw()
    dy, dy_scale, wide_dy = draw()
    weight, bias = torch.rand(N, device=device) + 0.5, torch.randn(N, device=device)
    leaves = [t.double().requires_grad_() for t in (wide_x, weight, bias)]
    y = functional.layer_norm(leaves[0], [N], leaves[1], leaves[2])
    q, scale, mean, rstd = int8.int8_layernorm(x, x_scale, weight, bias, block=BLOCK)
    close((q, scale), y.detach(), NEAREST)
    torch.testing.assert_close(mean.double(), wide_x.mean(1), rtol=1e-5, atol=1e-6)
    given = int8.int8_layernorm(x, x_scale, weight, bias, mean=mean, rstd=rstd, block=BLOCK)
    assert len(given) == 2
    close(given, y.detach(), NEAREST)
    dx, dweight, dbias = torch.autograd.grad(y, leaves, wide_dy)
    found = int8.int8_layernorm_backward(
        x, x_scale, dy, dy_scale, weight, mean, rstd, block=BLOCK, seed=seed
    )
    close(found[:2], dx, STOCHASTIC)
    torch.testing.assert_close(found[2].double(), dweight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[3].double(), dbias, rtol=1e-4, atol=1e-4)


def test_add(draw, device, seed):
    y, y_scale, wide_y = draw()
    x = torch.randn(M, N, device=device, dtype=torch.bfloat16)
    expected = x.double() + wide_y
    total, q, scale, mean, rstd = int8.int8_add(x, y, y_scale, block=BLOCK)
    torch.testing.assert_close(total.double(), expected, rtol=2**-8, atol=1e-3)
    close((q, scale), total.double(), NEAREST)
    torch.testing.assert_close(mean.double(), total.double().mean(1), rtol=1e-5, atol=1e-6)
    variance = total.double().var(1, correction=0)
    torch.testing.assert_close(rstd.double(), (variance + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    dx, q, scale = int8.int8_add_backward(x, y, y_scale, block=BLOCK, seed=seed)
    assert torch.equal(dx, total)
    close((q, scale), dx.double(), STOCHASTIC)


def test_dropout(draw, seed):
    q, scale, wide = draw()
    out, out_scale = int8.int8_dropout(q, scale, seed, p=0.25, block=BLOCK)
    value = dequantize(out, out_scale, BLOCK, torch.float64)
    kept = out != 0
    torch.testing.assert_close(value[kept], wide[kept] / 0.75)
    dropped = ((out == 0) & (q != 0)).sum() / (q != 0).sum()
    assert 0.2 < float(dropped) < 0.3
    again = int8.int8_dropout_backward(q, scale, seed, p=0.25, block=BLOCK)
    assert torch.equal(again[0], out)


def test_keeps_autograd_out(device):
    weight = torch.randn(32, 32, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in int8.int8_quantize(weight))


def refuse(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


def test_refuses_in_one_line(draw, device):
    q, scale, _ = draw()
    refuse("x is int8: expected bfloat16 or float16 or float32", int8.int8_quantize, q)
    refuse("q is float32: expected int8", int8.int8_dequantize, scale, scale)
    refuse(
        "q's scale has shape (3, 5): expected (2, 3) for (70, 136) codes in blocks of 64",
        int8.int8_dequantize, q, scale, block=64,
    )  # fmt: skip
    refuse("block=48: expected 32 or 64 or 128", int8.int8_dequantize, q, scale, block=48)
    refuse(
        "x has shape (4,): expected two dimensions",
        int8.int8_quantize, torch.zeros(4, device=device),
    )  # fmt: skip
    refuse(
        "x has strides (1, 8): expected a contiguous last dimension; call .contiguous()",
        int8.int8_quantize, torch.zeros(4, 8, device=device).t(),
    )  # fmt: skip
    refuse(
        f"seed: expected an int64 tensor of one element on {q.device}",
        int8.int8_gelu_backward, q, scale, q, scale,
    )  # fmt: skip
    refuse(
        "approximate=sigmoid: expected tanh or erf",
        int8.int8_gelu, q, scale, approximate="sigmoid",
    )  # fmt: skip
    refuse(
        "dy has shape (32, 32): expected (70, 136)",
        int8.int8_gelu_backward, q, scale, q[:32, :32], scale[:1, :1],
    )  # fmt: skip
    refuse("q is on meta: expected cuda or cpu", int8.int8_transpose, q.to("meta"), scale)


def test_refuses_operands_that_do_not_fit(draw, device):
    a, a_scale, _ = draw(M, K)
    b, b_scale, _ = draw(N, K)
    wrong, wrong_scale, _ = draw(N, K + 32)
    operands = (a, a_scale, b, b_scale)
    refuse("a has k=96 and b k=128: expected one k",
           int8.int8_gemm, a, a_scale, wrong, wrong_scale)  # fmt: skip
    refuse("bias is float32 (3,): expected float32 (136,)",
           int8.int8_gemm, *operands, bias=torch.zeros(3, device=device))  # fmt: skip
    refuse("c is float32: expected bfloat16",
           int8.int8_gemm, *operands, c=torch.zeros(M, N, device=device))  # fmt: skip
    refuse("c with out=int8: expected out=bf16 or fp16 or fp32",
           int8.int8_gemm, *operands, out="int8", c=torch.zeros(M, N, device=device))  # fmt: skip
    vector = torch.ones(K, device=device)
    refuse("mean and rstd: expected both or neither",
           int8.int8_layernorm, a, a_scale, vector, vector, mean=torch.ones(M))  # fmt: skip


@pytest.mark.gpu
def test_refuses_mixed_devices(draw):
    q, scale, _ = draw()
    refuse("q's scale is on cpu: expected cuda:0, as the first tensor",
           int8.int8_transpose, q, scale.cpu())  # fmt: skip
