"""GPT-2's block with products in 4 bits and INT8 between them.

What draws have to average to is the gradient of what forward computed, in float64, with rounding
passed straight through.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from jetfire.gpt2.model import gpt2
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.model.language_model import linear_of
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.training.graph import graphed as graphed_step
from jetfire.gpt2.training.settings import make
from jetfire.gpt2.training.step import Step
from jetfire.nn import (
    RECIPES,
    Int4,
    Int4Block,
    Int8Block,
    Stream,
    attention,
    flow,
    int4,
    int4_block,
    int4_gradient,
    products,
)
from jetfire.nn.recipes import DEFAULT
from jetfire.ops import (
    int4_measured_step,
    int8_add,
    int8_dequantize,
    int8_gelu,
    int8_layernorm,
    int8_quantize,
)
from jetfire.tests.test_int4_linear import Exact, Kept, error_of, refused

pytestmark = pytest.mark.usefixtures("one_thread")

INT4 = {name: recipe.int4 for name, recipe in RECIPES.items() if recipe.int4}
WIDTH, HEADS, BATCH, TOKENS = 64, 2, 2, 48


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def block_of(int4=DEFAULT, device="cpu", dropout=0.0):
    """A block whose branches are about as large as the stream, and whose biases are not 0."""
    block = Int4Block(WIDTH, HEADS, dropout, int4, device=device)
    with torch.no_grad():
        for name, p in block.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1)
            elif p.dim() == 2:
                p.normal_(std=1.5 / math.sqrt(p.shape[1]))
    return block


def stream_of(device="cpu"):
    """A stream as it enters, and the gradient of what leaves."""
    x, dy = torch.randn(2, BATCH * TOKENS, WIDTH, device=device).bfloat16()
    return x.requires_grad_(), dy


def unfused(name):
    """The recipe whose blocks torch runs operation by operation."""
    return replace(RECIPES[name], flow=None)


def outcome(block, x, dy):
    """What a block of any kind adds to the stream, and gradients, by name."""
    if isinstance(block, Int4Block):
        y = block(Stream.of(x, 32), BATCH).x
    else:
        y = block(x.float().view(BATCH, TOKENS, WIDTH)).view(x.shape)
    own = dict(block.named_parameters())
    dx, *grads = torch.autograd.grad(y, [x, *own.values()], dy.to(y.dtype))
    return {"y": y - x, "dx": dx.float() - dy, **dict(zip(own, grads, strict=True))}


def linears_of(block):
    return [block.qkv, block.projection, block.expand, block.contract]


def run(block, x, dy):
    """What leaves the block, and the gradients of x and of all parameters."""
    y = block(Stream.of(x, block.flow), BATCH).x
    return [y, *torch.autograd.grad(y, [x, *block.parameters()], dy)]


# Beside what is exact


def passed(exact, value):
    """A value that was rounded, with the gradient of what it was rounded from."""
    return exact + (value.double() - exact).detach()


def attention_of(parts):
    heads = (t.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for t in parts)
    attended = F.scaled_dot_product_attention(*heads, is_causal=True)
    return attended.transpose(1, 2).reshape(parts[0].shape)


class ExactBlock:
    """The block's own arithmetic in float64: its kernels' values, and exact gradients.

    Attributes:
        leaves: x, and what stands for each parameter of the block, in its order.
        y: what leaves.
    """

    def __init__(self, block, x):
        self.block = block
        leaves = [x, *block.parameters()]
        self.leaves = [t.detach().double().requires_grad_() for t in leaves]
        names = [name for name, _ in block.named_parameters()]
        self.own = dict(zip(names, self.leaves[1:], strict=True))
        stream, codes = self.leaves[0], int8_quantize(x.detach(), block=32)
        qkv = self.product("qkv", *self.normed("norm1", stream, codes)).split(WIDTH, 1)
        attended = passed(attention_of(qkv), attention_of([t.bfloat16() for t in qkv]))
        y, codes = self.codes("projection", attended, attended.detach().bfloat16())
        stream, *codes = self.added(stream, y, codes)
        f, codes = self.codes("expand", *self.normed("norm2", stream, *codes))
        u, exact = int8_gelu(codes), F.gelu(f, approximate="tanh")
        y, codes = self.codes("contract", passed(exact, int8_dequantize(u, out="fp32")), u)
        self.y, *_ = self.added(stream, y, codes)

    def normed(self, name, x, codes, mean=None, rstd=None):
        norm = getattr(self.block, name)
        x = passed(x, int8_dequantize(codes, out="fp32"))
        weight, bias = self.own[f"{name}.weight"], self.own[f"{name}.bias"]
        h, *_ = int8_layernorm(codes, norm.weight, norm.bias, mean=mean, rstd=rstd)
        exact = F.layer_norm(x, (WIDTH,), weight, bias)
        return passed(exact, int8_dequantize(h, out="fp32")), h

    def product(self, name, x, given):
        """The product of x, which kernels are given as floats or codes."""
        value, _ = int4.multiply(given, getattr(self.block, name).product(None, None))
        return passed(self.exact(name, x, given), value)

    def codes(self, name, x, given):
        """The same with the codes that it is, of fp32."""
        codes, _ = int4.multiply(given, getattr(self.block, name).product(None, None), 32)
        return passed(self.exact(name, x, given), int8_dequantize(codes, out="fp32")), codes

    def exact(self, name, x, given):
        layer = getattr(self.block, name)
        if layer.group > 32 and name != "projection":  # then codes are made floats
            x = passed(x, int8_dequantize(given))
        steps = (int4_measured_step(t).double() for t in (given, layer.weight.detach()))
        parameters = self.own[f"{name}.weight"], self.own[f"{name}.bias"]
        return Exact.product(layer, x, *parameters, *steps)

    def added(self, x, y, codes):
        total, *codes = int8_add(x.detach().bfloat16(), codes)
        return passed(x + y, total), *codes

    def gradients(self, dy):
        """By name."""
        grads = torch.autograd.grad(self.y, self.leaves, dy.double())
        return dict(zip(("x", *self.own), grads, strict=True))


@pytest.mark.parametrize(
    ("group", "gradient", "draws"), [(32, "int8", 100), (64, "int8", 100), (32, "sampled", 200)]
)
def test_gradients_are_unbiased(group, gradient, draws):
    """Within 4 standard errors, elements and whole tensors, and what BF16 rounds.

    A group of 64 does not lie within the codes' blocks.
    """
    block = block_of(Int4(group, gradient))
    x, dy = stream_of()
    run(block, x, dy)
    exact = ExactBlock(block, x)
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        y, *grads = run(block, x, dy)
        assert torch.equal(y.double(), exact.y.detach())
        found.append(grads)
    for (name, right), *ones in zip(exact.gradients(dy).items(), *found, strict=True):
        near(torch.stack(ones).double(), right, name)


def near(found, right, name):
    """The mean of draws, of its elements and along the exact gradient."""
    own = found.std(0) / math.sqrt(len(found))
    error = (found.mean(0) - right).abs() - 0.005 * right.abs().max()
    assert float((error > 4 * own).double().mean()) <= 1 / len(found), name
    assert not bool((error > 8 * own).any()), name
    along = ((found - right) * right).flatten(1).sum(1) / right.square().sum()
    assert abs(float(along.mean())) <= 4 * float(along.std()) / math.sqrt(len(found)) + 0.005, name


@pytest.mark.parametrize("name", INT4)
def test_as_accurate_as_operation_by_operation(device, name):
    """INT8 between products adds little to what 4 bits leave out."""
    block = block_of(INT4[name], device)
    x, dy = stream_of(device)
    shape = Shape(1, HEADS, WIDTH, TOKENS, 64)
    plain, exact = (
        gpt2.Block(shape, linear_of(r)).to(device) for r in (unfused(name), RECIPES["bf16"])
    )
    plain.load_state_dict(block.state_dict())
    exact.load_state_dict(block.state_dict())
    right = outcome(exact, x, dy)
    errors = {}
    for which in (block, plain):
        outcome(which, x, dy)  # the first batch
        draws = [outcome(which, x, dy) for _ in range(16)]
        errors[which] = {n: sum(error_of(d[n], right[n]) for d in draws) / 16 for n in right}
    for what, error in errors[block].items():
        assert error < 1.2 * errors[plain][what] + 0.02, what


def test_what_is_rounded_has_a_key_of_its_own(device, monkeypatch):
    """Roundings that shared a key would not be independent, and means hide that well."""
    seeds = []

    def recorded(function):
        def call(*args, **options):
            if options.get("seed") is not None:
                seeds.extend(options["seed"].tolist())
            return function(*args, **options)

        return call

    for module in (int4_block, int4, int4_gradient, flow, products, attention):
        for name in [name for name in vars(module) if name.startswith(("int4_", "int8_"))]:
            monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    run(block_of(device=device), *stream_of(device))
    # Of each product its gradient's parts and two draws of rows; of three what that of its input
    # becomes as codes, and what a norm or GELU makes of those; of attention what it keeps, and its
    # gradients.
    assert len(seeds) == 4 * 3 + 3 * 2 + 4 + 1
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("name", INT4)
def test_codes_of_the_stream_s_gradient_are_made_once(device, monkeypatch, name):
    """Of two blocks the last product alone quantises it itself: nobody follows it."""
    first, second = (block_of(INT4[name], device) for _ in range(2))
    x, dy = stream_of(device)
    made = []

    def recorded(function):
        def call(g, *args, **options):
            made.append(function.__name__)
            return function(g, *args, **options)

        return call

    for function in ("quantised_gradient", "int4_bit_split"):
        monkeypatch.setattr(int4_gradient, function, recorded(getattr(int4_gradient, function)))
    y = second(first(Stream.of(x, 32), BATCH), BATCH).x
    torch.autograd.grad(y, [x, *first.parameters(), *second.parameters()], dy)
    of_stream = "quantised_gradient" if name == "int4-hq" else "int4_bit_split"
    assert made.count(of_stream) == 1


@pytest.mark.parametrize(
    ("one", "other"), itertools.permutations(["int8", "int8-block32", "int4-hq", "int4-hq-lss"], 2)
)
def test_blocks_of_other_recipes_may_follow(device, one, other):
    """What one leaves of the stream's gradient may lie otherwise than the other multiplies it.

    In other blocks, or without a transpose. FC2's bias receives the sum of its columns, whoever
    rounded it.
    """

    def made(name):
        if name.startswith("int8"):
            block = RECIPES[name].block
            return Int8Block(WIDTH, HEADS, block=block, flow=32, device=device)
        return block_of(INT4[name], device)

    first, second = made(one), made(other)
    x, dy = stream_of(device)

    def gradient(handed):
        torch.manual_seed(1)
        stream = first(Stream.of(x, 32), BATCH)
        y = second(stream if handed else stream._replace(handoff=None), BATCH).x
        return torch.autograd.grad(y, first.contract.bias, dy)[0]

    assert error_of(gradient(True), gradient(False)) < 0.05


def test_codes_that_lie_otherwise_are_not_handed_over():
    gradient = torch.randn(64, 96)
    codes, both = (int8_quantize(gradient, block=32, layout=layout) for layout in ("q", "both"))
    handoff = products.Handoff()

    def taken(given, *wanted):
        handoff.put(gradient, given)
        return handoff.take(gradient, *wanted)

    assert taken(codes, "q") is codes
    assert taken(codes, "both") is None
    assert taken(both, "q") is both
    assert taken(both, "both", 32) is both
    assert taken(both, "both", 128) is None
    assert handoff.take(gradient, "q") is None


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", INT4)
def test_a_transpose_is_written_where_it_is_read(device, monkeypatch, name, dropout):
    """Of two blocks; of a gradient in parts none is, and gradients are the same with it."""
    blocks = [block_of(INT4[name], device, dropout) for _ in range(2)]
    x, dy = stream_of(device)
    run(blocks[0], x, dy)
    layouts, parameters = [], [p for block in blocks for p in block.parameters()]

    def recorded(function):
        def call(*args, **options):
            layouts.append(options.get("layout", "q"))
            return function(*args, **options)

        return call

    def gradients():
        torch.manual_seed(1)
        stream = Stream.of(x, 32)
        for block in blocks:
            stream = block(stream, BATCH)
        return torch.autograd.grad(stream.x, [x, *parameters], dy)

    found = gradients()
    written = ("int8_gelu_backward", "int8_layernorm_add_backward", "int8_dropout_backward")
    for module, function in [*((int4_block, f) for f in written), (flow, "int8_quantize_qkv")]:
        monkeypatch.setattr(module, function, recorded(getattr(module, function)))
    gradients()
    whole = INT4[name].gradient == "int8"
    assert layouts.count("both") == (2 * 3 + 1 + 4 * (dropout > 0) if whole else 0)
    assert len(layouts) == 2 * 4 + 4 * (dropout > 0)
    monkeypatch.setattr(int4.Int4Setting, "layout", "both")
    for given, right in zip(found, gradients(), strict=True):
        if given.dim() == 1:  # a bias's, added up in another order
            torch.testing.assert_close(given, right, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(given, right)


@pytest.mark.parametrize("gradient", ["int8", "sampled"])
def test_dropped_numbers_have_no_gradient(device, monkeypatch, gradient):
    flow_setting = int4_block._Flow(32, 1e-5, 0.25)
    layer = block_of(Int4(32, gradient), device).projection
    x, y = torch.rand(2, 96, WIDTH, device=device).add(1).bfloat16().requires_grad_().unbind()
    with torch.no_grad():  # its output is above 0, so that what adds nothing was dropped
        layer.weight.abs_()
        layer.bias.abs_()
    dy, given, backward = torch.ones_like(x), [], int4_block.multiply_backward

    def recorded(gradient, *args):
        given.append(int8_dequantize(gradient))
        return backward(gradient, *args)

    monkeypatch.setattr(int4_block, "multiply_backward", recorded)
    by = layer.product(y.detach, products.draw(int4_gradient.KEYS, x.device))
    keys = products.draw(2, x.device)
    total, *_ = int4_block._projected(flow_setting, None, keys, x, y, *by)
    of_x, _ = torch.autograd.grad(total, (x, y), dy)
    (of_branch,), dropped = given, total == x
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.02)
    assert not bool(of_branch[dropped].any())
    assert torch.equal(of_x, dy)
    torch.testing.assert_close(of_branch[~dropped], dy[~dropped] / 0.75, rtol=0.02, atol=0)


# What it keeps and draws


@pytest.mark.parametrize("name", INT4)
def test_what_a_block_keeps(device, name):
    """Codes of INT8 of the stream, twice, and of FC1's output; of 4 bits of what is multiplied.

    But of GELU's output nothing. A hook has attention keep floats.
    """
    block = Int4Block(256, 4, int4=INT4[name], device=device)
    x = torch.randn(1024, 256, device=device).bfloat16().requires_grad_()
    block(Stream.of(x, 32), 2)
    stream = Stream.of(x, 32)
    known = [part for linear in linears_of(block) for part in linear._codes._made]
    found = Kept(x, *known, *block.parameters(), *block.buffers()).bytes_of(
        lambda: block(stream, 2)
    )
    # Attention's numbers, codes; per row statistics, squares and exponents.
    expected = 8 + 6 + 3 / 2 + 4 * (4 + 3 + 4) / 256
    assert expected <= found / x.numel() <= 1.01 * expected


def test_attention_keeps_codes(device, monkeypatch):
    shapes = []

    def quantised(x, **options):
        shapes.append(tuple(x.shape))
        return int8_quantize(x, **options)

    monkeypatch.setattr(attention, "int8_quantize", quantised)
    run(block_of(device=device), *stream_of(device))
    assert shapes == [(BATCH * TOKENS, WIDTH)] * 4


def test_keeps_and_draws_nothing_without_a_backward(device):
    block, (x, _) = block_of(device=device, dropout=0.5), stream_of(device)
    block(Stream.of(x, 32), BATCH)
    block.eval()
    state = torch.get_rng_state()

    def forward():
        with torch.no_grad():
            return block(Stream.of(x, 32), BATCH)

    assert Kept().bytes_of(forward) == 0
    assert torch.equal(forward().x, forward().x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(block(Stream.of(x, 32), BATCH).x, forward().x)


def test_dropout_without_gradients(device):
    block, (x, _) = block_of(device=device, dropout=0.5), stream_of(device)
    with torch.no_grad():
        first, second = (block(Stream.of(x, 32), BATCH).x for _ in range(2))
    assert not torch.equal(first, second)


def test_weights_are_quantised_once_a_step(device, monkeypatch):
    block, (x, dy) = block_of(device=device), stream_of(device)
    calls, quantize = [], int4.int4_quantize

    def counted(matrix, *args, **options):
        calls.append(matrix.dtype)
        return quantize(matrix, *args, **options)

    monkeypatch.setattr(int4, "int4_quantize", counted)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(2):
        for _ in range(2):
            run(block, x, dy)
            assert calls.count(torch.float32) == 4 * (step + 1)
        before = block(Stream.of(x, 32), BATCH).x
        before.backward(dy)
        optimizer.step()
        assert not torch.equal(block(Stream.of(x, 32), BATCH).x, before)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_seed_repeats_gradients(device, dropout):
    block, (x, dy) = block_of(device=device, dropout=dropout), stream_of(device)
    run(block, x, dy)
    found = {}
    for turn, seed in enumerate((1, 1, 2)):
        torch.manual_seed(seed)
        found[turn] = run(block, x, dy)
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][1], found[2][1])


def test_checkpointing_gives_the_same_bits(device, monkeypatch):
    """But for those of attention, which keeps no codes there."""
    monkeypatch.setattr(attention, "keeps_codes", lambda attend, *_: attend)
    found = []
    for segment in (lambda f, *args: f(*args), partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(1)
        block, (x, dy) = block_of(device=device), stream_of(device)
        for _ in range(2):  # the first batch and another
            y = segment(block, Stream.of(x, 32), BATCH).x
            found.append([y, *torch.autograd.grad(y, [x, *block.parameters()], dy)])
    for plain, again in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, plain, again))


# Groups, and state


def test_groups_are_searched_on_the_first_batch(device):
    block, (x, dy) = block_of(Int4("search", "int8"), device), stream_of(device)
    run(block, x, dy)
    assert all(layer.group is not None for layer in linears_of(block))


def test_state_is_that_of_blocks_that_are_not_fused(device):
    recipe = RECIPES["int4-hq-lss"]
    shape = Shape(2, HEADS, WIDTH, TOKENS, 64)
    models = [model_of(shape, r).to(device) for r in (recipe, unfused("int4-hq-lss"))]
    assert [type(model.blocks[0]) for model in models] == [Int4Block, gpt2.Block]
    first, second = (model.state_dict() for model in models)
    assert list(first) == list(second)
    ids = torch.randint(64, (BATCH, TOKENS), device=device)
    for one, other in (models, models[::-1]):
        one(ids, ids).backward()
        other.load_state_dict(one.state_dict())
        losses = [model.eval()(ids, ids).item() for model in models]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
        one.train()
    assert [n for n, _ in models[0].named_parameters()] == [
        n for n, _ in models[1].named_parameters()
    ]


def test_refuses_in_one_line():
    refused("width=9: expected a multiple of heads=2", Int4Block, 9, 2)
    refused("flow=48: expected 32 or 64 or 128", Int4Block, 64, 2, flow=48)
    refused("dropout=1.0: expected at least 0 and less than 1", Int4Block, 64, 2, 1.0)
    refused("group=32 with 8 inputs: expected 1 or 2 or 4 or 8", Int4Block, 8, 2)
    stream = Stream.of(torch.zeros(8, 64).bfloat16(), 64)
    refused("stream in blocks of 64: expected 32", Int4Block(64, 2), stream, 1)


def test_repr():
    assert repr(Int4Block(64, 2)).startswith("Int4Block(\n  width=64, heads=2, flow=32\n")


# torch.compile, and the GPU


@pytest.mark.parametrize("name", ["int4-hq-lss", "int4-hq"])
def test_compiles(device, monkeypatch, name):
    """To the same bits, but for attention, which keeps no codes there, and handed-over codes."""
    monkeypatch.setattr(attention, "keeps_codes", lambda attend, *_: attend)
    monkeypatch.setattr(int4_block, "Handoff", lambda: None)
    block, (x, dy) = block_of(INT4[name], device), stream_of(device)
    run(block, x, dy)  # the first batch is not for a compiler
    torch._dynamo.reset()
    stream = Stream.of(x, 32)
    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = []
    for which in (block, fast):
        torch.manual_seed(5)
        y = which(stream, BATCH).x
        found.append([y, *torch.autograd.grad(y, [x, *block.parameters()], dy)])
    assert all(map(torch.equal, *found))


def steps_of(graphed, dropout, device):
    """The losses of a few steps of a small model."""
    sizes = {"layers": 2, "heads": 2, "width": 64, "context": 32, "dropout": dropout}
    settings = make("tiny", {**sizes, "recipe": "int4-hq", "rate": 1e-2})
    torch.manual_seed(0)
    model = model_of(settings.shape(90), settings.precision).to(device)
    step = Step(model, settings, device)
    step.set_rate(1e-2)
    run = graphed_step(step) if graphed else step
    losses = []
    for i in range(8):
        torch.manual_seed(i)
        ids = torch.randint(90, (3, 32), device=device)
        losses.append(float(run([(ids, ids.roll(-1, 1))])[0]))
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_graphed_step_trains_as_a_launched_one(device, dropout):
    """Up to attention's backward, which adds in any order, and to what that rounds otherwise."""
    launched, graphed = (steps_of(graphed, dropout, device) for graphed in (False, True))
    assert launched == pytest.approx(graphed, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INT4)
def test_a_step_does_not_wait_for_the_device(name):
    device = torch.device("cuda")
    block, (x, dy) = block_of(INT4[name], device), stream_of(device)
    run(block, x, dy)  # the first batch's, which does, and kernels' compilation
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(block, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(t.isfinite().all()) for t in found)
