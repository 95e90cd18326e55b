"""What is read through NVML, from a driver that is made up."""

import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch

from jetfire.measure.nvml import Nvml

GPU = torch.device("cuda", 0)
# nvml.h's nvmlClocksEventReason*, by pynvml's names, and what we call those that we tell of.
REASONS = {
    "GpuIdle": None,
    "ApplicationsClocksSetting": None,
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": None,
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hardware thermal",
    "HwPowerBrakeSlowdown": "power brake",
    "DisplayClockSetting": None,
}


class Driver:
    """A module as pynvml is, of one GPU; functions that it lacks raise AttributeError."""

    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM

    class NVMLError(Exception):
        pass

    def __init__(self, **readings):
        self.readings = {"reasons": 0, "mhz": 1980, "millijoules": 5500, "gpu": 37, **readings}

    def __getattr__(self, name):
        if not name.startswith("nvmlClocksThrottleReason"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlInit(self):
        if "down" in self.readings:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1-2"
        return "the handle"

    def _read(self, handle, name):
        assert handle == "the handle"
        if self.readings[name] is None:
            raise self.NVMLError
        return self.readings[name]

    def nvmlDeviceGetClockInfo(self, handle, clock):
        assert clock == pynvml.NVML_CLOCK_SM
        return self._read(handle, "mhz")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._read(handle, "reasons")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._read(handle, "millijoules")

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._read(handle, "gpu"), memory=0)

    def nvmlSystemGetDriverVersion(self):
        return b"580.1"


@pytest.fixture
def opened(monkeypatch):
    """What opens the GPU with a driver of some readings."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))

    def open_(**readings) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", Driver(**readings))
        return Nvml.open(GPU)

    return open_


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_for_a_low_clock_is_told_by_its_own_bit(name, opened):
    bit = getattr(pynvml, f"nvmlClocksEventReason{name}")
    told = () if REASONS[name] is None else (REASONS[name],)
    assert opened(reasons=bit).throttle_reasons() == told


def test_several_reasons_and_none(opened):
    assert opened(reasons=0x4 | 0x40 | 0x1).throttle_reasons() == ("power cap", "hardware thermal")
    assert opened(reasons=0).throttle_reasons() == ()
    assert opened(reasons=None).throttle_reasons() is None


def test_units(opened):
    nvml = opened()
    assert nvml.sm_mhz() == 1980.0
    assert nvml.joules() == 5.5
    assert nvml.utilisation() == 0.37
    assert nvml.driver() == "580.1"


def test_what_cannot_be_read_is_none(opened, monkeypatch):
    nvml = opened(mhz=None, millijoules=None, gpu=None)
    assert (nvml.sm_mhz(), nvml.joules(), nvml.utilisation()) == (None, None, None)
    monkeypatch.delattr(Driver, "nvmlDeviceGetUtilizationRates")
    assert opened().utilisation() is None


def test_without_a_driver_or_a_gpu_there_is_none(opened, monkeypatch):
    assert opened(down=True) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.open(GPU) is None
    assert Nvml.open(torch.device("cpu")) is None
