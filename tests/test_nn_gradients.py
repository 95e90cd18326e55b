"""Gradients of every module against float64 autograd of the dequantised problem, over 200 draws.

The reference is a float64 graph in which every tensor that nn rounds in forward takes nn's value
(checked to be the nearest one) and passes its gradient straight through. What nn rounds in backward
it rounds stochastically, so that each gradient's mean is the reference's.

Two bounds, both with a chance below `FALSE_ALARM` that any element of a tensor exceeds them:
- A layer's gradient is linear in a few independent roundings to codes of step c. Such an error lies
  in an interval of length c, so that sums of them have the tails of a normal distribution of
  standard deviation c/2 (Hoeffding, 1963), which products of squares propagate.
- A block's gradient sums thousands of roundings, of steps that are random too: Student's t with the
  standard error of the sample.
"""

import math
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import choose
from jetfire.nn import (
    Int8Block,
    Int8Conv1D,
    Int8GELU,
    Int8LayerNorm,
    Int8Linear,
    Int8LlamaBlock,
    Stream,
    linear_cross_entropy,
    products,
)
from jetfire.nn import flow as block_module
from jetfire.nn.llama import rotary_tables
from jetfire.reference.dequantize import dequantize
from jetfire.reference.dropout import drop_threshold
from jetfire.reference.fallback_quantize import fallback_quantize
from jetfire.reference.philox import STREAM_DROPOUT, random_u16
from jetfire.reference.quantize import block_amax, quantize, scales, spread

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 200
FALSE_ALARM = 1e-6
BLOCKS = [32, 64, 128]
# Rounding to bf16 changes a number by at most this fraction of it.
BF16 = 2.0**-8


def hoeffding(size):
    """How many standard deviations none of so many sums of bounded errors exceeds."""
    return math.sqrt(2 * math.log(2 * size / FALSE_ALARM))


def student(size):
    """The same for Student's t of DRAWS − 1 degrees of freedom (Cornish–Fisher)."""
    z, n = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * size)), DRAWS - 1
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def values(codes, block):
    """The float64 values of codes and scales, the first two of `codes`."""
    return dequantize(*codes[:2], block, torch.float64)


def straight_through(value, rounded):
    """`rounded`, with the gradient of `value`."""
    return value + (rounded.double() - value).detach()


def nearest(value, codes, block):
    """The values of codes, with the gradient of the float64 value that they are nearest to."""
    step = values((torch.ones_like(codes[0]), codes[1]), block)
    rounded = values(codes, block)
    # Half a code, and what fp32 arithmetic adds to it.
    assert bool(((rounded - value).abs() <= 0.503 * step + 1e-30).all())
    return straight_through(value, rounded)


def quantised(value, block):
    """A float64 tensor that holds floats, rounded to codes."""
    return nearest(value, quantize(value.detach().float(), block), block)


def half_steps(g, block):
    """Half the step of the codes of every element of a float64 gradient."""
    return spread(scales(g.float(), block)[0], block, *g.shape).double() / 2


def half_steps_of(draws, block):
    """The same of tensors that hold dequantised codes, the greatest of all draws."""
    amax = torch.stack([block_amax(draw.float(), block) for draw in draws]).amax(0)
    return spread(amax, block, *draws.shape[1:]).double() / 254


def leaf(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def double(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def drawn(forward, leaves, g, anew=False):
    """The gradient of every leaf, DRAWS × its shape, float64.

    Forward draws the keys that backward rounds by. It has the same bits whatever they are, so that
    it runs for the first draw, and once more for all others.

    Args:
        anew: forward itself rounds by its keys, and runs for every draw.
    """
    keys = []

    def draw(count, device):
        keys.append(torch.empty(count, dtype=torch.int64, device=device))
        return keys[-1]

    torch.manual_seed(0)
    found = [torch.autograd.grad(forward(), leaves, g)]
    if not anew:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "draw", draw)
            y = forward()
        assert keys
    for seed in range(1, DRAWS):
        torch.manual_seed(seed)
        if anew:
            y = forward()
        for key in keys:
            key.data.random_(2**62)  # autograd, which saved it, does not see that it changes
        found.append(torch.autograd.grad(y, leaves, g, retain_graph=not anew))
    return [torch.stack(draws).double() for draws in zip(*found, strict=True)]


def unbiased(draws, exact, deviation, rounding, bound, seen=0.01):
    """Mean and first draw are as near to the exact gradient as roundings explain.

    Args:
        deviation: standard deviation of a draw, elementwise.
        rounding: standard deviation of what rounding to bf16 does to the mean, elementwise.
        bound: how many of them no element exceeds.
        seen: what part of the exact gradient an error along it must be for this to see it.
    """
    assert draws.shape[1:] == exact.shape
    assert bool(torch.isfinite(draws).all())
    floor = 1e-5 * exact.abs().max()
    error = (draws.mean(0) - exact).abs()
    assert bool((error <= bound * (deviation / math.sqrt(DRAWS) + rounding) + floor).all())
    error = (draws[0] - exact).abs()
    assert bool((error <= bound * (deviation + rounding) + floor).all())
    # Along the exact gradient errors of single elements cancel, and a wrong factor shows.
    size = exact.square().sum()
    along = ((draws - exact) * exact).flatten(1).sum(1) / size
    slack = along.std() / math.sqrt(DRAWS) + (rounding * exact).norm() / size
    slack = float(student(1) * slack) + 1e-5
    assert float(along.mean().abs()) <= slack < seen


@pytest.mark.parametrize(
    ("kind", "dtype", "block", "fallback"),
    [
        *((Int8Linear, torch.float32, block, None) for block in BLOCKS),
        (Int8Linear, torch.bfloat16, 128, None),
        (Int8Linear, torch.bfloat16, 32, None),
        (Int8Conv1D, torch.float32, 64, None),
        (Int8Linear, torch.float32, 32, 0.5),
        (Int8Conv1D, torch.bfloat16, 32, 0.5),
    ],
)
def test_linear(device, block, dtype, kind, fallback):
    """With fallback in the block of an outlier, whose values both planes of codes hold."""
    torch.manual_seed(0)
    rows, inputs, outputs = 75, 70, 140
    x = leaf(rows, inputs, device=device, dtype=dtype)
    linear = Int8Linear(inputs, outputs, block=block, device=device, fallback=fallback)
    if kind is Int8Conv1D:
        weight = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        linear = Int8Conv1D(weight, linear.bias, block, fallback)
    if fallback is not None:
        linear.load_state_dict({**linear.state_dict(), "fallback.threshold": torch.tensor([20.0])})
        with torch.no_grad():
            x[40, 50] = 30.0
    g = torch.randn(rows, outputs, device=device).to(dtype)
    leaves = (x, linear.weight, linear.bias)
    wide = double(*leaves)
    matrix = wide[1] if kind is Int8Linear else wide[1].t()
    wq = quantised(matrix, block)
    xq = quantised(wide[0], block)
    if fallback is not None:
        q, scale, r, r_scale = fallback_quantize(x.detach(), block, linear.fallback.threshold)
        assert r_scale.nonzero().tolist() == [[1, 1]]
        first, second = values((q, scale), block), values((r, r_scale), block)
        assert bool(((first + second - wide[0]).abs()[32:64, 32:64] < 1e-3).all())
        xq = straight_through(wide[0], first + second)
    y = xq @ wq.t() + wide[2]
    rounding = BF16 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(linear(x).double(), y, rtol=rounding, atol=1e-5)

    exact = torch.autograd.grad(y, wide, g.double())
    draws = drawn(lambda: linear(x), leaves, g)
    variance = half_steps(g.double(), block).square()
    dw = variance.t() @ xq.square()
    variances = (variance @ wq.square(), dw if kind is Int8Linear else dw.t(), variance.sum(0))
    for index, of_one in enumerate(variances):
        cast = torch.zeros_like(of_one)
        if index == 0:  # errors of rounding are uniform: 1/√3 of the greatest
            cast = rounding / math.sqrt(3) * draws[0].abs().mean(0)
        unbiased(draws[index], exact[index], of_one.sqrt(), cast, hoeffding(of_one.numel()))


@pytest.mark.parametrize(("kind", "block"), [(Int8Linear, 32), (Int8Linear, 128), (Int8Conv1D, 64)])
def test_linear_that_keeps_4_bits(device, block, kind):
    """The weight's gradient, of an input with outliers and a mean; all else has INT8's bits."""
    torch.manual_seed(0)
    rows, inputs, outputs = 75, 70, 40
    x = leaf(rows, inputs, device=device)
    with torch.no_grad():
        x[:, 50] *= 30
        x[:, 60:] += 2
    linear = Int8Linear(inputs, outputs, block=block, device=device)
    other = Int8Linear(inputs, outputs, block=block, device=device, kept=4)
    if kind is Int8Conv1D:
        weight = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        linear, other = (Int8Conv1D(weight, linear.bias, block, kept=kept) for kept in (8, 4))
    other.load_state_dict(linear.state_dict())
    g = torch.randn(rows, outputs, device=device)
    found = []
    for layer in (linear, other):
        torch.manual_seed(1)
        y = layer(x)
        found.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), g)))
    for index, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert torch.equal(ours, theirs) == (index != 2)

    wide = double(x, linear.weight)
    y = quantised(wide[0], block) @ (wide[1] if kind is Int8Conv1D else wide[1].t())
    (exact,) = torch.autograd.grad(y, wide[1:], g.double())
    (draws,) = drawn(lambda: other(x), [other.weight], g, anew=True)
    unbiased(draws, exact, draws.std(0), torch.zeros_like(exact), student(exact.numel()))


@pytest.mark.parametrize("block", BLOCKS)
def test_layernorm(device, block):
    torch.manual_seed(0)
    rows, width = 70, 100
    norm = Int8LayerNorm(width, block=block, device=device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
        x = (torch.randn(rows, width, device=device) * 2 + 0.5).requires_grad_()
    g = torch.randn(rows, width, device=device)
    leaves = (x, norm.weight, norm.bias)
    wide = double(*leaves)
    xq = quantised(wide[0], block)
    y = functional.layer_norm(xq, [width], wide[1], wide[2], norm.eps)
    nearest(y, quantize(norm(x).detach(), block), block)

    exact = torch.autograd.grad(y, wide, g.double())
    draws = drawn(lambda: norm(x), leaves, g)
    variance = half_steps(g.double(), block).square()
    deviation, mean = torch.std_mean(xq.detach(), 1, correction=0, keepdim=True)
    rstd = (deviation.square() + norm.eps).rsqrt()
    unit = (xq.detach() - mean) * rstd
    # dx = rstd·(I − 1/n − x̂x̂ᵀ/n)·diag(weight)·g, rounded once more.
    jacobian = torch.eye(width, device=device) - 1 / width
    jacobian = jacobian - unit[:, :, None] * unit[:, None] / width
    jacobian = rstd[:, :, None] * jacobian * wide[1].detach()
    of_dx = torch.einsum("rij,rj->ri", jacobian.square(), variance)
    of_dx += half_steps_of(draws[0], block).square()
    variances = (of_dx, (variance * unit.square()).sum(0), variance.sum(0))
    for found, expected, of_one in zip(draws, exact, variances, strict=True):
        zero = torch.zeros_like(of_one)
        unbiased(found, expected, of_one.sqrt(), zero, hoeffding(of_one.numel()))


@pytest.mark.parametrize(("block", "approximate"), [(32, "tanh"), (64, "none"), (128, "tanh")])
def test_gelu(device, block, approximate):
    torch.manual_seed(0)
    gelu = Int8GELU(approximate, block=block)
    x, g = leaf(70, 100, device=device), torch.randn(70, 100, device=device)
    (wide,) = double(x)
    xq = quantised(wide, block)
    y = functional.gelu(xq, approximate=approximate)
    nearest(y, quantize(gelu(x).detach(), block), block)

    (exact,) = torch.autograd.grad(y, wide, g.double(), retain_graph=True)
    (draws,) = drawn(lambda: gelu(x), [x], g)
    (slope,) = torch.autograd.grad(y, wide, torch.ones_like(y))
    variance = (slope * half_steps(g.double(), block)).square()
    variance += half_steps_of(draws, block).square()
    unbiased(draws, exact, variance.sqrt(), torch.zeros_like(exact), hoeffding(exact.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(device, dtype):
    """Nothing is drawn here: within the rounding of logits, of their gradient and of results."""
    torch.manual_seed(0)
    rows, width, vocabulary, valid = 70, 100, 192, 150
    x = leaf(rows, width, device=device, dtype=dtype)
    weight = leaf(vocabulary, width, device=device)
    targets = torch.randint(valid, (rows,), device=device)
    targets[::7] = -100
    g = torch.rand(rows, device=device)
    loss = linear_cross_entropy(x, weight, targets, valid)
    wide = double(x, weight)
    w = straight_through(wide[1], wide[1].to(dtype))
    logits = wide[0] @ w.t()
    rounded = straight_through(logits, (x @ weight.to(dtype).t()).detach())
    expected = functional.cross_entropy(rounded[:, :valid], targets, reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((loss[::7] == 0).all())

    found = torch.autograd.grad(loss, (x, weight), g)
    *exact, dlogits = torch.autograd.grad(expected, (*wide, rounded), g.double())
    unit = BF16 if dtype == torch.bfloat16 else 1e-6
    bounds = (dlogits.abs() @ w.abs(), dlogits.t().abs() @ wide[0].abs())
    for ours, theirs, bound in zip(found, exact, bounds, strict=True):
        # Once where the gradient of logits is rounded, once where the result is.
        assert bool(((ours.double() - theirs).abs() <= 2 * unit * bound + 1e-7).all())
    assert bool((found[1][valid:] == 0).all())


class _Rounded(torch.autograd.Function):
    """The identity; its gradient moves by as much as rounding to bf16 may move it, by random signs.

    With a generator of None it does not move.
    """

    @staticmethod
    def forward(ctx, x, noise):
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        generator = ctx.noise.generator
        if generator is None:
            return g, None
        signs = torch.randint(2, g.shape, generator=generator).to(g.device) * 2 - 1
        return g * (1 + BF16 * signs), None


def normalised(codes, statistics, norm, parameters, out_block):
    """LayerNorm of a stream's codes about given statistics, which depend on what the codes hold."""
    x, own = codes
    mean, rstd = (t.double()[:, None] for t in statistics)
    weight, bias = parameters
    centre = straight_through(x.mean(1, keepdim=True), mean)
    variance = (x - mean).square().mean(1, keepdim=True)
    # The given 1/σ, with the derivative of (variance + eps)^-½ there.
    spread_ = rstd * (1 - 0.5 * rstd.square() * (variance - variance.detach()))
    y = (x - centre) * spread_ * weight + bias
    found, *_ = ops.int8_layernorm(
        own,
        norm.weight.detach(),
        norm.bias.detach(),
        mean=statistics[0],
        rstd=statistics[1],
        eps=norm.eps,
        out_block=out_block,
    )
    return nearest(y, found, out_block), found


def kernel_noise(a, b, found, block, out):
    """What the kernel that makes a product may itself add to an element: telescoped sums do."""
    op, (m, n) = registry.get("gemm"), found.shape
    problem = op.Problem(m, n, a.q.shape[1], block=block, out=out, bias=True)
    kernel, config = choose(op, problem, Device.of(found))
    inputs = dict(zip(("a", "a_scale", "b", "b_scale"), (*a.tensors, *b.tensors), strict=True))
    noise = kernel.noise(problem, config, inputs)
    return 0.0 if noise is None else spread(noise, block, m, n)


def multiplied(codes, linears, parameters, out_block=None):
    """The product of a branch and layers beside one another, each with a bias or none with one.

    Args:
        codes: (float64 graph, `Quantized`).
        parameters: weight and bias of each layer, in the graph.
        out_block: the block of the product's codes; without one it is bf16.
    """
    x, own = codes
    block, out = own.block, "bf16" if out_block is None else "int8"
    weights, biases = zip(*parameters, strict=True)
    w = block_module.without_transpose(block_module.joined([linear.codes() for linear in linears]))
    y = x @ nearest(torch.cat(weights), w, block).t()
    bias = None
    if biases[0] is not None:
        y = y + torch.cat(biases)
        bias = torch.cat([linear.bias.detach() for linear in linears])
    found = ops.int8_gemm(own, w, out=out, bias=bias, out_block=out_block)
    if out == "int8":
        return nearest(y, found, out_block), found
    slack = BF16 * y.abs() + 1e-5 + kernel_noise(own, w, found, block, out)
    assert bool(((found.double() - y).abs() <= slack).all())
    return straight_through(y, found), found


def dropped(codes, keep, p):
    """A branch's output after dropout with a known mask."""
    y, own = codes
    if keep is None:
        return codes
    kept = torch.full_like(own.scale, 1 - drop_threshold(p) / 65536)
    own = own._replace(q=own.q * keep, scale=own.scale / kept)
    return straight_through(y * keep / kept[0, 0], values(own, own.block)), own


def attention(y, found, module, batch, keep, noise):
    """Causal attention; `found` is nn's tokens × 3·width, bf16, and `keep` the weights' mask."""
    tokens = found.shape[0] // batch
    shape = (batch, tokens, 3, module.heads, -1)
    query, key, value = _Rounded.apply(y, noise).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
    hidden = torch.ones(tokens, tokens, device=y.device).triu(1).bool()
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    weights = _Rounded.apply(scores, noise).masked_fill(hidden, -math.inf).softmax(-1)
    weights = _Rounded.apply(weights, noise)
    own = None
    if keep is None:
        parts = found.view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        own = functional.scaled_dot_product_attention(*parts, is_causal=True)
    else:
        weights = weights * keep / (1 - module.dropout)
    out = (weights @ value).transpose(1, 2).reshape(-1, module.width)
    if own is None:
        return out, out.detach().to(torch.bfloat16)
    own = own.transpose(1, 2).reshape(-1, module.width)
    # Weights too are bf16 within it.
    torch.testing.assert_close(own.double(), out, rtol=4 * BF16, atol=4 * BF16 * 0.25)
    return straight_through(out, own), own


def added(x, codes, total):
    """The stream after an addition, given nn's bf16 sum."""
    out = x + codes[0]
    torch.testing.assert_close(total.double(), out, rtol=BF16, atol=1e-6)
    return straight_through(out, total)


def reference(module, x, own, batch, parameters, noise, keep=(None, None, None)):
    """The float64 graph of a block.

    Args:
        x: float64 stream; own: the `Stream` that it is in nn.
        keep: masks of attention's weights and of the two branches.

    Returns:
        The stream after it, as both.
    """
    block, flow = module.block, module.flow
    eps, dropout = module.norm1.eps, module.dropout

    def of(name):
        return parameters[f"{name}.weight"], parameters[f"{name}.bias"]

    x = _Rounded.apply(x, noise)
    codes = (nearest(x, own.codes, flow), own.codes)
    statistics = (own.mean, own.rstd)
    if own.mean is None:
        wide = values(own.codes, flow)
        variance, mean = torch.var_mean(wide, 1, correction=0)
        statistics = (mean.float(), (variance + eps).rsqrt().float())
    h = normalised(codes, statistics, module.norm1, of("norm1"), block)
    y, found = multiplied(h, [module.qkv], [of("qkv")])
    a, attended = attention(y, found, module, batch, keep[0], noise)
    found = ops.int8_quantize(attended, block=block)
    codes = (straight_through(_Rounded.apply(a, noise), values(found, block)), found)
    y = multiplied(codes, [module.projection], [of("projection")], flow)
    y = dropped(y, keep[1], dropout)
    total, copy, mean, rstd = ops.int8_add(own.x.detach(), y[1], eps=eps)
    x = _Rounded.apply(added(x, y, total), noise)
    codes = (nearest(x, copy, flow), copy)
    h = normalised(codes, (mean, rstd), module.norm2, of("norm2"), block)
    f = multiplied(h, [module.expand], [of("expand")], flow)
    found = ops.int8_gelu(f[1], out_block=block)
    u = (nearest(functional.gelu(f[0], approximate="tanh"), found, block), found)
    y = multiplied(u, [module.contract], [of("contract")], flow)
    y = dropped(y, keep[2], dropout)
    out = Stream(*ops.int8_add(total, y[1], eps=eps))
    return added(x, y, out.x), out


def root_normalised(codes, norm, weight, out_block):
    """RMSNorm of a stream's codes."""
    x, own = codes
    found, rstd = ops.int8_rmsnorm(own, norm.weight.detach(), eps=norm.eps, out_block=out_block)
    rstd = rstd.double()[:, None]
    square = x.square().mean(1, keepdim=True)
    torch.testing.assert_close((square + norm.eps).rsqrt(), rstd, rtol=1e-5, atol=0)
    y = x * rstd * (1 - 0.5 * rstd.square() * (square - square.detach())) * weight
    return nearest(y, found, out_block), found


def turned(x, module):
    """Each pair of a head, turned by its position's angle; batch×length×heads×head."""
    half = x.shape[-1] // 2
    pairs = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * module.theta**-pairs
    number = torch.complex(*x.split(half, dim=-1)) * torch.exp(1j * angles)[:, None]
    return torch.cat([number.real, number.imag], dim=-1)


def grouped_attention(y, found, module, batch, noise):
    """Causal attention of turned queries and keys; `found` is nn's product, bf16."""
    head = module.width // module.heads
    shape = (batch, y.shape[0] // batch, -1, head)
    sizes = [layer.out_features for layer in (module.query, module.key, module.value)]
    parts = [p.view(shape) for p in _Rounded.apply(y, noise).split(sizes, dim=1)]
    exact = [*(_Rounded.apply(turned(part, module), noise) for part in parts[:2]), parts[2]]
    groups = module.heads // module.kv_heads
    query, key, value = (t.transpose(1, 2) for t in exact)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    tokens = shape[1]
    seen = torch.ones(tokens, tokens, device=y.device).tril()
    seen = (seen if module.window is None else seen.triu(1 - module.window)).bool()
    scores = _Rounded.apply(query @ key.mT / math.sqrt(head), noise)
    weights = _Rounded.apply(scores.masked_fill(~seen, -math.inf).softmax(-1), noise)
    out = (weights @ value).transpose(1, 2).reshape(-1, module.width)
    angles = rotary_tables(shape[1], batch, head, module.theta, found.device)
    query, key, value = found.split(sizes, dim=1)
    own_parts = *(ops.rotary_embedding(part, *angles) for part in (query, key)), value
    own = module._attention(own_parts, batch, 0.0).reshape(-1, module.width)
    torch.testing.assert_close(own.double(), out, rtol=4 * BF16, atol=4 * BF16 * 0.25)
    return straight_through(out, own), own


def llama_reference(module, x, own, batch, parameters, noise, keep=(None, None, None)):
    """The float64 graph of a Llama block, as `reference`."""
    block, flow = module.block, module.flow

    def of(*names):
        return [(parameters[f"{name}.weight"], parameters.get(f"{name}.bias")) for name in names]

    x = _Rounded.apply(x, noise)
    codes = (nearest(x, own.codes, flow), own.codes)
    h = root_normalised(codes, module.norm1, parameters["norm1.weight"], block)
    names = "query", "key", "value"
    y, found = multiplied(h, [getattr(module, name) for name in names], of(*names))
    a, attended = grouped_attention(y, found, module, batch, noise)
    found = ops.int8_quantize(attended, block=block)
    codes = (straight_through(_Rounded.apply(a, noise), values(found, block)), found)
    y = multiplied(codes, [module.projection], of("projection"), flow)
    total, copy, *_ = ops.int8_add(own.x.detach(), y[1])
    x = _Rounded.apply(added(x, y, total), noise)
    h = root_normalised(
        (nearest(x, copy, flow), copy), module.norm2, parameters["norm2.weight"], block
    )
    gate = multiplied(h, [module.gate], of("gate"), flow)
    up = multiplied(h, [module.up], of("up"), flow)
    found = ops.int8_swiglu(gate[1], up[1], out_block=block)
    u = (nearest(functional.silu(gate[0]) * up[0], found, block), found)
    y = multiplied(u, [module.down], of("down"), flow)
    out = Stream(*ops.int8_add(total, y[1]))
    return added(x, y, out.x), out


BATCH, TOKENS, WIDTH = 2, 24, 72


def blocks_of(count, block, flow, device, dropout=0.0, kept=8):
    """Blocks whose every parameter matters."""
    made = torch.nn.ModuleList(
        Int8Block(WIDTH, 2, dropout, block, flow, device, kept) for _ in range(count)
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5) if name.endswith("weight") else p.normal_(std=0.3)
    return made


def check_blocks(
    modules, device, keep=(None, None, None), reference=reference, seen=0.01, anew=False
):
    """Forward to the bit, and gradients over 200 draws, of a chain of blocks."""
    flow, width = modules[0].flow, modules[0].width
    x = leaf(BATCH * TOKENS, width, device=device, dtype=torch.bfloat16)
    g = torch.randn(BATCH * TOKENS, width, device=device).to(torch.bfloat16)
    parameters = dict(modules.named_parameters())

    def forward():
        stream = Stream.of(x, flow)
        for module in modules:
            stream = module(stream, BATCH)
        return stream.x

    (wide,) = double(x)
    doubles = dict(zip(parameters, double(*parameters.values()), strict=True))
    noise = SimpleNamespace(generator=None)
    y, own = wide, Stream.of(x, flow)
    for index, module in enumerate(modules):
        of_it = {k.partition(".")[2]: v for k, v in doubles.items() if k.startswith(f"{index}.")}
        y, own = reference(module, y, own, BATCH, of_it, noise, keep)
    torch.manual_seed(0)
    agreed = forward().double()
    if keep[0] is None:
        assert torch.equal(agreed, own.x.double())

    leaves = [wide, *doubles.values()]
    exact = torch.autograd.grad(y, leaves, g.double(), retain_graph=True)
    noise.generator = torch.Generator().manual_seed(0)
    moved = [torch.zeros_like(t) for t in exact]
    for _ in range(8):
        found = torch.autograd.grad(y, leaves, g.double(), retain_graph=True)
        for total, one, plain in zip(moved, found, exact, strict=True):
            total += (one - plain).square() / 8
    draws = drawn(forward, [x, *parameters.values()], g, anew)
    for found, expected, square in zip(draws, exact, moved, strict=True):
        # Rounding errors are uniform: 1/√3 of the greatest, which the noise has.
        rounding = (square.clamp(min=square.mean()) / 3).sqrt()
        bound = student(expected.numel())
        unbiased(found, expected, found.std(0), rounding, bound, seen)


@pytest.mark.parametrize(("block", "flow", "kept"), [(32, 32, 8), (128, 32, 8), (128, 32, 4)])
def test_block(device, block, flow, kept):
    torch.manual_seed(0)
    check_blocks(blocks_of(1, block, flow, device, kept=kept), device, anew=kept == 4)


@pytest.mark.parametrize(("block", "flow"), [(128, 128), (64, 32)])
def test_two_blocks(device, block, flow):
    """The second's gradient comes with codes, which the first takes."""
    torch.manual_seed(0)
    check_blocks(blocks_of(2, block, flow, device), device)


@pytest.mark.parametrize(
    ("block", "flow", "sizes", "options"),
    [
        (32, 32, (64, 2, 1, 96), {"bias": True}),
        (128, 32, (128, 2, 2, 128), {}),
        (32, 128, (64, 2, 1, 128), {"window": 5}),
    ],
)
def test_llama_block(device, block, flow, sizes, options):
    """Of two: the second's gradient comes with codes, which the first takes."""
    torch.manual_seed(0)
    made = torch.nn.ModuleList(
        Int8LlamaBlock(*sizes, block=block, flow=flow, device=device, **options) for _ in range(2)
    )
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    # A bias of 32 keys has a gradient so small beside its noise.
    check_blocks(made, device, reference=llama_reference, seen=0.02)


DROPOUT = 0.25


@pytest.fixture
def masks(monkeypatch):
    """Fix a block's masks whatever the draw; gives them, on the CPU, where attention's is known."""
    keys = torch.tensor([123, 456])
    generator = torch.Generator()

    def draw(count, device):
        generator.manual_seed(torch.initial_seed())
        seeds = torch.randint(2**62, (count,), generator=generator)
        first = block_module._ENTER_SEEDS
        seeds[first + block_module._MASK0], seeds[first + block_module._MASK2] = keys
        torch.manual_seed(7)  # attention draws next
        return seeds

    monkeypatch.setattr(products, "draw", draw)
    torch.manual_seed(7)
    weights = functional.dropout(torch.ones(BATCH, 2, TOKENS, TOKENS), DROPOUT) > 0
    threshold = drop_threshold(DROPOUT)
    branches = (random_u16(key, BATCH * TOKENS, WIDTH, STREAM_DROPOUT) >= threshold for key in keys)
    return weights, *branches


def test_block_with_dropout(masks):
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    check_blocks(blocks_of(1, 64, 32, cpu, DROPOUT), cpu, masks, anew=True)


@pytest.mark.parametrize("branch", ["projection", "contract"])
def test_dropout_keeps_the_expectation(device, branch):
    """Over masks, of what is linear in them: one branch's output, with the other branch zero."""
    torch.manual_seed(0)
    (module,) = blocks_of(1, 32, 32, device, DROPOUT)
    other = module.contract if branch == "projection" else module.projection
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    stream = Stream.of(torch.zeros(BATCH * TOKENS, WIDTH, device=device).bfloat16(), 32)
    q, scale = stream.codes.tensors
    codes = {"q": torch.randint_like(q, -127, 128), "scale": torch.full_like(scale, 0.02)}
    stream = stream._replace(codes=stream.codes._replace(**codes))
    expected = module.eval()(stream, BATCH).x.double()
    module.train()
    with torch.no_grad():
        draws = torch.stack([module(stream, BATCH).x for _ in range(DRAWS)]).double()
    # Rounding to codes and to bf16 differs with the mask.
    step = 2 * spread(block_amax(expected.float(), 32), 32, *expected.shape) / 127
    bound = student(expected.numel()) * draws.std(0) / math.sqrt(DRAWS) + step
    assert bool(((draws.mean(0) - expected).abs() <= bound).all())
    zeros = (draws == 0).double().mean()
    if branch == "contract":
        assert abs(float(zeros) - DROPOUT) < 0.02
