"""An op's inputs at the ends of what they may be, where `Op.inputs` draws what a training has.

A step is the first or the millionth, lists of rows are empty or ask for one row alone (`Op.edges`);
seeds are negative, for every op.
"""

from __future__ import annotations

from random import Random
from typing import Any

from jetfire.core.op import Op
from jetfire.core.tensors import Tensors
from jetfire.measure.edges import throughout

# Either word of a key, and its sign.
SEEDS = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63))


def apply(op: Op, problem: Any, inputs: Tensors, seed: int) -> Tensors:
    """Put some inputs in place of others, on the same device; the same for the same seed."""
    rng = Random(seed)
    rare = {
        name: throughout(rng, SEEDS, x) for name, x in inputs.items() if name.startswith("seed")
    }
    rare |= op.edges(problem, inputs, rng)
    return inputs | {name: value.to(inputs[name]) for name, value in rare.items()}
