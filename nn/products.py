"""What the INT8 layers share: codes of a weight, of a gradient, and the backward's products."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch

from jetfire.core.calls import LIBRARY
from jetfire.core.errors import UsageError
from jetfire.core.fused import composed
from jetfire.core.problem import Block, FloatName, Layout, Rounding
from jetfire.core.tensors import Quantized, blocks_of, ceil_div
from jetfire.nn.gathered import GatheredWeight
from jetfire.nn.made import MadeOfWeight, Stamp
from jetfire.nn.recipes import Kept
from jetfire.nn.squares import keep_squares
from jetfire.ops import (
    int4_pack,
    int4_unpack,
    int8_fallback_gemm,
    int8_gemm,
    int8_quantize,
    int8_transpose,
)

# Where a module's parameters are to be, as torch's own modules take it.
Placed = torch.device | str | int | None
_BLOCKS: tuple[Block, ...] = get_args(Block)
FLOATS: dict[torch.dtype, FloatName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


def checked_block(block: int, name: str = "block") -> Block:
    """Return the side of a block, which an argument of this name gives.

    Raises:
        UsageError: kernels have no such blocks.
    """
    with contextlib.suppress(TypeError, ValueError):  # of what is no integer, or no side
        return _BLOCKS[_BLOCKS.index(operator.index(block))]
    raise UsageError(f"{name}={block}: expected {' or '.join(map(str, _BLOCKS))}")


def draw(count: int, device: torch.device) -> torch.Tensor:
    """Draw Philox keys from torch's own generator: torch.manual_seed makes a run repeat."""
    return held(torch.randint(2**62, (count,), dtype=torch.int64, device=device))


def held(drawn: torch.Tensor) -> torch.Tensor:
    """Return what was drawn, which a compiler does not draw again."""
    if not torch.compiler.is_compiling():
        return drawn
    found: torch.Tensor = torch.ops.jetfire.held(drawn)
    return found


# Inductor does not look into an operator. Where it sees a `randint`, it draws all keys again for
# each one that is read, by a launch of its own: 8 in the backward of a block.
LIBRARY.define("held(Tensor x) -> Tensor")
LIBRARY.impl("held", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("jetfire::held", torch.clone, lib=LIBRARY)


def backward_may_follow(training: bool) -> bool:
    """Return whether a module draws what its backward will need.

    In training it draws without gradients too. Reentrant checkpointing runs forward so first, and
    again with gradients in backward, from one state of torch's generator: dropout draws from it
    too, and must find it the same both times. Evaluation without gradients draws nothing: a segment
    in evaluation that drops all the same is not for reentrant checkpointing.
    """
    return training or torch.is_grad_enabled()


def keys_for_backward(count: int, device: torch.device, training: bool) -> torch.Tensor | None:
    """Return keys of what a module's backward rounds; None in evaluation without gradients."""
    return draw(count, device) if backward_may_follow(training) else None


def quantised_gradient(
    gradient: torch.Tensor, block: Block, seed: torch.Tensor, layout: Layout = "both"
) -> Quantized:
    """Return an m×n gradient rounded stochastically: its products are unbiased."""
    return int8_quantize(
        gradient.contiguous(), block=block, layout=layout, rounding="stochastic", seed=seed
    )


def flat(*values: Quantized) -> list[torch.Tensor | None]:
    """Return codes and scale of each value, one after another, for autograd to save."""
    return [part for value in values for part in (value.q, value.scale)]


def unflat(parts: Sequence[torch.Tensor], block: Block) -> list[Quantized]:
    """Return the values that `flat` was given, less their transposes."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [Quantized(q, scale, block=block) for q, scale in pairs]


def without_transpose(value: Quantized) -> Quantized:
    """Return a matrix's codes without its transpose's, whose memory may then be another's."""
    return Quantized(value.q, value.scale, block=value.block)


def layout_kept(kept: Kept | None) -> Layout:
    """Return the layout in which to quantise a product's input.

    Of 8 bits backward keeps the transpose's codes; 4 bits are packed from the codes themselves.
    """
    return "both" if kept == 8 else "q"


def kept_input(
    x: Quantized, kept: Kept | None, seed: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return what backward keeps of a product's input for the weight's gradient: three tensors.

    Args:
        x: codes as `layout_kept` says.
        kept: in how many bits; None keeps nothing.
        seed: a key that nothing else is packed with; without one no backward follows.
    """
    if kept == 8:
        return [x.qt, x.scale_t, None]
    if kept is None or seed is None:
        return [None] * 3
    assert x.q is not None
    packed, steps = int4_pack(x.q, seed)
    return [packed, x.scale, steps]


def restored_input(
    kept: Sequence[torch.Tensor | None], weight: Quantized, seed: torch.Tensor
) -> Quantized:
    """Return the codes of the transpose of what `kept_input` was given.

    Args:
        weight: codes of Wᵀ, which has as many rows as the input columns, in the same blocks.
        seed: a key that nothing else is unpacked with; it need not be that of packing, as
            torch.compile may draw keys anew in backward.
    """
    codes, scale, steps = kept
    if codes is None or scale is None or steps is None:
        return Quantized(codes, scale, block=weight.block)
    return int4_unpack(codes, steps, scale, seed, n=weight.shape[0], block=weight.block)


def one_way(weight: Quantized) -> list[torch.Tensor | None]:
    """Return the four parts of a weight's codes, of which those of the transpose are None.

    Where there are codes of the transpose alone, they are these.
    """
    if weight.q is None:
        return list(weight[:4])
    return [weight.q, weight.scale, None, None]


# What sees the operands of every product with a layer's weight, or with its transpose: an input or
# a gradient, what its codes miss where it has fallback, and the weight.
watchers: list[Callable[[Quantized, Quantized | None, Quantized], None]] = []


def times_weight(
    x: Quantized, weight: Quantized, missed: Quantized | None = None, **options: Any
) -> Any:
    """Return `int8_gemm` of the codes of an input or a gradient and of a layer's weight.

    Args:
        weight: its codes; its transpose is made where there is that alone.
        missed: the second plane of x's codes, for `int8_fallback_gemm`.
    """
    if weight.q is None:
        if missed is None:
            return _times_transpose(x, weight.t, **options)
        weight = int8_transpose(weight.t)
    for see in watchers:
        see(x, missed, weight)
    if missed is not None:
        return int8_fallback_gemm(x, missed, weight, **options)
    return int8_gemm(x, weight, **options)


def _times_transpose(
    x: Quantized,
    weight: Quantized,
    *,
    out: str,
    bias: torch.Tensor | None = None,
    rounding: Rounding = "nearest",
    seed: torch.Tensor | None = None,
    out_block: Block | None = None,
) -> Any:
    """Return `int8_gemm` of x and of a weight's transpose, of which there are no codes."""
    block = weight.block
    options = bias, seed, block, out, rounding, out_block
    found = _transpose_and_multiply(*x[:2], *weight[:2], *options)
    return Quantized.of(found, "q", out_block or block) if out == "int8" else found[0]


def _transposed_and_multiplied(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    block: Block,
    out: str,
    rounding: Rounding,
    out_block: Block | None,
) -> list[torch.Tensor]:
    codes, wt = (
        Quantized(x, x_scale, block=block),
        int8_transpose(Quantized(w, w_scale, block=block)),
    )
    more: dict[str, Any] = {"rounding": rounding, "seed": seed, "out_block": out_block}
    found = int8_gemm(codes, wt, out=out, bias=bias, **more)
    return list(found.tensors) if out == "int8" else [found]


# One operator: a transpose by itself needs no gradient, and torch.compile's partitioner has forward
# make it and keep it until backward, a byte per weight of all layers.
_transpose_and_multiply = composed(
    "times_transpose(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor? bias,"
    " Tensor? seed, int block, str out, str rounding, int? out_block) -> Tensor[]",
    _transposed_and_multiplied,
)


def weight_gradient(
    at: Quantized, bt: Quantized, weight: torch.Tensor, adds: bool, squares: bool
) -> torch.Tensor | None:
    """Return a weight's gradient Aᵀ·B in its dtype; None where it was added to the one there.

    Args:
        at, bt: codes of Aᵀ and of Bᵀ, two matrices with as many rows.
        adds: whether it may be added in the product itself.
        squares: whether to keep sums of its squares for `gradient_norm`, of one in fp32.
    """
    grad = weight.grad if adds else None
    if grad is not None and grad.dtype == torch.float32 and grad.is_contiguous():
        int8_gemm(at, bt, out="fp32", c=grad)
        return None
    # What is compiled has no version, and no address before it runs.
    if not squares or weight.dtype != torch.float32 or torch.compiler.is_compiling():
        return int8_gemm(at, bt, out=FLOATS[weight.dtype])
    gradient, of_it = int8_gemm(at, bt, out="fp32", squares=True)
    keep_squares(weight, gradient, of_it)
    return gradient


class Handoff:
    """Codes of a gradient on their way from the node that made both to the one that takes it.

    Autograd carries the float gradient alone; whoever receives just that tensor takes the codes
    too, and quantises it himself where it is another (where the stream had a second reader, say).
    """

    def __init__(self) -> None:
        self._gradient: torch.Tensor | None = None
        self._version = 0
        self._codes: Quantized | None = None

    def put(self, gradient: torch.Tensor, codes: Quantized) -> None:
        self._gradient, self._version, self._codes = gradient, gradient._version, codes

    def take(
        self, gradient: torch.Tensor, layout: Layout, block: Block | None = None
    ) -> Quantized | None:
        """Return this gradient's codes, once; None where it is another, or a hook changed it.

        It may come as a view in another shape: the memory tells, which nobody else has meanwhile.

        None is returned, too, where codes do not suit the reader, as one of another recipe leaves
        them.

        Args:
            layout: what is read: "q", or "both" with the transpose.
            block: the side of the blocks that are read; any will do without it.
        """
        known = self._gradient
        same = known is not None and (
            (gradient.data_ptr(), gradient.numel(), gradient._version)
            == (known.data_ptr(), known.numel(), self._version)
        )
        codes = self._codes if same else None
        self._gradient = self._codes = None
        if codes is None or (block is not None and codes.block != block):
            return None
        return None if layout == "both" and codes.qt is None else codes


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor, by its name: its own module takes 0.8 s to import.

    Nor does Dynamo see a DTensor's methods: it traces names of types.
    """
    return type(tensor).__name__ == "DTensor"


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, the same object every time; any other as it is."""
    if not is_dtensor(tensor):
        return tensor
    whole: Any = tensor
    with torch.no_grad():
        part: torch.Tensor = whole.to_local()
    return part


def checked_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight.

    Raises:
        UsageError: it is divided over processes, or of a dtype that nothing quantises.
    """
    if is_dtensor(weight):
        raise UsageError(
            "weight divided over processes: expected it whole, or Int8Linear under "
            "ColwiseParallel or RowwiseParallel"
        )
    if weight.dtype not in FLOATS:
        raise UsageError(f"weight of {weight.dtype}: expected bfloat16, float16 or float32")
    return weight


class QuantisedWeight(MadeOfWeight[Quantized]):
    """A weight's INT8 codes, both ways; a gathered weight has those of its own way alone."""

    def of(self, weight: torch.Tensor, block: Block) -> Quantized:
        """Return the codes of the weight as it is now."""
        if isinstance(weight, GatheredWeight):
            return weight.codes
        checked_weight(weight)
        return self.found(weight, block, lambda: quantised_weight(weight, block))

    def put(self, weight: torch.Tensor, block: int, codes: Quantized, of: Stamp) -> None:
        """Take codes that an optimizer renews, of the weight when its `stamp` was `of`."""
        self._keep(weight, block, codes, of, captured=None)


def quantised_weight(weight: torch.Tensor, block: Block, layout: Layout = "both") -> Quantized:
    """Return a weight's codes, rounded to nearest."""
    return int8_quantize(_rows_of(weight), block=block, layout=layout)


def _rows_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight without autograd, its rows contiguous where it is another's transpose."""
    rows = weight.detach()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _quantise_stacked(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None, block: Block
) -> list[torch.Tensor]:
    """Write each matrix's codes where they belong; then transpose them all at once.

    Were each transposed as it is quantised, its columns would have to be copied beside the others'.
    """
    parts = [part for part in (first, second, third) if part is not None]
    rows, columns = [len(part) for part in parts], first.shape[1]
    q = first.new_empty((sum(rows), columns), dtype=torch.int8)
    scale = first.new_empty(blocks_of(sum(rows), columns, block), dtype=torch.float32)
    scales = scale.split([ceil_div(count, block) for count in rows])
    for part, *room in zip(parts, q.split(rows), scales, strict=True):
        int8_quantize(part, block=block, out=Quantized.of(room, "q", block))
    transpose = int8_transpose(Quantized(q, scale, block=block))
    return [q, scale, *transpose.tensors]


_stacked = composed(
    "quantize_stacked(Tensor first, Tensor second, Tensor? third, int block) -> Tensor[]",
    _quantise_stacked,
)


def quantised_stacked(weights: Sequence[torch.Tensor], block: Block) -> Quantized:
    """Return the codes, both ways, of two or three weights under each other, rounded to nearest.

    Args:
        weights: each of as many columns; all but the last of whole blocks of rows.
    """
    rows = [_rows_of(weight) for weight in weights]
    first, second, third = rows if len(rows) == 3 else (*rows, None)
    return Quantized.of(_stacked(first, second, third, block), "both", block)


class Int8Weights(ABC):
    """A module that multiplies by weights in INT8: `AdamW` renews their codes in its update."""

    @abstractmethod
    def int8_weights(self) -> Iterable[tuple[torch.Tensor, QuantisedWeight, Block]]:
        """Return each weight with its codes and the side of their blocks."""
