"""A CUDA kernel whose CUDA C++ is a text in its Python file."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.machine_code import unusable
from jetfire.core.tensors import Tensors
from jetfire.kernels_cuda.compile import CudaText, header
from jetfire.kernels_cuda.program import CudaKernel, Program

_SCALARS = {
    "int": np.int32,
    "long long": np.int64,
    "float": np.float32,
}


@cache
def text_of(kernel: type[InlineKernel]) -> CudaText:
    """Return a kernel's CUDA C++ with its place."""
    file = Path(inspect.getfile(kernel))
    before, _, _ = file.read_text(encoding="utf-8").partition(kernel.code)
    return CudaText(file, before.count("\n") + 1, kernel.code)


@cache
def parameters_of(code: str, function: str) -> tuple[tuple[str, str], ...]:
    """Return type and name of each parameter of a kernel function; ``*`` is any pointer's type.

    Raises:
        UsageError: there is no such function, or a parameter is neither a pointer nor one of
            `_SCALARS`.
    """
    found = re.search(rf"\b{function}\s*\(([^)]*)\)\s*[{{;]", code)
    if found is None or "__global__" not in code:
        raise UsageError(f'expected extern "C" __global__ void {function}(…) in the code')
    parameters = []
    for text in found[1].split(","):
        *words, name = re.findall(r"\w+|\*", text.replace("__restrict__", ""))
        kind = "*" if "*" in words else " ".join(word for word in words if word != "const")
        if kind != "*" and kind not in _SCALARS:
            known = ", ".join(_SCALARS)
            raise UsageError(f"{function}: parameter {name} is {kind}: expected {known} or a *")
        parameters.append((kind, name))
    return tuple(parameters)


class InlineKernel(CudaKernel):
    """A kernel of one CUDA C++ function, which is called ``<op>_kernel``.

    The fields of a config are constants, in capitals, of the header ``config.cuh``. A parameter's
    name says what it gets: a pointer the tensor of that name, ``x_stride`` how far apart the rows
    of the tensor ``x`` are, any other the field of the problem. A config has ``warps``.

    Attributes:
        code: the source; of a `binary` the function's declaration.
        binary: a cubin that was compiled elsewhere.
    """

    name = "cuda"
    needs = "needs sm_80 or newer"
    code: ClassVar[str]
    binary: ClassVar[Path | None] = None

    @property
    def _function(self) -> str:
        return f"{self.op}_kernel"

    @abstractmethod
    def blocks(self, problem: Any, config: Any) -> int:
        """Return how many thread blocks are launched."""

    def shared_bytes(self, problem: Any, config: Any) -> int:
        """Return the dynamic shared memory of a block."""
        return 0

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        reason = self.unfit(device) or self.outside(config)
        if reason is None and self.binary is not None and device.capability is not None:
            reason = unusable(self.binary, self._function, device.capability)
        return reason

    def default(self, problem: Any, device: Device) -> Any:
        return self.Config()

    def program(self, problem: Any, config: Any, access: None = None) -> Program:
        constants = {name.upper(): value for name, value in config.as_dict().items()}
        shared, source = self.shared_bytes(problem, config), text_of(type(self))
        return Program(
            source,
            header(constants),
            shared,
            config.warps,
            self._function,
            binary=self.binary,
        )

    def programs(self, problem: Any, config: Any) -> tuple[Program]:
        return (self.program(problem, config),)

    def arguments(self, problem: Any, tensors: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
        """Return type, name and value of each parameter; of a pointer the tensor.

        Raises:
            UsageError: a parameter's name is no tensor, no row stride and no field of the problem.
        """
        matrices = [(name, tensor) for name, tensor in tensors.items() if tensor.dim()]
        strides = {f"{name}_stride": tensor.stride(0) for name, tensor in matrices}
        scalars = {**vars(problem), **strides}
        found = []
        for kind, name in parameters_of(self.code, self._function):
            known = tensors if kind == "*" else scalars
            if name not in known:
                what = f"{self.op}/{self.name}: parameter {name}"
                raise UsageError(f"{what}: expected one of {', '.join(known)}")
            found.append((kind, name, known[name]))
        return found

    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        given = [
            np.uint64(value.data_ptr()) if kind == "*" else _SCALARS[kind](value)
            for kind, _, value in self.arguments(problem, {**inputs, **outputs})
        ]
        device = Device.of(next(iter(inputs.values())))
        self.run(problem, config, None, device, self.blocks(problem, config), *given)
