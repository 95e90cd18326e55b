"""The launch of a CUDA kernel, as an export must know it beside the kernel's source.

It is in the kernel's folder: a module ``host`` whose `HOSTS` has a `Host` by the kernel's name, and
a template for each. The template is the C function's body in the common subset of C and C++, so
that `.cu` and `.c` share it (see `export.cuda`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core import registry


def size_for_16_bytes(element_bytes: int) -> int:
    """Return the number of elements that 16 bytes hold."""
    return 16 // element_bytes


@dataclass(frozen=True)
class Code:
    """A kernel function of a launch.

    Attributes:
        name: the function's.
        source: its `.cu`.
        header: its `config.cuh`.
        shared_bytes: shared memory per thread block, given at launch.
        threads: threads per thread block.
        threads_named: the same, in the source's constants.
    """

    name: str
    source: Path
    header: str
    shared_bytes: int
    threads: int
    threads_named: str


class Host(ABC):
    """The launch of one CUDA kernel.

    Attributes:
        kernel: it has `programs`, a launch's functions.
        threads: threads per block of a launch of one function, in the source's constants.
        template: the host code's, under kernels_cuda.
        notes: the meaning of each constant of its `config.cuh`.
        reasons: by size, why it must be the multiple that `multiples` says.
        aligned: tensors whose addresses must be multiples of 16, where the function has them;
            ``workspace`` is the workspace.
        tensor_maps: the kernel reads or writes through TMA's tensor maps.
        zeros: a workspace must be zeros before its first use; else it may hold anything.
    """

    kernel: ClassVar[Any]
    threads: ClassVar[str] = "THREADS"
    template: ClassVar[str]
    notes: ClassVar[Mapping[str, str]]
    reasons: ClassVar[Mapping[str, str]]
    aligned: ClassVar[tuple[str, ...]]
    tensor_maps: ClassVar[bool] = False
    zeros: ClassVar[bool] = True

    def architecture(self, capability: tuple[int, int]) -> str:
        """Return nvcc's name of an architecture, such as ``90``."""
        return f"{capability[0]}{capability[1]}"

    def exported(self, config: Any) -> Any:
        """Return the config to export for a tuned one: another where no export can launch that."""
        return config

    def threads_named(self, problem: Any, config: Any) -> tuple[str, ...]:
        """Return the threads per block of each function, in the source's constants."""
        return (self.threads,)

    def codes(self, problem: Any, config: Any) -> tuple[Code, ...]:
        """Return a launch's kernels in order, for contiguous tensors at multiples of 16."""
        names = self.threads_named(problem, config)
        return tuple(
            Code(x.function, x.source, x.header, x.shared_bytes, 32 * x.warps, named)
            for x, named in zip(self.kernel.programs(problem, config), names, strict=True)
        )

    @abstractmethod
    def multiples(self, problem: Any, config: Any) -> dict[str, int]:
        """Return the number that each size must be a multiple of for the code to be right."""

    def reason(self, problem: Any, config: Any, dim: str) -> str:
        """Return why a size must be such a multiple."""
        return self.reasons[dim].format(self.multiples(problem, config)[dim])

    def most(self, problem: Any) -> dict[str, int]:
        """Return the largest value of each size, where that is below 2^30."""
        return {}

    def sentences(self, problem: Any) -> tuple[str, ...]:
        """Return sentences for callers on what is not said by shapes, addresses and sizes."""
        return ()

    def workspace(self, problem: Any, config: Any) -> bool:
        """Return whether a launch needs a workspace."""
        return False

    def values(self, problem: Any, config: Any) -> dict[str, Any]:
        """Return the template's variables beside those that every template gets."""
        return {}


def hosts(op: str) -> dict[str, Host]:
    """Return the host code of an op's kernels, by the kernels' names."""
    return {name: host for m in registry.beside(op, "host") for name, host in m.HOSTS.items()}
