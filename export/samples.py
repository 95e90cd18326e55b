"""Recorded inputs and expected outputs, small enough to be part of an export."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.core.kernel import Kernel
from jetfire.core.launch import verify
from jetfire.core.op import Op
from jetfire.core.tensors import Tensors
from jetfire.export.plan import ExportPlan

# Every byte of an output before it is written, here and in self-tests: NaN, or a code that is none.
UNWRITTEN = 0xFF
# No multiple of 128, so that blocks of every size are cut off at an edge; all are of 16 bytes.
SMALL = {"m": 208, "n": 336, "k": 416}
# For what takes no such sizes.
LARGER = {"m": 256, "n": 1024, "k": 1024}
# ‖out − expected‖/‖expected‖ that rounding may cost: of codes, one in some hundreds may be a
# neighbour's; of floats about a unit in the last place.
TOLERANCE = {
    torch.int8: 1e-2,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-10,
    torch.float32: 1e-3,
}


@dataclass(frozen=True)
class Sample:
    """A small problem with all that a run of it reads and should write.

    Attributes:
        config: the plan's first; legal for the problem.
        inputs, expected: by the parameters' names, on the CPU and contiguous; an updated tensor is
            in both.
        tolerance: of each expected tensor's relative error; 0 where its bits must be equal.
    """

    problem: Any
    config: Any
    inputs: Tensors
    expected: Tensors
    tolerance: dict[str, float]

    def files(self) -> dict[str, bytes]:
        """Return `samples/<name>.bin` and `samples/expected_<name>.bin`, raw and little-endian."""
        found = {f"samples/{name}.bin": _bytes(t) for name, t in self.inputs.items()}
        found |= {f"samples/expected_{name}.bin": _bytes(t) for name, t in self.expected.items()}
        return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def small_problem(plan: ExportPlan) -> Any:
    """The plan's problem at small sizes, legal with its first config.

    Raises:
        UsageError: there is none.
    """
    for sizes in (SMALL, LARGER):
        try:
            problem = dataclasses.replace(plan.problem, **{d: sizes[d] for d in plan.op.dims})
        except UsageError:
            continue
        if plan.kernel.legal(problem, plan.configs[0], plan.device) is None:
            return problem
    raise UsageError(
        f"{plan.op.name}/{plan.kernel.name}: no small problem is legal with its config"
    )


def _run_on_the_cpu(kernel: Kernel, op: Op, problem: Any, inputs: Tensors) -> Tensors:
    """Return what an op's kernel for the CPU writes, checked against the reference."""
    config = kernel.Config()
    check = verify(op, kernel, problem, config, inputs)
    assert check.ok, check.message
    outputs = op.outputs(problem, inputs)
    for name, tensor in outputs.items():
        if name not in op.updated(problem):
            tensor.view(-1).view(torch.uint8).fill_(UNWRITTEN)
    kernel.launch(problem, config, inputs, outputs)
    return outputs


def _rounded(op: Op, problem: Any, inputs: Tensors) -> Tensors:
    """Return the reference's outputs in the dtypes of a launch's.

    Raises:
        UsageError: it has floats for codes, which a kernel for the CPU would round.
    """
    found = op.reference(problem, inputs)
    outputs = op.outputs(problem, inputs)
    for name, tensor in outputs.items():
        value = found.get(name)
        if value is None or value.is_floating_point() != tensor.is_floating_point():
            raise UsageError(f"{op.name}: {name}: its samples need a kernel for the CPU")
        tensor.copy_(value)
    return outputs


def record(plan: ExportPlan) -> Sample:
    """Make a sample by the op's kernel for the CPU, or by its reference where there is none.

    Raises:
        UsageError: no small problem is legal, or the reference says too little.
    """
    op, problem = plan.op, small_problem(plan)
    inputs = op.inputs(problem, torch.device("cpu"), seed=1)
    cpu = next((k for k in registry.kernels(op.name).values() if k.backend == "cpu"), None)
    outputs = _run_on_the_cpu(cpu, op, problem, inputs) if cpu else _rounded(op, problem, inputs)
    noise = plan.kernel.noise(problem, plan.configs[0], inputs)
    exact = op.same_bits(problem) == "kernels" and noise is None
    expected = {p.name: outputs[p.key] for p in plan.signature.outputs}
    tolerance = {
        name: 0.0 if exact or t.dtype not in TOLERANCE else TOLERANCE[t.dtype]
        for name, t in expected.items()
    }
    return Sample(problem, plan.configs[0], inputs, expected, tolerance)
