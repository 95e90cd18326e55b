"""The one timer of the bench, the tuner and the tests.

Every variant is captured once in a CUDA graph of `repeats` calls that walk over its input sets. So
the host's launch cost is out of the figure, and no call finds its inputs in the L2 cache. The
graphs are then replayed in turn, one of each per round, so that a drift of clock or power hits all
alike. Each replay is one sample. On a GPU at its power cap a variant first runs until the clock has
settled at what its own power allows. On the CPU the same loop reads the host's clock.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

VERSION = 6
SAMPLE_MS = 2.0
# An idle H200 takes tens of milliseconds to raise its clock from 345 to 1980 MHz, and 125 to 190 to
# say that it draws too much.
WARM_MS = 300.0
# A GPU that comes to its power cap lowers its clock by more than it must, for some tenths of a
# second: large GEMMs on an H100 ran at 1440 MHz from 60 ms on, and at 1620 to 1755 from 500 on.
SETTLED_MS = 500.0
# At its power cap a GPU's clock follows what runs, within 50 ms. In shorter turns a variant runs at
# the clock that the one before it has left: on an H200 a GEMM after cuBLAS in BF16 took 1.13, 1.04
# and 1.00 times its settled time in each 20 ms, by a scratch program that is not kept.
ADAPT_MS = 100.0
LEAST_ROUNDS = 3
# The device idles this long ahead of a sample, so that the host has launched the whole of it before
# its first kernel starts: 50 us at 2 GHz.
HEAD_START_CYCLES = 100_000
Call = Callable[[], object]
Agree = Callable[[float], float]


@dataclass(frozen=True)
class Timing:
    """The time of one variant: milliseconds per call, as percentiles of the samples.

    Attributes:
        ms, ms_p20, ms_p80: the median, the 20th and the 80th percentile.
        graph: replayed from a CUDA graph; False where launches are in the figure.
        sm_mhz: the median SM clock while it ran (None where nothing could be read, as below).
        watts: the board's power while it ran without pause.
        throttled: why the clock was held down while it ran; empty where it was not.
        values: the samples, in the order of the rounds.
        energies: joules per call, of each of the runs that this was joined from.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    samples: int
    graph: bool = True
    sm_mhz: float | None = None
    watts: float | None = None
    throttled: tuple[str, ...] | None = None
    values: tuple[float, ...] = field(default=(), repr=False)
    energies: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        p20, median, p80 = np.percentile(np.asarray(samples), (20, 50, 80))
        values = tuple(float(sample) for sample in samples)
        return cls(float(median), float(p20), float(p80), len(samples), values=values)

    @classmethod
    def joined(cls, runs: Sequence[Timing]) -> Timing:
        """Return several runs of one variant as one; without power where one of them has none."""
        found = cls.of([value for run in runs for value in run.values])
        watts = [run.watts for run in runs if run.watts is not None]
        if len(watts) < len(runs):
            return replace(found, graph=runs[0].graph)
        joules = tuple(run.joules for run in runs if run.joules is not None)
        return replace(found, graph=runs[0].graph, watts=float(np.median(watts)), energies=joules)

    @property
    def joules(self) -> float | None:
        """The energy per call, or None where the power could not be read."""
        return None if self.watts is None else self.watts * self.ms / 1e3


class Monitor(Protocol):
    """A reader of a device's clock and power, such as `jetfire.measure.nvml.Nvml`."""

    def sm_mhz(self) -> float | None: ...

    def throttle_reasons(self) -> tuple[str, ...] | None: ...

    def joules(self) -> float | None:
        """Return the energy used since some time in the past."""


def noise(values: Sequence[float]) -> float:
    """Return half the width of the median's 95% confidence interval, over the median.

    The interval's ends are order statistics, whatever the distribution (Le Boudec, Performance
    Evaluation of Computer and Communication Systems, 2010, §2.2); with fewer than six values no two
    of them are so sure, and the noise is infinite.
    """
    count = len(values)
    if count < 6:
        return math.inf
    first = max(0, math.floor(0.5 * count - 0.98 * math.sqrt(count)) - 1)
    ordered = sorted(values)
    return (ordered[count - 1 - first] - ordered[first]) / 2 / float(np.median(ordered))


def input_sets(bytes_per_call: int, l2_bytes: int) -> int:
    """Return the number of input and output sets to rotate among, so that calls find a cold L2."""
    return max(1, min(32, math.ceil(3 * l2_bytes / max(1, bytes_per_call))))


def _own(value: float) -> float:
    return value


def _walk(calls: Sequence[Call], repeats: int) -> None:
    """Call over the sets in turn, holding each set's last result.

    A result let go at once would be the next call's memory: outputs would stay in the L2 cache.
    """
    held: list[object] = [None] * len(calls)
    for i in range(repeats):
        held[i % len(calls)] = calls[i % len(calls)]()


def synchronises(call: Call) -> bool:
    """Return whether a call waits for the device.

    Capturing such a call fails, and leaves torch's generators broken.
    """
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


class _Variant:
    """A variant on a GPU, with its graph, or its calls alone where they cannot be captured."""

    def __init__(
        self, calls: Sequence[Call], sample_ms: float, capture: bool, untimed: int, agree: Agree
    ) -> None:
        self.calls = calls
        self.capture = capture
        self.untimed = untimed
        self.agree = agree
        self.ms = math.inf  # of the last sample
        self.samples: list[float] = []
        self.clocks: list[float] = []
        self.reasons: set[str] = set()
        # Graphs are captured on a side stream, so warm up on one too. Without a graph that would
        # cost memory: torch keeps memory apart for each stream.
        own = torch.cuda.current_stream()
        side = torch.cuda.Stream() if capture else own
        side.wait_stream(own)
        with torch.cuda.stream(side):
            _walk(calls, len(calls))
        own.wait_stream(side)
        self.repeats = len(calls)
        self.graph = self._capture()
        self.run()
        wanted = max(1, round(sample_ms / min(self.elapsed() for _ in range(2))))
        if wanted > self.repeats:
            self.repeats = math.ceil(wanted / len(calls)) * len(calls)
            if self.graph is not None:
                self.graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        if not self.capture or synchronises(self.calls[0]):
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                _walk(self.calls, self.repeats)
        except RuntimeError:  # any other call that no graph can hold
            torch.cuda.synchronize()
            return None
        return graph

    def run(self) -> None:
        if self.graph is None:
            _walk(self.calls, self.repeats)
        else:
            self.graph.replay()

    def again(self) -> None:
        """Run every set's call: the graph that was timed, or each once where there is none.

        Once, so that what a call leaves to another stream is not done by the next one's time.
        """
        if self.graph is None:
            _walk(self.calls, len(self.calls))
        else:
            self.graph.replay()

    def elapsed(self, monitor: Monitor | None = None) -> float:
        """Return milliseconds per call of one sample; the clock is read while the device works.

        Of several processes' samples it is the longest, and none ends before all have ended.
        """
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _walk(self.calls, self.untimed)
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        self.run()
        stop.record()
        if monitor is not None:
            clock = monitor.sm_mhz()
            if clock is not None and not stop.query():
                self.clocks.append(clock)
                self.reasons.update(monitor.throttle_reasons() or ())
        stop.synchronize()
        self.ms = self.agree(start.elapsed_time(stop) / self.repeats)
        return self.ms

    def adapt(self, ms: float) -> None:
        """Run for so long, without a wait, ahead of a sample."""
        for _ in range(math.ceil(ms / (self.ms * self.repeats))):
            self.run()

    def held_down(self, monitor: Monitor | None) -> bool:
        """Return whether something holds the clock down while it runs."""
        done = self._queue(1)
        reasons = monitor.throttle_reasons() if monitor is not None else None
        done.synchronize()
        return bool(reasons)

    def watts(self, monitor: Monitor, power_ms: float) -> float | None:
        """Return the power over at least `power_ms` without pause; None where no counter moves.

        On an H200 the counter of joules moves every 100 ms and takes 7 ms to read. So count from
        one move to another, with the next batch of work queued while it is read. A quarter of
        `power_ms` is run before, for the draw to settle.
        """
        batch = max(1, round(10 / (float(np.median(self.samples)) * self.repeats)))
        queued = self._queue(batch)
        last, first = monitor.joules(), None
        settled = time.perf_counter() + power_ms / 4e3
        while time.perf_counter() < settled + power_ms / 1e3 + 0.5:
            ahead = self._queue(batch)
            now, joules = time.perf_counter(), monitor.joules()
            queued.synchronize()
            queued = ahead
            if joules is None or joules == last:
                continue
            last = joules
            if first is None:
                first = (now, joules) if now >= settled else None
            elif (now - first[0]) * 1e3 >= power_ms:
                torch.cuda.synchronize()
                return (joules - first[1]) / (now - first[0])
        torch.cuda.synchronize()
        return None

    def _queue(self, batch: int) -> torch.cuda.Event:
        for _ in range(batch):
            self.run()
        done = torch.cuda.Event()
        done.record()
        return done


@dataclass(frozen=True)
class _Rounds:
    """When to take no further samples.

    Attributes:
        most, least, budget_s, max_noise, agree: `rounds`, `least_rounds` and the rest of
            `time_calls`.
    """

    most: int
    least: int
    budget_s: float
    max_noise: float | None
    agree: Agree

    def __call__(self, samples: Sequence[Sequence[float]]) -> Iterator[None]:
        """Yield as often as each variant is to be sampled, whose samples so far these are."""
        begin = time.perf_counter()
        for i in range(self.most):
            spent = self.agree(time.perf_counter() - begin)
            if i >= self.least and spent > self.budget_s:
                return
            if self.max_noise is not None and all(noise(s) <= self.max_noise for s in samples):
                return
            yield


def _warm(
    variants: Sequence[_Variant], monitor: Monitor | None, warm_ms: float, agree: Agree
) -> bool:
    """Run all variants in turn, and where the clock is then held down until it has settled.

    Returns:
        Whether it is held down.
    """
    begin = time.perf_counter()

    def run(least_ms: float) -> None:
        while agree((time.perf_counter() - begin) * 1e3) < least_ms:
            for variant in variants:
                variant.elapsed()

    run(warm_ms)
    if warm_ms <= 0:
        return False
    held = [variant.held_down(monitor) for variant in variants]  # all, as other processes do
    if not agree(float(any(held))):
        return False
    run(SETTLED_MS)
    return True


def _time_cuda(
    variants: Mapping[str, Sequence[Call]],
    until: _Rounds,
    sample_ms: float,
    monitor: Monitor | None,
    power_ms: float,
    capture: bool,
    warm_ms: float,
    untimed: int,
    timed: Callable[[str, Call], object],
) -> dict[str, Timing]:
    prepared = {
        name: _Variant(calls, sample_ms, capture, untimed, until.agree)
        for name, calls in variants.items()
    }
    held = _warm(list(prepared.values()), monitor, warm_ms, until.agree)
    adapt_ms = ADAPT_MS if held and len(prepared) > 1 else 0.0
    for _ in until([variant.samples for variant in prepared.values()]):
        for variant in prepared.values():
            variant.adapt(adapt_ms)
            variant.samples.append(variant.elapsed(monitor))
    found = {}
    for name, variant in prepared.items():
        found[name] = replace(Timing.of(variant.samples), graph=variant.graph is not None)
        if monitor is not None and variant.clocks:
            found[name] = replace(
                found[name],
                sm_mhz=float(np.median(variant.clocks)),
                throttled=tuple(sorted(variant.reasons)),
                watts=variant.watts(monitor, power_ms) if power_ms > 0 else None,
            )
        timed(name, variant.again)
    return found


def _time_cpu(
    variants: Mapping[str, Sequence[Call]],
    until: _Rounds,
    sample_ms: float,
    timed: Callable[[str, Call], object],
) -> dict[str, Timing]:
    def elapsed(calls: Sequence[Call], repeats: int) -> float:
        begin = time.perf_counter()
        _walk(calls, repeats)
        return until.agree((time.perf_counter() - begin) * 1e3 / repeats)

    repeats = {}
    for name, calls in variants.items():
        one = elapsed(calls, len(calls))
        if one < 10 * sample_ms:  # the first call's page faults would make too few of the rest
            one = elapsed(calls, len(calls))
        repeats[name] = max(1, round(sample_ms / one))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in until(list(samples.values())):
        for name, calls in variants.items():
            samples[name].append(elapsed(calls, repeats[name]))
    for name, calls in variants.items():
        timed(name, partial(_walk, calls, len(calls)))
    return {name: replace(Timing.of(values), graph=False) for name, values in samples.items()}


def time_calls(
    variants: Mapping[str, Sequence[Call]],
    device: torch.device,
    rounds: int = 20,
    sample_ms: float = SAMPLE_MS,
    *,
    budget_s: float = math.inf,
    max_noise: float | None = None,
    monitor: Monitor | None = None,
    power_ms: float = 0.0,
    capture: bool = True,
    warm_ms: float = WARM_MS,
    least_rounds: int = LEAST_ROUNDS,
    untimed: int = 0,
    timed: Callable[[str, Call], object] = lambda name, run: None,
    agree: Agree = _own,
) -> dict[str, Timing]:
    """Time variants against each other.

    Args:
        variants: by name, calls that do the same work on different inputs (`input_sets` of them).
        device: the device on which they run.
        rounds: samples per variant, or with `max_noise` the most.
        sample_ms: the least length of a sample, in milliseconds.
        budget_s: seconds after which no further round begins, once `least_rounds` are done.
        max_noise: no further round begins once no variant has more `noise` than this.
        monitor: reads the clock beside every sample on a GPU. Where it says that the clock is held
            down, each of several variants runs for `ADAPT_MS` before its sample.
        power_ms: how long to run each variant without pause for its power; 0 reads none.
        capture: replay CUDA graphs; without, launches are in the figure.
        warm_ms: how long a GPU runs all of them beforehand, if it is more than 0 at least half a
            second where the clock is then held down.
        untimed: calls before each sample on a GPU, for work that a variant has only where another
            ran before it.
        timed: is told of each variant, once its time is known, its name and what runs it again: the
            very graph that was timed, or where there is none each of its calls once.
        agree: where several processes take the same samples together, as their calls wait for each
            other: returns the largest of their values, once all have given one. Every sample is
            that of the slowest. With `power_ms` their calls would not be as many.

    Returns:
        By name, the milliseconds per call.
    """
    if not variants:
        return {}
    until = _Rounds(rounds, least_rounds, budget_s, max_noise, agree)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_cuda(
                variants, until, sample_ms, monitor, power_ms, capture, warm_ms, untimed, timed
            )
    return _time_cpu(variants, until, sample_ms, timed)


def _tools() -> dict[str, object]:
    """Return what times are taken with, by name."""
    events = ("record", "elapsed_time", "synchronize")
    found: dict[str, object] = {"time.perf_counter": time.perf_counter}
    found |= {f"torch.cuda.Event.{name}": getattr(torch.cuda.Event, name) for name in events}
    ours = {"timer": globals(), "Timing": vars(Timing), "_Variant": vars(_Variant)}
    for owner, own in ours.items():
        found |= {f"{owner}.{name}": tool for name, tool in own.items() if name[:2] != "__"}
    return found


_TOOLS = _tools()


def replaced() -> list[str]:
    """Return the names of the tools that are others than when this module was imported.

    Python's and torch's are also told where a module of another name has defined them.
    """
    now, found = _tools(), []
    for name, tool in _TOOLS.items():
        library = name.partition(".")[0]
        foreign = library in ("time", "torch") and not str(tool.__module__).startswith(library)
        if foreign or now.get(name) is not tool:
            found.append(name)
    return found
