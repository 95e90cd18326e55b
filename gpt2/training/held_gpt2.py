"""What GPT-2's layers hold of a GPU's memory, in bytes."""

from __future__ import annotations

from jetfire.core.problem import MOST_IN_CODES, Block
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.training.held import (
    Held,
    KeptBytes,
    Moment,
    Part,
    Sizes,
    code_bytes,
    head_of,
    int4_bytes,
    kept_bytes,
)
from jetfire.nn.recipes import Int4, Recipe


class _Sizes(Sizes):
    @property
    def rows(self) -> int:
        """FP32 numbers that a block keeps of its rows: two LayerNorms' statistics, attention's."""
        return self.tokens * (4 + self.shape.heads)

    @property
    def attention(self) -> int:
        """Bytes that flash attention's backward makes: dq dk dv, and dq in FP32."""
        return (6 + 4) * self.x


def gpt2(shape: Shape, recipe: Recipe, batch: int) -> Held:
    """Return what the GPT-2 of gpt2/model/gpt2.py holds with `batch` sequences of its context."""
    s = _Sizes(shape, batch)
    weights = 12 * shape.layers * s.w
    codes = remade = copies = 0.0  # of weights: what stands, and BF16 copies until backward
    wide, alone = 4, 38  # bytes per element of the stream, and at a block's peak in evaluation
    if recipe.block is not None:
        wide, alone = 2, 24 if recipe.kept == 8 else 22
        codes = 2 * code_bytes(recipe.block) * weights
        sides = code_bytes(recipe.block), code_bytes(recipe.flow)
        block = _int8_block(s, *sides, kept_bytes(recipe))
    elif recipe.int4 is not None:
        wide, alone = 2, 24
        codes = remade = 2.0 * weights  # a byte each, both ways
        block = _int4_block(s, recipe.flow, recipe.int4)
    else:
        copies = 2.0 * weights
        block = _plain_block(s)
    head = head_of(s, recipe, wide)
    positions = 4.0 * shape.context * shape.width
    # dx, and again in FP32; torch's own embedding makes a second gradient of the table.
    of_ids = (wide + 4) * s.x + positions + 4 * s.table * recipe.plain
    ids = Part("embedding", s.x * s.masked, (Moment(0, of_ids, positions),))
    return Held(
        s.parameters,
        codes + head.codes,
        (ids, *[block] * shape.layers, head.part),
        4.0 * s.table,
        max(alone * s.x, 4 * s.x + head.scores) + copies,
        remade,
    )


# A block's weights are 12 w: query's, key's and value's 3, attention's output's 1, the MLP's 4 and
# 4. Their FP32 gradients are 4 bytes each, 48 w. Beside the stream x there are q, k, v, attention's
# output o, the MLP's f (4 x) and u (4 x), its activation; dx and so on are their gradients.


def _plain_block(s: _Sizes) -> Part:
    """Return torch's block under autocast: x in FP32, matrices in BF16.

    A weight's copy in BF16 is kept until its layer's backward, which makes its gradient so first.
    """
    # x and its norm, q k v, o, x and its norm, f, u.
    kept = (4 + 2 + 6 + 2 + 4 + 2 + 8 + 8 + 2 * s.masked) * s.x + 4 * s.rows + 24 * s.w
    moments = (
        Moment(0, (4 + 2 + 8) * s.x + 8 * s.w, 0),  # dx, dy, du
        Moment(8 * s.x + 8 * s.w, (4 + 8 + 8) * s.x, 16 * s.w),  # dx, du, df
        Moment(16 * s.x + 8 * s.w, (4 + 8 + 2) * s.x + 8 * s.w, 16 * s.w),  # dx, df, dnorm
        Moment(18 * s.x + 16 * s.w, (4 + 2) * s.x + 8 * s.w, 32 * s.w),
        Moment(22 * s.x + 18 * s.w, (4 + 2) * s.x + s.attention, 36 * s.w),  # dx, do
        Moment(30 * s.x + 18 * s.w, (4 + 6 + 2) * s.x + 6 * s.w, 36 * s.w),  # and dnorm
        Moment(32 * s.x + 24 * s.w, (4 + 4 + 4) * s.x, 48 * s.w),
    )
    return Part("block", kept, moments, (2 + 4) * s.x, 16 * s.w)  # y, the next x


def _int8_block(s: _Sizes, block: float, flow: float, keeps: KeptBytes) -> Part:
    """Return `Int8Block` (nn/flow.py): x in BF16, weights' gradients in FP32 at once.

    `Step` has its products add to the gradients that stand.

    Args:
        block, flow: bytes of a code of what is multiplied, and of what flows between products.
    """
    # q k v, o; codes of what both norms read and of f; of three products' inputs, transposed.
    attention, inputs = 4 * keeps.attention, 2 * keeps.norm + keeps.attended
    kept = (attention + (1 + 1 + 4) * flow + inputs) * s.x + 4 * s.rows
    leave, again = (5 * flow + keeps.norm + keeps.attended) * s.x, keeps.restored
    moments = (
        Moment(0, (2 + 4 * flow + 4 * block + again) * s.x, 32 * s.w),  # dx, df and its transpose
        Moment(0, (2 + 2 + 2 + 2 * block + again) * s.x, 36 * s.w),  # dx twice, do, codes of dx
        Moment(leave, (2 + 2 + 4 * keeps.unpacked) * s.x + s.attention, 36 * s.w),  # dx, do
        Moment(attention * s.x + leave, (2 + 6 + 6 * block + flow + again) * s.x, 48 * s.w),
    )
    # u, y, x before and after attention, codes; and the embeddings in FP32. And o where it is kept
    # as codes alone.
    return Part("block", kept, moments, (4 + 1 + 2 + 2 + 1 + 4 + keeps.unpacked) * s.x)


def _int4_block(s: _Sizes, side: Block | None, how: Int4) -> Part:
    """Return `Int4Block` (nn/int4_block.py): products' inputs are packed codes.

    Args:
        side: of the blocks of what flows between products.
    """
    flow = code_bytes(side)
    code, g, again, hat, for_w, gathered, ways = int4_bytes(s.tokens, how)
    # Codes of q k v and o, of what both norms read and of f; of three products' inputs; squares of
    # rows.
    kept = ((3 + 1 + 1 + 1 + 4) * flow + 3 * code) * s.x + 4 * s.rows + 12 * s.tokens
    after_mlp, after_attention = 5 * flow + 2 * code, 9 * flow + 2 * code
    dy = 2 + ways * s.masked  # that of the stream, and its own where something was dropped
    # As codes, made of floats; and in BF16 where a group is too large to be written as codes.
    large = how.group == "search" or how.group * (side or 1) > MOST_IN_CODES
    du = 4 * (hat + flow + 2 * (hat > 0 and large))
    moments = (
        Moment(0, (dy + 4 * code + g + du) * s.x, 0),  # codes of u and dy
        Moment(0, (dy + 4 * code + g + 4 * flow + 4 * for_w + gathered) * s.x + 16 * s.w, 0),
        Moment(0, (dy + 4 * code + g + 4 * flow) * s.x + 16 * s.w, 16 * s.w),
        # df, its transpose where that is read, and codes of it in 4 bits
        Moment(
            0,
            (dy + 4 * ways * flow + 4 * again + flow + for_w + 4 * gathered) * s.x + 16 * s.w,
            16 * s.w,
        ),
        Moment(0, (dy + 4 * ways * flow + 4 * again + flow) * s.x + 16 * s.w, 32 * s.w),
        Moment(after_mlp * s.x, (2 + 2 + 8) * s.x + s.attention, 36 * s.w),  # dx, do, q k v o
        # dx, dq dk dv and codes of them
        Moment(
            after_attention * s.x,
            (2 + 6 + (3 * ways + 1) * flow + 3 * again + for_w + 3 * gathered) * s.x + 12 * s.w,
            36 * s.w,
        ),
        Moment(
            after_attention * s.x,
            (2 + 6 + (3 * ways + 1) * flow + 3 * again) * s.x + 12 * s.w,
            48 * s.w,
        ),
    )
    # u and its codes, y, x before and after attention; and the embeddings in FP32.
    return Part("block", kept, moments, (4 + 4 + 2 + 2 + 2 + 4) * s.x, 16 * s.w)
