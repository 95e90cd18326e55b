"""What a layer's products take, in BF16, FP8 and INT8: measured here, or of the shipped rows.

A shipped row is one of `jetfire.bench.records`, else a profile's, of exactly the problem's
sizes and types; only its flags, whether a bias or the output's own value is added, may be others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jetfire.bench import records
from jetfire.bench.progress import watch
from jetfire.core import lookup, registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose
from jetfire.core.op import Op
from jetfire.core.terminal import note
from jetfire.measure.load import Load
from jetfire.measure.peaks import cached
from jetfire.measure.plan import Case
from jetfire.measure.runner import Options, Runner

BF16 = "cublas_bf16"
FP8 = ("fp8_scaled_mm", "fp8_scaled_mm_block")
_ROUNDS = 8


@dataclass(frozen=True)
class Time:
    """What one launch takes, in milliseconds, and what its peers take in the same run."""

    ms: float
    peers: Mapping[str, float]

    @property
    def bf16(self) -> float | None:
        return self.peers.get(BF16)

    @property
    def fp8(self) -> float | None:
        """The faster of FP8's with one scale a matrix and with scales of blocks; without casts."""
        return min((self.peers[name] for name in FP8 if name in self.peers), default=None)


class Times(Protocol):
    """Where times come from.

    Attributes:
        source: in words.
    """

    @property
    def source(self) -> str: ...

    def time(self, op: Op, problem: Any) -> Time | None:
        """Return what a problem takes; None where nothing tells."""


class Shipped:
    """The times that the package holds for a device, which need not be here."""

    def __init__(self, rows: records.ShippedRows) -> None:
        self.source = f"shipped rows of {rows.name}"
        self.device = replace(target_device(rows.capability), name=rows.name)
        self._rows = rows.by_problem()

    def time(self, op: Op, problem: Any) -> Time | None:
        for alike in _alike(problem):
            if row := self._rows.get((op.name, alike)):
                return Time(row.ms, row.peers)
        return next(filter(None, (self._tuned(op, alike) for alike in _alike(problem))), None)

    def _tuned(self, op: Op, problem: Any) -> Time | None:
        """Return what the fastest of the tuned kernels took when they were tuned."""
        kernels = registry.kernels(op.name).values()
        found = (lookup.exact(op, kernel, problem, self.device) for kernel in kernels)
        entries = [one.entry for one in found if one is not None and one.entry is not None]
        best = min(entries, key=lambda entry: entry.ms, default=None)
        if best is None:
            return None
        return Time(best.ms, {name: ratio * best.ms for name, ratio in best.vs_peer.items()})


def _alike(problem: Any) -> Iterator[Any]:
    """Yield a problem, then those that differ from it in flags alone."""
    fields = dataclasses.fields(problem)
    flags = [
        field.name
        for field in fields
        if type(getattr(problem, field.name)) is bool and field.name not in problem.extras
    ]
    own = tuple(getattr(problem, flag) for flag in flags)
    for values in sorted(itertools.product((False, True), repeat=len(flags)), key=own.__ne__):
        yield replace(problem, **dict(zip(flags, values, strict=True)))


class Measured:
    """Times measured on this machine's GPU, of the kernel that a layer would launch."""

    def __init__(self, device: Device, seed: int, debug: bool) -> None:
        self.device, self.source = device, f"measured on {device.name}"
        self.options = Options(rounds=_ROUNDS, seed=seed, debug=debug)
        load = Load(device)
        self.runner = Runner(device, cached(load), self.options, note, load.monitor)
        self._known: dict[tuple[str, Any], Time | None] = {}

    def measure(self, problems: Iterable[tuple[Op, Any]]) -> None:
        """Measure what is not known of some problems, and show how far it is."""
        cases = dict.fromkeys(Case(op, problem) for op, problem in problems)
        for case in watch(list(cases), str):
            self.time(case.op, case.problem)

    def time(self, op: Op, problem: Any) -> Time | None:
        key = op.name, problem
        if key not in self._known:
            self._known[key] = self._measured(Case(op, problem))
        return self._known[key]

    def _measured(self, case: Case) -> Time | None:
        """Return the kernel's time; None where none takes the problem, as for whatever is noted."""
        try:
            kernel, _ = choose(case.op, case.problem, self.device)
        except UsageError as error:
            note(str(error))
            return None
        rivals = (BF16, *FP8) if case.op.flops(case.problem) else ()
        options = replace(self.options, kernels=[kernel.name], peers=rivals)
        rows = self.runner.measure(case, options)
        ours = [row.ms for row in rows if row.role == "kernel" and row.ok and row.ms is not None]
        peers = {row.kernel: row.ms for row in rows if row.role == "peer" and row.ms is not None}
        return Time(ours[0], peers) if ours else None


@dataclass(frozen=True)
class Cost:
    """What one layer's forward and backward take in a step, in milliseconds.

    Attributes:
        products, rest: of the three products in INT8; of what is launched beside them. None where
            a part of it is not known.
        bf16, fp8: of the same products in BF16 and in FP8, without casts.
        launches: how many kernels it launches; missing: problems of theirs that nothing tells of.
    """

    products: float | None
    rest: float | None
    bf16: float | None
    fp8: float | None
    launches: int
    missing: tuple[str, ...]

    @property
    def total(self) -> float | None:
        if self.products is None or self.rest is None:
            return None
        return self.products + self.rest


def cost_of(problems: Iterable[tuple[Op, Any]], count: int, times: Times) -> Cost:
    """Return what a layer costs whose converted form asks for these problems.

    Args:
        count: how often a step calls it.
    """
    found = [(op, problem, times.time(op, problem)) for op, problem in problems]
    products = [time for op, problem, time in found if op.flops(problem)]
    rest = [time for op, problem, time in found if not op.flops(problem)]
    missing = [f"{op.name} {problem}" for op, problem, time in found if time is None]
    return Cost(
        _sum(count, products, lambda time: time.ms),
        _sum(count, rest, lambda time: time.ms),
        _sum(count, products, lambda time: time.bf16),
        _sum(count, products, lambda time: time.fp8),
        len(found),
        tuple(missing),
    )


def _sum(
    count: int, times: Iterable[Time | None], of: Callable[[Time], float | None]
) -> float | None:
    """Return the sum of something of the times, or None where one of it is not known."""
    total = 0.0
    for time in times:
        value = None if time is None else of(time)
        if value is None:
            return None
        total += value
    return count * total


def shipped() -> Shipped:
    """Return the shipped times; of one device, that with the most rows."""
    return Shipped(max(records.rows().values(), key=lambda device: len(device.rows)))
