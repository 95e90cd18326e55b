"""The base class of Triton kernels: launches as data, from which they run and are compiled."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors

# Options of kernels that quantise: a product and a sum round apart.
EXACT = {"enable_fp_fusion": False}


class Launch:
    """A launch of a kernel function: its grid, and an argument for each of its parameters.

    A parameter's name says what it gets, unless that is `given`:

    * ``x_ptr`` and ``x_desc`` are the tensor ``x``, or None where there is none.
    * ``x_stride`` is how far apart its rows are, 0 where there is none; ``stride`` is the first
      tensor's.
    * STOCHASTIC and BACKWARD are whether the problem's rounding, or mode, is that.
    * Any other is the field of that name, in small letters, of the config or else of the problem.

    Warps are the config's, unless they are given.

    Args:
        of: the tensors of those parameters whose names do not say it.
        given: values by the parameter's name, and options of the compiler.
    """

    __slots__ = ("_arguments", "_constants", "_run", "_strides", "_tensors")

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        problem: Any,
        config: Any,
        of: Mapping[str, str] = MappingProxyType({}),
        /,
        **given: Any,
    ) -> None:
        self._run = function[grid]
        self._arguments: list[Any] = []  # all but the constants, those of the tensors still None
        self._tensors: list[tuple[int, str]] = []
        self._strides: list[tuple[int, str]] = []
        if "num_warps" not in given:
            given["num_warps"] = config.warps
        for name, compiled in _parameters(function):
            if name not in given and not self._of_tensor(name, of.get(name)):
                given |= _field(name, problem, config)
            if not compiled:
                self._arguments.append(given.pop(name, None))
        self._constants = given

    def _of_tensor(self, parameter: str, tensor: str | None) -> bool:
        """Return whether a parameter is a tensor or its stride, and note which."""
        name, _, kind = parameter.rpartition("_")
        if "stride" in parameter:
            self._strides.append((len(self._arguments), tensor or name or self._tensors[0][1]))
        elif kind in ("ptr", "desc"):
            self._tensors.append((len(self._arguments), tensor or name))
        else:
            return False
        return True

    def __call__(self, tensors: Mapping[str, Any], **constants: Any) -> None:
        """Launch on the current stream.

        Args:
            constants: those that the tensors decide.
        """
        arguments = self._arguments.copy()
        get = tensors.get
        for i, name in self._tensors:
            arguments[i] = get(name)
        for i, name in self._strides:
            x = get(name)
            arguments[i] = 0 if x is None else x.stride(0)
        if constants:
            constants.update(self._constants)
        self._run(*arguments, **(constants or self._constants))


@cache
def _parameters(function: Any) -> list[tuple[str, bool]]:
    """Return a kernel function's parameters, each with whether it is a compiled constant."""
    parameters = inspect.signature(function.fn).parameters.values()
    return [(p.name, p.annotation is not p.empty) for p in parameters]


def _field(name: str, problem: Any, config: Any) -> dict[str, Any]:
    """Return what a config or a problem says of a parameter; nothing where neither does."""
    if name == "STOCHASTIC":
        return {name: problem.rounding == "stochastic"}
    if name == "BACKWARD":
        return {name: problem.mode == "bwd"}
    for holder in (config, problem):
        if hasattr(holder, name.lower()):
            return {name: getattr(holder, name.lower())}
    return {}


class TritonKernel(Kernel):
    """A kernel whose machine code is what its own `launch` would have Triton compile."""

    name = "triton"
    backend = "triton"

    def launches(self, problem: Any, config: Any, device: Device) -> Sequence[Launch]:
        """Return what a call launches, in order; it is asked once for the same arguments."""
        raise NotImplementedError(f"{self.op}/{self.name}: expected `launches`, or a `launch`")

    def tensors(
        self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        """Return what launches read and write by name, with the memory that they share."""
        return {**inputs, **outputs}

    def prepared(self, problem: Any, config: Any, inputs: Tensors) -> Sequence[Launch]:
        """Return what a call launches."""
        return _launches(self, problem, config, Device.of(next(iter(inputs.values()))))

    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        tensors = self.tensors(problem, config, inputs, outputs)
        for launch in self.prepared(problem, config, inputs):
            launch(tensors)

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin]:
        from jetfire.kernels_triton.crosscompile import cubin_of, record_launches

        launches, _ = record_launches(self.op, self.name, problem, config, capability)
        return [cubin_of(launch.compiled) for launch in launches]


@lru_cache(maxsize=4096)
def _launches(kernel: TritonKernel, problem: Any, config: Any, device: Device) -> Sequence[Launch]:
    return kernel.launches(problem, config, device)
