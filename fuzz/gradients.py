"""Gradients against autograd of a float64 forward, which shares no formula of a gradient with the
reference. Dropout's takes from it which elements are dropped, as the forward does by the seed, and
the threshold of p; hadamard_quantize's the Hadamard matrix and how nibbles are packed.

What is allowed is what quantising or rounding the gradient takes, and a little for fp32: that a
kernel rounds as it should is checked against the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from jetfire.core.contract import Op, Tensors

MOST = 1 << 20  # elements of an input, beyond which autograd in float64 takes too long
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 2.0**-22}  # a rounding, generously
FP32 = 1e-5  # of the largest term of a short sum
LEAST = 2.0**-24  # fp16's smallest number, and what blocks below 2^-100 lose


@dataclass(frozen=True)
class Gradient:
    """One of a backward's outputs: as it is, as it should be, and how far off it may be."""

    name: str
    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor | float


def inconsistency(op: Op, problem: Any, inputs: Tensors, outputs: Tensors) -> str | None:
    """What is wrong with a backward's outputs; None where nothing is, or no forward is known."""
    known = _KNOWN.get(op.name)
    large = max(tensor.numel() for tensor in inputs.values()) > MOST
    if known is None or large or getattr(problem, "mode", "fwd") != "bwd":
        return None
    for gradient in known(problem, inputs, outputs):
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


def _spread(scale: torch.Tensor, block: int, like: torch.Tensor) -> torch.Tensor:
    m, n = like.shape
    wide = scale.double().repeat_interleave(block, 0)[:m]
    return wide.repeat_interleave(block, 1)[:, :n]


def _values(q: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    return q.double() * _spread(scale, block, q)


def _quantised(problem: Any, outputs: Tensors, exact: torch.Tensor, noise: Any) -> list[Gradient]:
    """The codes that there are, within a step of the exact values, or half of one."""
    step = 1.0 if problem.rounding == "stochastic" else 0.5
    found = []
    for name, scale, turned in (("q", "scale", False), ("qt", "scale_t", True)):
        if name in outputs:
            q, s = outputs[name], outputs[scale]
            got, wide = _values(q, s, problem.block), _spread(s, problem.block, q)
            if turned:
                got, wide = got.t(), wide.t()
            found.append(Gradient(name, got, exact, wide * (step + 0.01) + noise + 2.0**-100))
    return found


def _of(y: torch.Tensor, upstream: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, leaves, upstream))


def _gelu(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    x = _values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
    dy = _values(inputs["dy"], inputs["dy_scale"], problem.block)
    approximate = "tanh" if problem.approximate == "tanh" else "none"
    (dx,) = _of(functional.gelu(x, approximate=approximate), dy, x)
    return _quantised(problem, outputs, dx, FP32 * dy.abs())


def _layernorm(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    x = _values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
    dy = _values(inputs["dy"], inputs["dy_scale"], problem.block)
    if not _has_statistics(x.detach(), inputs["mean"], inputs["rstd"], problem.eps):
        return []
    weight = inputs["weight"].double().requires_grad_()
    bias = torch.zeros_like(weight, requires_grad=True)
    y = functional.layer_norm(x, weight.shape, weight, bias, problem.eps)
    dx, dweight, dbias = _of(y, dy, x, weight, bias)
    rstd = inputs["rstd"].double()[:, None]
    terms = (dy * weight.detach()).abs().amax(1, keepdim=True)
    normal = ((x.detach() - x.detach().mean(1, keepdim=True)) * rstd).abs()
    # x and the mean in fp32: of a row of one column, or of equal ones, all that is left of it.
    rounded = 2.0**-23 * x.detach().abs().amax(1, keepdim=True) * rstd
    most = 1 + normal.amax(1, keepdim=True)
    of_dx = terms * rstd * (10 * FP32 * most**2 + 2 * rounded * most)
    found = _quantised(problem, outputs, dx, of_dx)
    of_weight = (dy.abs() * (10 * FP32 * (1 + normal) + rounded)).sum(0)
    found.append(Gradient("dweight", outputs["dweight"], dweight, of_weight))
    return [*found, Gradient("dbias", outputs["dbias"], dbias, 10 * FP32 * dy.abs().sum(0))]


def _has_statistics(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float) -> bool:
    """Whether the statistics of a backward are those of its rows, as autograd takes them."""
    variance, own = torch.var_mean(x, dim=1, correction=0)
    given = torch.stack([mean.double(), rstd.double()])
    return torch.allclose(given, torch.stack([own, (variance + eps).rsqrt()]), 1e-3, 1e-3)


def _add(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    """The sum's quantised copy passes its gradient on."""
    dsum = inputs["dsum"].double()
    dq = _values(inputs["dq"], inputs["dq_scale"], problem.block)
    total = torch.zeros_like(dsum, requires_grad=True)
    copy = total + (total.round() - total).detach()
    (dx,) = torch.autograd.grad((total, copy), total, (dsum, dq))
    noise = HALF["bf16"] * dx.abs() + 2.0**-22 * (dsum.abs() + dq.abs()) + 2.0**-130
    return [Gradient("dx", outputs["dx"], dx, noise), *_quantised(problem, outputs, dx, noise)]


def _dropout(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    """What the forward drops of ones is what it drops."""
    from jetfire.reference.dropout import drop_threshold, dropout

    dy = _values(inputs["q"], inputs["scale"], problem.block)
    ones = torch.ones_like(inputs["q"])
    kept = dropout(ones, inputs["scale"], problem.p, inputs["seed"])[0].double()
    x = torch.zeros_like(dy, requires_grad=True)
    (dx,) = _of(x * kept / (1 - drop_threshold(problem.p) / 65536), dy, x)
    found = []
    if "q" in outputs:
        got = _values(outputs["q"], outputs["scale"], problem.block)
        found.append(Gradient("q", got, dx, FP32 * dx.abs() + 2.0**-140))
    if "qt" in outputs:
        got = _values(outputs["qt"], outputs["scale_t"], problem.block).t()
        found.append(Gradient("qt", got, dx, FP32 * dx.abs() + 2.0**-140))
    return found


def _cross_entropy(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    logits = inputs["logits"].double().requires_grad_()
    targets, dloss = inputs["targets"], inputs["dloss"].double()
    ignored = targets == -100
    if not bool((ignored | ((targets >= 0) & (targets < problem.columns))).all()):
        return []
    loss = functional.cross_entropy(
        logits[:, : problem.columns], targets, ignore_index=-100, reduction="none"
    )
    (dlogits,) = _of(loss, dloss, logits)
    # exp(logit − lse) of an lse rounded to fp32
    of_lse = FP32 + 2.0**-23 * inputs["lse"].double().abs()
    allowed = HALF[problem.dtype] * dlogits.abs() + (dloss.abs() * of_lse)[:, None] + LEAST
    return [Gradient("dlogits", outputs["dlogits"], dlogits, allowed)]


def _hadamard_quantize(problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
    """Codes times the step, by LSQ: the rounding passes its gradient on, clipping does not.

    With a step that is not usable nothing is quantised: there is no gradient to compare with.
    """
    from jetfire.reference.hadamard import matrix
    from jetfire.reference.hadamard_quantize import multiplier
    from jetfire.reference.nibbles import unpack

    group, device = problem.group, inputs["dx_hat"].device
    h = matrix(group).to(device)
    upstream = _dense(inputs) if problem.gathered else inputs["dx_hat"].double()
    given = problem.given == "x"
    if given and not bool(multiplier(inputs["step"], group)):
        return []
    step = inputs["step"].double() if given else torch.ones(1, dtype=torch.float64, device=device)
    x = inputs["x"].double() if given else _transformed(unpack(inputs["q"]).double(), h)
    steps = step.expand(len(x)).clone().requires_grad_()  # its gradient comes by rows
    v = _transformed(x.requires_grad_(), h) / steps[:, None]
    q = v.detach().round().clamp(-8, 7)
    passed = (q > -8) & (q < 7)
    y = steps[:, None] * (torch.where(passed, v, v.detach()) + (q - v).detach())
    dx, dstep = _of(y, upstream, x, steps)
    v = v.detach()
    terms = upstream.abs().amax(1, keepdim=True) * group**0.5
    allowed = HALF[problem.dtype] * dx.abs() + FP32 * terms + LEAST
    if not given:
        return [Gradient("dx", outputs["dx"], dx, allowed)]
    # In fp32 what is nearly a tie may be rounded the other way.
    sure = ~((v % 1.0 - 0.5).abs() < 1e-4 * (1 + v.abs())).any(1)
    noise = 10 * FP32 * (upstream.abs() * (9 + v.abs())).sum(1) + 2.0**-126
    return [
        Gradient("dx", outputs["dx"][sure], dx[sure], allowed[sure]),
        Gradient("dstep", outputs["dstep"][sure], dstep[sure], noise[sure]),
    ]


def _transformed(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (x.reshape(-1, len(h)) @ h).view(x.shape)


def _dense(inputs: Tensors) -> torch.Tensor:
    """A gradient whose rows are the sums of the kept ones that belong to them."""
    rows, missing = inputs["dx_hat"].double(), 0.0 * inputs["unit"].double()
    parts = (
        torch.where((slot >= 0)[:, None], rows[slot.clamp(min=0).long()], missing)
        for slot in inputs["slots"].unbind(1)
    )
    return sum(parts, start=torch.zeros((), dtype=torch.float64, device=rows.device))


_KNOWN: dict[str, Callable[[Any, Tensors, Tensors], list[Gradient]]] = {
    "add": _add,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "gelu": _gelu,
    "hadamard_quantize": _hadamard_quantize,
    "layernorm": _layernorm,
}
