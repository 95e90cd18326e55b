"""The device that a kernel is to run on, as `legal`, the tuner and the bench see it."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from jetfire.core.errors import NoDeviceError, UsageError

if TYPE_CHECKING:
    import torch


# KiB of shared memory per thread block, by architecture that kernels are compiled for.
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}
# Their names, as `--arch` takes them.
ARCHITECTURES = tuple(f"{major}{minor}" for major, minor in SHARED_KIB)
SM_REGISTERS = 65536  # of 32 bits, from sm_80 to sm_100


@dataclass(frozen=True)
class Device:
    """A processor and the limits that decide which configs are legal on it.

    Attributes:
        kind: ``"cuda"``, or ``"cpu"``.
        index: the CUDA ordinal (0 on the CPU).
        name: the vendor's name, for instance ``"NVIDIA H200"``.
        capability: compute capability as ``(major, minor)``; None on the CPU.
        sms: streaming multiprocessors (cores on the CPU).
        shared_bytes: shared memory that a thread block may opt in to, in bytes.
        l2_bytes: L2 cache size in bytes (0 where unknown).
        interpreted: Triton kernels run on CPU tensors through Triton's interpreter.
    """

    kind: Literal["cuda", "cpu"]
    index: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    sms: int = 1
    shared_bytes: int = 0
    l2_bytes: int = 0
    interpreted: bool = False

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def label(self) -> str:
        return f"{self.name} (CPU)" if self.kind == "cpu" else self.name

    def alike(self) -> list[Device]:
        """Return all devices of this one's model."""
        if self.kind == "cpu":
            return [self]
        import torch

        found = [_cuda(i) for i in range(torch.cuda.device_count())]
        return [device for device in found if device.name == self.name]

    def works(self) -> bool:
        """Return whether it can be used still: every call after an illegal address, say, fails."""
        if self.kind == "cuda":
            import torch

            with contextlib.suppress(Exception):
                torch.cuda.synchronize(self.index)
                return True
            return False
        return True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Device:
        """Return the device that holds a tensor."""
        return _cuda(tensor.device.index or 0) if tensor.is_cuda else _cpu()

    @classmethod
    def parse(cls, text: str = "auto") -> Device:
        """Return the device of ``auto`` (first GPU, else CPU), ``cpu``, ``cuda`` or ``cuda:N``.

        Raises:
            UsageError: the text names no kind of device.
            NoDeviceError: that device is not on this machine.
        """
        check_name(text)
        kind, _, index = text.partition(":")
        if kind == "cpu":
            return _cpu()
        import torch

        if kind == "auto" and not torch.cuda.is_available():
            return _cpu()
        count = torch.cuda.device_count()
        if int(index or 0) >= count:
            raise NoDeviceError(
                f"device {text!r}: this machine has {count} CUDA device{'s' * (count != 1)}"
            )
        return _cuda(int(index or 0))


def check_name(text: str) -> None:
    """Raise UsageError where a text names no kind of device. The device need not be present."""
    kind, _, index = text.partition(":")
    numbered = kind == "cuda" and index.isdecimal() and len(index) < 5
    if kind not in ("auto", "cpu", "cuda") or (text != kind and not numbered):
        raise UsageError(f"device {text!r}: expected auto, cpu, cuda or cuda:N")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def _cpu() -> Device:
    return Device(
        kind="cpu",
        name=_cpu_name(),
        sms=os.cpu_count() or 1,
        interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


@cache
def _cuda(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        l2_bytes=properties.L2_cache_size,
    )


def capability_of(text: str) -> tuple[int, int]:
    """Return ``90``, ``9.0``, ``9.0a`` or ``sm_90`` as (9, 0).

    Raises:
        UsageError: it is none of these.
    """
    digits = text.removeprefix("sm_").removesuffix("a").replace(".", "")
    if not (digits.isascii() and digits.isdecimal()) or not 2 <= len(digits) < 100:
        raise UsageError(f"--arch {text}: expected an architecture such as 90, 9.0a or sm_90")
    return int(digits[:-1]), int(digits[-1])


def target_device(capability: tuple[int, int]) -> Device:
    """Return a device of an architecture that need not be present, for cross-compilation.

    Shared memory is that of the architecture's data-centre part (CUDA C++ Programming Guide,
    "Technical Specifications per Compute Capability").
    """
    if capability not in SHARED_KIB:
        known = ", ".join(f"sm_{a}{b}" for a, b in SHARED_KIB)
        raise NoDeviceError(
            f"architecture sm_{capability[0]}{capability[1]}: expected one of {known}"
        )
    return Device(
        kind="cuda",
        name=f"sm_{capability[0]}{capability[1]}",
        capability=capability,
        sms=132,
        shared_bytes=SHARED_KIB[capability] * 1024,
        l2_bytes=50 << 20,
    )
