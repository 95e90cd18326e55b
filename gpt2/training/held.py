"""What a model's layers hold of a GPU's memory, in the form that `memory` counts with.

A model is a row of layers. Of each is known what forward keeps for its backward, and at which
moments of that backward the most is held. Families share the output head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jetfire.core.kept_rows import capacity
from jetfire.gpt2.model.shape import Shape
from jetfire.nn.recipes import GRADIENT_BLOCK, Int4, Recipe, parts_and_rows
from jetfire.nn.sizes import head_parts


@dataclass(frozen=True)
class Moment:
    """A moment of a layer's backward, in bytes.

    Attributes:
        freed: what the layer kept and is held no more.
        more: what is held beside the rest until later in the backward.
        made: the layer's gradients that are made by then.
    """

    freed: float
    more: float
    made: float


@dataclass(frozen=True)
class Part:
    """A layer, in bytes.

    Attributes:
        kept: from forward for backward.
        moments: of backward, in order; at the last, all its gradients are made.
        forward: what is held beside that at the peak of forward.
        loose: the largest gradient that is made beside the one that stands and then added to it,
            where the step is not at its first micro-batch; from the moment on that it is made.
    """

    name: str
    kept: float
    moments: tuple[Moment, ...]
    forward: float = 0.0
    loose: float = 0.0


@dataclass(frozen=True)
class Held:
    """What a model and one micro-batch hold, in bytes but for the number of parameters.

    Attributes:
        codes: the weights' codes, which stand beside them.
        parts: in forward's order; the first reads tokens, the last gives the loss.
        carried: as `loose`, the gradient that the last layer makes and the first one adds.
        evaluation: the peak of a forward without gradients, whose codes stand.
        remade: of the codes, those that the first forward after a step makes.
        rotary: cosines and sines of positions, which stand.
    """

    parameters: int
    codes: float
    parts: tuple[Part, ...]
    carried: float
    evaluation: float
    remade: float = 0.0
    rotary: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements of a micro-batch of `batch` sequences of the context."""

    shape: Shape
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.shape.context

    @property
    def x(self) -> int:
        """Return the number of elements of the stream, tokens × width."""
        return self.tokens * self.shape.width

    @property
    def w(self) -> int:
        """Return the number of elements of a square weight, width × width."""
        return self.shape.width**2

    @property
    def logits(self) -> int:
        """Tokens × rows of the table, padding included; `valid` are those without it."""
        return self.tokens * self.shape.rows

    @property
    def valid(self) -> int:
        return self.tokens * self.shape.vocabulary

    @property
    def table(self) -> int:
        """Rows × width."""
        return self.shape.rows * self.shape.width

    @property
    def masked(self) -> int:
        """1 where there is dropout, else 0."""
        return int(self.shape.dropout > 0)

    @property
    def parameters(self) -> int:
        return sum(math.prod(size) for size in self.shape.parameters().values())


def code_bytes(side: int | None) -> float:
    """Return the bytes of an INT8 code with its share of the block's FP32 scale."""
    return 1 + 4 / side**2 if side else 0.0


class KeptBytes(NamedTuple):
    """Bytes for each number of what a fused block's backward reads.

    Attributes:
        attention: kept of query, key, value and attention's output.
        unpacked: made of these again for attention's backward.
        norm: kept of a norm's output, for the gradient of the weight that it is multiplied by.
        attended: kept of attention's output so.
        restored: made of either again.
    """

    attention: float
    unpacked: float
    norm: float
    attended: float
    restored: float


def kept_bytes(recipe: Recipe) -> KeptBytes:
    """Return what a fused block of a recipe keeps."""
    code = code_bytes(recipe.block)
    if recipe.kept == 8:
        return KeptBytes(2.0, 0.0, code, code, 0.0)
    packed = code - 1 / 2 + 1 / 32  # two codes to a byte, and a step of each 32
    return KeptBytes(code_bytes(recipe.flow), 2.0, 0.0, packed, code)


class Int4Bytes(NamedTuple):
    """Bytes for each number that `Int4Linear` (nn/int4.py) holds.

    Attributes:
        code: bytes that backward keeps of a number of an input, packed.
        made: bytes of the codes that are made of a number of a gradient.
        again: of those that are made of a gradient that comes as codes.
        hat: of the floats that an input's gradient is made of.
        for_w: rows of an input that its weight's gradient has room for, per token.
        gathered: rows of a gradient that are gathered for it, per token.
        ways: in which a gradient's INT8 codes lie: 2 with those of its transpose.
    """

    code: float
    made: float
    again: float
    hat: float
    for_w: float
    gathered: float
    ways: int


def int4_bytes(tokens: int, how: Int4) -> Int4Bytes:
    """Return what layers hold of a number when they multiply so many tokens."""
    if how.gradient == "int8":
        return Int4Bytes(0.5, 2 * code_bytes(GRADIENT_BLOCK), 0.0, 0.0, 1.0, 0.0, 2)
    split, keep = parts_and_rows(how.gradient)
    for_x, for_w = (capacity(tokens, split, to, keep) / tokens for to in ("dgrad", "wgrad"))
    return Int4Bytes(0.5, split / 2, split / 2, 2 * for_x, for_w, for_w, 1)


class Head(NamedTuple):
    """The output head and its loss.

    Attributes:
        codes: bytes of its weight's codes, which stand.
        scores: bytes that it takes in an evaluation.
    """

    part: Part
    codes: float
    scores: float


def head_of(s: Sizes, recipe: Recipe, wide: int, loose: float = 0.0) -> Head:
    """Return the head of a recipe.

    Args:
        wide: bytes of a number of the stream.
        loose: as a part has it.
    """
    scores = 2.0 * s.logits
    if recipe.plain:
        return Head(_plain_head(s, loose), 0.0, scores + 8 * s.valid + 2 * s.table)
    if recipe.head is None:
        return Head(_head(s, wide, loose), 0.0, scores + 2 * s.table)
    code = code_bytes(recipe.head)
    if recipe.logits == "parts":
        part = _head_in_parts(s, code, loose)
        return Head(part, 2 * code * s.table, 2.0 * _rows_of_part(s) * s.shape.rows)
    return Head(_int8_head(s, code, loose), 2 * code * s.table, scores)


def _plain_head(s: Sizes, loose: float) -> Part:
    """Return torch's head and loss: log-probabilities and their gradients are in FP32."""
    # x and its norm, the table in BF16, log-probabilities.
    kept = (4 + 2) * s.x + 2 * s.table + 4 * s.valid
    padded = 2 * s.logits if s.logits > s.valid else 0
    moments = (
        Moment(0, (4 + 4) * s.valid, 0),
        Moment(4 * s.valid, (4 + 2) * s.valid + padded, 0),
        Moment(4 * s.valid, 2 * s.logits + 2 * s.x + 2 * s.table, 4 * s.table),
    )
    return Part("head", kept, moments, loose=loose)


def _head(s: Sizes, wide: int, loose: float) -> Part:
    """Return `linear_cross_entropy` in BF16, whose logits become their gradient."""
    kept = (wide + 2) * s.x + 2 * s.table + 2 * s.logits
    return Part("head", kept, (Moment(0, 2 * s.x, 4 * s.table),), loose=loose)


def _int8_head(s: Sizes, code: float, loose: float) -> Part:
    """Return `linear_cross_entropy` in INT8: a part's codes, both ways, lie beside the logits."""
    _, most = head_parts(s.tokens, s.shape.rows)
    codes = 2 * code * min(s.tokens, most) * s.shape.rows
    kept = (2 + code) * s.x + 2 * s.logits
    return Part("head", kept, (Moment(0, 2 * s.x + codes, 4 * s.table),), loose=loose)


def _head_in_parts(s: Sizes, code: float, loose: float) -> Part:
    """Return `mean_linear_cross_entropy`: forward makes the gradients, and backward scales them."""
    kept = (2 + 2) * s.x + 4 * s.table  # x, dx and the table's gradient
    of_part = (2 + 2 * code) * _rows_of_part(s) * s.shape.rows
    moments = (Moment(0, 2 * s.x, 4 * s.table), Moment(2 * s.x + 4 * s.table, 0, 4 * s.table))
    return Part("head", kept, moments, of_part, loose)


def _rows_of_part(s: Sizes) -> int:
    _, most = head_parts(s.tokens, s.shape.rows, whole=False)
    return min(s.tokens, most)
