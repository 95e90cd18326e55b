"""The Hadamard quantiser and its gradient on the CPU: slabs of rows that stay in its caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors, dtype_of
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.hadamard import factor
from jetfire.reference.hadamard_quantize import LEAST, MOST, gathered, inside, multiplier
from jetfire.reference.nibbles import narrow, pack, unpack, widen

SLAB = 1 << 16  # elements


def butterflies(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return the reference's butterflies; a stage adds and subtracts whole rows of the transpose.

    4096×768 in groups of 32, in slabs of few rows, take half of the reference's time.
    """
    t = x.unflatten(1, (-1, group)).movedim(2, 0)
    # Always a copy: one row of one group is contiguous as it is, and stages write to it.
    t = t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    other = torch.empty_like(t)
    h = 1
    while h < group:
        a, b = t.unflatten(0, (-1, 2, h)).unbind(1)
        total, difference = other.unflatten(0, (-1, 2, h)).unbind(1)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        t, other = other, t
        h *= 2
    return t.movedim(0, 2).flatten(1)


def rounded(v: torch.Tensor) -> torch.Tensor:
    """Return the codes as floats: clamp(rint(v), −8, 7), NaN as −8."""
    return v.clamp(LEAST, MOST).nan_to_num_(LEAST).round_()


def slabs(problem: Any) -> Iterator[slice]:
    rows = max(1, SLAB // problem.n)
    return (slice(top, top + rows) for top in range(0, problem.m, rows))


def _check_slots(slots: torch.Tensor, rows: int) -> None:
    """Check that each slot names a row that exists, or none.

    Raises:
        UsageError: one does not. Slots on a GPU are not read here.
    """
    last = int(slots.max())
    if last >= rows:
        raise UsageError(f"slots name row {last}: expected rows of dx_hat, which has {rows}")


class TorchHadamardQuantize(TorchKernel):
    op = "hadamard_quantize"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        part = self._forward if problem.mode == "fwd" else self._backward
        if problem.mode == "bwd" and problem.gathered:
            _check_slots(inputs["slots"], len(inputs["dx_hat"]))
        found = [part(problem, inputs, slab) for slab in slabs(problem)]
        results = {name: torch.cat([slab[name] for slab in found]) for name in found[0]}
        if problem.out == "int8":
            codes = quantised(results["dx"].to(dtype_of(problem.dtype)), problem, inputs)
            results = {"dx": codes["q"], "dx_scale": codes["scale"]}
        if problem.mode == "fwd":
            bad = ~results.pop("finite").all() | (multiplier(inputs["step"], problem.group) == 0)
            results["scale"] = inputs["step"].masked_fill(bad, torch.nan)
        return results

    def _forward(self, problem: Any, inputs: Tensors, slab: slice) -> Tensors:
        b = butterflies(inputs["x"][slab], problem.group)
        codes = rounded(b * multiplier(inputs["step"], problem.group))
        found = {"finite": b[:, :: problem.group].isfinite().all().reshape(1)}
        found["squares"] = codes.square().sum(dim=1, dtype=torch.float64).to(torch.int32)
        q = codes.to(torch.int8)
        if problem.layout != "packed":
            found["wide"] = widen(q)
        if problem.layout != "wide":
            found["q"] = pack(q)
        return found

    def _backward(self, problem: Any, inputs: Tensors, slab: slice) -> Tensors:
        group, dx_hat = problem.group, inputs["dx_hat"]
        if problem.gathered:
            g = gathered(dx_hat, inputs["slots"][slab], inputs["unit"])
        else:
            g = dx_hat[slab].float()
        found: Tensors = {}
        if problem.given == "x":
            v = butterflies(inputs["x"][slab], group) * multiplier(inputs["step"], group)
            q = rounded(v)
            passes = inside(q)
            found["dstep"] = (g * torch.where(passes, q - v, q)).sum(dim=1)
        elif problem.given == "wide":
            passes = inside(narrow(inputs["wide"][slab]))
        else:
            passes = inside(unpack(inputs["q"][slab]))
        found["dx"] = butterflies(g.masked_fill(~passes, 0.0), group) * factor(group)
        return found


KERNELS = (TorchHadamardQuantize(),)
