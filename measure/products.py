"""Products by blocks, C = A·Bᵀ: their reference, and what sums in fp32 may be off by."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from jetfire.core.op import Check
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.measure.bounds import OVER, ROUNDING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PARTS = ("a", "a_scale", "b", "b_scale")
SMALLEST = 2.0**-149
# Beyond it a result of the telescoped schedule may overflow on its way: a product of two scales,
# which it has times 2^22.
OVER_TELESCOPED = 2.0**104
FEW = 4096  # elements, of which a norm says little


def reference(inputs: Tensors, block: int) -> Tensors:
    """Return ``c`` in float64, with what is added to the product, and what `check_floats` needs."""
    from jetfire.reference.gemm import gemm_float64

    a, a_scale, b, b_scale = (inputs[name] for name in PARTS)
    c = gemm_float64(a, a_scale, b, b_scale, block)
    for name in ("bias", "c"):
        if name in inputs:
            c += inputs[name].double()
    return {"c": c, **_bounds(inputs, block)}


def _bounds(inputs: Tensors, block: int) -> Tensors:
    """Return by block of C what sums in fp32 may be off by, and where they may overflow.

    ``total``: Σ|term| at the most. ``evaluation``: n additions in any order err by at most
    n·u·Σ|term|, and by 8·√n·u·Σ|term| but with a chance of 3e-14·n (Higham and Mary, "A new
    approach to probabilistic rounding error analysis", 2019, theorem 2.4, λ = 8). ``systematic``:
    what does not average out. A term like the one before it is rounded like it, so each may count
    whole: of constant operands 1400 blocks of K were off by 300 roundings. Then what products of
    scales, terms and sums below 2^-126 are off by, and what the reference is, in float64.
    """
    from jetfire.reference.gemm import magnitudes
    from jetfire.reference.quantize import block_amax

    a, a_scale, b, b_scale = (inputs[name] for name in PARTS)
    k = a.shape[1]
    total, integers, largest = magnitudes(a, a_scale, b, b_scale, block)
    if "bias" in inputs:
        total = total + block_amax(inputs["bias"].double()[None], block)
    if "c" in inputs:
        total = total + block_amax(inputs["c"].double(), block)
    steps = ceil_div(k, block) + 8  # products, stream-K's parts, bias, C
    systematic = SMALLEST * (integers + steps) + k * 2.0**-53 * total
    chance = 8 * math.sqrt(steps)
    if chance < steps:
        systematic += _repeats(a_scale, b_scale) * ROUNDING * total
    return {
        "evaluation": min(steps, chance) * ROUNDING * total + systematic,
        "systematic": systematic,
        "total": total,
        "largest": largest,
        "over": (total >= OVER) | (largest >= OVER),
    }


def _repeats(a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Return how many blocks of K have the scales of the one before: float64, by block of C."""
    of_a, of_b = ((scale[:, 1:] == scale[:, :-1]).double() for scale in (a_scale, b_scale))
    return of_a @ of_b.t()


def overflowing(expected: Tensors, noise: Tensor | None) -> Tensor:
    """Return where C may overflow, by block; a kernel with a noise has the telescoped schedule."""
    if noise is None:
        return expected["over"]
    return expected["over"] | (expected["largest"] >= OVER_TELESCOPED)


def check_floats(c: Tensor, expected: Tensors, noise: Tensor | None, block: int, k: int) -> Check:
    """Hold each element to what its terms and C's dtype allow, the whole to the tolerance.

    The former finds an error in few elements, or in small ones beside large; the latter one that is
    everywhere. Of few elements, or where terms cancel by more than random signs do, there is only
    the former.

    Args:
        c: bf16, fp16 or fp32.
        expected: as `reference` has it.
    """
    import torch

    from jetfire.measure import check
    from jetfire.reference.quantize import spread

    wanted, over = expected["c"], overflowing(expected, noise)
    added = expected["systematic"] if noise is None else expected["systematic"] + noise
    give = spread(added + expected["evaluation"], block, *c.shape)
    # With v what fp32 gives, |v − wanted| ≤ give, and C is v rounded once, to nearest:
    # |C − v| ≤ unit(|v|)/2 ≤ unit(|wanted| + give)/2, for a larger number's unit is no smaller.
    # A number rounded toward zero is up to a whole unit off, a root mean square of 1/√3.
    rounding = _half_unit(wanted.abs().nan_to_num_(0.0).add_(give), c.dtype)
    everywhere = spread(over, block, *c.shape)
    each = check.bounded("c", c, wanted, give + rounding, everywhere)
    if bool(over.any()) or not bool(torch.isfinite(c).all()):
        done = check.settled(c, wanted, give) | everywhere
        c, wanted = c.masked_fill(done, 0.0), wanted.masked_fill(done, 0.0)
        rounding = rounding.masked_fill(done | torch.isnan(wanted), 0.0)
    size = float(wanted.nan_to_num(0.0).norm())
    total = check.norm_of(expected["total"].masked_fill(over, 0.0), block, *c.shape)
    if c.numel() < FEW or not size or total > 4 * math.sqrt(k) * size:
        return each
    error = check.relative_error(c, wanted)
    added = added.masked_fill(over, 0.0)
    accepted = check.norm_of(added, block, *c.shape) + float(rounding.norm())
    accepted = _tolerance(ceil_div(k, block)) + accepted / size
    if error <= accepted:
        return each
    message = f"c: relative error {error:.3g}, accepted {accepted:.3g}"
    return Check(False, error, each.message or message)


def check_squares(squares: Tensor, c: Tensor) -> Check:
    """Hold Σx² of each 16 rows and 32 columns of C to what sums of 512 squares may be off by.

    A square is rounded once, and then at most as often as there are numbers to add up. What is
    below 2^-126 is rounded to 2^-149. It is C as it was written that is squared.
    """
    from jetfire.measure import check
    from jetfire.reference.gemm import sums_of_squares

    wanted = sums_of_squares(c)
    bound = (512 * ROUNDING * wanted + 512 * SMALLEST).nan_to_num(0.0)
    return check.bounded("squares", squares, wanted, bound, wanted >= OVER)


def _half_unit(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half a dtype's unit in the last place of float64 sizes, which it overwrites."""
    import torch

    kind = torch.finfo(dtype)
    # The sign and the fraction taken off, a power of two is left.
    size.view(torch.int64).bitwise_and_(0x7FF << 52)
    return size.clamp_(min=kind.smallest_normal).mul_(kind.eps / 2)


def _tolerance(steps: int) -> float:
    """Return how far off a sum of blocks may be, relatively, before it is rounded to C's dtype.

    Each of its additions rounds by at most 2^-24, and roundings of either sign add up as their
    root.
    """
    return max(1e-6, ROUNDING * math.sqrt(steps))


def edges_of(rng: Random, inputs: Tensors) -> Tensors:
    """Have what is added to a product be much larger than it, or much smaller."""
    from jetfire.measure import edges

    rare = {}
    if "bias" in inputs:
        rare["bias"] = edges.each(rng, (0.0, 1e-4, -1e4), inputs["bias"])
    if "c" in inputs:
        rare["c"] = inputs["c"] * rng.choice((0.0, 2.0**-12, 2.0**10))
    return rare
