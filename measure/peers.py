"""Peers by name: what a user has instead of our kernels. cuBLAS, FP8, torch's INT8, eager, compile.

Each factory prepares its own operands (random, never zeros) and gives the call to time. A peer
that does not take a shape or a device raises `Unsupported` from its factory, with the reason.
Thunks return their outputs, so that a timer can hold them: the next set's outputs then do not get
the same memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jetfire.core.problem import written_block

if TYPE_CHECKING:
    import torch

    from jetfire.core.tensors import Tensors

Thunk = Callable[[], Any]
Factory = Callable[[], Thunk]

NAMES = {
    "cublas_bf16": "torch.matmul in BF16",
    "cublas_fp16": "torch.matmul in FP16",
    "fp8_scaled_mm": "torch._scaled_mm, FP8 e4m3, one scale a matrix",
    "fp8_scaled_mm_block": "torch scaled_mm, FP8 e4m3, scales 1×128 of A and 128×128 of B",
    "int8_torch": "torch._int_mm: INT8 to int32, no scales",
    "eager": "the same in BF16 or FP32 torch operations",
    "compile": "eager under torch.compile (GPU only)",
    "copy": "a pass that reads and writes as many bytes as the op must move",
    "fp32_matmul": "torch.matmul in FP32 (CPU)",
    "bf16_matmul": "torch.matmul in BF16 (CPU)",
}


MOST = 5  # peers of an op on one device: `gemm` has these on a GPU
COMPILES = 64  # problems that torch.compile takes before `forget_compiled` is due


class Unsupported(Exception):
    """A shape or device that a peer does not take; the message says why, in one line."""


def widened(inputs: Tensors, block: int) -> Callable[[str], torch.Tensor]:
    """Return a function from codes' name to the BF16 tensor that a peer reads in their place."""
    import torch

    from jetfire.reference.dequantize import dequantize

    return lambda name: dequantize(inputs[name], inputs[f"{name}_scale"], block, torch.bfloat16)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> Thunk:
    import torch

    return lambda: torch.matmul(a, b.t())


def _require_fp8(n: int, k: int, device: torch.device, block: bool = False) -> None:
    import torch

    capability = torch.cuda.get_device_capability(device)
    _require(not block or capability == (9, 0), "FP8 with block scales needs sm_90")
    _require(capability >= (8, 9), "FP8 needs sm_89 or later")
    _require(n % 16 == 0 and k % 16 == 0, "FP8 needs n and k to be multiples of 16")


def _fp8(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Thunk:
    """Return the product of codes a (m×k) and b (n×k) with one scale each."""
    import torch

    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _fp8_block(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> Thunk:
    """Return the product of codes a (m×k), b (n×k) with scales m×⌈k/128⌉, ⌈n/128⌉×⌈k/128⌉.

    A's scales lie outer dimension first; B's columns of scales are padded to a multiple of four.
    torch._scaled_mm is not used: up to torch 2.11 it takes no padding and is then wrong by 40%
    wherever k/128 is no multiple of four.
    """
    import torch
    from torch.nn.functional import ScalingType, pad, scaled_mm

    scale_a = scale_a.t().contiguous().t()
    scale_b = pad(scale_b, (0, -scale_b.shape[1] % 4)).t()
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(
        a, b.t(), scale_a, kinds[0], scale_b, kinds[1], output_dtype=torch.bfloat16
    )


def to_e4m3(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 codes of x (m×n fp32) and the scales of its tiles, ⌈m/rows⌉×⌈n/columns⌉ fp32.

    A tile's largest magnitude becomes e4m3's largest number, 448.
    """
    import torch

    m, n = x.shape
    wide = torch.nn.functional.pad(x, (0, -n % columns, 0, -m % rows))
    tiles = wide.view(wide.shape[0] // rows, rows, wide.shape[1] // columns, columns)
    scale = tiles.abs().amax(dim=(1, 3)) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (tiles / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(wide.shape)[:m, :n].contiguous(), scale


def _int8(m: int, n: int, k: int, device: torch.device) -> Thunk:
    import torch

    _require(m > 16 and n % 8 == 0 and k % 8 == 0, "needs m > 16, n and k multiples of 8")
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    return lambda: torch._int_mm(a, b.t())


def gemm(m: int, n: int, k: int, device: torch.device) -> dict[str, Factory]:
    """Return peers for C (m×n) = A (m×k) · Bᵀ (B n×k), each library's best way on a device."""
    import torch

    def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n)]

    def codes() -> list[torch.Tensor]:
        return [x.to(torch.float8_e4m3fn) for x in drawn(torch.bfloat16)]

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device=device) + 0.5

    def fp8() -> Thunk:
        _require_fp8(n, k, device)
        one = torch.ones((), dtype=torch.float32, device=device)
        a, b = codes()
        return _fp8(a, b, one, one)

    def fp8_block() -> Thunk:
        _require_fp8(n, k, device, block=True)
        (a, b), blocks = codes(), -(-k // 128)
        return _fp8_block(a, b, scales(m, blocks), scales(-(-n // 128), blocks))

    if device.type != "cuda":
        return {
            "fp32_matmul": lambda: _matmul(*drawn(torch.float32)),
            "bf16_matmul": lambda: _matmul(*drawn(torch.bfloat16)),
        }
    return {
        "cublas_bf16": lambda: _matmul(*drawn(torch.bfloat16)),
        "cublas_fp16": lambda: _matmul(*drawn(torch.float16)),
        "fp8_scaled_mm": fp8,
        "fp8_scaled_mm_block": fp8_block,
        "int8_torch": lambda: _int8(m, n, k, device),
    }


def int4_gemm(m: int, n: int, k: int, device: torch.device) -> dict[str, Factory]:
    """Return `gemm`'s peers without FP8's block scales, and FP16 first.

    The paper compares its INT4 operator with FP16 (arXiv 2306.11987).
    """
    found = gemm(m, n, k, device)
    return {
        name: found[name]
        for name in sorted(found, key=lambda name: name != "cublas_fp16")
        if name != "fp8_scaled_mm_block"
    }


def codes(problem: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return x (m×n) as INT8 codes and scales by plain torch, in the dtype that x has.

    The problem says the block and the layout, and the rounding where it is not to nearest.
    """
    import torch

    block = written_block(problem)
    m, n = x.shape
    padded = torch.nn.functional.pad(x, (0, -n % block, 0, -m % block))
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = tiles.abs().amax(dim=(1, 3), keepdim=True).float() / 127
    codes = tiles / scale
    if getattr(problem, "rounding", "nearest") == "stochastic":
        codes = (codes + torch.rand_like(codes)).floor()
    q = codes.round().to(torch.int8).view(padded.shape)[:m, :n]
    scale = scale[:, 0, :, 0]
    if problem.layout not in ("qt", "both"):
        return q, scale
    transposed = q.t().contiguous(), scale.t().contiguous()
    return transposed if problem.layout == "qt" else (q, scale, *transposed)


def both(first: dict[str, Factory], second: dict[str, Factory]) -> dict[str, Factory]:
    """Return the peers that two problems share, each with both calls as one."""

    def joined(name: str) -> Thunk:
        one, other = first[name](), second[name]()
        return lambda: (one(), other())

    return {name: partial(joined, name) for name in first if name in second}


def gemm_of(a: torch.Tensor, b: torch.Tensor) -> dict[str, Factory]:
    """Return `gemm`'s peers that approximate A·Bᵀ, on given fp32 operands cast for each."""

    (m, k), n, device = a.shape, b.shape[0], a.device

    def fp8() -> Thunk:
        _require_fp8(n, k, device)
        (qa, sa), (qb, sb) = to_e4m3(a, m, k), to_e4m3(b, n, k)
        return _fp8(qa, qb, sa.reshape(()), sb.reshape(()))

    def fp8_block() -> Thunk:
        _require_fp8(n, k, device, block=True)
        (qa, sa), (qb, sb) = to_e4m3(a, 1, 128), to_e4m3(b, 128, 128)
        return _fp8_block(qa, qb, sa, sb)

    if device.type != "cuda":
        return {
            "fp32_matmul": lambda: _matmul(a, b),
            "bf16_matmul": lambda: _matmul(a.bfloat16(), b.bfloat16()),
        }
    return {
        "cublas_bf16": lambda: _matmul(a.bfloat16(), b.bfloat16()),
        "fp8_scaled_mm": fp8,
        "fp8_scaled_mm_block": fp8_block,
    }


def _compiled(eager_fn: Thunk) -> Thunk:
    import torch
    import torch._dynamo

    # The number of shapes for which Dynamo compiles a function. Beyond it fullgraph raises, rather
    # than quietly return to eager.
    torch._dynamo.config.recompile_limit = max(COMPILES, torch._dynamo.config.recompile_limit)
    return torch.compile(eager_fn, fullgraph=True, dynamic=False)


def copy(nbytes: int, device: torch.device) -> Thunk:
    """Return a call that reads half of the bytes and writes the rest: the source's bits, inverted.

    torch's copy_ is not used: in a CUDA graph it is a memcpy node, which an H200 runs at 2.5 to
    2.7 TB/s at most sizes. This pass over int32 reaches 3.8 (72 MB) to 4.25 TB/s (2 GB).
    """
    import torch

    words = max(1, nbytes // 8)
    source = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target)


def elementwise(eager_fn: Thunk | None, nbytes: int, device: torch.device) -> dict[str, Factory]:
    """Return the peers of a memory-bound op.

    Args:
        eager_fn: the op in torch operations, on one set of inputs that it closes over; None where
            it has none.
        nbytes: the bytes that the op must move, inputs and outputs together.
    """
    found: dict[str, Factory] = {}
    if eager_fn is not None:
        found["eager"] = lambda: eager_fn
        if device.type == "cuda":
            found["compile"] = lambda: _compiled(eager_fn)
    found["copy"] = lambda: copy(nbytes, device)
    return found


def forget_compiled() -> None:
    """Drop all that torch.compile holds, so that it takes `COMPILES` problems more."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
