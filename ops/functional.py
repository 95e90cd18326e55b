"""The ops as functions of tensors: what users and models call.

Quantised tensors are pairs ``q, scale``: int8 m×n and fp32 ⌈m/block⌉×⌈n/block⌉. Inputs may be
row-strided views. Each function returns its op's outputs in order, a single one bare. `layout` says
whether results come as ``q, scale``, as their transpose ``qt, scale_t``, or as all four ("both").
The kernel is the one that `core.launch.choose` finds for the tensors' device; empty tensors need
none: their results are empty, or zeros where they are sums over nothing. To autograd results are
constants, but for those that `ops.library` gives a gradient.

`int4_*` are the steps of a linear layer in 4 bits: codes are a tensor's own, with one scale, a
tensor of one element on its device.

Stochastic rounding needs `seed`, an int64 tensor of one element on that device.
"""

from __future__ import annotations

from typing import Any, get_args

import torch

from jetfire.core.arguments import checked
from jetfire.core.contract import Block, FloatName, Layout, Rounding, blocks_of, float_dtype
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.ops import library
from jetfire.ops.bit_split import Bits
from jetfire.ops.gelu import Approximate
from jetfire.ops.hadamard_quantize import Codes, Group
from jetfire.ops.sample_rows import Keep, Parts

Tensor = torch.Tensor
_BLOCKS = get_args(Block)
_LAYOUTS = get_args(Layout)
_INT4_LAYOUTS = get_args(Codes)
_GROUPS = get_args(Group)
_ROUNDINGS = get_args(Rounding)
_APPROXIMATIONS = get_args(Approximate)
_FLOATS = tuple(library.FLOAT_NAMES)
_FLOAT_NAMES = tuple(library.FLOAT_NAMES.values())


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value}: expected {' or '.join(str(c) for c in choices)}")


def _matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """A 2-D tensor of one of the dtypes, its last dimension contiguous."""
    if x.dtype not in dtypes:
        known = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UsageError(f"{name} is {str(x.dtype).removeprefix('torch.')}: expected {known}")
    if x.dim() != 2:
        raise UsageError(f"{name} has shape {tuple(x.shape)}: expected two dimensions")
    if x.device.type not in ("cuda", "cpu"):
        raise UsageError(f"{name} is on {x.device}: expected cuda or cpu")
    if x.stride(1) != 1 and x.shape[1] > 1 and x.shape[0] > 0:
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
    _choice("block", block, _BLOCKS)
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


def _seed(rounding: str, seed: Tensor | None, layout: str, like: Tensor) -> Tensor | None:
    """The seed where rounding is stochastic, once the options of quantised outputs are checked."""
    _choice("rounding", rounding, _ROUNDINGS)
    _choice("layout", layout, _LAYOUTS)
    return _checked_seed(seed, like) if rounding == "stochastic" else None


def _checked_seed(seed: Tensor | None, like: Tensor) -> Tensor:
    if seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != like.device:
        raise UsageError(f"seed: expected an int64 tensor of one element on {like.device}")
    return seed


@checked
def int8_quantize(
    x: Tensor, *, block: Block = 32, rounding: Rounding = "nearest", seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Codes and scales of x, m×n bf16, fp16 or fp32.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _matrix("x", x, _FLOATS)
    _choice("block", block, _BLOCKS)
    seed = _seed(rounding, seed, layout, x)
    return tuple(library.quantize(x, seed, block, rounding, layout))


@checked
def int8_quantize_qkv(
    query: Tensor, key: Tensor, value: Tensor, *, block: Block = 32,
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Codes and scales of [query | key | value], m×3w, of three m×w matrices of one float dtype.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _matrix("query", query, _FLOATS)
    for name, x in (("key", key), ("value", value)):
        _matrix(name, x, (query.dtype,))
        _same_device(name, x, query)
        if x.shape != query.shape:
            raise UsageError(f"{name} has shape {tuple(x.shape)}: expected {tuple(query.shape)}")
    _choice("block", block, _BLOCKS)
    seed = _seed(rounding, seed, layout, query)
    return tuple(library.quantize_qkv(query, key, value, seed, block, rounding, layout))


@checked
def int8_dequantize(
    q: Tensor, scale: Tensor, *, block: Block = 32, out: FloatName = "bf16"
) -> Tensor:
    """q·scale as `out`, m×n."""
    _codes("q", q, scale, block)
    _choice("out", out, _FLOAT_NAMES)
    return library.dequantize(q, scale, block, out)


@checked
def int8_transpose(q: Tensor, scale: Tensor, *, block: Block = 32) -> tuple[Tensor, Tensor]:
    """qt (int8 n×m) and scale_t, contiguous; nothing is requantised."""
    _codes("q", q, scale, block)
    return library.transpose(q, scale, block)


@checked
def int8_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, block: Block = 32,
    out: str = "bf16", bias: Tensor | None = None, c: Tensor | None = None,
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> Any:  # fmt: skip
    """A (m×k)·Bᵀ (B n×k) + bias, both quantised.

    Args:
        out: "bf16", "fp16", "fp32", or "int8" to requantise with `rounding` and `layout`.
        bias: fp32, n.
        c: m×n contiguous of dtype `out`: the product is added to it, in place. It shares no memory
            with another argument.

    Returns:
        C, m×n; for int8, q, scale and/or qt, scale_t.
    """
    _codes("a", a, a_scale, block)
    _codes("b", b, b_scale, block)
    _same_device("b", b, a)
    if a.shape[1] != b.shape[1]:
        raise UsageError(f"a has k={a.shape[1]} and b k={b.shape[1]}: expected one k")
    m, n = a.shape[0], b.shape[0]
    operands = (a, a_scale.contiguous(), b, b_scale.contiguous())
    if bias is not None:
        bias = _vector("bias", bias, n, a)
    if c is not None:
        _accumulator(c, m, n, out, a)
        read = {"a_scale": a_scale, "b_scale": b_scale, "bias": bias}
        refuse_in_place({"c": c}, read, adds=True)
        library.gemm_accumulate(c, *operands, bias, block)
        return c
    if out == "int8":
        seed = _seed(rounding, seed, layout, a)
        return tuple(library.gemm_quantized(*operands, bias, seed, block, rounding, layout))
    _choice("out", out, (*_FLOAT_NAMES, "int8"))
    if layout != "q":
        raise UsageError(f"layout={layout} out={out}: expected out=int8")
    return library.gemm(*operands, bias, block, out)


def _accumulator(c: Tensor, m: int, n: int, out: str, like: Tensor) -> None:
    if out not in _FLOAT_NAMES:
        raise UsageError(f"c with out={out}: expected out=bf16 or fp16 or fp32")
    _matrix("c", c, (float_dtype(out),))
    _same_device("c", c, like)
    if c.shape != (m, n) or not c.is_contiguous():
        raise UsageError(f"c has shape {tuple(c.shape)}: expected {(m, n)}, contiguous")


@checked
def int8_gelu(
    x: Tensor, x_scale: Tensor, *, block: Block = 32, approximate: Approximate = "tanh",
    rounding: Rounding = "nearest", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """gelu(x), quantised; `approximate` is "tanh" or "erf".

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _codes("x", x, x_scale, block)
    _choice("approximate", approximate, _APPROXIMATIONS)
    seed = _seed(rounding, seed, layout, x)
    return tuple(library.gelu(x, x_scale, seed, block, approximate, rounding, layout))


@checked
def int8_gelu_backward(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, *, block: Block = 32,
    approximate: Approximate = "tanh", rounding: Rounding = "stochastic",
    seed: Tensor | None = None, layout: Layout = "q", inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx = dy·gelu'(x), quantised; the rest as `int8_gelu`.

    Args:
        inplace: write dx's codes over dy's (contiguous, apart from x's); `layout` is then "both".
    """
    _codes("x", x, x_scale, block)
    _codes("dy", dy, dy_scale, block, like=x)
    _choice("approximate", approximate, _APPROXIMATIONS)
    seed = _seed(rounding, seed, layout, x)
    if not inplace:
        return tuple(
            library.gelu_backward(
                x, x_scale, dy, dy_scale, seed, block, approximate, rounding, layout
            )
        )
    if layout != "both" or not dy.is_contiguous():
        raise UsageError(f"inplace with layout={layout}, strides {dy.stride()}: expected "
                         "layout=both and contiguous dy")  # fmt: skip
    refuse_in_place({"dy": dy}, {"x": x})
    scale, qt = dy_scale.new_empty(dy_scale.shape), dy.new_empty(dy.shape[::-1])
    scale_t = scale.new_empty(scale.shape[::-1])
    library.gelu_backward_inplace(
        x, x_scale, dy, dy_scale, scale, qt, scale_t, seed, block, approximate, rounding
    )
    return dy, scale, qt, scale_t


@checked
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
    weight, bias = _vector("weight", weight, n, x), _vector("bias", bias, n, x)
    if (mean is None) != (rstd is None):
        raise UsageError("mean and rstd: expected both or neither")
    if mean is not None and rstd is not None:
        mean, rstd = _vector("mean", mean, m, x), _vector("rstd", rstd, m, x)
    seed = _seed(rounding, seed, layout, x)
    return tuple(
        library.layernorm(x, x_scale, weight, bias, mean, rstd, seed, block, eps, rounding, layout)
    )


@checked
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
    weight = _vector("weight", weight, n, x)
    mean, rstd = _vector("mean", mean, m, x), _vector("rstd", rstd, m, x)
    seed = _seed(rounding, seed, layout, x)
    return tuple(
        library.layernorm_backward(
            x, x_scale, dy, dy_scale, weight, mean, rstd, seed, block, rounding, layout
        )
    )


def _addends(name: str, x: Tensor, y: Tensor, y_scale: Tensor, block: Block) -> None:
    _matrix("the stream", x, (torch.bfloat16,))
    _codes(name, y, y_scale, block, like=x)


@checked
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
    seed = _seed(rounding, seed, layout, x)
    return tuple(library.add(x, y, y_scale, seed, block, eps, rounding, layout))


@checked
def int8_add_backward(
    dsum: Tensor, dq: Tensor, dq_scale: Tensor, *, block: Block = 32,
    rounding: Rounding = "stochastic", seed: Tensor | None = None, layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The stream's gradient (m×n bf16) plus the one that its quantised copy received.

    Returns:
        dx (bf16), and its copy as `layout` says: q, scale and/or qt, scale_t.
    """
    _addends("dq", dsum, dq, dq_scale, block)
    seed = _seed(rounding, seed, layout, dsum)
    return tuple(library.add_backward(dsum, dq, dq_scale, seed, block, rounding, layout))


def _droppable(q: Tensor, scale: Tensor, seed: Tensor, block: Block, layout: Layout) -> None:
    _codes("q", q, scale, block)
    _checked_seed(seed, q)
    _choice("layout", layout, _LAYOUTS)


@checked
def int8_dropout(
    q: Tensor, scale: Tensor, seed: Tensor, *, p: float = 0.1, block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Codes zeroed with probability p and scales divided by 1 − p; nothing is requantised.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _droppable(q, scale, seed, block, layout)
    return tuple(library.dropout(q, scale, seed, p, block, layout))


@checked
def int8_dropout_backward(
    q: Tensor, scale: Tensor, seed: Tensor, *, p: float = 0.1, block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of `int8_dropout` with the same seed, from its output's gradient."""
    _droppable(q, scale, seed, block, layout)
    return tuple(library.dropout_backward(q, scale, seed, p, block, layout))


@checked
def int8_column_sum(qt: Tensor, scale_t: Tensor, *, block: Block = 32) -> Tensor:
    """The column sums (fp32, n) of an m×n tensor from its transposed copy: a bias's gradient."""
    _codes("qt", qt, scale_t, block)
    return library.column_sum(qt, scale_t, block)


def _labelled(logits: Tensor, targets: Tensor, valid: int | None) -> None:
    _matrix("logits", logits, _FLOATS)
    _same_device("targets", targets, logits)
    rows, columns = logits.shape
    if columns == 0 and rows > 0:
        raise UsageError(f"logits has shape {tuple(logits.shape)}: expected at least one column")
    if targets.dtype != torch.int64 or targets.shape != (rows,):
        dtype = str(targets.dtype).removeprefix("torch.")
        raise UsageError(f"targets is {dtype} {tuple(targets.shape)}: expected int64 {(rows,)}")
    if valid is not None and not 1 <= valid <= columns:
        raise UsageError(f"valid={valid}: expected 1 to {columns}, the columns of logits")


@checked
def cross_entropy(
    logits: Tensor, targets: Tensor, *, valid: int | None = None
) -> tuple[Tensor, Tensor]:
    """−log softmax(logits)[target] of every row, and lse = log Σ exp(logits), both fp32, m.

    The loss has a gradient in the logits.

    Args:
        logits: m×n bf16, fp16 or fp32; columns from `valid` on are padding and count as −∞.
        targets: int64, m; −100 gives a loss of 0, and what is no column NaN.
    """
    _labelled(logits, targets, valid)
    return library.cross_entropy(logits, targets.contiguous(), valid)


@checked
def cross_entropy_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, *, valid: int | None = None,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """dloss·(softmax(logits) − one-hot(target)), m×n as the logits; 0 in the padding.

    Args:
        lse: from `cross_entropy`.
        dloss: fp32, m.
        inplace: overwrite the logits, whose rows do not overlap, and return them.
    """
    _labelled(logits, targets, valid)
    m = logits.shape[0]
    lse, dloss = _vector("lse", lse, m, logits), _vector("dloss", dloss, m, logits)
    operands = (logits, targets.contiguous(), lse, dloss, valid)
    if not inplace:
        return library.cross_entropy_backward(*operands)
    refuse_in_place({"logits": logits}, {"targets": operands[1], "lse": lse, "dloss": dloss})
    library.cross_entropy_backward_inplace(*operands)
    return logits


def _same_shape(name: str, x: Tensor, like: Tensor) -> None:
    """An fp32 matrix as `like` is."""
    _matrix(name, x, (torch.float32,))
    _same_device(name, x, like)
    if x.shape != like.shape:
        raise UsageError(f"{name} has shape {tuple(x.shape)}: expected {tuple(like.shape)}")


def _contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise UsageError(f"{name} has strides {x.stride()}: expected a contiguous tensor")


def _scalar(name: str, x: Tensor, like: Tensor) -> None:
    if x.dtype != torch.float32 or x.numel() != 1 or x.device != like.device:
        raise UsageError(f"{name}: expected a float32 tensor of one element on {like.device}")


def _room(
    out: tuple[Tensor, ...] | None, m: int, n: int, block: Block, layout: Layout, like: Tensor
) -> dict[str, Tensor]:
    """Tensors for the codes of an m×n matrix: those given, if they fit, else new ones."""
    wanted: dict[str, tuple[torch.dtype, tuple[int, int]]] = {}
    if layout != "qt":
        wanted |= {"q": (torch.int8, (m, n)), "scale": (torch.float32, blocks_of(m, n, block))}
    if layout != "q":
        wanted |= {"qt": (torch.int8, (n, m)), "scale_t": (torch.float32, blocks_of(n, m, block))}
    if out is None:
        return {k: torch.empty(s, dtype=d, device=like.device) for k, (d, s) in wanted.items()}
    fits = len(out) == len(wanted) and all(
        (x.dtype, x.shape) == kind and x.is_contiguous() and x.device == like.device
        for x, kind in zip(out, wanted.values(), strict=True)
    )
    if not fits:
        kinds = (f"{k} {str(d).removeprefix('torch.')} {s}" for k, (d, s) in wanted.items())
        raise UsageError(f"out: expected {', '.join(kinds)}, contiguous, on {like.device}")
    return dict(zip(wanted, out, strict=True))


@checked
def int8_adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rate: Tensor, step: Tensor,
    *, block: Block = 32, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
    decay: float = 0.01, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    layout: Layout = "both", out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A step of AdamW in place, and the codes of the new param, rounded to nearest.

    Args:
        param, grad, exp_avg, exp_avg_sq: fp32 m×n, all but grad contiguous. What is written shares
            no memory with another argument.
        rate, step: fp32, one element; `step` counts this one too. Below 1 it is refused on a CPU;
            on a GPU, which nothing waits for, what it gives is NaN.
        decay: decoupled: param is multiplied by 1 − rate·decay first.
        grad_scale, found_inf: fp32, one element; both or neither. The gradient is divided by the
            one; where the other is not 0 nothing changes, and the codes are those of param as it
            is.
        out: tensors to write the codes into.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    scalars = {"rate": rate, "step": step, "grad_scale": grad_scale, "found_inf": found_inf}
    for name, x in {**state, "grad": grad}.items():
        _same_shape(name, x, param)
    for name, x in state.items():
        _contiguous(name, x)
    if (grad_scale is None) != (found_inf is None):
        raise UsageError("grad_scale and found_inf: expected both or neither")
    for name, scalar in scalars.items():
        if scalar is not None:
            _scalar(name, scalar, param)
    _choice("block", block, _BLOCKS)
    _choice("layout", layout, _LAYOUTS)
    m, n = param.shape
    codes = _room(out, m, n, block, layout, param)
    refuse_in_place({**state, **codes}, {"grad": grad, **scalars})
    library.adamw(
        param, exp_avg, exp_avg_sq, *(codes.get(k) for k in ("q", "scale", "qt", "scale_t")), grad,
        rate, step, grad_scale, found_inf, block, beta1, beta2, eps, decay,
    )  # fmt: skip
    return tuple(codes.values())


def _kind(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of just one dtype and shape on `like`'s device, contiguous."""
    _same_device(name, x, like)
    if x.dtype != dtype or x.shape != shape:
        found = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
        expected = f"{str(dtype).removeprefix('torch.')} {shape}"
        raise UsageError(f"{name} is {found}: expected {expected}")
    return x.contiguous()


@checked
def int4_quantize(
    x: Tensor, step: Tensor, *, group: Group = 32, layout: Codes = "packed"
) -> tuple[Tensor, ...]:
    """4-bit codes of x (m×n bf16, fp16 or fp32) after a Hadamard transform of each `group` columns.

    Args:
        step: fp32, one element: what codes are multiples of.
        group: a power of two up to 1024 that divides n; 1 transforms nothing.

    Returns:
        As `layout` says, codes in [−8, 7], two a byte (int8 m×n/2, "packed"), one in the high half
        of a byte (int8 m×n, "wide"), or both; then their scale (fp32, one element), NaN if x is not
        finite or the step not finite and above 0, and the sum of the squares of each row's codes
        (int32, m).
    """
    _matrix("x", x, _FLOATS)
    _scalar("step", step, x)
    _choice("group", group, _GROUPS)
    _choice("layout", layout, _INT4_LAYOUTS)
    return tuple(library.hadamard_quantize(x, step.view(1), group, layout))


@checked
def int4_quantize_backward(
    dx_hat: Tensor, *, q: Tensor | None = None, x: Tensor | None = None,
    step: Tensor | None = None, group: Group = 32, slots: Tensor | None = None,
    unit: Tensor | None = None,
) -> Any:  # fmt: skip
    """The gradient of x from that of its transform: (dx_hat where not clipped), transformed back.

    Args:
        dx_hat: m×n bf16, fp16 or fp32; with `slots` the kept rows alone, as `int4_gemm` leaves
            them.
        q: the packed codes, m×n/2: a code at either end counts as clipped. Or else
        x, step: what was quantised, and its step: then the step has a gradient too.
        slots, unit: of `int4_sample_rows` and `int4_bit_split`: the rows that belong to each row
            of x; both or neither.

    Returns:
        dx, m×n as dx_hat; with `x` also the step's gradient by rows, fp32, m.
    """
    _matrix("dx_hat", dx_hat, _FLOATS)
    _choice("group", group, _GROUPS)
    if (q is None) == (x is None) or (x is None) != (step is None):
        raise UsageError("q, x and step: expected q alone, or x and step")
    if (slots is None) != (unit is None):
        raise UsageError("slots and unit: expected both or neither")
    rows, n = dx_hat.shape
    if slots is not None and unit is not None:
        rows = len(slots) if slots.dim() else 0
        slots = _kind("slots", slots, torch.int32, (rows, 2), dx_hat)
        _scalar("unit", unit, dx_hat)
        unit = unit.view(1)
    name, given, columns = ("x", x, n) if x is not None else ("q", q, n // 2)
    assert given is not None
    _matrix(name, given, (torch.int8 if x is None else dx_hat.dtype,))
    _same_device(name, given, dx_hat)
    if given.shape != (rows, columns):
        raise UsageError(f"{name} has shape {tuple(given.shape)}: expected {(rows, columns)}")
    if step is not None:
        _scalar("step", step, dx_hat)
        step = step.view(1)
    found = library.hadamard_quantize_backward(dx_hat, q, x, step, slots, unit, group)
    return found[0] if x is None else tuple(found)


@checked
def int4_bit_split(
    x: Tensor, *, bits: Bits = 8, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient (m×n bf16, fp16 or fp32) as unit·(14·hi + lo), lo rounded stochastically.

    Args:
        bits: 8; or 4 for unit·q alone, rounded to nearest, which needs no seed.

    Returns:
        Packed codes in [−7, 7], hi's rows above lo's (2m×n/2; of 4 bits m×n/2), the unit (fp32,
        one element) and the sum of the squares of each row's codes (int32, 2m or m).
    """
    _matrix("x", x, _FLOATS)
    _choice("bits", bits, get_args(Bits))
    seed = _checked_seed(seed, x) if bits == 8 else None
    return library.bit_split(x, seed, bits)


@checked
def int4_sample_rows(
    squares: Tensor, *, x_squares: Tensor | None = None, parts: Parts = 2, keep: Keep = "half",
    seed: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Which rows of a split gradient to multiply, drawn with probabilities as their norms are.

    Args:
        squares: int32, parts·m, of `int4_bit_split`.
        x_squares: int32, m, of `int4_quantize`: the draw is then for the weight's gradient.
        keep: "half" of the rows of both parts (m) are expected to be kept, or "all" but the zero
            ones.

    Returns:
        rows (int32): the rows to gather, those of each part up to a multiple of 128, −1 elsewhere;
        counts (int32, 2): the ends of the first part's rows and of all. For the input's gradient
        weight (fp32, for each of the rows) and slots (int32, m×2: where a row's two parts are in
        rows); for the weight's repeat (int8, for each of the rows).
    """
    _choice("parts", parts, get_args(Parts))
    _choice("keep", keep, get_args(Keep))
    m = squares.shape[0] // parts if squares.dim() == 1 else 0
    squares = _kind("squares", squares, torch.int32, (parts * m,), squares)
    if x_squares is not None:
        x_squares = _kind("x_squares", x_squares, torch.int32, (m,), squares)
    seed = _checked_seed(seed, squares)
    return tuple(library.sample_rows(squares, x_squares, seed, parts, keep))


@checked
def int4_gather_rows(
    q: Tensor, *, rows: Tensor | None = None, counts: Tensor | None = None,
    repeat: Tensor | None = None, transpose: bool = False, wide: bool = False,
) -> Tensor:  # fmt: skip
    """Packed codes (m×n/2) one a byte: all rows, or those that `int4_sample_rows` drew.

    Args:
        rows, counts: of `int4_sample_rows`, both or neither; row i of them is q's row i mod m.
            What rows from counts[1] on hold is not said.
        repeat: multiplies each row; not with `wide`, for which a byte then has no room.
        wide: codes are put in the high halves of their bytes, as `int4_gemm` reads them but in a
            weight's gradient.

    Returns:
        int8, rows×n, or n×rows where transposed.
    """
    _matrix("q", q, (torch.int8,))
    if (rows is None) != (counts is None):
        raise UsageError("rows and counts: expected both or neither")
    if rows is not None and counts is not None:
        rows = _kind("rows", rows, torch.int32, (rows.numel(),), q)
        counts = _kind("counts", counts, torch.int32, (2,), q)
    if repeat is not None:
        if rows is None:
            raise UsageError("repeat: expected rows and counts with it")
        repeat = _kind("repeat", repeat, torch.int8, (rows.numel(),), q)
    return library.gather_rows(q, rows, counts, repeat, transpose, wide)


@checked
def int4_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, packed: bool = False,
    bias: Tensor | None = None, weight: Tensor | None = None, counts: Tensor | None = None,
    out: FloatName = "bf16",
) -> Tensor:  # fmt: skip
    """A (m×k)·Bᵀ (B n×k) + bias, of 4-bit codes with a scale (fp32, one element) each.

    Args:
        packed: codes are two a byte, m×k/2 and n×k/2; else one in a byte's high half, but for a
            weight's gradient, whose bytes are the numbers that are meant. k is even either way.
        bias: fp32, n.
        weight, counts: of `int4_sample_rows`, for an input's gradient: row i is multiplied by
            weight[i], and what rows from counts[1] on hold is not said.
        counts alone: for a weight's gradient: what is summed over are the first counts[1], of
            which the first counts[0] count 14 times.

    Returns:
        C, m×n of `out`.
    """
    for name, codes, scale in (("a", a, a_scale), ("b", b, b_scale)):
        _matrix(name, codes, (torch.int8,))
        _same_device(name, codes, a)
        _scalar(f"{name}'s scale", scale, a)
    if a.shape[1] != b.shape[1]:
        unit = 2 if packed else 1
        raise UsageError(f"a has k={a.shape[1] * unit} and b k={b.shape[1] * unit}: expected one k")
    _choice("out", out, _FLOAT_NAMES)
    if bias is not None:
        bias = _vector("bias", bias, b.shape[0], a)
    if weight is not None:
        if counts is None:
            raise UsageError("weight: expected counts with it")
        weight = _vector("weight", weight, a.shape[0], a)
    if counts is not None:
        counts = _kind("counts", counts, torch.int32, (2,), a)
    scales = a_scale.view(1), b_scale.view(1)
    return library.int4_gemm(a, scales[0], b, scales[1], bias, weight, counts, packed, out)
