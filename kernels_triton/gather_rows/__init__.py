"""Gathered rows of packed 4-bit codes as INT8: one tile per program.

Where the output is transposed, words of four rows become words of four codes, one of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.kernels_triton.common import INTERPRETED
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    TileConfig,
    device_reason,
    grid_origin,
    grid_reason,
    power_reason,
    share_reason,
    store_tile,
    tile_count,
    tile_grid,
    warps_reason,
)


def _signed(word: str, low: str, high: str) -> str:
    """Write PTX that unpacks a word's low and high nibbles to the bytes of two words."""
    return f"""
    shl.b32 s, {word}, 4; prmt.b32 s, s, 0, 0xBA98;
    lop3.b32 {low}, {word}, s, 0x0F0F0F0F, 0xE4;
    shr.u32 t, {word}, 4; prmt.b32 s, {word}, 0, 0xBA98;
    lop3.b32 {high}, t, s, 0x0F0F0F0F, 0xE4;"""


def _shifted(word: str, low: str, high: str) -> str:
    """Write PTX as `_signed` does, with the nibbles in the bytes' high halves: wide codes."""
    return f"""
    shl.b32 s, {word}, 4; and.b32 {low}, s, 0xF0F0F0F0; and.b32 {high}, {word}, 0xF0F0F0F0;"""


def _repeated(word: str, times: str, low: str, high: str) -> str:
    """Write PTX as `_signed` does, with each byte multiplied by a number of 0 to 16.

    c·r = (c + 8)·r − 8r: the product fits in a byte, so one multiplication serves four. Bytes are
    subtracted with their top bits apart (Hacker's Delight, 2nd edition, section 2-18).
    """
    lines = [
        f"xor.b32 s, {word}, 0x88888888; and.b32 {low}, s, 0x0F0F0F0F;",
        f"shr.u32 s, s, 4; and.b32 {high}, s, 0x0F0F0F0F; mul.lo.u32 t, {times}, 0x08080808;",
    ]
    for half in (low, high):
        lines.append(f"mul.lo.u32 {half}, {half}, {times}; or.b32 s, {half}, 0x80808080;")
        lines.append("and.b32 d, t, 0x7F7F7F7F; sub.u32 s, s, d;")
        lines.append(f"lop3.b32 d, {half}, t, 0x80808080, 0x82; xor.b32 {half}, s, d;")
    return "\n".join(lines)


def _transposed(words: Sequence[str], out: Sequence[str]) -> str:
    """Write PTX that transposes 4×4 bytes: byte i of four words becomes word i."""
    a, b, c, d = words
    return f"""
    prmt.b32 s, {a}, {b}, 0x5140; prmt.b32 t, {c}, {d}, 0x5140;
    prmt.b32 {out[0]}, s, t, 0x5410; prmt.b32 {out[1]}, s, t, 0x7632;
    prmt.b32 s, {a}, {b}, 0x7362; prmt.b32 t, {c}, {d}, 0x7362;
    prmt.b32 {out[2]}, s, t, 0x5410; prmt.b32 {out[3]}, s, t, 0x7632;"""


_BESIDE = "prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362; }"
# Four bytes to eight codes in order; of one row, where they are repeated.
_UNPACK = tl.constexpr("{ .reg .b32 s, t, l, h;" + _signed("$2", "l", "h") + _BESIDE)
_WIDEN = tl.constexpr("{ .reg .b32 s, l, h;" + _shifted("$2", "l", "h") + _BESIDE)
_REPEAT = tl.constexpr("{ .reg .b32 s, t, d, l, h;" + _repeated("$2", "$3", "l", "h") + _BESIDE)
# A word of eight codes of each of four rows to the rows' first codes, second codes, …
_TRANSPOSE, _TRANSPOSE_WIDE = (
    tl.constexpr(
        "{ .reg .b32 s, t, w<4>;"
        + _transposed([f"${8 + i}" for i in range(4)], [f"w{i}" for i in range(4)])
        + "".join(unpacked(f"w{i}", f"${2 * i}", f"${2 * i + 1}") for i in range(4))
        + "}"
    )
    for unpacked in (_signed, _shifted)
)
_TRANSPOSE_REPEAT = tl.constexpr(
    "{ .reg .b32 s, t, d, l<4>, h<4>;"
    + "".join(_repeated(f"${8 + i}", f"${12 + i}", f"l{i}", f"h{i}") for i in range(4))
    + _transposed([f"l{i}" for i in range(4)], [f"${2 * i}" for i in range(4)])
    + _transposed([f"h{i}" for i in range(4)], [f"${2 * i + 1}" for i in range(4)])
    + "}"
)


@triton.jit
def sources(rows_ptr, places, M, end, LISTED: tl.constexpr):
    """Return the source rows, int32, of the output's rows at `places`; -1 stands for zeros."""
    if LISTED:
        rows = tl.load(rows_ptr + places, mask=places < end, other=-1)
        return tl.where(rows < 0, rows, rows % M)
    else:
        return tl.where(places < end, places, -1)


@triton.jit
def load_listed(ptr, rows, col0, N, stride, C: tl.constexpr):
    """Load columns col0 … col0 + C of a list of rows, zeros beyond N and for row -1.

    A thread loads eight bytes at once, and makes sixteen of the output's of them.
    """
    cols = tl.max_contiguous(col0 + tl.arange(0, C), 8)
    at = ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
    return tl.load(at, mask=(rows >= 0)[:, None] & (cols < N)[None, :], other=0)


@triton.jit
def load_words(q_ptr, rows, word0, PAIRS, stride, W: tl.constexpr, WORDS: tl.constexpr):
    """Load words of four bytes of a list of rows, int32 [R, W]; WORDS: rows are of whole words."""
    if WORDS:
        words = word0 + tl.arange(0, W)
        at = rows.to(tl.int64)[:, None] * (stride // 4) + words[None, :]
        inside = (rows >= 0)[:, None] & (words < PAIRS // 4)[None, :]
        return tl.load(q_ptr.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    pairs = 4 * (word0 + tl.arange(0, W))
    at = q_ptr + (rows.to(tl.int64)[:, None] * stride + pairs[None, :])
    words = tl.zeros((rows.shape[0], W), tl.int32)
    for i in tl.static_range(4):
        inside = (rows >= 0)[:, None] & (pairs + i < PAIRS)[None, :]
        byte = tl.load(at + i, mask=inside, other=0)
        words |= (byte.to(tl.int32) & 0xFF) << (8 * i)
    return words


@triton.jit
def unpacked(q, repeat, REPEAT: tl.constexpr, WIDE: tl.constexpr, VECTORS: tl.constexpr):
    """Unpack each byte to two codes in an int16, the even one low, times `repeat` (int32 like q).

    VECTORS: a thread's neighbourhoods of four bytes are of one row.
    """
    if not INTERPRETED and REPEAT and VECTORS:
        return tl.inline_asm_elementwise(
            _REPEAT, "=r,=r,r,r,r,r,r", [q, repeat], dtype=tl.int16, is_pure=True, pack=4
        )
    if not INTERPRETED and not REPEAT:
        return tl.inline_asm_elementwise(
            _WIDEN if WIDE else _UNPACK, "=r,=r,r", [q], dtype=tl.int16, is_pure=True, pack=4
        )
    if WIDE:
        low, high = (q.to(tl.int32) & 15) << 4, q.to(tl.int32) >> 4 << 4
        return (low | (high << 8)).to(tl.int16)
    low, high = (q.to(tl.int32) << 28) >> 28, q.to(tl.int32) >> 4
    if REPEAT:
        low, high = low * repeat, high * repeat
    return ((low & 0xFF) | (high << 8)).to(tl.int16)


@triton.jit
def gather_kernel(
    q_ptr,
    rows_ptr,
    counts_ptr,
    repeat_ptr,
    out_ptr,
    M,
    PAIRS,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDE: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row0, pair0 = grid_origin(TILE_M, TILE_N // 2)
    LISTED: tl.constexpr = rows_ptr is not None
    REPEAT: tl.constexpr = repeat_ptr is not None
    end = tl.load(counts_ptr + 1) if LISTED else M
    if row0 >= end:
        return
    places = row0 + tl.arange(0, TILE_M)
    rows = sources(rows_ptr, places, M, end, LISTED)
    q = load_listed(q_ptr, rows, pair0, PAIRS, stride, TILE_N // 2)
    repeat = 0
    if REPEAT:
        repeat = tl.load(repeat_ptr + places, mask=places < end, other=0).to(tl.int32)
        repeat = tl.broadcast_to(repeat[:, None], q.shape)
    codes = unpacked(q, repeat, REPEAT, WIDE, VECTORS)
    store_tile(out_ptr.to(tl.pointer_type(tl.int16)), codes, row0, pair0, end, PAIRS, PAIRS)


@triton.jit
def transposed(w0, w1, w2, w3, r0, r1, r2, r3, REPEAT: tl.constexpr, WIDE: tl.constexpr):
    """Return eight words: the k-th has code k of each of four rows' words, times its repeat."""
    if not INTERPRETED and REPEAT:
        return tl.inline_asm_elementwise(
            _TRANSPOSE_REPEAT,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, r0, r1, r2, r3],
            dtype=(tl.int32,) * 8,
            is_pure=True,
            pack=1,
        )
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            _TRANSPOSE_WIDE if WIDE else _TRANSPOSE,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [w0, w1, w2, w3],
            dtype=(tl.int32,) * 8,
            is_pure=True,
            pack=1,
        )
    words, repeats, found = (w0, w1, w2, w3), (r0, r1, r2, r3), ()
    for k in tl.static_range(8):
        four = tl.zeros(w0.shape, tl.int32)
        for i in tl.static_range(4):
            code = (words[i] << (28 - 4 * k)) >> 28
            if WIDE:
                code = code << 4
            four |= ((code * repeats[i] if REPEAT else code) & 0xFF) << (8 * i)
        found = found + (four,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def store_fours(ptr, words, rows, fours, N, COLS, FOURS: tl.constexpr):
    """Write words [F, W], four bytes of a row each, to an N×COLS matrix of bytes.

    FOURS: the matrix's rows are of whole words.
    """
    if FOURS:
        inside = (rows < N)[None, :] & (fours < COLS // 4)[:, None]
        at = rows.to(tl.int64)[None, :] * (COLS // 4) + fours[:, None]
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + at, words, mask=inside)
    else:
        at = ptr + (rows.to(tl.int64)[None, :] * COLS + 4 * fours[:, None])
        for i in tl.static_range(4):
            inside = (rows < N)[None, :] & (4 * fours + i < COLS)[:, None]
            tl.store(at + i, (words >> (8 * i)).to(tl.int8), mask=inside)


@triton.jit
def gather_transposed_kernel(
    q_ptr,
    rows_ptr,
    counts_ptr,
    repeat_ptr,
    out_ptr,
    M,
    PAIRS,
    ROWS,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    FOURS: tl.constexpr,
):
    """Write a transposed tile: a thread has words of four neighbouring rows, so it stores words."""
    row0, col0 = grid_origin(TILE_M, TILE_N)
    LISTED: tl.constexpr = rows_ptr is not None
    REPEAT: tl.constexpr = repeat_ptr is not None
    end = tl.load(counts_ptr + 1) if LISTED else M
    if row0 >= end:
        return
    fours = row0 // 4 + tl.arange(0, TILE_M // 4)
    words, repeats = (), ()
    for i in tl.static_range(4):
        places = 4 * fours + i
        rows = sources(rows_ptr, places, M, end, LISTED)
        word = load_words(q_ptr, rows, col0 // 8, PAIRS, stride, TILE_N // 8, WORDS)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
        repeat = 0
        if REPEAT:
            repeat = tl.load(repeat_ptr + places, mask=places < end, other=0).to(tl.int32)
            repeat = tl.broadcast_to(repeat[:, None], word.shape)
        repeats = repeats + (repeat,)  # type: ignore[assignment]  # noqa: RUF005
    codes = transposed(*words, *repeats, REPEAT, WIDE)
    cols = col0 + 8 * tl.arange(0, TILE_N // 8)
    for k in tl.static_range(8):
        store_fours(out_ptr, codes[k], cols + k, fours, 2 * PAIRS, ROWS, FOURS)


class TritonGatherRows(TritonKernel):
    op = "gather_rows"
    Config = TileConfig
    choices: ClassVar = {
        "tile_m": (1, 2, 4, 8, 16, 32, 64, 128, 256),
        "tile_n": (64, 128, 256, 512, 1024, 2048),
        "warps": (1, 2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        rows, codes = (4, 32) if problem.transpose else (1, 8)
        expected = "a power of two of at least {}"
        return (
            device_reason(device)
            or power_reason(config, "tile_m", expected=expected.format(rows), least=rows)
            or power_reason(config, "tile_n", expected=expected.format(32), least=32)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, codes, 256, "codes")
            or grid_reason(tile_count(problem.height, problem.n, config))
        )

    def default(self, problem: Any, device: Device) -> TileConfig:
        return TileConfig(128, 256, 8) if problem.transpose else TileConfig(16, 512, 4)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        kernel = gather_transposed_kernel if problem.transpose else gather_kernel
        grid = tile_grid(problem.height, problem.n, config)
        given = {"PAIRS": problem.n // 2}
        if problem.transpose:
            given |= {"ROWS": problem.height, "FOURS": problem.height % 4 == 0}
        return (Launch(kernel, grid, problem, config, {"out_ptr": "codes"}, **given),)

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        q = inputs["q"]
        parts = problem.n // 2 | q.stride(0) | q.data_ptr()
        aligned = {"WORDS": parts % 4 == 0} if problem.transpose else {"VECTORS": parts % 16 == 0}
        (launch,) = self.prepared(problem, config, inputs)
        launch({**inputs, **outputs}, **aligned)


KERNELS = (TritonGatherRows(),)
