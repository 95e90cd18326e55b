"""The base of the CPU kernels: their legality, and results copied into the outputs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.kernel import Config, PythonKernel
from jetfire.core.problem import written_block
from jetfire.core.tensors import Tensors, with_transpose
from jetfire.reference.quantize import quantize


@dataclass(frozen=True)
class NoConfig(Config):
    """A config without choices."""


class TorchKernel(PythonKernel):
    """A kernel of vectorised torch operations, in fp32; each op's own computes a dict of results.

    Results may hold more than the outputs that were asked for.
    """

    name = "torch"
    backend = "cpu"
    Config = NoConfig

    @abstractmethod
    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return the op's outputs by name."""

    def legal(self, problem: Any, config: NoConfig, device: Device) -> str | None:
        return None if device.kind == "cpu" else "runs on the CPU only"

    def results(self, problem: Any, config: NoConfig, inputs: Tensors) -> Tensors:
        return self.compute(problem, inputs)


def integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) of int8 codes, int32 m×n; zeros where k is 0.

    Floats of 64 bits hold every sum exactly, and multiply 8 to 20 times as fast as torch._int_mm
    where a CPU has no instruction for INT8: 1.6 ms rather than 12.5 for 1024×128×128 on an EPYC.
    """
    return (a.double() @ b.double().t()).int()


def quantised(value: torch.Tensor, problem: Any, inputs: Tensors) -> Tensors:
    """Quantise a float tensor to ``q, scale, qt, scale_t``, in blocks as the problem says."""
    q, scale = quantize(value, written_block(problem), problem.rounding, inputs.get("seed"))
    return with_transpose(q, scale)
