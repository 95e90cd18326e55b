"""An op's part in `jetfire bench --suite`, as the op states it (`Op.timed`, `Op.exported`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PRODUCTS = "gemm"  # the part of the INT8 products, as users type it
PARTS = ("targets", PRODUCTS, "elementwise", "int4")  # of the suite `results`, in this order

# torch.compile takes 3 to 10 s per function and shape: it is timed once per shape, not per block.
COMPILED = ("eager", "compile", "copy")
# Of readings over 200 ms a fifth exceeded the board's cap: 60 of 291 (H200, 700 W).
STEADY_MS = 2000.0


@dataclass(frozen=True)
class Timed:
    """Problems of one op that are measured alike.

    Attributes:
        part: the name of a part of the suite `results`, or of a suite of its own.
        turn: the place within a part: problems of all ops with a lower one come first, those with
            an equal one are ordered by their ops' names.
        modes, sizes, workload, blocks, settings: as in `jetfire.measure.plan.Request`.
        peers, kernels: the names to time; None is all.
        rounds, power_ms, schedules: as in `jetfire.measure.runner.Options`.
        data: the inputs' distribution; None is the one that the user gave.
    """

    part: str
    turn: int = 0
    modes: Sequence[str] = ("fwd",)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    workload: str | None = None
    blocks: Sequence[str] | None = None
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    peers: Sequence[str] | None = None
    kernels: Sequence[str] | None = None
    rounds: int = 10
    power_ms: float = 0.0
    schedules: bool = False
    data: str | None = None


@dataclass(frozen=True)
class Exported:
    """An export that is built, tested and timed beside the workbench.

    Attributes:
        problem: the problem's fields.
        targets: names of export targets; None is all.
        turn: as in `Timed`.
    """

    kernel: str
    problem: Mapping[str, Any]
    targets: Sequence[str] | None
    turn: int
