"""Named problem sets: the models whose shapes an op is timed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.ops.errors import UsageError

if TYPE_CHECKING:
    from jetfire.ops.op import Op, Problem


@dataclass(frozen=True)
class Model:
    """Widths of one transformer block and the tokens of a step.

    Attributes:
        width: the residual stream's width.
        hidden: the MLP's width.
        gated: the MLP has a gate (SwiGLU), so its first product is twice as wide.
        tokens: batch × sequence length.
    """

    width: int
    hidden: int
    tokens: int = 8 * 1024
    gated: bool = False

    def linears(self) -> list[tuple[int, int]]:
        """The block's linear layers as (out features, in features)."""
        first = (2 if self.gated else 1) * self.hidden
        return [
            (3 * self.width, self.width),
            (self.width, self.width),
            (first, self.width),
            (self.width, self.hidden),
        ]


MODELS = {
    "gpt2-124m": Model(768, 3072),
    "gpt2-350m": Model(1024, 4096),
    "gpt2-774m": Model(1280, 5120),
    "gpt2-1558m": Model(1600, 6400),
    "llama-7b": Model(4096, 11008, tokens=4 * 2048, gated=True),
}
# Sizes at which only the last block is partial, or every one is, or there is just one element.
RAGGED = (1, 31, 33, 127, 1600, 4097, 50257)
SQUARES = (1024, 2048, 4096, 8192, 16384)


def names() -> tuple[str, ...]:
    return (*MODELS, "square", "ragged")


def problems(op: Op, workload: str, mode: Any, fields: dict[str, Any]) -> list[Problem]:
    """The problems of a workload with the given fields (block, out, rounding, …) set.

    Raises:
        UsageError: there is no such workload.
    """
    if workload in MODELS:
        shapes = op.shapes(MODELS[workload])
    elif workload == "square":
        shapes = [dict.fromkeys(op.dims, size) for size in SQUARES]
    elif workload == "ragged":
        # Each size in each dimension, the others at a size that is a multiple of no block.
        shapes = [{**dict.fromkeys(op.dims, 100), dim: size} for size in RAGGED for dim in op.dims]
    else:
        raise UsageError(f"no workload {workload!r}: expected one of {', '.join(names())}")
    found = [p for shape in shapes for p in op.problems(mode, {**fields, **shape})]
    return list(dict.fromkeys(found))
