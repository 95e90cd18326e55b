"""The tensors of a launch: a quantised matrix as one value, and specs of dtypes and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.problem import Codes, Layout, LayoutOrNone


Tensors = dict[str, "torch.Tensor"]


class Quantized(NamedTuple):
    """A matrix (m×n) as INT8 codes with an fp32 scale per block×block tile, its transpose, or both.

    Attributes:
        q, scale: int8 m×n and fp32 ⌈m/block⌉×⌈n/block⌉, with any row stride. None where there is
            only the transpose.
        qt, scale_t: the transpose's, int8 n×m and fp32 ⌈n/block⌉×⌈m/block⌉, or None.
        block: the side of a tile: 32, 64 or 128.
    """

    q: Tensor | None
    scale: Tensor | None
    qt: Tensor | None = None
    scale_t: Tensor | None = None
    block: int = 32

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Layout, block: int) -> Quantized:
        """Return a matrix of the tensors that a layout has, in order."""
        first, second, *more = tensors
        if layout == "qt":
            return cls(None, None, first, second, block)
        third, fourth = more or (None, None)
        return cls(first, second, third, fourth, block)

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes m and n, of the codes that there are."""
        if self.q is not None:
            return self.q.shape[0], self.q.shape[1]
        assert self.qt is not None
        return self.qt.shape[1], self.qt.shape[0]

    @property
    def t(self) -> Quantized:
        """The transpose (n×m), of the same tensors."""
        return Quantized(self.qt, self.scale_t, self.q, self.scale, self.block)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are not None, in order."""
        return tuple(tensor for tensor in self[:4] if tensor is not None)


class Quantized4(NamedTuple):
    """A matrix (m×n) as 4-bit codes, packed, wide or both, with one fp32 scale.

    Attributes:
        packed: int8 m×n/2, two codes per byte (`reference.nibbles`), or None.
        wide: int8 m×n, one code per byte, or None. The code is in the high half; only for a
            weight's gradient is the byte itself the number.
        scale: fp32, one element.
        squares: int32 m, the sum of the squares of each row's codes, or None.
    """

    packed: Tensor | None
    wide: Tensor | None
    scale: Tensor
    squares: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Codes) -> Quantized4:
        """Return a matrix of the codes that a layout has, in order, their scale and squares."""
        *codes, scale, squares = tensors
        packed = None if layout == "wide" else codes[0]
        wide = None if layout == "packed" else codes[-1]
        return cls(packed, wide, scale, squares)


class Spec(NamedTuple):
    """The dtype and shape of a launch's tensor.

    Attributes:
        dtype: bf16, fp16, fp32, int8, int32 or int64.
        shape: the sizes, which may be symbolic.
        block: for codes with a scale per tile, the tile's side.
    """

    dtype: str
    shape: tuple[int, ...]
    block: int | None = None


Specs = dict[str, Spec]
_PARTS = ("q", "scale", "qt", "scale_t")
_LAYOUTS = {"none": _PARTS[:0], "q": _PARTS[:2], "qt": _PARTS[2:], "both": _PARTS}


def names_of(name: str = "q", layout: LayoutOrNone = "both") -> dict[str, str]:
    """Return the tensor name of each part (q, scale, qt, scale_t) of a quantised matrix.

    The parts of a matrix ``q`` have just these names. Those of ``dx`` are ``dx``, ``dx_scale``,
    ``dx_t`` and ``dx_scale_t``.
    """
    own = _PARTS if name == "q" else (name, f"{name}_scale", f"{name}_t", f"{name}_scale_t")
    return {part: own[_PARTS.index(part)] for part in _LAYOUTS[layout]}


def quantized(m: int, n: int, block: int, name: str = "q", layout: LayoutOrNone = "q") -> Specs:
    """Return the specs of a quantised m×n matrix in a layout."""
    scales = blocks_of(m, n, block)
    whole = {
        "q": Spec("int8", (m, n), block),
        "scale": Spec("fp32", scales),
        "qt": Spec("int8", (n, m), block),
        "scale_t": Spec("fp32", scales[::-1]),
    }
    return {own: whole[part] for part, own in names_of(name, layout).items()}


def with_transpose(q: Tensor, scale: Tensor, name: str = "q") -> Tensors:
    """Return a matrix's codes and scales and, as views, those of its transpose, by name."""
    return dict(zip(names_of(name).values(), (q, scale, q.t(), scale.t()), strict=True))


def seed_of(problem: Any) -> Specs:
    """Return the spec of a stochastic rounding's seed; none where a problem rounds to nearest."""
    return {"seed": Spec("int64", (1,))} if problem.rounding == "stochastic" else {}


def span(tensor: Tensor) -> int:
    """Return how many elements there are from a tensor's first to behind its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a `Spec`'s name."""
    import torch

    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "int8": torch.int8,
        "int32": torch.int32,
        "int64": torch.int64,
    }[name]


def empty(specs: Specs, device: torch.device) -> Tensors:
    """Return uninitialised tensors of some specs."""
    import torch

    return {
        name: torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=device)
        for name, spec in specs.items()
    }


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a torch dtype, a float's or that of codes, as a `Spec` has it."""
    return {dtype_of(name): name for name in ("bf16", "fp16", "fp32", "int8")}[dtype]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks_of(m: int, n: int, block: int) -> tuple[int, int]:
    """Return the shape of an m×n matrix's scales."""
    return ceil_div(m, block), ceil_div(n, block)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with a value that no kernel writes: -128 for codes, NaN for floats."""
    return tensor.fill_(math.nan if tensor.is_floating_point() else -128)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return integers of the same bits, as wide as the elements."""
    import torch

    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def alias(tensors: Tensors) -> Tensors:
    """Return other tensors of the same memory, to hand to a launch.

    It may exchange these, or their memory, for others: the caller's stay as they were.
    """
    return {name: tensor.detach() for name, tensor in tensors.items()}


def changed(tensors: Tensors, before: Tensors) -> str:
    """Return which tensor does not hold its copy's bits, in a line; empty where all do."""
    for name, was in before.items():
        differing = bits(tensors[name]) != bits(was)
        if bool(differing.any()):
            return f"{name}: the kernel changed {int(differing.sum())} elements of this input"
    return ""
