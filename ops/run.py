"""One call of an op through one kernel: the path that bench, tests, tuner and models share."""

from __future__ import annotations

import shlex
import warnings
from typing import TYPE_CHECKING, Any

from jetfire import ops
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireWarning, UsageError
from jetfire.ops.op import Check, Kernel, Op, Problem, Tensors

if TYPE_CHECKING:
    from jetfire.ops.op import Config
    from jetfire.ops.profiles import Found

_said: set[tuple[str, ...]] = set()


@profiles.remembered
def choose(op: Op, problem: Problem, device: Device) -> tuple[Kernel, Config]:
    """A kernel that takes a problem on a device, with its tuned, nearest or default config.

    The first one that does; where that one was tuned for just this problem, the fastest of all that
    were.

    Raises:
        UsageError: none does; the message has each kernel's reason. Or profiles are strict, and the
            first was not tuned for this problem.
    """
    reasons = []
    for kernel in ops.kernels(op.name).values():
        found = profiles.find(kernel, problem, device)
        reason = None
        if found.source == "default":
            reason = kernel.legal(problem, found.config, device)
        if reason is None:
            if found.source == "tuned":
                kernel, found = _fastest(op, problem, device)
            report(op, kernel, problem, device, found)
            return kernel, found.config
        reasons.append(f"{kernel.name}: {reason}")
    raise UsageError(
        f"no kernel of {op.name} takes {problem} on {device.label}: {'; '.join(reasons)}"
    )


def _fastest(op: Op, problem: Any, device: Device) -> tuple[Kernel, Found]:
    tuned = [
        (found.entry.ms, kernel, found)
        for kernel in ops.kernels(op.name).values()
        if (found := profiles.exact(kernel, problem, device)) and found.entry
    ]
    _, kernel, found = min(tuned, key=lambda triple: triple[0])
    return kernel, found


def interpreted(kernel: Kernel, device: Device) -> bool:
    """Whether it is Triton's interpreter that would run a kernel there."""
    return device.interpreted and type(kernel).__module__.startswith("jetfire.kernels_triton")


def report(op: Op, kernel: Kernel, problem: Any, device: Device, found: Found) -> None:
    """Warn, once an op, that a problem was not tuned; once a kernel, that its source has changed.

    Raises:
        UsageError: it was not tuned, and profiles are strict.
    """
    if found.source == "tuned" and not found.stale:
        return
    if interpreted(kernel, device) or not kernel.space(problem, device):
        return
    tune = f"tune it: {command_for(op, problem)}"
    if found.source != "tuned":
        missing = f"{op.name}: no profile for {_shape(op, problem)} on {device.label}"
        if profiles.strict():
            raise UsageError(f"{missing}; {tune}")
        used = "the default is used"
        if found.entry is not None:
            mine = problem.as_dict()
            differing = [f"{k}={v}" for k, v in found.entry.problem.items() if v != mine.get(k)]
            used = f"the nearest is used ({' '.join(differing)})"
        _say(f"{missing}: {used}; {tune}", op.name)
    if found.stale:
        _say(f"{op.name}/{kernel.name}: its source has changed since it was tuned on "
             f"{device.label}; {tune}", op.name, kernel.name)  # fmt: skip


def _say(text: str, *once: str) -> None:
    if once not in _said:
        _said.add(once)
        warnings.warn(text, JetfireWarning, stacklevel=3)


def _shape(op: Op, problem: Any) -> str:
    fields = problem.as_dict()
    return " ".join(f"{n}={fields[n]}" for n in (*op.dims, "block", "mode") if n in fields)


def command_for(op: Op, problem: Any) -> str:
    """The command line that tunes just this problem."""
    fields = problem.as_dict()
    mode = fields.get("mode", "fwd")
    options = {name: fields[name] for name in (*op.dims, "block") if name in fields}
    words = ["jetfire-tune", op.name]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    if mode != "fwd":
        words += ["--mode", mode]
    plain = op.problems(mode, options)[0].as_dict()
    for name, value in fields.items():
        if value != plain[name]:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += ["--set", f"{name}={text}"]
    return shlex.join(words)


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
