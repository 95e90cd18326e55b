"""Codes that are written in other blocks than those that are read (`out_block`), of every op."""

import itertools

import pytest
import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose, verify
from jetfire.export.plan import _alike
from jetfire.export.signature import signature_of
from jetfire.measure.bounds import reblocked
from jetfire.measure.plan import Request, cases
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize, spread

CPU = torch.device("cpu")
GELU = registry.get("gelu")
NAMES = [
    name
    for name in registry.names()
    if {"block", "out_block"} <= registry.get(name).Problem.__annotations__.keys()
]
PAIRS = [(128, 32), (32, 128), (64, 32), (32, 64)]
ALL = list(itertools.product((32, 64, 128), repeat=2))
# GEMM's codes are an output among others; its backward is the same product.
FIELDS = {"gemm": {"k": 200, "out": "int8", "bias": True}}
CASES = [
    (name, mode)
    for name in NAMES
    for mode in registry.get(name).modes
    if (name, mode) != ("gemm", "bwd")
]


def problem_of(name, mode, block, out_block, **fields):
    fields = {"m": 150, "n": 300, **FIELDS.get(name, {}), **fields}
    return registry.get(name).problems(mode, {**fields, "block": block, "out_block": out_block})[0]


def on_the_cpu(name):
    """The kernel of an op that needs neither a GPU nor an interpreter, and its only config."""
    kernel = next(k for k in registry.kernels(name).values() if k.name in ("torch", "int_mm"))
    return kernel, kernel.Config()


def test_these_ops_have_it():
    known = ["add", "dropout", "gelu", "gemm", "layernorm", "rmsnorm", "swiglu"]
    assert known == NAMES


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize(("block", "out_block"), PAIRS)
@pytest.mark.parametrize("data", ["heavy", "largest", "nonfinite"])
def test_cpu_kernels_are_right(name, mode, block, out_block, data):
    op = registry.get(name)
    for layout, rounding in (("both", "stochastic"), ("qt", "nearest"), ("q", "nearest")):
        drawn = {"rounding": rounding} if name != "dropout" else {}
        problem = problem_of(name, mode, block, out_block, layout=layout, **drawn)
        inputs = op.inputs(problem, CPU, data=data)
        found = verify(op, *on_the_cpu(name)[:1], problem, on_the_cpu(name)[1], inputs)
        assert found.ok, f"{problem}: {found.message}"


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_values_do_not_depend_on_it(name, mode):
    """A result in other blocks is of the same values, each off by its own block's rounding."""
    op = registry.get(name)
    inputs = op.inputs(problem_of(name, mode, 64, 64), CPU)
    kernel, config = on_the_cpu(name)
    values = {}
    for out_block in (32, 64, 128):
        problem = problem_of(name, mode, 64, out_block)
        outputs = op.poison(problem, op.outputs(problem, inputs))
        kernel.launch(problem, config, inputs, outputs)
        for q, spec in op.writes(problem).items():
            if spec.block is None:
                values.setdefault(q, []).append(outputs[q].double())
                continue
            assert spec.block == out_block
            scale = outputs["scale" if q == "q" else f"{q}_scale"]
            x, step = dequantize(outputs[q], scale, out_block), spread(scale, out_block, 150, 300)
            values.setdefault(q, []).append((x.double(), step.double()))
    for name, (small, own, large) in values.items():
        if isinstance(own, tuple):
            for x, step in (small, large):
                assert bool(((x - own[0]).abs() <= 1.01 * (step + own[1])).all()), name
        elif not name.endswith("scale"):
            torch.testing.assert_close(small, own)
            torch.testing.assert_close(large, own)


@pytest.mark.parametrize("name", NAMES)
def test_left_out_it_is_block(name):
    kind = registry.get(name).Problem
    fields = {"m": 64, "n": 64, **FIELDS.get(name, {})}
    for block in (32, 64, 128):
        plain = kind.parse({**fields, "block": block})
        assert plain.out_block == block
        assert kind.parse({**fields, "block": block, "out_block": block}) == plain
        assert kind.parse({**fields, "block": block, "out_block": None}) == plain
        assert kind.parse({**fields, "block": block, "out_block": "none"}) == plain
        assert "out_block" not in plain.as_dict()
        assert "out_block" not in str(plain)
        assert kind.parse(plain.as_dict()) == plain
    pair = kind.parse({**fields, "block": "128", "out_block": "32"})
    assert (pair.block, pair.out_block) == (128, 32)
    assert f"block={pair.block} out_block={pair.out_block} " in str(pair)
    assert kind.parse(pair.as_dict()) == pair != kind.parse({**fields, "block": 128})
    with pytest.raises(UsageError, match=r"^out_block=48: expected 32 or 64 or 128$"):
        kind.parse({**fields, "out_block": 48})


def test_floats_have_none():
    gemm = registry.get("gemm")
    with pytest.raises(UsageError, match=r"^out_block=32 out=bf16: expected out=int8$"):
        gemm.Problem(64, 64, 64, block=128, out_block=32)
    assert gemm.Problem(64, 64, 64, block=32, out_block=32).out == "bf16"
    with pytest.raises(UsageError, match="no problem field 'out_block'"):
        registry.get("quantize").Problem.parse({"m": 64, "n": 64, "out_block": 32})


def test_a_gemm_s_backward_writes_only_dgrad_in_it():
    fields = {"m": 64, "n": 96, "k": 128, "block": 128, "out": "int8", "out_block": 32}
    dgrad, wgrad = registry.get("gemm").problems("bwd", fields)
    assert (dgrad.block, dgrad.out_block, dgrad.out) == (128, 32, "int8")
    assert (wgrad.block, wgrad.out_block, wgrad.out) == (128, 128, "fp32")


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_kernels_take_a_pair_or_say_why_not(name, mode):
    where = [Device(kind="cpu"), *(target_device(c) for c in ((8, 0), (8, 9), (9, 0)))]
    for (block, out_block), device in itertools.product(ALL, where):
        problem = problem_of(name, mode, block, out_block)
        for kernel in registry.kernels(name).values():
            config = kernel.default(problem, device)
            assert kernel.space(problem, device) is not None
            reason = kernel.legal(problem, config, device)
            assert reason is None or (reason and "\n" not in reason)
    for block, out_block in ALL:
        problem = problem_of(name, mode, block, out_block)
        assert choose(registry.get(name), problem, where[0])[0].name == on_the_cpu(name)[0].name


@pytest.mark.parametrize(("block", "out_block"), ALL)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 128), (33, 127), (129, 300)])
def test_bounds_of_blocks_bound_other_blocks(block, out_block, m, n):
    """Spread to elements, and then the largest of each block."""
    bounds = torch.rand(-(-m // block), -(-n // block), dtype=torch.float64)
    found = reblocked(bounds, m, n, block, out_block)
    wide = spread(bounds, block, m, n)
    rows, columns = -(-m // out_block), -(-n // out_block)
    assert found.shape == (rows, columns)
    for i, j in itertools.product(range(rows), range(columns)):
        part = wide[i * out_block : (i + 1) * out_block, j * out_block : (j + 1) * out_block]
        assert found[i, j] == part.max()
    over = reblocked(bounds > 0.5, m, n, block, out_block)
    assert over.dtype == torch.bool
    assert torch.equal(over, found > 0.5)


@pytest.mark.parametrize(("block", "out_block"), [(128, 32), (32, 128)])
def test_a_schedule_s_own_error_is_allowed_in_the_blocks_that_it_may_be_in(block, out_block):
    """`Kernel.noise` is by blocks of the operands, and C's codes may be in others."""
    op, problem = registry.get("gemm"), problem_of("gemm", "fwd", block, out_block)
    inputs = op.inputs(problem, CPU)
    expected = op.reference(problem, inputs)
    noise = torch.zeros(-(-150 // block), -(-300 // block), dtype=torch.float64)
    noise[-1, 0] = 20 * float(expected["scale"].max())
    q, scale = quantize(expected["c"] + 0.9 * spread(noise, block, 150, 300), out_block)
    outputs = {"q": q, "scale": scale}
    assert op.check(problem, outputs, expected, noise).ok
    assert not op.check(problem, outputs, expected).ok
    assert not op.check(problem, outputs, expected, noise.flip(1)).ok
    assert not op.check(problem, outputs, expected, noise / 2).ok


def quantised(m=40, n=72, block=128):
    q, scale = quantize(torch.randn(m, n), block)
    return ops.Quantized(q, scale, q.t().contiguous(), scale.t().contiguous(), block)


def calls():
    """A call of every function, by name, of codes in blocks of 128."""
    x, dy, weight = quantised(), quantised(), torch.ones(72)
    seed = torch.tensor([7])
    mean, rstd = torch.zeros(40), torch.ones(40)
    stream = torch.randn(40, 72).bfloat16()
    return {
        "int8_gelu": (x,),
        "int8_gelu_backward": (x, dy, {"seed": seed}),
        "int8_swiglu": (x, dy),
        "int8_swiglu_backward": (x, dy, quantised(), {"seed": seed}),
        "int8_layernorm": (x, weight, weight),
        "int8_layernorm_backward": (x, dy, weight, mean, rstd, {"seed": seed}),
        "int8_layernorm_add_backward": (x, dy, weight, mean, rstd, stream, {"seed": seed}),
        "int8_rmsnorm": (x, weight),
        "int8_rmsnorm_backward": (x, dy, weight, rstd, {"seed": seed}),
        "int8_dropout": (x, seed),
        "int8_dropout_backward": (x, seed),
        "int8_add": (stream, x),
        "int8_add_backward": (stream, dy, {"seed": seed}),
        "int8_gemm": (x, dy, {"out": "int8"}),
    }


@pytest.mark.parametrize("name", calls())
def test_functions_write_in_it(name):
    *args, last = calls()[name]
    options = last if isinstance(last, dict) else {}
    args = args if options else [*args, last]
    function = getattr(ops, name)
    for layout, out_block in (("both", 32), ("qt", 64), ("q", None)):
        found = function(*args, **options, layout=layout, out_block=out_block)
        parts = [found] if isinstance(found, ops.Quantized) else found
        codes = [part for part in parts if isinstance(part, ops.Quantized)]
        assert codes
        for y in codes:
            assert y.block == (out_block or 128)
            for q, scale in ((y.q, y.scale), (y.qt, y.scale_t)):
                if q is not None:
                    assert scale.shape == tuple(-(-size // y.block) for size in q.shape)
    with pytest.raises(UsageError, match=r"^out_block=48: expected 32 or 64 or 128 or None$"):
        function(*args, **options, out_block=48)


def test_compiles_whole_with_a_gradient():
    def through(stream, weight):
        total, copy, *_ = ops.int8_add(stream, quantised_of(weight, 32), out_block=128)
        y = ops.int8_gemm(copy, quantised_of(weight, 128), out="int8", out_block=32)
        z = ops.int8_gelu(y, out_block=64)
        return total.float().sum(), y.q, y.scale, z.q, z.scale

    def quantised_of(weight, block):
        return ops.int8_quantize(weight, block=block)

    torch._dynamo.reset()
    stream = torch.randn(40, 72).bfloat16().requires_grad_()
    weight = torch.randn(40, 72)
    expected = through(stream, weight)
    found = torch.compile(through, fullgraph=True, backend="aot_eager")(stream, weight)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert found[2].shape == (2, 2)
    assert found[4].shape == (1, 1)
    for loss in (found[0], expected[0]):
        (gradient,) = torch.autograd.grad(loss, stream)
        assert torch.equal(gradient, torch.ones_like(stream))


@pytest.mark.parametrize(
    "given", [{"out_block": 32}, {"layout": "both"}, {"rounding": "stochastic"}]
)
def test_a_float_product_has_nothing_of_codes(given):
    x, ((name, value),) = quantised(), given.items()
    with pytest.raises(UsageError, match=f"^{name}={value} out=bf16: expected out=int8$"):
        ops.int8_gemm(x, x, **given)
    for more in ({"c": torch.zeros(40, 40)}, {"squares": True}):
        with pytest.raises(UsageError, match=f"^{name}={value} out=fp32: expected out=int8$"):
            ops.int8_gemm(x, x, out="fp32", **more, **given)


def test_a_float_product_may_name_the_block_of_its_operands():
    x = quantised()
    assert torch.equal(ops.int8_gemm(x, x, out_block=128), ops.int8_gemm(x, x))


@pytest.mark.parametrize(("block", "out_block"), [(128, 32), (32, 128)])
def test_codes_in_place_are_those_of_a_new_tensor(block, out_block):
    """The memory of dy's codes holds dx's, whatever their blocks; scales are new tensors."""
    x, dy = quantised(150, 300, block), quantised(150, 300, block)
    options = {"layout": "both", "seed": torch.tensor([7]), "out_block": out_block}
    expected = ops.int8_gelu_backward(x, dy, **options)
    found = ops.int8_gelu_backward(x, dy, inplace=True, **options)
    assert found.q is dy.q
    assert found.block == out_block
    assert all(torch.equal(*pair) for pair in zip(found.tensors, expected.tensors, strict=True))


def test_a_sweep_of_blocks_is_followed_where_it_is_left_out():
    def planned(**settings):
        request = Request([GELU], sizes={"m": [64]}, blocks=["32", "128"], settings=settings)
        return [(c.problem.block, c.problem.out_block) for c in cases(request, note=print)]

    assert planned() == [(32, 32), (128, 128)]
    assert planned(out_block=["32"]) == [(32, 32), (128, 32)]
    assert sorted(planned(out_block=["32", "none"])) == [(32, 32), (128, 32), (128, 128)]


def test_exports_have_scales_of_both():
    problem = problem_of("gelu", "fwd", 128, 32, layout="both")
    shapes = {p.name: tuple(map(str, p.shape)) for p in signature_of(GELU, problem).parameters}
    assert shapes["x_scale"] == ("⌈m/128⌉", "⌈n/128⌉")
    assert shapes["scale"] == ("⌈m/32⌉", "⌈n/32⌉")
    other = problem_of("gelu", "fwd", 128, 64, layout="both")
    with pytest.raises(UsageError, match="out_block=32 and out_block=64: one export has one out_b"):
        _alike(GELU, [problem, other])


def test_dropout_keeps_its_codes_in_equal_blocks_alone():
    x, seed = quantised(150, 300, 64), torch.tensor([3])
    same = ops.int8_dropout(x, seed, p=0.5, out_block=64)
    assert bool(((same.q == x.q) | (same.q == 0)).all())
    kept = dequantize(same.q, same.scale, 64)
    other = ops.int8_dropout(x, seed, p=0.5, out_block=32)
    assert all(torch.equal(*pair) for pair in zip(other.tensors, quantize(kept, 32), strict=True))
