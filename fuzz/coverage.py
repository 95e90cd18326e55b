"""What an example is a case of, for the summary's counts."""

from __future__ import annotations

from jetfire.core import registry
from jetfire.fuzz.draw import TALL, UNCOUNTED
from jetfire.fuzz.example import Example, Outcome


def is_huge(case: Example) -> bool:
    """Whether two of its sizes make a matrix of more elements than 32 bits count."""
    dims = [case.problem[name] for name in registry.get(case.op).dims]
    return any(a * b > UNCOUNTED for i, a in enumerate(dims) for b in dims[i + 1 :])


def traits(case: Example, outcome: Outcome) -> list[str]:
    """Names of what a case covers."""
    dims = [case.problem[name] for name in registry.get(case.op).dims]
    block: int = case.problem.get("block") or case.problem.get("group", 32)
    block = max(block, case.problem.get("out_block", block))
    found = {
        "skipped": outcome.kind == "skipped",
        "known reports": outcome.known > 0,
        "empty": case.empty,
        "ragged": any(size % max(block, 2) for size in dims),
        "two blocks": "out_block" in case.problem,
        "whole": not any(size % 16 for size in dims),
        "one": 1 in dims,
        "tall": max(dims) >= min(TALL) - 1,
        "huge": is_huge(case) and outcome.checked,
        "edges": case.edges,
        "strided": any(padding for padding, _ in case.layout.values()),
        "moved": any(offset for _, offset in case.layout.values()) or case.offset > 0,
        "compared": case.other is not None,
        "stochastic": case.problem.get("rounding") == "stochastic",
        "backward": case.problem.get("mode") == "bwd",
    }
    data = [f"data {name}" for name in dict.fromkeys(case.data.split("/"))]
    return [name for name, true in found.items() if true] + data
