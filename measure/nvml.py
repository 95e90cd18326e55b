"""Clock, power and throttling of a GPU, read through NVML where the machine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from jetfire.core.device import Device

# Reasons of a low clock (nvml.h, nvmlClocksThrottleReason*). Idle, a clock set by the user and a
# display's settings are left out: they are no fault of the run.
_REASONS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hardware thermal",
    "HwPowerBrakeSlowdown": "power brake",
}


class Nvml:
    """The readings of one GPU; each is None where the driver gives none."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def open(cls, device: torch.device) -> Nvml | None:
        """Return the GPU of a torch device, or None where NVML cannot be reached."""
        import torch

        if device.type != "cuda":
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except Exception:  # no library, no driver, or a device that NVML does not list (MIG)
            return None

    def _read(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def sm_mhz(self) -> float | None:
        clock = self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
        return None if clock is None else float(clock)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is None:
            return None
        return tuple(
            told
            for name, told in _REASONS.items()
            if bits & getattr(self._nvml, f"nvmlClocksThrottleReason{name}")
        )

    def utilisation(self) -> float | None:
        """Return the share of the last second or less in which any process's kernel ran."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def joules(self) -> float | None:
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def driver(self) -> str | None:
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)


def driver_of(device: Device) -> str | None:
    """Return a GPU's driver; None for a CPU, and where NVML cannot be reached."""
    nvml = Nvml.open(device.torch_device)
    return nvml.driver() if nvml else None
