"""What a device can do at best, measured on it: the ceilings of every roofline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import platformdirs
import torch
from filelock import FileLock

from jetfire.bench import timer
from jetfire.bench.results import write_text
from jetfire.ops import peers
from jetfire.ops.device import Device


def _copy_gbps(device: torch.device, nbytes: int) -> tuple[float, str]:
    """Bandwidth, and how: the better of torch's copy_ and the `copy` peer, out of graphs.

    An H200 runs the memcpy node that copy_ becomes in a CUDA graph at 2.7 TB/s, alone at 4.28.
    """
    source = torch.empty(nbytes, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    calls = {
        "torch copy_": lambda: target.copy_(source),
        "an elementwise pass": peers.elementwise(lambda: None, 2 * nbytes, device)["copy"](),
    }
    timings = timer.time_calls(
        {name: [call] for name, call in calls.items()}, device, 10, budget_s=5, capture=False
    )
    best = min(timings, key=lambda name: timings[name].ms)
    how = f"{best} of {nbytes >> 20} MiB, bytes read and written"
    return 2 * nbytes / timings[best].ms / 1e6, how


def _product_tflops(device: torch.device, name: str, size: int) -> float:
    call = peers.gemm(size, size, size, device)[name]()
    timing = timer.time_calls({name: [call]}, device, 10, budget_s=5)
    return 2 * size**3 / timing[name].ms / 1e9


def _cpu_int8_tops(size: int) -> float:
    device = torch.device("cpu")
    a, b = torch.randint(-127, 128, (2, size, size), dtype=torch.int8, device=device)
    timing = timer.time_calls({"int8": [lambda: torch._int_mm(a, b.t())]}, device, 10, budget_s=5)
    return 2 * size**3 / timing["int8"].ms / 1e9


def _int8_tops(device: torch.device) -> tuple[float, str]:
    """What the matrix units do on operands that stay on the SM, or torch's product; and which.

    On an H200 1861 and 940: a library's rate is no ceiling, ours are above it.
    """
    library = _product_tflops(device, "int8_torch", 8192), "torch._int_mm NT 8192³"
    try:
        from jetfire.bench import ceiling

        programs = 3 * torch.cuda.get_device_properties(device).multi_processor_count
        call, operations = ceiling.int8_call(device, programs, 4000)
        timing = timer.time_calls({"int8": [call]}, device, 10, budget_s=5)["int8"]
    except Exception as error:  # no Triton, or none that compiles for this architecture
        return library[0], f"{library[1]} (matrix instructions alone: {type(error).__name__})"
    alone = operations / timing.ms / 1e9, "matrix instructions alone, operands resident on the SM"
    return max(library, alone)


def measure(device: Device) -> dict[str, Any]:
    """Copy bandwidth in GB/s, INT8 and BF16 matrix rates in 1e12 operations a second, and how."""
    where = device.torch_device
    if device.kind == "cpu":
        copy, how = _copy_gbps(where, 1 << 28)
        return {
            "copy_gbps": copy,
            "int8_tops": _cpu_int8_tops(1024),
            "bf16_tflops": _product_tflops(where, "bf16_matmul", 1024),
            "how": {
                "copy_gbps": how,
                "int8_tops": "torch._int_mm NT 1024³",
                "bf16_tflops": "torch.matmul NT 1024³",
            },
        }
    copy, how = _copy_gbps(where, min(4 << 30, torch.cuda.mem_get_info(where)[0] // 8))
    tops, int8_how = _int8_tops(where)
    found = {
        "copy_gbps": copy,
        "int8_tops": tops,
        "bf16_tflops": _product_tflops(where, "cublas_bf16", 8192),
        "how": {
            "copy_gbps": how,
            "int8_tops": int8_how,
            "bf16_tflops": "torch.matmul NT 8192³",
        },
    }
    torch.cuda.empty_cache()
    return found


def cached(device: Device, driver: str | None, remeasure: bool = False) -> dict[str, Any]:
    """The peaks of a device, measured at most once for each driver, torch and timer version."""
    folder = Path(platformdirs.user_cache_dir("jetfire"))
    key = "|".join([device.label, str(driver), torch.__version__, f"timer {timer.VERSION}"])
    file = folder / "peaks.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "peaks.lock"):
            known = _read(file)
            if remeasure or key not in known:
                known[key] = measure(device)
                write_text(file, json.dumps(known, indent=1) + "\n")
            return known[key]
    except OSError:  # a cache that cannot be kept costs two seconds, not the run
        return measure(device)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
