"""Linear layers of 4-bit codes: their gradients against float64, steps, groups, what is kept.

Draws are of whole backward passes on one input. What they have to average to is the exact product
of what forward multiplied, in float64.
"""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import MOST_K, capacity
from jetfire.nn import (
    RECIPES,
    Int4,
    Int4Conv1D,
    Int4Linear,
    Recipe,
    convert,
    is_int4_state,
    weights_changed,
)
from jetfire.nn import int4 as module_of_int4
from jetfire.nn.int4 import SEARCHED
from jetfire.nn.int4_gradient import MOST_TOKENS, Rounded, Split
from jetfire.ops import (
    int4_gather_rows,
    int4_measured_step,
    int4_quantize,
    int8_dequantize,
    int8_quantize,
)
from jetfire.reference import hadamard
from jetfire.reference.dequantize import dequantize
from jetfire.reference.measured_step import OF_RMS
from jetfire.tests.language_models import compiled

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
INT4 = [name for name, recipe in RECIPES.items() if recipe.int4]
KINDS = {name: RECIPES[name].int4 for name in INT4}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def error_of(found, expected):
    """Of two tensors: the norm of the difference over the norm."""
    difference = found.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


def refused(message, function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert str(error.value) == message


class Exact:
    """The layer's own arithmetic in float64, with rounding passed straight through (LSQ).

    A code at either end counts as clipped, as nibbles cannot tell; but not for the input's gradient
    where the output's is whole: that is multiplied by what the weight's codes stand for, in INT8.

    Attributes:
        leaves: x, the weight (out×in) and the bias, with gradients.
        y: the output.
    """

    def __init__(self, layer, x):
        weight = layer.weight.t() if isinstance(layer, Int4Conv1D) else layer.weight
        values = (x, weight, layer.bias)
        self.leaves = [t.detach().double().requires_grad_() for t in values]
        step_x, step_w = (int4_measured_step(t.detach().contiguous()) for t in (x, weight))
        self.y = self.product(layer, *self.leaves, step_x.double(), step_w.double())

    @classmethod
    def product(cls, layer, x, weight, bias, step_x, step_w):
        h = torch.block_diag(*[hadamard.matrix(layer.group)] * (x.shape[1] // layer.group))
        wide_x, w = cls.quantised(x @ h, step_x), cls.quantised(weight @ h, step_w)
        if layer.int4.gradient != "int8":
            return wide_x @ w.t() + bias
        *_, qt, scale_t = layer.product(None, None)[:-1]
        restored = dequantize(qt, scale_t, 128, torch.float64)
        assert error_of(restored.t(), w @ h) < 0.02
        backward = x @ restored
        return wide_x.detach() @ w.t() + bias + (backward - backward.detach())

    @staticmethod
    def quantised(t, step):
        scaled = t / step
        q = scaled.detach().round().clamp(-8, 7)
        inside = (q > -8) & (q < 7)
        return step * torch.where(inside, scaled + (q - scaled).detach(), q)

    def gradients(self, g):
        """Of x, weight and bias."""
        return torch.autograd.grad(self.y, self.leaves, g.double())


def gradients_of(layer, x, g):
    """As `Exact.gradients` has them."""
    dx, dw, db = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)
    return dx, dw.t() if isinstance(layer, Int4Conv1D) else dw, db


def layer_of(inputs, outputs, int4, device=CPU, kind=Int4Linear):
    layer = Int4Linear(inputs, outputs, int4=int4, device=device)
    if kind is Int4Conv1D:
        layer = Int4Conv1D(nn.Parameter(layer.weight.detach().t().contiguous()), layer.bias, int4)
    return layer


def outlying(rows, columns):
    """Rows of very different norms, and a few columns with outliers, all of them bf16."""
    x = torch.randn(rows, columns) * torch.rand(rows, 1).pow(3).mul(4).add(0.05)
    x[:, ::17] *= 4
    return x.bfloat16().float().requires_grad_()


def token():
    """One row, of which every part matters."""
    return torch.randn(1, 64).bfloat16().float().requires_grad_()


# Gradients


@pytest.mark.parametrize(
    ("gradient", "group", "kind", "draws"),
    [
        ("sampled", 32, Int4Linear, 500),
        ("sampled", 64, Int4Conv1D, 200),
        ("split", 32, Int4Linear, 200),
        ("int8", 32, Int4Linear, 60),
    ],
)
def test_gradients_are_unbiased(gradient, group, kind, draws):
    """Within 4 standard errors, elements and whole tensors; all three of them."""
    layer = layer_of(64, 48, Int4(group, gradient), kind=kind)
    x = outlying(130, 64)
    # Rows of norms 20 apart; much smaller ones are nearly never drawn, and then no normal numbers.
    g = torch.randn(130, 48) * (torch.rand(130, 1).pow(2) + 0.05)
    layer(x)
    exact = Exact(layer, x)
    assert error_of(layer(x), exact.y) < 1e-6
    expected = exact.gradients(g)
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        found.append(gradients_of(layer, x, g))
    names = ("x", "weight", "bias")
    for name, right, *ones in zip(names, expected, *found, strict=True):
        if name == "bias" and gradient in ("sampled", "split"):
            assert error_of(ones[0], right) < 1e-6
            continue
        near(torch.stack(ones).double(), right, name)


def near(found, right, name):
    """The mean of draws, of its elements and along the exact gradient."""
    own = found.std(0) / math.sqrt(len(found))
    error = ((found.mean(0) - right).abs() - 1e-6 * right.abs().max()) / own
    # 6 in 100 000 normal numbers are beyond 4; of few draws more are, and those of a row together.
    assert float((error > 4).double().mean()) <= 1 / len(found), name
    assert float(error.max()) <= 8, name
    along = ((found - right) * right).flatten(1).sum(1) / right.square().sum()
    own = float(along.std()) / math.sqrt(len(found))
    assert abs(float(along.mean())) <= 4 * own, name
    if name in ("x", "weight"):
        assert own < 0.01, name


def of_whole_codes(rows, columns):
    """A gradient each number of which is a code over 256: nothing is rounded."""
    g = torch.randint(-127, 128, (rows, columns)).float()
    g[::128, 0] = 127  # in each block
    return g / 256


@pytest.mark.parametrize("group", [1, 8, 64])
@pytest.mark.parametrize("kind", [Int4Linear, Int4Conv1D])
def test_where_nothing_is_drawn_gradients_are_exact(group, kind):
    layer = layer_of(64, 48, Int4(group, "int8"), kind=kind)
    for x, g in ((token(), of_whole_codes(1, 48)), (outlying(130, 64), of_whole_codes(130, 48))):
        found, right = gradients_of(layer, x, g), Exact(layer, x).gradients(g)
        assert all(error_of(*both) < 5e-5 for both in zip(found, right, strict=True))


@pytest.mark.parametrize("how", ["sampled", "split", "nearest"])
@pytest.mark.parametrize(("group", "block"), [(1, 32), (32, 32), (32, 128), (1024, 32)])
def test_an_inputs_gradient_in_codes_is_quantised_of_its_floats(device, how, group, block):
    """As two launches round, also where one makes both: of all but the widest groups."""
    x, dy = torch.randn(70, 1024, device=device), torch.randn(70, 96, device=device).bfloat16()
    w = torch.randn(96, 1024, device=device)
    codes = int4_quantize(x, int4_measured_step(x), group=group)
    wide = int4_quantize(w, int4_measured_step(w), group=group)
    weight = int4_gather_rows(wide, transpose=True, wide=True)
    split = Split.of(dy, how, torch.arange(3, device=device), True, None, False)
    rounded = Rounded(block, torch.tensor([7], device=device))
    floats = split.of_input(weight, codes, group, None)
    found = split.of_input(weight, codes, group, rounded)
    expected = int8_quantize(floats, block=block, rounding="stochastic", seed=rounded.seed)
    assert found.block == expected.block
    assert torch.equal(found.q, expected.q)
    assert torch.equal(found.scale, expected.scale)


def test_nearest_gradients_are_of_one_part_rounded_to_nearest():
    layer = layer_of(64, 48, KINDS["int4-naive"])
    assert layer.group == 1
    x, g = outlying(130, 64), torch.randn(130, 48)
    layer(x)
    unit = g.abs().max() / 7
    rounded = (g / unit).round() * unit
    found, right = gradients_of(layer, x, g), Exact(layer, x).gradients(rounded)
    for i in (0, 1):
        assert error_of(found[i], right[i]) < 1e-5
    assert error_of(found[2], g.sum(0)) < 1e-6
    again = gradients_of(layer, x, g)
    assert torch.equal(again[1], found[1])
    assert error_of(found[1], Exact(layer, x).gradients(g)[1]) > 0.05


def test_sampling_drops_rows_and_splitting_none():
    """Where one token's gradient dwarfs the others', both keep it."""
    x = outlying(256, 64)
    g = torch.randn(256, 48) / 3
    g[7] = 5.0
    spread = {}
    for gradient in ("sampled", "split", "int8"):
        layer = layer_of(64, 48, Int4(32, gradient))
        layer(x)
        exact = Exact(layer, x).gradients(g)
        torch.manual_seed(1)
        found = gradients_of(layer, x, g)
        assert error_of(found[0][7], exact[0][7]) < 0.03
        spread[gradient] = error_of(found[1], exact[1])
    assert 2 * max(spread["int8"], spread["split"]) < spread["sampled"] < 0.5


@pytest.mark.parametrize("name", INT4)
def test_a_gradient_that_is_not_finite_shows(name):
    layer = layer_of(64, 48, KINDS[name])
    x, g = outlying(40, 64), torch.randn(40, 48)
    layer(x)
    g[3, 5] = math.inf
    found = gradients_of(layer, x, g)
    assert all(not bool(t.isfinite().all()) for t in found)


@pytest.mark.parametrize("name", INT4)
def test_a_gradient_of_zeros_gives_zeros(name):
    layer = layer_of(64, 48, KINDS[name])
    x = outlying(40, 64)
    layer(x)
    assert not any(bool(t.any()) for t in gradients_of(layer, x, torch.zeros(40, 48)))


def test_input_that_is_not_finite_shows():
    layer = layer_of(64, 48, Int4())
    x = outlying(40, 64).detach()
    layer(x)
    x[3, 5] = math.nan
    assert not bool(layer(x).isfinite().any())


@pytest.mark.parametrize("name", INT4)
def test_near_a_linear_layer(device, name):
    layer = layer_of(128, 96, KINDS[name], device)
    x = torch.randn(3, 40, 128, device=device, requires_grad=True)
    y = layer(x)
    exact = functional.linear(x, layer.weight, layer.bias)
    assert y.shape == exact.shape
    assert error_of(y, exact) < 0.3
    g = torch.randn_like(y)
    leaves = (x, layer.weight, layer.bias)
    found, right = (torch.autograd.grad(out, leaves, g) for out in (y, exact))
    for ours, theirs in zip(found[:2], right[:2], strict=True):
        # Noise lies across the gradient; what there is along it is the gradient.
        along = float((ours * theirs).sum() / theirs.square().sum())
        assert abs(along - 1) < 0.2
    of_codes = KINDS[name].gradient == "int8"
    assert error_of(found[2], right[2]) < (0.02 if of_codes else 1e-5)


def test_buffers_may_be_written_between_forward_and_backward():
    """As DDP does before each forward."""
    layer, x = layer_of(64, 48, Int4("search")), outlying(40, 64)
    layer(x)
    y = layer(x)
    layer.searched.copy_(layer.searched.clone())
    y.sum().backward()
    assert layer.weight.grad is not None


def test_a_weight_that_changed_since_forward_is_refused():
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [Int4Linear, Int4Conv1D])
@pytest.mark.parametrize("name", INT4)
def test_a_weight_s_gradient_passes_where_the_weight_was_not_clipped(kind, name, monkeypatch):
    """As is seen from the weight itself and its step."""
    layer, x = layer_of(64, 96, KINDS[name], kind=kind), outlying(40, 64)
    with torch.no_grad():
        layer.weight[:, ::17] *= 30
    given, backward = [], module_of_int4.int4_quantize_backward

    def recorded(dw_hat, **options):
        given.append(dw_hat)
        return backward(dw_hat, **options)

    monkeypatch.setattr(module_of_int4, "int4_quantize_backward", recorded)
    found = gradients_of(layer, x, torch.randn(40, 96))[1]
    (dw_hat,) = given
    weight = (layer.weight.t() if kind is Int4Conv1D else layer.weight).detach().contiguous()
    step = int4_measured_step(weight)
    expected, _ = backward(dw_hat, x=weight, step=step, group=layer.group)
    assert torch.equal(found, expected)
    q = int4_quantize(weight, step, group=layer.group, layout="wide").wide >> 4
    assert 0 < int(((q == -8) | (q == 7)).sum()) < q.numel()


def test_frozen():
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64)
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None
    layer.requires_grad_(True)
    layer.weight.requires_grad_(False)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(layer.bias.grad, torch.full((48,), 40.0))
    plain = Int4Linear(64, 48, bias=False)
    plain(x).sum().backward()
    assert plain.bias is None


@pytest.mark.parametrize("name", [name for name in INT4 if KINDS[name].gradient != "int8"])
@pytest.mark.parametrize(
    ("frozen", "products"), [((), ["both"]), (("x",), ["wgrad"]), (("weight",), ["dgrad"])]
)
def test_rows_of_all_gradients_are_drawn_by_one_call(name, frozen, products, monkeypatch):
    launched, launch = [], registry.get_kernel("sample_rows", "torch").launch

    def noted(problem, *rest):
        launched.append(problem.product)
        launch(problem, *rest)

    monkeypatch.setattr(registry.get_kernel("sample_rows", "torch"), "launch", noted)
    layer, x = layer_of(64, 48, KINDS[name]), outlying(40, 64)
    layer.weight.requires_grad_("weight" not in frozen)
    layer(x.detach() if "x" in frozen else x).sum().backward()
    assert launched == products


@pytest.mark.parametrize("name", [name for name in INT4 if KINDS[name].gradient != "int8"])
def test_a_gradient_is_the_same_whether_the_other_is_wanted(name):
    """Each product's rows have a seed of their own."""
    layer, x = layer_of(64, 48, KINDS[name]), outlying(40, 64)
    dy = torch.randn(40, 48)

    def gradients(*of):
        torch.manual_seed(1)
        return torch.autograd.grad(layer(x), of, dy)

    of_x, of_weight = gradients(x, layer.weight)
    assert torch.equal(of_x, gradients(x)[0])
    x = x.detach()
    assert torch.equal(of_weight, gradients(layer.weight)[0])


# What backward keeps


class Kept:
    """Storages that autograd keeps, each once, but those of some tensors."""

    def __init__(self, *ignored):
        self.ignored = {t.untyped_storage().data_ptr() for t in ignored if t is not None}
        self.storages = {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def bytes_of(self, call):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            held = call()
        del held
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INT4)
def test_keeps_half_a_byte_an_element(device, name, dtype):
    """The codes, and four bytes a row."""
    rows, inputs = 1024, 384
    layer = layer_of(inputs, 192, KINDS[name], device)
    x = torch.randn(rows, inputs, device=device, dtype=dtype, requires_grad=True)
    layer(x)
    known = *layer.parameters(), *layer._codes._made
    found = Kept(*known).bytes_of(lambda: layer(x))
    expected = 1 / 2 + 4 / inputs
    assert expected <= found / x.numel() <= expected + 0.005 < 0.55


def test_keeps_nothing_without_a_backward():
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64).detach()
    layer(x)

    def forward():
        with torch.no_grad():
            return layer(x)

    assert Kept().bytes_of(forward) == 0


# Steps, and the group that a first batch asks for


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_a_measured_step_suits_normal_numbers(group, scale):
    """Within 20% of the least mean squared error, of any size and after any transform."""
    x = scale * torch.randn(500, 256)
    transformed = hadamard.transform(x, group)

    def error(step):
        codes = (transformed / step).round().clamp(-7, 7)
        return float((codes * step - transformed).square().mean())

    step = float(int4_measured_step(x))
    assert error(step) < 1.2 * min(error(step * part / 20) for part in range(10, 40))


def test_a_step_of_many_rows_reads_every_position_alike():
    """Every 1024th row, the first of a sequence, is 10 times as large, and tells as any other."""
    x = torch.randn(64 * 1024, 64)
    x[::1024] *= 10
    whole = OF_RMS * math.sqrt(float(x.square().mean()))
    assert float(int4_measured_step(x)) == pytest.approx(whole, rel=0.1)


def test_codes_have_the_step_of_their_values():
    codes = int8_quantize(outlying(1000, 96).detach(), block=32)
    values = int4_measured_step(int8_dequantize(codes))
    assert float(int4_measured_step(codes)) == pytest.approx(float(values), rel=1e-3)


def test_steps_follow_their_batch():
    """A batch a thousand times as large is as near to a linear layer's as the first one was."""
    layer, x = layer_of(64, 48, Int4()), outlying(100, 64).detach()
    bias = layer.bias.detach()
    before = layer(x) - bias
    assert error_of((layer(1024 * x) - bias) / 1024, before) < 1e-6
    with torch.no_grad():
        layer.weight.mul_(1024)
    assert error_of((layer(x) - bias) / 1024, before) < 1e-6


@pytest.mark.parametrize("gradient", ["sampled", "int8"])
def test_any_number_of_tokens_compiles_to_one_graph(gradient):
    """Whether all rows tell a step or some do. Its bits are those of a layer not compiled."""
    layer = layer_of(64, 48, Int4(32, gradient))
    graphs = compiled(layer, dynamic=True, fullgraph=True)
    other = Int4Linear.over(layer, layer.int4)
    for rows in (500, 300, 1500, 3000):  # of several blocks
        x = torch.randn(rows, 64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, other(x))
    assert len(graphs) == 2


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("of", ["x", "weight"])
def test_what_is_not_finite_shows_and_zeros_give_the_bias(bad, of):
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64).detach()
    right, weight = Int4Linear.over(layer, layer.int4)(x), layer.weight.detach().clone()
    broken = torch.full_like(x, bad) if of == "x" else x
    if of == "weight":
        layer.weight.data.fill_(bad)
    y = layer(broken)
    assert bool(y.isfinite().any()) == (bad == 0)
    if bad == 0:
        assert torch.equal(y, layer.bias.expand(40, -1))
    layer.weight.data.copy_(weight)
    weights_changed()
    assert torch.equal(layer(x), right)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_no_group_is_kept_of_what_tells_none(bad):
    layer, x = layer_of(64, 48, Int4("search")), outlying(40, 64).detach()
    layer(torch.full_like(x, bad))
    assert layer.group is None
    layer(x)
    assert layer.group == hadamard.search_group(x)


@pytest.mark.parametrize("inference", [False, True])
def test_evaluation_before_training_takes_its_own_group(inference):
    layer = layer_of(64, 48, Int4("search")).eval()
    x = torch.randn(40, 64, requires_grad=True)
    state = copy.deepcopy(layer.state_dict())
    with torch.inference_mode(inference):
        y = layer(x)
        assert error_of(y, functional.linear(x, layer.weight, layer.bias)) < 0.3
        assert torch.equal(layer(x), y)
    assert layer.group is None
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layer.train()
    assert torch.equal(layer(x), y)
    assert layer.group is not None
    layer(x).sum().backward()


def test_groups_are_searched_on_the_first_batch():
    """Outliers in one column in 64 want a transform as wide; equal rows of ±1 want none."""
    layer = layer_of(256, 48, Int4("search"))
    x = torch.randn(200, 256)
    x[:, 5::64] *= 30
    layer(x)
    assert layer.group == hadamard.search_group(x) >= 32
    assert float(layer.searched) == layer.group
    other = layer_of(256, 48, Int4("search"))
    signs = (torch.randint(2, (200, 256)) * 2 - 1).float()
    other(signs)
    assert other.group == hadamard.search_group(signs)
    assert other.group != layer.group
    again = layer_of(256, 48, Int4("search"))
    again.load_state_dict(layer.state_dict())
    assert again.group == layer.group
    assert torch.equal(again(x), layer(x))
    fixed = layer_of(256, 48, Int4(2))
    fixed.load_state_dict(layer.state_dict())
    assert fixed.group == 2


class Ranks:
    """Stands for torch.distributed in one process of two; the first sends some groups in turn.

    Args:
        groups: those of another process, 0 for none; None where this process is the first.
    """

    def __init__(self, *groups):
        self.groups, self.sent = list(groups), []

    is_available = is_initialized = staticmethod(lambda: True)

    def broadcast(self, tensor, source):
        assert source == 0
        group = self.groups.pop(0)
        self.sent.append(int(tensor) if group is None else tensor.fill_(group).item())


@pytest.mark.parametrize("group", [16, "search"])
def test_processes_share_a_group_that_is_searched(group, monkeypatch):
    layer, x = layer_of(64, 48, Int4(group)), outlying(40, 64)
    monkeypatch.setattr(module_of_int4, "dist", Ranks(4))
    layer.eval()(x)
    assert module_of_int4.dist.sent == []  # others may not be evaluating
    layer.train()(x)
    layer(x)
    searched = group == "search"
    assert module_of_int4.dist.sent == [4] * searched
    assert layer.group == (4 if searched else 16)


@pytest.mark.parametrize("infinite", ["here", "there"])
def test_processes_ask_again_together_where_the_first_one_s_batch_keeps_nothing(
    infinite, monkeypatch
):
    """One process that asked alone would wait for the others without end."""
    layer, x = layer_of(64, 48, Int4("search")), outlying(40, 64).detach()
    first = x.clone()
    first[0, 0] = torch.inf
    monkeypatch.setattr(
        module_of_int4, "dist", Ranks(None, None) if infinite == "here" else Ranks(0, 4)
    )
    layer(first if infinite == "here" else x)
    assert layer.group is None
    layer(x)
    layer(x)
    expected = hadamard.search_group(x) if infinite == "here" else 4
    assert module_of_int4.dist.sent == [0, expected]
    assert layer.group == expected


def test_a_process_keeps_the_first_one_s_group_though_its_own_batch_is_not_finite(monkeypatch):
    layer, x = layer_of(64, 48, Int4("search")), outlying(40, 64).detach()
    x[0, 0] = torch.inf
    monkeypatch.setattr(module_of_int4, "dist", Ranks(4))
    layer(x)
    assert layer.group == 4


# When weights are quantised, state, copies


def trained(layer, x):
    """A step of an optimizer, of all the parameters."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    layer(x).square().mean().backward()
    optimizer.step()
    layer.zero_grad()
    return layer


def test_weights_are_quantised_once_a_step(monkeypatch):
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64)
    calls, quantize = [], module_of_int4.int4_quantize

    def counted(matrix, *args, **options):
        if matrix.shape == (48, 64):
            calls.append(options["layout"])
        return quantize(matrix, *args, **options)

    monkeypatch.setattr(module_of_int4, "int4_quantize", counted)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        for _ in range(3):
            layer(x).sum().backward()
            assert calls == ["both"] * (step + 1)
        before = layer(x)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("change", ["weight", "data"])
def test_what_changes_shows(change):
    layer, x = layer_of(64, 48, Int4()), outlying(40, 64)
    before = layer(x)
    with torch.no_grad():
        if change == "data":
            layer.weight.data.mul_(-2)
            weights_changed()
        else:
            layer.weight.mul_(-2)
    assert error_of(layer(x), before) > 0.1


@pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("group", [32, "search"])
def test_copies_are_their_own(through, group):
    x = outlying(40, 64)
    layer = trained(layer_of(64, 48, Int4(group)), x)
    before = layer(x)
    twin = through(layer)
    assert torch.equal(twin(x), before)
    assert twin.group == layer.group
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(-2)
    assert error_of(twin(x), before) > 0.1
    assert torch.equal(layer(x), before)
    fresh = through(layer_of(64, 48, Int4(group)))
    assert fresh.group == (None if group == "search" else group)


@pytest.mark.parametrize("assign", [False, True])
def test_state_of_its_own_and_of_a_linear_layer(assign):
    x, plain = outlying(40, 64), nn.Linear(64, 48)
    layer = trained(layer_of(64, 48, Int4()), x)
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict(), assign=assign)
    again = Int4Linear(64, 48)
    again.load_state_dict(plain.state_dict(), assign=assign)
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("group", [32, "search"])
def test_a_state_of_learned_steps_loads_without_them(group):
    layer, plain = layer_of(64, 48, Int4(group)), nn.Linear(64, 48)
    learned = {"step_x": torch.ones(1), "step_w": torch.ones(1), "calibration": torch.ones(3)}
    assert all(map(is_int4_state, learned))
    layer.load_state_dict(plain.state_dict() | learned)
    assert torch.equal(layer.weight, plain.weight)
    assert layer.group == (32 if group == 32 else None)


@pytest.mark.parametrize("assign", [False, True])
def test_state_of_a_group_that_was_searched(assign):
    x, plain = outlying(40, 64), nn.Linear(64, 48)
    layer = trained(layer_of(64, 48, Int4("search")), x)
    assert [name for name in layer.state_dict() if is_int4_state(name)] == [SEARCHED]
    again = Int4Linear(64, 48, int4=Int4("search"))
    again.load_state_dict(layer.state_dict(), assign=assign)
    assert again.group == layer.group
    assert torch.equal(again(x), layer(x))
    again.load_state_dict(plain.state_dict(), assign=assign)
    assert again.group is None
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not is_int4_state(k)})


@pytest.mark.parametrize("assigned", ["state", "weight"])
def test_a_layer_made_on_meta_keeps_its_group_once_its_weight_is_assigned(assigned):
    x, source = outlying(40, 64), nn.Linear(64, 48)
    layer = layer_of(64, 48, Int4("search"), torch.device("meta"))
    if assigned == "state":
        layer.load_state_dict(source.state_dict(), assign=True)
    else:
        layer.weight, layer.bias = source.weight, source.bias
    trained(layer, x)
    again = Int4Linear(64, 48, int4=Int4("search"))
    again.load_state_dict(layer.state_dict())
    assert again.group == layer.group
    assert layer.group is not None


def test_reset():
    x = outlying(40, 64)
    layer = trained(layer_of(64, 48, Int4("search")), x)
    layer.reset_parameters()
    assert layer.group is None
    layer(x)
    assert layer.group is not None


def test_seed_repeats_gradients(device):
    layer = layer_of(64, 48, Int4(), device)
    x = torch.randn(80, 64, device=device, requires_grad=True)
    g = torch.randn(80, 48, device=device)
    layer(x)

    def gradients(seed):
        torch.manual_seed(seed)
        return torch.autograd.grad(layer(x), (x, *layer.parameters()), g)

    first, again, other = gradients(1), gradients(1), gradients(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(first[i], other[i]) for i in (0, 1))


def test_refuses_to_be_differentiated_twice():
    layer, x = layer_of(64, 48, Int4()), outlying(16, 64)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# Dtypes, layouts, what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(device, dtype):
    layer = layer_of(64, 48, Int4(), device)
    x = torch.randn(2, 8, 64, device=device).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_half_parameters(device):
    layer = layer_of(64, 48, Int4(), device).bfloat16()
    x = torch.randn(8, 64, device=device).bfloat16()
    y = layer(x)
    assert error_of(y, functional.linear(x, layer.weight, layer.bias)) < 0.3
    y.sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in layer.parameters())


def test_autocast(device):
    layer = layer_of(64, 48, Int4(), device)
    x = torch.randn(8, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 5, 64)])
def test_any_leading_shape(shape):
    layer = layer_of(64, 48, Int4())
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad.shape == shape


def test_input_of_any_layout():
    layer, x = layer_of(64, 48, Int4()), torch.randn(16, 128)
    layer(x[:, :64])
    assert torch.equal(layer(x[:, :64]), layer(x[:, :64].contiguous()))
    assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))


def test_tokens_whose_sums_would_not_fit_are_refused(monkeypatch):
    """Where they are given, and not in the middle of backward; evaluation has no such limit."""
    kinds = (
        ("sampled", 152007, 2, "half"),
        ("split", 85504, 2, "all"),
        ("nearest", 171136, 1, "all"),
    )
    for gradient, most, *kept in kinds:
        assert MOST_TOKENS[gradient] == most
        assert capacity(most, kept[0], "wgrad", kept[1]) <= MOST_K["wgrad"]
        assert capacity(most + 1, kept[0], "wgrad", kept[1]) > MOST_K["wgrad"]
    assert "int8" not in MOST_TOKENS  # whose sums are of a block at a time
    layer, x = Int4Linear(32, 16), torch.randn(40, 32)
    monkeypatch.setitem(MOST_TOKENS, "sampled", 39)
    with pytest.raises(UsageError, match="40 tokens at once: expected at most 39"):
        layer(x)
    with torch.no_grad():
        layer(x)
    with pytest.raises(UsageError, match="131072 outputs: expected at most 131071"):
        Int4Linear(32, 1 << 17)


def test_refuses_in_one_line():
    x = torch.zeros(2, 64)
    refused("group=3: expected a power of two from 1 to 1024, or 'search'", Int4, 3)
    refused("group=2048: expected a power of two from 1 to 1024, or 'search'", Int4, 2048)
    refused("gradient=exact: expected one of sampled, split, int8, nearest", Int4, 32, "exact")
    refused("group=32 with 40 inputs: expected 1 or 2 or 4 or 8", Int4Linear, 40, 48)
    even = "expected even numbers, two codes to a byte"
    refused(f"64 inputs, 47 outputs: {even}", Int4Linear, 64, 47)
    refused(f"63 inputs, 48 outputs: {even}", Int4Linear, 63, 48, int4=Int4(1))
    floats = "expected bfloat16, float16 or float32"
    layer = Int4Linear(64, 48)
    refused(f"input of torch.float64: {floats}", layer, x.double())
    refused("input of shape (2, 63): expected 64 columns", layer, x[:, :63])
    refused(f"weight of torch.float64: {floats}", layer.double(), x)


def test_repr():
    expected = "Int4Linear(in_features=64, out_features=48, bias=True, group=32, gradient=sampled)"
    assert repr(Int4Linear(64, 48)) == expected
    conv = layer_of(64, 48, Int4("search", "int8"), kind=Int4Conv1D)
    assert repr(conv).endswith("out_features=48, bias=True, group=search, gradient=int8)")


# Conversion


def test_recipes():
    assert INT4 == ["int4-hq-lss", "int4-hq-bs", "int4-hq", "int4-naive"]
    of_hq = [Int4(32, gradient) for gradient in ("sampled", "split", "int8")]
    assert list(KINDS.values()) == [*of_hq, Int4(1, "nearest")]
    assert [name for name, recipe in RECIPES.items() if recipe.plain] == ["bf16"]


@pytest.mark.parametrize("name", INT4)
def test_converted_is_near_float(device, name):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 40)).to(device)
    exact = copy.deepcopy(model)
    parameters = list(model.parameters())
    report = convert(model, name)
    assert report.converted == ("0", "2")
    assert model[0].int4 == KINDS[name]
    assert all(any(p is q for q in model.parameters()) for p in parameters)
    assert {p.device for p in model.parameters()} == {device}
    assert list(model.state_dict()) == list(exact.state_dict())
    x = torch.randn(3, 20, 64, device=device)
    assert error_of(model(x), exact(x)) < 0.4
    model.load_state_dict(exact.state_dict())


def test_what_cannot_be_converted_is_left():
    model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 33), nn.Linear(33, 64, bias=False))
    report = convert(model, "int4-hq-lss")
    even = "expected even numbers, two codes to a byte"
    assert report.left == {
        "0": "group=32 with 40 inputs: expected 1 or 2 or 4 or 8",
        "1": f"64 inputs, 33 outputs: {even}",
        "2": f"33 inputs, 64 outputs: {even}",
    }
    model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 2, bias=False)).eval()
    report = convert(model, Recipe("mine", int4=Int4("search", "int8")))
    assert report.converted == ("0", "1")
    assert model[1].bias is None
    assert not model[0].training


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model, linears = transformers.GPT2LMHeadModel(config), 2 * 4
    else:
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
        model, linears = transformers.LlamaForCausalLM(config), 2 * 7
    report = convert(model, "int4-hq-lss")
    assert len(report.converted) == linears
    kinds = {type(model.get_submodule(name)) for name in report.converted}
    assert kinds == {Int4Conv1D if kind == "gpt2" else Int4Linear}
    ids = torch.randint(96, (4, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05


# torch.compile, and the GPU


def test_compiles(device):
    layer = layer_of(64, 48, Int4(), device)
    x = torch.randn(80, 64, device=device, requires_grad=True)
    layer(x)  # the first batch is not for a compiler
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = {}
    for name, module in (("eager", layer), ("compiled", fast)):
        torch.manual_seed(5)
        y = module(x)
        found[name] = (y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters())))
    for ours, theirs in zip(found["compiled"], found["eager"], strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        layer.weight.mul_(-1)
    assert error_of(fast(x), layer(x)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", INT4)
def test_a_step_does_not_wait_for_the_device(name):
    layer = layer_of(256, 192, KINDS[name], torch.device("cuda"))
    x = torch.randn(500, 256, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        layer(x).square().mean().backward()
        optimizer.step()

    step()  # the first batch's, which does, and kernels' compilation
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(layer.weight.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", INT4)
def test_a_step_is_a_graph(name):
    """Each replay quantises the weights as they are, and what is eager between does not disturb."""
    layer = layer_of(256, 192, KINDS[name], torch.device("cuda"))
    x = torch.randn(500, 256, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x)
        y.square().mean().backward()
    graph.replay()
    assert torch.equal(y, layer(x))
    with torch.no_grad():
        layer.weight.mul_(-1)
    assert error_of(layer(x), y) > 1
    graph.replay()
    assert torch.equal(y, layer(x))
    assert bool(layer.weight.grad.isfinite().all())
