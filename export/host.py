"""The configs of a plan as they are compiled, and what callers of a CUDA kernel must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetfire.core.errors import UsageError
from jetfire.core.host import Code, Host
from jetfire.export.plan import ExportPlan, TunedProblem


@dataclass(frozen=True)
class CompiledVariant:
    """One config as it is compiled, for all problems of a plan that have the same code.

    Attributes:
        symbol: the C function that launches it.
        tuned: those problems; at least one.
    """

    symbol: str
    host: Host
    tuned: tuple[TunedProblem, ...]

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


def variants(plan: ExportPlan, host: Host) -> tuple[CompiledVariant, ...]:
    """Return a variant for each different code, in the order of the plan's problems.

    Raises:
        UsageError: a problem of the plan does not keep to what its own code asks of sizes.
    """
    alike: dict[tuple[Any, ...], list[TunedProblem]] = {}
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
        found.append(CompiledVariant(symbol, host, tuple(group)))
    return tuple(found)


def aligned(plan: ExportPlan, host: Host, workspace: bool = False) -> tuple[str, ...]:
    """Return which of the function's pointers must lie at multiples of 16."""
    names = [p.name for p in plan.signature.parameters] + ["workspace"] * workspace
    return tuple(name for name in names if name in host.aligned)


def contract(plan: ExportPlan, found: tuple[CompiledVariant, ...]) -> tuple[str, ...]:
    """Say what callers must keep to, in sentences."""
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
    """Say what one size must be."""
    found = [f"a multiple of {multiples[dim]}"] if dim in multiples else []
    found += [f"at most {most[dim]}"] if dim in most else []
    return f"{dim} {' and '.join(found)}"
