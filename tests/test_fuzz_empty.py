"""Calls with empty tensors: what they give is held to its shapes and dtypes."""

import inspect

import pytest
import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.fuzz import Case
from jetfire.fuzz.run import run_case

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Device.parse("cpu")
CASES = {
    "dequantize": ("int8_dequantize", {"m": 0, "n": 40, "out": "fp16"}),
    "gelu": ("int8_gelu", {"m": 40, "n": 0, "layout": "both"}),
    "gemm": ("int8_gemm", {"m": 3, "n": 5, "k": 0, "bias": True}),
    "quantize": ("int8_quantize", {"m": 0, "n": 0}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrong", [None, "dtype", "shape"])
def test_results_are_held_to_shapes_and_dtypes(name, wrong, monkeypatch):
    op, (function, fields) = registry.get(name), CASES[name]
    case = Case(
        name, "torch", {**op.Problem(32, *[32] * (len(op.dims) - 1)).as_dict(), **fields}, {}
    )
    right = getattr(ops, function)

    def changed(tensor):
        return tensor.double() if wrong == "dtype" else tensor[None]

    def called(*args, **options):
        found = right(*args, **options)
        if isinstance(found, torch.Tensor):
            return changed(found)
        return (*found[:-1], changed(found[-1]))

    called.__signature__ = inspect.signature(right)
    if wrong:
        monkeypatch.setattr(ops, function, called)
    outcome = run_case(case, CPU)
    assert outcome.kind == ("wrong" if wrong else None), outcome
    assert not wrong or outcome.message.startswith("results [")
