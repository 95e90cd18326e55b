"""A linear layer whose weight `torch.distributed.tensor.parallel` has divided over processes.

Each process multiplies its part of the input by its part of the weight, quantised by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from jetfire.core.errors import UsageError

Tensor = torch.Tensor


def divided_linear(
    input: Tensor,
    weight: Any,
    bias: Any,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> DTensor:
    """Return x·Wᵀ + b of DTensors on a mesh of one dimension.

    By rows of the weight, as `ColwiseParallel` divides it, every process takes the whole input and
    has its columns of the output. By columns (`RowwiseParallel`) it takes its columns of the input,
    and the output is yet to be summed; the bias is added once, and its gradient is exact.

    Args:
        input: (…, in features).
        weight: out×in; bias: out, or None.
        multiply: the layer of a process's own input, weight and bias.

    Raises:
        UsageError: they are divided otherwise.
    """
    mesh, last = weight.device_mesh, input.dim() - 1
    by_rows, by_columns = weight.placements == (Shard(0),), weight.placements == (Shard(1),)
    if not (by_rows or by_columns):
        raise UsageError(f"weight placed {weight.placements}: expected (Shard(0),) or (Shard(1),)")
    if not isinstance(input, DTensor):
        raise UsageError(
            "input is no DTensor, the weight is: expected parallelize_module of the layer itself, "
            "or a call of what fully_shard was given"
        )
    own: Placement = Replicate() if by_rows else Shard(last)
    gradient: Placement = Partial() if by_rows else own
    x = input.redistribute(mesh, [own]).to_local(grad_placements=[gradient])
    own_bias = bias.to_local() if by_rows and bias is not None else None
    y = multiply(x, weight.to_local(), own_bias)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    found = DTensor.from_local(
        y,
        mesh,
        [Shard(last) if by_rows else Partial()],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, dtype=y.dtype, device="meta").stride(),
    )
    return found if bias is None or by_rows else found + bias.to(found.dtype)
