"""Time the operator: replays of a CUDA graph of calls that walk over several sets of inputs.

So none finds its inputs in the L2 cache. They hold the recorded ones, repeated. Arguments are sizes
in the order of `manifest.json`; by default it is those that it was made for.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
PACKAGE = __package__ or next(HERE.glob("*/manifest.json")).parent.name
package = importlib.import_module(PACKAGE)
MANIFEST: dict[str, Any] = package._MANIFEST
CALLS, SAMPLE_COUNT, WARM = 50, 31, 10


def tuned() -> dict[tuple[int, ...], str]:
    """The sizes that it was made for, and what `profile.json` says of their times."""
    found = {}
    for entry in json.loads((HERE / "profile.json").read_text())["entries"]:
        origin = entry["provenance"]
        where = f"on {origin.get('gpu', 'an unnamed device')}, {origin.get('date', 'undated')}"
        where = where.encode("unicode_escape").decode()
        # Else another size's config is used, or one of another number of launches.
        exact = entry["problem"] == entry["tuned_for"] and entry["ms"] is not None
        note = f", {1e3 * entry['ms']:.2f} us when tuned {where}" if exact else ""
        found[tuple(entry["problem"][name] for name in MANIFEST["sizes"])] = note
    return found


def repeated(tensor: dict[str, Any], sizes: tuple[int, ...]) -> torch.Tensor:
    """An input at some sizes."""
    content = bytearray((HERE / "samples" / f"{tensor['name']}.bin").read_bytes())
    recorded = torch.frombuffer(content, dtype=getattr(torch, tensor["dtype"])).cuda()
    shape = package._shape(tensor, dict(enumerate(sizes)))
    count = torch.Size(shape).numel()
    return recorded.repeat(-(-count // recorded.numel()))[:count].reshape(shape).contiguous()


def microseconds(sizes: tuple[int, ...]) -> float:
    """The median time of a call."""
    given = [repeated(t, sizes) for t in MANIFEST["tensors"] if t["role"] != "output"]
    total = sum(tensor.nbytes for tensor in given)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [[tensor.clone() for tensor in given] for _ in range(1 + -(-2 * cache // total))]
    by_name = dict(zip(MANIFEST["sizes"], sizes, strict=True))
    numbers = [by_name[name] for name in MANIFEST["numbers"]]
    function = getattr(package, MANIFEST["name"])

    def call(index: int) -> None:
        function(*sets[index % len(sets)], *numbers)

    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    times = []
    for _ in range(WARM + SAMPLE_COUNT):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return median(times[WARM:])


def main() -> None:
    asked = tuple(map(int, sys.argv[1:]))
    known = tuned()
    for sizes in [asked] if asked else known:
        print(f"{'x'.join(map(str, sizes))}: {microseconds(sizes):.2f} us{known.get(sizes, '')}")


if __name__ == "__main__":
    main()
