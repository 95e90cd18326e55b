"""Launches of a kernel's `launch`, every argument traced to where it comes from.

Those of CUDA C++ in a Python file are known by their parameters' names. Of a Triton kernel
`record` runs the kernel's own `launch` in a process of its own, on meta tensors, under a driver
that compiles and launches nothing: this process may interpret Triton, or have launched it already.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetfire.core import broken, registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import JetfireError, UsageError
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors
from jetfire.export.signature import name_of_output
from jetfire.kernels_cuda.inline import InlineKernel

if TYPE_CHECKING:
    from jetfire.kernels_triton.crosscompile import Launch


_SCALARS = {"int": "i32", "long long": "i64", "float": "fp32"}


@dataclass(frozen=True)
class Address:
    """The address of a byte of a tensor.

    Attributes:
        of: a parameter's name (`signature.Parameter`), or a number of `LaunchRecording.scratch`.
    """

    of: str | int
    offset: int


@dataclass(frozen=True)
class TensorMap:
    """A CUtensorMap by value, of a contiguous or row-strided tensor.

    Attributes:
        sizes, strides, box: outermost first, in elements.
        swizzle: bytes, 0 for none.
    """

    address: Address
    dtype: str
    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel function.

    Attributes:
        type: a pointer's, an integer's or a float's in Triton's words (``i32``), or ``map``.
    """

    name: str
    type: str
    value: Address | TensorMap | int | float


@dataclass(frozen=True)
class Call:
    """One launch of a kernel function.

    Attributes:
        arguments: all but Triton's two trailing pointers, to memory that no kernel here uses.
    """

    cubin: Cubin
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Scratch:
    """Memory that a launch allocates.

    Attributes:
        zeroed: it must hold zeros before a launch, which leaves them there.
    """

    nbytes: int
    zeroed: bool


@dataclass(frozen=True)
class LaunchRecording:
    """All that one call of `launch` does."""

    calls: tuple[Call, ...]
    scratch: tuple[Scratch, ...]


# Of what is recorded: the names of op and kernel, the architecture, problem and config.
Request = tuple[str, str, tuple[int, int], Any, Any]


def record(requests: Sequence[Request]) -> list[LaunchRecording]:
    """Return what a kernel's launch does, for each request.

    Raises:
        UsageError: a launch does what a C program could not do after it; or no such kernel.
        WrongResultError: the kernel does not compile.
    """
    op, name, *_ = requests[0]
    kernel = registry.get_kernel(registry.get(op).name, name)
    if isinstance(kernel, InlineKernel):
        return [_inline(kernel, *request[2:]) for request in requests]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", "from jetfire.export.recording import main; main()"],
        input=pickle.dumps(list(requests)),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"recording launches failed:\n{done.stderr.decode()[-2000:]}")
    answer: list[LaunchRecording] | JetfireError = pickle.loads(done.stdout)
    if isinstance(answer, JetfireError):
        raise answer
    return answer


def _inline(
    kernel: InlineKernel, capability: tuple[int, int], problem: Any, config: Any
) -> LaunchRecording:
    """Return the launch of a kernel whose parameters' names say what they get."""
    op = registry.get(kernel.op)
    inputs, outputs = op.on_meta(problem)
    owners = {name: name_of_output(op, problem, inputs, name) for name in outputs}
    arguments = tuple(
        Argument(name, "pointer", Address(owners.get(name, name), 0))
        if kind == "*"
        else Argument(name, _SCALARS[kind], value)
        for kind, name, value in kernel.arguments(problem, {**inputs, **outputs})
    )
    (cubin,) = kernel.cubins(problem, config, capability)
    grid = (kernel.blocks(problem, config), 1, 1)
    return LaunchRecording((Call(cubin, grid, arguments),), ())


def main() -> None:
    """Answer `record` on standard output: recordings, or why there are none."""
    requests: list[Request] = pickle.load(sys.stdin.buffer)
    answer: list[LaunchRecording] | JetfireError
    try:
        answer = [_compiled(request) for request in requests]
    except JetfireError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))


def _compiled(request: Request) -> LaunchRecording:
    op, kernel, capability, *_ = request
    with broken.compiling(op, kernel, "sm_{}{}".format(*capability)):
        return _record(*request)


class Memory:
    """Every byte that a launch may be given the address of."""

    def __init__(self) -> None:
        self.scratch: list[Scratch] = []
        self._owners: dict[int, str | int] = {}
        self._kept: list[torch.Tensor] = []  # an address says nothing of storage that was freed

    def name(self, tensor: torch.Tensor, owner: str) -> None:
        self._owners[tensor.untyped_storage()._cdata] = owner
        self._kept.append(tensor)

    def add(self, tensor: torch.Tensor, *, zeroed: bool) -> None:
        """Take note of a new tensor of the launch's own."""
        storage = tensor.untyped_storage()
        self._owners[storage._cdata] = len(self.scratch)
        self._kept.append(tensor)
        self.scratch.append(Scratch(storage.nbytes(), zeroed))

    def find(self, parameter: str, tensor: torch.Tensor) -> Address:
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise UsageError(
                f"parameter {parameter} is no input, output or new tensor: cannot export"
            )
        return Address(owner, int(tensor.storage_offset()) * tensor.element_size())


@contextmanager
def watching(memory: Memory) -> Iterator[None]:
    """Note what torch allocates within, and refuse whatever else it does."""
    from jetfire.core import workspace

    counting = False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in workspace.ALLOCATING:
                memory.add(result, zeroed=counting)
            elif not func.is_view:
                raise UsageError(f"a launch that calls {func} cannot be exported: expected kernels")
            return result

    def counters(device: torch.device, count: int) -> torch.Tensor:
        nonlocal counting
        counting = True
        try:
            return torch.empty(count, dtype=torch.int32, device=device)
        finally:
            counting = False

    # Kernels import it by name.
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("jetfire.") and vars(module).get("counters") is workspace.counters
    ]
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "counters", counters))
        stack.enter_context(Watch())
        yield


def _record(
    op_name: str, kernel_name: str, capability: tuple[int, int], problem: Any, config: Any
) -> LaunchRecording:
    from triton import knobs

    from jetfire.kernels_triton.crosscompile import record_launches

    op = registry.get(op_name)
    kernel = type(registry.get_kernel(op_name, kernel_name))
    original: Callable[..., None] = kernel.launch
    memory = Memory()

    def launch(self: Any, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        for name, tensor in inputs.items():
            memory.name(tensor, name)
        for name, tensor in outputs.items():
            memory.name(tensor, name_of_output(op, problem, inputs, name))
        with watching(memory):
            original(self, problem, config, inputs, outputs)

    target = target_device(capability)
    with (
        mock.patch.object(kernel, "launch", launch),
        mock.patch.object(Device, "of", return_value=target),
        # Nothing of where the sources lie goes into the code.
        mock.patch.object(knobs.compilation, "disable_line_info", True),
    ):
        launches, _ = record_launches(op_name, kernel_name, problem, config, capability)
    return LaunchRecording(
        tuple(call_of(launch, memory) for launch in launches), tuple(memory.scratch)
    )


def call_of(launch: Launch, memory: Memory) -> Call:
    """Return one launch with its arguments.

    Raises:
        UsageError: it needs what a plain launch does not give.
    """
    from jetfire.kernels_triton.crosscompile import cubin_of

    metadata = launch.compiled.metadata
    for need, has in (
        ("global scratch memory", metadata.global_scratch_size > 0),
        ("profiling memory", metadata.profile_scratch_size > 0),
        ("clusters", metadata.num_ctas != 1),
        ("a cooperative launch", metadata.launch_cooperative_grid),
        ("programmatic dependent launch", metadata.launch_pdl),
    ):
        if has:
            raise UsageError(f"{metadata.name} needs {need}: cannot export")
    arguments = tuple(_arguments(launch, memory))
    entry = launch.compiled.asm["ptx"].split(".entry")[1].split(")")[0]
    parameters = len(re.findall(r"\.param\b", entry))
    assert parameters == len(arguments) + 2, (metadata.name, parameters, arguments)
    return Call(cubin_of(launch.compiled), launch.grid, arguments)


def _arguments(launch: Launch, memory: Memory) -> Iterator[Argument]:
    """Yield the arguments that are left after Triton has compiled some in."""
    maps = iter(getattr(launch.compiled.metadata, "tensordesc_meta", None) or ())
    for name, kind in launch.compiled.src.signature.items():
        if kind == "constexpr":
            continue
        value = launch.arguments[name]
        if not isinstance(kind, str):
            raise UsageError(f"parameter {name} is a tuple: expected tensors and numbers")
        if kind.startswith("*"):
            yield Argument(name, "pointer", memory.find(name, value))
        elif kind.startswith("tensordesc"):
            yield from _descriptor(name, value, next(maps, None), memory)
        elif kind in ("i32", "i64", "fp32"):
            yield Argument(name, kind, value)
        else:
            raise UsageError(f"parameter {name} is {kind}: expected i32, i64, fp32 or a tensor")


def _descriptor(name: str, value: Any, how: Any, memory: Memory) -> Iterator[Argument]:
    """Yield what is passed for a tensor descriptor made on the host: map, sizes and strides."""
    if how is None or how["fp4_padded"] or getattr(value, "padding", "zero") != "zero":
        raise UsageError(f"parameter {name} is no plain tensor map: cannot export")
    base = value.base
    tensor_map = TensorMap(
        memory.find(name, base),
        str(base.dtype).removeprefix("torch."),
        base.element_size(),
        tuple(value.shape),
        tuple(value.strides),
        tuple(how["block_size"]),
        {0: 0, 1: 32, 2: 64, 3: 128}[how["swizzle"]],
    )
    yield Argument(name, "map", tensor_map)
    for i, size in enumerate(value.shape):
        yield Argument(f"{name}_size{i}", "i32", size)
    for i, stride in enumerate(value.strides):
        yield Argument(f"{name}_stride{i}", "i64", stride)
