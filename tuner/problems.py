"""The problems that profiles are shipped for: of each op those of the known models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from jetfire.core import registry, workloads
from jetfire.core.op import Tuning
from jetfire.measure.plan import BLOCKS, Case, choose_ops

WORKLOADS = (*workloads.MODELS, "square")


@cache
def parts() -> dict[str, list[Case]]:
    """Return the problems that composite ops have for each op that is a part of them."""
    found: dict[str, list[Case]] = {}
    composites = [name for name in registry.names() if registry.get(name).composite]
    kernels = [kernel for name in composites for kernel in registry.kernels(name).values()]
    for kernel, workload in itertools.product(kernels, (*workloads.MODELS, *workloads.LAYERS)):
        for name, problem in kernel.parts(workload):
            found.setdefault(name, []).append(Case(registry.get(name), problem))
    return found


def cases(names: Sequence[str] = (), blocks: Sequence[str] = ()) -> list[Case]:
    """Return the problems of some ops and blocks (of all where none is named), each once.

    Those of an op that knows no blocks are found whatever the blocks.
    """
    found: dict[Case, None] = {}
    for op in choose_ops(names or ["all"]):
        if op.composite:
            continue
        if op.name in parts():
            found.update(dict.fromkeys(parts()[op.name]))
            continue
        has_blocks = "block" in op.Problem.__dataclass_fields__
        for fields in [{"block": b} for b in blocks or BLOCKS] if has_blocks else [{}]:
            for workload, mode in itertools.product(WORKLOADS, op.modes):
                for settings in op.shipped(workload, mode):
                    problems = workloads.problems(op, workload, mode, {**fields, **settings})
                    found.update(dict.fromkeys(Case(op, problem) for problem in problems))
    return list(found)


def commands() -> list[str]:
    """Return the words that have `jetfire tune` tune them: ops that are alike go together."""
    groups: dict[tuple[bool, int, Tuning], list[str]] = {}
    for name in registry.names():
        op = registry.get(name)
        if not op.composite:
            key = name in parts(), -op.tuning.trials, op.tuning
            groups.setdefault(key, []).append(name)
    lines = []
    for key in sorted(groups, key=lambda key: key[:2]):
        tuning = key[2]
        kernel = f" --kernel {tuning.kernel}" if tuning.kernel else ""
        how = f"--trials {tuning.trials} --peer {tuning.peer}"
        lines.append(f"{' '.join(groups[key])}{kernel} {how}")
    return lines


if __name__ == "__main__":
    print("\n".join(commands()))
