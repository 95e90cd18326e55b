"""A frozen linear layer of INT8 codes alone: what adapters such as LoRA's are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import applied
from jetfire.nn.products import FLOATS, checked_block, checked_weight, quantised_weight
from jetfire.ops import int8_dequantize


class FrozenInt8Linear(nn.Linear):
    """x·Wᵀ + b of a W that is kept as INT8 codes and does not learn: one byte per parameter.

    `peft` takes it for the `torch.nn.Linear` that it is. Its float weight is gone: `weight` is made
    of the codes where it is read, and quantised anew where it is written (merging an adapter), by
    assignment to it or to its `data`.

    Args:
        weight: out×in, bf16, fp16 or fp32.
        bias: out, or None; it stays a float parameter, without a gradient unless one asks for it.
        block: 32, 64 or 128, the side of a quantisation block.

    Attributes:
        codes: int8, out×in: a parameter without gradient, so that FSDP shards it and DDP sends it
            once. `scale` is fp32, ⌈out/block⌉×⌈in/block⌉: a buffer, which neither casts.
        dtype: that of `weight` where it is read; `to` changes it.
    """

    codes: nn.Parameter
    scale: torch.Tensor

    @checked
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, block: int = 32) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = checked_weight(weight).shape
        self.block, self.dtype = checked_block(block), weight.dtype
        q, scale = self._quantised(weight)
        self.codes = nn.Parameter(q, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))
        self.requires_grad_(False)

    def _quantised(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = quantised_weight(weight, self.block, "q").tensors
        return q, scale

    def dequantised(self) -> torch.Tensor:
        """Return codes times scales, out×in of `dtype`."""
        w = Quantized(self.codes.detach(), self.scale, block=self.block)
        return int8_dequantize(w, out=FLOATS.get(self.dtype, "fp32")).to(self.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as floats, which are made when they are read."""
        return _FloatWeight(self)

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        if isinstance(value, _FloatWeight) and value.layer is self:
            return
        if value.shape != self.codes.shape:
            shape = self.out_features, self.in_features
            raise UsageError(f"weight of shape {tuple(value.shape)}: expected {shape}")
        q, scale = self._quantised(checked_weight(value))
        self.codes.data.copy_(q)
        self.scale.copy_(scale)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute: a `Parameter` as the weight too, which `nn.Module` would register."""
        if name == "weight":
            type(self).weight.fset(self, value)  # type: ignore[attr-defined]
        else:
            super().__setattr__(name, value)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features) to (…, out_features), in the autocast dtype if there is one."""
        codes = Quantized(self.codes, self.scale, block=self.block)
        return applied(input, None, self.bias, codes, self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply as any module; a change of dtype is `weight`'s, and not the scales'."""
        scale = self.scale
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scale.device)).dtype
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}"


class _FloatWeight(torch.Tensor):
    """A frozen layer's weight as floats: what reads it makes them, its `data` writes the codes."""

    layer: FrozenInt8Linear

    @staticmethod
    def __new__(cls, layer: FrozenInt8Linear) -> _FloatWeight:
        new = torch.Tensor._make_wrapper_subclass(
            cls, layer.codes.shape, dtype=layer.dtype, device=layer.codes.device
        )
        new.layer = layer
        return new

    @property
    def data(self) -> torch.Tensor:
        return self.layer.dequantised()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.layer.weight = value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = zip(func._schema.arguments, args, strict=False)
        if any(isinstance(value, cls) and argument.is_write for argument, value in written):
            raise UsageError(f"{func} on a frozen weight: expected an assignment to its data")
        args, kwargs = tree_map_only(cls, lambda w: w.layer.dequantised(), (args, kwargs or {}))
        return func(*args, **kwargs)
