"""Train a preset with a recipe on bytes of text, one JSON line a step."""

from __future__ import annotations

import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from torch.nn import functional as F

from jetfire.gpt2.model import GPT2, PRESETS, Preset
from jetfire.nn import convert
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireError, UsageError

RECIPES = {"bf16": None, "int8-block32": 32, "int8-block64": 64, "int8-block128": 128}
_CORPUS_BYTES = 4 << 20


@dataclass(frozen=True)
class Step:
    """One optimizer step: loss in nats a token, and its wall-clock time."""

    step: int
    loss: float
    rate: float
    ms: float


def corpus(path: Path | None) -> torch.Tensor:
    """Text as a tensor of bytes: a file's, else the Python standard library's own source.

    Raises:
        UsageError: the file cannot be read.
    """
    if path is not None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"--data {path}: {error.strerror}") from None
        if not content:
            raise UsageError(f"--data {path}: expected a file with text, it is empty")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)
    text = bytearray()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(
    data: torch.Tensor, preset: Preset, seed: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), int64 batch×context, at random places chosen by the seed."""
    if len(data) <= preset.context:
        raise UsageError(f"--data has {len(data)} bytes: expected more than {preset.context}")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(preset.context + 1)
    while True:
        starts = torch.randint(len(data) - preset.context, (preset.batch, 1), generator=generator)
        rows = data[starts + offsets].long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def build(preset_name: str, recipe: str, device: Device, seed: int) -> tuple[GPT2, Preset]:
    """A freshly initialised model.

    Raises:
        UsageError: there is no such preset or recipe.
    """
    if preset_name not in PRESETS:
        raise UsageError(f"no preset {preset_name!r}: expected one of {', '.join(PRESETS)}")
    if recipe not in RECIPES:
        raise UsageError(f"no recipe {recipe!r}: expected one of {', '.join(RECIPES)}")
    torch.manual_seed(seed)
    model = GPT2(PRESETS[preset_name])
    block = RECIPES[recipe]
    if block is not None:
        convert(model, block)
    return model.to(device.torch_device), PRESETS[preset_name]


def train(
    preset_name: str,
    recipe: str,
    device: Device,
    steps: int = 50,
    seed: int = 0,
    data: Path | None = None,
    log: IO[str] | None = None,
) -> Iterator[Step]:
    """Train, yielding each step; AdamW, cosine decay to a tenth, gradients clipped at 1.

    Raises:
        UsageError: the preset, recipe or data is not to be had.
        JetfireError: the loss is no longer finite; names the step.
    """
    model, preset = build(preset_name, recipe, device, seed)
    fused = device.kind == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), preset.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
    )
    warmup = max(1, steps // 20)
    source = batches(corpus(data), preset, seed, device.torch_device)
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        rate = preset.rate * min(step / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets = next(source)
        with torch.autocast(device.kind, torch.bfloat16, enabled=fused):
            logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        value = loss.item()
        if not math.isfinite(value):
            raise JetfireError(f"loss is {value} at step {step}")
        optimizer.step()
        done = Step(step, value, rate, (time.perf_counter() - begin) * 1e3)
        if log is not None:
            print(json.dumps(asdict(done)), file=log, flush=True)
        yield done
