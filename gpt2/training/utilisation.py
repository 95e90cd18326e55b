"""Model FLOPs utilisation: what a token needs, over what the device's BF16 rate allows."""

from __future__ import annotations

from dataclasses import dataclass

from jetfire.bench import records
from jetfire.core.device import Device

# Dense BF16 TFLOP/s with FP32 accumulation, from the makers' datasheets.
DATASHEET = {
    "B200": 2250.0,
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


@dataclass(frozen=True)
class Peak:
    """A device's BF16 rate in TFLOP/s and where the figure is from."""

    tflops: float
    source: str


def peak(device: Device) -> Peak | None:
    """Return what was measured on such a device for docs/results/, else a datasheet's figure."""
    known = records.peaks().get(device.name)
    if known is not None and "bf16_tflops" in known.peaks:
        return Peak(known.peaks["bf16_tflops"], f"measured, {known.source}")
    for name, tflops in DATASHEET.items():
        if device.kind == "cuda" and name in device.name:
            return Peak(tflops, "datasheet")
    return None
