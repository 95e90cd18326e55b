"""Empty tensors through the functions and layers: what torch does, traced and with gradients."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from jetfire import nn
from jetfire import ops as int8
from jetfire.core import profiles, registry
from jetfire.core.errors import UsageError
from jetfire.core.tensors import blocks_of
from jetfire.ops import Quantized4
from jetfire.reference.dequantize import dequantize

EMPTY = [(0, 40), (40, 0), (0, 0)]
LAYOUTS = ("q", "qt", "both")


@pytest.fixture(params=["real", "fake"])
def run(request):
    """Calls a function, as it is or with fake tensors, of which results then have the sizes."""
    if request.param == "real":
        return lambda function, *args, **options: function(*args, **options)

    def traced(function, *args, **options):
        real = function(*args, **options)
        with FakeTensorMode() as mode:
            fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, options))
            found = function(*fake[0], **fake[1])
        for mine, theirs in zip(tree_leaves(found), tree_leaves(real), strict=True):
            assert type(theirs) in (torch.Tensor, type(mine))  # a block, or None, beside tensors
            if isinstance(theirs, torch.Tensor):
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        return real

    return traced


def seed(device):
    return torch.tensor([5], device=device)


def codes(m, n, device, block=32):
    """A quantised m×n matrix."""
    return int8.int8_quantize(torch.randn(m, n, device=device), block=block)


def shapes_of(m, n, layout, block=32):
    found = [(m, n), blocks_of(m, n, block)] if layout != "qt" else []
    return found + ([(n, m), blocks_of(n, m, block)] if layout != "q" else [])


@pytest.mark.parametrize(("m", "n"), EMPTY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_elementwise_functions(device, run, m, n, layout):
    x = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    a = codes(m, n, device)
    options = {"layout": layout, "rounding": "stochastic", "seed": seed(device)}
    for out in (
        run(int8.int8_quantize, x, **options),
        run(int8.int8_gelu, a, **options),
        run(int8.int8_gelu_backward, a, a, **options),
        run(int8.int8_swiglu, a, a, **options),
        *run(int8.int8_swiglu_backward, a, a, a, **options),
        run(int8.int8_add_backward, x, a, **options)[1],
        run(int8.int8_add, x, a, **options)[1],
        run(int8.int8_dropout, a, seed(device), layout=layout),
        run(int8.int8_dropout_backward, a, seed(device), layout=layout),
    ):
        assert [tuple(tensor.shape) for tensor in out.tensors] == shapes_of(m, n, layout)
    wide = run(int8.int8_quantize_qkv, x, x, x, **options)
    assert [tuple(tensor.shape) for tensor in wide.tensors] == shapes_of(m, 3 * n, layout)
    assert run(int8.int8_dequantize, a, out="fp16").shape == (m, n)
    transposed = run(int8.int8_transpose, a).tensors
    assert [tuple(tensor.shape) for tensor in transposed] == [(n, m), blocks_of(n, m, 32)]


@pytest.mark.parametrize(("m", "n"), EMPTY)
def test_sums_over_nothing(device, run, m, n):
    """Zeros; but the statistics of rows without an element are NaN, as torch.var_mean's."""
    x = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    a = codes(m, n, device)
    total, _, mean, rstd = run(int8.int8_add, x, a)
    weight = torch.randn(n, device=device)
    _, row_mean, row_rstd = run(int8.int8_layernorm, a, weight, weight)
    _, rms = run(int8.int8_rmsnorm, a, weight)
    assert total.shape == (m, n)
    for statistic in (mean, rstd, row_mean, row_rstd, rms):
        assert statistic.shape == (m,)
        assert torch.isnan(statistic).all()
    dx, dweight, dbias = run(
        int8.int8_layernorm_backward, a, a, weight, mean, rstd, seed=seed(device)
    )
    for total in (dweight, dbias, run(int8.int8_column_sum, int8.int8_transpose(a).t)):
        assert torch.equal(total, torch.zeros(n, device=device))
    assert (dx.q.shape, dx.scale.shape) == ((m, n), blocks_of(m, n, 32))
    total, copy, *sums = run(
        int8.int8_layernorm_add_backward, a, a, weight, mean, rstd, x, seed=seed(device)
    )
    assert total.shape == copy.q.shape == (m, n)
    for total in sums:
        assert torch.equal(total, torch.zeros(n, device=device))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 40, 33), (40, 0, 33), (40, 33, 0), (0, 0, 0)])
@pytest.mark.parametrize("biased", [False, True])
def test_gemm(device, run, m, n, k, biased):
    a, b = codes(m, k, device), codes(n, k, device)
    bias = torch.randn(n, device=device) if biased else None
    expected = bias.expand(m, n) if biased else torch.zeros(m, n, device=device)
    for out, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        c = run(int8.int8_gemm, a, b, out=out, bias=bias)
        assert torch.equal(c, expected.to(dtype))
        held = torch.randn(m, n, device=device).to(dtype)
        c = held.clone()
        run(int8.int8_gemm, a, b, out=out, bias=bias, c=c)
        assert torch.equal(c, (held.float() + expected).to(dtype))
    for layout in LAYOUTS:
        found = run(
            int8.int8_gemm,
            a,
            b,
            out="int8",
            bias=bias,
            layout=layout,
            rounding="stochastic",
            seed=seed(device),
        )
        assert [tuple(tensor.shape) for tensor in found.tensors] == shapes_of(m, n, layout)
        q, scale = found.tensors[:2]
        value = dequantize(q, scale, 32)
        value = value.t() if layout == "qt" else value
        assert bool(((value - expected).abs() <= scale.amax() if m * n else expected == 0).all())


def test_gradients(device):
    """Of a bias, of a stream and of logits, as torch has them of nothing."""
    a, b = codes(0, 40, device), codes(24, 40, device)
    bias = torch.randn(24, device=device, requires_grad=True)
    int8.int8_gemm(a, b, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    x = torch.empty(0, 40, device=device, dtype=torch.bfloat16, requires_grad=True)
    int8.int8_add(x, a)[0].sum().backward()
    assert x.grad.shape == x.shape
    logits = torch.empty(0, 50, device=device, requires_grad=True)
    loss, lse = int8.cross_entropy(logits, torch.empty(0, dtype=torch.int64, device=device))
    assert (loss.shape, lse.shape) == ((0,), (0,))
    assert torch.isnan(loss.mean())
    loss.sum().backward()
    assert logits.grad.shape == logits.shape


def test_cross_entropy_of_rows_without_a_column_is_refused(device):
    with pytest.raises(UsageError, match="expected at least one column"):
        int8.cross_entropy(torch.empty(3, 0, device=device), torch.zeros(3, device=device).long())


@pytest.mark.parametrize(("m", "n"), EMPTY)
def test_adamw(device, run, m, n):
    state = [torch.randn(m, n, device=device) for _ in range(4)]
    one = torch.ones((), device=device)
    found = run(int8.int8_adamw, *state, one, one)
    assert [tuple(tensor.shape) for tensor in found.tensors] == shapes_of(m, n, "both")
    assert run(int8.int8_adamw, *state, one, one, layout="none") is None


@pytest.mark.parametrize(("m", "n"), EMPTY)
def test_adamw8(device, run, m, n):
    codes = torch.zeros(m, n, dtype=torch.int8, device=device)
    scales = torch.zeros(m, -(-n // 128), device=device)
    moments = codes, scales, codes.clone(), scales.clone()
    param, one = torch.randn(m, n, device=device), torch.ones((), device=device)
    found = run(int8.int8_adamw8, param, param.clone(), *moments, one, one)
    assert [tuple(tensor.shape) for tensor in found.tensors] == shapes_of(m, n, "both")


@pytest.mark.parametrize(("m", "n", "k"), [(40, 33, 0), (40, 0, 34), (0, 33, 0), (0, 0, 0)])
def test_add_rows(device, run, m, n, k):
    table, ids = torch.randn(m, n, device=device), torch.zeros(k, device=device).long()
    before = table.clone()
    found = run(int8.add_rows, table, ids, torch.randn(k, n, device=device))
    assert found is table
    assert torch.equal(table, before)


@pytest.mark.parametrize(("m", "n"), EMPTY)
def test_int4_quantiser(device, run, m, n):
    x = torch.randn(m, n, device=device)
    step = torch.full((1,), 0.5, device=device)
    q = run(int8.int4_quantize, x, step, group=4, layout="both")
    assert (q.packed.shape, q.wide.shape, q.squares.tolist()) == ((m, n // 2), (m, n), [0] * m)
    assert torch.equal(q.scale, step)
    assert torch.isnan(int8.int4_quantize(x, 0 * step, group=4).scale)
    for codes in (q._replace(wide=None), q._replace(packed=None)):
        assert run(int8.int4_quantize_backward, x, q=codes, group=4).shape == (m, n)
    dx, dstep = run(int8.int4_quantize_backward, x, x=x, step=step, group=4)
    assert (dx.shape, dstep.tolist()) == ((m, n), [0.0] * m)


@pytest.mark.parametrize(("m", "n"), EMPTY)
def test_int4_gradients(device, run, m, n):
    x = torch.randn(m, n, device=device)
    split = run(int8.int4_bit_split, x, seed=seed(device))
    assert split.packed.shape == (2 * m, n // 2)
    assert (split.scale.tolist(), split.squares.tolist()) == ([0.0], [0] * 2 * m)
    drawn = run(int8.int4_sample_rows, split.squares, seed=seed(device))
    assert drawn.counts.tolist() == [0, 0]
    assert (len(drawn.weight), drawn.slots.shape) == (len(drawn.rows), (m, 2))
    of_x = split.squares[:m]
    repeat = run(int8.int4_sample_rows, split.squares, x_squares=of_x, seed=seed(device)).repeat
    assert repeat.dtype == torch.int8
    seeds = torch.tensor([1, 2], device=device)
    of_both = run(int8.int4_sample_rows_both, split.squares, x_squares=of_x, seed=seeds)
    assert [of.counts.tolist() for of in of_both] == [[0, 0]] * 2
    assert run(int8.int4_gather_rows, split, wide=True).wide.shape == (2 * m, n)
    chosen = {"rows": drawn.rows, "counts": drawn.counts, "transpose": True}
    assert run(int8.int4_gather_rows, split, **chosen).wide.shape == (n, len(drawn.rows))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 40, 34), (40, 0, 34), (40, 33, 0), (0, 0, 0)])
def test_int4_gemm(device, run, m, n, k):
    one, bias = torch.ones(1, device=device), torch.randn(n, device=device)

    def codes4(rows, packed):
        codes = torch.ones(rows, k // 2 if packed else k, dtype=torch.int8, device=device)
        return Quantized4(codes, None, one) if packed else Quantized4(None, codes, one)

    c = run(int8.int4_gemm, codes4(m, True), codes4(n, True), bias=bias, out="fp32")
    assert torch.equal(c, bias.expand(m, n))
    a, b = codes4(m, False), codes4(n, False)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    weight = torch.ones(m, device=device)
    for options in ({"counts": counts}, {"counts": counts, "weight": weight}):
        assert run(int8.int4_gemm, a, b, **options).shape == (m, n)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dynamic):
    """One graph for a batch and another, or the same of symbolic sizes, for an empty one."""

    def layer(x, b, bias):
        y = int8.int8_gemm(int8.int8_quantize(x), b, bias=bias, out="int8")
        return int8.int8_dequantize(int8.int8_gelu(y))

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    b = codes(24, 40, device)
    bias = torch.randn(24, device=device)
    for m in (8, 0, 16):
        x = torch.randn(m, 40, device=device)
        assert torch.equal(compiled(x, b, bias), layer(x, b, bias))


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)])
def test_layers(device, shape):
    """An empty batch: empty results and input gradients, zeros for the parameters."""
    linear = nn.Int8Linear(40, 24).to(device)
    int4 = nn.Int4Linear(40, 24, int4=nn.Int4(group=8), device=device)
    for layer in (linear, int4, nn.Int8GELU(), nn.Int8LayerNorm(40).to(device)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape[:-1], 24 if layer in (linear, int4) else 40)
        y.sum().backward()
        assert x.grad.shape == shape
        for parameter in layer.parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert torch.isfinite(int4(torch.randn(8, 40, device=device))).all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("recipe", ["int8", "int8-fallback", "int8-kept4", "int4-hq"])
@pytest.mark.parametrize("shape", [(3,), (2, 0), ()])
def test_layers_without_inputs_or_outputs(device, inputs, outputs, recipe, shape):
    """They do what torch's do."""
    theirs = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).to(device)
    ours = copy.deepcopy(theirs)
    nn.convert(ours, recipe)
    x, like = (torch.zeros(*shape, inputs, device=device, requires_grad=True) for _ in range(2))
    y, expected = ours(x), theirs(like)
    for of in (y, expected):
        of.sum().backward()
    found = y, x.grad, *(parameter.grad for parameter in ours.parameters())
    wanted = expected, like.grad, *(parameter.grad for parameter in theirs.parameters())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), expected)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 5), (5, 0), (0, 0)])
def test_frozen_layers_without_inputs_or_outputs(device, inputs, outputs):
    model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).to(device)
    x = torch.zeros(3, inputs, device=device, requires_grad=True)
    expected = model(x)
    nn.convert(model, frozen=True)
    y = model(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_inputs_or_outputs_are_not_watched():
    sizes = (8, 0), (0, 8), (8, 8)
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    nn.convert(model)
    with nn.watch(model) as seen:
        model(torch.randn(3, 8)).sum().backward()
    assert list(seen.weight) == list(seen.input) == list(seen.gradient) == ["2"]


def test_nothing_is_tuned_or_planned(device):
    from jetfire.core import calls

    profiles.forget()
    int8.int8_quantize(torch.empty(0, 8, device=device))
    assert calls.planned() == []


def test_what_is_not_empty_still_needs_sizes():
    with pytest.raises(UsageError, match="m=0: expected an integer of at least 1"):
        registry.get("quantize").Problem(0, 8)
