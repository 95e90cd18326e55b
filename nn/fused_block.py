"""What the fused blocks of `transformers`' models share: hidden states that carry their codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from jetfire.core.problem import Block
from jetfire.nn.flow import Stream

# The stream that hidden states are, and their version then, as long as they live.
_streams: Any = WeakIdKeyDictionary()


def in_bf16(kind: str) -> bool:
    """Return whether what runs now on a kind of device is autocast to bf16."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


def as_hidden(stream: Stream, shape: torch.Size) -> torch.Tensor:
    """Return the stream as hidden states, which the next block knows as such."""
    hidden = stream.x.view(shape)
    # What is compiled looks into no table; in inference mode a tensor has no version.
    if not torch.compiler.is_compiling() and not hidden.is_inference():
        _streams[hidden] = stream, hidden._version
    return hidden


def stream_of(hidden: torch.Tensor, flow: Block) -> Stream:
    """Return hidden states as a stream: the block's before, or a new one where they are others.

    Its gradient goes through the hidden states, where hooks see it. Reentrant checkpointing makes
    hidden states of a stream without gradients: such are others. So that it gives the bits that
    there are without it, no statistics are taken over: a norm's own, of the codes, differ in the
    last digits.
    """
    x = hidden.reshape(-1, hidden.shape[-1]).to(torch.bfloat16)
    if not torch.compiler.is_compiling() and hidden in _streams:
        stream, version = _streams[hidden]
        learns = hidden.requires_grad == stream.x.requires_grad
        if learns and version == hidden._version and stream.codes.block == flow:
            return stream._replace(x=x, mean=None, rstd=None)
    return Stream.of(x, flow)


def say_causal(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Say that a model's mask is causal and nothing else, where its arguments show it.

    It is a hook before the forward of one whose blocks all take it so. `transformers` asks the GPU
    whether positions that it counts itself are of several sequences, and the host waits for all
    that the GPU still has to do. Under torch.compile it cannot ask and makes a mask even so.
    Attention with a mask takes twice the time: 12 ms more in a step of 51 of GPT-2 350M (H100). In
    place of that mask blocks are given one of no elements.
    """
    if len(args) > 1:
        return None
    given = ("attention_mask", "position_ids", "past_key_values", "encoder_hidden_states")
    config = model.config
    causal = config._attn_implementation == "sdpa" and getattr(config, "is_causal", True)
    if not causal or any(kwargs.get(name) is not None for name in given):
        return None
    tokens = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    read = next((x for x in tokens if x is not None), None)
    window = getattr(config, "sliding_window", None)
    if read is None or (window is not None and read.shape[1] > window):
        return None
    nothing = torch.empty((0, 0, 0, 0), dtype=torch.bool, device=read.device)
    return args, {**kwargs, "attention_mask": nothing}


def mask_of(mask: Any) -> Any:
    """Return a block's mask: None, which is causal attention, where `say_causal` said so."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[-1] == 0:
        return None
    return mask


def unmasked(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a block that is not fused its mask as `mask_of` has it: a hook before its forward."""
    return tuple(map(mask_of, args)), {name: mask_of(given) for name, given in kwargs.items()}


def in_fp32(*modules: nn.Module) -> bool:
    """Return whether all parameters of some layers are fp32, those of layers in them apart.

    Every call of a block asks: `parameters()`, which looks into modules, takes 5 times as long.
    """
    own = (p for module in modules for p in module._parameters.values())
    return all(p is None or p.dtype == torch.float32 for p in own)


def why_not_linear(layers: Sequence[Any], kind: type[nn.Module]) -> str | None:
    """Return why a block of some linear layers cannot run fused; None if it can."""
    if not all(type(layer) is kind for layer in layers):
        return "not all of its linear layers are in INT8"
    if any(layer.fallback is not None for layer in layers):
        return "its layers have fallback"
    if len({layer.block for layer in layers}) > 1:
        return "its linear layers have blocks of different sides"
    return None


def why_not_theirs(home: str, *modules: nn.Module) -> str | None:
    """Return which module's forward is not from a module of its library; None if all are.

    A fused block computes what the library's classes do: the forward of a subclass, or one that
    was put in a class's place, would be passed by.

    Args:
        home: the name of the library's module.
    """
    for module in modules:
        if type(module).forward.__module__ != home:
            return f"the forward of a {type(module).__name__} in it is not its library's"
    return None


def why_not_within(block: nn.Module, attention: nn.Module) -> str | None:
    """Return what a fused block would pass by of the modules in it, as it calls none; None if none.

    Every call of a block asks, which takes 4 µs: `modules()`, with names and a set, takes 6 alone.
    """
    waiting = [*block._modules.values()]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        hooks = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        if hooks or (module._forward_hooks and not (module is attention and _shown_all(module))):
            return f"a {type(module).__name__} in it has hooks"
        if "forward" in module.__dict__:
            return f"the forward of a {type(module).__name__} in it was replaced"
        waiting += module._modules.values()
    return None


def _shown_all(attention: nn.Module) -> bool:
    """Return whether `called` serves all forward hooks of attention: those of `transformers` alone.

    Others may read its output, or change it, where the projection is not yet made.
    """
    homes = (getattr(hook, "__module__", None) for hook in attention._forward_hooks.values())
    return all(str(home).startswith("transformers.") for home in homes)


def called(module: nn.Module, hidden: torch.Tensor, output: Any) -> None:
    """Show `transformers`' forward hooks of attention what was computed in its place.

    By such hooks it collects the attention weights that a call asks for. They return nothing.
    """
    for number, hook in module._forward_hooks.items():
        keywords: tuple[Any, ...] = ({},) if number in module._forward_hooks_with_kwargs else ()
        hook(module, (hidden,), *keywords, output)
