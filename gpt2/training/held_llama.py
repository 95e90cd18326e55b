"""What Llama's layers hold of a GPU's memory, in bytes: counted, and measured on no GPU yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetfire.gpt2.model.shape import LlamaShape, Shape
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


@dataclass(frozen=True)
class _Sizes(Sizes):
    shape: LlamaShape

    @property
    def k(self) -> int:
        """Return the number of elements of keys, or of values: tokens × their width."""
        return self.x * self.shape.kv_heads // self.shape.heads

    @property
    def h(self) -> int:
        """Return the number of elements of what the MLP has within, tokens × hidden."""
        return self.tokens * self.shape.hidden

    @property
    def wk(self) -> int:
        """Return the number of elements of key's weight, or of value's."""
        return self.w * self.shape.kv_heads // self.shape.heads

    @property
    def wh(self) -> int:
        """Return the number of elements of gate's weight, of up's or of down's."""
        return self.shape.width * self.shape.hidden

    @property
    def weights(self) -> int:
        """Return the number of elements of a block's weights."""
        return 2 * self.w + 2 * self.wk + 3 * self.wh

    @property
    def per_head(self) -> int:
        """The width of a head of attention."""
        return self.shape.width // self.shape.heads

    @property
    def angles(self) -> int:
        """Return the number of cosines: one per position and number of a head."""
        return self.shape.context * self.per_head

    @property
    def rows(self) -> int:
        """FP32 numbers that a block keeps of its rows: two RMSNorms' and attention's."""
        return self.tokens * (2 + self.shape.heads)

    @property
    def grouped(self) -> bool:
        """Whether heads of queries share keys and values."""
        return self.shape.kv_heads != self.shape.heads

    @property
    def attention(self) -> int:
        """Bytes that flash attention's backward makes: dq dk dv, and dq in FP32.

        Where heads share keys, it makes dk and dv of each head of queries, whose sums these are.
        """
        return (2 + 4 + 4 * self.grouped) * self.x + 4 * self.k


def llama(shape: Shape, recipe: Recipe, batch: int) -> Held:
    """Return what the Llama of gpt2/model/llama.py holds with `batch` sequences of its context."""
    assert isinstance(shape, LlamaShape)
    s = _Sizes(shape, batch)
    weights = float(shape.layers * s.weights)
    codes = remade = copies = 0.0  # of weights: what stands, and BF16 copies until backward
    rotary = 8.0 * shape.layers * s.angles  # cosines and sines in FP32, of each block
    if recipe.block is not None:
        code, flow = code_bytes(recipe.block), code_bytes(recipe.flow)
        block = _int8_block(s, code, flow, kept_bytes(recipe))
        # Beside those of each weight there are those of q k v as one, and of gate and up.
        remade = 2 * code * (weights - shape.layers * (s.w + s.wh))
        codes = 2 * code * weights + remade
        rotary = 4.0 * s.tokens * s.per_head  # those of half a head, of each token
    elif recipe.int4 is not None:
        block = _int4_block(s, recipe.int4)
        codes = remade = 2 * weights  # a byte each, both ways
    else:
        block = _plain_block(s)
        copies = 2 * weights
    gradient = 4.0 * s.table
    head = head_of(s, recipe, 4 if recipe.block is None else 2, 0.0 if s.shape.tied else gradient)
    return Held(
        s.parameters,
        codes + head.codes,
        (_embedding(s, recipe), *[block] * shape.layers, head.part),
        gradient if s.shape.tied else 0.0,
        max(_evaluation(s, recipe), 4 * s.x + head.scores) + copies,
        remade,
        rotary,
    )


def _embedding(s: _Sizes, recipe: Recipe) -> Part:
    """Return the embedding, which makes a gradient of its table where that is not the head's too.

    Of a table that is, torch's own makes a second one.
    """
    of_x = (4 if recipe.block is None else 6) * s.x  # dx, of a BF16 stream in FP32 too
    table = 4 * s.table
    if s.shape.tied:
        return Part("embedding", s.x * s.masked, (Moment(0, of_x + table * recipe.plain, 0),))
    return Part("embedding", s.x * s.masked, (Moment(0, of_x, table),), loose=table)


def _evaluation(s: _Sizes, recipe: Recipe) -> float:
    """Return what is held at the peak of a block in evaluation."""
    if recipe.block is not None:
        code, flow = code_bytes(recipe.block), code_bytes(recipe.flow)
        # The embeddings in FP32, x before and after attention, o, codes of what both norms read, of
        # y and of two products' inputs, both ways if so kept; gate and up. Then x and its codes, or
        # u and y's.
        both = 2 * code if recipe.kept == 8 else 0
        mlp = (4 + 2 + 2 + 2 + 4 * flow + both) * s.x + 2 * flow * s.h
        # q k v as one, o; x and its codes.
        attention = (4 + 2 + flow + 2 + 2) * s.x + 4 * s.k
        return max(mlp + max(2 * s.x, code * s.h), attention)
    # The embeddings, x before and after attention, its norm, q, o, y; k v; angles.
    held = (4 + 4 + 4 + 4 + 2 + 2 + 2) * s.x + 4 * s.k + 4 * s.angles
    wide = 2 if recipe.plain else 3  # a product's input in BF16, and its codes
    # silu, up and u; or a norm's copy, silu and up; or y and the next x.
    return held + max(6 * s.h, wide * s.x + 4 * s.h, 6 * s.x)


# A block's weights are query's and projection's, w each, key's and value's, wk each, and gate's,
# up's and down's, wh each. Beside the stream x there are q, k, v (2 k in all), attention's output
# o, the products gate and up of h each, silu of the gate, and u, what SwiGLU gives. dx and so on
# are their gradients.


def _plain_block(s: _Sizes) -> Part:
    """Return torch's block under autocast: x in FP32, matrices in BF16.

    Each product makes its own BF16 copy of a norm's output, and keeps it. A weight's copy in BF16
    is kept until its layer's backward, which makes its gradient so first.
    """
    # x and its norm thrice, q, o, x and its norm twice; k v; gate, silu, up, u; angles.
    kept = (4 + 6 + 2 + 2 + 4 + 4 + 2 * s.masked) * s.x + 4 * s.k + 8 * s.h
    kept += 4 * s.angles + 4 * s.rows + 2 * s.weights
    mlp = 8 * s.h + 6 * s.wh + 8 * s.x  # kept of the MLP, with x and both copies of its norm
    moments = (
        Moment(0, (4 + 2) * s.x + 2 * s.h + 2 * s.wh, 0),  # dx, dy, du
        Moment(2 * s.h + 2 * s.wh, 4 * s.x + 6 * s.h, 4 * s.wh),  # dx, du, dsilu, dup
        Moment(6 * s.h + 2 * s.wh, (4 + 2) * s.x + 4 * s.h + 2 * s.wh, 4 * s.wh),  # and dnorm
        # dx, dnorm, dsilu, dgate
        Moment(2 * s.x + 6 * s.h + 4 * s.wh, (4 + 4) * s.x + 4 * s.h, 8 * s.wh),
        Moment(mlp + 2 * s.w, (4 + 2) * s.x + s.attention, 12 * s.wh + 4 * s.w),  # dx, do
        # dx, the norm's output's, and what it makes of that
        Moment(kept - 4 * s.x, (4 + 4 + 4) * s.x, 4 * s.weights),
    )
    # The norm of the MLP, y of attention, q and k as they were; y, the next x.
    forward = (4 + 2 + 2 + 2 + 4) * s.x + 2 * s.k
    return Part("block", kept, moments, forward, 4 * s.wh)


def _int8_block(s: _Sizes, block: float, flow: float, keeps: KeptBytes) -> Part:
    """Return `Int8LlamaBlock` (nn/llama.py): x in BF16, weights' gradients in FP32 at once.

    `Step` has its products add to the gradients that stand.

    Args:
        block, flow: bytes of a code of what is multiplied, and of what flows between products.
    """
    # q k v as one, o; or codes of q, k, v and o. Codes of what both norms read, of gate and up; of
    # three products' inputs, transposed.
    attention = 4.0 * (s.x + s.k)
    if keeps.unpacked:
        attention = 2 * keeps.attention * (s.x + s.k)
    inputs, again = 2 * keeps.norm + keeps.attended, keeps.restored
    kept = attention + (2 * flow + inputs) * s.x + 2 * flow * s.h + 4 * s.rows
    # What is freed when the block's first half goes backward.
    enter = kept - (flow + keeps.norm) * s.x
    both = 2 * block * (s.x + 2 * s.k)  # codes of dq dk dv, both ways
    moments = (
        # dx, codes of it both ways, of dgate and dup, of one of them transposed
        Moment(0, (2 + 2 * block) * s.x + block * s.h, 4 * s.wh),
        Moment(0, 2 * s.x + (flow + 2 * block) * s.h, 4 * s.wh),
        Moment(0, (2 + again) * s.x + 3 * block * s.h, 12 * s.wh),
        # dx twice, codes of it, do
        Moment(0, (2 + 2 + 2 * block + 2 + again) * s.x, 12 * s.wh + 4 * s.w),
        Moment(
            (flow + keeps.norm + keeps.attended) * s.x + 2 * flow * s.h,
            (2 + 2) * s.x + s.attention + 2 * keeps.unpacked * (s.x + s.k),
            12 * s.wh + 4 * s.w,
        ),
        # dx, dq dk dv, and side by side where they are of several widths
        Moment(
            enter,
            (2 + 2 + 2 * s.grouped) * s.x + 4 * (1 + s.grouped) * s.k + both,
            12 * s.wh + 4 * s.w,
        ),
        Moment(enter, (2 + 2 + flow + again) * s.x + 4 * s.k + both, 4 * s.weights),
        # dx twice, codes of it, dq dk dv
        Moment(enter, (2 + 2 + 2 + 2 * block + flow) * s.x + 4 * s.k, 4 * s.weights),
    )
    # The embeddings in FP32, x before and after attention, codes of y; u and y, or x and codes.
    forward = (4 + 2 + 2 + 2 * flow + keeps.unpacked) * s.x + max(2 * s.x, block * s.h)
    return Part("block", kept, moments, forward)


def _int4_block(s: _Sizes, how: Int4) -> Part:
    """Return torch's block with `Int4Linear` (nn/int4.py): products' inputs are packed codes."""
    code, g, _, hat, for_w, gathered, _ = int4_bytes(s.tokens, how)
    # x, q, o, x; k v; gate, silu, up; codes of seven inputs, of which one is u; squares of rows.
    kept = (4 + 2 + 2 + 4 + 6 * code + 2 * s.masked) * s.x + 4 * s.k + (6 + code) * s.h
    kept += 4 * s.angles + 4 * s.rows + 28 * s.tokens
    mlp = (4 + 2 * code) * s.x + (6 + code) * s.h
    # Codes that are made for a weight's gradient: of the product down, and of those up.
    down, up = gathered * s.x + for_w * s.h, for_w * s.x + gathered * s.h
    of_query = Moment(kept - (4 + code) * s.x, (4 + 4 + 2 + g + 2) * s.x, 4 * s.weights - 4 * s.w)
    moments = (
        Moment(0, (4 + 2 + g) * s.x + (hat + 2) * s.h, 0),  # dx, dy and codes, du twice
        Moment(0, (4 + 2 + g) * s.x + 2 * s.h + down + 4 * s.wh, 0),
        Moment(0, (4 + 2 + g) * s.x + 2 * s.h + 4 * s.wh, 4 * s.wh),
        Moment(code * s.h, 4 * s.x + 6 * s.h, 4 * s.wh),  # dx, du, dsilu, dup
        # dx, dnorm, dsilu, dup and codes
        Moment((4 + code) * s.h, (4 + 2) * s.x + (4 + g) * s.h + up + 4 * s.wh, 4 * s.wh),
        Moment((4 + code) * s.h, (4 + 2) * s.x + (4 + g) * s.h + 4 * s.wh, 8 * s.wh),
        # dx, dnorm twice, dgate and codes
        Moment(
            code * s.x + (6 + code) * s.h,
            (4 + 4 + 2) * s.x + (2 + g) * s.h + up + 4 * s.wh,
            8 * s.wh,
        ),
        Moment(
            code * s.x + (6 + code) * s.h,
            (4 + 4 + 2) * s.x + (2 + g) * s.h + 4 * s.wh,
            12 * s.wh,
        ),
        Moment(mlp + code * s.x, (4 + 2) * s.x + s.attention, 12 * s.wh + 4 * s.w),  # dx, do
        # dx, dnorm twice, dq and codes
        replace(of_query, more=of_query.more + (for_w + gathered) * s.x + 4 * s.w),
        replace(of_query, more=of_query.more + 4 * s.w, made=4 * s.weights),
        # dx, dnorm twice and their sum
        Moment(kept - 4 * s.x, (4 + 4 + 4 + 4) * s.x, 4 * s.weights),
    )
    # The norm of the MLP, y of attention, q and k as they were; u, its codes and y, or the next x.
    forward = (4 + 2 + 2) * s.x + 2 * s.k + max(2 * s.x + 3 * s.h, 6 * s.x)
    return Part("block", kept, moments, forward, 4 * s.wh)
