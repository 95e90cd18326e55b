"""AdamW's moments of a parameter as INT8 codes: where they are kept so, and from and to fp32's.

Codes have the parameter's shape, and a scale stands for each 128 numbers of a row, which is all
that has one first index. So what FSDP2 shards by rows has the codes of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jetfire.core.moments import scales
from jetfire.nn.gathered import CodedShard
from jetfire.nn.products import is_dtensor, own_part
from jetfire.nn.sizes import moment_scales
from jetfire.reference import adamw8

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter or a moment as a matrix, of the same memory."""
    part = own_part(x)
    return (part.plain() if isinstance(part, CodedShard) else part).flatten(1)


def zeros(param: torch.Tensor, bf16: bool) -> dict[str, torch.Tensor] | None:
    """Return what is kept of a parameter before its first step; None where that is torch's.

    Args:
        bf16: whether the moments of a parameter in bf16 are codes too.
    """
    if _stays(param, bf16):
        return None
    part = matrix(param)
    groups = scales(*part.shape)
    first, second = (
        (torch.zeros_like(part, dtype=torch.int8), part.new_zeros(groups, dtype=torch.float32))
        for _ in MOMENTS
    )
    step = torch.zeros((), dtype=torch.float32, device=param.device)
    return {"step": step, **_state(param, first, second)}


def row(param: torch.Tensor, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return what a step reads and writes: gradient, codes and scales of moments, and count."""
    assert param.grad is not None
    grad = matrix(param.grad)
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    pairs = zip(MOMENTS, SCALES, strict=True)
    kept = [matrix(state[name]) for pair in pairs for name in pair]
    return [grad, *kept, state["step"]]


def fit(optimizer: torch.optim.Optimizer) -> None:
    """Keep what was loaded into an optimizer's state in the bits that its groups ask for."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if state := optimizer.state.get(param):
                bf16 = group.get("rounding") == "stochastic"
                _fit(param, state, group.get("bits", 32) == 32 or _stays(param, bf16))


def _fit(param: torch.Tensor, state: dict[str, Any], stays: bool) -> None:
    in_codes = SCALES[0] in state
    if in_codes and not stays:  # torch loads them as floats
        state.update({name: state[name].to(torch.int8) for name in MOMENTS})
    elif in_codes:
        decoders = adamw8.first_values, adamw8.second_values
        for name, scale, decode in zip(MOMENTS, SCALES, decoders, strict=True):
            values = decode(matrix(state[name]), matrix(state.pop(scale)))
            state[name] = _whole(param, values.to(param.dtype), param.shape)
    elif not stays:
        m, v = (matrix(state[name]).float() for name in MOMENTS)
        state.update(_state(param, adamw8.first_codes(m), adamw8.second_codes(v)))
    elif param.dtype == torch.bfloat16:
        state.update({name: state[name].to(param.dtype) for name in MOMENTS})


def loaded(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the state of each parameter in bf16, and what a state dict gave for it."""
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    params = (param for group in optimizer.param_groups for param in group["params"])
    for number, param in zip(numbers, params, strict=True):
        given = state_dict["state"].get(number)
        if given and param.dtype == torch.bfloat16:
            yield optimizer.state[param], given


def _stays(param: torch.Tensor, bf16: bool) -> bool:
    """Return whether the moments of a parameter are kept in floats whatever the bits."""
    narrow = bf16 and param.dtype == torch.bfloat16 and not is_dtensor(param)
    if not (narrow or param.dtype == torch.float32) or moment_scales(param.shape) is None:
        return True
    if is_dtensor(param):
        from torch.distributed.tensor import Replicate, Shard

        sharded: Any = param
        rows = (Shard(0), Replicate())
        if any(p not in rows or type(p) not in (Shard, Replicate) for p in sharded.placements):
            return True
    return not own_part(param).is_contiguous()


def _state(param: torch.Tensor, *codes: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Return codes and scales of this process's part of both moments, as a state holds them."""
    groups = moment_scales(param.shape)
    assert groups is not None
    found = {}
    for name, scale_name, (q, scale) in zip(MOMENTS, SCALES, codes, strict=True):
        found[name] = _whole(param, q, param.shape)
        found[scale_name] = _whole(param, scale, groups)
    return found


def _whole(param: torch.Tensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return this process's part of a tensor (a matrix) in its shape, sharded as a parameter is."""
    part = part.view(part.shape[0], *shape[1:])
    if not is_dtensor(param):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = param
    stride = torch.empty(shape, dtype=part.dtype, device="meta").stride()
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
