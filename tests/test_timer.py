"""The timer: rotation, interleaving, percentiles, and what a GPU's graph must not hide."""

import math
import time

import numpy as np
import pytest
import torch

from jetfire.bench import timer
from jetfire.bench.timer import Timing, input_sets, time_calls

CPU = torch.device("cpu")


def test_input_sets_cover_the_l2_three_times():
    assert input_sets(1 << 20, 60 << 20) == 32  # never more
    assert input_sets(60 << 20, 60 << 20) == 3
    assert input_sets(1 << 30, 60 << 20) == 1
    assert input_sets(100, 0) == 1


def test_timing_is_median_and_percentiles():
    samples = [5.0, 1.0, 2.0, 3.0, 4.0]
    timing = Timing.of(samples)
    assert timing.ms == 3.0
    assert timing.samples == 5
    assert (timing.ms_p20, timing.ms_p80) == tuple(np.percentile(samples, (20, 80)))


def test_cpu_calls_rotate_and_interleave():
    order: list[str] = []

    def call(name: str):
        def work() -> None:
            order.append(name)
            time.sleep(0.001)

        return work

    variants = {"a": [call("a0"), call("a1")], "b": [call("b0")]}
    timings = time_calls(variants, CPU, rounds=3, sample_ms=0.5)
    assert set(timings) == {"a", "b"}
    assert abs(order.count("a0") - order.count("a1")) <= 4
    rounds = "".join(name[0] for name in order[-6:])
    assert "ab" in rounds
    assert "ba" in rounds
    assert all(1.0 <= timing.ms < 100 for timing in timings.values())
    assert all(timing.samples == 3 and not timing.graph for timing in timings.values())


def test_budget_ends_rounds_early_but_not_before_the_third():
    timings = time_calls({"a": [lambda: time.sleep(0.02)]}, CPU, rounds=50, budget_s=0.0)
    assert timings["a"].samples == timer.LEAST_ROUNDS


def test_no_variants_no_timings():
    assert time_calls({}, CPU) == {}


def test_outputs_of_one_set_are_not_the_next_ones():
    """A result let go at once would be the next call's memory, still in the cache."""
    addresses = []

    def make() -> torch.Tensor:
        made = torch.empty(1 << 20)
        addresses.append(made.data_ptr())
        return made

    timer._walk([make, make, make], 3)
    assert len(set(addresses)) == 3


class Meter:
    """A monitor of a GPU that always runs at 1500 MHz and 100 W."""

    def sm_mhz(self) -> float:
        return 1500.0

    def throttle_reasons(self) -> tuple[str, ...]:
        return ("power cap",)

    def joules(self) -> float:
        return math.floor(time.perf_counter() * 20) * 5.0


@pytest.mark.gpu
def test_cuda_times_agree_with_the_work():
    device = torch.device("cuda", 0)
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (2048, 4096))
    timings = time_calls(
        {"small": [lambda: small @ small], "large": [lambda: large @ large]},
        device, rounds=5, monitor=Meter(), power_ms=100,
    )  # fmt: skip
    assert 5 < timings["large"].ms / timings["small"].ms < 12  # eight times the operations
    assert all(timing.graph and timing.sm_mhz == 1500 for timing in timings.values())
    assert all(timing.throttled == ("power cap",) for timing in timings.values())
    assert all(80 < (timing.watts or 0) < 120 for timing in timings.values())


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_says_so():
    device = torch.device("cuda", 0)
    x = torch.randn(1024, 1024, device=device)
    timings = time_calls(
        {"synchronises": [lambda: x.sum().item()], "captures": [lambda: x.sum()]}, device, rounds=3
    )
    assert not timings["synchronises"].graph
    assert timings["captures"].graph
    assert timings["synchronises"].ms > timings["captures"].ms
