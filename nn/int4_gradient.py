"""An output's gradient as a layer of 4-bit codes multiplies it: in parts, or whole.

In parts it is "Training Transformers with 4-bit Integers" (arXiv 2306.11987), section 4: bit
splitting, and leverage-score sampling of rows. Whole it is INT8 codes, as Hopper multiplies two
4-bit parts in twice the time of the byte that they add up to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import MOST_K, SampledRows, capacity
from jetfire.core.problem import MOST_IN_CODES, Block, FloatName, Group
from jetfire.core.tensors import Quantized, Quantized4, blocks_of
from jetfire.nn.products import FLOATS, quantised_gradient
from jetfire.nn.recipes import GRADIENT_BLOCK, Gradient, parts_and_rows
from jetfire.ops import (
    int4_bit_split,
    int4_bit_split_codes,
    int4_bit_split_codes_sums,
    int4_gather_rows,
    int4_quantize_backward,
    int4_sample_rows,
    int4_sample_rows_both,
    int8_column_sum,
    int8_gemm,
)
from jetfire.ops.int4_gemm import int4_gemm

Tensor = torch.Tensor
# Keys of a product's backward: for the gradient's parts, and for the rows of each of its products.
KEYS = 3


def _most_tokens(gradient: str) -> int:
    parts, keep = parts_and_rows(gradient)
    room = MOST_K["wgrad"]
    return bisect_right(range(room + 1), room, key=lambda m: capacity(m, parts, "wgrad", keep)) - 1


# Tokens whose weight gradient's integer sums fit in 32 bits. In INT8 only a block's are integers.
MOST_TOKENS = {gradient: _most_tokens(gradient) for gradient in ("sampled", "split", "nearest")}


def checked_tokens(tokens: int, gradient: Gradient) -> None:
    """See that a backward, if one may follow, can take so many tokens at once.

    Raises:
        UsageError: it cannot.
    """
    most = MOST_TOKENS.get(gradient)
    if torch.is_grad_enabled() and most is not None and tokens > most:
        raise UsageError(
            f"{tokens} tokens at once: expected at most {most}, whose sums fit in 32 bits"
        )


def float_of(x: Tensor | Quantized) -> FloatName:
    """Return the dtype that is made of a product's operand."""
    return "bf16" if isinstance(x, Quantized) else FLOATS[x.dtype]


class Rounded(NamedTuple):
    """How a product's backward rounds what it returns to INT8 codes: stochastically.

    Attributes:
        block: the side of their blocks.
        seed: a key that nothing else is rounded with.
    """

    block: Block
    seed: Tensor


class Split(NamedTuple):
    """An output's gradient in 4-bit parts: unit·(14·hi + lo), or unit·lo alone.

    Attributes:
        out: the dtype of the floats that are made of it.
        codes: hi's rows above lo's; the unit is their scale.
        dgrad, wgrad: the rows that each product keeps; None for one that is not wanted.
        sums: of its columns, of all rows as they were given; None if they are not wanted.
    """

    out: FloatName
    codes: Quantized4
    dgrad: SampledRows | None
    wgrad: SampledRows | None
    sums: Tensor | None

    @classmethod
    def of(
        cls,
        gradient: Tensor | Quantized,
        how: Gradient,
        seeds: Tensor,
        wants_x: bool,
        x_squares: Tensor | None,
        wants_sums: bool,
    ) -> Split:
        """Return that of m×n, with the rows of the products that are wanted.

        Args:
            seeds: `KEYS`: for its parts, and for each product's rows.
            wants_x: whether the input's gradient is.
            x_squares: of the input's codes, where the weight's is.
            wants_sums: whether the bias's is.
        """
        parts, _ = parts_and_rows(how)
        given: dict[str, Any] = {"bits": 8 if parts == 2 else 4, "seed": seeds[0:1]}
        sums = None
        if not isinstance(gradient, Quantized):
            codes = int4_bit_split(gradient.contiguous(), **given)
            sums = gradient.sum(0, dtype=torch.float32) if wants_sums else None
        elif wants_sums:
            codes, sums = int4_bit_split_codes_sums(gradient, **given)
        else:
            codes = int4_bit_split_codes(gradient, **given)
        assert codes.squares is not None
        drawn = _drawn(codes.squares, how, seeds[1:], wants_x, x_squares)
        return cls(float_of(gradient), codes, *drawn, sums)

    def of_input(
        self, weight: Any, x: Quantized4, group: Group, rounded: Rounded | None
    ) -> Tensor | Quantized:
        """Return the input's gradient: of the kept rows, where x's codes were not clipped.

        Args:
            weight: wide codes of the weight's transpose.
            x: the input's packed codes.
        """
        assert self.dgrad is not None
        rows, counts, chances, slots, _ = self.dgrad
        wide = int4_gather_rows(self.codes, rows=rows, counts=counts, wide=True)
        dx_hat = int4_gemm(wide, weight, weight=chances, counts=counts, out=self.out)
        del wide
        back: Callable[..., Any] = partial(
            int4_quantize_backward, dx_hat, q=x, slots=slots, unit=self.codes.scale, group=group
        )
        dx: Tensor | Quantized
        if rounded is None:
            dx = back()
        elif group * rounded.block > MOST_IN_CODES:
            dx = quantised_gradient(back(), *rounded, "q")
        else:
            dx = back(out="int8", out_block=rounded.block, seed=rounded.seed)
        return dx

    def transposed_times(self, x: Quantized4, out: FloatName) -> Tensor:
        """Return Gᵀ·X of the input's packed codes."""
        assert self.wgrad is not None
        rows, counts, _, _, repeat = self.wgrad
        gt = int4_gather_rows(self.codes, rows=rows, counts=counts, repeat=repeat, transpose=True)
        xt = int4_gather_rows(x, rows=rows, counts=counts, transpose=True)
        return int4_gemm(gt, xt, counts=counts, out=out)

    def column_sum(self) -> Tensor:
        """Return a bias's gradient."""
        assert self.sums is not None
        return self.sums


def _drawn(
    squares: Tensor, how: Gradient, seeds: Tensor, wants_x: bool, x_squares: Tensor | None
) -> tuple[SampledRows | None, SampledRows | None]:
    """Return the rows that the products keep, of both by one call where both are wanted."""
    parts, keep = parts_and_rows(how)
    more: dict[str, Any] = {"parts": parts, "keep": keep}
    if wants_x and x_squares is not None:
        return int4_sample_rows_both(squares, x_squares=x_squares, seed=seeds, **more)
    dgrad = int4_sample_rows(squares, seed=seeds[:1], **more) if wants_x else None
    if x_squares is None:
        return dgrad, None
    return None, int4_sample_rows(squares, x_squares=x_squares, seed=seeds[1:], **more)


class Whole(NamedTuple):
    """An output's gradient in INT8.

    Attributes:
        codes: its own and those of its transpose, in blocks of `GRADIENT_BLOCK`.
        out: the dtype of the floats that are made of it.
    """

    codes: Quantized
    out: FloatName

    @classmethod
    def of(cls, gradient: Tensor | Quantized, seeds: Tensor) -> Whole:
        """Return that of m×n; floats are rounded stochastically, with the first of the keys."""
        out = float_of(gradient)
        if not isinstance(gradient, Quantized):
            gradient = quantised_gradient(gradient, GRADIENT_BLOCK, seeds[0:1])
        return cls(gradient, out)

    def of_input(
        self, weight: Any, x: Quantized4, group: Group, rounded: Rounded | None
    ) -> Tensor | Quantized:
        """Return the input's gradient, of clipped numbers too: one product, and no transform.

        Args:
            weight: INT8 codes of what the codes of the weight's transpose stand for.
        """
        if rounded is None:
            dx: Tensor = int8_gemm(self.codes, weight, out=self.out)
            return dx
        more: dict[str, Any] = {"rounding": "stochastic", "seed": rounded.seed}
        codes: Quantized = int8_gemm(
            self.codes, weight, out="int8", out_block=rounded.block, **more
        )
        return codes

    def transposed_times(self, x: Quantized4, out: FloatName) -> Tensor:
        """Return Gᵀ·X of the input's packed codes."""
        xt = int4_gather_rows(x, transpose=True)
        assert xt.wide is not None
        m, n = xt.wide.shape
        scale = xt.scale.expand(blocks_of(m, n, GRADIENT_BLOCK)).contiguous()
        codes = Quantized(xt.wide, scale, block=GRADIENT_BLOCK)
        product: Tensor = int8_gemm(self.codes.t, codes, out=out)
        return product

    def column_sum(self) -> Tensor:
        """Return a bias's gradient."""
        return int8_column_sum(self.codes)
