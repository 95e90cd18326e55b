"""Decoder layers of `transformers`' Llama, Mistral, Qwen2 and Qwen3 with INT8 between their layers.

Importing this imports no model; a model's layer is made when one of its kind is fused or loaded.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from jetfire.core.problem import Block
from jetfire.nn.flow import JoinedWeights, Setting, flowed, product_of
from jetfire.nn.fused_block import (
    as_hidden,
    called,
    in_bf16,
    in_fp32,
    mask_of,
    stream_of,
    why_not_linear,
    why_not_theirs,
    why_not_within,
)
from jetfire.nn.linear import Int8Linear

# Layer → module of `transformers.models`: attention with q_proj, k_proj, v_proj and o_proj, an MLP
# of gate_proj, up_proj and down_proj, an RMSNorm before each.
FAMILIES = {
    "LlamaDecoderLayer": "llama",
    "MistralDecoderLayer": "mistral",
    "Qwen2DecoderLayer": "qwen2",
    "Qwen3DecoderLayer": "qwen3",
}
# Activation → its module, as somebody's own may have the name.
_SILU = {"SiLU": "torch.nn.modules.activation", "SiLUActivation": "transformers.activations"}
# A layer's arguments after the hidden states, as they may be given by position.
_POSITIONAL = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "position_embeddings",
)


class DecoderBlock(nn.Module):
    """A decoder layer whose linear layers are `Int8Linear`, with INT8 between them too.

    It calls its layers as it did before where there is no BF16 autocast, where a layer was replaced
    since or has hooks, and where parameters are no longer fp32. Attention is the model's own:
    rotary embeddings, norms of query and key, windows, masks, caches and implementations are as
    before.

    Checkpointing gives the bits that there are without it, with two exceptions. Reentrant
    checkpointing rounds gradients by other draws, at the same loss. And attention of layers with
    `kept=4` keeps BF16 under checkpointing, so that gradients lack that rounding.

    Attributes:
        flow: side of the blocks of what flows between products.
    """

    flow: Block
    _home: str  # where its family's classes are
    _joined: tuple[JoinedWeights, JoinedWeights]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states, batch×length×width, bf16."""
        kwargs |= dict(zip(_POSITIONAL, args, strict=False))
        kwargs["attention_mask"] = mask_of(kwargs.get("attention_mask"))
        if not in_bf16(hidden_states.device.type) or _why_not_now(self) is not None:
            singly: torch.Tensor = super().forward(hidden_states, **kwargs)
            return singly
        own: Any = self.self_attn

        def attention(*parts: torch.Tensor) -> torch.Tensor:
            query, key, value = (part.view(*hidden_states.shape[:-1], -1) for part in parts)
            given = _Given(own, query, key, value)
            output = type(own).forward(given, hidden_states=hidden_states, **kwargs)
            called(own, hidden_states, output)
            attended: torch.Tensor = output[0]
            return attended

        groups = _groups(self)
        first, second = _norms(self)
        block, eps = groups[0][0].block, first.variance_epsilon
        setting = Setting(block, self.flow, eps, 0.0, "gated")
        (of_qkv, qkv), (of_gate_up, gate_up) = self.joined_groups()
        _, output, _, down = groups
        products = [
            product_of(qkv, of_qkv.of(qkv)),
            product_of(output, output[0].codes()),
            product_of(gate_up, of_gate_up.of(gate_up)),
            product_of(down, down[0].codes()),
        ]
        after = flowed(
            stream_of(hidden_states, self.flow),
            setting,
            [(first.weight,), (second.weight,)],
            products,
            tuple(layer.out_features for layer in qkv),
            attention,
            self.training,
        )
        return as_hidden(after, hidden_states.shape)

    def joined_groups(self) -> list[tuple[JoinedWeights, tuple[Int8Linear, ...]]]:
        """Return the layers that are multiplied by as one, with the codes of each group."""
        qkv, _, gate_up, _ = _groups(self)
        return list(zip(self._joined, (qkv, gate_up), strict=True))

    def extra_repr(self) -> str:
        return f"int8, flow={self.flow}"


class _Given:
    """An attention module whose products are made already: each projection returns its own."""

    def __init__(
        self, own: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._own = own
        self.q_proj = lambda _: query
        self.k_proj = lambda _: key
        self.v_proj = lambda _: value
        self.o_proj = lambda attended: attended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _groups(block: Any) -> tuple[tuple[Int8Linear, ...], ...]:
    """Return the linear layers, those together that read the same input."""
    own, mlp = block.self_attn, block.mlp
    qkv, gate_up = (own.q_proj, own.k_proj, own.v_proj), (mlp.gate_proj, mlp.up_proj)
    return qkv, (own.o_proj,), gate_up, (mlp.down_proj,)


def _norms(block: Any) -> tuple[Any, Any]:
    return block.input_layernorm, block.post_attention_layernorm


def _home(block: nn.Module) -> str:
    """Return the name of the module that a block's family is of."""
    return block._home if isinstance(block, DecoderBlock) else type(block).__module__


def _why_not_now(block: Any) -> str | None:
    """Return why a block cannot run fused as it is now; None if it can."""
    try:
        layers = [layer for group in _groups(block) for layer in group]
        activation = block.mlp.act_fn
    except AttributeError as error:
        return f"a layer was replaced: {error}"
    if (reason := why_not_linear(layers, Int8Linear)) is not None:
        return reason
    if (kind := type(activation).__name__) not in _SILU:
        return f"its activation is {kind}: expected SiLU"
    first, second = _norms(block)
    theirs = why_not_theirs(_home(block), block.self_attn, block.mlp, first, second)
    if (reason := theirs or why_not_theirs(_SILU[kind], activation)) is not None:
        return reason
    if first.variance_epsilon != second.variance_epsilon:
        return "its norms differ in eps"
    if not in_fp32(*layers, first, second):
        return "its parameters are not all float32"
    return why_not_within(block, block.self_attn)


def why_not(block: nn.Module, flow: Block) -> str | None:
    """Return why a block whose linear layers are converted cannot be fused; None if it can."""
    if (reason := _why_not_now(block)) is not None:
        return reason
    if "forward" in vars(block) or type(block).forward.__module__ != _home(block):
        return "its forward was replaced"
    for group in _groups(block):
        if len({layer.bias is None for layer in group}) > 1:
            return "some layers that read the same input have a bias and some have none"
        for layer, _ in pairwise(group):
            if layer.out_features % layer.block:
                return f"{layer.out_features} outputs: expected a multiple of {layer.block}"
    gate, up = _groups(block)[2]
    whole = max(gate.block, flow)
    if gate.out_features % whole or gate.out_features != up.out_features:
        return f"an MLP of {gate.out_features}: expected a multiple of {whole}"
    return None


@cache
def _fused_class(name: str) -> type[DecoderBlock]:
    """Return the class of a family's fused layers.

    It is named as the class whose place it takes: FSDP's wrapping policies go by names.
    """
    module = import_module(f"transformers.models.{FAMILIES[name]}.modeling_{FAMILIES[name]}")
    bases = DecoderBlock, getattr(module, name)
    own = {"__module__": __name__, "__doc__": DecoderBlock.__doc__, "_home": module.__name__}
    return type(name, bases, own)


def __getattr__(name: str) -> Any:
    """Return a family's fused class: what is pickled names it."""
    if name in FAMILIES:
        return _fused_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fuse(block: Any, flow: Block) -> None:
    """Make a decoder layer one of this kind, in place: whoever holds it holds it still."""
    block.__class__ = _fused_class(type(block).__name__)
    block.flow = flow
    block._joined = JoinedWeights(), JoinedWeights()
