"""The problems that profiles are shipped for: of each op those of the known models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetfire.bench import suite
from jetfire.core import registry, workloads
from jetfire.core.contract import Mode, Op
from jetfire.kernels_cuda.hadamard_gemm.staged import plan
from jetfire.measure.plan import BLOCKS, Case, choose_ops

WORKLOADS = (*workloads.MODELS, "square")
# Of several ops' kernels: nothing is its own to be tuned.
COMPOSITE = ("hadamard_gemm",)
# Their shapes follow from one another's: they have the problems of a layer in 4 bits.
INT4 = tuple(name for name in suite.INT4 if name not in COMPOSITE)
INT4_WORKLOADS = (*workloads.MODELS, *workloads.LAYERS)


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
        if op.name in COMPOSITE:
            continue
        if op.name in INT4:
            found.update(dict.fromkeys(_of_layers(op)))
            continue
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


def _of_layers(op: Op) -> Iterator[Case]:
    """What layers in 4 bits ask of an op: the models' with fp32 weights, the paper's as timed."""
    layer = registry.get("hadamard_gemm")
    for workload in INT4_WORKLOADS:
        for mode in layer.modes:
            for problem in workloads.problems(layer, workload, mode, {}):
                for stage in plan(problem):
                    if stage.op == op.name:
                        yield Case(op, _trained(op, stage.problem, workload))
        if op.name == "int4_gemm":
            yield from (Case(op, p) for p in workloads.problems(op, workload, "fwd", {}))
        if op.name == "gather_rows" and workload in workloads.MODELS:
            for out, inp in workloads.MODELS[workload].linears():
                yield Case(op, op.Problem(out, inp, transpose=True, wide=True))


def _trained(op: Op, problem: Any, workload: str) -> Any:
    """A stage's problem as a model in training has it: weights and their gradients are fp32."""
    if workload not in workloads.MODELS:
        return problem
    if op.name == "hadamard_quantize" and problem.layout == "wide":
        return dataclasses.replace(problem, dtype="fp32", layout="both")
    if op.name == "hadamard_quantize" and problem.given == "x":
        return dataclasses.replace(problem, dtype="fp32")
    if op.name == "int4_gemm" and problem.product == "wgrad":
        return dataclasses.replace(problem, out="fp32")
    return problem
