"""What an export must know of a CUDA kernel beside its source: how it is launched.

A kernel is added by a `Host` for it in `cuda.HOSTS` and a template under templates/host: the
function's body in the common subset of C and C++, so that `.cu` and `.c` have it alike (see there).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core.errors import UsageError
from jetfire.export.plan import Plan, Tuned


def size_for_16_bytes(element_bytes: int) -> int:
    """Of how many elements a row's length must be a multiple to be one of 16 bytes."""
    return 16 // element_bytes


@dataclass(frozen=True)
class Code:
    """One kernel function of a launch.

    Attributes:
        name: of the function.
        source: its `.cu`.
        header: its `config.cuh`.
        shared_bytes: of a block, given at launch.
        threads: of a block.
        threads_named: the same in the source's constants.
    """

    name: str
    source: Path
    header: str
    shared_bytes: int
    threads: int
    threads_named: str


class Host(ABC):
    """How one CUDA kernel is launched.

    Attributes:
        template: of the host code, under templates/host.
        notes: what each constant of its `config.cuh` means.
        reasons: why sizes must be the multiples of `multiples`, by size.
        aligned: tensors that must lie at multiples of 16, of those that the function has; with
            ``workspace``, that too.
        tensor_maps: it reads or writes through TMA's tensor maps.
        zeros: a workspace must be zeros before its first use; else it may hold anything.
    """

    template: ClassVar[str]
    notes: ClassVar[Mapping[str, str]]
    reasons: ClassVar[Mapping[str, str]]
    aligned: ClassVar[tuple[str, ...]]
    tensor_maps: ClassVar[bool] = False
    zeros: ClassVar[bool] = True

    def architecture(self, capability: tuple[int, int]) -> str:
        """As nvcc names it."""
        return f"{capability[0]}{capability[1]}"

    @abstractmethod
    def codes(self, problem: Any, config: Any) -> tuple[Code, ...]:
        """The kernels of a launch, in order, compiled for contiguous tensors at multiples of 16."""

    @abstractmethod
    def multiples(self, problem: Any, config: Any) -> dict[str, int]:
        """Of what sizes must be multiples, for the code to be right."""

    def reason(self, problem: Any, config: Any, dim: str) -> str:
        """Why a size must be such a multiple."""
        return self.reasons[dim].format(self.multiples(problem, config)[dim])

    def most(self, problem: Any) -> dict[str, int]:
        """Sizes that may be no larger, where that is below 2^30."""
        return {}

    def sentences(self, problem: Any) -> tuple[str, ...]:
        """What callers must know beyond shapes, addresses and sizes."""
        return ()

    def workspace(self, problem: Any, config: Any) -> bool:
        """Whether a launch needs one."""
        return False

    def values(self, problem: Any, config: Any) -> dict[str, Any]:
        """What the template reads, beside what every template gets."""
        return {}


@dataclass(frozen=True)
class Variant:
    """One config as it is compiled, for all problems of a plan that have the same code.

    Attributes:
        symbol: the C function that launches it.
        tuned: those problems; at least one.
    """

    symbol: str
    host: Host
    tuned: tuple[Tuned, ...]

    @property
    def problem(self) -> Any:
        return self.tuned[0].problem

    @property
    def config(self) -> Any:
        return self.tuned[0].config

    @property
    def codes(self) -> tuple[Code, ...]:
        return self.host.codes(self.problem, self.config)

    @property
    def multiples(self) -> dict[str, int]:
        return self.host.multiples(self.problem, self.config)

    def reason(self, dim: str) -> str:
        return self.host.reason(self.problem, self.config, dim)

    @property
    def workspace(self) -> bool:
        return self.host.workspace(self.problem, self.config)

    @property
    def values(self) -> dict[str, Any]:
        return self.host.values(self.problem, self.config)


def variants(plan: Plan, host: Host) -> tuple[Variant, ...]:
    """One for each different code, in the order of the plan's problems.

    Raises:
        UsageError: a problem of the plan does not keep to what its own code asks of sizes.
    """
    alike: dict[tuple[Any, ...], list[Tuned]] = {}
    for tuned in plan.tuned:
        for dim, multiple in host.multiples(tuned.problem, tuned.config).items():
            if (size := getattr(tuned.problem, dim)) % multiple:
                raise UsageError(
                    f"{plan.op.name}/{plan.kernel.name}: {dim}={size}: an exported one takes "
                    f"multiples of {multiple}"
                )
        alike.setdefault(host.codes(tuned.problem, tuned.config), []).append(tuned)
    found = []
    for group in alike.values():
        sizes = "x".join(map(str, plan.sizes(group[0].problem).values()))
        symbol = plan.name if len(alike) == 1 else f"{plan.name}_{sizes}"
        found.append(Variant(symbol, host, tuple(group)))
    return tuple(found)


def aligned(plan: Plan, host: Host, workspace: bool = False) -> tuple[str, ...]:
    """What of the function's pointers must lie at multiples of 16."""
    names = [p.name for p in plan.signature.parameters] + ["workspace"] * workspace
    return tuple(name for name in names if name in host.aligned)


def contract(plan: Plan, found: tuple[Variant, ...]) -> tuple[str, ...]:
    """What callers must keep to, in sentences."""
    host = found[0].host
    matrices = aligned(plan, host, any(variant.workspace for variant in found))
    multiples: dict[str, int] = {}
    for variant in found:
        for dim, multiple in variant.multiples.items():
            multiples[dim] = max(multiple, multiples.get(dim, 1))
    loose = any(variant.multiples != multiples for variant in found)
    names = f"{', '.join(matrices[:-1])} and {matrices[-1]}"
    sentences = [f"The addresses of {names} are multiples of 16."]
    most = host.most(plan.problem)
    if multiples or most:
        asked = ", ".join(
            _asked(dim, multiples, most) for dim in dict.fromkeys([*multiples, *most])
        )
        beside = " (but for the sizes that were tuned)" if loose else ""
        sentences.append(f"Sizes: up to 2^30, {asked}{beside}; any that keep to this will do.")
    else:
        sentences.append("Sizes: any up to 2^30.")
    return (*sentences, *host.sentences(plan.problem))


def _asked(dim: str, multiples: Mapping[str, int], most: Mapping[str, int]) -> str:
    """What one size must be."""
    found = [f"a multiple of {multiples[dim]}"] if dim in multiples else []
    found += [f"at most {most[dim]}"] if dim in most else []
    return f"{dim} {' and '.join(found)}"
