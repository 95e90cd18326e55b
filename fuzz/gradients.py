"""A backward's outputs against what its op has of autograd (`Op.gradients`)."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.op import Op
from jetfire.core.tensors import Tensors

MOST = 1 << 20  # elements of an input, beyond which autograd in float64 takes too long


def inconsistency(op: Op, problem: Any, inputs: Tensors, outputs: Tensors) -> str | None:
    """Return what is wrong with a backward's outputs; None where nothing is.

    Raises:
        NotImplementedError: the op does not say what its gradients are, nor why not.
    """
    if "bwd" not in op.modes or op.no_gradients or getattr(problem, "mode", "bwd") != "bwd":
        return None
    if max(tensor.numel() for tensor in inputs.values()) > MOST:
        return None
    for gradient in op.gradients(problem, inputs, outputs):
        usable = torch.isfinite(gradient.exact) & torch.isfinite(gradient.got.double())
        off = (gradient.got.double() - gradient.exact).abs() > gradient.allowed
        off &= usable
        if bool(off.any()):
            at = tuple(int(i) for i in off.nonzero()[0])
            return (
                f"{gradient.name}: {int(off.sum())} elements off, first at {at}: "
                f"{float(gradient.got[at]):.6g} where autograd has {float(gradient.exact[at]):.6g}"
            )
    return None
