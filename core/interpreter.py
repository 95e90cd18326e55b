"""Triton's interpreter, held to the tensors that a kernel was given: no access may miss them.

The interpreter reads and writes what a pointer says. A read beyond a tensor's end mostly finds
memory of this process, and a result that nobody uses hides it; on a GPU it may be a fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetfire.core.tensors import span

# Addresses of the first byte of each tensor and of the one after its last, with its shape.
_Span = tuple[int, int, tuple[int, ...]]
_spans: list[_Span] = []
_held = False


class OutOfBoundsError(Exception):
    """An interpreted kernel touched memory of none of its tensors; the message has the line."""


def found_in(error: BaseException | None) -> OutOfBoundsError | None:
    """Return what an error comes from: Triton wraps it once for each function of its language."""
    while error is not None and not isinstance(error, OutOfBoundsError):
        error = error.__cause__
    return error


def hold_to_tensors() -> None:
    """Have an interpreted kernel fail where it touches memory of none of its tensors.

    The error is Triton's own, in which `found_in` finds `OutOfBoundsError`. A tensor is all from
    its first element to its last: what lies between its rows counts too.
    """
    global _held
    if _held:
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    for name, mask_at in (
        ("create_masked_load", 1),
        ("create_masked_store", 2),
        ("create_atomic_rmw", 3),
        ("create_atomic_cas", None),
    ):
        setattr(builder, name, _checked(getattr(builder, name), name, mask_at))
    interpreter._implicit_cvt = _noting(interpreter._implicit_cvt)
    interpreter.GridExecutor.__call__ = _launching(interpreter.GridExecutor.__call__)
    _held = True


def _launching(launch: Callable[..., None]) -> Callable[..., None]:
    """Return the launch of a kernel, which forgets the tensors of the one before."""

    def launched(*args: Any, **options: Any) -> None:
        _spans.clear()
        launch(*args, **options)

    return launched


def _noting(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the conversion of a kernel's argument, which notes where a tensor lies."""

    def converted(argument: Any) -> Any:
        tensor = getattr(argument, "base", argument)  # of one that Triton reinterprets
        if isinstance(tensor, torch.Tensor):
            first, shape = tensor.data_ptr(), tuple(tensor.shape)
            _spans.append((first, first + span(tensor) * tensor.element_size(), shape))
        return convert(argument)

    return converted


def _checked(access: Callable[..., Any], name: str, mask_at: int | None) -> Callable[..., Any]:
    """Return a method of the interpreter's builder, which checks its addresses first.

    Args:
        mask_at: the place of the mask after the pointers, or None where there is none.
    """
    verb = "reads" if name.endswith("load") else "writes"
    place = mask_at

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        at = 1 if name == "create_atomic_rmw" else 0  # after the kind of operation
        pointers = args[at]
        addresses = pointers.data
        if place is not None:
            mask = np.asarray(args[place].data, bool)  # which may come as integers
            addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        element = pointers.get_element_ty().primitive_bitwidth
        if addresses.size:
            _check(addresses.ravel(), max(element // 8, 1), verb)
        return access(self, *args, **options)

    return checked


def _check(addresses: np.ndarray, size: int, verb: str) -> None:
    """Check accesses of some bytes each.

    Raises:
        OutOfBoundsError: one is not within a tensor.
    """
    low, high = int(addresses.min()), int(addresses.max()) + size
    if any(first <= low and high <= end for first, end, _ in _spans):
        return
    outside = np.ones(addresses.shape, bool)
    for first, end, _ in _spans:
        outside &= (addresses < first) | (addresses + np.uint64(size) > end)
    if outside.any():
        raise OutOfBoundsError(_missed(int(addresses[outside][0]), size, int(outside.sum()), verb))


def _missed(address: int, size: int, count: int, verb: str) -> str:
    def away(span: _Span) -> int:
        return max(span[0] - address, address + size - span[1])

    outside = f"{_line()} {verb} {count} elements of {size} bytes outside of the kernel's tensors"
    if not _spans:
        return f"{outside}: it was given none"
    nearest = min(_spans, key=away)
    side = "before" if address < nearest[0] else "after"
    sizes = "×".join(map(str, nearest[2])) or "a scalar"
    return f"{outside}: the first lies {away(nearest)} bytes {side} the nearest one ({sizes})"


def _line() -> str:
    """Return the place in a kernel that is being interpreted."""
    import triton

    passed = Path(triton.__file__).parent, Path(__file__)
    frame = sys._getframe()
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(path) for path in passed):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
