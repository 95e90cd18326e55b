"""Leverage-score sampling on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.kept_rows import named
from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.bit_split import HIGH
from jetfire.reference.philox import STREAM_SAMPLING, random_u16
from jetfire.reference.sample_rows import LEAST, ONE, SEGMENT, offset


def chances(w: torch.Tensor, budget: int, least: int) -> torch.Tensor:
    """Return probabilities in units of 2^-32 (int64) of rows with these weights (int64).

    Rows of probability 1 are those of at least some weight: more of them lower the level that the
    next must reach, so that it alone tells them apart.
    """
    some = w > 0
    if int(some.sum()) <= budget:
        return some * ONE
    level, more = int(w.max()) + 1, True
    while more:
        below = w < level
        left, total = budget - int((~below).sum()), int(w[below].sum())
        lower = -(-total // left)
        more = bool(((w >= lower) & below).any())
        level = min(level, lower)
    ratio = float(left) * 2.0**32 / float(total)
    found = (w.double() * ratio).floor().long().clamp(least, ONE)
    return torch.where(w < level, found * some, ONE)


class TorchSampleRows(TorchKernel):
    op = "sample_rows"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        seeds = inputs["seed"].split(1)
        draws = zip(problem.products, seeds, strict=True)
        return named(*(self._drawn(problem, product, inputs, seed) for product, seed in draws))

    def _drawn(self, problem: Any, product: str, inputs: Tensors, seed: torch.Tensor) -> Tensors:
        """Return the outputs of one product's draw."""
        m, parts, squares = problem.m, problem.parts, inputs["squares"].long()
        factor = torch.ones_like(squares)
        if parts == 2:
            factor[:m] = HIGH
        scores = factor.square() * squares
        if product == "wgrad":
            scores = scores * inputs["x_squares"].long().repeat(parts)
        roots = scores.double().sqrt()
        unit = 2.0**30 / roots.max() if bool(roots.any()) else 0.0
        budget = m if problem.keep == "half" else parts * m
        chance = chances((roots * unit).ceil().long(), budget, LEAST[product])
        ends = torch.cat([chance.new_zeros(1), chance.cumsum(0)]) + offset(seed)
        counted = ends >> 32  # kept rows before each row
        kept = (counted[1:] > counted[:-1]).nonzero().flatten()
        high = int(counted[m]) if parts == 2 else 0
        start = -(-high // SEGMENT) * SEGMENT
        number = torch.arange(len(kept), device=kept.device)
        place = number + (number >= high) * (start - high)
        end = start + -(-(len(kept) - high) // SEGMENT) * SEGMENT
        room = problem.room(product)

        def placed(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
            return values.new_full((room,), padding).index_copy_(0, place, values)

        results = {"rows": placed(kept, -1), "counts": kept.new_tensor([start, end])}
        chance = chance[kept].double()
        if product == "wgrad":
            bits = random_u16(seed, 1, parts * m, STREAM_SAMPLING, row0=1).flatten()[kept]
            return {**results, "repeat": placed((2.0**32 / chance + bits.double() / 65536).floor())}
        slots = kept.new_full((2 * m,), -1).index_copy_(0, kept, place)
        weight = placed(factor[kept].double() * 2.0**32 / chance)
        return {**results, "weight": weight, "slots": slots.view(2, m).t()}


KERNELS = (TorchSampleRows(),)
