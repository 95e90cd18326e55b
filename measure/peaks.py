"""Peaks of a device, measured on it: the ceilings of every roofline."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from filelock import FileLock

from jetfire.core import files, schema
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning
from jetfire.core.files import MIB, Missing, Unreadable, Unwritable, write
from jetfire.core.schema import Line, most
from jetfire.measure import peers, timer
from jetfire.measure.load import Load
from jetfire.measure.results import Peaks

# 1 kept peaks measured on a busy machine, and with threads that spin; 2 knew of torch._int_mm alone
# on a CPU.
VERSION = 3
LOCK_S = 120.0  # another process may be measuring
BUDGET_S = 1.0  # per rate: a GPU's ten rounds take less, a slow CPU's one product 0.6 s


def _fastest(
    calls: Mapping[str, timer.Call], device: torch.device, capture: bool = True
) -> tuple[str, float]:
    """Return the name of the fastest of some calls, and its milliseconds."""
    variants = {name: [call] for name, call in calls.items()}
    timings = timer.time_calls(variants, device, 10, budget_s=BUDGET_S, capture=capture)
    name = min(timings, key=lambda name: timings[name].ms)
    return name, timings[name].ms


def _copy_gbps(device: torch.device, nbytes: int) -> tuple[float, str]:
    """Return bandwidth, and how: the better of torch's copy_ and the `copy` peer, without graphs.

    On an H200 copy_ alone reaches 4.28 TB/s, but 2.7 as the memcpy node of a CUDA graph.
    """
    source = torch.empty(nbytes, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    calls = {
        "torch copy_": lambda: target.copy_(source),
        "an elementwise pass": peers.copy(2 * nbytes, device),
    }
    best, ms = _fastest(calls, device, capture=False)
    return 2 * nbytes / ms / 1e6, f"{best} of {nbytes >> 20} MiB, bytes read and written"


def _product_tflops(device: torch.device, name: str, size: int) -> float:
    _, ms = _fastest({name: peers.gemm(size, size, size, device)[name]()}, device)
    return 2 * size**3 / ms / 1e9


def _cpu_int8_tops(size: int) -> tuple[float, str]:
    """Return the rate of a product of codes, and how: of torch's own, or of 64-bit floats.

    Those, which our CPU kernels multiply in, are faster without instructions for INT8.
    """
    device = torch.device("cpu")
    a, b = torch.randint(-127, 128, (2, size, size), dtype=torch.int8, device=device)
    x, y = a.double(), b.double()
    calls = {"torch._int_mm": lambda: torch._int_mm(a, b.t()), "torch.matmul": lambda: x @ y.t()}
    name, ms = _fastest(calls, device)
    how = f"{name} NT {size}³" + (" in FP64" if name == "torch.matmul" else "")
    return 2 * size**3 / ms / 1e9, how


def _int8_tops(device: torch.device) -> tuple[float, str]:
    """Return the matrix units' rate on operands that stay on the SM, or torch's product's; and how.

    On an H200 these are 1861 and 940. A library's rate is no ceiling: our kernels are above it.
    """
    library = _product_tflops(device, "int8_torch", 8192), "torch._int_mm NT 8192³"
    try:
        from jetfire.measure import ceiling

        programs = 3 * torch.cuda.get_device_properties(device).multi_processor_count
        call, operations = ceiling.int8_call(device, programs, 4000)
        _, ms = _fastest({"int8": call}, device)
    except Exception as error:  # no Triton, or none that compiles for this architecture
        return library[0], f"{library[1]} (matrix instructions alone: {type(error).__name__})"
    alone = operations / ms / 1e9, "matrix instructions alone, operands resident on the SM"
    return max(library, alone)


def measure(device: Device) -> Peaks:
    """Measure copy bandwidth and matrix rates; note how, and whether others used the device."""
    # A watch of its own: whoever held the cache's lock may have kept the device busy till now.
    load, where = Load(device), device.torch_device
    if device.kind == "cpu":
        nbytes, size, product = 1 << 28, 1024, "bf16_matmul"
    else:
        nbytes = min(4 << 30, torch.cuda.mem_get_info(where)[0] // 8)
        size, product = 8192, "cublas_bf16"
    copy, copy_how = _copy_gbps(where, nbytes)
    tops, tops_how = _cpu_int8_tops(size) if device.kind == "cpu" else _int8_tops(where)
    found: Peaks = {
        "copy_gbps": copy,
        "int8_tops": tops,
        "bf16_tflops": _product_tflops(where, product, size),
        "how": {
            "copy_gbps": copy_how,
            "int8_tops": tops_how,
            "bf16_tflops": f"torch.matmul NT {size}³",
        },
    }
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    if busy := load.text():
        found["busy"] = busy
    return found


_CACHE: Any = Annotated[dict[Line, Peaks], most(1000)]


def cached(watch: Load, remeasure: bool = False) -> Peaks:
    """Return a watched device's peaks, measured once per version of all that they depend on.

    Peaks that were measured while others used the device say so, and are measured anew once the
    device seems quiet.
    """
    file = files.cache() / "peaks.json"
    key = _key(watch.device, watch.driver)
    known: dict[str, Peaks] = {}
    with ExitStack() as stack:
        kept = False  # a cache that cannot be kept costs two seconds, not the run
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file.with_suffix(".lock"), timeout=LOCK_S))
            known, kept = _read(file), file.is_file() or not file.exists()
        found = known.get(key)
        if found is None or remeasure or ("busy" in found and watch.was_quiet):
            found = known[key] = measure(watch.device)
            if kept:
                with suppress(OSError, Unwritable):
                    write(file, json.dumps(known, indent=1) + "\n", alone=True)
        return found


def _key(device: Device, driver: str | None) -> str:
    """Return a key of all that peaks depend on; on a CPU, also its threads and how they wait."""
    versions = [torch.__version__, f"timer {timer.VERSION}", f"peaks {VERSION}"]
    parts = [device.label, driver, *versions]
    if device.kind == "cpu":
        policies = [os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
        parts += [f"{torch.get_num_threads()} threads", *policies]
    return "|".join(map(str, parts))


def _read(file: Path) -> dict[str, Any]:
    """Return the cache's content; nothing, with a warning, where it cannot be used."""
    try:
        found: dict[str, Any] = schema.load(file, _CACHE, MIB)
        return found
    except Missing:
        return {}
    except Unreadable as error:
        text = f"{file}: {error.reason}: its peaks are measured anew"
        warnings.warn(text, JetfireWarning, stacklevel=3)
        return {}
