"""What is known of a time beyond its median: how far samples scatter, and ratios' intervals."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

from jetfire.measure.results import Row

# How far the 20th and the 80th percentile of a normal distribution are apart, in deviations.
_SPAN = 2 * NormalDist().inv_cdf(0.8)
OF_MEDIAN = math.sqrt(math.pi / 2)  # a median's standard error, over that of the mean


def scatter(row: Row) -> float | None:
    """Return the standard deviation of a row's samples over their median, by its percentiles.

    Returns:
        None where the row has no percentiles.
    """
    if not (row.ms_p20 and row.ms_p80):
        return None
    return math.log(row.ms_p80 / row.ms_p20) / _SPAN


def interval(before: Row, after: Row) -> tuple[float, float] | None:
    """Return the 95% confidence interval of the ratio of two medians, after over before.

    Logarithms of times are taken for normal, with the deviations that the percentiles say, and
    Student's t has Welch's degrees of freedom. It holds what the samples of two runs say, and
    nothing of what differs from run to run.

    Returns:
        None where a row has no time, no percentiles, or fewer than two samples.
    """
    parts = [found for row in (before, after) if (found := _error(row)) is not None]
    if before.ms is None or after.ms is None or len(parts) < 2:
        return None
    variance = math.fsum(part for part, _ in parts)
    spent = math.fsum(part**2 / freedom for part, freedom in parts)
    half = quantile(max(1, int(variance**2 / spent))) * math.sqrt(variance) if spent else 0.0
    middle = math.log(after.ms / before.ms)
    return math.exp(middle - half), math.exp(min(700.0, middle + half))


def _error(row: Row) -> tuple[float, float] | None:
    """Return the variance of the logarithm of a row's median, and its degrees of freedom.

    The deviation is known from two percentiles alone. From n normal samples they give it as
    precisely as the usual estimate from 0.46·n: the difference of the percentiles has a mean of
    1.68 deviations and a variance of 3.06/n (Cramér, Mathematical Methods of Statistics, 1946,
    section 28.5).
    """
    deviation, count = scatter(row), row.samples or 0
    if deviation is None or count < 2:
        return None
    return (OF_MEDIAN * deviation) ** 2 / count, 0.46 * count


@cache
def quantile(freedom: int) -> float:
    """Return the t that Student's |t| is below with probability 0.95.

    From 1000 degrees of freedom on it is that of 1000, by 0.0024 the larger at most.
    """
    freedom = min(freedom, 1000)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _probability(angle, freedom) < 0.95 else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def _probability(angle: float, freedom: int) -> float:
    """Return P(|t| < tan(angle)·√freedom), by Abramowitz and Stegun's 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= (n - 1) / n * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
