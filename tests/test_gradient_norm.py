"""The norm of a model's gradients: that of torch, from squares that products added up."""

import copy
import gc
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.training import graph
from jetfire.gpt2.training.settings import make
from jetfire.gpt2.training.state import build
from jetfire.gpt2.training.step import Step, seed_step
from jetfire.nn import AdamW, Int8Block, Int8LlamaBlock, Stream, gradient_norm
from jetfire.nn.captured import LAUNCHED
from jetfire.nn.linear import Int8Linear
from jetfire.nn.squares import _kept, known_squares, total_norm

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = {"gpt2": Int8Block, "llama": Int8LlamaBlock}
SMALL = {"layers": 2, "heads": 2, "width": 64, "context": 16, "batch": 2, "clip": 0.0}
LLAMA = {"family": "llama", "tied": "false", "hidden": "96"}
FAMILIES = {"gpt2": SMALL, "llama": {**SMALL, **LLAMA}}
VOCABULARY = 64


def block_of(family, device):
    torch.manual_seed(0)
    block = BLOCKS[family](64, 2, device=device)
    block.squares_gradients = True
    return block


def weights_of(module):
    return [layer.weight for layer in module.modules() if isinstance(layer, Int8Linear)]


def backward(block, device, seed=1, gradient=None, blocks=None):
    """Run forward and backward, of a block or of several after each other."""
    torch.manual_seed(seed)
    stream = Stream.of(torch.randn(32, 64, device=device).bfloat16().requires_grad_(), 32)
    for one in blocks or [block]:
        stream = one(stream, 2)
    stream.x.backward(torch.randn_like(stream.x) if gradient is None else gradient)


def gradients_of(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


def known(weight):
    """Whether squares stand that are of the gradient as it is."""
    return known_squares(weight) is not None


def spoil(weights):
    """Make the squares that stand NaN: nothing that reads them gives a number."""
    for weight in weights:
        _kept[weight][1].fill_(math.nan)


def near(norm, expected, rel=1e-6):
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=rel)


@pytest.mark.parametrize("family", BLOCKS)
def test_squares_stand_in_for_gradients(family, device):
    block = block_of(family, device)
    backward(block, device)
    weights, gradients = weights_of(block), gradients_of(block)
    expected = get_total_norm(gradients)
    near(gradient_norm(block.parameters()), expected)
    of_weights = torch.stack([weight.grad.double().square().sum() for weight in weights]).sum()
    for weight in weights:
        assert known(weight)
        _kept[weight][1].mul_(4)
    near(gradient_norm(block.parameters()), (expected.double() ** 2 + 3 * of_weights).sqrt())
    spoil(weights)
    assert gradient_norm(block.parameters()).isnan()
    near(total_norm(gradients), expected, rel=0)


def scaled(weight):
    weight.grad.mul_(2)


def replaced(weight):
    weight.grad = 2 * weight.grad


def replaced_where_it_was(weight):
    shape, device = weight.shape, weight.device
    weight.grad = None
    weight.grad = torch.ones(shape, dtype=torch.float32, device=device)


def replaced_data(weight):
    weight.grad.data = 2 * weight.grad


def clipped(weight):
    clip_grad_norm_([weight], 1e-3)


def dropped(weight):
    weight.grad = None


CHANGES = [scaled, replaced, replaced_where_it_was, replaced_data, clipped, dropped]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_gradient_is_read(change, device):
    block = block_of("gpt2", device)
    backward(block, device)
    weights = weights_of(block)
    before = gradient_norm(block.parameters())
    spoil(weights)
    for weight in weights:
        change(weight)
    found = gradient_norm(block.parameters())
    near(found, get_total_norm(gradients_of(block)), rel=0)
    assert abs(found / before - 1) > 0.01


def thrice(gradient):
    gradient.mul_(3)


@pytest.mark.parametrize("how", ["another", "in place", "after"])
def test_a_gradient_that_a_hook_changes_is_read(how, device):
    block = block_of("gpt2", device)
    backward(block, device)
    before = gradient_norm(block.parameters())
    block.zero_grad()
    for weight in weights_of(block):
        if how == "another":
            weight.register_hook(lambda g: 3 * g)
        elif how == "in place":
            weight.register_hook(thrice)
        else:
            weight.register_post_accumulate_grad_hook(lambda p: thrice(p.grad))
    backward(block, device)
    found = gradient_norm(block.parameters())
    near(found, get_total_norm(gradients_of(block)))
    assert 2 < found / before < 3


@pytest.mark.parametrize("adds", [True, False])
def test_a_second_gradient_on_top_is_read(adds, device):
    block = block_of("llama", device)
    block.adds_gradients = adds
    backward(block, device)
    once = gradient_norm(block.parameters())
    backward(block, device)
    assert not any(map(known, weights_of(block)))
    found = gradient_norm(block.parameters())
    near(found, get_total_norm(gradients_of(block)), rel=0)
    near(found, 2 * once, rel=1e-5)


def test_the_gradient_of_a_weight_that_two_blocks_read_is_read(device):
    one, other = block_of("gpt2", device), block_of("gpt2", device)
    other.expand = one.expand
    both = nn.ModuleList([one, other])
    backward(None, device, blocks=both)
    assert not known(one.expand.weight)
    assert sum(map(known, weights_of(both))) == 6
    near(gradient_norm(both.parameters()), get_total_norm(gradients_of(both)))


def test_nothing_that_is_not_finite_is_lost(device):
    block = block_of("gpt2", device)
    gradient = torch.ones(32, 64, dtype=torch.bfloat16, device=device)
    gradient[3, 5] = math.inf
    backward(block, device, gradient=gradient)
    assert known(block.contract.weight)
    assert gradient_norm([block.contract.weight]).isnan()  # as the codes' scale is
    block.zero_grad()
    backward(block, device)
    assert gradient_norm(block.parameters()).isfinite()
    _kept[block.qkv.weight][1][0, 0] = math.inf
    assert gradient_norm(block.parameters()).isinf()
    block.norm1.weight.grad[0] = math.nan
    assert gradient_norm(block.parameters()).isnan()


def test_a_view_of_a_gradient_is_read(device):
    """It begins where the gradient began, whose squares are known."""
    block = block_of("gpt2", device)
    backward(block, device)
    pruned, flat = block.expand.weight, block.contract.weight
    pruned.data, grad = pruned.data[:32], pruned.grad
    pruned.grad = grad[:32]
    flat.grad = flat.grad[:1].expand_as(flat.grad)
    assert not any(map(known, (pruned, flat)))
    near(gradient_norm(block.parameters()), get_total_norm(gradients_of(block)))


def test_a_dead_weight_leaves_nothing(device):
    gc.collect()
    before = len(_kept)
    block = block_of("llama", device)
    backward(block, device)
    assert len(_kept) == before + 7
    del block
    gc.collect()
    assert len(_kept) == before


def test_copies_have_none(device):
    block = block_of("gpt2", device)
    backward(block, device)
    expected = gradient_norm(block.parameters())
    spoil(weights_of(block))
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other.squares_gradients
        assert not any(weight in _kept for weight in weights_of(other))
        for p, twin in zip(block.parameters(), other.parameters(), strict=True):
            twin.grad = p.grad.clone()
        near(gradient_norm(other.parameters()), expected)


def test_gradients_of_several_dtypes():
    torch.manual_seed(0)
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32
    parameters = [nn.Parameter(torch.randn(20, 30).to(dtype)) for dtype in dtypes]
    for p in parameters[:-1]:
        p.grad = torch.randn(20, 30).to(p.dtype)
    expected = sum(p.grad.double().square().sum() for p in parameters[:-1]).sqrt()
    found = gradient_norm(parameters)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert not found.requires_grad
    near(gradient_norm(parameters[1]), parameters[1].grad.double().norm())


def test_no_gradient_has_the_norm_0():
    assert gradient_norm([]) == gradient_norm(nn.Linear(3, 3).parameters()) == 0


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (["weight"], r"^one of parameters='weight': expected tensors$"),
        (3, r"^parameters=3: expected a tensor or an iterable$"),
    ],
)
def test_what_has_no_gradient_is_refused(parameters, says):
    with pytest.raises(UsageError, match=says):
        gradient_norm(parameters)


def test_torch_compile_keeps_none(device):
    """What it traces has no memory whose change could be seen."""
    block = block_of("gpt2", device)
    compiled = torch.compile(block, backend="aot_eager")
    torch.manual_seed(1)
    x = torch.randn(32, 64, device=device).bfloat16().requires_grad_()
    compiled(Stream.of(x, 32), 2).x.sum().backward()
    assert not any(weight in _kept for weight in weights_of(block))
    near(gradient_norm(block.parameters()), get_total_norm(gradients_of(block)), rel=0)


# --- a step -----------------------------------------------------------------------------------


def step_of(device, family="gpt2", **changes):
    settings = make("tiny", {**FAMILIES[family], "recipe": "int8-block32", **changes})
    return Step(
        build(settings, VOCABULARY, Device.of(torch.empty(0, device=device))), settings, device
    )


def micros_of(device, number, seed=5):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (number, 2, 17), generator=generator).to(device)
    return [(one[:, :-1], one[:, 1:]) for one in ids]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_takes_its_norm_of_squares(family, clip, device):
    step = step_of(device, family, clip=clip)
    weights = weights_of(step.model.blocks)
    assert len(weights) == 2 * (4 if family == "gpt2" else 7)
    step.set_rate(1e-3)
    for seed in range(3):
        loss = step.gradients(micros_of(device, 1, seed))
        assert all(map(known, weights))
        expected = get_total_norm(step.gradients_made())
        near(step.update(loss), expected)
    loss = step.gradients(micros_of(device, 1))
    spoil(weights[:1])
    assert step.update(loss).isnan()
    assert step.failed == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_what_they_are_without_squares(family, device):
    """To the bit, but for the norm's last ones, where nothing is clipped."""
    found = {}
    for squares in (True, False):
        step = step_of(device, family)
        for block in step.model.blocks:
            assert block.squares_gradients
            block.squares_gradients = squares
        step.set_rate(1e-3)
        found[squares] = []
        for number in range(4):
            seed_step(0, number)
            found[squares].append([x.item() for x in step(micros_of(device, 1, number))])
        assert all(weight in _kept for weight in weights_of(step.model.blocks)) == squares
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"compile": "true"},
        {"parallel": "ddp"},
    ],
    ids=str,
)
def test_who_asks_for_no_squares(changes, device):
    settings = make("tiny", {**SMALL, "recipe": "int8-block32", **changes})
    model = build(settings, VOCABULARY, Device.of(torch.empty(0, device=device)))
    step = Step(model, settings, device, split=settings.parallel == "ddp")
    assert not any(block.squares_gradients for block in model.blocks)
    if settings.accumulate == 2:
        loss = step.gradients(micros_of(device, 2))
        assert not any(weight in _kept for weight in weights_of(model))
        near(step.update(loss), get_total_norm(step.gradients_made()), rel=0)


def test_weights_in_bf16_have_no_squares(device):
    changes = {"width": 128, "optimizer": "adamw8", "weights": "bf16"}
    step = step_of(device, **changes)
    narrow = [weight for weight in weights_of(step.model) if weight.dtype == torch.bfloat16]
    loss = step.gradients(micros_of(device, 1))
    assert narrow
    assert not any(weight in _kept for weight in narrow)
    expected = torch.stack([g.double().square().sum() for g in step.gradients_made()]).sum().sqrt()
    near(step.update(loss), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_s_squares_are_those_of_its_gradients(family, device):
    step = step_of(device, family, graph="true")
    advance = graph.graphed(step)
    step.set_rate(1e-3)
    weights = weights_of(step.model.blocks)
    norms = []
    for number in range(LAUNCHED + 4):
        seed_step(0, number)
        _, norm = advance(micros_of(device, 1, number))
        assert all(map(known, weights))
        near(norm, get_total_norm(step.gradients_made()), rel=1e-5)
        near(gradient_norm(step.parameters), norm, rel=1e-6)
        norms.append(norm.item())
    assert len(set(norms)) == len(norms)


@pytest.mark.gpu
def test_the_norm_waits_for_no_device(device):
    block = block_of("llama", device)
    backward(block, device)
    expected = get_total_norm(gradients_of(block))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradient_norm(block.parameters())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    near(found, expected)


@pytest.mark.gpu
def test_gradients_on_several_devices(device):
    here = nn.Parameter(torch.ones(4, 4))
    there = block_of("gpt2", device)
    backward(there, device)
    here.grad = torch.full((4, 4), 100.0)
    expected = (get_total_norm(gradients_of(there)).cpu().double() ** 2 + 16 * 1e4).sqrt()
    for parameters in ([here, *there.parameters()], [*there.parameters(), here]):
        near(gradient_norm(parameters), expected)


def test_an_update_that_divides_clips_as_torch_does(device):
    """As docs/training.md has it: no pass over the gradients of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 64), Int8Linear(64, 96), nn.Linear(96, 8)).to(device)
    other = copy.deepcopy(model)
    ours = AdamW(model.parameters(), 1e-2, model=model)
    theirs = torch.optim.AdamW(other.parameters(), 1e-2)
    for size in (1e-3, 1.0):  # of which the one is not clipped
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = size * torch.randn_like(mine)
            its.grad = mine.grad.clone()
        norm = gradient_norm(model.parameters())
        assert (norm > 1) == (size == 1.0)
        ours.grad_scale = norm.clamp(min=1)
        ours.step()
        clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        # Moments differ by roundings, and updates of at most 1e-2 by as many parts of them.
        assert torch.allclose(mine, its, rtol=1e-5, atol=1e-6)
