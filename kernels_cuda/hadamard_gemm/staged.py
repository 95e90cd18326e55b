"""A linear layer in 4 bits as the launches of its ops' kernels, one after another on a stream.

Each stage runs the kernel and the config that a model's own call would. It has no code of its own
for any device, and runs where every stage has a kernel: on the CPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from jetfire.core import registry, workloads
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import capacity
from jetfire.core.kernel import Config, Kernel
from jetfire.core.launch import choose
from jetfire.core.tensors import Tensors
from jetfire.ops.bit_split import BitSplitProblem
from jetfire.ops.gather_rows import GatherRowsProblem
from jetfire.ops.hadamard_gemm import HadamardGemmProblem
from jetfire.ops.hadamard_quantize import HadamardQuantizeProblem
from jetfire.ops.int4_gemm import Int4GemmProblem
from jetfire.ops.sample_rows import SampleRowsProblem


@dataclass(frozen=True)
class StagedConfig(Config):
    """A config without choices: each stage has its own."""


@dataclass(frozen=True)
class Stage:
    """A launch of an op: its input and output names, each with the tensor's name here."""

    name: str
    op: str
    problem: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def _forward(p: HadamardGemmProblem) -> tuple[Stage, ...]:
    """List the forward's stages; x's codes are written twice, packed for backward and wide."""
    kind: dict[str, Any] = {"group": p.group, "dtype": p.dtype, "mode": "fwd"}
    return (
        Stage(
            "quantize_x",
            "hadamard_quantize",
            HadamardQuantizeProblem(p.m, p.k, **kind, layout="both"),
            {"x": "x", "step": "step_x"},
            {"q": "q", "wide": "x_codes", "scale": "x_scale", "squares": "squares"},
        ),
        Stage(
            "quantize_w",
            "hadamard_quantize",
            HadamardQuantizeProblem(p.n, p.k, **kind, layout="wide"),
            {"x": "w", "step": "step_w"},
            {"wide": "w_codes", "scale": "w_scale", "squares": "w_squares"},
        ),
        Stage(
            "gemm",
            "int4_gemm",
            Int4GemmProblem(p.m, p.n, p.k, operands="wide", out=p.dtype),
            {"a": "x_codes", "a_scale": "x_scale", "b": "w_codes", "b_scale": "w_scale"},
            {"c": "c"},
        ),
    )


def _backward(p: HadamardGemmProblem) -> tuple[Stage, ...]:
    split = Stage(
        "bit_split",
        "bit_split",
        BitSplitProblem(p.m, p.n, dtype=p.dtype),
        {"x": "g", "seed": "seed_split"},
        {"q": "g_codes", "unit": "unit", "squares": "g_squares"},
    )
    return (split, *_input_gradient(p), *_weight_gradient(p))


def _input_gradient(p: HadamardGemmProblem) -> tuple[Stage, ...]:
    room = capacity(p.m, 2, "dgrad", "half")
    return (
        Stage(
            "dgrad_sample",
            "sample_rows",
            SampleRowsProblem(p.m, product="dgrad"),
            {"squares": "g_squares", "seed": "seed_dgrad"},
            {"rows": "d_rows", "counts": "d_counts", "weight": "d_weight", "slots": "slots"},
        ),
        Stage(
            "dgrad_gather",
            "gather_rows",
            GatherRowsProblem(2 * p.m, p.n, rows=room, wide=True),
            {"q": "g_codes", "rows": "d_rows", "counts": "d_counts"},
            {"codes": "g_kept"},
        ),
        Stage(
            "dgrad_gemm",
            "int4_gemm",
            Int4GemmProblem(room, p.k, p.n, operands="wide", product="dgrad", out=p.dtype),
            {
                "a": "g_kept",
                "a_scale": "unit",
                "b": "wt",
                "b_scale": "w_scale",
                "weight": "d_weight",
                "counts": "d_counts",
            },
            {"c": "dx_hat"},
        ),
        Stage(
            "dgrad_hadamard",
            "hadamard_quantize",
            HadamardQuantizeProblem(
                p.m, p.k, group=p.group, dtype=p.dtype, mode="bwd", gathered=True
            ),
            {"dx_hat": "dx_hat", "q": "q", "slots": "slots", "unit": "unit"},
            {"dx": "dx"},
        ),
    )


def _weight_gradient(p: HadamardGemmProblem) -> tuple[Stage, ...]:
    room = capacity(p.m, 2, "wgrad", "half")
    return (
        Stage(
            "wgrad_sample",
            "sample_rows",
            SampleRowsProblem(p.m, product="wgrad"),
            {"squares": "g_squares", "x_squares": "squares", "seed": "seed_wgrad"},
            {"rows": "w_rows", "counts": "w_counts", "repeat": "w_repeat"},
        ),
        Stage(
            "wgrad_gather_g",
            "gather_rows",
            GatherRowsProblem(2 * p.m, p.n, rows=room, repeat=True, transpose=True),
            {"q": "g_codes", "rows": "w_rows", "counts": "w_counts", "repeat": "w_repeat"},
            {"codes": "gt"},
        ),
        Stage(
            "wgrad_gather_x",
            "gather_rows",
            GatherRowsProblem(p.m, p.k, rows=room, transpose=True),
            {"q": "q", "rows": "w_rows", "counts": "w_counts"},
            {"codes": "xt"},
        ),
        Stage(
            "wgrad_gemm",
            "int4_gemm",
            Int4GemmProblem(p.n, p.k, room, operands="wide", product="wgrad", out=p.dtype),
            {"a": "gt", "a_scale": "unit", "b": "xt", "b_scale": "x_scale", "counts": "w_counts"},
            {"c": "dw_hat"},
        ),
        Stage(
            "wgrad_hadamard",
            "hadamard_quantize",
            HadamardQuantizeProblem(p.n, p.k, group=p.group, dtype=p.dtype, mode="bwd", given="x"),
            {"dx_hat": "dw_hat", "x": "w", "step": "w_scale"},
            {"dx": "dw", "dstep": "dstep_w"},
        ),
    )


@cache
def plan(problem: HadamardGemmProblem) -> tuple[Stage, ...]:
    """Return the stages of a problem, in order.

    Raises:
        UsageError: a stage's op does not take its part of the problem.
    """
    return _backward(problem) if problem.mode == "bwd" else _forward(problem)


class Staged(Kernel):
    op = "hadamard_gemm"
    name = "staged"
    Config = StagedConfig

    def legal(
        self, problem: HadamardGemmProblem, config: StagedConfig, device: Device
    ) -> str | None:
        try:
            stages = plan(problem)
        except UsageError as error:
            return str(error)
        for stage in stages:
            reasons = [
                kernel.legal(stage.problem, kernel.default(stage.problem, device), device)
                for kernel in registry.kernels(stage.op).values()
            ]
            if None not in reasons:
                return f"{stage.name}: no kernel of {stage.op}: {'; '.join(map(str, reasons))}"
        return None

    def default(self, problem: HadamardGemmProblem, device: Device) -> StagedConfig:
        return StagedConfig()

    def space(self, problem: HadamardGemmProblem, device: Device) -> dict[str, Sequence[Any]]:
        return {}

    def stages(
        self, problem: HadamardGemmProblem, config: StagedConfig, inputs: Tensors, outputs: Tensors
    ) -> dict[str, Callable[[], None]]:
        device = Device.of(next(iter(inputs.values())))
        tensors = {**inputs, **outputs}
        return {stage.name: _prepared(stage, device, tensors) for stage in plan(problem)}

    def parts(self, workload: str) -> list[tuple[str, Any]]:
        """Return the stages' problems, the product of packed codes, a weight's transpose (`wt`).

        The INT4 paper's layers are timed like this. In training, weights and their gradients are
        fp32.
        """
        op, trained = registry.get(self.op), workload in workloads.MODELS
        forward: list[Any] = workloads.problems(op, workload, "fwd", {})
        backward: list[Any] = workloads.problems(op, workload, "bwd", {})
        stages = [stage for problem in (*forward, *backward) for stage in plan(problem)]
        found = [(s.op, _trained(s.problem) if trained else s.problem) for s in stages]
        for p in forward:
            found.append(("int4_gemm", Int4GemmProblem(p.m, p.n, p.k)))
            if trained:
                transpose = GatherRowsProblem(p.n, p.k, transpose=True, wide=True)
                found.append(("gather_rows", transpose))
        return found

    def launch(
        self, problem: HadamardGemmProblem, config: StagedConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        for run in self.stages(problem, config, inputs, outputs).values():
            run()


def _trained(problem: Any) -> Any:
    """Return a stage's problem as in training, where weights and their gradients are fp32."""
    if isinstance(problem, HadamardQuantizeProblem) and problem.layout == "wide":
        return replace(problem, dtype="fp32", layout="both")
    if isinstance(problem, HadamardQuantizeProblem) and problem.given == "x":
        return replace(problem, dtype="fp32")
    if isinstance(problem, Int4GemmProblem) and problem.product == "wgrad":
        return replace(problem, out="fp32")
    return problem


def _prepared(stage: Stage, device: Device, tensors: Tensors) -> Callable[[], None]:
    """Return the launch of a stage, into those of `tensors` or else new ones."""
    op = registry.get(stage.op)
    kernel, config = choose(op, stage.problem, device)
    inputs = {name: tensors[here] for name, here in stage.inputs.items()}
    outputs: dict[str, torch.Tensor] = {}
    for name, made in op.outputs(stage.problem, inputs).items():
        outputs[name] = tensors.setdefault(stage.outputs[name], made)
    return lambda: kernel.launch(stage.problem, config, inputs, outputs)
