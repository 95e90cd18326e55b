"""The origin of a tuned config: the device, the software and the timer."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache
from importlib import metadata

import torch

from jetfire import __version__
from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.profiles import Provenance
from jetfire.measure.nvml import driver_of
from jetfire.measure.timer import VERSION


@cache  # a package's metadata takes 0.7 ms to read, and a study is named for each of its trials
def software() -> Mapping[str, str | None]:
    """Return the versions of ``cuda``, ``torch`` and ``triton``, which compile kernels."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {"cuda": torch.version.cuda, "torch": str(torch.__version__), "triton": triton}


def of(kernel: Kernel, device: Device) -> Provenance:
    """Return the provenance of a config that is tuned now, on this device."""
    return {
        "gpu": device.name,
        "capability": device.capability,
        "driver": driver_of(device),
        **software(),  # type: ignore[typeddict-item]
        "source": kernel.source_hash(),
        "timer": VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jetfire": __version__,
    }
