"""nn.AdamW with moments in 8 bits: any model's parameters, state in and out, codes, shards."""

import copy
import math

import pytest
import torch
from safetensors.torch import load, save

from jetfire.core.errors import UsageError
from jetfire.gpt2.training import checkpoint
from jetfire.nn import AdamW, Int8Linear, moments, quantised_weights
from jetfire.ops import int8_quantize
from jetfire.reference.adamw8 import first_values, narrowed, second_values

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def model_of(device) -> torch.nn.Module:
    """An INT8 layer, a convolution, a table, and what is small, short or a vector."""
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "int8": Int8Linear(160, 96),
            "conv": torch.nn.Conv2d(16, 40, 3),
            "table": torch.nn.Embedding(70, 200),
            "small": torch.nn.Linear(130, 8, bias=False),
            "short": torch.nn.Linear(20, 300),
        }
    ).to(device)


IN_CODES = {"int8.weight", "conv.weight", "table.weight"}


def optimizer(model, bits=8, **changes):
    return AdamW(model.parameters(), model=model, bits=bits, **{**OPTIONS, **changes})


def give_gradients(step: int, *models) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn(parameters[0].shape, generator=generator) + 0.5
        for parameter in parameters:
            parameter.grad = gradient.to(parameter, copy=True)


def kept(model, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def equal(one, other) -> bool:
    """Whether parameters, and what is kept of them, have the same bits."""
    pairs = [(dict(model.named_parameters()), kept(model, made)) for model, made in (one, other)]
    return all(
        torch.equal(pairs[0][0][name], pairs[1][0][name])
        and pairs[0][1][name].keys() == pairs[1][1][name].keys()
        and all(torch.equal(x, pairs[1][1][name][key]) for key, x in pairs[0][1][name].items())
        for name in pairs[0][0]
    )


def test_what_is_kept_of_each_parameter(device):
    model = model_of(device)
    ours = optimizer(model)
    give_gradients(0, model)
    ours.step()
    for name, state in kept(model, ours).items():
        parameter = model.get_parameter(name)
        codes = name in IN_CODES
        assert {key: x.dtype for key, x in state.items()} == {
            "step": torch.float32,
            **dict.fromkeys(moments.MOMENTS, torch.int8 if codes else torch.float32),
            **dict.fromkeys(moments.SCALES if codes else (), torch.float32),
        }, name
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape


def test_bytes_per_parameter(device):
    """2 of codes and 2·4/128 of scales where rows are whole groups; fp32's moments have 8."""
    layer = torch.nn.Linear(512, 256, bias=False, device=device)
    ours = optimizer(layer)
    give_gradients(0, layer)
    ours.step()
    state = ours.state[layer.weight]
    bytes_kept = sum(x.nbytes for name, x in state.items() if name != "step")
    assert bytes_kept == layer.weight.numel() * 2.0625


@pytest.mark.parametrize("guarded", [False, True])
def test_follows_torch(device, guarded):
    """Where fp32 moments stay, to rounding; elsewhere to a tenth of what was moved."""
    model = model_of(device)
    before, other = copy.deepcopy(model), copy.deepcopy(model)
    ours = optimizer(model)
    theirs = torch.optim.AdamW(other.parameters(), fused=True, **OPTIONS)
    for made in (ours, theirs) if guarded else ():
        made.grad_scale = torch.tensor(4.0, device=device)
        made.found_inf = torch.tensor(0.0, device=device)
    for step in range(12):
        give_gradients(step, model, other)
        if guarded and step == 5:
            for made in (ours, theirs):
                made.found_inf.fill_(1)
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.grad.fill_(math.nan)
        ours.step()
        theirs.step()
        if guarded:
            ours.found_inf.fill_(0)
            theirs.found_inf.fill_(0)
    for name, parameter in model.named_parameters():
        target, start = other.get_parameter(name), before.get_parameter(name)
        error = float(((parameter - target).norm() / (target - start).norm()).detach())
        assert error < (0.1 if name in IN_CODES else 1e-5), name
        assert float(ours.state[parameter]["step"]) == 12 - guarded


def test_int8_layers_find_the_codes_of_their_new_weights(device, monkeypatch):
    model = model_of(device)
    ours = optimizer(model)
    give_gradients(0, model)
    ours.step()
    monkeypatch.setattr("jetfire.nn.products.quantised_weight", None)
    (weight, (cache, block)) = next(iter(quantised_weights(model).items()))
    expected = int8_quantize(weight.detach(), block=block, layout="both")
    assert all(map(torch.equal, cache.of(weight, block).tensors, expected.tensors))


def test_goes_on_bit_for_bit_from_its_state(device):
    """As torch loads it, as a file of safetensors and a checkpoint of ours hold it."""
    model = model_of(device)
    ours = optimizer(model)
    for step in range(3):
        give_gradients(step, model)
        ours.step()
    pairs = []
    for _ in range(2):
        again = copy.deepcopy(model)
        pairs.append((again, optimizer(again)))
    pairs[0][1].load_state_dict(copy.deepcopy(ours.state_dict()))
    held = load(save(checkpoint.optimizer_state(model, ours)))
    checkpoint.load_optimizer(*pairs[1], held)
    assert all(equal((model, ours), pair) for pair in pairs)
    give_gradients(3, model, *(again for again, _ in pairs))
    for made in (ours, *(made for _, made in pairs)):
        made.step()
    assert all(equal((model, ours), pair) for pair in pairs)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_takes_fp32_moments_and_gives_them_back(device, kind):
    model = model_of(device)
    plain = optimizer(model, 32) if kind == "ours" else torch.optim.AdamW(model.parameters())
    for step in range(3):
        give_gradients(step, model)
        plain.step()
    before = copy.deepcopy(plain.state_dict())
    ours = optimizer(model)
    ours.load_state_dict(plain.state_dict())
    wide = optimizer(model, 32)
    wide.load_state_dict(ours.state_dict())
    held = checkpoint.optimizer_state(model, ours)
    other = torch.optim.AdamW(model.parameters(), fused=True)
    checkpoint.load_optimizer(model, other, held)
    for index, (name, state) in enumerate(kept(model, ours).items()):
        mine, theirs = wide.state[model.get_parameter(name)], before["state"][index]
        assert other.state[model.get_parameter(name)].keys() == theirs.keys() == mine.keys()
        if name in IN_CODES:
            decoded = first_values(state["exp_avg"].flatten(1), state["exp_avg_scale"])
            assert torch.equal(mine["exp_avg"], decoded.view_as(mine["exp_avg"]))
            decoded = second_values(state["exp_avg_sq"].flatten(1), state["exp_avg_sq_scale"])
            assert torch.equal(mine["exp_avg_sq"], decoded.view_as(mine["exp_avg_sq"]))
        for key, moment in mine.items():
            assert torch.equal(moment, other.state[model.get_parameter(name)][key])
            error = (moment - theirs[key]).norm() / theirs[key].norm()
            assert float(error) < (0.02 if name in IN_CODES else 1e-7)
    give_gradients(3, model)
    ours.step()


def test_a_group_has_bits_of_its_own(device):
    """The table of embeddings in fp32, say."""
    model = model_of(device)
    table = [model["table"].weight]
    rest = [p for name, p in model.named_parameters() if not name.startswith("table")]
    groups = [{"params": rest}, {"params": table, "bits": 32}]
    ours = AdamW(groups, model=model, bits=8, **OPTIONS)
    give_gradients(0, model)
    ours.step()
    assert ours.state[table[0]]["exp_avg"].dtype == torch.float32
    assert ours.state[rest[0]]["exp_avg"].dtype == torch.int8
    again = AdamW(groups, model=model, bits=8, **OPTIONS)
    again.load_state_dict(ours.state_dict())
    assert again.state[table[0]]["exp_avg"].dtype == torch.float32
    with pytest.raises(UsageError, match="bits=4: expected 8 or 32"):
        optimizer(model, 4)


# Weights in bf16


def narrow_model(device) -> torch.nn.Module:
    """As `model_of`, with what has codes for moments in bf16."""
    model = model_of(device)
    for name in IN_CODES:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    return model


def narrow(model, **changes):
    return optimizer(model, rounding="stochastic", **changes)


def test_weights_in_bf16_are_fp32_s_rounded_by_number_and_step(device):
    """The update is that of fp32's weight; the INT8 layer finds the codes of the bf16 one."""
    model = narrow_model(device)
    wide = copy.deepcopy(model).float()
    ours, theirs = narrow(model, seed=5), optimizer(wide)
    for step in range(2):
        give_gradients(step, model)
        for mine, its in zip(model.parameters(), wide.parameters(), strict=True):
            its.data = mine.detach().float()
            its.grad = mine.grad.float()
        ours.step()
        theirs.step()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            updated = wide.get_parameter(name).detach()
            if name in IN_CODES:
                key = torch.tensor([(5 * 1_000_003 + number << 32) + step + 1], device=device)
                updated = narrowed(updated.flatten(1), key).view_as(updated)
            assert torch.equal(parameter, updated), name
            state = ours.state[parameter]
            assert all(
                torch.equal(x, theirs.state[wide.get_parameter(name)][key])
                for key, x in state.items()
            ), name
    (weight, (cache, block)) = next(iter(quantised_weights(model).items()))
    expected = int8_quantize(weight.detach(), block=block, layout="both")
    assert all(map(torch.equal, cache.of(weight, block).tensors, expected.tensors))


def test_weights_in_bf16_go_on_bit_for_bit(device):
    """As torch loads their state, which makes bf16 of all, and as a file of safetensors does."""
    model = narrow_model(device)
    ours = narrow(model)
    for step in range(3):
        give_gradients(step, model)
        ours.step()
    pairs = []
    for _ in range(2):
        again = copy.deepcopy(model)
        pairs.append((again, narrow(again)))
    pairs[0][1].load_state_dict(copy.deepcopy(ours.state_dict()))
    checkpoint.load_optimizer(*pairs[1], load(save(checkpoint.optimizer_state(model, ours))))
    assert all(equal((model, ours), pair) for pair in pairs)
    give_gradients(3, model, *(again for again, _ in pairs))
    for made in (ours, *(made for _, made in pairs)):
        made.step()
    assert all(equal((model, ours), pair) for pair in pairs)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_copy_goes_on_as_the_original_and_adds_groups_as_it_does(rounding, device):
    model = model_of(device) if rounding == "nearest" else narrow_model(device)
    ours = optimizer(model, rounding=rounding, seed=5)
    give_gradients(0, model)
    ours.step()
    pair = copy.deepcopy((model, ours))
    give_gradients(1, model, pair[0])
    ours.step()
    pair[1].step()
    assert equal((model, ours), pair)
    pair[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(8, device=device))]})
    assert [group["bits"] for group in pair[1].param_groups] == [8, 8]
    assert [group["rounding"] for group in pair[1].param_groups] == [rounding] * 2


def test_weights_in_bf16_take_a_state_of_fp32_s_and_give_torch_s(device):
    model = model_of(device)
    plain = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    give_gradients(0, model)
    plain.step()
    expected = optimizer(model)
    expected.load_state_dict(plain.state_dict())
    half = narrow_model(device)
    ours = narrow(half)
    ours.load_state_dict(plain.state_dict())
    for mine, its in zip(half.parameters(), model.parameters(), strict=True):
        for key, x in ours.state[mine].items():
            assert torch.equal(x, expected.state[its][key])
            assert x.dtype == expected.state[its][key].dtype
    back = optimizer(half, 32)
    back.load_state_dict(ours.state_dict())
    assert back.state[half["table"].weight]["exp_avg"].dtype == torch.bfloat16
    give_gradients(1, half)
    back.step()


def test_two_weights_do_not_draw_the_same(device):
    model = torch.nn.ModuleList(torch.nn.Embedding(64, 128) for _ in range(2)).to(device).bfloat16()
    model[1].load_state_dict(model[0].state_dict())
    ours = AdamW(model.parameters(), model=model, bits=8, rounding="stochastic", lr=1e-3)
    for table in model:
        table.weight.grad = torch.ones_like(table.weight)
    ours.step()
    differ = (model[0].weight != model[1].weight).float().mean()
    assert float(differ.detach()) > 0.05


def test_a_group_has_a_rounding_of_its_own(device):
    model = narrow_model(device)
    table, rest = [model["table"].weight], [model["int8"].weight, model["conv"].weight]
    groups = [{"params": rest}, {"params": table, "rounding": "nearest"}]
    ours = AdamW(groups, model=model, bits=8, rounding="stochastic", **OPTIONS)
    give_gradients(0, model)
    ours.step()
    assert ours.state[table[0]]["exp_avg"].dtype == torch.bfloat16  # torch's
    assert ours.state[rest[1]]["exp_avg"].dtype == torch.int8
    with pytest.raises(UsageError, match="rounding=up: expected nearest or stochastic"):
        optimizer(model, rounding="up")


def test_what_it_leaves_to_torch(device):
    """Weights that are not fp32 or not contiguous; those without a gradient have no state."""
    model = torch.nn.ModuleList(torch.nn.Linear(160, 96, bias=False) for _ in range(3)).to(device)
    model[0].to(torch.bfloat16)
    model[1].weight.data = torch.randn((160, 96), device=device).t()
    ours = optimizer(model)
    for layer in model[:2]:
        layer.weight.grad = torch.ones_like(layer.weight)
    ours.step()
    assert ours.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    assert ours.state[model[1].weight]["exp_avg"].dtype == torch.float32
    assert model[2].weight not in ours.state
    model[2].weight.grad = torch.randn((160, 96), device=device).t()  # of any strides
    before = model[2].weight.detach().clone()
    ours.step()
    moved = (before * (1 - 1e-3) - model[2].weight.detach()) / model[2].weight.grad.sign()
    assert torch.allclose(moved, torch.full_like(moved, 1e-2), rtol=1e-3)


def test_shards_have_the_codes_of_one_process(tmp_path):
    """FSDP2's parameters are DTensors, and so are their codes and scales."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(160, 64), torch.nn.Linear(64, 160))
        sharded = copy.deepcopy(plain)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        pairs = []
        for model in (plain, sharded):
            made = optimizer(model)
            for step in range(3):
                torch.manual_seed(step)
                x = torch.randn((40, 160))
                made.zero_grad()
                (model(x) - x).square().mean().backward()
                made.step()
            pairs.append((model, made, checkpoint.optimizer_state(model, made)))
        (_, _, whole), (model, made, parts) = pairs
        assert whole["0.weight/exp_avg"].dtype == torch.int8
        assert whole.keys() == parts.keys()
        gathered = {key: checkpoint.whole(x) for key, x in parts.items()}
        for key, x in whole.items():
            assert torch.equal(gathered[key], x), key
        again = optimizer(model)
        checkpoint.load_optimizer(model, again, whole)
        assert all(
            torch.equal(checkpoint.whole(x), gathered[key])
            for key, x in checkpoint.optimizer_state(model, again).items()
        )
    finally:
        distributed.destroy_process_group()
