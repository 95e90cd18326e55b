"""The per-block INT8 GEMM on the CPU: torch's own integer product for each block of K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.ops.device import Device
from jetfire.ops.op import Config as BaseConfig
from jetfire.ops.op import Kernel, Tensors
from jetfire.reference.quantize import quantize, spread
from jetfire.reference.transpose import transpose


@dataclass(frozen=True)
class Config(BaseConfig):
    """Nothing to choose."""


def product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """A (m×k)·Bᵀ (n×k) in fp32, m×n: int32 products of each block of K, scaled and summed."""
    m, k = a.shape
    n = b.shape[0]
    c = torch.zeros((m, n))
    for i in range(a_scale.shape[1]):
        part = slice(i * block, min(k, (i + 1) * block))
        inner = torch._int_mm(a[:, part].contiguous(), b[:, part].t().contiguous()).float()
        rows = spread(a_scale[:, i, None], block, m, 1)
        cols = spread(b_scale[:, i, None], block, n, 1)
        c += inner.mul_(rows * cols.t())
    return c


class IntMm(Kernel):
    op = "gemm"
    name = "int_mm"
    Config = Config

    def legal(self, problem: Any, config: Config, device: Device) -> str | None:
        return None if device.kind == "cpu" else "runs on the CPU only"

    def default(self, problem: Any, device: Device) -> Config:
        return Config()

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return {}

    def launch(self, problem: Any, config: Config, inputs: Tensors, outputs: Tensors) -> None:
        a, b = inputs["a"], inputs["b"]
        c = product(a, inputs["a_scale"], b, inputs["b_scale"], problem.block)
        if problem.bias:
            c += inputs["bias"]
        if problem.out != "int8":
            outputs["c"].copy_(outputs["c"] + c if problem.accumulate else c)
            return
        q, scale = quantize(c, problem.block, problem.rounding, inputs.get("seed"))
        results = dict(
            zip(("q", "scale", "qt", "scale_t"), (q, scale, *transpose(q, scale)), strict=True)
        )
        for name, out in outputs.items():
            out.copy_(results[name])


KERNELS = (IntMm(),)
