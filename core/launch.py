"""A call of an op through one kernel: the path that bench, tests, tuner and models share."""

from __future__ import annotations

import math
import shlex
import warnings
from typing import TYPE_CHECKING, Any

from jetfire.core import loaded, lookup, profiles, registry, terminal
from jetfire.core.device import SHARED_KIB, Device, target_device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.kernel import Kernel
from jetfire.core.op import Check, Op
from jetfire.core.problem import Problem, value_text
from jetfire.core.tensors import Tensors, alias, changed

if TYPE_CHECKING:
    from jetfire.core.kernel import Config
    from jetfire.core.lookup import Found
    from jetfire.core.profiles import Entry

_said: set[tuple[str, ...]] = set()


@profiles.remembered
def choose(op: Op, problem: Problem, device: Device) -> tuple[Kernel, Config]:
    """Return a kernel that takes a problem on a device, with its tuned, nearest or default config.

    It is the first in turn that takes the problem. Where that one was tuned for exactly this
    problem, it is the fastest of all that were, on the same device.

    Raises:
        UsageError: no kernel takes it; the message has each one's reason. Or profiles are strict,
            and the first was not tuned for this problem.
    """
    reasons = []
    for kernel in in_turn(op, problem, device):
        found = lookup.find(op, kernel, problem, device)
        reason = None
        if found.source == "default":
            reason = kernel.legal(problem, found.config, device)
        if reason is None:
            kernel, found = _fastest(op, problem, device, kernel, found)
            terminal.decision(f"{op.name} {problem}: {kernel.name}, {found.source} {found.config}")
            report(op, kernel, problem, device, found)
            return kernel, found.config
        reasons.append(f"{kernel.name}: {reason}")
    raise UsageError(
        f"no kernel of {op.name} takes {problem} on {device.label}: {'; '.join(reasons)}"
    )


def in_turn(op: Op, problem: Any, device: Device) -> list[Kernel]:
    """Return an op's kernels in the order in which they are asked whether they take a problem.

    A candidate comes last, unless it was tuned for exactly this problem on this device.
    """

    def waits(kernel: Kernel) -> bool:
        return kernel.candidate and lookup.exact(op, kernel, problem, device) is None

    return sorted(registry.kernels(op.name).values(), key=waits)


def _fastest(
    op: Op, problem: Any, device: Device, kernel: Kernel, found: Found
) -> tuple[Kernel, Found]:
    """Return the kernel, or where it was tuned for exactly this problem the fastest of these.

    Times are compared that one GPU has.
    """
    if found.entry is None or found != lookup.known(op, kernel, problem, device):
        return kernel, found
    best = found.entry
    for other in registry.kernels(op.name).values():
        rival = lookup.known(op, other, problem, device, best.gpu)
        if rival and rival.entry and rival.entry.ms < best.ms:
            kernel, found, best = other, rival, rival.entry
    return kernel, found


def interpreted(kernel: Kernel, device: Device) -> bool:
    """Return whether Triton's interpreter would run a kernel on a device."""
    return device.interpreted and kernel.backend == "triton"


def report(op: Op, kernel: Kernel, problem: Any, device: Device, found: Found) -> None:
    """Warn once per op of a problem that was not tuned, once per kernel of a changed source.

    Raises:
        UsageError: it was not tuned, and profiles are strict.
    """
    if found.source == "tuned" and not found.stale:
        return
    if interpreted(kernel, device) or not kernel.space(problem, device):
        return
    if found.source != "tuned":
        if lookup.strict():
            raise UsageError(f"{_missing(op, problem, device)}; {_remedy(op, problem)}")
        # The same shape with, for instance, a bias or another rounding is as good as tuned.
        near = found.entry
        same = near and near.gpu == device.name and found.same_shape
        if not same and _first(op.name):
            used = _used(problem, device, near)
            _warn(f"{_missing(op, problem, device)}: {used}; {_remedy(op, problem)}")
    if found.stale and found.entry and _first(op.name, kernel.name):
        _warn(
            f"{op.name}/{kernel.name}: its source has changed since it was tuned on "
            f"{found.entry.gpu}; {_remedy(op, problem)}"
        )


def _first(*what: str) -> bool:
    """Return whether a warning was not given yet; it counts as given from now on."""
    new = what not in _said
    _said.add(what)
    return new


def _warn(text: str) -> None:
    warnings.warn(text, JetfireWarning, stacklevel=3)


def _missing(op: Op, problem: Any, device: Device) -> str:
    fields = problem.as_dict()
    named = (*op.dims, "block", "out_block", "mode")
    shape = " ".join(f"{n}={fields[n]}" for n in named if n in fields)
    return f"{op.name}: no profile for {shape} on {device.label}"


def _used(problem: Any, device: Device, near: Entry | None) -> str:
    if near is None:
        return "the default is used"
    mine = problem.as_dict()
    differing = " ".join(f"{k}={v}" for k, v in near.problem.items() if v != mine.get(k))
    if near.gpu == device.name:
        return f"the nearest is used ({differing})"
    return f"that of {near.gpu} is used" + (f" ({differing})" if differing else "")


def _remedy(op: Op, problem: Any) -> str:
    return f"tune it: {command_for(op, problem)}"


def command_for(op: Op, problem: Any) -> str:
    """Return the command line that tunes exactly this problem."""
    fields = problem.as_dict()
    mode = fields.get("mode", "fwd")
    options = {name: fields[name] for name in (*op.dims, "block") if name in fields}
    words = ["jetfire-tune", op.name]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    if mode != "fwd":
        words += ["--mode", mode]
    try:
        plain = op.problems(mode, options)[0].as_dict()
    except UsageError:  # a size that the other fields' defaults do not take
        plain = {"mode": mode, **options}
    for name, value in fields.items():
        if name not in plain or value != plain[name]:
            words += ["--set", f"{name}={value_text(value)}"]
    for file in loaded.files():
        words += ["--load", str(file)]
    return shlex.join(words)


def needs_another_device(kernel: Kernel, problem: Any, device: Device) -> bool:
    """Return whether this device does not take a problem and some architecture does."""
    if kernel.legal(problem, kernel.default(problem, device), device) is None:
        return False
    devices = map(target_device, SHARED_KIB)
    return any(kernel.legal(problem, kernel.default(problem, d), d) is None for d in devices)


def launch(kernel: Kernel, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
    """Launch a kernel after asking `legal`.

    Raises:
        UsageError: the config is illegal, with the reason.
    """
    device = Device.of(next(iter(inputs.values())))
    reason = kernel.legal(problem, config, device)
    if reason is not None:
        raise UsageError(f"{kernel.op}/{kernel.name} on {device.label}, {problem}: {reason}")
    kernel.launch(problem, config, inputs, outputs)


def run(op: Op, kernel: Kernel, problem: Any, config: Any, inputs: Tensors) -> Tensors:
    """Return the outputs of a launch, poisoned before."""
    outputs = op.poison(problem, op.outputs(problem, inputs))
    launch(kernel, problem, config, alias(inputs), alias(outputs))
    return outputs


def verify(
    op: Op,
    kernel: Kernel,
    problem: Any,
    config: Any,
    inputs: Tensors,
    expected: Tensors | None = None,
) -> Check:
    """Run a kernel into poisoned outputs and compare them with the reference's.

    Inputs that the kernel changed make it wrong, and are put back for the next one.
    """
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    outputs = run(op, kernel, problem, config, inputs)
    if message := changed(inputs, before):
        for name, was in before.items():
            inputs[name].copy_(was)
        return Check(False, math.inf, message)
    if expected is None:
        expected = op.reference(problem, inputs)
    return op.check(problem, outputs, expected, kernel.noise(problem, config, inputs))
