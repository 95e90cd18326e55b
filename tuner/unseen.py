"""How far what a lookup gives is from what tuning gives, at shapes that no profile is for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np

from jetfire.core import lookup
from jetfire.core.device import Device
from jetfire.core.errors import NoDeviceError
from jetfire.core.launch import in_turn
from jetfire.core.op import Op
from jetfire.measure.plan import BLOCKS, Case
from jetfire.report.text import plural
from jetfire.report.tuned import LOOKUPS_SCHEMA, NEAR
from jetfire.tuner.options import TuneOptions
from jetfire.tuner.search import FinishedSearch, SearchTarget
from jetfire.tuner.space import Space
from jetfire.tuner.trial import digits

SMALLEST, LARGEST = 512, 16384


def targets(asked: TuneOptions, device: Device) -> list[SearchTarget]:
    """Return as many problems as are asked for, by op in turn, with the kernel a model would run.

    Sizes are spread evenly in their logarithm, multiples of 8 rows and of 16 otherwise, or of a
    Hadamard group's 32: a step may have any number of tokens, while a layer's widths are round.

    Raises:
        NoDeviceError: no kernel takes enough of them on this device.
    """
    rng, count = np.random.default_rng(asked.seed), asked.unseen
    ops = list(dict.fromkeys(case.op for case in asked.cases))
    found: dict[Any, SearchTarget] = {}
    for attempt in range(100 * count):
        if len(found) == count:
            return list(found.values())
        op = ops[attempt % len(ops)]
        problem = _draw(op, rng)
        for kernel in in_turn(op, problem, device):
            known = lookup.find(op, kernel, problem, device)
            if kernel.legal(problem, known.config, device) is None:
                if known.source != "tuned" and kernel.space(problem, device):
                    space = Space.of(kernel, problem, device)
                    found.setdefault(problem, SearchTarget(Case(op, problem), kernel, space))
                break
    raise NoDeviceError(f"--unseen {count}: no kernel takes such problems on {device.label}")


def _draw(op: Op, rng: np.random.Generator) -> Any:
    low, high = math.log(SMALLEST), math.log(LARGEST)
    sizes = np.exp(rng.uniform(low, high, len(op.dims)))
    width = 32 if "group" in op.Problem.__dataclass_fields__ else 16
    units = [8] + [width] * (len(op.dims) - 1)
    dims = {d: int(u * round(s / u)) for d, s, u in zip(op.dims, sizes, units, strict=True)}
    block = BLOCKS[int(rng.integers(len(BLOCKS)))]
    has_blocks = "block" in op.Problem.__dataclass_fields__
    kinds = op.kinds({**dims, "block": block} if has_blocks else dims)
    return kinds[int(rng.integers(len(kinds)))]


def rows(tuned: Sequence[FinishedSearch]) -> list[dict[str, Any]]:
    """Return a row per problem: times of the lookup's config, the default and the tuned one."""
    found = []
    for one in tuned:
        final, op, problem = one.final, one.target.case.op, one.target.case.problem
        if final.before is None or final.default is None:
            continue
        entry, distance = one.found.entry, None
        if entry is not None:
            ratios = [math.log2(getattr(problem, d) / entry.problem[d]) for d in op.dims]
            distance = round(math.hypot(*ratios), 3)
        row = {
            "op": op.name,
            "kernel": one.target.kernel.name,
            "problem": problem.as_dict(),
            "source": one.found.source,
            "distance": distance,
            "lookup_ms": digits(final.before.ms),
            "default_ms": digits(final.default.ms),
            "tuned_ms": digits(min(t.ms for t in (final.timing, final.before, final.default))),
            "trials": len(one.trials),
        }
        found.append(row)
    return found


def conclusion(found: Sequence[Mapping[str, Any]]) -> str:
    """Return one line: how many lookups are near, and the worst."""
    ratios = sorted(row["lookup_ms"] / row["tuned_ms"] for row in found)
    if not ratios:
        return "no lookup was compared"
    near = sum(ratio <= NEAR for ratio in ratios)
    return (
        f"{near} of {plural(len(ratios), 'lookup')} within {NEAR - 1:.0%} of what tuning gives; "
        f"geometric mean {geometric_mean(ratios) - 1:.1%} slower, worst {ratios[-1] - 1:.1%}"
    )


def render(found: Sequence[Mapping[str, Any]], device: Mapping[str, Any], seed: int) -> str:
    """Return a lookups file of the rows, as JSON with a line for each."""
    lines = ",\n".join(json.dumps(row) for row in found)
    head = json.dumps({"schema": LOOKUPS_SCHEMA, "device": dict(device), "seed": seed})[:-1]
    return f'{head},\n"rows": [\n{lines}\n]}}\n'
