"""What is exported: one kernel with the configs that were tuned for the sizes asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from jetfire.core import lookup, registry
from jetfire.core.device import Device
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.core.host import hosts
from jetfire.core.kernel import Kernel
from jetfire.core.launch import command_for, in_turn, needs_another_device, report
from jetfire.core.lookup import Found
from jetfire.core.op import Op
from jetfire.core.profiles import Entry
from jetfire.export import naming
from jetfire.export.foreign import Foreign
from jetfire.export.signature import Signature, signature_of
from jetfire.kernels_cuda.inline import InlineKernel
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.measure.plan import Case

GPU = ("cuda", "triton")
# Kernels of which compiled code is exported, with a table of what each problem launches.
EMBEDDED = (TritonKernel, InlineKernel)


@dataclass(frozen=True)
class TunedProblem:
    """One problem and its config.

    Attributes:
        entry: the profile's, of this problem or of the nearest one.
        own: the config is the entry's; else it is what an export has in its place.
    """

    problem: Any
    config: Any
    entry: Entry
    own: bool = True

    @property
    def where(self) -> Foreign:
        """Device and day of the config's tuning: ``on NVIDIA H200, 2026-11-20``."""
        found = self.entry.provenance
        date = f", {found['date']}" if "date" in found else ""
        return Foreign(f"on {found.get('gpu', 'an unnamed device')}{date}")


@dataclass(frozen=True)
class ExportPlan:
    """One exported function.

    Attributes:
        name: of the function, the library and the package: a C identifier.
        tuned: at least one; all alike but for their sizes.

    Raises:
        UsageError: the name is none that the function, its library and its package can have.
    """

    name: str
    op: Op
    kernel: Kernel
    device: Device
    tuned: tuple[TunedProblem, ...]

    def __post_init__(self) -> None:
        # Generated code has it as it is, so that nothing else may be in a plan.
        naming.check(self.name)

    @property
    def capability(self) -> tuple[int, int]:
        assert self.device.capability is not None
        return self.device.capability

    @property
    def problem(self) -> Any:
        """The first problem, from which the others differ in sizes alone."""
        return self.tuned[0].problem

    @property
    def configs(self) -> tuple[Any, ...]:
        """The configs, each once, in the order of the first problem that has it."""
        return tuple(dict.fromkeys(t.config for t in self.tuned))

    @cached_property
    def signature(self) -> Signature:
        return signature_of(self.op, self.problem)

    def sizes(self, problem: Any) -> dict[str, int]:
        return {dim: getattr(problem, dim) for dim in self.op.dims}

    def sizes_tuned(self, tuned: TunedProblem) -> dict[str, int]:
        """The sizes that a profile's entry is for, which may be another problem's."""
        return self.sizes(self.op.Problem.parse(tuned.entry.problem))

    @property
    def fixed(self) -> dict[str, Any]:
        """The problems' other fields: block, dtypes, rounding, …"""
        return {k: v for k, v in self.problem.as_dict().items() if k not in self.op.dims}

    def with_sizes(self, **sizes: int) -> Any:
        """Return the same problem at other sizes."""
        return dataclasses.replace(self.problem, **sizes)

    def provenance(self) -> dict[str, Any]:
        """Return what `profile.json` holds: where each config is from, what it was measured at."""
        return {
            "op": self.op.name,
            "kernel": self.kernel.name,
            "architecture": "sm_{}{}".format(*self.capability),
            "entries": [
                {
                    "problem": t.problem.as_dict(),
                    "config": t.config.as_dict(),
                    "tuned_for": t.entry.problem,
                    "tuned_config": t.entry.config,
                    "ms": t.entry.ms if t.own else None,
                    "vs_peer": t.entry.vs_peer if t.own else None,
                    "provenance": t.entry.provenance,
                }
                for t in self.tuned
            ],
        }

    @property
    def runs_here(self) -> bool:
        """Whether the current GPU, on which exports are run, is of its architecture."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability() == self.capability

    def profile(self) -> bytes:
        """Return `profile.json`."""
        return (json.dumps(self.provenance(), indent=1) + "\n").encode()


def _tuned(op: Op, kernel: Kernel, problem: Any, device: Device, found: Found) -> TunedProblem:
    """Return a problem with the config that a lookup gave.

    Raises:
        UsageError: that is no profile's, or the kernel takes no such problem.
        NoDeviceError: the kernel is not for that device.
    """
    if found.entry is None:
        reason = kernel.legal(problem, found.config, device)
        kind = NoDeviceError if needs_another_device(kernel, problem, device) else UsageError
        raise kind(
            f"{op.name}/{kernel.name} on {device.name}: {reason}"
            if reason
            else f"{op.name}/{kernel.name} on {device.name}: no profile for {problem}; tune it "
            f"there: {command_for(op, problem)} --kernel {kernel.name}"
        )
    report(op, kernel, problem, device, found)
    host = hosts(op.name).get(kernel.name)
    config = host.exported(found.config) if host else found.config
    return TunedProblem(problem, config, found.entry, own=config == found.config)


def _has_form(kernel: Kernel) -> bool:
    """Return whether an export can hold a kernel: one in CUDA C++ only with its host code."""
    return isinstance(kernel, EMBEDDED) or kernel.name in hosts(kernel.op)


def _without_profile(
    op: Op, kernels: Mapping[str, Kernel], problem: Any, device: Device, formless: Sequence[str]
) -> str:
    """Say that no kernel which an export can hold has a profile, and what makes one.

    Args:
        formless: kernels that have one, but that no export can hold.
    """
    where, remedy = f"{op.name} on {device.name}", command_for(op, problem)
    if not formless:
        return f"{where}: no kernel has a profile for {problem}; tune it there: {remedy}"
    others = (
        f"; tune another: {remedy} --kernel {kernel.name}"
        for kernel in kernels.values()
        if _has_form(kernel)
        and kernel.legal(problem, kernel.default(problem, device), device) is None
    )
    names = ", ".join(formless)
    said = f"{where}: {names} has a profile for {problem}, but no form as CUDA C++"
    return said + next(others, "")


def _fastest(
    op: Op, kernels: Mapping[str, Kernel], problems: Sequence[Any], device: Device
) -> tuple[Kernel, list[Found]]:
    """Return the fastest in all of the kernels tuned for all problems, and what lookups give.

    Times are compared that one GPU has: where an architecture is asked for, that of the GPU on
    which most kernels were tuned. Without one it is the first kernel in their order that has
    configs of near problems, whose times do not compare.
    """
    lookups: dict[str, list[Found]] = {}
    formless = []
    for kernel in (k for k in kernels.values() if k.backend in GPU):
        found = [lookup.find(op, kernel, problem, device) for problem in problems]
        if any(f.entry is None for f in found):
            continue
        if _has_form(kernel):
            lookups[kernel.name] = found
        else:
            formless.append(kernel.name)
    if not lookups:
        raise UsageError(_without_profile(op, kernels, problems[0], device, formless))
    looked_up = [f for found in lookups.values() for f in found if f.source == "tuned"]
    gpus = dict.fromkeys(f.entry.gpu for f in looked_up if f.entry is not None)
    tuned = [_tuned_on(gpu, op, [kernels[n] for n in lookups], problems, device) for gpu in gpus]
    comparable = max(tuned, key=len, default={})
    if not comparable:
        first = next(iter(lookups))
        return kernels[first], lookups[first]
    fastest = min(comparable, key=lambda name: sum(e.entry.ms for e in comparable[name] if e.entry))
    return kernels[fastest], comparable[fastest]


def _tuned_on(
    gpu: str, op: Op, kernels: Sequence[Kernel], problems: Sequence[Any], device: Device
) -> dict[str, list[Found]]:
    """Return what lookups give of the kernels that were tuned for all problems on a GPU."""
    found = {k.name: [lookup.known(op, k, p, device, gpu) for p in problems] for k in kernels}
    return {
        name: [f for f in of_kernel if f is not None]
        for name, of_kernel in found.items()
        if None not in of_kernel
    }


def _check_exportable(op: Op, kernels: Mapping[str, Kernel]) -> None:
    """Raise UsageError where none of an op's kernels is one that an export can hold."""
    if op.composite:
        raise UsageError(
            f"{op.name}: it has nothing to tune: it launches the kernels of other ops; export those"
        )
    if not any(kernel.backend in GPU for kernel in kernels.values()):
        raise UsageError(f"{op.name}: it has no kernel in Triton or CUDA C++ to export")


def _alike(op: Op, problems: Sequence[Any]) -> None:
    """Refuse problems that differ in more than their sizes."""
    first = vars(problems[0])
    for problem in problems[1:]:
        for name, value in vars(problem).items():
            if name not in op.dims and value != first[name]:
                raise UsageError(
                    f"{name}={first[name]} and {name}={value}: one export has one {name}; give "
                    + ("--block" if name == "block" else f"--set {name}=…")
                )


def make(
    cases: Sequence[Case], kernel_name: str | None, device: Device, name: str | None
) -> ExportPlan:
    """The plan for some problems of one op.

    Args:
        kernel_name: None for the one that `_fastest` takes.
        device: it stands for the architecture, as `target_device` returns it.
        name: of the function; None for one made of the op's.

    Raises:
        UsageError: they are problems of several ops or not alike, the kernel is not one of the op's
            for that architecture or was never tuned there, or the name is no C identifier or taken.
    """
    names = list(dict.fromkeys(case.op.name for case in cases))
    if len(names) != 1:
        raise UsageError(f"export takes one op, given {', '.join(names)}")
    op = cases[0].op
    problems = [case.problem for case in cases]
    _alike(op, problems)
    kernels = registry.kernels(op.name)
    named = None if kernel_name is None else registry.get_kernel(op.name, kernel_name)
    _check_exportable(op, kernels)
    if named is None:
        asked = {one.name: one for one in in_turn(op, problems[0], device)}
        kernel, found = _fastest(op, asked, problems, device)
    elif named.backend == "cpu":
        raise UsageError(f"{op.name}/{named.name} runs on the CPU: expected a GPU kernel")
    elif named.backend == "python":
        raise UsageError(f"{op.name}/{named.name} is a Python call: expected Triton or CUDA C++")
    else:
        kernel = named
        found = [lookup.find(op, named, problem, device) for problem in problems]
    tuned = tuple(
        _tuned(op, kernel, problem, device, one)
        for problem, one in zip(problems, found, strict=True)
    )
    return ExportPlan(name or f"jetfire_{op.name}", op, kernel, device, tuned)
