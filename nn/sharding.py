"""The weights of a model that FSDP2 gathers as INT8 codes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jetfire.core.arguments import checked
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.problem import Block
from jetfire.nn.gathered import CodedShard
from jetfire.nn.products import FLOATS, Int8Weights, is_dtensor, own_part


@checked
def gather_codes(model: nn.Module, shards: int | None = None) -> tuple[str, ...]:
    """Have FSDP2 gather the weights of a model's INT8 layers as codes and scales.

    Call it before `torch.distributed.fsdp.fully_shard`, and make the optimizer after that. Each
    process quantises its own rows, once per optimizer step, from the dtype in which they are kept,
    so that the codes are those of one process. Shards, gradients and state dicts are what they are
    without it.

    A weight that something else reads too, as a tied embedding does, is gathered as it is. So is
    one whose rows are no multiple of `shards` times the block's side, and a warning names it.

    Args:
        shards: the number of processes over which a weight is sharded; None is all that there are.
            With one nothing is gathered, and nothing changes.

    Returns:
        The names of the parameters that are gathered as codes from now on.

    Raises:
        UsageError: it is not known how many shards there are.
    """
    if shards is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("shards=None: expected a number, or torch.distributed initialised")
        shards = dist.get_world_size()
    if shards < 1:
        raise UsageError(f"shards={shards}: expected at least 1")
    sides = _sides(model) if shards > 1 else {}
    names, cut = [], []
    for name, parameter in list(model.named_parameters()):
        side, own = sides.get(parameter), own_part(parameter)
        if side is None or isinstance(own, CodedShard):
            continue
        if own.shape[0] % (shards * side):
            cut.append(f"{name} ({own.shape[0]}×{own.shape[1]} in blocks of {side})")
        else:
            _replace(model, parameter, side)
            names.append(name)
    if cut:
        warnings.warn(
            f"gather_codes: {len(cut)} of {len(names) + len(cut)} INT8 weights will be gathered as "
            f"floats, first {cut[0]}: expected rows that are a multiple of {shards} shards × the "
            "block's side",
            JetfireWarning,
            stacklevel=3,
        )
    return tuple(names)


def _sides(model: nn.Module) -> dict[nn.Parameter, Block]:
    """Return the block of each parameter that INT8 products alone read, all in the same blocks."""
    found: dict[nn.Parameter, set[Block | None]] = defaultdict(set)
    for module in model.modules():
        listed = module.int8_weights() if isinstance(module, Int8Weights) else ()
        blocks = {weight: block for weight, _, block in listed if weight.dtype in FLOATS}
        for parameter in module.parameters(recurse=False):
            found[parameter].add(blocks.get(parameter))
    only = {parameter: blocks.pop() for parameter, blocks in found.items() if len(blocks) == 1}
    return {parameter: block for parameter, block in only.items() if block is not None}


def _replace(model: nn.Module, parameter: nn.Parameter, side: Block) -> None:
    """Put a parameter that is gathered as codes in another's place, in every module that has it."""
    new = _coded(parameter, side)
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            if own is parameter:
                setattr(module, name, new)
                module.register_load_state_dict_post_hook(partial(_stay_coded, name, side))


def _coded(parameter: nn.Parameter, side: Block) -> nn.Parameter:
    """Return a parameter of the same memory, or of the same part, that is gathered as codes."""
    data: torch.Tensor = CodedShard(own_part(parameter).detach(), side)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor

        whole: Any = parameter
        layout = whole.device_mesh, whole.placements
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        data = DTensor.from_local(data, *layout, run_check=False, **sizes)
    return nn.Parameter(data, parameter.requires_grad)


def _stay_coded(name: str, side: Block, module: nn.Module, *_: object) -> None:
    """Have what `load_state_dict(…, assign=True)` put in its place be gathered as codes too."""
    parameter: Any = getattr(module, name)
    if not isinstance(own_part(parameter), CodedShard):
        setattr(module, name, _coded(parameter, side))
