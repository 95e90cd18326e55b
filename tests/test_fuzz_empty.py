"""Calls with empty tensors: what they give is held to its shapes and dtypes."""

import inspect
import sys

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.fuzz import Example
from jetfire.fuzz.run import run_case

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Device.parse("cpu")
CASES = {
    "dequantize": ("int8_dequantize", {"m": 0, "n": 40, "out": "fp16"}),
    "gelu": ("int8_gelu", {"m": 40, "n": 0, "layout": "both"}),
    "gemm": ("int8_gemm", {"m": 3, "n": 5, "k": 0, "bias": True}),
    "quantize": ("int8_quantize", {"m": 0, "n": 0}),
}
# With fields and tensors that few ops have, and sums of nothing that are not 0.
EMPTY = [
    ("gather_rows", {"m": 0, "rows": 5, "repeat": True, "transpose": True}),
    ("cross_entropy", {"m": 0, "valid": 9}),
    ("gemm", {"k": 0, "bias": True, "accumulate": True, "out": "bf16"}),
    ("int4_gemm", {"k": 0, "bias": True, "operands": "wide"}),
    ("int4_gemm", {"m": 0, "operands": "packed"}),
    ("layernorm", {"m": 0, "mode": "bwd"}),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrong", [None, "dtype", "shape"])
def test_results_are_held_to_shapes_and_dtypes(name, wrong, monkeypatch):
    op, (function, fields) = registry.get(name), CASES[name]
    case = Example(
        name, "torch", {**op.Problem(32, *[32] * (len(op.dims) - 1)).as_dict(), **fields}, {}
    )
    module = sys.modules[type(op).__module__]
    right = getattr(module, function)

    def changed(tensor):
        return tensor.double() if wrong == "dtype" else tensor[None]

    def called(*args, **options):
        leaves, form = tree_flatten(right(*args, **options))
        last = max(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        leaves[last] = changed(leaves[last])
        return tree_unflatten(leaves, form)

    called.__signature__ = inspect.signature(right)
    if wrong:
        monkeypatch.setattr(module, function, called)
    outcome = run_case(case, CPU)
    assert outcome.kind == ("wrong" if wrong else None), outcome
    assert not wrong or outcome.message.startswith("results [")


@pytest.mark.parametrize(("name", "fields"), EMPTY)
def test_functions_are_called_as_their_ops_say(name, fields, monkeypatch):
    """They give what the reference does; and are said to be wrong where they add another term."""
    op = registry.get(name)
    case = Example(
        name, "torch", {**op.Problem(**dict.fromkeys(op.dims, 32)).as_dict(), **fields}, {}
    )
    assert run_case(case, CPU).kind is None
    nothing = type(op).nothing

    def one_more(self, problem, inputs, outputs):
        nothing(self, problem, inputs, outputs)
        for tensor in outputs.values():
            tensor += 1

    monkeypatch.setattr(type(op), "nothing", one_more)
    summed = any(size in fields and fields[size] == 0 for size in op.sums)
    assert run_case(case, CPU).kind == ("wrong" if summed else None)
