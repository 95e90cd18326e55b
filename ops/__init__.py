"""Operations: each pairs a reference with its kernels.

The functions that a model calls (`int8_gemm`, `int4_quantize`, …) are found here, wherever an op
has them in its `__all__`. Importing this package imports no torch.

A quantised matrix is one value, `Quantized`: int8 codes m×n, an fp32 scale per block×block tile,
and the block; its transpose, or both. `layout` says what a result holds: its own codes ("q"), those
of its transpose ("qt"), or "both"; ``x.t`` is the transpose. Codes may be row-strided views. A
function of several results returns a tuple, always of as many.

The kernel is the one that `core.launch.choose` finds for the tensors' device; empty tensors need
none: their results are empty, or zeros where they are sums over nothing. To autograd results are
constants, but for those of an operator that is `Differentiable`.

`int4_*` are the steps of a linear layer in 4 bits, on `Quantized4`: packed or wide codes of a
matrix and its one scale.

Stochastic rounding needs `seed`, an int64 tensor of one element on that device.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

from jetfire.core import registry
from jetfire.core.operators import Operator
from jetfire.core.tensors import Quantized as Quantized
from jetfire.core.tensors import Quantized4 as Quantized4


class _Package(ModuleType):
    """A package in which an op's function is found even where the op's module has its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in getattr(value, "__all__", ()):
            value = getattr(value, name)  # the import system binds a submodule's name
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _homes() -> dict[str, ModuleType]:
    """Return the public functions' names, and the module that each is in."""
    return _homes_in(tuple(map(registry.module, registry.names())))


@cache
def _homes_in(modules: tuple[ModuleType, ...]) -> dict[str, ModuleType]:
    return {name: module for module in modules for name in getattr(module, "__all__", ())}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_homes(), "Quantized", "Quantized4"])
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _homes()[name]
    for operator in list(vars(module).values()):
        if isinstance(operator, Operator):
            operator.define()  # now rather than while torch.compile traces the first call
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
