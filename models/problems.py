"""The problems that a converted layer asks kernels to solve, found without memory or launches."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from jetfire.core import calls, registry
from jetfire.core.op import Op
from jetfire.core.operators import Operator
from jetfire.core.problem import Block
from jetfire.models.layers import LinearLayer
from jetfire.nn import Int8Conv1D, Int8Linear


@cache
def _operators() -> dict[str, Operator]:
    """Return every op's operators by the name of their schema."""
    modules = [registry.module(name) for name in registry.names()]
    found = (value for module in modules for value in vars(module).values())
    return {one.name: one for one in found if isinstance(one, Operator)}


class _Asked(TorchDispatchMode):
    """Collects the problems of our operators' calls, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Op, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "jetfire":
            known, name = _operators(), func._schema.name.partition("::")[2]
            operator = known.get(f"{name}.{func._schema.overload_name}") or known[name]
            op = registry.get(operator.op)
            fields = operator.fields(operator.key(args))
            self.found.append((op, calls.problem_of(op, fields)[0]))
        return func(*args, **(kwargs or {}))


def _floats(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device="cpu")


@cache
def _of_sizes(
    m: int, n: int, k: int, bias: bool, transposed: bool, block: Block
) -> tuple[tuple[Op, Any], ...]:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a weight's stamp has its address, which a fake has not
        layer: nn.Module
        if transposed:
            weight, of_bias = nn.Parameter(_floats(k, n)), nn.Parameter(_floats(n))
            layer = Int8Conv1D(weight, of_bias, block)
        else:
            layer = Int8Linear(k, n, bias, block, device="cpu", dtype=torch.float32)
        x = _floats(m, k).bfloat16().requires_grad_()
        with _Asked() as asked:
            y = layer(x)
            y.backward(torch.empty_like(y))
    return tuple(asked.found)


def problems_of(layer: LinearLayer, block: Block) -> tuple[tuple[Op, Any], ...]:
    """Return op and problem of each launch of one call of a layer converted to INT8.

    They are those of forward and backward with BF16 input and an fp32 weight, as under autocast:
    three products, and what quantises the input, the weight and the gradient and sums the bias's.
    """
    return _of_sizes(layer.m, layer.n, layer.k, layer.bias, layer.transposed, block)
