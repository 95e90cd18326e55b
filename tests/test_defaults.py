"""torch.set_default_dtype and torch.set_default_device change nothing of what we compute.

Models are loaded under the one, and made under the other. A tensor of ours that is made without its
dtype or device, or a float that torch makes of integers, follows them.
"""

import ast
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jetfire import ops
from jetfire.core import launch, registry
from jetfire.core.device import Device
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.model.shape import LlamaShape, Shape
from jetfire.gpt2.training import settings
from jetfire.gpt2.training.step import Step
from jetfire.measure import data
from jetfire.nn import (
    RECIPES,
    AdamW,
    Int4Block,
    Int4Conv1D,
    Int4Linear,
    Int8Block,
    Int8Conv1D,
    Int8GELU,
    Int8LayerNorm,
    Int8Linear,
    Stream,
    TiedGradient,
    convert,
    linear_cross_entropy,
    tied_embedding,
)
from jetfire.tests import functions

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64, "meta")


@contextmanager
def default(which: torch.dtype | str | None) -> Iterator[None]:
    """One of torch's defaults changed: a dtype, a device, or neither."""
    try:
        if isinstance(which, torch.dtype):
            torch.set_default_dtype(which)
        elif which is not None:
            torch.set_default_device(which)
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def same(found, expected, name):
    """Equal tensors, of one dtype on one device, however nested."""
    if isinstance(expected, torch.Tensor):
        kinds = [(x.dtype, x.device, x.shape) for x in (found, expected)]
        assert kinds[0] == kinds[1], name
        assert torch.equal(found.nan_to_num(-1.5), expected.nan_to_num(-1.5)), name
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            same(found[key], value, f"{name}: {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for i, value in enumerate(expected):
            same(found[i], value, f"{name}[{i}]")
    else:
        assert found == expected, name


@pytest.fixture(scope="module")
def usual():
    """What a function gives under torch's own defaults, computed once."""
    known = {}

    def of(function):
        if function not in known:
            known[function] = function(None)
        return known[function]

    return of


changed = pytest.mark.parametrize("which", DEFAULTS, ids=str)


# Ops


def results(which):
    """Of every public function, what each of its calls returns; and its gradients."""
    calls = functions.arguments()
    found = {}
    for name, keywords in calls.items():
        with default(which):
            found[name] = [getattr(ops, name)(**options) for options in keywords]
    leaf = calls["cross_entropy"][0]["logits"].requires_grad_()
    product = calls["int8_gemm"][0] | {"bias": torch.ones(64, device=CPU, requires_grad=True)}
    stream = calls["int8_add"][0] | {"x": calls["int8_add"][0]["x"].requires_grad_()}
    with default(which):
        ops.cross_entropy(leaf, calls["cross_entropy"][0]["targets"])[0].sum().backward()
        ops.int8_gemm(**product).sum().backward()
        ops.int8_add(**stream)[0].sum().backward()
    found["gradients"] = [leaf.grad, product["bias"].grad, stream["x"].grad]
    return found


@pytest.fixture
def filled():
    """New tensors hold the same bits each time, where no kernel writes them: rows beyond counts."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@changed
def test_functions(which, usual, filled):
    same(results(which), usual(results), "functions")


def test_every_function_is_called():
    calls = functions.arguments()
    assert sorted(calls) == sorted(functions.names())
    for name, keywords in calls.items():
        parameters = set(inspect.signature(getattr(ops, name)).parameters)
        # Room for results, and halves joined, are given by tests of their own.
        assert parameters - {"out", "joined"} <= set().union(*keywords), name


def launches(which):
    """Of every op and mode: inputs, reference, what each kernel writes, and its check.

    Interpreted kernels take 60 ms per launch: they are launched under one default alone.
    """
    found, interpreted = {}, which in (None, torch.bfloat16)
    for name in registry.names():
        op = registry.get(name)
        sizes = {"m": 33, "n": 64, "k": 64}
        for mode in op.modes:
            for problem in op.problems(mode, {size: sizes[size] for size in op.dims}):
                with default(which):
                    found |= launched(op, problem, interpreted)
    return found


def launched(op, problem, interpreted):
    inputs = op.inputs(problem, CPU, seed=3)
    expected = op.reference(problem, inputs)
    found = {f"{op.name} {problem}": [inputs, expected, op.bytes(problem)]}
    for kernel in registry.kernels(op.name).values():
        device = Device.of(torch.empty(0, device=CPU))
        config = kernel.default(problem, device)
        skipped = launch.interpreted(kernel, device) and not interpreted
        if not skipped and kernel.legal(problem, config, device) is None:
            outputs = op.poison(problem, op.outputs(problem, inputs))
            kernel.launch(problem, config, inputs, outputs)
            check = op.check(problem, outputs, expected, kernel.noise(problem, config, inputs))
            written = op.written(problem, inputs, outputs)
            found[f"{op.name}/{kernel.name} {problem}"] = [written, check]
    return found


@changed
def test_kernels_and_references(which, usual):
    found = launches(which)
    expected = usual(launches)
    assert len(found) >= 2 * len(registry.names())
    same(found, {name: expected[name] for name in found}, "kernels")


@changed
@pytest.mark.parametrize("name", data.DISTRIBUTIONS)
def test_distributions(which, name):
    def drawn():
        source = data.Source(name, CPU, 1)
        return [source.floats(40, 64), source.normal(3), source.integers(9, 4), source.seed()]

    expected = drawn()
    with default(which):
        same(drawn(), expected, name)


@changed
def test_peers(which):
    """What a kernel is timed against."""

    def found():
        called = {}
        for name in registry.names():
            op = registry.get(name)
            for mode in op.modes:
                problem = op.problems(mode, dict.fromkeys(op.dims, 64))[0]
                for peer, make in op.peers(problem, op.inputs(problem, CPU)).items():
                    torch.manual_seed(0)
                    if peer != "copy":  # whose room is not initialised
                        called[f"{name} {mode} {peer}"] = make()()
        return called

    expected = found()
    with default(which):
        same(found(), expected, "peers")


# Layers


def fp32(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.float32, device=CPU) / 8)


def layers():
    """Every module, and the functions that have parameters, as functions of tokens × 64 floats."""
    options = {"device": CPU, "dtype": torch.float32}
    block, in_4_bits = (kind(64, 2, dropout=0.2, device=CPU) for kind in (Int8Block, Int4Block))
    sequential = nn.Sequential(
        nn.Linear(64, 48, **options), nn.GELU(), nn.Linear(48, 64, **options)
    )
    convert(sequential, "int4-hq-lss")
    table, ids = fp32(96, 64), torch.arange(40, dtype=torch.int64, device=CPU)

    def tied(x):
        gradient = TiedGradient()
        y = x + tied_embedding(table, ids, gradient)
        return linear_cross_entropy(y, table, ids, 50, gradient)

    return {
        "Int8Linear": Int8Linear(64, 48, **options),
        "Int8Conv1D": Int8Conv1D(fp32(64, 48), fp32(48)),
        "Int8LayerNorm": Int8LayerNorm(64, **options),
        "Int8GELU": Int8GELU(),
        "Int4Block": lambda x: in_4_bits(Stream.of(x.bfloat16(), 32), 2).x,
        "Int8Block": lambda x: block(Stream.of(x.bfloat16(), 32), 2).x,
        "Int4Linear": Int4Linear(64, 48, **options),
        "Int4Conv1D": Int4Conv1D(fp32(64, 48), fp32(48)),
        "convert": sequential,
        "tied": tied,
    }, [block, in_4_bits, sequential, nn.ParameterList([table])]


def trained(which):
    """Two steps of every layer: outputs, gradients and what became of the parameters."""
    found = {}
    torch.manual_seed(0)
    made, more = layers()
    model = nn.ModuleList([m for m in (*made.values(), *more) if isinstance(m, nn.Module)])
    x = torch.randn(40, 64, dtype=torch.float32, device=CPU, requires_grad=True)
    with default(which):
        optimizer = AdamW(model.parameters(), model=model)
        for step in range(2):
            optimizer.zero_grad()
            for name, layer in made.items():
                x.grad = None
                y = layer(x)
                y.square().sum().backward()
                found[f"{name} {step}"] = [y.detach(), x.grad]
            optimizer.step()
    return found | {name: [p.grad, p.detach()] for name, p in model.named_parameters()}


@changed
def test_layers(which, usual):
    same(trained(which), usual(trained), "layers")


def steps(which):
    """Two steps of every family in every kind of arithmetic; the device is what the caller says."""
    found = {}
    ids = torch.arange(64, dtype=torch.int64, device=CPU).view(2, 32)
    recipes = "bf16", "int8-block32", "int4-hq-lss"
    for kind, recipe in itertools.product((Shape, LlamaShape), recipes):
        torch.manual_seed(0)
        with default(which), CPU:
            shape = kind(1, 2, 64, context=32, vocabulary=90, dropout=0.1)
            model = model_of(shape, RECIPES[recipe])
        with default(which):
            step = Step(model, settings.make("tiny", {"recipe": recipe}), CPU)
            step.set_rate(0.01)
            losses = [step([(ids, ids)]) for _ in range(2)]
        found[shape.family, recipe] = [*losses, *(p.detach() for p in model.parameters())]
    return found


@changed
def test_steps(which, usual):
    same(steps(which), usual(steps), "steps")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_layer_made_under_a_default_has_its_dtype(kind, dtype):
    with default(dtype):
        layer, x = kind(64, 48), torch.randn(40, 64, requires_grad=True)
        optimizer = AdamW(layer.parameters(), model=layer)
        y = layer(x)
        y.sum().backward()
        optimizer.step()
    assert layer.weight.dtype == y.dtype == x.grad.dtype == dtype
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert float((y.double() - exact).norm() / exact.norm()) < 0.3
    assert bool(torch.isfinite(layer.weight).all())


# Source

INTEGERS = {"arange", "randint"}  # int64 whatever the default
MAKERS = INTEGERS | {
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "normal",
    "ones",
    "rand",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def unsaid(tree):
    """Calls that make a tensor whose dtype or device they do not say: line and call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch" and name in MAKERS):
            continue
        said = {keyword.arg for keyword in node.keywords}
        if not {"device"} | (set() if name in INTEGERS else {"dtype"}) <= said:
            yield node.lineno, ast.unparse(node)


def test_every_tensor_is_made_with_its_dtype_and_device():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {call}"
        for folder in ROOT.iterdir()
        if (folder / "__init__.py").exists()
        for file in sorted(folder.rglob("*.py"))
        if "torch." in (text := file.read_text(encoding="utf-8"))
        for line, call in unsaid(ast.parse(text))
    ]
    assert found == []


def test_calls_that_say_neither_are_found():
    code = "torch.zeros(3, device=d); torch.arange(4); x.new_zeros(3); torch.full((), 1.0, dtype=t)"
    assert [call for _, call in unsaid(ast.parse(code))] == [
        "torch.zeros(3, device=d)",
        "torch.arange(4)",
        "torch.full((), 1.0, dtype=t)",
    ]
