"""The base of the CPU kernels: their legality, and results copied into the outputs."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.kernel import Config, PythonKernel
from jetfire.core.problem import written_block
from jetfire.core.tensors import Tensors, with_transpose
from jetfire.reference.cross_entropy import IGNORED
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


class InPlaceKernel(TorchKernel):
    """A kernel whose outputs hold what it updates, before it and after it."""

    def launch(self, problem: Any, config: NoConfig, inputs: Tensors, outputs: Tensors) -> None:
        super().launch(problem, config, {**inputs, **outputs}, outputs)


def rate_and_step(inputs: Tensors) -> tuple[float, float]:
    """Return an update's rate, and its count of steps.

    Raises:
        UsageError: the step is below 1. A step on a GPU is not read here, and gives NaN.
    """
    rate, step = float(inputs["rate"]), float(inputs["step"])
    if not step >= 1:
        raise UsageError(f"step={step:g}: expected at least 1, for it counts this step too")
    return rate, step


def integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) of int8 codes, int32 m×n; zeros where k is 0.

    Floats of 64 bits hold every sum exactly, and multiply 8 to 20 times as fast as torch._int_mm
    where a CPU has no instruction for INT8: 1.6 ms rather than 12.5 for 1024×128×128 on an EPYC.
    """
    return (a.double() @ b.double().t()).int()


def product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) in fp32, m×n: scaled integer products of each block of K, summed.

    Floats of 32 bits hold sums of up to 1024 products exactly, in half the time of 64, and a block
    has 128 at most. Autocast leaves a product as it is whose result is written where it is told.
    """
    m, n = a.shape[0], b.shape[0]
    c = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    a_scale = a_scale.repeat_interleave(block, 0)[:m]
    b_scale = b_scale.repeat_interleave(block, 0)[:n]
    inner = torch.empty_like(c)
    a_parts, b_parts = a.float().split(block, 1), b.float().split(block, 1)
    for i in range(a_scale.shape[1]):
        torch.mm(a_parts[i], b_parts[i].t(), out=inner)
        c += inner.mul_(a_scale[:, i, None] * b_scale[:, i])
    return c


def columns_of(targets: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are columns, and as a column the targets, with 0 for the others."""
    known = (targets >= 0) & (targets < valid)
    return known, torch.where(known, targets, 0)[:, None]


def logits_gradient(inputs: Tensors, valid: int) -> torch.Tensor:
    """Return cross-entropy's gradient, fp32 m×n, of which `valid` columns are no padding."""
    targets, logits = inputs["targets"], inputs["logits"]
    known, target = columns_of(targets, valid)
    gradient = (logits[:, :valid].float() - inputs["lse"][:, None]).exp_()
    gradient.scatter_add_(1, target, torch.full_like(inputs["lse"], -1.0)[:, None])
    gradient *= inputs["dloss"].masked_fill(~known, math.nan)[:, None]
    gradient.masked_fill_((targets == IGNORED)[:, None], 0.0)
    return torch.nn.functional.pad(gradient, (0, logits.shape[1] - valid))


def quantised(value: torch.Tensor, problem: Any, inputs: Tensors) -> Tensors:
    """Quantise a float tensor to ``q, scale, qt, scale_t``, in blocks as the problem says."""
    q, scale = quantize(value, written_block(problem), problem.rounding, inputs.get("seed"))
    return with_transpose(q, scale)
