"""What a user would use instead of our kernels, by name: cuBLAS, FP8, torch's INT8, eager, compile.

Each factory prepares its own operands (random, never zeros) and gives the call to time. A peer
that does not take a shape or a device raises `Unsupported` from its factory, with the reason.
Thunks return their outputs, so that a timer can keep one set of inputs' outputs from being the
next one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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


COMPILES = 64  # problems that torch.compile takes before `forget_compiled` is due


class Unsupported(Exception):
    """A peer does not take this shape or device; the message says why, in one line."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


def _matmul(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> Thunk:
    import torch

    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(n, k, device=device, dtype=dtype)
    return lambda: torch.matmul(a, b.t())


def _fp8_operands(
    m: int, n: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (m×k) row-major and B (k×n) column-major in e4m3, as `_scaled_mm` asks."""
    import torch

    capability = torch.cuda.get_device_capability(device)
    _require(capability >= (8, 9), "FP8 needs sm_89 or later")
    _require(n % 16 == 0 and k % 16 == 0, "FP8 needs n and k to be multiples of 16")
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return a, b.t()


def _fp8(m: int, n: int, k: int, device: torch.device) -> Thunk:
    import torch

    a, b = _fp8_operands(m, n, k, device)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _fp8_block(m: int, n: int, k: int, device: torch.device) -> Thunk:
    """A's scales lie outer dimension first; B's columns of scales are padded to a multiple of four.

    Not torch._scaled_mm: up to torch 2.11 it takes no padding and is then wrong by 40% wherever
    k/128 is no multiple of four.
    """
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    _require(
        torch.cuda.get_device_capability(device) == (9, 0), "FP8 with block scales needs sm_90"
    )
    a, b = _fp8_operands(m, n, k, device)
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    scale_a = (torch.rand(blocks_k, m, device=device) + 0.5).t()
    scale_b = (torch.rand(blocks_n, -(-blocks_k // 4) * 4, device=device) + 0.5).t()
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(
        a, b, scale_a, kinds[0], scale_b, kinds[1], output_dtype=torch.bfloat16
    )


def _int8(m: int, n: int, k: int, device: torch.device) -> Thunk:
    import torch

    _require(m > 16 and n % 8 == 0 and k % 8 == 0, "needs m > 16, n and k multiples of 8")
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    return lambda: torch._int_mm(a, b.t())


def gemm(m: int, n: int, k: int, device: torch.device) -> dict[str, Factory]:
    """C (m×n) = A (m×k) · Bᵀ (B n×k), as each library does it best on a device."""
    import torch

    if device.type != "cuda":
        return {
            "fp32_matmul": lambda: _matmul(m, n, k, device, torch.float32),
            "bf16_matmul": lambda: _matmul(m, n, k, device, torch.bfloat16),
        }
    return {
        "cublas_bf16": lambda: _matmul(m, n, k, device, torch.bfloat16),
        "cublas_fp16": lambda: _matmul(m, n, k, device, torch.float16),
        "fp8_scaled_mm": lambda: _fp8(m, n, k, device),
        "fp8_scaled_mm_block": lambda: _fp8_block(m, n, k, device),
        "int8_torch": lambda: _int8(m, n, k, device),
    }


def _compiled(eager_fn: Thunk) -> Thunk:
    import torch
    import torch._dynamo

    # Dynamo compiles a function for so many shapes; then fullgraph makes it an error rather than a
    # quiet return to eager.
    torch._dynamo.config.recompile_limit = max(COMPILES, torch._dynamo.config.recompile_limit)
    return torch.compile(eager_fn, fullgraph=True, dynamic=False)


def _copy(nbytes: int, device: torch.device) -> Thunk:
    """Reads half of the bytes and writes the other half: source's bits, inverted.

    Not torch's copy_: captured in a CUDA graph that is a memcpy node, which an H200 runs at 2.5 to
    2.7 TB/s at most sizes where this pass over int32 reaches 3.8 (72 MB) to 4.25 TB/s (2 GB).
    """
    import torch

    words = max(1, nbytes // 8)
    source = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target)


def elementwise(eager_fn: Thunk, nbytes: int, device: torch.device) -> dict[str, Factory]:
    """Peers of a memory-bound op.

    Args:
        eager_fn: the op in torch operations, on one set of inputs that it closes over.
        nbytes: what the op must move, inputs and outputs together.
    """
    found: dict[str, Factory] = {"eager": lambda: eager_fn}
    if device.type == "cuda":
        found["compile"] = lambda: _compiled(eager_fn)
    found["copy"] = lambda: _copy(nbytes, device)
    return found


def forget_compiled() -> None:
    """Drop what torch.compile holds, so that it takes `COMPILES` problems more."""
    import sys

    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
