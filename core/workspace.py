"""Workspaces of counters in device memory, which a kernel finds at zero and leaves at zero.

A kernel whose programs wait for each other counts arrivals. Zeroing the counters before each launch
would cost a launch of its own (about 2 µs, a tenth of a LayerNorm of 8192×4096), so the last
program to use a counter resets it. Launches on one stream run one after another and may share
counters; those on different streams, or captured in graphs that may be replayed on any, may not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

# What a launch may call of torch beside views: it gives memory and launches nothing.
ALLOCATING = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)
# int32 counters: 4 MiB, enough for some thousands of captured launches.
_ARENA = 1 << 20

_lock = threading.Lock()
_by_stream: dict[tuple[int, int], torch.Tensor] = {}
# All arenas by device, never freed since graphs hold addresses in them; and the number of counters
# left in the newest.
_arenas: dict[int, list[torch.Tensor]] = {}
_left: dict[int, int] = {}
_repeated = threading.local()


@contextmanager
def repeating(known: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Note what `counters` returns within, on this thread.

    Args:
        known: what it is to return instead, in order, from an earlier note; none is anew.
    """
    noted: list[torch.Tensor] = []
    _repeated.now = known, noted
    try:
        yield noted
    finally:
        del _repeated.now


def _captured(device: torch.device, index: int, count: int) -> torch.Tensor:
    """Return counters for one captured launch alone, aligned: Triton specialises on alignment."""
    aligned = -(-count // 4) * 4
    left = _left.get(index, 0)
    if left < aligned:
        # A node of the graph zeroes them at each replay: right too, but slower.
        return torch.zeros(count, dtype=torch.int32, device=device)
    _left[index] = left - aligned
    return _arenas[index][-1][left - aligned : left]


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return int32 zeros for one launch on the current stream, which must leave zeros there."""
    now: tuple[list[torch.Tensor], list[torch.Tensor]] = getattr(_repeated, "now", ([], []))
    known, noted = now
    found = known[len(noted)] if known else _counters(device, count)
    noted.append(found)
    return found


def _counters(device: torch.device, count: int) -> torch.Tensor:
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index or 0
    with _lock, torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            return _captured(device, index, count)
        if _left.get(index, 0) < _ARENA // 4:
            _arenas.setdefault(index, []).append(_lasting(index, _ARENA))
            _left[index] = _ARENA
        key = (index, torch.cuda.current_stream(index).cuda_stream)
        have = _by_stream.get(key)
        if have is None or have.numel() < count:
            have = _by_stream[key] = _lasting(index, max(count, 4096))
        return have


def _lasting(index: int, count: int) -> torch.Tensor:
    """Return zeros that any stream may read, allocated by a thread of its own.

    While torch.compile's CUDA graphs (mode reduce-overhead) warm up, what their thread allocates
    lies in their pool of memory, in which they refuse whatever is no output of theirs.
    """

    def zeros() -> torch.Tensor:
        stream = torch.cuda.Stream(index)
        with torch.cuda.stream(stream):
            made = torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
        stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(zeros).result()
