"""The ops as torch operators, `torch.ops.jetfire.*`: what torch.compile and profilers see.

Sizes come from the tensors; the rest of a `Problem` are arguments. Nothing is checked here beyond
what `Problem` checks: `functional` does, and is what to call. Everything is a constant to autograd,
inputs that require gradients included, but for the bias of `gemm`, the stream of `add` and the
logits of `cross_entropy`.

An operator is written as a function from its arguments to the op's inputs (None where there is
none) and the fields of its `Problem`; `_operator` makes the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from jetfire.core import profiles, registry
from jetfire.core.contract import FloatName, Kernel, Mode, Op, Tensors
from jetfire.core.device import Device
from jetfire.core.launch import choose

Tensor = torch.Tensor
Call = tuple[dict[str, Tensor | None], dict[str, Any]]

FLOAT_NAMES: dict[torch.dtype, FloatName] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}

# Operators live as long as this object does.
_LIBRARY = torch.library.Library("jetfire", "DEF")
# Kernels take row-major tensors alone: Inductor must not lay inputs out anew.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
# Stands for a symbolic size, or 0: a multiple of whatever a `Problem` may ask that they are one of.
_ANY_SIZE = 3 * 1024
_SIZES = ("m", "n", "k", "rows")


@profiles.remembered
def _planned() -> dict[tuple[str, Any], Kernel]:
    """The problems that were asked for, and the kernel that took each."""
    return {}


def planned() -> list[tuple[Op, Any, Kernel]]:
    """Op, problem and kernel of every different call since `profiles.forget`."""
    return [(registry.get(name), problem, kernel) for (name, problem), kernel in _planned().items()]


def _problem(op: Op, fields: Mapping[str, Any]) -> tuple[Any, bool]:
    """A problem, of which a size may be symbolic, or 0; and whether one is 0."""
    symbolic = {key: size for key, size in fields.items() if isinstance(size, torch.SymInt)}
    none = {key: 0 for key in _SIZES if type(size := fields.get(key)) is int and size == 0}
    problem = op.Problem.parse({**fields, **dict.fromkeys(symbolic | none, _ANY_SIZE)})
    for key, size in (symbolic | none).items():
        object.__setattr__(problem, key, size)
    return problem, bool(none)


@profiles.remembered
def _plan(
    name: str, device: torch.device, fields: tuple[tuple[str, Any], ...]
) -> tuple[Op, Any, Kernel | None, Any]:
    """Op, problem, kernel and config of a call; a model repeats few of them.

    Of an empty tensor there is no kernel.
    """
    op = registry.get(name)
    problem, empty = _problem(op, dict(fields))
    if empty:
        return op, problem, None, None
    kernel, config = choose(op, problem, Device.of(torch.empty(0, dtype=torch.int8, device=device)))
    _planned()[name, problem] = kernel
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


def _launch(name: str, call: Call, written: tuple[str, ...]) -> Tensors:
    """Launch into the inputs that are written, or else into new outputs; return these in order."""
    inputs = {key: tensor for key, tensor in call[0].items() if tensor is not None}
    device = next(iter(inputs.values())).device
    op, problem, kernel, config = _plan(name, device, tuple(call[1].items()))
    outputs = {key: inputs[key] for key in written if key in inputs}
    outputs = outputs or op.outputs(problem, inputs)
    context = _launch_context(device)
    if kernel is None:
        with torch.no_grad():
            op.nothing(problem, inputs, outputs)
    elif context is None:
        kernel.launch(problem, config, inputs, outputs)
    else:
        with context:
            kernel.launch(problem, config, inputs, outputs)
    if written:  # a launch does not tell autograd of its writes
        for tensor in outputs.values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
    return outputs


def _allocate(name: str, call: Call) -> Tensors:
    """The outputs alone, for tracing: sizes may be symbolic, and stay so."""
    op = registry.get(name)
    problem, _ = _problem(op, call[1])
    return op.outputs(problem, {k: tensor for k, tensor in call[0].items() if tensor is not None})


def _define(
    schema: str, owner: str, describe: Callable[..., Call]
) -> tuple[torch._ops.OpOverload, str]:
    """An operator that returns what its schema says, its outputs in order, and its full name."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    packet, _, variant = name.partition(".")
    overload = getattr(getattr(torch.ops.jetfire, packet), variant or "default")
    returns = [str(value.type) for value in overload._schema.returns]
    written = tuple(
        argument.name
        for argument in overload._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )

    def packed(outputs: Tensors) -> Any:
        found = tuple(outputs.values())
        if returns == ["List[Tensor]"]:
            return list(found)
        return found if len(returns) > 1 else found[0]

    def run(*args: Any) -> Any:
        outputs = _launch(owner, describe(*args), written)
        return packed(outputs) if returns else None

    def fake(*args: Any) -> Any:
        return packed(_allocate(owner, describe(*args))) if returns else None

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"jetfire::{name}", fake, lib=_LIBRARY)
    return overload, name


def _operator(schema: str, op: str | None = None) -> Callable[[Callable[..., Call]], Any]:
    """Define an operator of an op (of the same name, if None), all of it constant to autograd."""

    def decorate(describe: Callable[..., Call]) -> Any:
        overload, name = _define(schema, op or schema.partition("(")[0], describe)
        # Left to torch, float outputs would require gradients, and backward warn of none.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        return overload

    return decorate


def _differentiable(
    schema: str, leaf: int, backward: Callable[..., Any], setup: Callable[..., None]
) -> Callable[[Callable[..., Call]], Any]:
    """Define an operator whose first output has a gradient in its argument number `leaf`.

    Of its two overloads `constant` has none, and is called where none is asked for: in torch 2.13
    the other costs 20 µs a call more, as every argument is converted twice more.
    """
    name, _, arguments = schema.partition("(")

    def decorate(describe: Callable[..., Call]) -> Any:
        overload, _ = _define(schema, name, describe)
        torch.library.register_autograd(
            f"jetfire::{name}", backward, setup_context=setup, lib=_LIBRARY
        )
        constant = _operator(f"{name}.constant({arguments}", name)(describe)

        def call(*args: Any) -> Any:
            x = args[leaf]
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                return overload(*args)
            return constant(*args)

        return call

    return decorate


def _sized(x: Tensor, **fields: Any) -> dict[str, Any]:
    """A problem's fields, its size that of x."""
    m, n = x.shape
    return {"m": m, "n": n, **fields}


@_operator("quantize(Tensor x, Tensor? seed, int block, str rounding, str layout) -> Tensor[]")
def quantize(x: Tensor, seed: Tensor | None, block: int, rounding: str, layout: str) -> Call:
    return {"x": x, "seed": seed}, _sized(
        x, block=block, dtype=FLOAT_NAMES[x.dtype], rounding=rounding, layout=layout
    )


@_operator(
    "quantize_qkv(Tensor query, Tensor key, Tensor value, Tensor? seed, int block, str rounding,"
    " str layout) -> Tensor[]"
)
def quantize_qkv(
    query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, block: int, rounding: str,
    layout: str,
) -> Call:  # fmt: skip
    return {"query": query, "key": key, "value": value, "seed": seed}, _sized(
        query, block=block, dtype=FLOAT_NAMES[query.dtype], rounding=rounding, layout=layout
    )


@_operator("dequantize(Tensor q, Tensor scale, int block, str out) -> Tensor")
def dequantize(q: Tensor, scale: Tensor, block: int, out: str) -> Call:
    return {"q": q, "scale": scale}, _sized(q, block=block, out=out)


@_operator("transpose(Tensor q, Tensor scale, int block) -> (Tensor, Tensor)")
def transpose(q: Tensor, scale: Tensor, block: int) -> Call:
    return {"q": q, "scale": scale}, _sized(q, block=block)


def _gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    more: dict[str, Tensor | None], fields: dict[str, Any],
) -> Call:  # fmt: skip
    inputs = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias, **more}
    sizes = {"m": a.shape[0], "n": b.shape[0], "k": a.shape[1]}
    return inputs, {**sizes, **fields, "bias": bias is not None}


def _keep_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if not ctx.needs_input_grad[4]:
        ctx.mark_non_differentiable(output)


def _bias_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dbias = grad.sum(0, dtype=torch.float32) if ctx.needs_input_grad[4] else None
    return None, None, None, None, dbias, None, None


@_differentiable(
    "gemm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int block, str out)"
    " -> Tensor",
    4, _bias_gradient, _keep_bias,
)  # fmt: skip
def gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, block: int,
    out: str,
) -> Call:  # fmt: skip
    """`out` is a float."""
    return _gemm(a, a_scale, b, b_scale, bias, {}, {"block": block, "out": out})


@_operator(
    "gemm_quantized(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, Tensor? seed,"
    " int block, str rounding, str layout) -> Tensor[]",
    op="gemm",
)
def gemm_quantized(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    seed: Tensor | None, block: int, rounding: str, layout: str,
) -> Call:  # fmt: skip
    fields = {"block": block, "out": "int8", "rounding": rounding, "layout": layout}
    return _gemm(a, a_scale, b, b_scale, bias, {"seed": seed}, fields)


@_operator(
    "gemm_accumulate(Tensor(a!) c, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale,"
    " Tensor? bias, int block) -> ()",
    op="gemm",
)
def gemm_accumulate(
    c: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    block: int,
) -> Call:  # fmt: skip
    fields = {"block": block, "out": FLOAT_NAMES[c.dtype], "accumulate": True}
    return _gemm(a, a_scale, b, b_scale, bias, {"c": c}, fields)


@_operator(
    "gelu(Tensor x, Tensor x_scale, Tensor? seed, int block, str approximate, str rounding,"
    " str layout) -> Tensor[]"
)
def gelu(
    x: Tensor, x_scale: Tensor, seed: Tensor | None, block: int, approximate: str, rounding: str,
    layout: str,
) -> Call:  # fmt: skip
    return {"x": x, "x_scale": x_scale, "seed": seed}, _sized(
        x, block=block, mode="fwd", approximate=approximate, rounding=rounding, layout=layout
    )


@_operator(
    "gelu_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor? seed, int block,"
    " str approximate, str rounding, str layout) -> Tensor[]",
    op="gelu",
)
def gelu_backward(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, seed: Tensor | None, block: int,
    approximate: str, rounding: str, layout: str,
) -> Call:  # fmt: skip
    return {"x": x, "x_scale": x_scale, "dy": dy, "dy_scale": dy_scale, "seed": seed}, _sized(
        x, block=block, mode="bwd", approximate=approximate, rounding=rounding, layout=layout
    )


@_operator(
    "gelu_backward_inplace(Tensor x, Tensor x_scale, Tensor(a!) q, Tensor dy_scale,"
    " Tensor(b!) scale, Tensor(c!) qt, Tensor(d!) scale_t, Tensor? seed, int block,"
    " str approximate, str rounding) -> ()",
    op="gelu",
)
def gelu_backward_inplace(
    x: Tensor, x_scale: Tensor, q: Tensor, dy_scale: Tensor, scale: Tensor, qt: Tensor,
    scale_t: Tensor, seed: Tensor | None, block: int, approximate: str, rounding: str,
) -> Call:  # fmt: skip
    """`q` holds dy's codes, and then dx's."""
    inputs = {
        "x": x, "x_scale": x_scale, "dy": q, "dy_scale": dy_scale, "seed": seed, "q": q,
        "scale": scale, "qt": qt, "scale_t": scale_t,
    }  # fmt: skip
    return inputs, _sized(
        x, block=block, mode="bwd", approximate=approximate, rounding=rounding, layout="both"
    )


@_operator(
    "layernorm(Tensor x, Tensor x_scale, Tensor weight, Tensor bias, Tensor? mean, Tensor? rstd,"
    " Tensor? seed, int block, float eps, str rounding, str layout) -> Tensor[]"
)
def layernorm(
    x: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None,
    rstd: Tensor | None, seed: Tensor | None, block: int, eps: float, rounding: str, layout: str,
) -> Call:  # fmt: skip
    inputs = {
        "x": x, "x_scale": x_scale, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd,
        "seed": seed,
    }  # fmt: skip
    return inputs, _sized(
        x,
        block=block,
        mode="fwd",
        stats="row" if mean is None else "given",
        rounding=rounding,
        layout=layout,
        eps=eps,
    )


@_operator(
    "layernorm_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor mean, Tensor rstd, Tensor? seed, int block, str rounding, str layout) -> Tensor[]",
    op="layernorm",
)
def layernorm_backward(
    x: Tensor, x_scale: Tensor, dy: Tensor, dy_scale: Tensor, weight: Tensor, mean: Tensor,
    rstd: Tensor, seed: Tensor | None, block: int, rounding: str, layout: str,
) -> Call:  # fmt: skip
    inputs = {
        "x": x, "x_scale": x_scale, "dy": dy, "dy_scale": dy_scale, "weight": weight,
        "mean": mean, "rstd": rstd, "seed": seed,
    }  # fmt: skip
    return inputs, _sized(x, block=block, mode="bwd", rounding=rounding, layout=layout)


def _keep_stream(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 if ctx.needs_input_grad[0] else 0 :])


def _stream_gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    return grads[0], None, None, None, None, None, None, None


@_differentiable(
    "add(Tensor x, Tensor y, Tensor y_scale, Tensor? seed, int block, float eps, str rounding,"
    " str layout) -> Tensor[]",
    0, _stream_gradient, _keep_stream,
)  # fmt: skip
def add(
    x: Tensor, y: Tensor, y_scale: Tensor, seed: Tensor | None, block: int, eps: float,
    rounding: str, layout: str,
) -> Call:  # fmt: skip
    return {"x": x, "y": y, "y_scale": y_scale, "seed": seed}, _sized(
        x, block=block, mode="fwd", rounding=rounding, layout=layout, eps=eps
    )


@_operator(
    "add_backward(Tensor dsum, Tensor dq, Tensor dq_scale, Tensor? seed, int block, str rounding,"
    " str layout) -> Tensor[]",
    op="add",
)
def add_backward(
    dsum: Tensor, dq: Tensor, dq_scale: Tensor, seed: Tensor | None, block: int, rounding: str,
    layout: str,
) -> Call:  # fmt: skip
    return {"dsum": dsum, "dq": dq, "dq_scale": dq_scale, "seed": seed}, _sized(
        dsum, block=block, mode="bwd", rounding=rounding, layout=layout
    )


@_operator(
    "dropout(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout) -> Tensor[]"
)
def dropout(q: Tensor, scale: Tensor, seed: Tensor, p: float, block: int, layout: str) -> Call:
    return {"q": q, "scale": scale, "seed": seed}, _sized(
        q, block=block, mode="fwd", p=p, layout=layout
    )


@_operator(
    "dropout_backward(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout)"
    " -> Tensor[]",
    op="dropout",
)
def dropout_backward(
    q: Tensor, scale: Tensor, seed: Tensor, p: float, block: int, layout: str
) -> Call:
    return {"q": q, "scale": scale, "seed": seed}, _sized(
        q, block=block, mode="bwd", p=p, layout=layout
    )


@_operator("column_sum(Tensor qt, Tensor scale_t, int block) -> Tensor")
def column_sum(qt: Tensor, scale_t: Tensor, block: int) -> Call:
    n, m = qt.shape
    return {"qt": qt, "scale_t": scale_t}, {"m": m, "n": n, "block": block}


def _entropy(
    logits: Tensor, inputs: Mapping[str, Tensor | None], mode: Mode, valid: int | None
) -> Call:
    dtype = FLOAT_NAMES[logits.dtype]
    return {"logits": logits, **inputs}, _sized(logits, dtype=dtype, mode=mode, valid=valid)


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.valid = inputs
    loss, lse = output
    ctx.mark_non_differentiable(*([lse] if ctx.needs_input_grad[0] else [loss, lse]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, lse)


def _logits_gradient(ctx: Any, dloss: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    if dloss is None:
        return None, None, None
    gradient = cross_entropy_backward(*ctx.saved_tensors, dloss.contiguous(), ctx.valid)
    return gradient, None, None


@_differentiable(
    "cross_entropy(Tensor logits, Tensor targets, SymInt? valid) -> (Tensor, Tensor)",
    0, _logits_gradient, _keep_logits,
)  # fmt: skip
def cross_entropy(logits: Tensor, targets: Tensor, valid: int | None) -> Call:
    return _entropy(logits, {"targets": targets}, "fwd", valid)


@_operator(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dloss,"
    " SymInt? valid) -> Tensor",
    op="cross_entropy",
)
def cross_entropy_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, valid: int | None
) -> Call:
    return _entropy(logits, {"targets": targets, "lse": lse, "dloss": dloss}, "bwd", valid)


@_operator(
    "cross_entropy_backward_inplace(Tensor(a!) dlogits, Tensor targets, Tensor lse, Tensor dloss,"
    " SymInt? valid) -> ()",
    op="cross_entropy",
)
def cross_entropy_backward_inplace(
    dlogits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, valid: int | None
) -> Call:
    """`dlogits` holds the logits, and then their gradient."""
    inputs = {"targets": targets, "lse": lse, "dloss": dloss, "dlogits": dlogits}
    return _entropy(dlogits, inputs, "bwd", valid)


@_operator(
    "adamw(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? q,"
    " Tensor(e!)? scale, Tensor(f!)? qt, Tensor(g!)? scale_t, Tensor grad, Tensor rate,"
    " Tensor step, Tensor? grad_scale, Tensor? found_inf, int block, float beta1, float beta2,"
    " float eps, float decay) -> ()"
)
def adamw(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, q: Tensor | None, scale: Tensor | None,
    qt: Tensor | None, scale_t: Tensor | None, grad: Tensor, rate: Tensor, step: Tensor,
    grad_scale: Tensor | None, found_inf: Tensor | None, block: int, beta1: float, beta2: float,
    eps: float, decay: float,
) -> Call:  # fmt: skip
    """The codes that are given say the layout."""
    inputs = {
        "param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "q": q, "scale": scale,
        "qt": qt, "scale_t": scale_t, "grad": grad, "rate": rate, "step": step,
        "grad_scale": grad_scale, "found_inf": found_inf,
    }  # fmt: skip
    layout = "q" if qt is None else "qt" if q is None else "both"
    return inputs, _sized(
        param, block=block, layout=layout, guarded=found_inf is not None, beta1=beta1,
        beta2=beta2, eps=eps, decay=decay,
    )  # fmt: skip


@_operator("hadamard_quantize(Tensor x, Tensor step, int group, str layout) -> Tensor[]")
def hadamard_quantize(x: Tensor, step: Tensor, group: int, layout: str) -> Call:
    return {"x": x, "step": step}, _sized(
        x, group=group, dtype=FLOAT_NAMES[x.dtype], mode="fwd", layout=layout
    )


@_operator(
    "hadamard_quantize_backward(Tensor dx_hat, Tensor? q, Tensor? x, Tensor? step, Tensor? slots,"
    " Tensor? unit, int group) -> Tensor[]",
    op="hadamard_quantize",
)
def hadamard_quantize_backward(
    dx_hat: Tensor, q: Tensor | None, x: Tensor | None, step: Tensor | None, slots: Tensor | None,
    unit: Tensor | None, group: int,
) -> Call:  # fmt: skip
    """Of q or of x and step; with slots and unit, dx_hat holds the kept rows alone."""
    inputs = {"dx_hat": dx_hat, "q": q, "x": x, "step": step, "slots": slots, "unit": unit}
    rows, n = dx_hat.shape
    fields = {
        "m": rows if slots is None else slots.shape[0], "n": n, "group": group,
        "dtype": FLOAT_NAMES[dx_hat.dtype], "mode": "bwd", "given": "codes" if x is None else "x",
        "gathered": slots is not None,
    }  # fmt: skip
    return inputs, fields


@_operator("bit_split(Tensor x, Tensor? seed, int bits) -> (Tensor, Tensor, Tensor)")
def bit_split(x: Tensor, seed: Tensor | None, bits: int) -> Call:
    return {"x": x, "seed": seed}, _sized(x, dtype=FLOAT_NAMES[x.dtype], bits=bits)


@_operator(
    "sample_rows(Tensor squares, Tensor? x_squares, Tensor seed, int parts, str keep) -> Tensor[]"
)
def sample_rows(
    squares: Tensor, x_squares: Tensor | None, seed: Tensor, parts: int, keep: str
) -> Call:
    """For a weight's gradient where x_squares are given, else for an input's."""
    fields = {
        "m": squares.shape[0] // parts, "parts": parts,
        "product": "dgrad" if x_squares is None else "wgrad", "keep": keep,
    }  # fmt: skip
    return {"squares": squares, "x_squares": x_squares, "seed": seed}, fields


@_operator(
    "gather_rows(Tensor q, Tensor? rows, Tensor? counts, Tensor? repeat, bool transpose, bool wide)"
    " -> Tensor"
)
def gather_rows(
    q: Tensor, rows: Tensor | None, counts: Tensor | None, repeat: Tensor | None, transpose: bool,
    wide: bool,
) -> Call:  # fmt: skip
    fields = {
        "m": q.shape[0], "n": 2 * q.shape[1], "rows": None if rows is None else rows.shape[0],
        "repeat": repeat is not None, "transpose": transpose, "wide": wide,
    }  # fmt: skip
    return {"q": q, "rows": rows, "counts": counts, "repeat": repeat}, fields


@_operator(
    "int4_gemm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, Tensor? weight,"
    " Tensor? counts, bool packed, str out) -> Tensor"
)
def int4_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    weight: Tensor | None, counts: Tensor | None, packed: bool, out: str,
) -> Call:  # fmt: skip
    """An input's gradient where a weight of each row and counts are given, a weight's where counts
    alone are."""
    inputs = {
        "a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias, "weight": weight,
        "counts": counts,
    }  # fmt: skip
    fields = {
        "m": a.shape[0], "n": b.shape[0], "k": a.shape[1] * (2 if packed else 1),
        "operands": "packed" if packed else "wide",
        "product": "fwd" if counts is None else "wgrad" if weight is None else "dgrad",
        "out": out, "bias": bias is not None,
    }  # fmt: skip
    return inputs, fields
