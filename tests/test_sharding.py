"""INT8 weights over processes: gathered as codes by FSDP2, divided by tensor parallelism."""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.gpt2.model.gpt2 import GPT2, Shape
from jetfire.nn import Int8Conv1D, Int8Linear, convert, gather_codes, quantised_weights
from jetfire.nn.gathered import CodedShard, GatheredWeight
from jetfire.ops import int8_dequantize, int8_quantize
from jetfire.tests.language_models import calls, compiled

SCRIPT = Path(__file__).parent / "processes" / "sharding.py"
pytestmark = pytest.mark.usefixtures("one_thread")


# --- which weights ------------------------------------------------------------------------------


def model_of(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*map(nn.Linear, widths, widths[1:]))
    convert(model, "int8-block32")
    return model


def test_weights_whose_shards_hold_whole_blocks_are_gathered_as_codes():
    model, plain = model_of(64, 128, 96, 64), model_of(64, 128, 96, 64)
    said = (
        r"^gather_codes: 1 of 3 INT8 weights will be gathered as floats, first 1\.weight \(96×128 "
        r"in blocks of 32\): expected rows that are a multiple of 2 shards × the block's side$"
    )
    with pytest.warns(JetfireWarning, match=said):
        assert gather_codes(model, 2) == ("0.weight", "2.weight")
    kinds = [type(p) for p in model.parameters()]
    assert kinds == [CodedShard, nn.Parameter, nn.Parameter, nn.Parameter, CodedShard, nn.Parameter]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
    x = torch.randn((40, 64))
    assert torch.equal(model(x), plain(x))


def test_once_is_enough():
    model = model_of(64, 64)
    assert gather_codes(model, 2) == ("0.weight",)
    assert gather_codes(model, 2) == ()
    assert gather_codes(model_of(64, 64), 1) == ()


def test_what_something_else_reads_is_gathered_as_it_is():
    """An embedding's table is multiplied by in INT8 too; blocks of two sides have no one code."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GPT2(Shape(layers=1, heads=2, width=64, context=16, vocabulary=512), "int8-block32")
        names = gather_codes(model, 2)
        assert names == tuple(
            f"blocks.0.{n}.weight" for n in ("qkv", "projection", "expand", "contract")
        )
        head = GPT2(Shape(layers=1, heads=2, width=256, context=16, vocabulary=512), "int8")
        assert head.tokens.weight in quantised_weights(head)
        assert "tokens.weight" not in gather_codes(head, 2)
        two = nn.Sequential(Int8Linear(64, 64, block=32), Int8Linear(64, 64, block=64))
        two[1].weight = two[0].weight
        assert gather_codes(two, 2) == ()


def test_shared_weights_stay_shared_and_frozen_ones_frozen():
    model = nn.Sequential(Int8Linear(64, 64), Int8Linear(64, 64))
    model[1].weight = model[0].weight.requires_grad_(False)
    assert gather_codes(model, 2) == ("0.weight",)
    assert model[0].weight is model[1].weight
    assert not model[0].weight.requires_grad


def test_how_many_shards_must_be_known():
    with pytest.raises(UsageError, match=r"shards=None: expected a number, or torch\.distributed"):
        gather_codes(model_of(64, 64))
    with pytest.raises(UsageError, match="shards=0: expected at least 1"):
        gather_codes(model_of(64, 64), 0)


# --- a shard is a tensor like any other ---------------------------------------------------------


def coded() -> nn.Sequential:
    model = model_of(64, 64)
    gather_codes(model, 2)
    return model


def test_a_copy_is_gathered_as_codes_too():
    model = coded()
    again = copy.deepcopy(model)
    weight = again[0].weight
    assert type(weight) is CodedShard
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert torch.equal(weight, model[0].weight)
    assert weight.data_ptr() != model[0].weight.data_ptr()


@pytest.mark.parametrize("to", [torch.bfloat16, "meta"])
def test_it_can_be_moved(to):
    weight = coded().to(to)[0].weight
    assert type(weight) is CodedShard
    assert to in (weight.dtype, weight.device.type)
    assert weight.block == 32


def test_what_is_saved_is_plain():
    """So that it is loaded without Jetfire, by `weights_only` too."""
    model, plain = coded(), model_of(64, 64)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert {type(t) for t in state.values()} == {torch.Tensor}
    assert b"jetfire" not in file.getvalue()
    nn.Linear(64, 64).load_state_dict({n.removeprefix("0."): t for n, t in state.items()})
    model.load_state_dict(plain.state_dict(), assign=True)
    assert type(model[0].weight) is CodedShard
    assert type(pickle.loads(pickle.dumps(model[0].weight))) is nn.Parameter


def test_numpy_reads_it():
    weight = coded()[0].weight.detach()
    assert type(weight) is CodedShard
    assert np.array_equal(weight.numpy(), model_of(64, 64)[0].weight.detach().numpy())


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_optimizers_train_it(how):
    models = coded(), model_of(64, 64)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **{how: True})
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn((40, 64))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, its)


# --- the two hooks ------------------------------------------------------------------------------


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def sent(
    shard: CodedShard, shards: int, whole: torch.Size, policy: MixedPrecisionPolicy = BF16
) -> tuple[torch.Tensor, ...]:
    mesh: Any = SimpleNamespace(size=lambda: shards)
    return shard.fsdp_pre_all_gather(mesh, whole, (whole[1], 1), nn.Module(), policy)[0]


def gathered(
    weight: torch.Tensor, policy: MixedPrecisionPolicy = BF16
) -> tuple[CodedShard, tuple, GatheredWeight]:
    """As FSDP2 asks two processes for it: a shard, what was gathered, the weight made of it."""
    own = [CodedShard(rows, 32) for rows in weight.chunk(2)]
    parts = zip(*(sent(shard, 2, weight.shape, policy) for shard in own), strict=True)
    outputs = tuple(map(torch.cat, parts))
    found, inner = own[0].fsdp_post_all_gather(outputs, None, torch.bfloat16)
    assert inner == ()  # FSDP2 itself frees what was gathered, and there is nothing else
    return own[0], outputs, found


def same_codes(found: GatheredWeight, weight: torch.Tensor) -> bool:
    codes = zip(found.codes.tensors, int8_quantize(weight).tensors, strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in codes)


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [(BF16, {torch.int8, torch.float32}), (MixedPrecisionPolicy(), {torch.float32})],
)
def test_gathered_codes_are_those_of_the_whole_weight(policy, kinds):
    """Of fp32 models all that is gathered is fp32, and FSDP2 views nothing as bytes."""
    torch.manual_seed(0)
    weight, other = torch.randn((128, 80)), torch.randn((128, 80))
    shard, outputs, found = gathered(weight, policy)
    assert {output.dtype for output in outputs} == kinds
    assert (found.shape, found.dtype) == (weight.shape, torch.bfloat16)
    assert same_codes(found, weight)
    versions = [t._version for t in found.codes.tensors]
    for output, new in zip(outputs, gathered(other, policy)[1], strict=True):
        with torch.autograd._unsafe_preserve_version_counter(output):
            output.copy_(new)
    assert shard.fsdp_post_all_gather(outputs, None, torch.bfloat16, out=found) is None
    assert same_codes(found, other)
    assert [t._version for t in found.codes.tensors] == versions


def test_where_nccl_looks_for_nans_codes_are_sent_as_such(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "1")
    _, outputs, _ = gathered(torch.randn((128, 64)), MixedPrecisionPolicy())
    assert [output.dtype for output in outputs] == [torch.int8, torch.float32]


def test_copies_of_codes_as_fp32_keep_their_bits(device):
    """Of NaNs too, as FSDP2 makes them: what is sent, and what has come."""
    codes = torch.randint(-127, 128, (2**20,), dtype=torch.int8, device=device)
    numbers = codes.view(torch.float32)
    assert bool(numbers.isnan().any())
    there, back = torch.empty_like(numbers), torch.empty_like(numbers)
    torch._foreach_copy_([there], [numbers])
    whole = there.view(1, -1)
    torch.split_with_sizes_copy(whole, [whole.shape[1]], dim=1, out=[back.view(1, -1)])
    assert torch.equal(back.view(torch.int8), codes)


def test_what_else_reads_a_gathered_weight_finds_its_numbers():
    torch.manual_seed(0)
    weight = torch.randn((64, 64))
    _, _, found = gathered(weight)
    numbers = int8_dequantize(int8_quantize(weight), out="bf16")
    assert torch.equal(found + 0, numbers)
    assert torch.equal(found.t(), numbers.t())
    assert torch.equal(torch.as_strided(found, (64, 64), (1, 64)), numbers.t())
    assert type(torch.as_strided(found, (64, 64), (64, 1))) is GatheredWeight
    assert type(found.view(-1)) is torch.Tensor
    parameter = nn.Parameter(found)
    assert type(parameter) is GatheredWeight
    x = torch.randn((8, 64), dtype=torch.bfloat16)
    nn.functional.linear(x, parameter).sum().backward()
    assert torch.equal(parameter.grad, x.sum(0).expand(64, 64))
    with pytest.raises(UsageError, match=r"aten\.mul_.*: expected a weight's shard, not what is"):
        found.mul_(2)
    with pytest.raises(UsageError, match=r"aten\._foreach_add_"):
        torch._foreach_add_([torch.zeros(1), found], 1)
    average = torch.zeros((64, 64), dtype=torch.bfloat16).lerp_(found, 0.5)
    assert torch.equal(average, numbers / 2)


def layer_of(stored: str, inputs: int, outputs: int, **options: Any) -> nn.Module:
    layer = Int8Linear(inputs, outputs, **options)
    if stored == "out×in":
        return layer
    assert layer.bias is not None
    return Int8Conv1D(nn.Parameter(layer.weight.detach().t().contiguous()), layer.bias, **options)


STORED = pytest.mark.parametrize("stored", ["out×in", "in×out"])


@pytest.mark.parametrize("options", [{}, {"kept": 4}, {"fallback": 0.2}], ids=str)
@STORED
def test_layers_multiply_by_gathered_codes(stored, options):
    """Compiled or not, as by those of the whole weight, and with its gradient."""
    torch.manual_seed(0)
    layer, x = layer_of(stored, 64, 128, **options), torch.randn((40, 64))
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(gathered(layer.weight.detach())[2])
    outputs, gradients = [], []
    for one in (layer, other):
        torch.manual_seed(1)
        outputs.append(one(x))
        outputs[-1].square().sum().backward()
        gradients.append(one.weight.grad.bfloat16())
    outputs.append(torch.compile(other, backend="aot_eager", fullgraph=True)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(*gradients)


class InTurn(nn.Module):
    """Layers one after another, in one graph: of `nn.Sequential` each has its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@STORED
def test_compiled_layers_keep_what_was_gathered_for_backward(stored):
    """And no transpose, a byte per weight, which Inductor's partitioner would have forward make."""
    layers = [layer_of(stored, 64, 128), layer_of(stored, 128, 64)]
    for layer in layers:
        layer.weight = nn.Parameter(gathered(layer.weight.detach())[2])
    model = InTurn(layers)
    graphs = compiled(model, partition=min_cut_rematerialization_partition, fullgraph=True)
    # As it is of a module that FSDP2 shards: what it holds is not always there.
    with torch._functorch.config.patch(treat_parameters_as_free_to_save=False):
        model(torch.randn((32, 64), requires_grad=True)).sum().backward()
    transposes = [len(calls([graph], "transpose")) for graph in graphs]
    assert transposes == ([0, 2] if stored == "out×in" else [2, 0])
    (output,) = graphs[0].graph.find_nodes(op="output")
    kept = {node: node.meta["val"] for node in output.all_input_nodes}
    weights = [n for n, v in kept.items() if v.dtype == torch.int8 and v.numel() == 64 * 128]
    assert [node.op for node in weights] == ["placeholder"] * 2


@pytest.mark.parametrize(
    ("rows", "shards", "size", "says"),
    [
        (48, 2, (96, 64), r"a weight of 96×64, 48×64 of it in one of 2 processes: expected the"),
        (64, 1, (64, 64), r"a weight of 64×64, 64×64 of it in one of 1 processes"),
        (64, 2, (64, 128), r"a weight of 64×128, 64×64 of it in one of 2 processes"),
    ],
)
def test_other_shards_are_refused(rows, shards, size, says):
    with pytest.raises(UsageError, match=says):
        sent(CodedShard(torch.zeros((rows, 64)), 32), shards, torch.Size(size))


def test_codes_are_of_the_memory_that_a_shard_has_now():
    shard, size = CodedShard(torch.randn((64, 64)), 32), torch.Size((128, 64))
    first, _ = sent(shard, 2, size)
    rows = torch.randn((64, 64))
    shard.data = CodedShard(rows, 32)
    again, scale = sent(shard, 2, size)
    assert not torch.equal(first, again)
    expected = int8_quantize(rows, block=32)
    assert torch.equal(again, expected.q)
    assert torch.equal(scale, expected.scale)


# --- two processes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Where two processes have left what tests/processes/sharding.py says."""
    home = tmp_path_factory.mktemp("sharding")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    started = [
        subprocess.Popen([*command, str(rank), str(home)], env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=600) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return home


@pytest.fixture(scope="module")
def outcomes(home) -> list[dict[str, Any]]:
    return [torch.load(home / f"{rank}.pt", weights_only=False) for rank in range(2)]


def same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


def losses(outcomes: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Of each step, the losses of both processes' micro-batches as one process lists them."""
    return [
        first + second
        for first, second in zip(*(outcome[name]["losses"] for outcome in outcomes), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("codes", "alone"),
        ("kept", "alone-fused"),
        ("ours", "alone-fused"),
        ("ours8", "alone-ours8"),
        ("micros", "alone-micros"),
        ("offload", "alone"),
    ],
)
def test_two_processes_train_as_one_bit_for_bit(name, alone, outcomes):
    """Of two numbers the sum does not depend on their order, and half of it is exact."""
    expected = outcomes[0][alone]
    assert losses(outcomes, name) == expected["losses"]
    assert expected["losses"][-1][0] < 0.8 * expected["losses"][0][0]
    for outcome in outcomes:
        assert same_tensors(outcome[name]["gradients"], expected["gradients"])
        assert same_tensors(outcome[name]["parameters"], expected["parameters"])


def test_fused_blocks_train_as_one(outcomes):
    """FSDP2's hooks part the blocks: each rounds its gradient itself, by other draws."""
    expected = outcomes[0]["alone-blocks"]
    found = losses(outcomes, "blocks")
    assert found[0] == expected["losses"][0]
    for row, other in zip(found, expected["losses"], strict=True):
        assert row == pytest.approx(other, rel=1e-3)
    for name, gradient in expected["gradients"].items():
        error = (outcomes[0]["blocks"]["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 0.05, name


def test_gradients_are_clipped_by_the_norm_of_all(outcomes):
    """A sum of squares of other parts: codes may flip where a weight's last bit differs."""
    expected = outcomes[0]["alone-clipped"]
    for row, other in zip(losses(outcomes, "clipped"), expected["losses"], strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    found, unclipped = outcomes[0]["clipped"]["parameters"], outcomes[0]["alone"]["parameters"]
    for name, value in expected["parameters"].items():
        # Single elements differ by what AdamW makes of a gradient near 0.
        off = (found[name] - value).norm()
        assert off < 1e-3 * value.norm(), name
        assert off < 0.1 * (unclipped[name] - value).norm(), name


def test_mixed_precision_casts_all_but_the_codes(outcomes):
    """Weights are quantised from fp32: the first losses are to the bit those of one process."""
    for outcome in outcomes:
        found = [row[0] for row in outcome["bf16"]["losses"]]
        assert found[0] == outcome["bf16-alone"]
        assert found == pytest.approx([row[0] for row in outcome["codes"]["losses"]], rel=1e-2)
        assert {t.dtype for t in outcome["bf16"]["gradients"].values()} == {torch.float32}
    for row, other in zip(losses(outcomes, "bf16-micros"), losses(outcomes, "micros"), strict=True):
        assert row == pytest.approx(other, rel=1e-2)


def test_a_weight_is_transposed_by_the_product_that_reads_it_so(outcomes):
    """One of three is stored in×out, and its product with the input does.

    In backward the product with `down` does, and the input's gradient is not wanted of `up`.
    """
    for outcome in outcomes:
        assert outcome["transposes"] == [1, 1]


def test_each_of_three_shards_is_quantised_once_per_step(outcomes):
    for outcome in outcomes:
        assert outcome["quantised"] == {1: 3.0, 2: 3.0}


def test_codes_are_of_the_weight_as_it_is(outcomes):
    for outcome in outcomes:
        found = outcome["renewed"]
        assert found.pop("nothing") == (False, True)
        assert found == dict.fromkeys(found, (True, True))
        assert len(found) == 8


def test_divided_layers_are_not_watched(outcomes):
    assert [outcome["watched"] for outcome in outcomes] == [[0, 0], [0, 0]]


def test_a_quarter_of_the_bytes_is_gathered(outcomes):
    for outcome in outcomes:
        codes, floats = outcome["bytes"][True], outcome["bytes"][False]
        assert 0.25 * floats < codes <= 0.27 * floats


def test_evaluation_before_between_and_without_training(outcomes):
    for outcome in outcomes:
        found = outcome["evaluation"]
        assert len(set(found["first"])) == 1
        assert len(set(found["last"])) == 1
        assert found["last"][0] < 0.8 * found["first"][0]


def test_codes_are_there_while_their_layer_runs(outcomes):
    expected = {"forward": True, "between": False, "backward": True, "after": False}
    for outcome in outcomes:
        assert outcome["memory"] == {**expected, "kind": "GatheredWeight"}


def test_checkpoints_know_no_codes(home, outcomes):
    """Sharded or whole, loaded into a model that was never converted, and from one."""
    for outcome in outcomes:
        assert outcome["checkpoint"]["loaded"] == ("Tensor", True)
    found = outcomes[0]["checkpoint"]
    assert {kind for kind, _ in found["full"].values()} == {"Tensor"}
    full = {name: tensor for name, (_, tensor) in found["full"].items()}
    assert same_tensors(full, found["whole"])
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in full.items()}}
    dcp.load(state, checkpoint_id=home / "sharded", no_dist=True)
    assert same_tensors(state["model"], full)
    for outcome in outcomes:
        plain = outcome["from-plain"]
        assert same_tensors(plain["found"], plain["expected"])
        assert plain["kind"] == "CodedShard"
        assert plain["loss"] == plain["loss-alone"]


def test_assigned_shards_are_gathered_as_codes(outcomes):
    """As a model is filled that was sharded on the meta device."""
    for outcome in outcomes:
        expected, found = outcome["assigned"]
        assert found == expected


def test_a_training_s_model_is_sharded_so(outcomes):
    for outcome in outcomes:
        sharded, alone = outcome["gpt2"]["losses"]
        assert sharded == alone
        assert len(outcome["gpt2"]["coded"]) == 8


@pytest.mark.parametrize(("name", "near"), [("tp", 1e-6), ("tp-cut", 1e-3)])
def test_tensor_parallelism_gives_the_same_loss(name, near, outcomes):
    """But for the order of sums; where shards cut a block, for the codes of its two parts."""
    for outcome in outcomes:
        found, expected = outcome[name], outcome[f"{name}-alone"]
        assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=near)
        for row, other in zip(found["losses"], expected["losses"], strict=True):
            assert row == pytest.approx(other, rel=2e-3)
        for part, value in expected["gradients"].items():
            far = torch.linalg.vector_norm(found["gradients"][part] - value)
            assert far < 0.05 * torch.linalg.vector_norm(value), part
    assert same_tensors(outcomes[0][name]["parameters"], outcomes[1][name]["parameters"])


@pytest.mark.parametrize(
    ("name", "near"), [("compiled", 0.0), ("sequence", 1e-6), ("autocast", 2e-2)]
)
def test_outputs_of_divided_layers(name, near, outcomes):
    """Compiled, with tokens shared out between them, in BF16."""
    for outcome in outcomes:
        found, expected = outcome["tp-outputs"][name]
        torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_fsdp_over_tensor_parallelism(outcomes):
    expected = [
        "CodedShard",
        "Tensor",
        "CodedShard",
        "Tensor",
        "Tensor",
        "Tensor",
        "CodedShard",
        "Tensor",
    ]
    assert outcomes[0]["2d-kinds"] == expected
    for row, other in zip(losses(outcomes, "2d"), outcomes[0]["alone"]["losses"], strict=True):
        assert row == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "columns",
            "a weight of 64×64, 64×32 of it in one of 2 processes: expected the shards "
            "that gather_codes was told of",
        ),
        (
            "int4",
            "weight divided over processes: expected it whole, or Int8Linear under "
            "ColwiseParallel or RowwiseParallel",
        ),
        (
            "block",
            "weight divided over processes: expected it whole, or Int8Linear under "
            "ColwiseParallel or RowwiseParallel",
        ),
        ("replicated", "weight placed (Replicate(),): expected (Shard(0),) or (Shard(1),)"),
        (
            "plain",
            "input is no DTensor, the weight is: expected parallelize_module of the layer "
            "itself, or a call of what fully_shard was given",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_all(name, says, outcomes):
    assert [outcome["refused"].get(name) for outcome in outcomes] == [says, says]
