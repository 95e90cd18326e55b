"""`jetfire fuzz`: what was tried, what failed, and the lines that run it again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from jetfire import ops, terminal
from jetfire.bench.results import check_writable, write_text
from jetfire.fuzz import jobs, sanitize, store
from jetfire.fuzz.case import Case, Failure
from jetfire.fuzz.jobs import Pair, Plan, Results
from jetfire.fuzz.search import Report
from jetfire.fuzz.worker import CASE_S, Isolated, load
from jetfire.ops.device import Device
from jetfire.ops.errors import NoDeviceError, UsageError, WrongResultError

SCHEMA = 1
EXAMPLES, CPU_LARGEST, GPU_LARGEST, MOST_JOBS = 1000, 300, 2048, 8
# Of a case that may have been a race, which shows in some; and seconds after which none is begun.
RACY_RUNS, RACY_S = 50, 60.0
ENDED = ("timeout", "crash", "raised")
SANITIZED_EXAMPLES, SANITIZED_S = 25, 300.0
COUNTED = ("ragged", "one", "empty", "huge", "strided", "compared", "backward", "skipped")
MESSAGE = 300  # characters of a failure's that its line has


@dataclass(frozen=True)
class Asked:
    """The command line's options; None where the device decides."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    against: str | None = None
    examples: int | None = None
    largest: int | None = None
    seed: int = 0
    budget_s: float = math.inf
    jobs: int | None = None
    device: str = "auto"
    load: Sequence[Path] = ()
    sanitizer: str | None = None
    format: str = "table"
    output: Path | None = None


def fuzz(asked: Asked) -> None:
    """Fuzz ops and print a summary.

    Raises:
        WrongResultError: a kernel was wrong; each case that shows it has been printed and saved.
        UsageError: no such op, kernel or option; or none of the kernels runs on the device.
    """
    for option in ("examples", "largest", "jobs"):
        if (value := getattr(asked, option)) is not None and value < 1:
            raise UsageError(f"--{option} {value}: expected at least 1")
    if asked.format not in ("table", "json"):
        raise UsageError(f"--format {asked.format}: expected table or json")
    if asked.output is not None:
        check_writable(asked.output)
    for file in asked.load:
        load(file)
    # Hypothesis keeps what it knows of our sources there, else in the current folder.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY",
                          str(platformdirs.user_cache_path("jetfire") / "hypothesis"))  # fmt: skip
    plan = _plan(asked)
    results = Results(plan)
    try:
        with _progress(plan) as step:
            for report in jobs.run(plan, results):
                step(report.examples)
                _say(report, plan, asked.format)
    finally:  # after Ctrl-C too
        summary = _summary(plan, results)
        _show(summary, asked.format)
        if asked.output is not None:
            write_text(asked.output, json.dumps(summary, indent=1) + "\n")
    if not any(pair["examples"] for pair in summary["pairs"]):
        raise NoDeviceError(f"none of these kernels runs on {plan.devices[0].label}")
    wrong = sum(bool(pair["failures"]) for pair in summary["pairs"])
    if wrong:
        raise WrongResultError(f"{wrong} kernels were wrong (seed {plan.seed})")
    if plan.against is not None and not any(pair["compared"] for pair in summary["pairs"]):
        raise UsageError(f"--against {plan.against}: nothing was compared on "
                         f"{plan.devices[0].label}")  # fmt: skip


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[int], None]]:
    """What is called with the examples that were run: a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda examples: None
        return
    from rich.progress import Progress

    with Progress(console=terminal.console(stderr=True), transient=True, redirect_stdout=False,
                  redirect_stderr=False) as progress:  # fmt: skip
        task = progress.add_task("examples", total=plan.examples * len(plan.pairs))
        yield lambda examples: progress.update(task, advance=examples)


def _plan(asked: Asked) -> Plan:
    device = Device.parse(asked.device)
    tool = None if asked.sanitizer is None else _tool(asked.sanitizer, device)
    devices = _alike(device) if asked.device == "auto" else [device]
    on_gpu = device.kind == "cuda"
    count = min(MOST_JOBS * len(devices), (os.cpu_count() or 1) // 2) if on_gpu else 1
    return Plan(
        pairs=_pairs(asked),
        devices=devices,
        examples=asked.examples or (SANITIZED_EXAMPLES if tool else EXAMPLES),
        seed=asked.seed,
        largest=asked.largest or (GPU_LARGEST if on_gpu and not tool else CPU_LARGEST),
        jobs=asked.jobs or max(1, count),
        deadline=time.monotonic() + asked.budget_s,
        against=asked.against,
        loaded=tuple(file.resolve() for file in asked.load),
        case_s=SANITIZED_S if tool else CASE_S,
        sanitizer=tool,
        device=asked.device,
    )


def _tool(name: str, device: Device) -> sanitize.Tool:
    """The sanitizer of a name, once there is what it needs.

    Raises:
        NoDeviceError: there is no GPU, or no compute-sanitizer.
    """
    tool = sanitize.parse(name)
    if device.kind != "cuda":
        raise NoDeviceError(f"--sanitizer {name}: needs a CUDA device, here is {device.label}")
    sanitize.find()
    return tool


def _alike(device: Device) -> list[Device]:
    """All devices of this one's model."""
    if device.kind == "cpu":
        return [device]
    import torch

    found = [Device.parse(f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [other for other in found if other.name == device.name]


def _pairs(asked: Asked) -> list[Pair]:
    names = [ops.get(name).name for name in asked.ops] or list(ops.names())
    known = {kernel for name in names for kernel in ops.kernels(name)}
    for name in (*asked.kernels, *([asked.against] if asked.against else [])):
        if name not in known:
            raise UsageError(
                f"no kernel {name!r} in these ops: expected {', '.join(sorted(known))}"
            )
    pairs = [
        (name, kernel)
        for name in names
        for kernel in ops.kernels(name)
        if (not asked.kernels or kernel in asked.kernels)
        and (
            asked.against is None
            or (asked.against in ops.kernels(name) and kernel != asked.against)
        )
    ]
    if not pairs:
        raise UsageError(f"--against {asked.against}: expected an op with another kernel beside it")
    return pairs


def _command(case: Case, plan: Plan) -> str:
    words = ["jetfire-fuzz", "--reproduce", case.id]
    if plan.devices[0].interpreted:
        words.append("--interpreter")
    elif plan.device != "auto":
        words += ["--device", plan.device]
    return " ".join(words + (["--sanitizer", plan.sanitizer] if plan.sanitizer else []))


def _line(failure: Failure, plan: Plan) -> str:
    case, text = failure.case, " ".join(failure.message.split())
    short = text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…"
    return f"{case.op} {case.kernel}: {failure.kind}: {short}; {_command(case, plan)}"


def _say(report: Report, plan: Plan, form: str) -> None:
    """Print and save a batch's failure."""
    for failure in report.failures:
        print(_line(failure, plan), flush=True,
              file=sys.stdout if form == "table" else sys.stderr)  # fmt: skip
        store.save(failure, plan.devices[0], plan.loaded)


def _summary(plan: Plan, results: Results) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": plan.devices[0].label,
        "devices": len(plan.devices),
        "jobs": plan.jobs,
        "seed": plan.seed,
        "largest": plan.largest,
        "against": plan.against,
        "sanitizer": plan.sanitizer,
        "out_of_time": time.monotonic() > plan.deadline,
        "pairs": [
            {
                "op": report.op,
                "kernel": report.kernel,
                "examples": report.examples,
                "seconds": round(report.seconds, 1),
                "configs": len(report.configs),
                "variants": len(report.variants),
                "coverage": dict(sorted(report.coverage.items())),
                "differing": report.differing,
                "compared": report.compared,
                "failures": [store.as_dict(failure) for failure in report.failures],
            }
            for report in results.pairs.values()
        ],
    }


def _show(summary: dict[str, Any], form: str) -> None:
    if form == "json":
        print(json.dumps(summary, indent=1))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = ("op", "kernel", "examples", "s", "configs", *COUNTED)
    against = summary["against"]
    for name in (*columns, *(["differing"] if against else []), "result"):
        table.add_column(name, justify="left" if name in ("op", "kernel", "result") else "right")
    for pair in summary["pairs"]:
        if not pair["examples"]:
            continue
        counts = [str(pair["coverage"].get(name, 0)) for name in COUNTED]
        share = [f"{pair['differing']} of {pair['compared']}"] if against else []
        right = "nothing compared" if against and not pair["compared"] else "ok"
        result = terminal.styled(right)
        if pair["failures"]:
            result = terminal.styled("").append(pair["failures"][0]["kind"], "red")
        if known := pair["coverage"].get("known reports", 0):
            result.append(f", known reports in {known}", "")
        table.add_row(
            pair["op"], pair["kernel"], str(pair["examples"]), f"{pair['seconds']:.0f}",
            str(pair["configs"]), *counts, *share, result,
        )  # fmt: skip
    terminal.console(width=160).print(table)
    idle = [f"{pair['op']} {pair['kernel']}" for pair in summary["pairs"] if not pair["examples"]]
    notes = [f"seed {summary['seed']}, {summary['device']}"]
    if idle:
        notes.append(f"not run: {', '.join(idle)}")
    if summary["out_of_time"]:
        notes.append("the budget ended it")
    print(f"jetfire: {'; '.join(notes)}", file=sys.stderr)


def reproduce(
    name: str, device_name: str, loaded: Sequence[Path] = (), sanitizer: str | None = None
) -> None:
    """Run a saved case again, up to `RACY_RUNS` times where a race may be what was wrong.

    Args:
        loaded: files in place of those that it was saved with.

    Raises:
        WrongResultError: it still fails.
        UsageError: its kernel, or the one that it is compared with, does not run it here.
    """
    saved = store.find(name)
    runs = 1 if saved.kind in ENDED else RACY_RUNS
    files = [file.resolve() for file in loaded] or saved.loaded
    device = Device.parse(device_name)
    tool = None if sanitizer is None else _tool(sanitizer, device)
    for file in files:
        load(file)
    if reason := _illegal(saved.case, device):
        raise UsageError(f"--reproduce {name}: {reason}")
    limit, end = SANITIZED_S if tool else CASE_S, time.monotonic() + RACY_S
    with contextlib.closing(Isolated(device, tuple(files), limit, tool)) as executor:
        outcome, run = executor.run(saved.case), 1
        while outcome.kind is None and run < runs and time.monotonic() < end:
            outcome, run = executor.run(saved.case), run + 1
        outcome = (executor.late() if outcome.kind is None else None) or outcome
    after = f" after {run} runs" if run > 1 else ""
    if outcome.kind == "skipped":
        raise UsageError(f"{name}: {outcome.message} on {device.label}")
    if outcome.failed:
        raise WrongResultError(f"{saved.case.id}: {outcome.kind}{after}: {outcome.message}")
    print(f"ok on {device.label}{after} (it was {saved.kind}: {saved.message.splitlines()[0]})")


def _illegal(case: Case, device: Device) -> str | None:
    """Why a kernel of the case does not run it on a device; None where all do.

    Raises:
        UsageError: it has no such kernel, problem or config.
    """
    first = ops.get_kernel(case.op, case.kernel)
    if case.empty:  # no kernel sees it
        return None
    problem = ops.get(case.op).Problem.parse(case.problem)
    runs = [(first, case.config)]
    if case.other is not None:
        runs.append((ops.get_kernel(case.op, case.other.kernel), case.other.config))
    for kernel, config in runs:
        reason = kernel.legal(problem, kernel.Config.parse(config), device)
        if reason is not None:
            return f"{kernel.name} on {device.label}: {reason}"
    return None
