"""`jetfire train tune MODEL`: the problems that steps of models which are not ours ask for."""

import copy

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import lookup, registry
from jetfire.core.device import Device
from jetfire.models import bench, tuning

pytest.importorskip("transformers")
CPU = Device.parse("cpu")
SIZES = ("layers=3", "width=64", "heads=2", "vocabulary=96", "batch=2", "context=16")
TOKENS = 32


def problems(recipe, *kernels):
    """Op → problems of a step of three layers, of which two are enough."""
    case = bench.case_of("hf:gpt2-124m", SIZES, (recipe,), CPU)
    found = {}
    for name, wanted in tuning.cases(case, recipe, CPU, kernels).items():
        for one in wanted:
            assert name in registry.kernels(one.op.name)
            found.setdefault(one.op.name, set()).add(one.problem)
    return found


def test_a_model_asks_for_every_product_of_its_layers():
    found = problems("int8")
    shapes = {(p.m, p.n, p.k) for p in found["gemm"]}
    expected = set()
    for o, i in ((192, 64), (64, 64), (256, 64), (64, 256)):
        # transformers' Conv1D keeps weights in×out, and so their gradients.
        expected |= {(TOKENS, o, i), (TOKENS, i, o), (i, o, TOKENS)}
    assert shapes == expected
    assert {p.block for p in found["gemm"]} == {128}
    assert {"quantize", "column_sum", "adamw"} <= found.keys()


def test_a_fused_model_asks_for_what_flows_between_the_products(monkeypatch):
    def autocast(device):  # without which a fused block calls its layers
        return torch.autocast(device.type, torch.bfloat16)

    monkeypatch.setattr("jetfire.models.subject.autocast", autocast)
    found = problems("int8-fused")
    assert {"add", "gelu", "layernorm", "quantize_qkv"} <= found.keys()
    assert {(p.block, p.out_block) for p in found["gelu"]} == {(32, 128)}


def test_named_kernels_take_the_place_of_those_that_the_step_calls():
    usual = problems("int8")
    assert problems("int8", "int_mm", "torch") == usual
    assert problems("int8", "int_mm") == {"gemm": usual["gemm"]}
    assert problems("int8", "tiles") == {}  # it takes no CPU


def test_the_step_s_own_kernel_is_tuned_beside_a_named_one_unless_it_was(monkeypatch):
    """Which of two is faster is known where both were tuned."""
    kernels = registry.kernels
    other = copy.copy(kernels("gemm")["int_mm"])
    other.name = "other"
    monkeypatch.setattr(
        registry, "kernels", lambda op: kernels(op) | ({"other": other} if op == "gemm" else {})
    )
    case = bench.case_of("hf:gpt2-124m", SIZES, ("int8",), CPU)
    both = tuning.cases(case, "int8", CPU, ("other",))
    assert both.keys() == {"int_mm", "other"}
    assert both["int_mm"] == both["other"]
    monkeypatch.setattr(lookup, "exact", lambda *_: object())
    assert tuning.cases(case, "int8", CPU, ("other",)).keys() == {"other"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:gpt2-124n"], "hf:gpt2-124n"),
        (["hf:gpt2-124m", "--set", "wide=1"], "wide"),
        (["hf:gpt2-124m", "--recipe", "int9"], "int9"),
        (["hf:gpt2-124m", "--data", "tokens"], "--data tokens: hf:gpt2-124m has a vocabulary of"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(words, message, capsys):
    assert execute("train", ["tune", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_cpu_has_nothing_to_tune(capsys):
    assert execute("train", ["tune", "hf:gpt2-124m", "--device", "cpu"]) == 5
    assert "expected a GPU" in capsys.readouterr().err
