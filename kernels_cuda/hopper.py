"""Host code that the sm_90a kernels share: where they run, and the product itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetfire.kernels_cuda import driver

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.core.kernel import Config

TILE_K = 128


def wgmma_wrapper(tile_n: int) -> str:
    """Write the s8 wgmma of 64×tile_n×32: its operand list is as long as tile_n/2."""
    count = tile_n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void wgmma(int (&d)[{count}], unsigned long long a,
                                      unsigned long long b, int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{tile_n}k32.s32.s8.s8 "
      "{{{registers}}}, %{count}, %{count + 1}, p;\\n}}"
      : {operands} : "l"(a), "l"(b), "r"(accumulate));
}}"""


def unfit(device: Device) -> str | None:
    """Return why these kernels cannot run on a device, or be compiled; None where they can."""
    if device.kind != "cuda" or device.capability != (9, 0):
        return "needs sm_90: it is written in its warp-group instructions"
    return driver.missing()


def outside(config: Config, space: Mapping[str, Sequence[Any]]) -> str | None:
    """Return which field of a config has a value that its space has not."""
    for name, values in space.items():
        if getattr(config, name) not in values:
            return f"{name}={getattr(config, name)}: expected one of {values}"
    return None
