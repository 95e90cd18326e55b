"""AdamW whose moments are INT8 codes, with a scale for every 128 numbers of a row.

The first moment m is kept as codes of sign(m)·√|m|, the second, v, as codes of ⁴√v, which is to √v
what √|m| is to m. So small numbers have codes that lie closer: the least but 0 stands for 1/16129
of its group's largest m, and for 1/64516 of its largest √v. No code of v stands for 0 beside
others, so that no m is divided by eps alone.

Dettmers et al. (arXiv 2110.02861) keep moments in 8 bits by a table of 256 numbers; COAT (arXiv
2410.19313, section 4.1) raises each group to a power of its own, so that it fills the range of FP8.
Drawn gradients whose sizes differ within a group (log-normal, σ = 1.5; beta2 0.95, steps 21 to 60)
give updates u that are 0.25 off those of fp32's moments, as ‖u₈ − u‖/‖u‖. With codes of m and √v
they are 0.62 off, and 17 where a √v may have the code 0 (tests/test_adamw8.py). Rounding to nearest
needs no random numbers.

What is kept is bit-exact: every kernel must reproduce it. Each operation rounds once, in fp32.

A parameter in BF16 has no copy in fp32. Its new value is rounded stochastically, so that updates
below half of its last place, which rounding to nearest would drop, are made in the mean.
"""

from __future__ import annotations

import torch

from jetfire.reference.adamw import rounded
from jetfire.reference.philox import random_u16
from jetfire.reference.quantize import TINY

GROUP = 128


def root(x: torch.Tensor) -> torch.Tensor:
    """Return √x of fp32, correctly rounded: torch 2.13's own of a CPU is off by a unit in a fifth.

    What float64's root may err lies within no fp32 number's rounding.
    """
    return x.double().sqrt().float()


def groups(x: torch.Tensor) -> torch.Tensor:
    """Return the groups of each row, padded with zeros: m×n → m×⌈n/128⌉×128."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _spread(scales: torch.Tensor, n: int) -> torch.Tensor:
    """Repeat each group's value at each of its elements: m×⌈n/128⌉ → m×n."""
    return scales.repeat_interleave(GROUP, 1)[:, :n]


def _scaled(roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return roots in units of their group's scale (m×n, at most 127), and scales (m×⌈n/128⌉).

    Scales are those of `quantize`: largest/127, 0 where the largest is below 2^-100, NaN where it
    is not finite. Without a finite scale above 0 the units are 0.
    """
    most = groups(roots.abs()).amax(dim=2)
    levels = torch.full_like(most, 127.0)
    zero, bad = most < TINY, ~torch.isfinite(most)
    scale = (most / levels).masked_fill(zero, 0.0).masked_fill(bad, torch.nan)
    multiplier = (levels / most).masked_fill(zero | bad, 0.0)
    wide = _spread(multiplier, roots.shape[1])
    return torch.where(wide != 0, roots * wide, 0.0), scale


def first_codes(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 m×n in [-127, 127], and scales, fp32, of first moments, fp32 m×n.

    ``q = rint(sign(m)·√|m|/scale)``, ties to even.
    """
    units, scale = _scaled(root(m.abs()).copysign(m))
    return units.round().to(torch.int8), scale


def first_values(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the first moments that codes stand for: y·|y| with y = q·scale, fp32 m×n."""
    y = q.float() * _spread(scale, q.shape[1])
    return y * y.abs()


def second_codes(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 m×n in [-126, 127], and scales, fp32, of second moments, fp32 m×n.

    ``q = max(rint(2·⁴√v/scale − 127), -126)``, ties to even: q + 127 counts half scales, 1 to 254.
    Where the scale is 0 or NaN, q is 0.
    """
    units, scale = _scaled(root(root(v)))
    q = (units * 2 - 127).clamp(min=-126).round()
    alive = _spread(scale > 0, v.shape[1])
    return q.masked_fill(~alive, 0.0).to(torch.int8), scale


def second_values(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the second moments that codes stand for: z⁴ with z = (q + 127)·scale/2, fp32 m×n."""
    z = (q.float() + 127) * (_spread(scale, q.shape[1]) * 0.5)
    return (z * z) * (z * z)


def narrowed(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Round fp32 m×n to bf16, away from zero with the probability of what lies below.

    Sixteen random bits are added to the sixteen that are then cut off. What bf16 holds stays as it
    is, ±Inf and NaN too.
    """
    drawn = random_u16(seed, *x.shape).to(torch.int32)
    top = (x.contiguous().view(torch.int32) + drawn) >> 16
    found = top.to(torch.int16).view(torch.bfloat16)
    return found.masked_fill(x.isnan(), torch.nan)


def moments(
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    beta1: float,
    beta2: float,
    grad_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments (fp32 m×n) with a gradient in them, before they are codes again."""
    one = torch.ones((), dtype=torch.float32, device=grad.device)
    betas = rounded(beta1) * one, rounded(beta2) * one
    if grad_scale is not None:
        grad = grad * (one / grad_scale)
    m = m * betas[0] + grad * (one - betas[0])
    v = v * betas[1] + grad * grad * (one - betas[1])
    return m, v


def update(
    param: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    rate: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> torch.Tensor:
    """Return the parameter after a step with these new moments, float64; decay comes first."""
    beta1, beta2, eps, decay = map(rounded, (beta1, beta2, eps, decay))
    p, m, v = param.double(), m.double(), v.double()
    lr, t = float(rate), float(step)
    denominator = (v / (1 - beta2**t)).sqrt() + eps
    return p * (1 - lr * decay) - lr / (1 - beta1**t) * m / denominator
