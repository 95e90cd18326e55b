"""Workloads: named sets of problems, such as a model's shapes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from jetfire.core.errors import UsageError, unknown
from jetfire.core.op import Model, Op
from jetfire.core.problem import Problem

MODELS = {
    "gpt2-124m": Model(768, 3072),
    "gpt2-350m": Model(1024, 4096),
    "gpt2-774m": Model(1280, 5120),
    "gpt2-1558m": Model(1600, 6400),
    "llama-7b": Model(4096, 11008, tokens=4 * 2048, gated=True),
}


@dataclass(frozen=True)
class Layer(Model):
    """A single linear layer, from `width` features to `hidden`."""

    def linears(self) -> list[tuple[int, int]]:
        return [(self.hidden, self.width)]


# The shapes (m, n, k) at which the INT4 paper times its operators (arXiv 2306.11987).
_PAPER = (
    (4608, 5120, 6144),
    (5120, 6144, 8192),
    (6144, 6144, 9216),
    (7168, 6656, 8704),
    (8192, 7680, 9728),
    (15360, 8704, 10752),
)
LAYERS = {"int4-paper": tuple(Layer(width=k, hidden=n, tokens=m) for m, n, k in _PAPER)}
# Sizes of one element, of less than a block, and of blocks of which the last is partial.
RAGGED = (1, 31, 33, 127, 1600, 4097, 50257)
SQUARES = (1024, 2048, 4096, 8192, 16384)


def names() -> tuple[str, ...]:
    return (*MODELS, *LAYERS, "square", "ragged")


def problems(op: Op, workload: str, mode: Any, fields: dict[str, Any]) -> list[Problem]:
    """Return the problems of a workload with the given fields (block, out, rounding, …) set.

    Raises:
        UsageError: there is no such workload, or the op takes none of its problems.
    """
    if workload in MODELS:
        shapes = op.shapes(MODELS[workload])
    elif workload in LAYERS:
        shapes = [shape for layer in LAYERS[workload] for shape in op.shapes(layer)]
    elif workload == "square":
        shapes = [dict.fromkeys(op.dims, size) for size in SQUARES]
    elif workload == "ragged":
        return _ragged(op, mode, fields)
    else:
        raise unknown(f"no workload {workload!r}", workload, names())
    found = [p for shape in shapes for p in op.problems(mode, {**fields, **shape})]
    return list(dict.fromkeys(found))


def _ragged(op: Op, mode: Any, fields: dict[str, Any]) -> list[Problem]:
    """Return problems with each size in each dimension; the others are a multiple of no block.

    Sizes that the op refuses are left out, such as an odd number of nibbles.
    """
    found, refused = [], None
    for size, dim in itertools.product(RAGGED, op.dims):
        try:
            found += op.problems(mode, {**fields, **dict.fromkeys(op.dims, 100), dim: size})
        except UsageError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return list(dict.fromkeys(found))
