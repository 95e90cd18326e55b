"""Fused layers: autograd's node in C++ and in Python, on the CPU; tests of a GPU run both there."""

import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetfire.core import fused, replay
from jetfire.core.replay import build
from jetfire.nn import FrozenInt8Linear, Int8Conv1D, Int8Linear
from jetfire.nn import linear as nn_linear
from jetfire.ops import int8_quantize


@pytest.fixture
def in_cpp(monkeypatch):
    """Has C++ take calls on the CPU, too; counts them."""
    calls = []

    def taken(leaves):
        calls.append(leaves)
        return True

    monkeypatch.setattr(replay, "extension", build.extension)
    monkeypatch.setattr(fused, "_in_cpp", taken)
    return calls


def linear(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return Int8Linear(40, 24, bias=bias, dtype=dtype)


def packing(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return Int8Linear(40, 24, bias=bias, dtype=dtype, kept=4)


def conv(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24, dtype=dtype), torch.randn(24, dtype=dtype)
    return Int8Conv1D(nn.Parameter(weight), nn.Parameter(bias))


def solved(layer, x, autocast=False):
    """The result, and the gradients that are wanted, from one state of the generator."""
    torch.manual_seed(3)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = layer(x)
    wanted = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    if not y.requires_grad:
        return [y]
    torch.manual_seed(4)
    return [y, *torch.autograd.grad(y, wanted, torch.randn_like(y))]


def compared(layer, x, monkeypatch, **how):
    ours = solved(layer, x, **how)
    monkeypatch.setattr(fused, "_in_cpp", lambda leaves: False)
    theirs = solved(layer, x, **how)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    return ours


def frozen(bias=True, dtype=torch.float32):
    made = FrozenInt8Linear(torch.randn(24, 40, dtype=dtype), torch.randn(24, dtype=dtype))
    made.bias.requires_grad = True
    return made


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [linear, packing, conv, frozen])
def test_cpp_gives_the_bits_of_python(in_cpp, monkeypatch, make, dtype, autocast):
    x = torch.randn(2, 5, 40, dtype=dtype, requires_grad=True)
    found = compared(make(dtype=dtype), x, monkeypatch, autocast=autocast)
    assert len(found) == (3 if make is frozen else 4)
    assert len(in_cpp) == 1


def test_without_bias(in_cpp, monkeypatch):
    found = compared(linear(bias=False), torch.randn(5, 40, requires_grad=True), monkeypatch)
    assert len(found) == 3


@pytest.mark.parametrize("learning", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("input_learns", [False, True])
def test_gradients_that_are_wanted(in_cpp, monkeypatch, learning, input_learns):
    layer = linear()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad = name in learning
    x = torch.randn(5, 40, requires_grad=input_learns)
    found = compared(layer, x, monkeypatch)
    assert len(found) == 1 + input_learns + len(learning)


def test_a_part_of_the_gradients(in_cpp):
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape


def test_nothing_is_kept_without_gradients(in_cpp):
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert "PairFunction" in layer(x).grad_fn.name()


def test_gradient_that_is_not_contiguous(in_cpp, monkeypatch):
    layer, x = linear(), torch.randn(24, 40, requires_grad=True)

    def gradient():
        torch.manual_seed(3)
        return torch.autograd.grad((layer(x).t() * torch.arange(24.0)).sum(), x)[0]

    ours = gradient()
    monkeypatch.setattr(fused, "_in_cpp", lambda leaves: False)
    assert torch.equal(ours, gradient())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(in_cpp, reentrant):
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)

    def gradients(call):
        torch.manual_seed(3)
        return torch.autograd.grad(call().square().sum(), (x, *layer.parameters()))

    if reentrant:  # takes no torch.autograd.grad
        torch.manual_seed(3)
        checkpoint(layer, x, use_reentrant=True).square().sum().backward()
        found = (x.grad, *(p.grad for p in layer.parameters()))
    else:
        found = gradients(lambda: checkpoint(layer, x, use_reentrant=False))
    for one, other in zip(found, gradients(lambda: layer(x)), strict=True):
        assert torch.equal(one, other)


def test_backward_twice(in_cpp):
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    y = layer(x).sum()
    torch.manual_seed(3)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("native", [False, True])
def test_gradients_of_gradients_are_refused(in_cpp, monkeypatch, native):
    monkeypatch.setattr(fused, "_in_cpp", lambda leaves: native)
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("native", [False, True])
def test_gradients_of_gradients_are_refused_whatever_leads_to_them(in_cpp, monkeypatch, native):
    """Of a sum, whose own gradient is a constant, and where x alone is asked for."""
    monkeypatch.setattr(fused, "_in_cpp", lambda leaves: native)
    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(gradient.square().sum(), x)


def test_gradients_are_freed(in_cpp):
    """No tensor refers to a node that refers to it."""
    import gc
    import weakref

    layer, x = linear(), torch.randn(5, 40, requires_grad=True)
    gc.disable()
    try:
        y = layer(x)
        known = weakref.ref(y)
        del y
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [linear, packing, conv])
def test_replayed_on_a_gpu_with_the_bits_of_python(monkeypatch, make):
    monkeypatch.delenv("JETFIRE_REPLAY", raising=False)
    replay.extension.cache_clear()
    layer, x = make().cuda(), torch.randn(64, 40, device="cuda", requires_grad=True)
    int8_quantize(x.detach())  # C++ takes over at a process's first call, and sees those after it
    before = build.extension().replayed()
    found = [solved(layer, x, autocast=True) for _ in range(4)]
    assert build.extension().replayed() >= before + 4  # both halves of two calls
    monkeypatch.setattr(fused, "_in_cpp", lambda leaves: False)
    for later in (*found[1:], solved(layer, x, autocast=True)):
        for one, other in zip(found[0], later, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.quiet
def test_a_converted_layer_takes_little_more_of_the_host_than_torchs(monkeypatch):
    """At most 1.3 times as long as under autocast, measured in turns, as hosts' speed varies."""
    monkeypatch.delenv("JETFIRE_REPLAY", raising=False)
    replay.extension.cache_clear()
    theirs = nn.Linear(1024, 1024).cuda()
    ours = Int8Linear(1024, 1024, block=128, device="cuda")
    x = torch.randn(64, 1024, device="cuda", requires_grad=True)
    g = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)

    def seconds(layer):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):  # 3 ms of the GPU's time
            with torch.autocast("cuda", torch.bfloat16):
                y = layer(x)
            y.backward(g)
        return time.perf_counter() - start

    pairs = [(seconds(ours), seconds(theirs)) for _ in range(25)]
    ours_s, theirs_s = (statistics.median(times) for times in zip(*pairs[5:], strict=True))
    assert ours_s <= 1.3 * theirs_s


@pytest.mark.parametrize("make", [linear, packing, conv, frozen])
def test_both_halves_are_operators_that_torch_can_trace(in_cpp, monkeypatch, make):
    """Their schemas tell no lies, and their results are told without memory."""
    called = []

    def noting(names, saved):
        made = build.extension().Pair(*names, saved)

        def call(leaves, tensors, kept, constants):
            called.append((names, tensors, kept, constants))
            return made(leaves, tensors, kept, constants)

        return call

    layer, pair = make(), nn_linear._linear
    monkeypatch.setattr(pair, "_pair", noting(pair._names, pair._saved))
    y = layer(torch.randn(8, 40, requires_grad=True))
    ((names, tensors, kept, constants),) = called
    tests = ("test_schema", "test_faketensor")
    forward, backward = (getattr(torch.ops.jetfire, name).default for name in names)
    plain = [None if x is None else x.detach() for x in tensors]
    torch.library.opcheck(forward, (*plain, *constants), test_utils=tests)
    _, *made = forward(*plain, *constants)
    wanted = [True, make is not frozen, True]
    given = torch.randn_like(y), *kept, *made
    rest = *constants, *wanted
    left = [None] * (len(backward._schema.arguments) - len(given) - len(rest))  # not made
    arguments = *given, *left, *rest
    torch.library.opcheck(backward, arguments, test_utils=tests)
