"""What an export must know of a CUDA kernel beside its source: how it is launched.

A kernel has it in its folder: a module ``host`` whose `HOSTS` has a `Host` by the kernel's name,
and a template for each: the C function's body in the common subset of C and C++, so that `.cu` and
`.c` have it alike (see `export.cuda`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


def size_for_16_bytes(element_bytes: int) -> int:
    """Return the number of elements that 16 bytes hold."""
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
        template: of the host code, under kernels_cuda.
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
        """Return the name that nvcc has for an architecture, such as ``90``."""
        return f"{capability[0]}{capability[1]}"

    @abstractmethod
    def codes(self, problem: Any, config: Any) -> tuple[Code, ...]:
        """Return a launch's kernels in order, for contiguous tensors at multiples of 16."""

    @abstractmethod
    def multiples(self, problem: Any, config: Any) -> dict[str, int]:
        """Return, by size, the number that it must be a multiple of for the code to be right."""

    def reason(self, problem: Any, config: Any, dim: str) -> str:
        """Say why a size must be such a multiple."""
        return self.reasons[dim].format(self.multiples(problem, config)[dim])

    def most(self, problem: Any) -> dict[str, int]:
        """Return the largest size that is allowed, by size, where that is below 2^30."""
        return {}

    def sentences(self, problem: Any) -> tuple[str, ...]:
        """Return sentences with what callers must know beyond shapes, addresses and sizes."""
        return ()

    def workspace(self, problem: Any, config: Any) -> bool:
        """Whether a launch needs a workspace."""
        return False

    def values(self, problem: Any, config: Any) -> dict[str, Any]:
        """Return what the template reads beside what every template gets."""
        return {}
