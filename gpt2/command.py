"""`jetfire train`: a line a step, and what the run came to."""

from __future__ import annotations

import sys
from pathlib import Path

from jetfire.gpt2.train import train
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError


def run(
    preset: str, recipe: str, device: Device, steps: int, seed: int, data: Path | None,
    log: Path | None,
) -> None:  # fmt: skip
    """Train and print each step; `log` gets JSON lines.

    Raises:
        UsageError: a name is unknown, or a file cannot be read or written.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps}: expected at least 1")
    try:
        out = log.open("w") if log is not None else None
    except OSError as error:
        raise UsageError(f"--log {log}: {error.strerror}") from None
    done = []
    try:
        for step in train(preset, recipe, device, steps, seed, data, out):
            done.append(step)
            print(f"step {step.step:5d}  loss {step.loss:.4f}  {step.ms:8.1f} ms", flush=True)
    finally:
        if out is not None:
            out.close()
    print(
        f"jetfire: {preset} {recipe} on {device.label}: loss {done[0].loss:.4f} → "
        f"{done[-1].loss:.4f} in {sum(s.ms for s in done) / 1e3:.1f} s",
        file=sys.stderr,
    )
