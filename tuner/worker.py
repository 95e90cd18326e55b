"""Child processes that compile and measure; whatever happens to one costs its config alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jetfire.core.device import Device
from jetfire.tuner.trial import Measurement, Outcome

# Said once a worker has started and made what it needs: from here on its time is the config's.
BEGUN = "begun"
START = "start"  # a request for nothing but that


@dataclass(frozen=True)
class NotSetUp:
    """Why a job's inputs or expected results cannot be made: no config is to blame."""

    reason: str


def compile_configs(connection: Connection, capability: tuple[int, int]) -> None:
    """Answers ``(kernel, problem, config)`` with None, or why the config does not compile.

    Every request is answered by `BEGUN` first, then by a pair: the answer, and that the worker is
    fit for more.
    """
    from jetfire.tuner.measure import outcome_of

    while True:
        request = connection.recv()
        connection.send(BEGUN)
        if request == (START,):
            continue
        kernel, problem, config = request
        begin = time.perf_counter()
        answer = None
        try:
            kernel.cubins(problem, config, capability)
        except Exception as error:
            outcome: Outcome = "illegal" if outcome_of(error) == "illegal" else "compile"
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome, message=message, seconds=time.perf_counter() - begin)
        connection.send((answer, True))


def measure_configs(connection: Connection, device_name: str) -> None:
    """Answers ``("measure", job, config)`` and ``("compare", job, configs, budget_s)``.

    An answer is a Measurement or a Comparison. As in `compile_configs` it comes after `BEGUN`, and
    with whether the worker is fit for more: not after an error that leaves the device's context
    unusable. Where the job cannot be set up there is no `BEGUN`, and the answer is a NotSetUp.
    """
    import torch

    from jetfire.tuner.measure import Bench, outcome_of

    device = Device.parse(device_name)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
    bench: Bench | None = None
    while True:
        request = connection.recv()
        if request == (START,):
            connection.send(BEGUN)
            continue
        verb, job, *rest = request
        begin = time.perf_counter()
        answer: Any
        try:
            if bench is None or bench.job.key != job.key:
                bench = None
                if device.kind == "cuda":
                    torch.cuda.empty_cache()
                bench = Bench(job, device)
        except Exception as error:
            connection.send((NotSetUp(f"{type(error).__name__}: {error}"), _usable(device)))
            continue
        connection.send(BEGUN)
        try:
            answer = getattr(bench, verb)(*rest)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(
                outcome_of(error), message=message, seconds=time.perf_counter() - begin
            )
        connection.send((answer, _usable(device)))


def _usable(device: Device) -> bool:
    """The device still works: an illegal address, say, is reported by every later call."""
    if device.kind != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize(device.index)
    except Exception:
        return False
    return True
