"""A bound of how far the telescoped schedule may be from the exact product.

Its FMAs add (s_b − s_{b+n})·(BASE + S_b) to a running value, where n sums, the chains, take blocks
in turn and S_b is that of block b's. Each rounds by up to half a unit in the last place of what is
there, most of which is the base's share until a correction takes it off. With u = 2^-24, half of
fp32's relative spacing, a rounding errs by at most u times the exact value. Per pair of A's and B's
blocks, after block b:

* p_b = max‖A's rows‖·max‖B's rows‖ within block b bounds its integer sums (Cauchy-Schwarz), so
  |S_b| ≤ Σ p over the chain's window so far.
* The running value is at most |BASE·Σ factors since the last correction|, which is computed as it
  is, and Σ_{j≤b} s_j·p_j, for each chain its next block's scale times Σ_window p (by summation by
  parts), and the error so far. The FMA errs by u times all that.
* A product s_b of scales errs by u·s_b, or half of the smallest number there is, and on its way to
  the grid by half a unit of that; p_b multiplies both. Differences and sums of what lies on the
  grid are exact, corrections too.
* Adding a correction errs by u of a running value without the base's share.

* Where blocks of the grid share a tile (`stream`), windows begin anywhere. The base's share is then
  at most BASE times the scales of two windows' first blocks, and at least minus the scale of each
  chain's next block times BASE + S, which is less than 2·BASE. A block is a next one for n steps.
  So each step is charged 2·BASE·n times the largest scale of the last 1024 of K: some steps' shares
  are larger, the sum of all is not. Adding up the parts errs by u of each sum.

All of it can have one sign, so the errors add up. Roundings of random signs do not: of 12800
elements at K = 4096 the worst has a tenth to a quarter of its bound, whatever the data.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from jetfire.core.tensors import Tensors
from jetfire.reference.gemm import (
    BASE,
    CORRECTED,
    GRID,
    WINDOW,
    power_of_two,
    telescoped_scale,
    telescoped_shift,
)

if TYPE_CHECKING:
    import torch

HALF_UNIT = 2.0**-24
SMALLEST = 2.0**-149
# For the float64 in which this bound is evaluated.
SLOP = 1 + 2.0**-20


def _norms(codes: torch.Tensor, first: int, block: int) -> torch.Tensor:
    """Return each block's largest 2-norm of a row, over `block` columns from `first`."""
    import torch

    part = codes[:, first : first + block].float().square().sum(dim=1)
    padded = torch.nn.functional.pad(part, (0, -len(part) % block))
    return padded.view(-1, block).amax(dim=1).double().sqrt()


def cut_noise(inputs: Tensors) -> torch.Tensor:
    """Return the noise of exact sums where K is cut into parts: zeros.

    Not None, which would say that bits are those of other configs: the parts' sums are added in
    another order than the reference's.

    The parts' sums and their sum have together as many additions as one sum over all of K: the op
    bounds what these may be off by in any order.
    """
    import torch

    a, b = inputs["a_scale"], inputs["b_scale"]
    return a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float64)


def telescoped_noise(inputs: Tensors, block: int, parts: int = 0, chains: int = 1) -> torch.Tensor:
    """Return the bound for each block of the output: float64 ⌈m/block⌉×⌈n/block⌉, zero where NaN.

    Args:
        parts: how many at most share a tile, each from anywhere along K; 0 for one, from 0.
        chains: sums that take blocks of K in turn.
    """
    import torch

    a, b, a_scale, b_scale = (inputs[name] for name in ("a", "b", "a_scale", "b_scale"))
    count = a_scale.shape[1]
    shift = telescoped_shift(a_scale, b_scale)
    unit = power_of_two(-shift)
    rounding = unit * (GRID / 2) + SMALLEST / 2  # the error of a scale that is not 0

    def scale_of(i: int) -> torch.Tensor:
        return telescoped_scale(a_scale, b_scale, shift, i).double() * unit

    zero = unit.new_zeros(unit.shape)
    error, plain, base = zero, zero, zero  # plain: Σ s_j·p_j
    run, held = [zero] * chains, [zero] * chains  # held: the next scale·Σ_window p of each chain
    recent: list[torch.Tensor] = []
    for i in range(count):
        last, chain, own = i == count - 1, i % chains, i // chains * block
        if own % WINDOW == 0:
            run[chain] = zero
        if i * block % CORRECTED == 0:
            base = zero
        scale = scale_of(i)
        goes_on = i + chains < count and (own + block) % WINDOW
        after = scale_of(i + chains) if goes_on else zero
        sums = _norms(a, i * block, block)[:, None] * _norms(b, i * block, block)
        run[chain], plain = run[chain] + sums, plain + scale * sums
        held[chain] = after * run[chain]
        base = base + BASE * (scale - after)
        recent = [*recent, scale][-CORRECTED // block :]
        share = 2 * chains * BASE * functools.reduce(torch.maximum, recent) if parts else base.abs()
        exists = (a_scale[:, i, None] > 0) & (b_scale[None, :, i] > 0)
        error = error + (HALF_UNIT * scale + rounding * exists) * sums
        error = error + HALF_UNIT * (share + plain + sum(held, zero) + error)
        if parts or last or (i + 1) * block % CORRECTED == 0:
            error = error + HALF_UNIT * (plain + error)
    error = error + parts * HALF_UNIT * (plain + error)
    # The result may be below the normal numbers.
    return ((error + SMALLEST * (error > 0)) * SLOP).nan_to_num(0.0)
