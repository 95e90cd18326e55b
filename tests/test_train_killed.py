"""Runs, preparations and exports that are killed lose nothing and go on as if they had not been."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetfire.core.errors import UsageError
from jetfire.gpt2.training import checkpoint, log

# A machine may be busy: what does not end at all is what this is for.
LIMIT_S = 3600
STORM = Path(__file__).parent / "processes" / "kills.py"
SETTINGS = (
    "layers=1,heads=2,width=32,context=16,batch=4,warmup=2,dropout=0.1,evaluate_every=0,"
    "evaluate_batches=1"
)


KINDS = ("trainers", "preparations", "exports")
IN_8_BITS = "trainers:int8-block32:optimizer=adamw8,weights="


@pytest.fixture(scope="module")
def storms(tmp_path_factory):
    """A few of the kills that `tests/processes/kills.py` does a hundred of, and what it said."""
    folder = tmp_path_factory.mktemp("storms")
    words = [sys.executable, str(STORM), "--kills", "4", "--pairs", "1", "--folder", str(folder)]
    words += ["--storms", *KINDS, f"{IN_8_BITS}fp32", f"{IN_8_BITS}bf16"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def survived(said, storm):
    """Whether a line says that a storm's runs did what undisturbed ones do."""
    lines = [line for line in said.splitlines() if line.startswith(f"{storm}: ")]
    return ["did what undisturbed ones do" in line for line in lines] == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_of_kills_loses_nothing(kind, storms):
    assert survived(storms[1], kind)


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_storm_of_kills_loses_no_moment_in_8_bits(weights, storms):
    """Nor a weight in bf16, nor what it would have been rounded by. FC2's weight has codes."""
    folder, said = storms
    storm = f"{IN_8_BITS}{weights}"
    assert survived(said, storm)
    saved = folder / storm / "undisturbed" / "checkpoints" / "step-00000012"
    moment = load_file(saved / checkpoint.OPTIMIZER)["blocks.0.contract.weight/exp_avg"]
    weight = load_file(saved / checkpoint.MODEL)["blocks.0.contract.weight"]
    assert moment.dtype == torch.int8
    assert weight.dtype == (torch.bfloat16 if weights == "bf16" else torch.float32)


def start(home: Path, run: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jetfire.cli", "train", "-o", str(run), *arguments],
        env={**os.environ, "JETFIRE_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def fresh(home: Path, run: Path, steps: int, every: int) -> subprocess.Popen:
    text = home / "text.txt"
    text.write_text(" ".join(str(i) for i in range(4000)))
    return start(
        home,
        run,
        "tiny",
        "--recipe",
        "bf16",
        "--data",
        str(text),
        "--steps",
        str(steps),
        "--set",
        f"{SETTINGS},checkpoint_every={every}",
    )


def end(process: subprocess.Popen) -> str:
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return errors


def steps_of(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["norm"]) for r in log.read(run) if r["kind"] == "step"]


def until_step(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait for a step's line in the run's log."""
    while process.poll() is None:
        try:
            if steps_of(run)[-1][0] >= step:
                return
        except (UsageError, IndexError):  # no log yet, or no step in it
            pass
        time.sleep(0.002)
    pytest.fail(f"step {step} was not reached: {process.communicate()[1]}")


@pytest.mark.gpu
def test_a_killed_run_goes_on_bit_for_bit_on_a_gpu(tmp_path):
    """In processes of their own, as no fork shares a GPU."""
    assert torch.cuda.is_available()
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 200
    undisturbed = fresh(tmp_path, whole, steps, 1000)
    # A checkpoint a step: most kills fall into the writing of one.
    process = fresh(tmp_path, killed, steps, 1)
    until_step(process, killed, random.randrange(3, steps - 10))
    time.sleep(random.uniform(0, 0.05))
    process.kill()
    process.communicate()
    saved = checkpoint.find(killed)
    assert saved is not None
    errors = end(start(tmp_path, killed, "--resume", "--set", "checkpoint_every=1000"))
    assert f"from step {saved.step} to step {steps}" in errors
    end(undisturbed)
    assert steps_of(killed) == steps_of(whole)
