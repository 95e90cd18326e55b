"""Backwards whose results have no gradient of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")
_REFUSAL = b"trying to differentiate twice a function that was marked with @once_differentiable"


def once_differentiable(backward: Callable[..., Found]) -> Callable[..., Found]:
    """Have a function's backward run without autograd, and a gradient of its results fail.

    torch's own decorator misses two cases, in which parts of a second derivative are missing. In
    one, the gradient that backward is given requires none itself, as that of a sum. In the other,
    backward's results depend on no leaf but the one that is asked for.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with torch.no_grad():
            found: Any = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        results = found if isinstance(found, tuple) else (found,)
        leaves = [None if made is None else made.detach().requires_grad_() for made in results]
        given: Any = *leaves, *grads
        refusing = torch._C._functions.DelayedError(_REFUSAL, len(given))
        refused = refusing(*given)[: len(results)]
        return refused if isinstance(found, tuple) else refused[0]

    return once
