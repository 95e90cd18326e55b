"""The origin of a tuned config and of a results file: the device, the software and the timer."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

import torch

from jetfire import __version__
from jetfire.core import checkout, loaded
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


def device_record(device: Device, driver: str | None, peaks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `device` of a results file: it, the software, the commit, the time, its peaks.

    Args:
        driver: a GPU's; None for a CPU, and where it is not known.
    """
    now = datetime.datetime.now(datetime.UTC)
    return {
        "name": device.name,
        "kind": device.kind,
        "capability": list(device.capability) if device.capability else None,
        "sms": device.sms,
        "l2_bytes": device.l2_bytes,
        "driver": driver,
        **software(),
        "python": platform.python_version(),
        "jetfire": __version__,
        "timer": VERSION,
        "commit": checkout.measured(loaded.files()),
        "time": now.isoformat(timespec="seconds"),
        "date": now.date().isoformat(),
        "peaks": dict(peaks),
    }
