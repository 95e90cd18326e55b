"""Comparisons of a kernel's outputs with the reference's.

There are three: `exact` (equal bits), `bounded` (a bound per element), and `codes`, for quantised
outputs of functions that no two fp32 implementations round alike. There every code must be one that
the exact value allows, within a stated slack in units of a code.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from jetfire.core.op import Check
from jetfire.core.tensors import Specs, Tensors, names_of

# fp32 evaluation of a function of unit condition errs by a few 2^-24; 127 codes make that 1e-4 of
# a code, and full-row sums of 50257 terms stay within ten times that.
CODE_SLACK = 2e-3
SCALE_RTOL = 1e-5
LARGEST = (2 - 2.0**-23) * 2.0**127  # fp32's largest number


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖out − expected‖ / ‖expected‖ in float64, over chunks so that memory stays bounded.

    NaN where both hold NaN counts as equal. NaN in one alone gives infinity.
    """
    difference = norm = 0.0
    rows = max(1, (1 << 26) // max(1, out.shape[-1] if out.dim() else 1))
    for o, e in zip(out.split(rows), expected.split(rows), strict=True):
        o64, e64 = o.double(), e.double()
        nan = torch.isnan(o64)
        if not torch.equal(nan, torch.isnan(e64)):
            return math.inf
        difference += float((o64 - e64)[~nan].square().sum())
        norm += float(e64[~nan].square().sum())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)


def first(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the first true element's index, also for masks too large for torch's `nonzero`."""
    passed = 0
    for part in mask.flatten().split(1 << 28):
        if bool(part.any()):
            passed += int(part.to(torch.uint8).argmax())
            break
        passed += part.numel()
    return tuple(
        int(i)
        for i in torch.unravel_index(
            torch.tensor(passed, dtype=torch.int64, device="cpu"), mask.shape
        )
    )


def exact(name: str, out: torch.Tensor, expected: torch.Tensor) -> Check:
    """Check for equal bits, where NaN equals NaN."""
    wrong = out != expected
    if out.is_floating_point():
        wrong &= ~(torch.isnan(out) & torch.isnan(expected))
    count = int(wrong.sum())
    if count == 0:
        return Check(True, 0.0)
    at = first(wrong)
    return Check(
        False,
        relative_error(out, expected),
        f"{name}: {count} of {wrong.numel()} differ, first at {at}: "
        f"{out[at].item()} where the reference has {expected[at].item()}",
    )


def norm_of(noise: torch.Tensor, block: int, m: int, n: int) -> float:
    """Return the Frobenius norm of an m×n tensor that has each block's noise all over the block."""
    sizes = [
        (size - torch.arange(count, device=noise.device, dtype=torch.float64) * block).clamp(
            max=block
        )
        for size, count in zip((m, n), noise.shape, strict=True)
    ]
    return math.sqrt(float((noise.double().square() * sizes[0][:, None] * sizes[1]).sum()))


def settled(
    out: torch.Tensor,
    expected: torch.Tensor,
    give: torch.Tensor | float,
    over: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return where ±Inf is right: the expected value plus or minus `give` is too large for `out`.

    Args:
        over: where an intermediate result may overflow, so that any value not finite is right.
    """
    kind = torch.finfo(out.dtype)
    toward = torch.where(torch.signbit(out), -expected.double(), expected.double())
    found = torch.isinf(out) & (toward + give >= kind.max * (1 + kind.eps / 4))
    return found if over is None else found | over & ~torch.isfinite(out)


def bounded(
    name: str,
    out: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    over: torch.Tensor | None = None,
) -> Check:
    """Check that |out − expected| ≤ bound for each element, and NaN just where expected is NaN.

    A value too large for out's dtype must be ±Inf.

    Args:
        over: bool, where an intermediate result may overflow: any value not finite is right there.
    """
    difference = norm = 0.0
    count, place = 0, None
    # In slabs of rows, so that 16384×50257 fits beside its float64 reference.
    rows = max(1, (1 << 26) // max(1, out.shape[-1] if out.dim() > 1 else 1))
    for top in range(0, len(out), rows):
        part = slice(top, top + rows)
        o, e, most = out[part], expected[part].double(), bound[part]
        done = settled(o, e, most, None if over is None else over[part])
        o, e = o.double().masked_fill(done, 0.0), e.masked_fill(done, 0.0)
        off = (o - e).abs()
        wrong = (off > most) | (torch.isnan(o) != torch.isnan(e))
        difference += float(off.nan_to_num(0.0, math.inf).square().sum())
        norm += float(e.nan_to_num(0.0).square().sum())
        if place is None and bool(wrong.any()):
            at = first(wrong)
            place = (at[0] + top, *at[1:])
        count += int(wrong.sum())
    # Where every expected value is 0 the ratio has no meaning.
    error = math.sqrt(difference / norm) if norm else 0.0
    if place is None:
        return Check(True, error if math.isfinite(error) else 0.0)
    return Check(
        False,
        error,
        f"{name}: {count} elements off, first at {place}: "
        f"{out[place].item():.6g} where the reference has {expected[place].item():.6g}",
    )


def _scales(
    name: str,
    scale: torch.Tensor,
    expected: torch.Tensor,
    most: torch.Tensor,
    noise: torch.Tensor | None,
    over: torch.Tensor | None,
) -> tuple[Check, torch.Tensor]:
    """Check scales against their bounds, and return also which blocks' codes not to compare.

    Args:
        most: the largest value per block.
        noise, over: as in `codes`.
    """
    from jetfire.reference.quantize import TINY

    bound = SCALE_RTOL * expected.double().nan_to_num(0.0)
    give = 127 * bound if noise is None else 127 * bound + noise
    either = (most - TINY).abs() <= give + SCALE_RTOL * TINY  # the scale may be zero or not
    bound = give / 127 + either.double() * (1 + SCALE_RTOL) * TINY / 127
    edge = (most - LARGEST).abs() <= give.nan_to_num(0.0) + SCALE_RTOL * LARGEST
    over = edge if over is None else over | edge
    scale = torch.where(over, expected, scale)
    return bounded(f"{name}'s scale", scale, expected, bound), either | over


def codes(
    name: str,
    q: torch.Tensor,
    scale: torch.Tensor,
    value: torch.Tensor,
    expected_scale: torch.Tensor,
    block: int,
    u: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    over: torch.Tensor | None = None,
) -> Check:
    """Check that quantising the exact values allows the codes and scales.

    With t = value/scale + (u, or ½ for nearest), every code must be in
    [floor(t − `CODE_SLACK`), floor(t + `CODE_SLACK`)], and every scale within `SCALE_RTOL` of the
    reference's. A block whose largest value is as near to 2^-100 may be zero or not; as near to
    fp32's largest number it may be NaN or not. Where a kernel's own scale is 0 or NaN, its
    codes must be 0. Where terms cancel, the reference's scale may be 0 while the noise allows the
    kernel's another: then codes may be any.

    Args:
        q, scale: the kernel's, m×n and ⌈m/block⌉×⌈n/block⌉.
        value: the values before quantisation, m×n, at least fp32.
        u: the stochastic rounding's draws in [0, 1), m×n.
        noise: per block, what fp32 evaluation may add to a value where terms cancel. It widens both
            intervals.
        over: per block, whether fp32 evaluation may overflow there: such blocks are not compared.
    """
    from jetfire.reference.quantize import block_amax, spread

    m, n = q.shape
    difference = norm = 0.0
    most = block_amax(value.double(), block)
    scaled, free = _scales(name, scale, expected_scale, most, noise, over)
    if not scaled.ok:
        return scaled
    none = (scale == 0) | torch.isnan(scale)
    # In units of a code; not finite where terms cancel to 0.
    noises = None if noise is None else (noise / expected_scale).nan_to_num(0.0)
    rows = block * max(1, (1 << 24) // (n * block))
    for top in range(0, m, rows):
        part = slice(top, min(m, top + rows))
        by_row = slice(top // block, -(-part.stop // block))
        shape = block, part.stop - top, n
        wide = spread(expected_scale[by_row], *shape).double()
        t = (value[part].double() / wide).nan_to_num(0.0, 0.0, 0.0)
        add = 0.5 if u is None else u[part].double()
        slack: Any = CODE_SLACK
        if noises is not None:  # the value's noise, and that of the scale by which it was divided
            slack = CODE_SLACK + spread(noises[by_row], *shape) * (1 + t.abs() / 127)
        low = (t + add - slack).floor().clamp(-127, 127)
        high = (t + add + slack).floor().clamp(-127, 127)
        got, left_out = q[part].double(), spread(free[by_row], *shape)
        # Near a tie either code is right; an exact tie is rounded to even.
        wrong = ((got < low) | (got > high)) & ~left_out | (got < -127)
        stray = spread(none[by_row], *shape) & (got != 0)
        rounded = (t + add).floor() if u is not None else t.round()
        rounded = torch.where(left_out, got, rounded)
        difference += float(((got - rounded) * wide).nan_to_num(0.0).square().sum())
        norm += float((rounded * wide).nan_to_num(0.0).square().sum())
        if bool((wrong | stray).any()):
            at = first(wrong | stray)
            said = f"{t[at].item():.6f} was to be rounded"
            if bool(stray[at]):
                said = f"the scale is {scale[at[0] // block + by_row.start, at[1] // block]:g}"
            return Check(
                False,
                math.inf,
                f"{name}: {int((wrong | stray).sum())} codes off, first at "
                f"{(at[0] + top, at[1])}: {int(got[at])} where {said}",
            )
    return Check(True, math.sqrt(difference / norm) if norm else 0.0)


def every(checks: list[Check]) -> Check:
    """Return several checks as one, with the first failure's message and the largest error."""
    failed = next((c for c in checks if not c.ok), None)
    return Check(failed is None, max(c.rel_err for c in checks), failed.message if failed else "")


def outputs(specs: Specs, got: Tensors, expected: Tensors) -> Check:
    """Compare a kernel's outputs with the expected ones, as `StandardOp.check` says."""
    checks, done = [], set()
    for name, (_, _, block) in specs.items():
        bare = name.removesuffix("_t") if name != "qt" else "q"
        if block is not None and bare in expected and expected[bare].is_floating_point():
            if bare not in done:
                checks.append(rounded(bare, got, expected, block))
            done |= {bare, *names_of(bare).values()}
        elif name not in done:
            checks.append(_plain(name, got[name], expected))
    return every(checks)


def _plain(name: str, out: torch.Tensor, expected: Tensors) -> Check:
    bound = expected.get(f"{name}_bound")
    if bound is None:
        return exact(name, out, expected[name])
    return bounded(name, out, expected[name], bound, expected.get(f"{name}_over"))


def rounded(name: str, got: Tensors, expected: Tensors, block: int) -> Check:
    """Check the codes of a matrix, of its transpose, or of both, which must agree exactly."""
    q, scale, qt, scale_t = (got.get(own) for own in names_of(name).values())
    shown, checks = name, []
    if q is None or scale is None:
        assert qt is not None
        assert scale_t is not None
        q, scale, shown = qt.t(), scale_t.t(), names_of(name)["qt"]
    elif qt is not None and scale_t is not None:
        checks += [exact(names_of(name)["qt"], qt, q.t())]
        checks += [exact(names_of(name)["scale_t"], scale_t, scale.t())]
    known = [expected.get(f"{name}_{what}") for what in ("u", "noise", "over")]
    expected_scale = expected[names_of(name)["scale"]]
    of_codes = codes(shown, q, scale, expected[name], expected_scale, block, *known)
    return every([of_codes, *checks])
