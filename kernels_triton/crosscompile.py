"""Compile Triton kernels for an architecture that is not here.

`record_launches` runs a kernel's own `launch` under a driver that compiles and never launches, so
what is audited is what would run: the same specialisation of arguments, the same options. Needs a
process without TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors


@dataclass(frozen=True)
class Launch:
    """A launch that a kernel would have made.

    Attributes:
        compiled: Triton's compiled kernel.
        grid: blocks along x, y and z.
        arguments: the kernel function's parameters by name, as `launch` passed them.
    """

    compiled: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class _CompileOnlyDriver:
    """The part of Triton's driver that compiling asks for; there is no device behind it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise NoDeviceError(f"cross-compilation asked the driver for {name}: there is no device")


@contextmanager
def _compiling(capability: tuple[int, int], found: list[Launch]) -> Iterator[None]:
    """Have `fn[grid](…)` compile for the capability and append to `found`, but launch nothing."""
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()  # keyed by device number, not by target
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        blocks = tuple(grid(arguments) if callable(grid) else grid)
        found.append(Launch(compiled, (*blocks, 1, 1)[:3], arguments))
        return compiled

    previous = driver._active
    driver.set_active(_CompileOnlyDriver(capability))
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = previous


def record_launches(
    op_name: str, kernel_name: str, problem: Any, config: Any, capability: tuple[int, int]
) -> tuple[list[Launch], Tensors]:
    """Return every launch that one call makes, in order, and the (meta) tensors of the call.

    Raises:
        UsageError: the config is illegal on that architecture, or Triton is interpreted here.
    """
    if knobs.runtime.interpret:
        raise UsageError("cross-compilation needs a process without TRITON_INTERPRET=1")
    op, kernel = registry.get(op_name), registry.get_kernel(op_name, kernel_name)
    reason = kernel.legal(problem, config, target_device(capability))
    if reason is not None:
        raise UsageError(f"{op_name}/{kernel_name}, {problem}: {reason}")
    # Meta tensors: only dtypes, strides and alignment reach the compiler, and theirs is address 0.
    inputs, outputs = op.on_meta(problem)
    found: list[Launch] = []
    with _compiling(capability, found):
        kernel.launch(problem, config, inputs, outputs)
    return found, {**inputs, **outputs}


def cubin_of(compiled: Any) -> Cubin:
    """Return the machine code of one of Triton's compiled kernels."""
    metadata = compiled.metadata
    return Cubin(metadata.name, compiled.asm["cubin"], metadata.shared, metadata.num_warps)
