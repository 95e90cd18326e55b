"""A run that is killed, in a process of its own, goes on to the losses it would have had."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jetfire.gpt2 import checkpoint, log
from jetfire.ops.errors import UsageError

SETTINGS = ("layers=1,heads=2,width=32,context=16,batch=4,warmup=2,dropout=0.1,evaluate_every=0,"
            "evaluate_batches=1")  # fmt: skip


def start(home: Path, run: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jetfire.cli", "train", "-o", str(run), *arguments],
        env={**os.environ, "JETFIRE_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def fresh(home: Path, run: Path, recipe: str, steps: int, every: int) -> subprocess.Popen:
    text = home / "text.txt"
    text.write_text(" ".join(str(i) for i in range(4000)))
    return start(home, run, "tiny", "--recipe", recipe, "--data", str(text), "--steps", str(steps),
                 "--set", f"{SETTINGS},checkpoint_every={every}")  # fmt: skip


def end(process: subprocess.Popen) -> str:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


def steps_of(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["norm"]) for r in log.read(run) if r["kind"] == "step"]


def until_step(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait for a step's line in the run's log."""
    limit = time.monotonic() + 240
    while time.monotonic() < limit and process.poll() is None:
        try:
            if steps_of(run)[-1][0] >= step:
                return
        except (UsageError, IndexError):  # no log yet, or no step in it
            pass
        time.sleep(0.002)
    pytest.fail(f"step {step} was not reached: {process.communicate()[1]}")


def killed_and_resumed(home: Path, recipe: str, steps: int) -> None:
    whole, killed = home / "whole", home / "killed"
    undisturbed = fresh(home, whole, recipe, steps, 1000)
    # A checkpoint a step: most kills fall into the writing of one.
    process = fresh(home, killed, recipe, steps, 1)
    until_step(process, killed, random.randrange(3, steps - 10))
    time.sleep(random.uniform(0, 0.05))
    process.kill()
    process.communicate()
    saved = checkpoint.find(killed)
    assert saved is not None
    errors = end(start(home, killed, "--resume", "--set", "checkpoint_every=1000"))
    assert f"from step {saved.step} to step {steps}" in errors
    end(undisturbed)
    assert steps_of(killed) == steps_of(whole)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    killed_and_resumed(tmp_path, "int8-block32", 40)


@pytest.mark.gpu
def test_a_killed_run_goes_on_bit_for_bit_in_bf16_too(tmp_path):
    assert torch.cuda.is_available()
    killed_and_resumed(tmp_path, "bf16", 200)
