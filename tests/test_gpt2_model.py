"""GPT-2 and Llama in every recipe: the same parameters, near the same logits, what is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.model import families
from jetfire.gpt2.model.gpt2 import GPT2
from jetfire.gpt2.model.shape import LlamaShape, Shape
from jetfire.gpt2.model.tensors import load_model
from jetfire.gpt2.training.settings import make
from jetfire.gpt2.training.state import build
from jetfire.nn import (
    RECIPES,
    Int4,
    Int8Block,
    Recipe,
    Stream,
    quantised_weights,
    recipes,
)

pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = [name for name, recipe in RECIPES.items() if recipe.block and recipe.flow]
INT4 = [name for name, recipe in RECIPES.items() if recipe.int4]
# How far a recipe's logits are from BF16's.
ERRORS = dict.fromkeys(INT8, 0.05) | dict.fromkeys(INT4, 0.5)
SHAPE = Shape(layers=2, heads=2, width=64, context=32, vocabulary=90)
# Heads of keys and values are as wide together as the largest block.
LLAMA = LlamaShape(2, 4, 256, 32, 90, kv_heads=2, hidden=256, tied=False)
SHAPES = {"gpt2": SHAPE, "llama": LLAMA, "tied": replace(LLAMA, tied=True)}


@pytest.fixture(params=["gpt2", "llama"])
def shape(request):
    return SHAPES[request.param]


def model_of(recipe, device, shape):
    torch.manual_seed(0)
    return families.model_of(shape, recipe).to(device)


def ids_of(device, tokens=32):
    return torch.randint(90, (3, tokens), generator=torch.Generator().manual_seed(1)).to(device)


def tensors_of(model):
    return {name: (p.shape, p.dtype) for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", INT8 + INT4)
def test_parameters_are_those_of_bf16(device, recipe, shape):
    exact, model = model_of("bf16", device, shape), model_of(recipe, device, shape)
    sizes = {name: tuple(p.shape) for name, p in exact.named_parameters()}
    assert sizes == shape.parameters()
    assert list(tensors_of(model).items()) == list(tensors_of(exact).items())
    assert list(model.state_dict()) == list(exact.state_dict())
    # A seed starts every recipe from the same numbers.
    for name, value in exact.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with torch.no_grad():
        for p in exact.parameters():
            p.normal_()
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())


@pytest.mark.parametrize("recipe", ["bf16", "int4-hq"])
def test_a_checkpoint_of_learned_steps_loads_without_them(device, recipe, shape):
    """In any recipe, as one of any other recipe does."""
    model, other = (model_of(name, device, shape) for name in (recipe, "bf16"))
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    layer = f"blocks.0.{next(iter(shape.linears()))}"
    learned = {f"{layer}.step_x": torch.ones(1), f"{layer}.calibration": torch.ones(3)}
    load_model(model, {**other.state_dict(), **learned}, Path("here"))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with pytest.raises(UsageError, match=r"here: .*wrong is \(1,\): the model's is absent"):
        load_model(model, {**other.state_dict(), f"{layer}.wrong": torch.ones(1)}, Path("here"))


def test_a_recipe_of_ones_own(device):
    """The paper's search of each layer's group."""
    torch.manual_seed(0)
    model = GPT2(SHAPE, Recipe("mine", int4=Int4("search", "int8"))).to(device)
    model(ids_of(device), ids_of(device)).backward()
    groups = [getattr(block, name).group for block in model.blocks for name in SHAPE.linears()]
    assert all(group in (1, 2, 4, 8, 16, 32, 64, 128, 256) for group in groups)


def test_names_and_sizes():
    found = {name: tuple(p.shape) for name, p in GPT2(SHAPE).named_parameters()}
    block = {
        "norm1.weight": (64,),
        "norm1.bias": (64,),
        "norm2.weight": (64,),
        "norm2.bias": (64,),
        "qkv.weight": (192, 64),
        "qkv.bias": (192,),
        "projection.weight": (64, 64),
        "projection.bias": (64,),
        "expand.weight": (256, 64),
        "expand.bias": (256,),
        "contract.weight": (64, 256),
        "contract.bias": (64,),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    ends = {"norm.weight": (64,), "norm.bias": (64,)}
    assert found == {"tokens.weight": (128, 64), "positions.weight": (32, 64), **blocks, **ends}


def test_names_and_sizes_of_llama():
    found = {name: tuple(p.shape) for name, p in model_of("bf16", "cpu", LLAMA).named_parameters()}
    block = {
        "norm1.weight": (256,),
        "norm2.weight": (256,),
        "query.weight": (256, 256),
        "key.weight": (128, 256),
        "value.weight": (128, 256),
        "projection.weight": (256, 256),
        "gate.weight": (256, 256),
        "up.weight": (256, 256),
        "down.weight": (256, 256),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    ends = {"tokens.weight": (128, 256), "norm.weight": (256,)}
    assert found == {**ends, **blocks, "head.weight": (128, 256)}
    tied = model_of("bf16", "cpu", SHAPES["tied"])
    assert {name: tuple(p.shape) for name, p in tied.named_parameters()} == {**ends, **blocks}
    usual = LlamaShape(1, 12, 768, 32, 90)
    assert (usual.kv_heads, usual.hidden, usual.tied) == (12, 2048, True)


@pytest.mark.parametrize("kind", [Shape, LlamaShape])
def test_initial_numbers(kind):
    shape = kind(layers=8, heads=2, width=128, context=64, vocabulary=500)
    model = model_of("bf16", "cpu", shape)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif "norm" in name:
            assert bool((p == 1).all())
        else:
            residual = name.endswith(("projection.weight", "contract.weight", "down.weight"))
            expected = 0.02 / 4 if residual else 0.02
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("recipe", ERRORS)
@pytest.mark.parametrize("tokens", [1, 19, 32])
def test_logits_are_near_those_of_bf16(device, recipe, tokens, shape):
    exact, model = model_of("bf16", device, shape), model_of(recipe, device, shape)
    with torch.no_grad():  # weights of which every layer's part matters
        for p in exact.parameters():
            if p.dim() == 2:
                p.mul_(24 / shape.width**0.5)
    model.load_state_dict(exact.state_dict())
    ids = ids_of(device, tokens)
    with torch.no_grad():
        found, expected = model(ids), exact(ids)
    assert found.shape == expected.shape == (3, tokens, 90)
    error = (found.float() - expected).norm() / expected.norm()
    assert float(error) < ERRORS[recipe]
    with torch.autocast(device.type, torch.bfloat16):
        assert model(ids).dtype == exact(ids).dtype == torch.bfloat16


@pytest.mark.parametrize(("recipe", "part"), [("bf16", 0), ("int8-block32", 0.1), ("int4-hq", 0.4)])
def test_attends_to_the_past_alone(device, recipe, part, shape):
    """A later token changes nothing earlier, up to codes: blocks of rows share their scale.

    Of what INT8 rounds otherwise a product in 4 bits rounds some by a whole step otherwise.
    """
    model = model_of(recipe, device, shape)
    ids = ids_of(device)
    other = ids.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 90
    with torch.no_grad():
        moved = (model(ids) - model(other)).float().norm(dim=-1)
    assert float(moved[:, :20].max()) <= part * float(moved[:, 20:].min())


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int8-block128", "int4-hq-lss"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", SHAPES)
def test_loss_is_the_logits_cross_entropy(device, recipe, autocast, family):
    model = model_of(recipe, device, SHAPES[family])
    ids, targets = ids_of(device), ids_of(device).roll(-1, 1)
    targets[0, :5] = -100
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss, logits = model(ids, targets), model(ids)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    expected = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", SHAPES)
def test_bf16_with_our_loss_has_the_same(device, family):
    shape = SHAPES[family]
    plain = model_of("bf16", device, shape)
    ours = families.model_of(shape, "bf16", own_loss=True).to(device)
    ours.load_state_dict(plain.state_dict())
    ids, targets = ids_of(device), ids_of(device).roll(-1, 1)
    assert not plain.own_loss
    losses = [model(ids, targets) for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int4-hq-lss"])
def test_padding_is_never_predicted(device, recipe, shape):
    model = model_of(recipe, device, shape)
    ids, targets = ids_of(device), ids_of(device).roll(-1, 1)
    before = model(ids, targets)
    before.backward()
    assert model.output.shape[0] == 128
    assert not model.output.grad[90:].any()
    assert bool(model.output.grad[:90].any(dim=1).all())
    with torch.no_grad():
        model.output[90:] = 100.0
    assert float(model(ids, targets)) == pytest.approx(float(before), rel=1e-6)
    assert model(ids).shape[-1] == 90


@pytest.mark.parametrize("recipe", RECIPES)
def test_learns(device, recipe, shape):
    model = model_of(recipe, device, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, targets = ids_of(device), ids_of(device).roll(-1, 1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize(("own_loss", "codes"), [(True, 1), (False, 0)])
def test_a_table_has_codes_where_the_head_s_loss_is_ours(own_loss, codes, shape):
    model = families.model_of(shape, "int8", own_loss=own_loss)
    found = quantised_weights(model)
    assert len(found) == len(shape.linears()) * shape.layers + codes
    assert (model.output in found) == own_loss


def test_head_in_int8_has_nearly_the_loss_of_one_in_bf16(device, shape):
    both = (recipes.get("int8", head=head) for head in (32, "bf16"))
    head, plain = (model_of(recipe, device, shape) for recipe in both)
    plain.load_state_dict(head.state_dict())
    ids, targets = ids_of(device), ids_of(device).roll(-1, 1)
    ours, theirs = (float(model(ids, targets)) for model in (head, plain))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int4-hq-lss"])
def test_dropout(device, recipe, shape):
    shape = replace(shape, layers=1, dropout=0.5)
    model, ids = model_of(recipe, device, shape), ids_of(device)
    assert not torch.equal(model(ids), model(ids))
    model(ids, ids).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert torch.equal(model(ids), model(ids))
    plain = model_of(recipe, device, replace(shape, dropout=0.0))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(ids), model(ids))


def test_refuses():
    with pytest.raises(UsageError, match="width=65: expected a multiple of heads=2"):
        GPT2(Shape(1, 2, 65, 32, 90))
    with pytest.raises(UsageError, match="kv_heads=3: expected a divisor of heads=4"):
        families.model_of(replace(LLAMA, kv_heads=3))
    with pytest.raises(UsageError, match="keys of 64: expected a multiple of 128"):
        families.model_of(replace(LLAMA, kv_heads=1), "int8")
    with pytest.raises(UsageError, match="no recipe 'int9'"):
        GPT2(SHAPE, "int9")


class Kept:
    """Bytes that autograd keeps for backward, each storage once, parameters' not counted."""

    def __init__(self, parameters, codes=()):
        self.ignored = {t.untyped_storage().data_ptr() for t in (*parameters, *codes)}
        self.storages = {}

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            # Held, so that nothing else comes to lie there meanwhile.
            self.storages[storage.data_ptr()] = storage
        return tensor

    def of(self, forward):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            kept = forward()
        del kept
        return sum(storage.nbytes() for storage in self.storages.values())


# Of queries, keys, values and attention's output, 2 each; codes of the stream before both
# LayerNorms and of what comes out of them and of attention, 1 each, and of FC1's output, 4.
BYTES = 17


@pytest.mark.parametrize(("block", "flow"), [(32, 32), (64, 64), (128, 128), (128, 32)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_block_keeps(device, block, flow, dropout):
    """The middle one of three blocks, in bytes a token and column of the stream."""
    if device.type == "cpu" and dropout:
        pytest.skip("attention without a fused kernel keeps its weights")
    batch, tokens, width, heads = 2, 256, 256, 4
    first, module = (Int8Block(width, heads, dropout, block, flow, device=device) for _ in range(2))
    x = torch.randn(batch * tokens, width, device=device).bfloat16().requires_grad_()
    stream = first(Stream.of(x, flow), batch)
    linears = (module.qkv, module.projection, module.expand, module.contract)
    codes = [tensor for linear in linears for tensor in linear.codes().tensors]
    kept = Kept(module.parameters(), codes).of(lambda: module(stream, batch))
    found = kept / (batch * tokens * width)
    # fp32 scales of nine codes, four statistics a row, and attention's sum of exponents.
    small = 9 * 4 / min(block, flow) ** 2 + (4 * 4 + 4 * heads) / width
    assert BYTES <= found <= (BYTES + small) * 1.01


def test_keeps_less_than_bf16(device):
    """Activations of a whole model in training, against torch's own modules under autocast."""
    shape = Shape(layers=4, heads=4, width=256, context=128, vocabulary=64)
    ids = torch.randint(64, (2, 128), device=device)
    found = {}
    for recipe in ("bf16", "int8-block32"):
        model = model_of(recipe, device, shape)
        codes = [c for m in model.modules() if hasattr(m, "codes") for c in m.codes().tensors]

        def forward(model=model):
            with torch.autocast(device.type, torch.bfloat16):
                return model(ids, ids)

        # Autocast's copies of weights are no activations either.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            found[recipe] = Kept(model.parameters(), codes).of(forward)
        copies = sum(p.numel() * 2 for n, p in model.named_parameters() if "blocks" in n)
        if recipe == "bf16":
            found[recipe] -= copies
    assert found["int8-block32"] < found["bf16"] / 1.49


@pytest.mark.parametrize("preset", ["tiny", "tiny-llama"])
def test_outliers_are_planted_as_training_begins(preset):
    """The same in every recipe; a few of an MLP's channels, and embeddings with heavy tails."""
    cpu = Device.parse("cpu")
    plain = build(make(preset, {"recipe": "bf16"}), 256, cpu)
    models = [
        build(make(preset, {"recipe": recipe, "outliers": 50}), 256, cpu)
        for recipe in ("bf16", "int8-block32")
    ]
    given, *found = ({n: p.detach() for n, p in m.named_parameters()} for m in (plain, *models))
    planted = "gate" if "llama" in preset else "expand"
    for name, weight in given.items():
        assert torch.equal(found[0][name], found[1][name])
        if name.endswith(f"{planted}.weight"):
            ratio = (found[0][name] / weight).nanmedian(1).values
            assert ((ratio - 50).abs() < 1e-3).sum() == 4
            assert (ratio == 1).sum() == len(ratio) - 4
        elif not name.startswith("tokens"):
            assert torch.equal(found[0][name], weight)
    tokens, usual = found[0]["tokens.weight"], given["tokens.weight"]
    assert float((tokens.abs() > 0.1).float().mean()) == pytest.approx(1 / 309, rel=0.25)
    assert float((usual.abs() > 0.1).float().mean()) < 1e-4
