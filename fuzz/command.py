"""`jetfire fuzz`: what was tried, what failed, and the lines that run it again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core import loaded, registry, terminal
from jetfire.core.device import Device
from jetfire.core.errors import NoDeviceError, TimedOutError, UsageError, WrongResultError
from jetfire.core.files import check_output, check_writable, is_stream, write
from jetfire.fuzz import sanitize, store
from jetfire.fuzz.example import Example
from jetfire.measure import data
from jetfire.report.text import plural

if TYPE_CHECKING:
    from jetfire.fuzz.jobs import FuzzPlan, FuzzResults, Pair
    from jetfire.fuzz.search import PairReport
    from jetfire.report.table import Table

SCHEMA = 1
MOST_JOBS = 8  # for a GPU
USUAL_S = 1800.0  # in all, where neither examples nor a budget is asked for
# Of a case that may have been a race, which shows in some; and seconds after which none is begun.
RACY_RUNS, RACY_S = 50, 60.0
ENDED = ("timeout", "crash", "raised")
SANITIZED_EXAMPLES, SANITIZED_LARGEST, SANITIZED_USUAL_S = 25, 300, 3600.0
SLOW_S = 300.0  # for a case, under a sanitizer or Triton's interpreter
COUNTED = ("ragged", "one", "empty", "tall", "huge", "strided", "edges", "compared", "skipped")
MESSAGE = 300  # characters of a failure's that its line has
SAVE_S = 2.0  # at least, between a run's records


@dataclass(frozen=True)
class FuzzOptions:
    """The options of `jetfire fuzz`; None where the device decides.

    Attributes:
        examples: of each kernel; budget_s: seconds in all. Where both are None, the usual examples
            in `USUAL_S` at most; where one is, as much of it as the other allows.
    """

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    against: str | None = None
    examples: int | None = None
    largest: int | None = None
    seed: int = 0
    budget_s: float | None = None
    jobs: int | None = None
    device: str = "auto"
    sanitizer: str | None = None
    format: str = "table"
    output: Path | None = None


def fuzz(asked: FuzzOptions) -> None:
    """Fuzz ops and print a summary.

    Raises:
        WrongResultError: a kernel was wrong; each case that shows it has been printed and saved.
        TimedOutError: time ended it before every kernel had its examples; or, of a budget without
            a number of examples, before every kernel had one.
        NoDeviceError: none of the kernels runs on the device.
        UsageError: no such op, kernel or file; or `--against` had nothing to compare with.
    """
    if asked.output is not None and is_stream(asked.output):
        check_writable(asked.output)
    else:
        check_output("-o", asked.output, ".json")
    from jetfire.fuzz import jobs

    pairs = _pairs(asked)
    if asked.sanitizer == "consan":
        pairs = _instrumented(pairs)
    plan = _plan(asked, pairs)
    for name in dict.fromkeys(name for name, _ in plan.extents):
        if why := registry.get(name).no_gradients:
            terminal.note(f"{name}: gradients are not compared with autograd's: {why}")
    results = jobs.FuzzResults(plan)
    elsewhere = [pair for pair in pairs if pair not in plan.extents]
    record = _Record(asked.output, lambda: _summary(plan, results, elsewhere))
    record.keep()
    try:
        with _progress(plan) as step:
            for report in jobs.run(plan, results):
                step(report.examples)
                _say(report, plan, asked.format)
                record.keep()
    finally:  # after Ctrl-C too
        summary = _summary(plan, results, elsewhere)
        _show(summary, asked.format)
        record.write(summary)
    _judge(plan, summary)


class _Record:
    """A run's file, which has its summary from its beginning on: it may be killed before its end.

    A pipe or a device is given the last one alone.

    Args:
        file: None where none was asked for.
        summary: makes it of what there is by then.
    """

    def __init__(self, file: Path | None, summary: Callable[[], dict[str, Any]]) -> None:
        self._file, self._summary = file, summary
        self._replaced = file is not None and not is_stream(file)
        self._saved = -math.inf

    def keep(self) -> None:
        """Write the summary, unless it was written just now."""
        if self._replaced and time.monotonic() - self._saved >= SAVE_S:
            self.write(self._summary())
            self._saved = time.monotonic()

    def write(self, summary: dict[str, Any]) -> None:
        if self._file is not None:
            write(self._file, json.dumps(summary, indent=1) + "\n")


def _judge(plan: FuzzPlan, summary: dict[str, Any]) -> None:
    """Raise what a run ends with, where that is not well.

    Raises:
        JetfireError: as `fuzz` says.
    """
    label, pairs = plan.devices[0].label, summary["pairs"]
    if not plan.extents:
        reasons = [_reason(pair, plan.devices[0]) for pair in summary["elsewhere"]]
        raise NoDeviceError(f"none of these kernels runs on {label}: {'; '.join(reasons)}")
    if wrong := sum(bool(pair["failures"]) for pair in pairs):
        raise WrongResultError(
            f"{plural(wrong, 'kernel is', 'kernels are')} wrong (seed {plan.seed})"
        )
    if summary["short"]:
        raise TimedOutError(
            f"time ended before {len(summary['short'])} of {plural(len(pairs), 'kernel')} "
            "had their examples: raise --budget, or lower --examples"
        )
    if unchecked := [f"{p['op']} {p['kernel']}" for p in pairs if _is_unchecked(p)]:
        raise UsageError(f"{', '.join(unchecked)}: no example had the memory it needs on {label}")
    if plan.against is not None and not any(pair["compared"] for pair in pairs):
        raise UsageError(f"--against {plan.against}: nothing was compared on {label}")


def _reason(pair: str, device: Device) -> str:
    """Return why the kernel of ``OP KERNEL`` does not take the op's usual problem."""
    name, kernel_name = pair.split()
    op, kernel = registry.get(name), registry.get_kernel(name, kernel_name)
    problem = op.problems(op.modes[0], dict.fromkeys(op.dims, 128))[0]
    return f"{kernel_name}: {kernel.legal(problem, kernel.default(problem, device), device)}"


@contextlib.contextmanager
def _progress(plan: FuzzPlan) -> Iterator[Callable[[int], None]]:
    """Yield what is told how many examples were run: a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda examples: None
        return
    from rich.progress import Progress

    counts = [extent.examples for extent in plan.extents.values()]
    total = None if None in counts else sum(filter(None, counts))
    with Progress(
        console=terminal.console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("examples", total=total)
        yield lambda examples: progress.update(task, advance=examples)


def _plan(asked: FuzzOptions, pairs: Sequence[Pair]) -> FuzzPlan:
    from jetfire.fuzz.draw import usual
    from jetfire.fuzz.jobs import FuzzPlan

    device = Device.parse(asked.device)
    tool = None if asked.sanitizer is None else _tool(asked.sanitizer, device)
    devices = device.alike() if asked.device == "auto" else [device]
    on_gpu = device.kind == "cuda"
    count = min(MOST_JOBS * len(devices), (os.cpu_count() or 1) // 2) if on_gpu else 1
    plain = asked.examples is None and asked.budget_s is None
    usual_s = (SANITIZED_USUAL_S if tool else USUAL_S) if plain else math.inf
    limit = usual_s if asked.budget_s is None else asked.budget_s
    extents = {}
    for pair in pairs:
        extent = usual(registry.get(pair[0]), registry.get_kernel(*pair), device)
        if extent is None:  # it does not run here
            continue
        if tool is not None:  # which slows all
            extent = replace(extent, examples=SANITIZED_EXAMPLES, largest=SANITIZED_LARGEST)
        if asked.budget_s is not None:
            extent = replace(extent, examples=None)
        extents[pair] = extent.given(asked.examples, asked.largest)
    return FuzzPlan(
        extents=extents,
        devices=devices,
        seed=asked.seed,
        jobs=asked.jobs or max(1, count),
        deadline=time.monotonic() + limit,
        against=asked.against,
        case_s=_case_s(device, tool),
        sanitizer=tool,
        device=asked.device,
    )


def _case_s(device: Device, tool: sanitize.Tool | None) -> float:
    """Seconds that a case may take."""
    from jetfire.fuzz.worker import CASE_S

    return SLOW_S if tool or device.interpreted else CASE_S


def _tool(name: str, device: Device) -> sanitize.Tool:
    """The sanitizer of a name, once there is what it needs.

    Raises:
        NoDeviceError: there is no GPU, or no such sanitizer.
    """
    tool = sanitize.parse(name)
    if device.kind != "cuda":
        raise NoDeviceError(f"--sanitizer {name}: needs a CUDA device, here is {device.label}")
    if tool == "consan":
        sanitize.instrument()
    else:
        sanitize.find()
    return tool


def _instrumented(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose kernels consan sees, and name the others.

    Raises:
        UsageError: it sees none.
    """
    found = [pair for pair in pairs if registry.get_kernel(*pair).backend == "triton"]
    others = [" ".join(pair) for pair in pairs if pair not in found]
    said = "--sanitizer consan: {} kernels in Triton or Gluon alone"
    if not found:
        raise UsageError(f"{said.format('expected')}, not {', '.join(others)}")
    if others:
        terminal.note(f"{said.format('sees')}; skipped: {', '.join(others)}")
    return found


def _pairs(asked: FuzzOptions) -> list[Pair]:
    ops = [registry.get(name) for name in asked.ops or registry.names()]
    registry.check_kernels(ops, [*asked.kernels, *([asked.against] if asked.against else [])])
    pairs = [
        (op.name, kernel)
        for op in ops
        for kernel in registry.kernels(op.name)
        if (not asked.kernels or kernel in asked.kernels)
        and (
            asked.against is None
            or (asked.against in registry.kernels(op.name) and kernel != asked.against)
        )
    ]
    if not pairs:
        raise UsageError(f"--against {asked.against}: expected an op with another kernel beside it")
    return pairs


def _say(report: PairReport, plan: FuzzPlan, form: str) -> None:
    """Print and save new failures, each with the command that runs it again."""
    device = plan.devices[0]
    for failure in report.failures:
        case, text = failure.case, " ".join(failure.message.split())
        short = text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…"
        words = ["jetfire-fuzz", "--reproduce", case.id]
        if device.interpreted:
            words.append("--interpreter")
        elif plan.device != "auto":
            words += ["--device", plan.device]
        words += ["--sanitizer", plan.sanitizer] if plan.sanitizer else []
        line = f"{case.op} {case.kernel}: {failure.kind}: {short}; {' '.join(words)}"
        if form == "table" and not terminal.manner.json:
            print(terminal.visible(line), flush=True)
        else:  # the summary has them
            terminal.progress(line)
        store.save(failure, device)


def _summary(plan: FuzzPlan, results: FuzzResults, elsewhere: Sequence[Pair]) -> dict[str, Any]:
    """Return what a run has come to, as its JSON has it.

    Args:
        elsewhere: the pairs that were asked for and that the device does not run.
    """
    return {
        "schema": SCHEMA,
        "device": plan.devices[0].label,
        "devices": len(plan.devices),
        "jobs": plan.jobs,
        "seed": plan.seed,
        "against": plan.against,
        "sanitizer": plan.sanitizer,
        "finished": results.finished,
        "out_of_time": results.out_of_time,
        "short": [" ".join(pair) for pair in results.short()],
        "elsewhere": [" ".join(pair) for pair in elsewhere],
        "pairs": [_row(report, plan) for report in results.pairs.values()],
    }


def _row(report: PairReport, plan: FuzzPlan) -> dict[str, Any]:
    extent = plan.extents[report.op, report.kernel]
    return {
        "op": report.op,
        "kernel": report.kernel,
        "asked": extent.examples,
        "largest": extent.largest,
        "examples": report.examples,
        "failing": dict(sorted(report.failing.items())),
        "seconds": round(report.seconds, 1),
        "configs": len(report.configs),
        "variants": len(report.variants),
        "coverage": dict(sorted(report.coverage.items())),
        "differing": report.differing,
        "compared": report.compared,
        "failures": [store.as_dict(failure) for failure in report.failures],
    }


def _is_unchecked(pair: dict[str, Any]) -> bool:
    """Return whether every example that a kernel would have seen was skipped."""
    skipped, empty = (pair["coverage"].get(name, 0) for name in ("skipped", "empty"))
    return skipped > 0 and skipped >= pair["examples"] - empty


def _show(summary: dict[str, Any], form: str) -> None:
    from jetfire.report import output

    about = f"seed {summary['seed']}, {summary['device']}"
    output.give(
        form,
        summary,
        lambda: _print_table(summary),
        lambda: {about: _table(summary)},
        lambda: [_line(pair) for pair in summary["pairs"]],
    )


def _line(pair: dict[str, Any]) -> dict[str, Any]:
    """Return a pair as CSV has it, with its failures' IDs."""
    return {**pair, "failures": [failure["id"] for failure in pair["failures"]]}


def _table(summary: dict[str, Any]) -> Table:
    from jetfire.report.table import Table

    against, unfinished = summary["against"], not summary["finished"]
    differing = ["differing"] if against else []
    columns = ("op", "kernel", "examples", "s", "configs", *COUNTED, *differing, "result")
    rows = []
    for pair in summary["pairs"]:
        counts = [str(pair["coverage"].get(name, 0)) for name in COUNTED]
        share = [f"{pair['differing']} of {pair['compared']}"] if against else []
        examples = str(pair["examples"])
        if pair["examples"] < (pair["asked"] or 0) and (_is_short(pair, summary) or unfinished):
            examples += f" of {pair['asked']}"
        texts = (pair["op"], pair["kernel"], examples, f"{pair['seconds']:.0f}")
        rows.append([*texts, str(pair["configs"]), *counts, *share, _result(pair, summary)])
    return Table(columns, rows, (0, 1, len(columns) - 1))


def _print_table(summary: dict[str, Any]) -> None:
    table = _table(summary)
    spare = ("configs", "s", *COUNTED[::-1])
    shown = replace(table, rows=()).rich((len(table.head) - 1,), spare)
    for pair, texts in zip(summary["pairs"], table.rows, strict=True):
        style = "" if _fault(pair, summary) is None else "red"
        shown.add_row(*texts[:-1], terminal.styled(texts[-1], style))
    if table.rows:
        terminal.console(width=160).print(shown)
    notes = [f"seed {summary['seed']}, {summary['device']}"]
    notes += [] if summary["finished"] else ["it did not finish"]
    notes += ["the budget ended it"] if summary["out_of_time"] else []
    if elsewhere := summary["elsewhere"]:
        notes.append(f"{plural(len(elsewhere), 'kernel')} not run here: {', '.join(elsewhere)}")
    terminal.note("; ".join(notes))


def _is_short(pair: dict[str, Any], summary: dict[str, Any]) -> bool:
    return f"{pair['op']} {pair['kernel']}" in summary["short"]


def _fault(pair: dict[str, Any], summary: dict[str, Any]) -> str | None:
    """Return what is wrong with a pair; None where nothing is."""
    kinds = dict.fromkeys(failure["kind"] for failure in pair["failures"])
    faults = {
        ", ".join(kinds): kinds,
        "out of time": _is_short(pair, summary),
        "not run": not pair["examples"],
        "nothing checked": _is_unchecked(pair),
    }
    return next((text for text, true in faults.items() if true), None)


def _result(pair: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return what the last column says of a pair."""
    fine = "nothing compared" if summary["against"] and not pair["compared"] else "ok"
    known = pair["coverage"].get("known reports", 0)
    return (_fault(pair, summary) or fine) + (f", known reports in {known}" if known else "")


def reproduce(
    name: str,
    device_name: str,
    given: bool = False,
    sanitizer: str | None = None,
    ops: Sequence[str] = (),
) -> None:
    """Run a saved case again, up to `RACY_RUNS` times where a race may be what was wrong.

    Args:
        given: files were named by --load, in place of those that it was saved with.
        ops: names, of which the case's is to be one; where there are none, it may be of any.

    Raises:
        WrongResultError: it still fails.
        UsageError: it is of another op; or its kernel, or the one that it is compared with, does
            not run it here.
    """
    saved = store.find(name)
    if ops and saved.case.op not in ops:
        asked = ", ".join(ops)
        raise UsageError(
            f"--reproduce {name}: expected a case of {asked}: it is of {saved.case.op}"
        )
    if saved.load and not saved.own and not loaded.files():
        listed = ", ".join(map(ascii, saved.load))
        raise UsageError(
            f"--reproduce {name}: its kernels are those of {listed}, which are not run because a "
            "file lists them: expected --load FILE for each"
        )
    from jetfire.fuzz.worker import Isolated

    runs = 1 if saved.kind in ENDED else RACY_RUNS
    device = Device.parse(device_name)
    tool = None if sanitizer is None else _tool(sanitizer, device)
    if saved.own and not given:
        loaded.add([Path(file) for file in saved.load])
    if tool == "consan":
        _instrumented([(saved.case.op, saved.case.kernel)])
    if reason := _illegal(saved.case, device):
        raise UsageError(f"--reproduce {name}: {reason}")
    limit, end = _case_s(device, tool), time.monotonic() + RACY_S
    with contextlib.closing(Isolated(device, limit, tool)) as executor:
        outcome, run = executor.run(saved.case), 1
        while outcome.kind is None and run < runs and time.monotonic() < end:
            outcome, run = executor.run(saved.case), run + 1
        outcome = (executor.late() if outcome.kind is None else None) or outcome
    after = f" after {run} runs" if run > 1 else ""
    if outcome.kind == "skipped":
        raise UsageError(f"{name}: {outcome.message} on {device.label}")
    if outcome.failed:
        raise WrongResultError(f"{saved.case.id}: {outcome.kind}{after}: {outcome.message}")
    was = (saved.message.splitlines() or [""])[0]
    said = f"ok on {device.label}{after} (it was {saved.kind}: {was})"
    terminal.result({"case": saved.case.id, "found": said}, lambda: terminal.show(said))


def _illegal(case: Example, device: Device) -> str | None:
    """Return why a kernel of the case does not run it on a device; None where all do.

    Raises:
        UsageError: it has no such kernel, problem or config.
    """
    first = registry.get_kernel(case.op, case.kernel)
    if case.empty:  # no kernel sees it
        return None
    data.check(case.data)
    problem = registry.get(case.op).Problem.parse(case.problem)
    runs = [(first, case.config)]
    if case.other is not None:
        runs.append((registry.get_kernel(case.op, case.other.kernel), case.other.config))
    for kernel, config in runs:
        reason = kernel.legal(problem, kernel.Config.parse(config), device)
        if reason is not None:
            return f"{kernel.name} on {device.label}: {reason}"
    return None
