"""nn.AdamW against torch's: the same training, interchangeable state, codes that stay current."""

import copy
import math
from collections.abc import Callable

import pytest
import torch

from jetfire.core.errors import UsageError
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.gpt2.model.gpt2 import GPT2, Shape
from jetfire.gpt2.training.settings import make
from jetfire.gpt2.training.step import Step
from jetfire.nn import (
    AdamW,
    CapturedStep,
    Int4Linear,
    Int8Linear,
    products,
    quantised_weights,
    replaying,
)
from jetfire.nn import optimizer as optimizer_module
from jetfire.ops import int8_adamw, int8_quantize

SHAPE = Shape(layers=2, heads=2, width=32, context=16, vocabulary=61)


@pytest.fixture
def quantised(monkeypatch) -> list[torch.Size]:
    """The shapes of the weights that are quantised by a call of their own."""
    found: list[torch.Size] = []
    original = products.quantised_weight

    def counting(weight: torch.Tensor, block: Block) -> Quantized:
        found.append(weight.shape)
        return original(weight, block)

    monkeypatch.setattr(products, "quantised_weight", counting)
    return found


@pytest.fixture
def on_a_cpu_too(monkeypatch) -> None:
    """Matrices without codes are updated by our kernel on a CPU, as they are on a GPU."""
    monkeypatch.setattr(optimizer_module, "_FASTER_ON", ("cuda", "cpu"))


@pytest.fixture
def updated(monkeypatch, on_a_cpu_too) -> list[tuple[tuple[int, ...], str]]:
    """The shape and layout of each matrix that our kernel updates with moments in fp32."""
    found: list[tuple[tuple[int, ...], str]] = []

    def noting(param: torch.Tensor, *args, layout="both", **options) -> Quantized | None:
        found.append((tuple(param.shape), layout))
        return int8_adamw(param, *args, layout=layout, **options)

    monkeypatch.setattr(optimizer_module, "int8_adamw", noting)
    return found


def model_of(device) -> GPT2:
    torch.manual_seed(1)
    return GPT2(SHAPE, "int8-block32").to(device)


def batch(device, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000 + step)
    ids = torch.randint(SHAPE.vocabulary, (2, SHAPE.context + 1)).to(device)
    return ids[:, :-1], ids[:, 1:]


def groups(model: GPT2) -> list[dict]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def optimizers(kind: str, model: GPT2, **changes) -> torch.optim.AdamW:
    device = next(model.parameters()).device
    rate = torch.tensor(1e-2, device=device)
    options = {"lr": rate, "betas": (0.9, 0.95), "capturable": device.type == "cuda", **changes}
    if kind == "ours":
        return AdamW(groups(model), model=model, **options)
    return torch.optim.AdamW(groups(model), fused=True, **options)


def backward(model: GPT2, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    ids, targets = batch(next(model.parameters()).device, step)
    loss = model(ids, targets)
    loss.backward()
    return float(loss.detach())


def codes_are_of(model: GPT2) -> None:
    """What every INT8 layer would multiply by is what quantising its weight now gives."""
    for weight, (cache, block) in quantised_weights(model).items():
        expected = int8_quantize(weight.detach(), block=block, layout="both")
        found = cache.of(weight, block)
        assert found.block == block
        for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
            assert torch.equal(ours, theirs)


def close(model: GPT2, other: GPT2) -> None:
    """Parameters agree to two units in the last place and 1e-5 of what a step at most moves them.

    The two updates round differently, by a few 2^-24 of a parameter and of its move.
    """
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert ((mine - its).abs() <= 2.0**-22 * its.abs() + 1e-5 * 1e-2).all()


def test_leaves_the_codes_of_the_head_s_table(device, quantised):
    """They are made by the update from the second step on."""
    torch.manual_seed(1)
    model = GPT2(SHAPE, "int8").to(device)
    assert model.tokens.weight in quantised_weights(model)
    optimizer = optimizers("ours", model)
    for step in range(3):
        if step == 1:
            quantised.clear()
        backward(model, optimizer, step)
        optimizer.step()
    assert quantised == []
    codes_are_of(model)


def test_twenty_steps_from_the_same_states_as_torch(device):
    model = model_of(device)
    other = copy.deepcopy(model)
    ours, theirs = optimizers("ours", model), optimizers("torch", other)
    losses = []
    for step in range(20):
        other.load_state_dict(model.state_dict())
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        losses.append(backward(model, ours, step % 3))
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.grad = mine.grad.clone()
        ours.step()
        codes_are_of(model)
        theirs.step()
        close(model, other)
    assert losses[-1] < losses[0] - 0.5


def test_weights_are_quantised_before_the_first_step_alone(device, quantised):
    model = model_of(device)
    optimizer = optimizers("ours", model)
    for step in range(4):
        backward(model, optimizer, step)
        optimizer.step()
    assert len(quantised) == 8
    codes_are_of(model)
    assert len(quantised) == 8


def test_the_losses_are_those_of_torch(device):
    """Until a last bit of a weight has changed a code: the first steps' losses to 1e-3."""
    losses = []
    for kind in ("ours", "torch"):
        model = model_of(device)
        optimizer = optimizers(kind, model)
        losses.append([])
        for step in range(6):
            losses[-1].append(backward(model, optimizer, step % 3))
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_state_dicts_are_interchangeable(device, fused):
    """One of torch's steps, fused or not, one of ours, and one of both from ours."""
    model = model_of(device)
    plain = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95), fused=fused)
    backward(model, plain, 0)
    plain.step()
    ours = optimizers("ours", model)
    ours.load_state_dict(plain.state_dict())
    backward(model, ours, 1)
    ours.step()
    assert all(float(moments["step"]) == 2 for moments in ours.state.values())
    names = {name for moments in ours.state.values() for name in moments}
    assert names == {"step", "exp_avg", "exp_avg_sq"}

    other = copy.deepcopy(model)
    again = torch.optim.AdamW(groups(other), lr=1e-2, betas=(0.9, 0.95), fused=fused)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    backward(model, ours, 2)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        its.grad = mine.grad.clone()
    ours.step()
    codes_are_of(model)
    again.step()
    assert all(float(moments["step"]) == 3 for moments in again.state.values())
    close(model, other)


@pytest.mark.parametrize("guards", ["both", "found_inf"])
def test_found_inf_leaves_all_as_it_was(device, guards, quantised):
    model = model_of(device)
    optimizer = optimizers("ours", model)
    optimizer.found_inf = torch.zeros((), device=device)
    if guards == "both":
        optimizer.grad_scale = torch.ones((), device=device)
    backward(model, optimizer, 0)
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    backward(model, optimizer, 1)
    for parameter in model.parameters():
        parameter.grad.fill_(math.nan)
    optimizer.found_inf.fill_(1)
    optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    for index, moments in optimizer.state_dict()["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, before[1][index][name])
    codes_are_of(model)
    assert len(quantised) == 8


def mixed(device) -> torch.nn.ModuleDict:
    """A model with large matrices that no layer multiplies in INT8, and others."""
    torch.manual_seed(1)
    parts = {
        "table": torch.nn.Embedding(2048, 128),
        "int4": Int4Linear(512, 512),
        "filters": torch.nn.Conv2d(128, 256, 3),
        "int8": Int8Linear(128, 64),
        "narrow": torch.nn.Embedding(2047, 128),
        "flat": torch.nn.LayerNorm(2**18),
    }
    return torch.nn.ModuleDict(parts).to(device)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)


@pytest.mark.parametrize("guarded", [False, True])
def test_large_matrices_without_codes_are_updated_as_torch_s_and_keep_gradients(
    device, updated, guarded
):
    model = mixed(device)
    other = copy.deepcopy(model)
    ours = AdamW(model.parameters(), 1e-2, model=model, betas=(0.9, 0.95))
    theirs = torch.optim.AdamW(other.parameters(), 1e-2, (0.9, 0.95), fused=True)
    if guarded:
        for optimizer in (ours, theirs):
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
    alone = [(2048, 128), (512, 512), (256, 128 * 3 * 3)]
    kept = [model[name].weight for name in ("table", "int4", "filters", "int8")]
    for step in range(3):
        other.load_state_dict(model.state_dict())
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        give_gradients(model, step)
        give_gradients(other, step)
        given = {parameter: parameter.grad.clone() for parameter in model.parameters()}
        updated.clear()
        ours.step()
        theirs.step()
        assert updated == [*((shape, "none") for shape in alone), ((64, 128), "both")]
        for parameter in kept:
            assert torch.equal(parameter.grad, given[parameter])
        assert torch.equal(model["flat"].bias.grad, given[model["flat"].bias]) != guarded
        close(model, other)
        codes_are_of(model)
        for mine, its in zip(ours.state.values(), theirs.state.values(), strict=True):
            shapes = [{name: x.shape for name, x in state.items()} for state in (mine, its)]
            assert shapes[0] == shapes[1]
            assert float(mine["step"]) == float(its["step"]) == step + 1
            for name in ("exp_avg", "exp_avg_sq"):
                # A sum of two terms of at most 1, each rounded.
                assert torch.allclose(mine[name], its[name], rtol=1e-6, atol=2.0**-23)


def test_found_inf_leaves_large_matrices_without_codes(device, on_a_cpu_too):
    model = mixed(device)
    optimizer = AdamW(model.parameters(), 1e-2, model=model)
    optimizer.found_inf = torch.ones((), device=device)
    before = copy.deepcopy(model.state_dict())
    give_gradients(model, 0)
    model["table"].weight.grad.fill_(math.nan)
    optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for kept in optimizer.state.values():
        assert not any(tensor.any() for tensor in kept.values())


def test_gradients_and_parameters_of_any_strides(device, updated):
    """Ours where rows are of neighbours, and all but the gradient contiguous; else torch's."""
    tables = [torch.nn.Parameter(torch.randn(600, 512, device=device)) for _ in range(3)]
    tables.append(torch.nn.Parameter(torch.randn(512, 600, device=device).t()))
    others = [copy.deepcopy(table) for table in tables]
    wide = torch.randn(600, 520, device=device)
    turned = torch.randn(512, 600, device=device).t()
    grads = [turned.contiguous(), wide[:, 8:], turned, turned]
    for mine, its, grad in zip(tables, others, grads, strict=True):
        mine.grad, its.grad = grad, grad.clone()
    ours = AdamW(tables, 1e-2, model=torch.nn.Module())
    ours.step()
    torch.optim.AdamW(others, 1e-2, fused=True).step()
    assert updated == [((600, 512), "none")] * 2
    for mine, its in zip(tables, others, strict=True):
        assert torch.allclose(mine, its, rtol=2.0**-22, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "updated_as"),
    [
        ((1, 1024, 768), (6144, 128)),
        ((8, 40000), (2500, 128)),
        ((70000, 4), None),  # not a multiple of 128 numbers
        ((65536, 4), (2048, 128)),
        ((300000, 1), None),
        ((16, 128, 128), (16, 16384)),
        ((2049, 128), (2049, 128)),
        ((16, 128), None),
    ],
)
def test_thin_matrices_without_codes_fill_tiles(device, updated, shape, updated_as):
    mine = torch.nn.Parameter(torch.randn(shape, device=device))
    its = copy.deepcopy(mine)
    ours = AdamW([mine], 1e-2, model=torch.nn.Module())
    theirs = torch.optim.AdamW([its], 1e-2, fused=True)
    for _ in range(2):
        mine.grad = torch.randn_like(mine)
        its.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    assert updated == ([] if updated_as is None else [(updated_as, "none")] * 2)
    assert torch.allclose(mine, its, rtol=2.0**-21, atol=2e-7)
    assert ours.state[mine]["exp_avg"].shape == shape


def test_a_thin_matrix_whose_gradient_is_a_part_is_torch_s(device, updated):
    table = torch.nn.Parameter(torch.randn(65536, 4, device=device))
    table.grad = torch.randn(65536, 8, device=device)[:, 4:]
    AdamW([table], model=torch.nn.Module()).step()
    assert updated == []


@pytest.mark.parametrize("bits", [8, 32])
def test_a_compiled_step_is_made_once(device, on_a_cpu_too, bits):
    """Dynamo calls `_init_group` as it traces."""
    torch.manual_seed(1)
    model = torch.nn.ModuleList([torch.nn.Embedding(2048, 128), Int8Linear(128, 64)]).to(device)
    other = copy.deepcopy(model)
    compiled, launched = (AdamW(m.parameters(), 1e-2, model=m, bits=bits) for m in (model, other))
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="eager")
    for i in range(3):
        give_gradients(model, i)
        give_gradients(other, i)
        step()
        launched.step()
        assert [float(state["step"]) for state in compiled.state.values()] == [i + 1] * 3
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    codes_are_of(model)


def test_a_replay_of_steps_without_codes(device, on_a_cpu_too):
    """Nothing is to be renewed; whoever made something of a weight makes it anew."""
    table = torch.nn.Embedding(2048, 128, device=device)
    optimizer = AdamW(table.parameters(), model=table)
    give_gradients(table, 0)
    optimizer.step()
    before = table.weight.detach().clone()
    with replaying(optimizer):
        assert torch.equal(table.weight, before)


@pytest.mark.gpu
def test_captured_steps_without_codes_are_those_that_are_launched(device):
    losses = []
    for captured in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(2048, 128), torch.nn.Linear(128, 2048))
        model.to(device)
        optimizer = AdamW(model.parameters(), 1e-2, model=model, capturable=True)
        optimizer.grad_scale = torch.full((), 2.0, device=device)
        optimizer.found_inf = torch.zeros((), device=device)

        def step(ids: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(ids), ids)
            (2 * loss).backward()
            optimizer.step()
            return loss.detach()

        take = CapturedStep(step, optimizer) if captured else step
        losses.append([float(take(torch.arange(256, device=device))) for _ in range(8)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 1


def test_grad_scale_divides_the_gradient(device):
    models = [model_of(device) for _ in range(2)]
    for model, scale in zip(models, (1.0, 4.0), strict=True):
        optimizer = optimizers("ours", model, eps=1e-3)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        backward(model, optimizer, 0)
        for parameter in model.parameters():
            parameter.grad *= scale
        optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def change_in_place(model: GPT2) -> None:
    with torch.no_grad():
        model.blocks[0].qkv.weight.mul_(1.5)


def load(model: GPT2) -> None:
    model.load_state_dict({k: 1.25 * v for k, v in model.state_dict().items()})


def exchange(model: GPT2) -> None:
    model.blocks[0].qkv.weight.data = 2 * model.blocks[0].qkv.weight.data


@pytest.mark.parametrize("change", [change_in_place, load, exchange])
def test_what_else_changes_a_weight_has_it_quantised(device, change: Callable[[GPT2], None]):
    model = model_of(device)
    optimizer = optimizers("ours", model)
    for step in range(2):
        backward(model, optimizer, step)
        optimizer.step()
        change(model)
        codes_are_of(model)


def test_a_hook_that_changes_a_weight_after_the_step_has_it_quantised(device):
    model = model_of(device)
    optimizer = optimizers("ours", model)
    optimizer.register_step_post_hook(lambda *_: change_in_place(model))
    backward(model, optimizer, 0)
    optimizer.step()
    codes_are_of(model)


def test_codes_stay_where_they_are(device):
    """A CUDA graph finds them there, and there is one copy."""
    model = model_of(device)
    optimizer = optimizers("ours", model)
    caches = [cache for cache, _ in quantised_weights(model).values()]
    places = []
    for step in range(3):
        backward(model, optimizer, step)
        places.append([t.data_ptr() for cache in caches for t in cache.latest.tensors])
        optimizer.step()
        places.append([t.data_ptr() for cache in caches for t in cache.latest.tensors])
        if step == 1:
            change_in_place(model)
    assert places[0] == places[1] == places[2] == places[3] == places[5]
    assert places[4] != places[0], "what is changed in between is quantised elsewhere"


def test_backward_through_overwritten_codes_is_refused(device):
    """As torch refuses it through an overwritten weight."""
    model = model_of(device)
    optimizer = optimizers("ours", model)
    ids, targets = batch(device, 0)
    loss = model(ids, targets)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_gradient_and_of_other_kinds(device, quantised):
    """The one is skipped; a BF16 weight is torch's, and quantised when it has changed."""
    layers = [Int8Linear(32, 32, device=device, dtype=torch.float32) for _ in range(3)]
    layers[1].to(torch.bfloat16)
    model = torch.nn.Sequential(*layers)
    optimizer = AdamW(model.parameters(), model=model)
    x = torch.randn((4, 32), device=device)
    layers[0](x).sum().backward()
    layers[1](x.bfloat16()).sum().backward()
    before = layers[2].weight.detach().clone()
    quantised.clear()
    optimizer.step()
    assert torch.equal(layers[2].weight, before)
    assert layers[2].weight not in optimizer.state
    layers[0](x), layers[1](x.bfloat16())
    assert len(quantised) == 1


def test_a_copy_is_torch_s_own(device):
    model = model_of(device)
    optimizer = copy.deepcopy(optimizers("ours", model))
    backward(model, optimizer, 0)
    optimizer.step()


def test_a_replay_renews_the_codes(device, quantised):
    """As a graph's replay does it: into the same tensors, under versions that do not change."""
    model = model_of(device)
    optimizer = optimizers("ours", model)
    backward(model, optimizer, 0)
    optimizer.step()
    weight = model.blocks[0].qkv.weight
    cache, block = quantised_weights(model)[weight]
    codes = cache.latest
    change_in_place(model)
    quantised.clear()
    with replaying(optimizer):
        assert quantised == [weight.shape]
        expected = int8_quantize(weight.detach(), block=block, layout="both")
        pairs = zip(codes.tensors, expected.tensors, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        weight.data.mul_(2)  # under the same version
        renewed = int8_quantize(weight.detach(), block=block, layout="both")
        for to, source in zip(codes.tensors, renewed.tensors, strict=True):
            to.copy_(source)
    quantised.clear()
    assert cache.of(weight, block) is cache.latest
    codes_are_of(model)
    assert quantised == []


def test_a_weight_of_another_shape_has_new_codes(device):
    layer = Int8Linear(32, 64, bias=False, device=device)
    optimizer = AdamW(layer.parameters(), model=layer)
    for outputs in (64, 96):
        layer.weight.data = torch.randn((outputs, 32), device=device)
        layer.weight.grad = torch.randn((outputs, 32), device=device)
        optimizer.state.clear()
        optimizer.step()
        codes_are_of(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8"])
def test_a_graphed_step_trains_as_an_eager_one(device, optimizer):
    from jetfire.gpt2.training.graph import graphed as graphed_step

    settings = make(
        "tiny",
        {
            "recipe": "int8-block32",
            "optimizer": optimizer,
            "layers": 2,
            "heads": 2,
            "width": 32,
            "context": 16,
            "rate": 1e-2,
        },
    )
    losses = []
    for graphed in (False, True):
        model = model_of(device)
        step = Step(model, settings, device)
        step.set_rate(1e-2)
        run = graphed_step(step) if graphed else step
        losses.append([])
        for i in range(8):
            micro = batch(device, i % 3)
            torch.manual_seed(i)
            losses[-1].append(float(run([micro])[0]))
            if i == 5:  # what a graph must notice
                change_in_place(model)
            codes_are_of(model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "optimizer", "kind", "bits"),
    [
        ("int8-block32", "adamw", AdamW, 32),
        ("bf16", "adamw", torch.optim.AdamW, None),
        ("int4-hq-lss", "adamw", AdamW, 32),
        ("int4-naive", "adamw8", AdamW, 8),
        ("int8-block32", "adamw8", AdamW, 8),
        ("bf16", "adamw8", AdamW, 8),
    ],
)
def test_a_step_uses_it_where_it_helps(device, recipe, optimizer, kind, bits):
    settings = make("tiny", {"recipe": recipe, "optimizer": optimizer})
    made = Step(GPT2(SHAPE, recipe).to(device), settings, device).optimizer
    assert type(made) is kind
    assert {group.get("bits") for group in made.param_groups} == {bits}


def test_what_it_refuses(device):
    model = model_of(device)
    for name in ("amsgrad", "maximize", "foreach", "differentiable"):
        with pytest.raises(UsageError, match=f"{name}=True: expected False, or torch.optim.AdamW"):
            AdamW(model.parameters(), model=model, **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nesterov'"):
        AdamW(model.parameters(), model=model, nesterov=True)
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(UsageError, match="state of amsgrad=True: expected False"):
        AdamW(model.parameters(), model=model).load_state_dict(other.state_dict())


def test_sharded_weights_are_torch_s(tmp_path):
    """FSDP2's parameters are DTensors; their codes are made anew after every step.

    Torch's update is given each process's own part of them.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(Int8Linear(32, 64), Int8Linear(64, 32))
        plain = copy.deepcopy(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert quantised_weights(model) == {}
        for one in (plain, model):
            optimizer = AdamW(one.parameters(), 1e-2, model=one)
            for step in range(3):
                torch.manual_seed(step)
                x = torch.randn((40, 32))
                optimizer.zero_grad()
                (one(x) - x).square().mean().backward()
                optimizer.step()
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(sharded.full_tensor(), whole, rtol=1e-5, atol=1e-5)
        lists = [[] for _ in range(6)]
        optimizer._init_group(optimizer.param_groups[0], *lists)
        given = [tensor for column in lists for tensor in column]
        assert len(given) == 4 * 5
        assert not any(products.is_dtensor(tensor) for tensor in given)
    finally:
        distributed.destroy_process_group()
