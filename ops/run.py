"""One call of an op through one kernel: the path that bench, tests, tuner and models share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetfire import ops
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Check, Kernel, Op, Problem, Tensors

if TYPE_CHECKING:
    from jetfire.ops.op import Config


def choose(op: Op, problem: Problem, device: Device) -> tuple[Kernel, Config]:
    """The first kernel that takes a problem on a device, with its tuned or default config.

    Raises:
        UsageError: none does; the message has each kernel's reason.
    """
    reasons = []
    for kernel in ops.kernels(op.name).values():
        config, _ = profiles.lookup(kernel, problem, device)
        reason = kernel.legal(problem, config, device)
        if reason is None:
            return kernel, config
        reasons.append(f"{kernel.name}: {reason}")
    raise UsageError(
        f"no kernel of {op.name} takes {problem} on {device.label}: {'; '.join(reasons)}"
    )


def launch(kernel: Kernel, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
    """Launch after asking `legal`.

    Raises:
        UsageError: the config is illegal, with the reason.
    """
    device = Device.of(next(iter(inputs.values())))
    reason = kernel.legal(problem, config, device)
    if reason is not None:
        raise UsageError(f"{kernel.op}/{kernel.name} on {device.label}, {problem}: {reason}")
    kernel.launch(problem, config, inputs, outputs)


def verify(
    op: Op, kernel: Kernel, problem: Any, config: Any, inputs: Tensors,
    expected: Tensors | None = None,
) -> Check:  # fmt: skip
    """Run a kernel into poisoned outputs and compare them with the reference's."""
    outputs = op.poison(problem, op.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    if expected is None:
        expected = op.reference(problem, inputs)
    return op.check(problem, outputs, expected, kernel.noise(problem, config, inputs))
