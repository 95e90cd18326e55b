"""What tests/test_parallel.py has torchrun start: commands, one after another, in each process.

Arguments: the device; a folder with text.txt, and one for the outcomes; the settings that all runs
share.
"""

import contextlib
import io
import json
import math
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from jetfire.cli import execute
from jetfire.core import calls, profiles
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.gpt2.data import tokens
from jetfire.gpt2.training import graph, parallel
from jetfire.gpt2.training.loop import Training
from jetfire.measure import provenance
from jetfire.nn.products import own_part
from jetfire.tests.given import changed
from jetfire.tests.processes.leaving import leave

DEVICE, SHARED = sys.argv[1], sys.argv[4]
HOME, OUT = Path(sys.argv[2]), Path(sys.argv[3])
RANK = int(os.environ["RANK"])
LAUNCH, TOKENS = Training._launch, tokens.open_tokens
OUTCOMES: dict[str, dict] = {}
LLAMA = "accumulate=2,family=llama,tied=false,hidden=64"


def run(name: str, *words: str) -> None:
    """Run `jetfire-train` and keep its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = execute("train", ["--debug", *words, "-o", str(OUT / name)])
        except SystemExit as ended:
            code = ended.code
    OUTCOMES[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def begin(name: str, how: str, recipe: str, more: str = "accumulate=2") -> None:
    run(
        name,
        "tiny",
        "--recipe",
        recipe,
        "--data",
        str(HOME / "text.txt"),
        "--set",
        changed(SHARED, f"parallel={how},{more}"),
    )


def resume(name: str, of: str, how: str, *more: str) -> None:
    """Go on with a copy of a run from its checkpoint at step 4."""
    if RANK == 0:
        source = OUT / of / "checkpoints" / "step-00000004"
        shutil.copytree(source, OUT / name / "checkpoints" / source.name)
    torch.distributed.barrier()  # else the other may find no run there
    run(name, "--resume", "--set", f"parallel={how}", *more)


@contextlib.contextmanager
def graphs():
    """Without CUDA, `graph=true` has the step split as for two graphs, and its parts just run."""
    kept = graph.used, graph.graphed
    if DEVICE == "cpu":
        graph.used, graph.graphed = lambda settings, device: True, lambda step: step
    yield
    graph.used, graph.graphed = kept


def fault(self: Training, step: int):
    """A parameter of the second process, and its alone, becomes NaN before step 6."""
    if step == 6 and RANK == 1:
        with torch.no_grad():
            own_part(self.model.blocks[1].expand.bias)[0] = math.nan
    return LAUNCH(self, step)


def apart(folder: Path, say, *, check: bool):
    """Data that the second process cannot read, and a warning in both."""
    warnings.warn("what both warn of", JetfireWarning, stacklevel=1)
    assert check == (RANK == 0)  # one reads them all through
    if RANK == 1:
        raise UsageError("not to be read here")
    return TOKENS(folder, say, check=check)


def differ(op: str) -> None:
    """Give the op's problems so far profiles that were tuned to other outputs in each process."""
    os.environ["JETFIRE_PROFILES"] = str(OUT / f"profiles-{RANK}")
    digest, times = "ab"[RANK] * 64, (1.0, 1.0, 1.0, 9, 1.0, None, "time", {}, 3, "tpe")
    for call in calls.planned():
        if call.op.name == op:
            problem, config = call.problem.as_dict(), call.config.as_dict()
            origin = provenance.of(call.kernel, call.device)
            entry = profiles.Entry(call.kernel.name, problem, config, *times, origin, digest)
            profiles.save(profiles.user_folder(), call.device, call.op, [entry])


def runs_of(name: str, how: str, more: str) -> None:
    begin(name, how, "bf16", more)
    begin(f"{name}-int8", how, "int8-block32", more)
    resume(f"{name}-again", name, how)
    resume(f"{name}-int8-again", f"{name}-int8", how)
    if how == "ddp":
        resume(f"{name}-watched", f"{name}-int8", how, "--watch", "3")
    Training._launch = fault
    begin(f"{name}-fault", how, "bf16", more)
    Training._launch = LAUNCH


def all_runs() -> None:
    for how in ("ddp", "fsdp"):
        runs_of(how, how, "accumulate=2")
        begin(f"{how}-int4", how, "int4-hq-lss", "accumulate=1")
        resume(f"{how}-int4-again", f"{how}-int4", how)
        begin(f"{how}-adamw8", how, "int8-block32", "accumulate=2,optimizer=adamw8")
        resume(f"{how}-adamw8-again", f"{how}-adamw8", how)
    narrow = "accumulate=2,optimizer=adamw8,weights=bf16"
    begin("ddp-narrow", "ddp", "int8-block32", narrow)
    resume("ddp-narrow-again", "ddp-narrow", "ddp")
    begin("fsdp-narrow", "fsdp", "int8-block32", narrow)
    with graphs():
        begin("ddp-graph-narrow", "ddp", "int8-block32", f"{narrow},graph=true")
        runs_of("ddp-graph", "ddp", "accumulate=2,graph=true")
        begin("ddp-graph-int4", "ddp", "int4-hq-lss", "accumulate=1,graph=true")
        begin("ddp-graph-llama-int8", "ddp", "int8-block32", f"{LLAMA},head=32,graph=true")
        begin("fsdp-graph", "fsdp", "bf16", "accumulate=2,graph=true")
        begin("fsdp-graph-int8", "fsdp", "int8-block32", "accumulate=2,graph=true")
    for how in ("ddp", "fsdp"):
        begin(f"{how}-llama", how, "bf16", LLAMA)
    begin("fsdp-llama-int8", "fsdp", "int8-block32", f"{LLAMA},head=32")
    resume("fsdp-llama-int8-again", "fsdp-llama-int8", "fsdp")
    resume("fsdp-to-ddp", "fsdp", "ddp")
    tokens.open_tokens = apart
    begin("apart", "ddp", "bf16")
    tokens.open_tokens = TOKENS
    begin("none", "none", "bf16")
    begin("compile", "fsdp", "bf16", "compile=true")
    begin("watch", "fsdp", "int8", "watch=2")
    resume("ddp-to-none", "ddp", "none")
    differ("layernorm")
    two_steps = "accumulate=1,steps=2,warmup=1"
    begin("differing", "ddp", "int8-block32", two_steps)
    begin("differing-strict", "ddp", "int8-block32", f"{two_steps},deterministic=true")


# A process joins once: the store in which processes find each other keeps the first addresses.
with parallel.joined(DEVICE) as joined:
    parallel.joined = lambda device: contextlib.nullcontext(joined)
    profiles.forget()  # what a fork's parent has planned
    all_runs()
(OUT / f"{RANK}.json").write_text(json.dumps(OUTCOMES))
leave()
