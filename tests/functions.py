"""The public functions of `jetfire.ops`, each with arguments that it takes."""

from typing import Any

import torch

from jetfire import ops

M, N = 40, 64  # of every matrix: whole blocks across, a ragged one down


def names() -> list[str]:
    """Every public function, by name."""
    return list(ops.__all__)


def arguments() -> dict[str, list[dict[str, Any]]]:
    """What to call each function with, by keyword; new tensors each time, always of the same bits.

    Everything that a tensor may be made of is in one of a function's calls: both ways, every
    output, in place.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(dtype)

    def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype, device="cpu")

    x, weight, logits = normal(M, N), normal(N, N), normal(M, N)
    bias, gain, seed = normal(N), normal(N), scalar(7, torch.int64)
    stream = x.bfloat16()
    q, scale, qt, scale_t = ops.int8_quantize(x, layout="both")
    dy, dy_scale = ops.int8_quantize(normal(M, N))
    w, w_scale = ops.int8_quantize(weight)
    product = {"a": q, "a_scale": scale, "b": w, "b_scale": w_scale}
    *_, mean, rstd = ops.int8_layernorm(q, scale, gain, bias)
    targets = torch.arange(M, dtype=torch.int64, device="cpu") % 50
    _, lse = ops.cross_entropy(logits, targets)
    entropy = {"logits": logits, "targets": targets, "lse": lse, "dloss": normal(M)}
    step = scalar(0.5)
    packed, wide, x_step, squares = ops.int4_quantize(x, step, layout="both")
    packed_w, wide_w, w_step, _ = ops.int4_quantize(weight, step, layout="both")
    split, unit, of_split = ops.int4_bit_split(x, seed=seed)
    rows, counts, row_weight, slots = ops.int4_sample_rows(of_split, seed=seed)
    drawn, drawn_counts, repeat = ops.int4_sample_rows(of_split, x_squares=squares, seed=seed)
    kept = ops.int4_gather_rows(split, rows=rows, counts=counts, wide=True)
    gathered = {"rows": drawn, "counts": drawn_counts, "transpose": True}
    gt = ops.int4_gather_rows(split, **gathered, repeat=repeat)
    xt = ops.int4_gather_rows(packed, **gathered)
    wide_wt = ops.int4_gather_rows(packed_w, transpose=True, wide=True)
    dx_hat = ops.int4_gemm(kept, unit, wide_wt, w_step, weight=row_weight, counts=counts)
    stochastic = {"rounding": "stochastic", "seed": seed}
    codes, gradient = {"x": q, "x_scale": scale}, {"dy": dy, "dy_scale": dy_scale}
    both = {**codes, **gradient, "seed": seed, "layout": "both"}
    pair = {"gate": q, "gate_scale": scale, "up": dy, "up_scale": dy_scale}
    moments = {"exp_avg": 0.1 * normal(N, N), "exp_avg_sq": normal(N, N).square()}
    adamw = {"grad": normal(N, N), "rate": scalar(0.01), "step": scalar(3), **moments}
    guarded = {"grad_scale": scalar(2.0), "found_inf": scalar(0.0)}
    return {
        "int8_quantize": [{"x": x, "layout": "both"}, {"x": x.half(), **stochastic}],
        "int8_quantize_qkv": [{"query": x, "key": logits, "value": x, **stochastic}],
        "int8_dequantize": [{"q": q, "scale": scale, "out": "fp32"}],
        "int8_transpose": [{"q": q, "scale": scale}],
        "int8_gemm": [
            {**product, "bias": bias, "out": "fp32"},
            {**product, "out": "int8", **stochastic},
            {**product, "c": normal(M, N), "out": "fp32"},
        ],
        "int8_gelu": [{**codes, "approximate": "erf"}, {**codes, "layout": "both"}],
        "int8_gelu_backward": [both, {**both, "dy": dy.clone(), "inplace": True}],
        "int8_layernorm": [
            {**codes, "weight": gain, "bias": bias},
            {**codes, "weight": gain, "bias": bias, "mean": mean, "rstd": rstd, **stochastic},
        ],
        "int8_layernorm_backward": [{**both, "weight": gain, "mean": mean, "rstd": rstd}],
        "int8_rmsnorm": [{**codes, "weight": gain}, {**codes, "weight": gain, **stochastic}],
        "int8_rmsnorm_backward": [{**both, "weight": gain, "rstd": rstd}],
        "int8_swiglu": [{**pair}, {**pair, "layout": "both", **stochastic}],
        "int8_swiglu_backward": [{**pair, **gradient, "seed": seed, "layout": "both"}],
        "int8_add": [{"x": stream, "y": dy, "y_scale": dy_scale, "layout": "both"}],
        "int8_add_backward": [{"dsum": stream, "dq": dy, "dq_scale": dy_scale, "seed": seed}],
        "int8_dropout": [{"q": q, "scale": scale, "seed": seed, "p": 0.3}],
        "int8_dropout_backward": [{"q": q, "scale": scale, "seed": seed, "p": 0.3}],
        "int8_column_sum": [{"qt": qt, "scale_t": scale_t}],
        "cross_entropy": [{"logits": logits, "targets": targets, "valid": 50}],
        "cross_entropy_backward": [
            {**entropy, "valid": 50},
            {**entropy, "logits": logits.clone(), "inplace": True},
        ],
        "int8_adamw": [{"param": weight, **adamw, **guarded}],
        "int4_quantize": [{"x": x, "step": step, "layout": "both"}],
        "int4_quantize_backward": [
            {"dx_hat": logits, "x": x, "step": step},
            {"dx_hat": dx_hat, "q": packed, "slots": slots, "unit": unit},
        ],
        "int4_bit_split": [{"x": x, "seed": seed}, {"x": x, "bits": 4}],
        "int4_sample_rows": [
            {"squares": of_split, "seed": seed},
            {"squares": of_split, "x_squares": squares, "seed": seed},
            {"squares": squares, "parts": 1, "keep": "all", "seed": seed},
        ],
        "int4_gather_rows": [
            {"q": packed, "wide": True},
            {"q": split, **gathered, "repeat": repeat},
        ],
        "int4_gemm": [
            {
                "a": packed,
                "a_scale": x_step,
                "b": packed_w,
                "b_scale": w_step,
                "bias": bias,
                "packed": True,
                "out": "fp32",
            },
            {"a": wide, "a_scale": x_step, "b": wide_w, "b_scale": w_step},
            {
                "a": kept,
                "a_scale": unit,
                "b": wide_wt,
                "b_scale": w_step,
                "weight": row_weight,
                "counts": counts,
                "out": "fp32",
            },
            {"a": gt, "a_scale": unit, "b": xt, "b_scale": x_step, "counts": drawn_counts},
        ],
    }
