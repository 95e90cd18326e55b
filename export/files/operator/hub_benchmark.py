"""What `kernels benchmark` runs: a call at the sizes that it was made for, on recorded inputs."""

import json
from pathlib import Path
from typing import Any

import torch
from kernels.benchmark import Benchmark

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = json.loads(next(ROOT.glob("torch-ext/*/manifest.json")).read_text())
(PROBLEM, *_) = (e["problem"] for e in json.loads((ROOT / "profile.json").read_text())["entries"])


def repeated(tensor: dict[str, Any], device: str) -> torch.Tensor:
    content = bytearray((ROOT / "samples" / f"{tensor['name']}.bin").read_bytes())
    recorded = torch.frombuffer(content, dtype=getattr(torch, tensor["dtype"])).to(device)
    sizes = [PROBLEM[name] for name in MANIFEST["sizes"]]
    shape = [
        factor if dim < 0 else -(-factor * sizes[dim] // divisor)
        for dim, factor, divisor in tensor["shape"]
    ]
    count = torch.Size(shape).numel()
    return recorded.repeat(-(-count // recorded.numel()))[:count].reshape(shape)


class TunedBenchmark(Benchmark):
    def setup(self) -> None:
        read = [t for t in MANIFEST["tensors"] if t["role"] != "output"]
        numbers = [PROBLEM[name] for name in MANIFEST["numbers"]]
        self.given = [*(repeated(tensor, self.device) for tensor in read), *numbers]

    def benchmark_tuned(self) -> None:
        self.out = getattr(self.kernel, MANIFEST["name"])(*self.given)
