"""The timer: rotation, interleaving, percentiles, and what a GPU's graph must not hide."""

import dataclasses
import math
import time

import numpy as np
import pytest
import torch

from jetfire.measure import timer
from jetfire.measure.nvml import Nvml
from jetfire.measure.timer import Timing, input_sets, time_calls

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


class Clock:
    """Stands still but for the calls that it makes, which take the milliseconds of their names."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.order: list[str] = []

    def perf_counter(self) -> float:
        return self.ms / 1e3

    def call(self, name: str, ms: float):
        def work() -> None:
            self.order.append(name)
            self.ms += ms

        return work


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timer, "time", made)
    return made


def test_cpu_calls_rotate_and_interleave(clock):
    variants = {
        "a": [clock.call("a0", 1.0), clock.call("a1", 3.0)],
        "b": [clock.call("b0", 0.25)],
    }
    timings = time_calls(variants, CPU, rounds=3, sample_ms=8.0)
    # Each is called twice over to learn how often a sample is: 8 ms are 4 of a's, 32 of b's.
    assert clock.order[:6] == ["a0", "a1", "a0", "a1", "b0", "b0"]
    assert clock.order[6:] == (["a0", "a1"] * 2 + ["b0"] * 32) * 3
    assert [timings[name].ms for name in "ab"] == pytest.approx([2.0, 0.25])
    assert [timings[name].values for name in "ab"] == [
        pytest.approx((2.0,) * 3),
        pytest.approx((0.25,) * 3),
    ]
    assert all(timing.samples == 3 and not timing.graph for timing in timings.values())


def test_a_long_first_call_is_not_repeated_to_learn_its_time(clock):
    timings = time_calls({"a": [clock.call("a", 100.0)]}, CPU, rounds=5, sample_ms=8.0)
    assert len(clock.order) == 1 + 5
    assert timings["a"].ms == pytest.approx(100)


def test_budget_ends_rounds_early_but_not_before_the_least(clock):
    def samples(**options) -> int:
        variants = {"a": [clock.call("a", 20.0)]}
        return time_calls(variants, CPU, rounds=50, sample_ms=1.0, **options)["a"].samples

    assert samples(budget_s=0.0) == timer.LEAST_ROUNDS
    assert samples(budget_s=0.0, least_rounds=7) == 7
    assert samples(budget_s=0.19) == 10  # the tenth begins at 0.18 s
    assert samples() == 50


def test_processes_agree_on_times_and_counts(clock):
    """Another process takes twice as long: half as many calls a sample, and its times count."""
    asked = []

    def agree(value: float) -> float:
        asked.append(value)
        return 2 * value

    timings = time_calls(
        {"a": [clock.call("a", 1.0)]}, CPU, rounds=50, sample_ms=8.0, budget_s=0.1, agree=agree
    )
    # Each round of 4 calls is known to have taken 8 ms: 100 ms have passed after the 13th.
    assert len(clock.order) == 2 + 4 * 13
    assert timings["a"].values == (pytest.approx(2.0),) * 13
    assert len(asked) == 2 + 14 + 13


def test_noise_is_half_the_interval_of_the_median():
    assert timer.noise([1.0] * 5) == math.inf  # no order statistics bound a median so surely
    assert timer.noise([1.0] * 6) == 0.0
    assert timer.noise([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == pytest.approx(2.5 / 3.5)
    # Of 100 it is from the 40th to the 61st: of so many tosses 40 to 60 are heads in 96%.
    assert timer.noise(list(range(1, 101))) == pytest.approx((61 - 40) / 2 / 50.5)


def test_rounds_end_when_all_noise_is_small(clock):
    def samples(**options) -> int:
        variants = {"a": [clock.call("a", 20.0)], "b": [clock.call("b", 20.0)]}
        found = time_calls(variants, CPU, rounds=50, sample_ms=1.0, **options)
        assert found["a"].samples == found["b"].samples
        return found["a"].samples

    assert samples(max_noise=0.01) == 6  # a clock without noise
    assert samples(max_noise=0.01, budget_s=0.0) == timer.LEAST_ROUNDS
    assert samples(max_noise=-1.0) == 50


def test_runs_of_one_variant_are_joined():
    runs = [Timing.of([1.0, 2.0, 3.0]), Timing.of([4.0, 5.0])]
    joined = Timing.joined(runs)
    assert (joined.ms, joined.samples, joined.watts, joined.joules) == (3.0, 5, None, None)
    assert joined.values == (1.0, 2.0, 3.0, 4.0, 5.0)
    powered = [
        dataclasses.replace(run, watts=watts, graph=False)
        for run, watts in zip(runs, (100.0, 300.0), strict=True)
    ]
    joined = Timing.joined(powered)
    assert joined.watts == 200.0
    assert joined.joules == pytest.approx(200.0 * 3.0 / 1e3)
    assert joined.energies == pytest.approx((100 * 2.0 / 1e3, 300 * 4.5 / 1e3))
    assert not joined.graph
    assert Timing.joined([powered[0], runs[1]]).watts is None


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


class Warmed:
    """A variant on a GPU whose clock is held down, or not; of 10 ms per sample."""

    def __init__(self, clock: Clock, reasons: tuple[str, ...]) -> None:
        self.clock, self.reasons, self.ran = clock, reasons, 0

    def elapsed(self) -> float:
        self.ran += 1
        self.clock.ms += 10
        return 10.0

    def held_down(self, monitor: object) -> bool:
        return monitor is not None and bool(self.reasons)


@pytest.mark.parametrize(
    ("reasons", "monitor", "warm_ms", "ran"),
    [
        ((), Meter(), 60, 3),
        (("power cap",), Meter(), 60, 25),
        (("power cap",), None, 60, 3),
        (("power cap",), Meter(), 0, 0),
        (("power cap",), Meter(), 800, 40),
    ],
)
def test_a_clock_that_is_held_down_settles_first(clock, reasons, monitor, warm_ms, ran):
    variants = [Warmed(clock, ()), Warmed(clock, reasons)]
    held = timer._warm(variants, monitor, warm_ms, lambda value: value)
    assert [variant.ran for variant in variants] == [ran, ran]
    assert held == (ran > 0 and monitor is not None and bool(reasons))


class Sampled(timer._Variant):
    """A variant of 4 ms whose runs and samples are written down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.repeats, self.graph = name, log, 2, None
        self.ms, self.samples, self.clocks, self.reasons = math.inf, [], [], set()

    def run(self) -> None:
        self.log.append(self.name)

    def elapsed(self, monitor: object = None) -> float:
        self.log.append(f"{self.name} sample")
        self.ms = 2.0
        return self.ms

    def again(self) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "held", "ahead"), [("ab", True, 25), ("ab", False, 0), ("a", True, 0)]
)
def test_at_the_power_cap_each_variant_runs_ahead_of_its_sample(monkeypatch, names, held, ahead):
    log: list[str] = []
    made = iter([Sampled(name, log) for name in names])

    def warm(variants: list[Sampled], *_: object) -> bool:
        for variant in variants:
            variant.elapsed()
        log.clear()
        return held

    monkeypatch.setattr(timer, "_Variant", lambda *_: next(made))
    monkeypatch.setattr(timer, "_warm", warm)
    until = timer._Rounds(2, 1, math.inf, None, lambda value: value)
    timer._time_cuda({n: [] for n in names}, until, 4.0, None, 0, True, 1, 0, lambda *_: None)
    assert log == [said for n in names for said in (*[n] * ahead, f"{n} sample")] * 2


@pytest.mark.gpu
@pytest.mark.quiet
def test_cuda_times_agree_with_the_work():
    device = torch.device("cuda", 0)
    small, large = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in (2048, 4096))
    timings = time_calls(
        {"small": [lambda: small @ small], "large": [lambda: large @ large]},
        device,
        rounds=5,
        monitor=Meter(),
        power_ms=100,
    )
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


@pytest.mark.gpu
def test_what_a_variant_does_after_another_alone_is_not_timed():
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    last = ""

    def call(name: str) -> None:
        nonlocal last
        for _ in range(1 if last == name else 20):  # as codes are copied after others were made
            x @ x
        last = name

    variants = {name: [lambda name=name: call(name)] for name in ("one", "other")}

    def ms(untimed: int) -> float:
        options = {"rounds": 5, "sample_ms": 0.1, "capture": False, "untimed": untimed}
        return time_calls(variants, device, **options)["one"].ms

    assert ms(0) > 3 * ms(1)


@pytest.mark.gpu
@pytest.mark.quiet
def test_at_the_power_cap_a_call_takes_as_long_in_turn_as_alone():
    """Beside a copy, which draws less: right after it a product would run at its higher clock."""
    device = torch.device("cuda", 0)
    monitor = Nvml.open(device)
    if monitor is None:
        pytest.skip("needs NVML")
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product: list[timer.Call] = [lambda: torch.mm(x, x, out=y)]
    alone = time_calls({"product": product}, device, monitor=monitor, power_ms=500)["product"]
    if not alone.throttled:
        pytest.skip("the clock is not held down here")
    variants = {"product": product, "copy": [lambda: target.copy_(source)]}
    beside = time_calls(variants, device, monitor=monitor)["product"]
    assert beside.ms == pytest.approx(alone.ms, rel=0.04)
