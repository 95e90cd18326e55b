"""A weight that FSDP2 gathers as INT8 codes and scales: a quarter of fp32's bytes.

Each process quantises the rows that it holds, once per optimizer step, and all gather the codes:
those of the weight as it is stored. A product that reads the transpose makes it. What a parameter
must have for that is public: `fsdp_pre_all_gather`, which gives what is sent, and
`fsdp_post_all_gather`, which makes the module's weight of what came.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from jetfire.core.errors import UsageError
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized, dtype_name
from jetfire.nn.made import MadeOfWeight, weights_changed
from jetfire.ops import int8_dequantize, int8_quantize

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed.device_mesh import DeviceMesh

_ATEN = torch.ops.aten
# What makes a shard of a weight, a parameter of a tensor, and moves or copies either.
_KEPT = {
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_zeros.default,
    _ATEN.slice.Tensor,
    _ATEN.view.default,
    _ATEN._pin_memory.default,
    _ATEN._to_copy.default,
}
# What gives the same matrix again.
_SAME = {_ATEN.alias.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.view.default}


class CodedShard(torch.Tensor):
    """A float weight, or a process's rows of it, that FSDP2 gathers as codes.

    In all else it is the tensor that it is made of, and what is saved of it is a plain tensor.
    Whoever writes to it changes weights: a DTensor's operators count no version of the part that
    they write to.

    Args:
        rows: m×n, whose memory it shares.
        block: 32, 64 or 128, the side of a quantisation block.
    """

    block: Block
    _made: MadeOfWeight[tuple[torch.Tensor, ...]]
    _rows: torch.Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, rows: torch.Tensor, block: Block) -> CodedShard:
        shard: CodedShard = torch.Tensor._make_subclass(cls, rows)
        shard.block, shard._made, shard._rows = block, MadeOfWeight(), None
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs or {})
        # The schema of a collective (c10d) does not say what it writes to.
        if func.namespace == "c10d" or _writes_to(cls, func, args, kwargs or {}):
            weights_changed()
        keeps = func in _KEPT and type(found) is torch.Tensor and found.is_floating_point()
        return cls(found, args[0].block) if keeps else found

    def plain(self) -> torch.Tensor:
        """Return torch's own tensor of the same memory."""
        return self.detach().as_subclass(torch.Tensor)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return NumPy's array of the same memory, which torch gives of no subclass."""
        return self.as_subclass(torch.Tensor).numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return codes and scales of these rows, and nothing that the next hook must know.

        Codes are given as the fp32 numbers of their bits where that is what is gathered beside
        them. Of two dtypes FSDP2 would gather bytes, and view all tensors as such before and after:
        64 calls per gather of a GPT-2 block. Numbers of BF16 they never are: copies of its NaNs do
        not keep all bits. Nor are they numbers where NCCL is to look for NaNs.

        Raises:
            UsageError: processes do not hold the weight in whole rows of blocks, or one holds all.
        """
        as_fp32 = (mp_policy.param_dtype or self.dtype) == torch.float32 and not _finds_nans()

        def quantised() -> tuple[torch.Tensor, ...]:
            self._check(mesh.size(), outer_size)
            q, scale = int8_quantize(self._plain_rows(), block=self.block).tensors
            return q.view(-1).view(torch.float32) if as_fp32 else q, scale

        return self._made.found(self, as_fp32, quantised), None

    # FSDP2 asks for each hook's signature before each gather. Python takes 20 µs to make it, and 6
    # where the function has it.
    fsdp_pre_all_gather.__signature__ = signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def _plain_rows(self) -> torch.Tensor:
        """Return torch's own tensor of these rows: making one calls Python, 0.1 ms per weight."""
        if self._rows is None or self._rows.data_ptr() != self.data_ptr():  # `data` was set
            self._rows = self.plain()
        return self._rows

    def _check(self, shards: int, whole: torch.Size) -> None:
        """Look at how many shards of these rows make the whole weight."""
        rows, columns = self.shape
        if shards == 1 or whole != (shards * rows, columns) or rows % self.block:
            raise UsageError(
                f"a weight of {whole[0]}×{whole[1]}, {rows}×{columns} of it in one of {shards} "
                "processes: expected the shards that gather_codes was told of"
            )

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[torch.Tensor, ...]] | None:
        """Return the gathered weight and what of it FSDP2 frees besides the outputs: nothing.

        Args:
            outputs: codes and scales of all rows, in memory that is the same every time.
            dtype: as which the weight presents itself.
            out: the weight that was made of that memory before, and is of what it holds now.
        """
        if out is not None:
            return None
        q, scale = outputs
        codes = q.view(torch.int8).view(-1, self.shape[1])
        return GatheredWeight(Quantized(codes, scale, block=self.block), dtype), ()


class GatheredWeight(torch.Tensor):
    """An m×n weight of which there are codes alone, for as long as FSDP2 holds it.

    An INT8 layer multiplies by the codes. What else reads it finds the numbers that they stand for,
    and nothing may write to it.

    Args:
        codes: without the transpose.
        dtype: the float type of its numbers and of its gradient.
    """

    q: torch.Tensor
    scale: torch.Tensor
    block: int
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: Quantized, dtype: torch.dtype) -> GatheredWeight:
        q, scale = codes.tensors
        weight: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, q.shape, dtype=dtype, device=q.device
        )
        weight.q, weight.scale, weight.block = q, scale, codes.block
        return weight

    @property
    def codes(self) -> Quantized:
        """The codes, without their transpose."""
        return Quantized(self.q, self.scale, block=self.block)

    def floats(self) -> torch.Tensor:
        """Return codes times scales, m×n."""
        out: Any = dtype_name(self.dtype)
        return int8_dequantize(self.codes, out=out)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, block={self.block}, {self.dtype})"

    def _is_of(self, *layout: Sequence[int]) -> bool:
        """Return whether a size, or size and strides, are its own."""
        return all(tuple(a) == b for a, b in zip(layout, (self.shape, self.stride()), strict=False))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SAME and args[0]._is_of(*args[1:3]):
            weight = args[0]
            return cls(weight.codes, weight.dtype)
        if _writes_to(cls, func, args, kwargs or {}):
            raise UsageError(f"{func}: expected a weight's shard, not what is gathered of it")
        args, kwargs = tree_map_only(cls, cls.floats, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype]]:
        return ["q", "scale"], (self.block, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: tuple[int, torch.dtype], *_: Any
    ) -> GatheredWeight:
        block, dtype = context
        return cls(Quantized(**parts, block=block), dtype)


def _finds_nans() -> bool:
    """Return whether NCCL may stop at what it sends as floats and is NaN."""
    return "TORCH_NCCL_NAN_CHECK" in os.environ


def _writes_to(kind: type, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation writes to an argument of a kind."""
    if not func._schema.is_mutable:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return any(isinstance(leaf, kind) for leaf in tree_iter([given.get(name) for name in written]))
