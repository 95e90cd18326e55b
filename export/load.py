"""Launch an exported kernel through the CUDA driver; needs Python and libcuda, nothing else.

`launch.json` beside this file names the tensors with their dtypes and shapes: all contiguous, each
passed as its device address. The current CUDA context must be that of the addresses.

    kernel = Exported(Path("folder"))
    kernel.launch({"x": x.data_ptr(), "q": q.data_ptr(), …}, stream=0)
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED_LIMIT = 48 << 10
_SCALARS: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class DriverError(RuntimeError):
    """A CUDA driver call failed."""


class Exported:
    """The launches of one exported kernel, loaded into the current context.

    Args:
        folder: what `jetfire export` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "launch.json").read_text())
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._functions = [self._load(folder, launch) for launch in self.manifest["launches"]]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise DriverError(f"{name} failed with CUDA error {code}")

    def _load(self, folder: Path, launch: Mapping[str, Any]) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        path = str(folder / launch["file"]).encode()
        self._call("cuModuleLoad", ctypes.byref(module), path)
        name = launch["function"].encode()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
        if launch["shared_bytes"] > _STATIC_SHARED_LIMIT:
            shared = ctypes.c_int(launch["shared_bytes"])
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        return function

    def launch(self, addresses: Mapping[str, int], stream: int = 0) -> None:
        """Enqueue every launch, in order.

        Args:
            addresses: device address of each tensor that `launch.json` names.
            stream: a CUstream handle; 0 is the default stream.
        """
        for function, launch in zip(self._functions, self.manifest["launches"], strict=True):
            values: list[Any] = []
            for argument in launch["arguments"]:
                if "tensor" in argument:
                    values.append(ctypes.c_void_p(addresses[argument["tensor"]]))
                else:
                    values.append(_SCALARS[argument["type"]](argument["value"]))
            values += [ctypes.c_void_p(None)] * launch["null_pointers"]
            pointers = (ctypes.c_void_p * len(values))(
                *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
            )
            self._call(
                "cuLaunchKernel",
                function,
                *(ctypes.c_uint(size) for size in (*launch["grid"], *launch["block"])),
                ctypes.c_uint(launch["shared_bytes"]),
                ctypes.c_void_p(stream),
                pointers,
                None,
            )
