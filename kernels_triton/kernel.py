"""The base class of Triton kernels."""

from __future__ import annotations

from typing import Any

from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin


class TritonKernel(Kernel):
    """A kernel whose machine code is what its own `launch` would have Triton compile."""

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin]:
        from jetfire.kernels_triton.crosscompile import cubin_of, record_launches

        launches, _ = record_launches(self.op, self.name, problem, config, capability)
        return [cubin_of(launch.compiled) for launch in launches]
