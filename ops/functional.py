"""The ops as functions of tensors: what users and models call, without autograd.

Quantised tensors are pairs ``q, scale``: int8 m×n and fp32 ⌈m/block⌉×⌈n/block⌉. Inputs may be
row-strided views. Each function returns its op's outputs in order, a single one bare. `layout` says
whether results come as ``q, scale``, as their transpose ``qt, scale_t``, or as all four ("both").
The kernel is the one that `ops.run.choose` finds for the tensors' device.

Stochastic rounding needs `seed`, an int64 tensor of one element on that device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from jetfire import ops
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import (
    Block,
    FloatName,
    Kernel,
    Layout,
    Op,
    Rounding,
    Tensors,
    blocks_of,
    float_dtype,
)
from jetfire.ops.run import choose

Tensor = torch.Tensor
_FLOATS: dict[torch.dtype, FloatName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


@profiles.remembered
def _plan(
    name: str, device: torch.device, fields: tuple[tuple[str, Any], ...]
) -> tuple[Op, Any, Kernel, Any]:
    """Op, problem, kernel and config of a call; a model repeats few of them."""
    op = ops.get(name)
    problem = op.Problem.parse(dict(fields))
    kernel, config = choose(op, problem, Device.of(torch.empty(0, device=device)))
    return op, problem, kernel, config


def _launch_context(device: torch.device) -> AbstractContextManager[Any] | None:
    """What a launch there needs around it, if anything.

    Triton launches on the current device; CPU kernels are torch operations, which autograd sees.
    """
    if device.type == "cpu":
        return torch.no_grad()
    if device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return None


def _call(name: str, inputs: Tensors, outputs: Tensors | None = None, **fields: Any) -> Any:
    """Allocate outputs (unless given), launch, and return them in order; a single one bare."""
    device = next(iter(inputs.values())).device
    op, problem, kernel, config = _plan(name, device, tuple(fields.items()))
    if outputs is None:
        outputs = op.outputs(problem, inputs)
    context = _launch_context(device)
    if context is None:
        kernel.launch(problem, config, inputs, outputs)
    else:
        with context:
            kernel.launch(problem, config, inputs, outputs)
    found = tuple(outputs.values())
    return found if len(found) > 1 else found[0]


def _matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """A 2-D tensor of one of the dtypes, its last dimension contiguous."""
    if x.dtype not in dtypes:
        known = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UsageError(f"{name} is {str(x.dtype).removeprefix('torch.')}: expected {known}")
    if x.dim() != 2:
        raise UsageError(f"{name} has shape {tuple(x.shape)}: expected two dimensions")
    if x.device.type not in ("cuda", "cpu"):
        raise UsageError(f"{name} is on {x.device}: expected cuda or cpu")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise UsageError(
            f"{name} has strides {x.stride()}: expected a contiguous last dimension; "
            f"call .contiguous()"
        )


def _same_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise UsageError(f"{name} is on {x.device}: expected {like.device}, as the first tensor")


def _codes(name: str, q: Tensor, scale: Tensor, block: int, like: Tensor | None = None) -> None:
    """Codes and scales that belong together, of `like`'s shape and device where there is one."""
    _matrix(name, q, (torch.int8,))
    if like is not None:
        _same_device(name, q, like)
        if q.shape != like.shape:
            raise UsageError(f"{name} has shape {tuple(q.shape)}: expected {tuple(like.shape)}")
    _matrix(f"{name}'s scale", scale, (torch.float32,))
    _same_device(f"{name}'s scale", scale, q)
    if block not in (32, 64, 128):
        raise UsageError(f"block={block}: expected 32 or 64 or 128")
    expected = blocks_of(q.shape[0], q.shape[1], block)
    if scale.shape != expected:
        raise UsageError(
            f"{name}'s scale has shape {tuple(scale.shape)}: expected {expected} "
            f"for {tuple(q.shape)} codes in blocks of {block}"
        )


def _vector(name: str, x: Tensor, size: int, like: Tensor) -> Tensor:
    """An fp32 vector of a size on `like`'s device, contiguous."""
    _same_device(name, x, like)
    if x.dtype != torch.float32 or x.shape != (size,):
        dtype = str(x.dtype).removeprefix("torch.")
        raise UsageError(f"{name} is {dtype} {tuple(x.shape)}: expected float32 {(size,)}")
    return x.contiguous()


def _with_seed(inputs: Tensors, rounding: str, seed: Tensor | None) -> Tensors:
    """The inputs, with the seed where rounding is stochastic."""
    if rounding == "stochastic":
        inputs["seed"] = _checked_seed(seed, next(iter(inputs.values())))
    return inputs


def _checked_seed(seed: Tensor | None, like: Tensor) -> Tensor:
    if seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != like.device:
        raise UsageError(f"seed: expected an int64 tensor of one element on {like.device}")
    return seed


def int8_quantize(
    x: Tensor, *, block: Block = 32, rounding: Rounding = "nearest", seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Codes and scales of x, m×n bf16, fp16 or fp32.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _matrix("x", x, tuple(_FLOATS))
    inputs = _with_seed({"x": x}, rounding, seed)
    return _call(
        "quantize", inputs, m=x.shape[0], n=x.shape[1], block=block, dtype=_FLOATS[x.dtype],
        rounding=rounding, layout=layout,
    )  # fmt: skip


def int8_dequantize(
    q: Tensor, scale: Tensor, *, block: Block = 32, out: FloatName = "bf16"
) -> Tensor:
    """q·scale as `out`, m×n."""
    _codes("q", q, scale, block)
    inputs = {"q": q, "scale": scale}
    return _call("dequantize", inputs, m=q.shape[0], n=q.shape[1], block=block, out=out)


def int8_transpose(q: Tensor, scale: Tensor, *, block: Block = 32) -> tuple[Tensor, Tensor]:
    """qt (int8 n×m) and scale_t, contiguous; nothing is requantised."""
    _codes("q", q, scale, block)
    inputs = {"q": q, "scale": scale}
    return _call("transpose", inputs, m=q.shape[0], n=q.shape[1], block=block)


def int8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, block: Block = 32,
    out: str = "bf16", bias: Tensor | None = None, c: Tensor | None = None,
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> Any:  # fmt: skip
    """A (m×k)·Bᵀ (B n×k) + bias, both quantised.

    Args:
        out: "bf16", "fp16", "fp32", or "int8" to requantise with `rounding` and `layout`.
        bias: fp32, n.
        c: m×n contiguous of dtype `out`: the product is added to it, in place.

    Returns:
        C, m×n; for int8, q, scale and/or qt, scale_t.
    """
    _codes("a", a, a_scale, block)
    _codes("b", b, b_scale, block)
    _same_device("b", b, a)
    if a.shape[1] != b.shape[1]:
        raise UsageError(f"a has k={a.shape[1]} and b k={b.shape[1]}: expected one k")
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    inputs = {
        "a": a, "a_scale": a_scale.contiguous(), "b": b, "b_scale": b_scale.contiguous(),
    }  # fmt: skip
    if bias is not None:
        inputs["bias"] = _vector("bias", bias, n, a)
    if c is not None:
        _accumulator(c, m, n, out, a)
        inputs["c"] = c
    if out == "int8":
        _with_seed(inputs, rounding, seed)
    return _call(
        "gemm", inputs, None if c is None else {"c": c}, m=m, n=n, k=k, block=block, out=out,
        rounding=rounding if out == "int8" else "nearest", layout=layout,
        bias=bias is not None, accumulate=c is not None,
    )  # fmt: skip


def _accumulator(c: Tensor, m: int, n: int, out: str, like: Tensor) -> None:
    if out not in _FLOATS.values():
        raise UsageError(f"c with out={out}: expected out=bf16 or fp16 or fp32")
    _matrix("c", c, (float_dtype(out),))  # type: ignore[arg-type]
    _same_device("c", c, like)
    if c.shape != (m, n) or not c.is_contiguous():
        raise UsageError(f"c has shape {tuple(c.shape)}: expected {(m, n)}, contiguous")


def int8_gelu(
    x: Tensor, x_scale: Tensor, *, block: Block = 32, approximate: str = "tanh",
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """gelu(x), quantised; `approximate` is "tanh" or "erf".

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _codes("x", x, x_scale, block)
    inputs = _with_seed({"x": x, "x_scale": x_scale}, rounding, seed)
    return _call(
        "gelu", inputs, m=x.shape[0], n=x.shape[1], block=block, mode="fwd",
        approximate=approximate, rounding=rounding, layout=layout,
    )  # fmt: skip


def int8_gelu_backward(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, *, block: Block = 32,
    approximate: str = "tanh", rounding: Rounding = "stochastic", seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx = dy·gelu'(x), quantised; the rest as `int8_gelu`."""
    _codes("x", x, x_scale, block)
    _codes("dy", dy, dy_scale, block, like=x)
    inputs = {"x": x, "x_scale": x_scale, "dy": dy, "dy_scale": dy_scale}
    return _call(
        "gelu", _with_seed(inputs, rounding, seed), m=x.shape[0], n=x.shape[1], block=block,
        mode="bwd", approximate=approximate, rounding=rounding, layout=layout,
    )  # fmt: skip


def int8_layernorm(
    x: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor, *, mean: Tensor | None = None,
    rstd: Tensor | None = None, block: Block = 32, eps: float = 1e-5,
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """LayerNorm of whole rows, quantised.

    Args:
        weight, bias: fp32, n.
        mean, rstd: fp32, m, the rows' statistics where known (from `int8_add`); both or neither.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t; then mean and rstd unless they were given.
    """
    _codes("x", x, x_scale, block)
    m, n = x.shape
    inputs = {
        "x": x, "x_scale": x_scale,
        "weight": _vector("weight", weight, n, x), "bias": _vector("bias", bias, n, x),
    }  # fmt: skip
    if (mean is None) != (rstd is None):
        raise UsageError("mean and rstd: expected both or neither")
    if mean is not None and rstd is not None:
        inputs |= {"mean": _vector("mean", mean, m, x), "rstd": _vector("rstd", rstd, m, x)}
    return _call(
        "layernorm", _with_seed(inputs, rounding, seed), m=m, n=n, block=block, mode="fwd",
        stats="row" if mean is None else "given", rounding=rounding, layout=layout, eps=eps,
    )  # fmt: skip


def int8_layernorm_backward(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, weight: Tensor, mean: Tensor,
    rstd: Tensor, *, block: Block = 32, rounding: Rounding = "stochastic",
    seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of `int8_layernorm`, through the statistics as well.

    Returns:
        dx as `layout` says: q, scale and/or qt, scale_t; then dweight and dbias, fp32, n.
    """
    _codes("x", x, x_scale, block)
    _codes("dy", dy, dy_scale, block, like=x)
    m, n = x.shape
    inputs = {
        "x": x, "x_scale": x_scale, "weight": _vector("weight", weight, n, x),
        "dy": dy, "dy_scale": dy_scale,
        "mean": _vector("mean", mean, m, x), "rstd": _vector("rstd", rstd, m, x),
    }  # fmt: skip
    return _call(
        "layernorm", _with_seed(inputs, rounding, seed), m=m, n=n, block=block, mode="bwd",
        rounding=rounding, layout=layout,
    )  # fmt: skip


def _addends(name: str, x: Tensor, y: Tensor, y_scale: Tensor, block: Block) -> None:
    _matrix("the stream", x, (torch.bfloat16,))
    _codes(name, y, y_scale, block, like=x)


def int8_add(
    x: Tensor, y: Tensor, y_scale: Tensor, *, block: Block = 32, eps: float = 1e-5,
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The residual stream x (m×n bf16) plus a quantised branch.

    Returns:
        The sum (bf16); its copy as `layout` says: q, scale and/or qt, scale_t; and the mean and
        rstd (with `eps`) of its rows, fp32, m.
    """
    _addends("y", x, y, y_scale, block)
    inputs = _with_seed({"x": x, "y": y, "y_scale": y_scale}, rounding, seed)
    return _call(
        "add", inputs, m=x.shape[0], n=x.shape[1], block=block, mode="fwd", rounding=rounding,
        layout=layout, eps=eps,
    )  # fmt: skip


def int8_add_backward(
    dsum: Tensor, dq: Tensor, dq_scale: Tensor, *, block: Block = 32,
    rounding: Rounding = "stochastic", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The stream's gradient (m×n bf16) plus the one that its quantised copy received.

    Returns:
        dx (bf16), and its copy as `layout` says: q, scale and/or qt, scale_t.
    """
    _addends("dq", dsum, dq, dq_scale, block)
    inputs = _with_seed({"dsum": dsum, "dq": dq, "dq_scale": dq_scale}, rounding, seed)
    return _call(
        "add", inputs, m=dsum.shape[0], n=dsum.shape[1], block=block, mode="bwd",
        rounding=rounding, layout=layout,
    )  # fmt: skip


def _dropout(
    q: Tensor, scale: Tensor, seed: Tensor, p: float, block: Block, layout: Layout, mode: str
) -> tuple[Tensor, ...]:
    _codes("q", q, scale, block)
    inputs = {"q": q, "scale": scale, "seed": _checked_seed(seed, q)}
    return _call(
        "dropout", inputs, m=q.shape[0], n=q.shape[1], block=block, mode=mode, p=p, layout=layout
    )


def int8_dropout(
    q: Tensor, scale: Tensor, seed: Tensor, *, p: float = 0.1, block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Codes zeroed with probability p and scales divided by 1 − p; nothing is requantised.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    return _dropout(q, scale, seed, p, block, layout, "fwd")


def int8_dropout_backward(
    q: Tensor, scale: Tensor, seed: Tensor, *, p: float = 0.1, block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of `int8_dropout` with the same seed, from its output's gradient."""
    return _dropout(q, scale, seed, p, block, layout, "bwd")
