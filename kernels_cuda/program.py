"""The base class of CUDA kernels: what a launch runs, from which it is loaded and compiled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import CudaText, compile_cubin


@dataclass(frozen=True)
class Program:
    """A kernel function: its source, the `config.cuh` of it, and what a launch gives a block.

    Attributes:
        name: the function's, where it is not the source's.
        features: letter of the architecture's own instructions, ``a`` of sm_90a.
        binary: a cubin that was compiled elsewhere, in place of the source.
    """

    source: Path | CudaText
    header: str
    shared_bytes: int
    warps: int
    name: str = ""
    features: str = ""
    binary: Path | None = None

    @property
    def function(self) -> str:
        return self.name or self.source.stem

    def cubin(self, capability: tuple[int, int]) -> Cubin:
        """Return its machine code."""
        major, minor = capability
        if self.binary is not None:
            code = self.binary.read_bytes()
        else:
            code = compile_cubin(self.source, self.header, f"sm_{major}{minor}{self.features}")
        return Cubin(self.function, code, self.shared_bytes, self.warps)

    def launch(self, device: Device, blocks: int, *arguments: Any) -> None:
        """Launch it on the device's current stream, with scalars and structs of these bytes."""
        loaded(self, device)(blocks, 32 * self.warps, _given(arguments))

    def launch_beside(self, device: Device, blocks: int, argument: bytes) -> None:
        """Launch it with a struct of these bytes, to run beside the launch before it.

        It must do as `driver.Function.launch_beside` says.
        """
        given = driver.struct_argument(argument, len(argument))
        loaded(self, device).launch_beside(blocks, 32 * self.warps, given)


def _given(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments as a launch takes them: a struct is given by its bytes."""
    return [driver.struct_argument(x, len(x)) if type(x) is bytes else x for x in arguments]


@cache
def loaded(program: Program, device: Device) -> driver.Function:
    """Load a program; it is kept for ever, since graphs hold it."""
    assert device.capability is not None
    cubin = program.cubin(device.capability)
    return driver.Function(cubin.code, program.function, device.index, program.shared_bytes)


@lru_cache(maxsize=4096)
def _loaded(
    kernel: CudaKernel, problem: Any, config: Any, access: Any, device: Device
) -> driver.Function:
    return loaded(kernel.program(problem, config, access), device)


class CudaKernel(Kernel):
    """A kernel in CUDA C++.

    Attributes:
        least: the architecture that it needs, or an older one than the device's.
        needs: what it says where that is not so.
    """

    backend = "cuda"
    least: ClassVar[tuple[int, int]] = (8, 0)
    needs: ClassVar[str]

    def unfit(self, device: Device) -> str | None:
        """Return why it cannot run on a device, or be compiled; None where it can."""
        if device.kind != "cuda" or (device.capability or (0, 0)) < self.least:
            return self.needs
        return driver.missing()

    @abstractmethod
    def programs(self, problem: Any, config: Any) -> Sequence[Program]:
        """Return a launch's functions in order, for contiguous tensors at multiples of 16."""

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin]:
        return [program.cubin(capability) for program in self.programs(problem, config)]

    def program(self, problem: Any, config: Any, access: Any) -> Program:
        """Return the function of a kernel that has one, for tensors of some alignment."""
        raise NotImplementedError(f"{self.op}/{self.name}: expected `program`")

    def run(
        self,
        problem: Any,
        config: Any,
        access: Any,
        device: Device,
        blocks: int,
        *arguments: Any,
    ) -> None:
        """Launch `program`, as `Program.launch` does; it is looked up once for a problem."""
        function = _loaded(self, problem, config, access, device)
        function(blocks, 32 * config.warps, _given(arguments))
