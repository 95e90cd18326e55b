"""The one timer: of the bench, the tuner and the tests.

Every variant is captured once in a CUDA graph of `repeats` calls that walk over its input sets, so
that the host's launch cost is out of the figure and no call finds its inputs in the L2 cache. The
graphs are then replayed in turn, one of each a round, so that a drift of clock or power hits all
alike; each replay is one sample. On the CPU the same loop reads the host's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

VERSION = 1
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, the 20th and the 80th percentile of the samples."""

    ms: float
    ms_p20: float
    ms_p80: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        p20, median, p80 = np.percentile(np.asarray(samples), (20, 50, 80))
        return cls(float(median), float(p20), float(p80), len(samples))


def input_sets(bytes_a_call: int, l2_bytes: int) -> int:
    """How many sets of inputs and outputs to rotate among, so that each call finds a cold L2."""
    return max(1, min(32, math.ceil(3 * l2_bytes / max(1, bytes_a_call))))


def _graph(calls: Sequence[Call], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    return graph


def _time_cuda(
    variants: Mapping[str, Sequence[Call]], rounds: int, sample_ms: float
) -> dict[str, list[float]]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def elapsed(work: Call) -> float:
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    graphs, repeats = {}, {}
    for name, calls in variants.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # graphs are captured on a side stream: warm up on one too
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        once = _graph(calls, len(calls))
        once.replay()
        one = min(elapsed(once.replay) for _ in range(2)) / len(calls)
        wanted = max(1, round(sample_ms / one))
        repeats[name] = math.ceil(wanted / len(calls)) * len(calls)
        graphs[name] = once if repeats[name] == len(calls) else _graph(calls, repeats[name])
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 2):  # two rounds bring clock and power to where they settle
        for name, graph in graphs.items():
            ms = elapsed(graph.replay) / repeats[name]
            if i >= 2:
                samples[name].append(ms)
    return samples


def _time_cpu(
    variants: Mapping[str, Sequence[Call]], rounds: int, sample_ms: float
) -> dict[str, list[float]]:
    def elapsed(calls: Sequence[Call], repeats: int) -> float:
        begin = time.perf_counter()
        for i in range(repeats):
            calls[i % len(calls)]()
        return (time.perf_counter() - begin) * 1e3 / repeats

    repeats = {}
    for name, calls in variants.items():
        elapsed(calls, len(calls))
        repeats[name] = max(1, round(sample_ms / elapsed(calls, len(calls))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, calls in variants.items():
            samples[name].append(elapsed(calls, repeats[name]))
    return samples


def time_calls(
    variants: Mapping[str, Sequence[Call]],
    device: torch.device,
    rounds: int = 20,
    sample_ms: float = 2.0,
) -> dict[str, Timing]:
    """Time variants against each other.

    Args:
        variants: name → calls that do the same work on different inputs (`input_sets` of them).
        device: where they run.
        rounds: samples a variant.
        sample_ms: the least a sample should last, in milliseconds.

    Returns:
        name → milliseconds a call.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            samples = _time_cuda(variants, rounds, sample_ms)
    else:
        samples = _time_cpu(variants, rounds, sample_ms)
    return {name: Timing.of(values) for name, values in samples.items()}
