"""The operators `torch.ops.jetfire.*`: opcheck, torch.compile, gradients, and what they refuse."""

import itertools
import shutil
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from jetfire import ops as int8
from jetfire.core import calls, profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose
from jetfire.reference.dequantize import dequantize

SIZES = {"m": 40, "n": 72, "k": 33}
# Float inputs that a model may want gradients of; scales and statistics come from operators.
LEAVES = ("x", "dsum", "weight", "bias", "logits")
# Those of INT4, which test_int4_library has.
INT4 = (
    "bit_split",
    "gather_rows",
    "hadamard_gemm",
    "hadamard_quantize",
    "int4_gemm",
    "sample_rows",
)


def overloads(name, problem):
    """The operators that do a problem of an op."""
    found = torch.ops.jetfire
    if name == "gemm" and problem.accumulate:
        return [found.gemm_accumulate.default]
    if name == "gemm" and problem.squares:
        return [found.gemm_squares.default]
    if name == "gemm" and problem.out == "int8":
        return [found.gemm_quantized.default]
    if name == "bit_split_codes":
        return [getattr(found.bit_split_codes, "sums" if problem.sums else "default")]
    if getattr(problem, "mode", "fwd") == "bwd":
        overwrites = name == "cross_entropy" or (name == "gelu" and problem.layout == "both")
        others = ("", "_inplace") if overwrites else ("",)
        added = "_add" if getattr(problem, "residual", False) else ""
        return [getattr(found, f"{name}{added}_backward{other}").default for other in others]
    packet = getattr(found, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def problems():
    """Every combination of modes, layouts and roundings, and every dtype, at one ragged size.

    Of two blocks there is one pair.
    """
    found = []
    for name in sorted(set(registry.names()) - set(INT4)):
        kind = registry.get(name).Problem
        hints = get_type_hints(kind)
        blocks = {field: hints.pop(field, None) for field in ("block", "out_block")}
        choices = {
            field: (False, True) if hint is bool else get_args(hint)
            for field, hint in hints.items()
            if hint is bool or get_origin(hint) is Literal
        }
        pairs = [{}, {"block": 128, "out_block": 64}] if blocks["out_block"] else [{}]
        seen = set()
        for pair, *values in itertools.product(pairs, *choices.values()):
            fields = dict(zip(choices, values, strict=True)) | pair
            if pair and fields["layout"] != "both":
                continue
            plain = fields.get("rounding") == "nearest" and fields.get("layout") == "q"
            if "rounding" in fields and fields.get("dtype", "bf16") != "bf16" and not plain:
                continue
            if fields.get("mode") == "bwd" and "stats" in fields:
                fields["stats"] = "given"
            try:
                problem = kind(**{d: SIZES[d] for d in registry.get(name).dims}, **fields)
            except UsageError:
                continue
            if problem not in seen:
                seen.add(problem)
                label = "-".join([name, *map(str, fields.values())])
                found.append(pytest.param(name, problem, id=label))
    return found


def arguments(overload, problem, inputs):
    """The arguments that have an operator do a problem, by their names."""
    return [
        inputs.get(argument.name)
        if "Tensor" in str(argument.type)
        else getattr(problem, argument.name)
        for argument in overload._schema.arguments
    ]


@pytest.mark.parametrize(("name", "problem"), problems())
def test_opcheck(device, name, problem):
    op = registry.get(name)
    inputs = op.inputs(problem, device)
    expected = op.reference(problem, inputs)
    for overload in overloads(name, problem):
        leaves = {
            key: tensor.detach().clone().requires_grad_()
            if key in LEAVES and tensor.is_floating_point()
            else tensor.clone()
            for key, tensor in inputs.items()
        }
        if "logits" in inputs:  # where they are overwritten
            leaves["dlogits"] = inputs["logits"].clone()
        if "dy" in inputs:  # whose codes are overwritten
            leaves = op.poison(problem, op.outputs(problem, inputs)) | leaves
            leaves["q"] = inputs["dy"].clone()
        if name in ("adamw", "adamw8", "quantize"):  # which write codes where they are to be
            leaves = op.poison(problem, op.outputs(problem, inputs)) | leaves
        torch.library.opcheck(overload, arguments(overload, problem, leaves))
        found = overload(*arguments(overload, problem, leaves))
        if found is None:
            written = [a.name for a in overload._schema.arguments if a.is_write]
            found = [leaves[key] for key in written if key in leaves]
        found = [t.detach() for t in ([found] if isinstance(found, torch.Tensor) else found)]
        names = op.outputs(problem, inputs)
        kernel, config = choose(op, problem, Device.of(next(iter(inputs.values()))))
        noise = kernel.noise(problem, config, inputs)
        check = op.check(problem, dict(zip(names, found, strict=True)), expected, noise)
        assert check.ok, check.message


def through_all(x, weight, bias, gamma, beta, seed):
    """A small network through every function, in both directions, by hand."""
    stochastic: Any = {"rounding": "stochastic", "seed": seed}
    w = int8.int8_quantize(weight, layout="both")
    stream, copy, mean, rstd = int8.int8_add(x, int8.int8_quantize(torch.zeros_like(x)))
    h, *_ = int8.int8_layernorm(copy, gamma, beta, mean=mean, rstd=rstd)
    y = int8.int8_gemm(h, w, out="int8", **stochastic)
    d = int8.int8_dropout(int8.int8_gelu(y), seed, layout="both")
    out = int8.int8_gemm(d, w.t, out="fp32", bias=bias)
    loss = (stream.float() * out).sum()
    grad = int8.int8_quantize(out.detach(), **stochastic)
    wide = int8.int8_dropout_backward(int8.int8_gemm(grad, w, out="int8"), seed)
    dy = int8.int8_gelu_backward(y, wide, seed=seed, layout="both")
    total = torch.zeros_like(weight)
    int8.int8_gemm(int8.int8_transpose(dy), int8.int8_transpose(h), out="fp32", c=total)
    dh = int8.int8_gemm(dy, w.t, out="int8")
    dx, dgamma, dbeta = int8.int8_layernorm_backward(copy, dh, gamma, mean, rstd, seed=seed)
    dbias = int8.int8_column_sum(dy)
    targets = torch.arange(x.shape[0], device=x.device) % 60
    nats, lse = int8.cross_entropy(out, targets, valid=60)
    logits = out.detach().clone()
    int8.cross_entropy_backward(logits, targets, lse, nats.detach(), valid=60, inplace=True)
    loss = loss + nats.sum()
    stream_grad, _ = int8.int8_add_backward(stream.detach(), dx, seed=seed)
    return (
        loss,
        total,
        dgamma,
        dbeta,
        dbias,
        logits,
        stream_grad,
        int8.int8_dequantize(d.t),
    )


def operands(device, rows=40, width=64, inner=96):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    x = normal(rows, width).bfloat16().requires_grad_()
    weight = normal(inner, width).requires_grad_()
    bias, gamma, beta = (normal(width).requires_grad_() for _ in range(3))
    return x, weight, bias, gamma, beta, torch.tensor([7], device=device)


def compare(compiled, args):
    """A compiled `through_all` gives what the eager one gives, gradients included."""
    found, expected = compiled(*args), through_all(*args)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    leaves = (args[0], args[2])
    gradients = torch.autograd.grad(found[0], leaves)
    for one, other in zip(gradients, torch.autograd.grad(expected[0], leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_compiles_whole(device):
    torch._dynamo.reset()
    compare(torch.compile(through_all, fullgraph=True, backend="aot_eager"), operands(device))


def test_compiles_once_for_any_number_of_rows(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(through_all, fullgraph=True, backend=counter)
    for rows in (40, 70, 96):
        args = operands(device, rows)
        torch._dynamo.mark_dynamic(args[0], 0)
        compare(compiled, args)
    assert counter.frame_count == 1


@pytest.mark.skipif(
    not torch.cuda.is_available() and not shutil.which("g++"), reason="needs a C++ compiler"
)
def test_compiles_with_inductor(device):
    """Short: a C++ compiler takes seconds a graph.

    Its C++ has no vectors: whether they compile is tried with five programs, 10 s of CPU.
    """

    def linear(x, weight, total):
        x, w = int8.int8_quantize(x.relu(), layout="both"), int8.int8_quantize(weight)
        int8.int8_gemm(w, w, out="fp32", c=total)
        return int8.int8_gemm(x.t, w) + 1

    torch._dynamo.reset()
    x, weight = torch.randn(96, 40, device=device), torch.randn(64, 96, device=device)
    found, expected = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        y = torch.compile(linear, fullgraph=True)(x, weight, found)
    assert torch.equal(y, linear(x, weight, expected))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("out", ["fp32", "bf16", "fp16"])
def test_gradient_of_a_bias(device, out):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        int8.int8_quantize(torch.randn(n, 48, generator=generator).to(device)) for n in (40, 70)
    )
    bias = torch.randn(70, generator=generator).to(device).requires_grad_()
    grad = torch.randn(40, 70, generator=generator).to(device)
    c = int8.int8_gemm(a, b, out=out, bias=bias)
    assert c.requires_grad
    (found,) = torch.autograd.grad(c, bias, grad.to(c.dtype))
    wide = bias.detach().double().requires_grad_()
    wide_a, wide_b = (dequantize(x.q, x.scale, 32, torch.float64) for x in (a, b))
    exact = wide_a @ wide_b.t() + wide
    (expected,) = torch.autograd.grad(exact, wide, grad.to(c.dtype).double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not int8.int8_gemm(a, b, out=out, bias=bias).requires_grad
    assert not int8.int8_gemm(a, b, out=out, bias=bias.detach()).requires_grad


def test_gradient_of_the_stream(device):
    x = torch.randn(40, 70, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = int8.int8_quantize(torch.randn(40, 70, device=device))
    total, copy, *statistics = int8.int8_add(x, y, layout="both")
    assert total.requires_grad
    assert not any(t.requires_grad for t in (*copy.tensors, *statistics))
    grad = torch.randn_like(total)
    assert torch.equal(torch.autograd.grad(total, x, grad)[0], grad)
    total, copy, *statistics = int8.int8_add(x.detach(), y)
    assert not any(t.requires_grad for t in (total, *copy.tensors, *statistics))


def test_gradient_of_a_loss(device):
    logits = torch.randn(40, 70, device=device, requires_grad=True)
    targets = torch.randint(64, (40,), device=device)
    targets[3] = -100
    loss, lse = int8.cross_entropy(logits, targets, valid=64)
    assert not lse.requires_grad
    dloss = torch.rand(40, device=device)
    (found,) = torch.autograd.grad(loss, logits, dloss)
    expected = F.cross_entropy(logits[:, :64], targets, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(expected, logits, dloss)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
    work = logits.detach().clone()
    overwritten = int8.cross_entropy_backward(work, targets, lse, dloss, valid=64, inplace=True)
    assert overwritten is work
    assert torch.equal(work, found)


@pytest.mark.parametrize("block", [32, 128])
def test_a_gelu_s_gradient_may_be_written_over_its_input(device, block):
    x, dy = (int8.int8_quantize(torch.randn(150, 288, device=device), block=block) for _ in "xy")
    options = {"layout": "both", "seed": torch.tensor([7], device=device)}
    expected = int8.int8_gelu_backward(x, dy, **options)
    found = int8.int8_gelu_backward(x, dy, inplace=True, **options)
    assert found.q is dy.q
    assert all(torch.equal(*pair) for pair in zip(found.tensors, expected.tensors, strict=True))
    wide = torch.zeros(150, 320, dtype=torch.int8, device=device)[:, :288]
    for codes, layout, strides in ((dy.q, "q", (288, 1)), (wide, "both", (320, 1))):
        refused(
            f"inplace with layout={layout}, strides {strides}: expected layout=both and "
            "contiguous dy",
            int8.int8_gelu_backward,
            x,
            dy._replace(q=codes),
            inplace=True,
            **{**options, "layout": layout},
        )


def test_column_sum(device):
    x = int8.int8_quantize(torch.randn(40, 70, device=device), layout="both")
    expected = dequantize(x.q, x.scale, 32, torch.float64).sum(0)
    found = int8.int8_column_sum(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_constants_to_autograd(device):
    """What has no gradient is a constant, even of inputs that require one, and even by name."""
    leaf = {"device": device, "requires_grad": True}
    weight, bias = torch.randn(64, 64, **leaf), torch.randn(64, **leaf)
    w = int8.int8_quantize(weight)
    q, scale = w.tensors
    scale.requires_grad_()
    y, *statistics = int8.int8_layernorm(w, bias, bias)
    found = [
        *int8.int8_gemm(w, w, out="int8", bias=bias).tensors,
        *y.tensors,
        *statistics,
        int8.int8_dequantize(w),
        int8.int8_gemm(w, w),
        torch.ops.jetfire.gemm(q, scale, q, scale, None, 32, "fp32"),
        *torch.ops.jetfire.add(
            weight.detach().bfloat16(), q, scale, None, 32, 1e-5, "nearest", "q"
        ),
    ]
    assert not any(t.requires_grad for t in found)


def test_accumulation_is_a_write(device):
    w = int8.int8_quantize(torch.randn(40, 40, device=device))
    c = torch.zeros(40, 40, device=device, requires_grad=True)
    saved = (c * 1).exp()  # exp keeps its result for backward
    int8.int8_gemm(w, w, out="fp32", c=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    with torch.inference_mode():
        total = torch.zeros(40, 40, device=device)
        int8.int8_gemm(w, w, out="fp32", c=total)
        torch.testing.assert_close(total, int8.int8_gemm(w, w, out="fp32"))


def test_compiles_whole_where_what_it_adds_to_requires_grad(device):
    w = int8.int8_quantize(torch.randn(40, 40, device=device))
    start = torch.randn(40, 40, device=device, requires_grad=True)

    def added(start):
        total = start * 2
        int8.int8_gemm(w, w, out="fp32", c=total)
        return total.sum()

    torch._dynamo.reset()
    compiled = torch.compile(added, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(start), added(start))
    assert torch.equal(*(torch.autograd.grad(f(start), start)[0] for f in (compiled, added)))


def test_plans_once(device, monkeypatch):
    chosen = []

    def choose(*args):
        chosen.append(args[1])
        return original(*args)

    original = calls.choose
    monkeypatch.setattr(calls, "choose", choose)
    profiles.forget()
    x = torch.randn(40, 70, device=device)
    for _ in range(3):
        int8.int8_quantize(x)
    assert [str(problem) for problem in chosen] == [
        "m=40 n=70 block=32 dtype=fp32 rounding=nearest layout=q"
    ]


def refused(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


def test_refuses_in_one_line(device):
    x = torch.randn(40, 70, device=device)
    w = int8.int8_quantize(x)
    seed = torch.tensor([7], device=device)
    choices = "block=48: expected 32 or 64 or 128"
    refused(choices, int8.int8_quantize, x, block=48)
    refused(choices, torch.ops.jetfire.quantize, x, None, 48, "nearest", "q")
    refused("rounding=up: expected nearest or stochastic", int8.int8_quantize, x, rounding="up")
    refused("layout=None: expected q or qt or both", int8.int8_quantize, x, layout=None)
    refused("p=1.5: expected a probability in [0, 1)", int8.int8_dropout, w, seed, p=1.5)
    refused("p='half': expected a number", int8.int8_dropout, w, seed, p="half")
    refused("out=int4: expected bf16 or fp16 or fp32", int8.int8_dequantize, w, out="int4")
    refused("out=int4: expected bf16 or fp16 or fp32 or int8", int8.int8_gemm, w, w, out="int4")
    targets = torch.zeros(40, dtype=torch.int64, device=device)
    refused("targets is int64 (39,): expected int64 (40,)", int8.cross_entropy, x, targets[1:])
    refused(
        "valid=71: expected 1 to 70, the columns of logits",
        int8.cross_entropy,
        x,
        targets,
        valid=71,
    )
    refused("layout=qt out=bf16: expected out=int8", int8.int8_gemm, w, w, layout="qt")
