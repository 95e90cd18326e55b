"""A ratio's confidence interval: it holds the truth as often as it says."""

import numpy as np
import pytest

from jetfire.measure.noise import interval, scatter
from jetfire.measure.results import Row
from jetfire.measure.timer import Timing


def row_of(samples) -> Row:
    timing = Timing.of(samples)
    times = {name: getattr(timing, name) for name in ("ms", "ms_p20", "ms_p80", "samples")}
    return Row("gemm", "triton", "kernel", {"m": 8}, ok=True, **times)


@pytest.mark.parametrize("count", [7, 20])
def test_an_interval_holds_the_truth_as_often_as_it_says(count):
    rng, held, trials = np.random.default_rng(0), 0, 1000
    for _ in range(trials):
        before = np.exp(rng.normal(0.0, 0.02, count))
        after = 1.25 * np.exp(rng.normal(0.0, 0.05, count))
        low, high = interval(row_of(before), row_of(after))
        assert low < high
        held += low < 1.25 < high
    assert 0.92 < held / trials < 0.99


def test_more_samples_say_more():
    def width(count: int) -> float:
        row = Row("gemm", "x", "kernel", {}, ms=1.0, ms_p20=0.99, ms_p80=1.01, samples=count)
        low, high = interval(row, row)
        assert low * high == pytest.approx(1)
        return high - low

    widths = [width(count) for count in (2, 3, 7, 20, 100)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 20 * widths[-1]
    # Of a hundred: 1.97 · √2 · 1.2533 · scatter / 10 on either side.
    assert widths[-1] == pytest.approx(2 * 1.97 * 1.4142 * 1.2533 * 0.0119 / 10, rel=0.01)


def test_scatter_is_the_deviation_of_a_normal():
    samples = np.exp(np.random.default_rng(1).normal(0.0, 0.03, 10_000))
    assert scatter(row_of(samples)) == pytest.approx(0.03, rel=0.05)


def test_equal_samples_leave_no_doubt():
    found = interval(row_of([1.0] * 5), row_of([1.5] * 5))
    assert found == pytest.approx((1.5, 1.5))


def test_extremes_of_what_files_may_hold_are_no_overflow():
    tiny = Row("gemm", "x", "kernel", {}, ms=1e-12, ms_p20=1e-12, ms_p80=1e12, samples=2)
    low, high = interval(tiny, tiny)
    assert 0 <= low < 1 < high < float("inf")


@pytest.mark.parametrize(
    "lost", [{"samples": None}, {"samples": 1}, {"ms_p20": None}, {"ms": None}]
)
def test_what_older_files_lack_leaves_no_interval(lost):
    known = {"ms": 1.0, "ms_p20": 0.9, "ms_p80": 1.1, "samples": 9}
    whole = Row("gemm", "x", "kernel", {}, **known)
    part = Row("gemm", "x", "kernel", {}, **known | lost)
    assert interval(whole, whole) is not None
    assert interval(whole, part) is None
    assert interval(part, whole) is None
