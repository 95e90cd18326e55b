"""The problems that profiles are shipped for: the GEMM and the other ops of the known models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetfire.bench.plan import BLOCKS, Case, choose_ops
from jetfire.ops import workloads
from jetfire.ops.op import Mode, Op

WORKLOADS = (*workloads.MODELS, "square")


def _settings(op: Op, mode: Mode, workload: str) -> list[dict[str, Any]]:
    """Which other fields are worth a profile of their own: those that decide what is written.

    Layouts, biases and roundings otherwise find the same shape's entry as their nearest.
    """
    if op.name != "gemm":
        return [{}]
    if workload == "square":
        return [{"out": out} for out in ("bf16", "fp16", "fp32", "int8")]
    rounding = "stochastic" if mode == "bwd" else "nearest"
    return [{}, {"out": "int8", "rounding": rounding}]


def cases(names: Sequence[str] = (), blocks: Sequence[str] = ()) -> list[Case]:
    """The problems of some ops and blocks (of all where none is named), each once.

    Those of an op that knows no blocks are found whatever the blocks.
    """
    found: dict[Case, None] = {}
    for op in choose_ops(names or ["all"]):
        has_blocks = "block" in op.Problem.__dataclass_fields__
        for fields in [{"block": b} for b in blocks or BLOCKS] if has_blocks else [{}]:
            for workload in WORKLOADS:
                for case in _of(op, workload, fields):
                    found[case] = None
    return list(found)


def _of(op: Op, workload: str, fields: Mapping[str, Any]) -> list[Case]:
    # A square has no direction: a GEMM's is the same problem in each.
    modes = op.modes[:1] if op.name == "gemm" and workload == "square" else op.modes
    return [
        Case(op, problem)
        for mode in modes
        for settings in _settings(op, mode, workload)
        for problem in workloads.problems(op, workload, mode, {**fields, **settings})
    ]
