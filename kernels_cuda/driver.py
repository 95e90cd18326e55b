"""Launch compiled CUDA on torch tensors: modules, TMA's tensor maps, the current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jetfire.core.errors import JetfireError

if TYPE_CHECKING:
    import torch

# CUtensorMapDataType and CUtensorMapSwizzle (CUDA driver API, "Tensor Map Object Management").
DATA_TYPES = {"int8": 0, "fp16": 6, "fp32": 7, "bf16": 9}
ELEMENT_BYTES = {"int8": 1, "fp16": 2, "fp32": 4, "bf16": 2}
SWIZZLES = {32: 1, 64: 2, 128: 3}
PROMOTE_TO_256_BYTES = 3
NO_MAP = bytes(128)
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CUlaunchAttributeID (CUDA driver API, "Data types used by CUDA driver").
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class DriverError(JetfireError):
    """The CUDA driver refused what we asked of it: a fault of ours."""


@cache
def missing() -> str | None:
    """Return why CUDA kernels cannot be compiled here; None where they can."""
    return None if find_spec("cupy") else "needs CuPy: pip install 'jetfire[cuda]'"


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _make_current() -> None:
    """Make the context of the thread's device the thread's current one."""
    import torch
    from cupy.cuda import runtime

    runtime.setDevice(torch.cuda.current_device())


def _in_context(call: Callable[[], int]) -> int:
    """Call the driver; once more, with the device's context, where the thread has none.

    This may be the thread's first call of CUDA, as where a gradient's first kernel is ours:
    autograd's thread has no context until then. CuPy's loads and launches make it current.
    """
    code = call()
    if code != INVALID_CONTEXT:
        return code
    _make_current()
    return call()


@lru_cache(maxsize=16384)
def tensor_map(
    address: int,
    dtype: Literal["int8", "fp16", "fp32", "bf16"],
    rows: int,
    columns: int,
    pitch: int,
    box_rows: int,
    box_columns: int,
) -> bytes:
    """Make a CUtensorMap of a row-major matrix, read or written in boxes of swizzled rows.

    A box's rows have 32, 64 or 128 bytes, which is how its shared memory is swizzled.

    Args:
        address: of the first element, a multiple of 16.
        pitch: bytes from row to row, a multiple of 16.
    """
    storage = (ctypes.c_uint64 * 24)()
    start = ctypes.addressof(storage)
    aligned = start + -start % 64
    encode = partial(
        _libcuda().cuTensorMapEncodeTiled,
        ctypes.c_void_p(aligned),
        DATA_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(pitch),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        SWIZZLES[box_columns * ELEMENT_BYTES[dtype]],
        PROMOTE_TO_256_BYTES,
        0,
    )
    if code := _in_context(encode):
        raise DriverError(
            f"cuTensorMapEncodeTiled: error {code} for {rows}x{columns} {dtype}, pitch {pitch}, "
            f"boxes of {box_rows}x{box_columns}, address {address:#x}"
        )
    return ctypes.string_at(aligned, 128)


@cache
def processors(device: int) -> int:
    """Count the streaming multiprocessors of a device."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an ID and 64 bytes of value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _called(name: str, *arguments: Any) -> None:
    """Call a function of the driver."""
    if code := _in_context(partial(getattr(_libcuda(), name), *arguments)):
        raise DriverError(f"{name}: error {code}")


class Function:
    """A kernel of a cubin, loaded on a device."""

    def __init__(self, cubin: bytes, name: str, device: int, shared_bytes: int) -> None:
        import torch
        from cupy.cuda import driver
        from cupy.cuda.function import Module

        self._device = device
        with torch.cuda.device(device):
            self._module = Module()
            self._module.load(cubin)
            self._function = self._module.get_function(name)
            driver.funcSetAttribute(
                self._function.ptr,
                driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_bytes,
            )
        self._shared_bytes = shared_bytes

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch on the device's current torch stream.

        Args:
            arguments: NumPy scalars, and NumPy arrays for structs by value.
        """
        import torch

        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self(blocks, threads, arguments)
            return
        stream = _stream(torch._C._cuda_getCurrentRawStream(self._device))
        self._function((blocks, 1, 1), (threads, 1, 1), arguments, self._shared_bytes, stream)

    def launch_beside(self, blocks: int, threads: int, argument: np.ndarray) -> None:
        """Launch it to run beside the launch before it on the device's current torch stream.

        It starts once every block of that one has ended or called `start_next` (launches.cuh). It
        must call `wait_for_previous` before it reads what that one writes; and in any case, so that
        what comes after it comes after both.

        Args:
            argument: the kernel's only one, a struct.
        """
        import torch

        with torch.cuda.device(self._device):
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            config = self._config(blocks, threads, PROGRAMMATIC_STREAM_SERIALIZATION, 1)
            config.stream = stream
            addresses = (ctypes.c_void_p * 1)(argument.ctypes.data)
            handle = ctypes.c_void_p(self._function.ptr)
            _called("cuLaunchKernelEx", ctypes.byref(config), handle, addresses, None)

    def clusters(self, size: int, threads: int) -> int:
        """Count the clusters of `size` blocks that the device holds at once."""
        import torch

        found = ctypes.c_int()
        with torch.cuda.device(self._device):
            config = self._config(size, threads, CLUSTER_DIMENSION, size, 1, 1)
            handle = ctypes.c_void_p(self._function.ptr)
            arguments = ctypes.byref(found), handle, ctypes.byref(config)
            _called("cuOccupancyMaxActiveClusters", *arguments)
        return found.value

    def _config(self, blocks: int, threads: int, attribute: int, *value: int) -> _LaunchConfig:
        """Return a launch with one attribute."""
        words = (ctypes.c_uint * 16)(*value)
        return _LaunchConfig(
            (ctypes.c_uint * 3)(blocks, 1, 1),
            (ctypes.c_uint * 3)(threads, 1, 1),
            self._shared_bytes,
            None,
            ctypes.pointer(_Attribute(attribute, 0, words)),
            1,
        )


class _Stream:
    """A stream's handle, which is all that CuPy's launch reads of a stream; it is not owned."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


@lru_cache(maxsize=256)
def _stream(handle: int) -> _Stream:
    return _Stream(handle)


def struct_argument(content: bytes, size: int) -> np.ndarray:
    """Make a struct of `size` bytes that a kernel takes by value."""
    return np.frombuffer(content.ljust(size, b"\0"), dtype=f"V{size}")


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
