"""How a case is run."""

from __future__ import annotations

from dataclasses import dataclass

GUARD = 4096  # bytes on either side of a tensor


@dataclass(frozen=True)
class Mode:
    """How a case is run.

    Attributes:
        host: inputs, poison, reference and checks are the CPU's, and copied: no other kernel than
            the one that is tested runs on the device.
        guard: bytes around tensors.
        initialised: outputs are filled before a launch, and read after it.
    """

    host: bool = False
    guard: int = GUARD
    initialised: bool = True
