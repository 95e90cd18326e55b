"""Kernels that fail as their configs say: what the tuner must survive."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.kernel import Config, Kernel
from jetfire.core.tensors import Tensors, poison
from jetfire.reference.transpose import transpose

Fault = Literal[
    "none",
    "hang",
    "segfault",
    "exit",
    "raise",
    "compile",
    "memory",
    "oom",
    "wrong",
    "illegal",
    "compiler_raises",
    "compiler_hangs",
    "compiler_dies",
]


@dataclass(frozen=True)
class FaultyConfig(Config):
    """A call sleeps for `ms`, then the fault happens; `tile` only tells configs apart."""

    fault: Fault = "none"
    ms: int = 1
    tile: int = 1


def _segfault() -> None:
    print("the kernel's last words", flush=True)
    ctypes.string_at(0)


def _raise(error: BaseException) -> None:
    raise error


class CompilationError(Exception):
    """As Triton names its own."""


def _memory() -> None:
    raise MemoryError("9 PiB asked for")


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 PiB")


FAULTS = {
    "hang": lambda: time.sleep(float(os.environ.get("FAULTY_HANG_S", 1e6))),
    "segfault": _segfault,
    "exit": lambda: sys.exit(7),
    "raise": lambda: _raise(RuntimeError("first line\nsecond line")),
    "compile": lambda: _raise(CompilationError("at 1:2: no such thing")),
    "memory": _memory,
    "oom": _out_of_memory,
    "illegal": lambda: _raise(UsageError("the launcher knew better")),
}
COMPILER_FAULTS = {
    "compiler_raises": lambda: _raise(CompilationError("ptxas: line 1\nptxas: line 2")),
    "compiler_hangs": lambda: time.sleep(1e6),
    "compiler_dies": lambda: os._exit(9),
}


class Faulty(Kernel):
    """A transpose by the reference. Tile 13 is illegal; FAULTY_DEFAULT is the default's fault."""

    op = "transpose"
    name = "faulty"
    Config = FaultyConfig

    def legal(self, problem: Any, config: FaultyConfig, device: Device) -> str | None:
        return "tile 13 brings bad luck" if config.tile == 13 else None

    def default(self, problem: Any, device: Device) -> FaultyConfig:
        return FaultyConfig.parse({"fault": os.environ.get("FAULTY_DEFAULT", "none")})

    def space(self, problem: Any, device: Device) -> dict[str, Any]:
        hints = Fault.__args__  # type: ignore[attr-defined]
        return {"fault": hints, "ms": (1, 2, 3, 30, 60), "tile": tuple(range(1, 41))}

    def launch(self, problem: Any, config: FaultyConfig, inputs: Tensors, outputs: Tensors) -> None:
        time.sleep(config.ms / 1e3)
        if config.fault in FAULTS:
            FAULTS[config.fault]()
        qt, scale_t = transpose(inputs["q"], inputs["scale"])
        outputs["scale_t"].copy_(scale_t)
        if config.fault == "wrong":
            poison(outputs["qt"])
        else:
            outputs["qt"].copy_(qt)

    def cubins(self, problem: Any, config: FaultyConfig, capability: tuple[int, int]) -> None:
        if config.fault in COMPILER_FAULTS:
            COMPILER_FAULTS[config.fault]()


KERNEL = Faulty()


def spin(connection: Any, processor: int) -> None:
    """Keep a processor busy, as a worker."""
    os.sched_setaffinity(0, [processor])
    connection.send("spinning")
    while True:
        pass


class Unprepared(type(registry.get("transpose"))):  # type: ignore[misc]
    """A transpose whose inputs find no memory, or whose worker dies of them."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def inputs(self, problem: Any, device: Any, seed: int = 0, data: str = "normal") -> Tensors:
        if self.dies:
            os._exit(5)
        raise MemoryError("others hold it all")


CUDA_SOURCE = r"""
extern "C" __global__ void faulty(int fault, const signed char* q, const float* scale,
                                  signed char* qt, float* scale_t, int m, int n, int block) {
  if (fault == 1) {
    volatile int* forever = (volatile int*)scale_t;
    for (;;) { if (*forever == 123456789) break; }
  }
  if (fault == 2) *(volatile int*)16 = 1;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < m * n) qt[(i % n) * m + i / n] = fault == 3 ? 0 : q[i];
  int rows = (m + block - 1) / block, columns = (n + block - 1) / block;
  if (i < rows * columns) scale_t[(i % columns) * rows + i / columns] = scale[i];
}
"""


@dataclass(frozen=True)
class FaultyCudaConfig(Config):
    fault: Literal["none", "hang", "illegal", "wrong"] = "none"
    threads: int = 128


@cache
def _cuda_function() -> Any:
    import cupy

    return cupy.RawKernel(CUDA_SOURCE, "faulty")


class FaultyCuda(Kernel):
    """A transpose on the GPU that never ends, writes to address 16, or is wrong."""

    op = "transpose"
    name = "faulty_cuda"
    Config = FaultyCudaConfig

    def legal(self, problem: Any, config: FaultyCudaConfig, device: Device) -> str | None:
        return None if device.kind == "cuda" else "needs a GPU"

    def default(self, problem: Any, device: Device) -> FaultyCudaConfig:
        return FaultyCudaConfig()

    def space(self, problem: Any, device: Device) -> dict[str, Any]:
        faults = ("none", "hang", "illegal", "wrong")
        return {"fault": faults, "threads": (32, 64, 128, 256, 512)}

    def launch(
        self, problem: Any, config: FaultyCudaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        import cupy
        import torch

        fault = ("none", "hang", "illegal", "wrong").index(config.fault)
        pointers = [inputs["q"], inputs["scale"], outputs["qt"], outputs["scale_t"]]
        blocks = -(-problem.m * problem.n // config.threads)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            _cuda_function()(
                (blocks,),
                (config.threads,),
                (
                    cupy.int32(fault),
                    *(cupy.uint64(t.data_ptr()) for t in pointers),
                    cupy.int32(problem.m),
                    cupy.int32(problem.n),
                    cupy.int32(problem.block),
                ),
            )


KERNEL_CUDA = FaultyCuda()


def register() -> None:
    """Make both kernels of the transpose, beside its own."""
    from jetfire.core import registry

    known = registry.kernels("transpose")
    known.update({kernel.name: kernel for kernel in (KERNEL, KERNEL_CUDA)})
