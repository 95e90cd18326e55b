"""Refuse tensors that cannot be written in place, as torch does for its own operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetfire.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def refuse_in_place(
    written: Mapping[str, Tensor], read: Mapping[str, Tensor | None], adds: bool = False
) -> None:
    """Check the tensors that a call writes, beside those that it reads.

    Args:
        written: matrices with contiguous rows.
        adds: the call adds a constant to what it writes. The gradient is then right as it is, so a
            written tensor may require grad if it is no leaf.

    Raises:
        UsageError: a written tensor requires grad while gradients are recorded, or shares memory
            with itself or with another tensor of the call.
    """
    import torch

    if torch.is_grad_enabled():
        for name, x in written.items():
            if x.requires_grad and not (adds and not _is_of_a_leaf(x)):
                kind = "is a leaf that requires" if adds else "requires"
                raise UsageError(f"{name} {kind} grad: expected torch.no_grad() to write it")
    for name, x in written.items():
        if not x.is_contiguous() and x.stride(0) < x.shape[1]:
            raise UsageError(f"{name} has strides {x.stride()}: expected rows that do not overlap")
    if not torch.compiler.is_compiling():  # traced tensors have no memory
        _refuse_shared(written, read)


def _is_of_a_leaf(x: Tensor) -> bool:
    import torch

    if torch.compiler.is_compiling():  # Dynamo traces no _is_view
        return x.is_leaf
    base = x._base if x._is_view() else x
    return base is not None and base.is_leaf


def _refuse_shared(written: Mapping[str, Tensor], read: Mapping[str, Tensor | None]) -> None:
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in (*written.items(), *read.items()):
        if x is not None:
            by_storage.setdefault(x.untyped_storage()._cdata, []).append((name, x))
    for held in by_storage.values():
        for i, (name, x) in enumerate(held):
            for other, y in held[:i]:
                if other in written and _meet(x, y):
                    raise UsageError(
                        f"{name} and {other} share memory: expected another {other}, "
                        "which is written"
                    )


def _meet(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one storage overlap, each from its first to its last byte."""
    (first, end), (other_first, other_end) = _span(x), _span(y)
    return first < other_end and other_first < end


def _span(x: Tensor) -> tuple[int, int]:
    first, size = int(x.storage_offset()), x.element_size()
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return first * size, (last + 1) * size
