"""What of an op `jetfire bench --suite` measures, as the op says it (`Op.timed`, `Op.exported`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# torch.compile takes 3 to 10 s a function and shape: it is timed once for each, not for each block.
COMPILED = ("eager", "compile", "copy")


@dataclass(frozen=True)
class Timed:
    """Problems of one op that are measured alike.

    Attributes:
        part: of the suite `results`, or a suite of its own.
        turn: within a part those of all ops with a lower one come first, then by the ops' names.
        modes, sizes, workload, blocks, settings: as in `jetfire.measure.plan.Request`.
        peers, kernels: those to time; None is all.
        rounds, power_ms, schedules: as in `jetfire.measure.runner.Options`.
        data: the inputs' distribution; None is the user's.
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
        problem: its fields.
        targets: None is every one.
        turn: as in `Timed`.
    """

    kernel: str
    problem: Mapping[str, Any]
    targets: Sequence[str] | None
    turn: int
