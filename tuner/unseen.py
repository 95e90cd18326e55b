"""How far what a lookup gives is from what tuning gives, at shapes that no profile is for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jetfire.core import files, profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.measure.plan import BLOCKS
from jetfire.report.text import mean
from jetfire.report.tuned import LOOKUPS_SCHEMA, NEAR
from jetfire.tuner.session import FinishedSearch
from jetfire.tuner.trial import digits

SMALLEST, LARGEST = 512, 16384


def draw(names: Sequence[str], count: int, seed: int, device: Device) -> list[tuple[Kernel, Any]]:
    """Problems of some ops in turn, each with the kernel that a model would run.

    Sizes are spread evenly in their logarithm, multiples of 8 rows and of 16 otherwise, or of a
    Hadamard group's 32: a step may have any number of tokens, while a layer's widths are round.

    Raises:
        UsageError: no kernel takes any of them on this device.
    """
    rng = np.random.default_rng(seed)
    found: dict[Any, tuple[Kernel, Any]] = {}
    for attempt in range(100 * count):
        if len(found) == count:
            return list(found.values())
        op = registry.get(names[attempt % len(names)])
        problem = _draw(op, rng)
        kernel = _chosen(op, problem, device)
        if kernel is not None and profiles.find(kernel, problem, device).source != "tuned":
            found.setdefault(problem, (kernel, problem))
    raise UsageError(f"--unseen {count}: no kernel takes such problems on {device.label}")


def _draw(op: Op, rng: np.random.Generator) -> Any:
    low, high = math.log(SMALLEST), math.log(LARGEST)
    sizes = np.exp(rng.uniform(low, high, len(op.dims)))
    width = 32 if "group" in op.Problem.__dataclass_fields__ else 16
    units = [8] + [width] * (len(op.dims) - 1)
    dims = {d: int(u * round(s / u)) for d, s, u in zip(op.dims, sizes, units, strict=True)}
    block = BLOCKS[int(rng.integers(len(BLOCKS)))]
    has_blocks = "block" in op.Problem.__dataclass_fields__
    fields: dict[str, Any] = {**dims, "block": block} if has_blocks else {**dims}
    kinds = op.kinds(fields)
    return kinds[int(rng.integers(len(kinds)))]


def _chosen(op: Op, problem: Any, device: Device) -> Kernel | None:
    for kernel in registry.kernels(op.name).values():
        config = profiles.find(kernel, problem, device).config
        if kernel.legal(problem, config, device) is None:
            return kernel if kernel.space(problem, device) else None
    return None


def rows(tuned: Sequence[FinishedSearch]) -> list[dict[str, Any]]:
    """A row a problem: times of the lookup's config, the default and the tuned one, in one run."""
    return [_row(t) for t in tuned if t.final.before is not None and t.final.default is not None]


def _row(tuned: FinishedSearch) -> dict[str, Any]:
    final, problem, entry = tuned.final, tuned.target.case.problem, tuned.found.entry
    assert final.before is not None
    assert final.default is not None
    return {
        "op": tuned.target.case.op.name,
        "kernel": tuned.target.kernel.name,
        "problem": problem.as_dict(),
        "source": tuned.found.source,
        "distance": None if entry is None else _distance(tuned, entry.problem),
        "lookup_ms": digits(final.before.ms),
        "default_ms": digits(final.default.ms),
        "tuned_ms": digits(min(t.ms for t in (final.timing, final.before, final.default))),
        "trials": len(tuned.study.finished()),
    }


def _distance(tuned: FinishedSearch, other: Mapping[str, Any]) -> float:
    problem = tuned.target.case.problem
    ratios = [math.log2(getattr(problem, d) / other[d]) for d in tuned.target.case.op.dims]
    return round(math.hypot(*ratios), 3)


def conclusion(found: Sequence[Mapping[str, Any]]) -> str:
    """One line: how many lookups are near, and the worst."""
    ratios = sorted(row["lookup_ms"] / row["tuned_ms"] for row in found)
    if not ratios:
        return "no lookup was compared"
    near = sum(ratio <= NEAR for ratio in ratios)
    return (
        f"{near} of {len(ratios)} lookups are within {NEAR - 1:.0%} of what tuning gives; "
        f"geometric mean {mean(ratios) - 1:.1%} slower, worst {ratios[-1] - 1:.1%}"
    )


def write(
    found: Sequence[Mapping[str, Any]], device: Mapping[str, Any], seed: int, file: Path
) -> None:
    """Keep the rows.

    Raises:
        UsageError: the file cannot be written.
    """
    lines = ",\n".join(json.dumps(row) for row in found)
    head = json.dumps({"schema": LOOKUPS_SCHEMA, "device": dict(device), "seed": seed})[:-1]
    files.write(file, f'{head},\n"rows": [\n{lines}\n]}}\n')
