"""`transformers`' GPT-2 block with the INT8 data flow of `Int8Block`, over its own parameters.

Importing this imports `transformers`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt2.modeling_gpt2 import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

from jetfire.core.problem import Block
from jetfire.nn.flow import Setting, flowed, product_of
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
from jetfire.nn.linear import Int8Conv1D

# The forms of its activation functions.
_FORMS: dict[type[nn.Module], Literal["tanh", "erf"]] = {
    NewGELUActivation: "tanh",
    FastGELUActivation: "tanh",
    GELUTanh: "tanh",
    GELUActivation: "erf",
}


class GPT2Block(modeling_gpt2.GPT2Block):
    """A GPT-2 block whose linear layers are `Int8Conv1D`, with INT8 between them too.

    It is named as the class whose place it takes: FSDP's wrapping policies go by names.

    It calls its layers as it did before where there is no BF16 autocast, with cross attention, and
    where a layer was replaced since or has hooks, where its two dropouts or norms differ, and where
    parameters are no longer fp32.
    Attention is the model's own: masks, caches and implementations are as before.

    Checkpointing gives the bits that there are without it, with two exceptions. Reentrant
    checkpointing rounds gradients by other draws, at the same loss. And attention of layers with
    `kept=4` keeps BF16 under checkpointing, so that gradients lack that rounding.

    Attributes:
        flow: side of the blocks of what flows between products.
    """

    flow: Block

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the hidden states, batch×length×width, bf16."""
        attention_mask = mask_of(attention_mask)
        singly = encoder_hidden_states is not None or not in_bf16(hidden_states.device.type)
        if singly or _why_not_now(self) is not None:
            encoder = encoder_hidden_states, encoder_attention_mask
            given: Any = hidden_states, past_key_values, attention_mask, *encoder, use_cache
            found: torch.Tensor = super().forward(*given, **kwargs)
            return found

        def attention(*parts: torch.Tensor) -> torch.Tensor:
            own: Any = self.attn
            shape = (*hidden_states.shape[:-1], -1, own.head_dim)
            query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, own.layer_idx)
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                own.config._attn_implementation, eager_attention_forward
            )
            given = own, query, key, value, attention_mask
            p = own.attn_dropout.p if own.training else 0.0
            output = interface(*given, dropout=p, scaling=own.scaling, **kwargs)
            called(own, hidden_states, output)
            attended: torch.Tensor = output[0]
            return attended

        mlp, own, linears = self.mlp, self.attn, _linears(self)
        dropout = _rate(own.resid_dropout)
        setting = Setting(
            linears[0].block,
            self.flow,
            self.ln_1.eps,
            dropout,
            _FORMS[type(mlp.act)],
            transposed=True,
        )
        stream = stream_of(hidden_states, self.flow)
        norms = [(norm.weight, norm.bias) for norm in (self.ln_1, self.ln_2)]
        products = [product_of([linear], linear.codes()) for linear in linears]
        widths = (own.embed_dim,) * 3
        draws = self.training or dropout > 0.0  # some drop in evaluation, too
        after = flowed(stream, setting, norms, products, widths, attention, draws)
        return as_hidden(after, hidden_states.shape)

    def extra_repr(self) -> str:
        return f"int8, flow={self.flow}"


def _linears(block: modeling_gpt2.GPT2Block) -> tuple[Any, ...]:
    own, mlp = block.attn, block.mlp
    return own.c_attn, own.c_proj, mlp.c_fc, mlp.c_proj


def _rate(dropout: nn.Module) -> float:
    return dropout.p if dropout.training else 0.0  # type: ignore[return-value]


def _why_not_now(block: Any) -> str | None:
    """Return why a block cannot run fused as it is now; None if it can."""
    try:
        own, mlp, norms = block.attn, block.mlp, (block.ln_1, block.ln_2)
        linears, kind = _linears(block), type(mlp.act)
        dropouts = own.resid_dropout, mlp.dropout
    except AttributeError as error:
        return f"a layer was replaced: {error}"
    if (reason := why_not_linear(linears, Int8Conv1D)) is not None:
        return reason
    if (reason := why_not_theirs(modeling_gpt2.__name__, own, mlp)) is not None:
        return reason
    if kind not in _FORMS:
        return f"its activation is {kind.__name__}: expected a GELU"
    if not all(type(norm) is nn.LayerNorm and norm.bias is not None for norm in norms):
        return "its norms are not both LayerNorm with a bias"
    if norms[0].eps != norms[1].eps:
        return "its norms differ in eps"
    if not all(type(dropout) is nn.Dropout for dropout in dropouts):
        return "its dropouts are not both Dropout"
    if (rate := _rate(dropouts[0])) != _rate(dropouts[1]):
        return "its dropouts differ"
    if rate == 1.0:
        return "its dropouts drop everything"
    if not in_fp32(*linears, *norms):
        return "its parameters are not all float32"
    return why_not_within(block, own)


def why_not(block: nn.Module, flow: Block) -> str | None:
    """Return why a block whose linear layers are converted cannot be fused; None if it can."""
    assert isinstance(block, modeling_gpt2.GPT2Block)
    if (reason := _why_not_now(block)) is not None:
        return reason
    if "forward" in vars(block) or type(block).forward.__module__ != modeling_gpt2.__name__:
        return "its forward was replaced"
    if hasattr(block, "crossattention"):
        return "cross attention"
    if block.attn.resid_dropout.p != block.mlp.dropout.p:  # in evaluation they do not differ
        return "its dropouts differ"
    if block.attn.config._attn_implementation == "eager" and block.attn.reorder_and_upcast_attn:
        return "reorder_and_upcast_attn"
    if not in_fp32(*block.modules()):
        return "its parameters are not all float32"
    return None


def fuse(block: nn.Module, flow: Block) -> None:
    """Make a GPT-2 block one of this kind, in place: whoever holds it holds it still."""
    block.__class__ = GPT2Block
    block.flow = flow  # type: ignore[assignment]
