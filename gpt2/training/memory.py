"""What a training run needs of a GPU's memory, counted from its sizes: no torch is loaded.

A model is a row of layers. Of each is known what forward keeps for its backward, and at which
moments of that backward the most is held. A family of models is a function of shape, recipe and
batch that gives these, an optimizer a number of bytes per parameter (`OPTIMIZERS`). The bytes are
what the modules hold: tests compare them with what torch's operators allocate on the CPU, and with
every peak in docs/results of a run that `needs` takes.

Not counted: the CUDA context and kernels' code, and what the allocator cannot use of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jetfire.core.errors import UsageError
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.training.settings import Settings
from jetfire.nn.recipes import Int4, Recipe
from jetfire.nn.sizes import head_parts
from jetfire.ops.sample_rows import capacity

# Bytes of state per parameter: two moments in FP32.
OPTIMIZERS = {"adamw": 8.0}
# cuBLAS's workspaces on sm_90, which torch's allocator holds: one of the thread that runs forward,
# one of backward's, and one more where a step is on a stream of its own, for its graph. So measured
# on an H200: rows of one step differ by 0.03125 GiB where one of them stood already, and a run of
# that step as a graph peaks two of them above its row, which leaves out one (docs/results).
WORKSPACE = 32 * 2**20


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
            where the step is not at its first micro-batch.
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
        evaluation: the peak of a forward without gradients.
    """

    parameters: int
    codes: float
    parts: tuple[Part, ...]
    carried: float
    evaluation: float


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs.

    Attributes:
        parts: what is held at the peak, by name.
        when: where the peak is.
        beside: what an evaluation takes, for which a CUDA graph gives nothing of its memory back.
    """

    parts: Mapping[str, float]
    when: str
    beside: float

    @property
    def peak(self) -> float:
        """What the run logs as `peak_gib`."""
        return math.fsum(self.parts.values())

    @property
    def total(self) -> float:
        """What the device must have."""
        return self.peak + self.beside


def needs(settings: Settings, vocabulary: int) -> Needs:
    """Return what a run of one process on a GPU needs.

    Raises:
        UsageError: torch.compile decides what is kept, processes share it, or it is no GPT-2.
    """
    if settings.compile:
        why = "what torch.compile keeps is known once it has compiled"
        raise UsageError(f"compile=true: {why}: expected compile=false")
    if settings.family != "gpt2":
        why = "what another family's blocks hold is not counted yet"
        raise UsageError(f"family={settings.family}: {why}: expected gpt2")
    if settings.parallel != "none":
        why = "a plan is of one process"
        raise UsageError(f"parallel={settings.parallel}: {why}: expected parallel=none")
    shape, graphed = settings.shape(vocabulary), settings.graph != "false"
    held = gpt2(shape, settings.precision(), settings.batch)
    ids = 16.0 * settings.batch * settings.context * settings.accumulate * (1 + graphed)
    standing = {
        "weights": 4.0 * held.parameters,
        "moments": OPTIMIZERS["adamw"] * held.parameters,
        "codes": held.codes,
        "token ids, cuBLAS": ids + (2 + graphed) * WORKSPACE,
    }
    beside = held.evaluation if graphed else 0.0
    found = _moments(held, again=settings.accumulate > 1)
    return max(
        (Needs({**standing, **parts}, when, beside) for when, parts in found),
        key=lambda one: one.peak,
    )


def _moments(held: Held, again: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the moments of a step: where they are, and what is held beside what stands.

    Args:
        again: the step is not at its first micro-batch, so that all gradients stand.
    """
    whole, kept, made = 4.0 * held.parameters, 0.0, 0.0
    for part in held.parts:
        kept += part.kept
        parts = {"gradients": whole if again else 0.0, "activations": kept}
        yield f"forward of the {part.name}", {**parts, "workspaces": part.forward}
    for part in reversed(held.parts):
        head = part is held.parts[-1]
        kept -= part.kept
        for moment in part.moments:
            still = part.kept - moment.freed
            carried = held.carried if made or moment.made else 0.0
            yield (
                f"backward of the {part.name}",
                {
                    "gradients": whole if again else made + moment.made,
                    "activations": kept if head else kept + still,
                    "logits, head": still if head else 0.0,
                    "workspaces": moment.more + (part.loose + carried if again else 0.0),
                },
            )
        made += part.moments[-1].made
    yield "the update", {"gradients": whole}


@dataclass(frozen=True)
class _Sizes:
    """Numbers of elements of a GPT-2's micro-batch.

    Attributes:
        x: of the stream, tokens × width; w: of a weight, width × width.
        logits: tokens × rows of the table, padding included; valid: without it.
        table: rows × width.
        rows: FP32 numbers that a block keeps of its rows: two LayerNorms' statistics, attention's.
        masked: 1 where there is dropout, else 0.
    """

    x: int
    w: int
    logits: int
    valid: int
    table: int
    rows: int
    masked: int


def gpt2(shape: Shape, recipe: Recipe, batch: int) -> Held:
    """Return what the GPT-2 of gpt2/model/gpt2.py holds with `batch` sequences of its context."""
    tokens, width = batch * shape.context, shape.width
    s = _Sizes(
        tokens * width,
        width**2,
        tokens * shape.rows,
        tokens * shape.vocabulary,
        shape.rows * width,
        tokens * (4 + shape.heads),
        int(shape.dropout > 0),
    )
    weights = 12 * shape.layers * s.w
    codes = copies = 0.0  # of weights: what stands, and BF16 copies until backward
    wide, alone = 4, 38  # bytes per element of the stream, and at a block's peak in evaluation
    if recipe.block is not None:
        wide, alone = 2, 30
        codes = 2 * _code(recipe.block) * weights
        block = _int8_block(s, _code(recipe.block), _code(recipe.flow))
    elif recipe.int4 is not None:
        codes = 2.0 * weights  # a byte each, both ways
        block = _int4_block(s, recipe.int4, tokens)
    else:
        copies = 2.0 * weights
        block = _plain_block(s)
    scores = 2.0 * s.logits  # of an evaluation
    if recipe.plain:
        head = _plain_head(s)
        scores += 8 * s.valid + 2 * s.table
    elif recipe.head is None:
        head = _head(s, wide)
        scores += 2 * s.table
    else:
        head = _int8_head(s, _code(recipe.head), shape)
        codes += 2 * _code(recipe.head) * s.table
    positions = 4.0 * shape.context * width
    # dx, and again in FP32; torch's own embedding makes a second gradient of the table.
    of_ids = (wide + 4) * s.x + positions + 4 * s.table * recipe.plain
    ids = Part("embedding", s.x * s.masked, (Moment(0, of_ids, positions),))
    return Held(
        sum(math.prod(size) for size in shape.parameters().values()),
        codes,
        (ids, *[block] * shape.layers, head),
        4.0 * s.table,
        max(alone * s.x, 4 * s.x + scores) + copies,
    )


def _code(side: int | None) -> float:
    """Return the bytes of an INT8 code with its share of the block's FP32 scale."""
    return 1 + 4 / side**2 if side else 0.0


# A block's weights are 12 w: query's, key's and value's 3, attention's output's 1, the MLP's 4 and
# 4. Their FP32 gradients are 4 bytes each, 48 w. Beside the stream x there are q, k, v, attention's
# output o, the MLP's f (4 x) and u (4 x), its activation; dx and so on are their gradients. Flash
# attention's backward sums dq in FP32.


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
        Moment(22 * s.x + 18 * s.w, (4 + 2 + 6 + 4) * s.x, 36 * s.w),  # dx, do, dq dk dv, FP32
        Moment(30 * s.x + 18 * s.w, (4 + 6 + 2) * s.x + 6 * s.w, 36 * s.w),  # and dnorm
        Moment(32 * s.x + 24 * s.w, (4 + 4 + 4) * s.x, 48 * s.w),
    )
    return Part("block", kept, moments, (2 + 4) * s.x, 16 * s.w)  # y, the next x


def _int8_block(s: _Sizes, block: float, flow: float) -> Part:
    """Return `Int8Block` (nn/flow.py): x in BF16, weights' gradients in FP32 at once.

    `Step` has its products add to the gradients that stand.

    Args:
        block, flow: bytes of a code of what is multiplied, and of what flows between products.
    """
    # q k v, o; codes of what both norms read and of f; of three products' inputs, transposed.
    kept = (6 + 2 + (1 + 1 + 4) * flow + 3 * block) * s.x + 4 * s.rows
    moments = (
        Moment(0, (2 + 4 * flow + 4 * block) * s.x, 32 * s.w),  # dx, df and its transpose
        Moment(0, (2 + 2 + 2 + 2 * block) * s.x, 36 * s.w),  # dx twice, do, codes of dx
        Moment((5 * flow + 2 * block) * s.x, (2 + 2 + 6 + 4) * s.x, 36 * s.w),  # …, dq dk dv, FP32
        Moment((8 + 5 * flow + 2 * block) * s.x, (2 + 6 + 6 * block + flow) * s.x, 48 * s.w),
    )
    # u, y, x before and after attention, codes; and the embeddings in FP32.
    return Part("block", kept, moments, (4 + 1 + 2 + 2 + 1 + 4) * s.x)


def _int4_block(s: _Sizes, how: Int4, tokens: int) -> Part:
    """Return torch's block with `Int4Linear` (nn/int4.py): products' inputs are packed codes."""
    split = 1 if how.gradient == "nearest" else 2
    keep = "half" if how.gradient == "sampled" else "all"
    # Rows of a split gradient that a product has room for, per token.
    for_x, for_w = (capacity(tokens, split, to, keep) / tokens for to in ("dgrad", "wgrad"))
    code, g = 0.5 + 2 / 64, split / 2  # with one row in 64 as it is, in BF16; a gradient's codes
    # x, q k v, o, x, f; codes of four inputs, of which u's are 4 x; squares of rows.
    kept = (4 + 6 + 2 + 4 + 8 + 7 * code + 2 * s.masked) * s.x + 4 * s.rows + 16 * tokens
    after_mlp, after_attention = 12 + 6 * code, 20 + 6 * code
    moments = (
        Moment(0, (4 + 2 + g + 8 * for_x + 8) * s.x, 0),  # dx, dy and codes, du twice
        Moment(0, (4 + 2 + g + 8 + 5 * for_w) * s.x + 16 * s.w, 0),
        Moment(0, (4 + 2 + g + 8) * s.x + 16 * s.w, 16 * s.w),
        Moment(4 * code * s.x, (4 + 8 + 8) * s.x, 16 * s.w),  # dx, du, df
        Moment((8 + 4 * code) * s.x, (4 + 8 + 4 * g + 2 + 5 * for_w) * s.x + 16 * s.w, 16 * s.w),
        Moment((8 + 4 * code) * s.x, (4 + 8 + 4 * g + 2) * s.x + 16 * s.w, 32 * s.w),
        Moment(after_mlp * s.x, (4 + 2 + 6 + 4) * s.x, 36 * s.w),  # dx, do, dq dk dv, FP32
        Moment(after_attention * s.x, (4 + 6 + 3 * g + 2 + 4 * for_w) * s.x + 12 * s.w, 36 * s.w),
        Moment(after_attention * s.x, (4 + 6 + 3 * g + 2) * s.x + 12 * s.w, 48 * s.w),
    )
    return Part("block", kept, moments, (8 + 4 + 2) * s.x, 16 * s.w)  # u and its codes, y


def _plain_head(s: _Sizes) -> Part:
    """Return torch's head and loss: log-probabilities and their gradients are in FP32."""
    # x and its norm, the table in BF16, log-probabilities.
    kept = (4 + 2) * s.x + 2 * s.table + 4 * s.valid
    padded = 2 * s.logits if s.logits > s.valid else 0
    moments = (
        Moment(0, (4 + 4) * s.valid, 0),
        Moment(4 * s.valid, (4 + 2) * s.valid + padded, 0),
        Moment(4 * s.valid, 2 * s.logits + 2 * s.x + 2 * s.table, 4 * s.table),
    )
    return Part("head", kept, moments)


def _head(s: _Sizes, wide: int) -> Part:
    """Return `linear_cross_entropy` in BF16, whose logits become their gradient."""
    kept = (wide + 2) * s.x + 2 * s.table + 2 * s.logits
    return Part("head", kept, (Moment(0, 2 * s.x, 4 * s.table),))


def _int8_head(s: _Sizes, code: float, shape: Shape) -> Part:
    """Return `linear_cross_entropy` in INT8: a part's codes, both ways, lie beside the logits."""
    tokens = s.x // shape.width
    _, most = head_parts(tokens, shape.rows)
    codes = 2 * code * min(tokens, most) * shape.rows
    return Part("head", (2 + code) * s.x + 2 * s.logits, (Moment(0, 2 * s.x + codes, 4 * s.table),))
