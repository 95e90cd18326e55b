"""The operators and functions of INT4: opcheck, torch.compile, and what they refuse."""

import itertools
import subprocess
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jetfire import ops
from jetfire import ops as int4
from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import capacity
from jetfire.core.tensors import Quantized4
from jetfire.reference.nibbles import unpack

OPS = ("bit_split", "gather_rows", "hadamard_quantize", "int4_gemm", "sample_rows")
SIZES = {"m": 40, "n": 64, "k": 96}


def combinations(name):
    """Of an op's choices at one size: all, but for groups and dtypes, of which each is there."""
    hints = get_type_hints(registry.get(name).Problem)
    choices = {
        field: (False, True) if hint is bool else get_args(hint)
        for field, hint in hints.items()
        if hint is bool or get_origin(hint) is Literal
    }
    first = {field: values[0] for field, values in choices.items()}
    for values in itertools.product(*choices.values()):
        fields = dict(zip(choices, values, strict=True))
        if name == "hadamard_quantize":
            unused = ("given", "gathered") if fields["mode"] == "fwd" else ("layout",)
            if any(fields[field] != first[field] for field in unused):
                continue
            if fields["group"] != 32 and (fields["group"] > 64 or fields["dtype"] != "fp32"):
                continue
            if fields["out_block"] != 32 and (fields["group"], fields["dtype"]) != (32, "bf16"):
                continue
        yield fields


def problems():
    found = {}
    for name in OPS:
        op = registry.get(name)
        for fields in combinations(name):
            sizes = {dim: SIZES[dim] for dim in op.dims}
            if name == "int4_gemm":  # whose counts are multiples of 128
                sizes["m" if fields["product"] == "dgrad" else "k"] = 384
            if name == "gather_rows" and fields["repeat"]:
                fields["rows"] = 128
            try:
                problem = op.Problem(**sizes, **fields)
            except UsageError:
                continue
            found[name, problem] = "-".join([name, *map(str, fields.values())])
    gather = registry.get("gather_rows").Problem
    found["gather_rows", gather(40, 64, rows=128)] = "gather_rows-some"
    found["gather_rows", gather(40, 64, rows=128, transpose=True)] = "gather_rows-some-transposed"
    return [pytest.param(name, problem, id=label) for (name, problem), label in found.items()]


def overload(name, problem):
    backward = "_backward" if getattr(problem, "mode", "fwd") == "bwd" else ""
    codes = "_quantized" if getattr(problem, "out", "") == "int8" else ""
    return getattr(torch.ops.jetfire, f"{name}{backward}{codes}").default


def arguments(overload, problem, inputs):
    """The arguments that have an operator do a problem, by their names."""
    found = []
    for argument in overload._schema.arguments:
        if "Tensor" in str(argument.type):
            found.append(inputs.get(argument.name))
        elif argument.name == "packed":
            found.append(problem.operands == "packed")
        else:
            found.append(getattr(problem, argument.name))
    return found


@pytest.mark.parametrize(("name", "problem"), problems())
def test_opcheck(device, name, problem):
    op = registry.get(name)
    inputs = op.inputs(problem, device)
    operator = overload(name, problem)
    leaves = {
        key: tensor.clone().requires_grad_(tensor.is_floating_point() and key != "seed")
        for key, tensor in inputs.items()
    }
    given = arguments(operator, problem, leaves)
    assert all(any(tensor is leaf for leaf in given) for tensor in leaves.values())
    # Rows that are not asked for hold whatever was there: two runs may differ in them.
    counted = "counts" in inputs and name in ("gather_rows", "int4_gemm")
    static = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=static if counted else "ALL")
    outputs = operator(*given)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    assert not any(tensor.requires_grad for tensor in outputs)
    names = op.outputs(problem, inputs)
    check = op.check(problem, dict(zip(names, outputs, strict=True)), op.reference(problem, inputs))
    assert check.ok, check.message


def product(x, weight, bias, step_x, step_w, seed, group=32):
    """A linear layer in 4 bits, forward and backward of y's square, through every function."""
    codes = int4.int4_quantize(x, step_x, group=group, layout="both")
    w = int4.int4_quantize(weight, step_w, group=group, layout="both")
    y = int4.int4_gemm(codes, w, bias=bias)
    g = int4.int4_bit_split(y * 2, seed=seed)
    of_x = int4.int4_sample_rows(g.squares, seed=seed)
    kept = int4.int4_gather_rows(g, rows=of_x.rows, counts=of_x.counts, wide=True)
    wt = int4.int4_gather_rows(w, transpose=True, wide=True)
    dx_hat = int4.int4_gemm(kept, wt, weight=of_x.weight, counts=of_x.counts)
    dx = int4.int4_quantize_backward(dx_hat, q=codes, group=group, slots=of_x.slots, unit=g.scale)
    of_w = int4.int4_sample_rows(g.squares, x_squares=codes.squares, seed=seed)
    options = {"rows": of_w.rows, "counts": of_w.counts, "transpose": True}
    gt = int4.int4_gather_rows(g, repeat=of_w.repeat, **options)
    xt = int4.int4_gather_rows(codes, **options)
    dw_hat = int4.int4_gemm(gt, xt, counts=of_w.counts, out="fp32")
    dw, dstep = int4.int4_quantize_backward(dw_hat, x=weight, step=step_w, group=group)
    return y, dx, dw, dstep


def operands(device, m=72, n=48, k=64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    x, weight, bias = normal(m, k).bfloat16(), normal(n, k), normal(n)
    steps = torch.full((1,), 0.35, device=device), torch.full((1,), 0.4, device=device)
    return x, weight, bias, *steps, torch.tensor([7], device=device)


def test_the_steps_together_are_a_linear_layer(device):
    """To what 4 bits and half of the rows allow: 0.16, 0.57 and 0.32 of the products' norms."""
    x, weight, bias, *rest = operands(device, 512, 96, 64)
    y, dx, dw, _ = product(x, weight, bias, *rest)
    exact = x.float() @ weight.t() + bias
    grad = 2 * y.float()
    for found, expected, bound in (
        (y, exact, 0.2),
        (dx, grad @ weight, 0.65),
        (dw, grad.t() @ x.float(), 0.4),
    ):
        assert float((found.float() - expected).norm() / expected.norm()) < bound


def test_compiles_once_for_any_number_of_rows(device):
    """That is larger than what padding alone takes up of a sample's capacity."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(product, fullgraph=True, backend=counter)
    for rows in (300, 422, 640):
        args = operands(device, rows)
        torch._dynamo.mark_dynamic(args[0], 0)
        for one, other in zip(compiled(*args), product(*args), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


def test_found_in_ops():
    assert len([name for name in dir(ops) if name.startswith("int4_")]) == 14
    with pytest.raises(AttributeError):
        _ = ops.int4_nothing


@pytest.mark.parametrize("first", ["import jetfire.ops.int4_gemm", "import jetfire.ops"])
def test_a_function_hides_its_op_s_module(first):
    """Whichever is imported first: `int4_gemm` is an op's module and a function of its package."""
    code = f"""{first}
from jetfire.core import registry
registry.get("int4_gemm"), registry.get("cross_entropy")
from jetfire.ops import *
from jetfire.ops import cross_entropy as one
from jetfire.ops.int4_gemm import OP
assert int4_gemm.__name__ == "int4_gemm" and one is cross_entropy and callable(int8_gelu)
assert OP is registry.get("int4_gemm")"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_strided_rows(device):
    x, *_ = operands(device)
    step = torch.full((), 0.7, device=device)  # a scale may have any shape of one element
    wide = torch.zeros(72, 80, dtype=torch.bfloat16, device=device)
    wide[:, :64] = x
    one, other = int4.int4_quantize(wide[:, :64], step), int4.int4_quantize(x, step)
    assert alike(one, other)
    seed = torch.tensor([3], device=device)
    one, other = (int4.int4_bit_split(t, seed=seed) for t in (wide[:, :64], x))
    assert alike(one, other)
    q = torch.zeros(72, 48, dtype=torch.int8, device=device)
    q[:, :32] = other.packed[:72]
    strided = int4.int4_gather_rows(other._replace(packed=q[:, :32]))
    assert torch.equal(strided.wide, unpack(other.packed[:72]))


def alike(one, other):
    assert one.wide is other.wide is None
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("packed", "scale", "squares")
    )


def test_nearest_gradients(device):
    """int4-naive's: 4 bits, one part, all rows kept, no transform."""
    grad, weight = operands(device)[:2]
    g = int4.int4_bit_split(grad, bits=4)
    seed = torch.tensor([1], device=device)
    drawn = int4.int4_sample_rows(g.squares, parts=1, keep="all", seed=seed)
    assert drawn.rows.shape == (capacity(72, 1, "dgrad", "all"),)
    assert bool((drawn.slots[:, 1] == -1).all())
    kept = int4.int4_gather_rows(g, rows=drawn.rows, counts=drawn.counts, wide=True)
    w = int4.int4_quantize(weight, torch.full((1,), 0.8, device=device), group=1)
    wt = int4.int4_gather_rows(w, wide=True)
    wt = wt._replace(wide=wt.wide[:, :64].contiguous())
    c = int4.int4_gemm(kept, wt, weight=drawn.weight, counts=drawn.counts, out="fp32")
    expected = (unpack(g.packed).double() * g.scale) @ (unpack(w.packed).double() * w.scale).t()
    kept_rows = (g.squares > 0).nonzero().flatten()
    assert torch.equal(
        drawn.slots[kept_rows, 0].long(), torch.arange(len(kept_rows), device=device)
    )
    torch.testing.assert_close(
        c[: len(kept_rows)].double(), expected[kept_rows], rtol=1e-6, atol=1e-9
    )


def refuse(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


def test_refuses_in_one_line(device):
    x, _, bias, step, _, seed = operands(device)
    q = int4.int4_quantize(x, step)
    squares = q.squares
    refuse("x is int8: expected bfloat16 or float16 or float32", int4.int4_quantize, q.packed, step)
    refuse(
        f"step: expected a float32 tensor of one element on {x.device}", int4.int4_quantize, x, bias
    )
    refuse("layout=q: expected packed or wide or both", int4.int4_quantize, x, step, layout="q")
    for group in (48, "ten"):
        refuse(
            f"group={group}: expected {' or '.join(str(2**i) for i in range(11))}",
            int4.int4_quantize,
            x,
            step,
            group=group,
        )
    with pytest.raises(UsageError, match=r"^group=128"):
        int4.int4_quantize(x, step, group=128)
    with pytest.raises(UsageError, match=r"^n=63: expected an even"):
        int4.int4_quantize(x[:, :63], step, group=1)
    told = {"q": q, "x": x, "step": step}
    for names in ("", "x", "step", "q step", "q x step"):
        given = {name: told[name] for name in names.split()}
        alone = "q, x and step: expected q alone, or x and step"
        refuse(alone, int4.int4_quantize_backward, x, **given)
    refuse(
        "q has shape (36, 64): expected (72, 64)",
        int4.int4_quantize_backward,
        x,
        q=q._replace(packed=None, wide=x[:36].to(torch.int8)),
    )
    refuse(
        "x is float32: expected bfloat16", int4.int4_quantize_backward, x, x=x.float(), step=step
    )
    refuse(
        "slots and unit: expected both or neither", int4.int4_quantize_backward, x, q=q, unit=step
    )
    refuse(
        "q has shape (72, 16): expected (72, 32)",
        int4.int4_quantize_backward,
        x,
        q=q._replace(packed=q.packed[:, :16]),
    )
    refuse(
        "slots is int32 (72,): expected int32 (72, 2)",
        int4.int4_quantize_backward,
        x,
        q=q,
        slots=squares,
        unit=step,
    )
    refuse("bits=6: expected 8 or 4", int4.int4_bit_split, x, bits=6)
    refuse(f"seed: expected an int64 tensor of one element on {x.device}", int4.int4_bit_split, x)
    refuse("parts=3: expected 2 or 1", int4.int4_sample_rows, squares, parts=3, seed=seed)
    refuse(
        "keep=some: expected half or all", int4.int4_sample_rows, squares, keep="some", seed=seed
    )
    refuse(
        "x_squares is int32 (72,): expected int32 (36,)",
        int4.int4_sample_rows,
        squares,
        x_squares=squares,
        seed=seed,
    )
    refuse(
        "squares is int32 (71,): expected int32 (70,)",
        int4.int4_sample_rows,
        squares[:71],
        seed=seed,
    )
    refuse("x is bfloat16: expected int8", int4.int4_gather_rows, q._replace(packed=x))
    refuse("rows and counts: expected both or neither", int4.int4_gather_rows, q, rows=squares)
    refuse("repeat: expected rows and counts with it", int4.int4_gather_rows, q, repeat=squares)


def test_refuses_codes_of_the_other_form(device):
    x, weight, _, step, *_, seed = operands(device)
    packed, wide = (int4.int4_quantize(x, step, layout=form) for form in ("packed", "wide"))
    both = int4.int4_quantize(weight, step, layout="both")
    message = "{} holds wide codes alone: expected packed ones (layout=packed, both)"
    refuse(message.format("x"), int4.int4_gather_rows, wide)
    refuse(message.format("q"), int4.int4_quantize_backward, x, q=wide, out="int8", seed=seed)
    one, other = (int4.int4_quantize_backward(x, q=codes) for codes in (packed, wide))
    assert torch.equal(one, other)
    message = "a and b: expected packed codes of both, or wide codes of both"
    refuse(message, int4.int4_gemm, packed, wide)
    refuse(message, int4.int4_gemm, wide, packed)
    assert torch.equal(int4.int4_gemm(packed, both), int4.int4_gemm(wide, both))


def test_refuses_operands_that_do_not_fit(device):
    x, weight, bias, step, *_ = operands(device)
    a, b = int4.int4_quantize(x, step), int4.int4_quantize(weight, step)
    refuse(
        "a has k=64 and b k=32: expected one k",
        int4.int4_gemm,
        a,
        b._replace(packed=b.packed[:, :16]),
    )
    refuse(
        f"b's scale: expected a float32 tensor of one element on {x.device}",
        int4.int4_gemm,
        a,
        b._replace(scale=bias),
    )
    refuse(
        "bias is float32 (48,): expected float32 (16,)",
        int4.int4_gemm,
        a,
        b._replace(packed=b.packed[:16]),
        bias=bias,
    )
    wide = [Quantized4(None, matrix.packed, matrix.scale) for matrix in (a, b)]
    refuse("out=int4: expected bf16 or fp16 or fp32 or int8", int4.int4_gemm, *wide, out="int4")
    refuse("out_block=64 out=bf16: expected out=int8", int4.int4_gemm, *wide, out_block=64)
    counted = {"counts": a.squares[:2], "out": "int8"}
    refuse("out=int8: expected no counts with it", int4.int4_gemm, *wide, **counted)
    refuse("weight: expected counts with it", int4.int4_gemm, *wide, weight=bias)
    refuse("counts is int32 (72,): expected int32 (2,)", int4.int4_gemm, *wide, counts=a.squares)
    with pytest.raises(UsageError, match=r"^bias=true product=wgrad"):
        int4.int4_gemm(*wide, counts=a.squares[:2], bias=bias)
    assert int4.int4_gemm(a, b, bias=bias).dtype == torch.bfloat16


@pytest.mark.gpu
def test_refuses_mixed_devices(device):
    x, _, _, step, *_ = operands(device)
    q = int4.int4_quantize(x, step)
    refuse(
        f"b is on cpu: expected {x.device}, as the first tensor",
        int4.int4_gemm,
        q,
        q._replace(packed=q.packed.cpu()),
    )
