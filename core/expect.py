"""Checks of the tensors and options that a public function is given.

Raises:
    UsageError: from every function here, in a line that says what was given and what is expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetfire.core import tensors
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block, Layout, LayoutOrNone, Rounding
from jetfire.core.tensors import blocks_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.tensors import Quantized, Quantized4


FLOATS = ("bfloat16", "float16", "float32")


def choice(name: str, value: Any, hint: Any, *more: Any) -> None:
    """Check that a value is one of a `Literal`'s, or one of `more`."""
    if value not in hint.__args__ and value not in more:
        choices = " or ".join(map(str, (*hint.__args__, *more)))
        raise UsageError(f"{name}={value}: expected {choices}")


def matrix(name: str, x: Tensor, dtypes: tuple[str, ...]) -> None:
    """Check that a tensor is 2-D, has one of the dtypes and a contiguous last dimension."""
    if named(x.dtype) not in dtypes:
        raise UsageError(f"{name} is {named(x.dtype)}: expected {' or '.join(dtypes)}")
    if x.dim() != 2:
        raise UsageError(f"{name} has shape {tuple(x.shape)}: expected two dimensions")
    if x.device.type not in ("cuda", "cpu"):
        raise UsageError(f"{name} is on {x.device}: expected cuda or cpu")
    if x.stride(1) != 1 and x.shape[1] > 1 and x.shape[0] > 0:
        raise UsageError(
            f"{name} has strides {x.stride()}: expected a contiguous last dimension; "
            f"call .contiguous()"
        )


def named(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``: names need no torch to be written down."""
    return str(dtype).removeprefix("torch.")


def same_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise UsageError(f"{name} is on {x.device}: expected {like.device}, as the first tensor")


def shaped(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Check that a tensor has a shape, and `like`'s device."""
    same_device(name, x, like)
    if x.shape != shape:
        raise UsageError(f"{name} has shape {tuple(x.shape)}: expected {tuple(shape)}")


def quantized(
    name: str, x: Quantized, like: Quantized | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a matrix's codes and scales once they fit each other, and `like`'s shape and device.

    A quantised `like` is one that was checked before. The block must then be the same too.
    """
    q, scale, block = x.q, x.scale, x.block
    if q is None or scale is None:
        raise UsageError(f"{name} lacks q or scale: expected both (layout=q or both)")
    matrix(name, q, ("int8",))
    if isinstance(like, tuple):
        if block != like.block:
            raise UsageError(f"{name} has block={block}: expected {like.block}, as the first has")
        like = like.q
    if like is not None:
        shaped(name, q, like.shape, like)
    matrix(f"{name}'s scale", scale, ("float32",))
    same_device(f"{name}'s scale", scale, q)
    choice("block", block, Block)
    expected = blocks_of(q.shape[0], q.shape[1], block)
    if scale.shape != expected:
        raise UsageError(
            f"{name}'s scale has shape {tuple(scale.shape)}: expected {expected} "
            f"for {tuple(q.shape)} codes in blocks of {block}"
        )
    return q, scale


def factors(b: Quantized, a: Quantized) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of B once it fits A, which was checked before: C is A·Bᵀ."""
    q, scale = quantized("b", b)
    assert a.q is not None
    same_device("b", q, a.q)
    if a.block != b.block:
        raise UsageError(f"a has block={a.block} and b block={b.block}: expected one block")
    if a.q.shape[1] != q.shape[1]:
        raise UsageError(f"a has k={a.q.shape[1]} and b k={q.shape[1]}: expected one k")
    return q, scale


def norm_backward(
    x: Quantized, dy: Quantized, weight: Tensor, **statistics: Tensor
) -> list[Tensor]:
    """Return what a norm's gradient is made of: codes and scales, weight, statistics of rows."""
    q, scale = quantized("x", x)
    codes = q, scale, *quantized("dy", dy, like=x)
    m, n = q.shape
    weight = vector("weight", weight, n, q)
    return [*codes, weight, *[vector(name, each, m, q) for name, each in statistics.items()]]


def packed(name: str, x: Quantized4) -> Tensor:
    """Return the packed codes of a 4-bit matrix."""
    if x.packed is None:
        raise UsageError(
            f"{name} holds wide codes alone: expected packed ones (layout=packed, both)"
        )
    matrix(name, x.packed, ("int8",))
    return x.packed


def vector(name: str, x: Tensor, size: int, like: Tensor) -> Tensor:
    """Return a vector once it is fp32, of a size and on `like`'s device; contiguous."""
    return exactly(name, x, "float32", (size,), like)


def rounding_seed(rounding: str, seed: Tensor | None, layout: str, like: Tensor) -> Tensor | None:
    """Check rounding and layout, and return the seed where rounding is stochastic."""
    choice("rounding", rounding, Rounding)
    choice("layout", layout, Layout)
    return seed_on(seed, like) if rounding == "stochastic" else None


def seed_on(seed: Tensor | None, like: Tensor) -> Tensor:
    if (
        seed is None
        or named(seed.dtype) != "int64"
        or seed.numel() != 1
        or seed.device != like.device
    ):
        raise UsageError(f"seed: expected an int64 tensor of one element on {like.device}")
    return seed


def same_shape(name: str, x: Tensor, like: Tensor, dtype: str = "float32") -> None:
    """Check that a matrix is of a dtype and of `like`'s shape and device."""
    matrix(name, x, (dtype,))
    shaped(name, x, like.shape, like)


def contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise UsageError(f"{name} has strides {x.stride()}: expected a contiguous tensor")


def scalar(name: str, x: Tensor, like: Tensor) -> None:
    if named(x.dtype) != "float32" or x.numel() != 1 or x.device != like.device:
        raise UsageError(f"{name}: expected a float32 tensor of one element on {like.device}")


def room(
    out: Quantized | None, m: int, n: int, block: Block, layout: LayoutOrNone, like: Tensor
) -> dict[str, Tensor]:
    """Return tensors for the codes of an m×n matrix: those of `out` where given, else new ones."""
    wanted = tensors.quantized(m, n, block, layout=layout)
    if out is None:
        return tensors.empty(wanted, like.device)
    if layout == "none":
        raise UsageError("out with layout=none: expected None, as no codes are written")
    given = {part: x for part in tensors.names_of() if (x := getattr(out, part)) is not None}
    kinds = {part: (tensors.dtype_of(spec.dtype), spec.shape) for part, spec in wanted.items()}
    found = {part: (x.dtype, x.shape) for part, x in given.items()}
    placed = all(x.is_contiguous() and x.device == like.device for x in given.values())
    if out.block != block or found != kinds or not placed:
        expected = ", ".join(f"{part} {named(dtype)} {s}" for part, (dtype, s) in kinds.items())
        raise UsageError(
            f"out: expected {expected}, contiguous, in blocks of {block}, on {like.device}"
        )
    return given


def exactly(name: str, x: Tensor, dtype: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor once it has this dtype, this shape and `like`'s device; contiguous."""
    same_device(name, x, like)
    if named(x.dtype) != dtype or x.shape != shape:
        found = f"{named(x.dtype)} {tuple(x.shape)}"
        raise UsageError(f"{name} is {found}: expected {dtype} {shape}")
    return x.contiguous()
