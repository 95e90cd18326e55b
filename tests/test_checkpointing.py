"""Activation checkpointing gives the gradients of the run without it, bit for bit.

Forward runs twice from one state of torch's generator: reentrant checkpointing without gradients
first. Layers that drew in one of the two alone would leave dropout other numbers in the other.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from jetfire.nn import (
    FrozenInt8Linear,
    Int4Block,
    Int4Conv1D,
    Int4Linear,
    Int8Block,
    Int8Conv1D,
    Int8GELU,
    Int8LayerNorm,
    Int8Linear,
    Stream,
    convert,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 64


reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])


def products_kept(context, function, *args, **options):
    """Selective checkpointing: codes are made again, and what was multiplied is kept."""
    kept = "gemm" in function.name()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SEGMENTS = {
    "new": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, products_kept),
    },
}


class Blocks(nn.Module):
    """Two blocks; one in INT8 hands the codes of its gradient to the other."""

    def __init__(self, kind, dropout, **options):
        super().__init__()
        self.blocks = nn.ModuleList(kind(WIDTH, 2, dropout, **options) for _ in range(2))

    def forward(self, x):
        stream = Stream.of(x.bfloat16(), 32)
        for block in self.blocks:
            stream = block(stream, 2)
        return stream.x.float()


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) / 8)


LAYERS = {
    "Int8Linear": lambda: Int8Linear(WIDTH, WIDTH),
    "Int8Linear in 4 bits": lambda: Int8Linear(WIDTH, WIDTH, kept=4),
    "Int8Conv1D": lambda: Int8Conv1D(parameter(WIDTH, WIDTH), parameter(WIDTH)),
    "FrozenInt8Linear": lambda: FrozenInt8Linear(parameter(WIDTH, WIDTH), parameter(WIDTH)),
    "Int8LayerNorm": lambda: Int8LayerNorm(WIDTH),
    "Int8GELU": Int8GELU,
    "Int4Linear": lambda: Int4Linear(WIDTH, WIDTH),
    "Int4Linear of BF16": lambda: Int4Linear(WIDTH, WIDTH).bfloat16(),
    "Int4Conv1D": lambda: Int4Conv1D(parameter(WIDTH, WIDTH), parameter(WIDTH)),
    "Int8Block": lambda: Blocks(Int8Block, 0.0),
    "Int8Block that drops": lambda: Blocks(Int8Block, 0.3),
    "Int8Block in 4 bits": lambda: Blocks(Int8Block, 0.3, kept=4),
    "Int4Block": lambda: Blocks(Int4Block, 0.3),
}


def gradients(device, kind, run):
    """Those of two segments with dropout around their layers, from the first batch on."""
    torch.manual_seed(0)
    layers = nn.ModuleList(LAYERS[kind]() for _ in range(2)).to(device)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    found = []
    for _ in range(2):
        y = x
        for layer in layers:
            y = run(lambda x, layer=layer: F.dropout(layer(F.dropout(x, 0.2)), 0.5), y)
        y.square().sum().backward()
        found += [p.grad.clone() for p in (x, *layers.parameters()) if p.requires_grad]
    return found


def same(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", SEGMENTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(device, kind, how):
    kept = gradients(device, kind, partial(checkpoint, **SEGMENTS[how]))
    same(kept, gradients(device, kind, lambda function, x: function(x)))


@pytest.mark.parametrize("kind", LAYERS)
def test_in_training_as_much_is_drawn_with_gradients_as_without(device, kind):
    """And in evaluation nothing, unless there is a backward."""
    layer = LAYERS[kind]().to(device)
    x = torch.randn(ROWS, WIDTH, device=device)

    def drawn(context, training=True):
        torch.manual_seed(1)
        with context:
            layer.train(training)(x)
        return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()

    torch.manual_seed(1)
    none = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    with_gradients = drawn(torch.enable_grad())
    assert not torch.equal(with_gradients, none)
    assert torch.equal(drawn(torch.no_grad()), with_gradients)
    assert torch.equal(drawn(torch.inference_mode()), with_gradients)
    assert torch.equal(drawn(torch.no_grad(), training=False), none)
    assert torch.equal(drawn(torch.inference_mode(), training=False), none)
    assert not torch.equal(drawn(torch.enable_grad(), training=False), none)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


def gpt2_gradients(device, transformers, recipe, reentrant):
    """Those of a tiny GPT-2 of transformers with its dropout, in two steps."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    # Fused attention's backward may add in any order.
    config = transformers.GPT2Config(**sizes, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config)
    convert(model.to(device), recipe)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    ids = torch.randint(96, (2, 16), device=device)
    for _ in range(2):
        model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


@reentrant
@pytest.mark.parametrize("recipe", ["int8-block32", "int4-hq-lss"])
def test_gpt2_of_transformers(device, transformers, recipe, reentrant):
    kept = gpt2_gradients(device, transformers, recipe, reentrant)
    same(kept, gpt2_gradients(device, transformers, recipe, None))
