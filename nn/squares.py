"""The norm of all gradients, which reads none whose squares were added up where it was made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jetfire.core.arguments import checked, shown
from jetfire.core.errors import UsageError
from jetfire.nn.made import Stamp, stamp

# What a gradient was: a view of it may begin where it begins.
Seen = tuple[Stamp, torch.Size, tuple[int, ...]]

# By weight: what its gradient was, and sums of that one's squares. Not the gradient itself, which
# autograd would then copy: it takes over what nobody else holds.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Dtypes whose norm is summed, and given, in another one: in BF16 it would be off by a 512th.
_SUMMED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def keep_squares(weight: torch.Tensor, gradient: torch.Tensor, squares: torch.Tensor) -> None:
    """Take sums of a gradient's squares, in place of those of the weight's gradient before."""
    _kept[weight] = _seen(gradient), squares


def known_squares(weight: torch.Tensor) -> torch.Tensor | None:
    """Return sums of the squares of a weight's gradient as it is now; None where there are none."""
    kept: tuple[Seen, torch.Tensor] | None = _kept.get(weight)
    if kept is None or weight.grad is None or kept[0] != _seen(weight.grad):
        return None
    return kept[1]


def _seen(gradient: torch.Tensor) -> Seen:
    return stamp(gradient), gradient.shape, gradient.stride()


@checked
@torch.no_grad()
def gradient_norm(parameters: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of the parameters' gradients, of those that have one, as one vector's.

    It is `torch.nn.utils.get_total_norm` of them, summed in fp32 at least, and waits for no device.
    A gradient whose squares a block has added up, as its `squares_gradients` says, is not read, as
    long as torch has counted no change of it. It does not count what `GradScaler.unscale_`, an
    all-reduce, or a fused optimizer with a `grad_scale` changes, nor what goes through `grad.data`.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    read: list[torch.Tensor] = []
    added_up: list[torch.Tensor] = []
    for parameter in given:
        if not isinstance(parameter, torch.Tensor):
            raise UsageError(f"one of parameters{shown(parameter)}: expected tensors")
        if parameter.grad is None:
            continue
        squares = known_squares(parameter)
        if squares is None:
            read.append(parameter.grad)
        else:
            added_up.append(squares)
    norms = _norms(read)
    for same in _alike(added_up):  # none of which is negative
        norms += torch._foreach_sqrt(torch._foreach_norm(same, 1))
    return _joined(norms)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all elements, summed in fp32 at least, on the first tensor's device."""
    return _joined(_norms(tensors))


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each, in some order: a launch for those of one dtype and device."""
    found: list[torch.Tensor] = []
    for same in _alike(tensors):
        found += torch._foreach_norm(same, 2, _SUMMED_IN.get(same[0].dtype))
    return found


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return tensors by their dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups.values()


def _joined(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of a vector by those of its parts."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
