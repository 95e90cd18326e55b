"""`jetfire bench`: from the command line's options to tables, files and an exit code."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jetfire.core import device as devices
from jetfire.core import registry, terminal
from jetfire.core.errors import (
    Interrupted,
    NoDeviceError,
    UsageError,
    WrongResultError,
    unknown,
)
from jetfire.core.files import check_output, check_writable, write, writing
from jetfire.core.terminal import note
from jetfire.measure import plan
from jetfire.measure.plan import Case, Request
from jetfire.measure.results import Results, Row

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.measure.load import Load
    from jetfire.measure.runner import Options, Runner

    Work = tuple[Case, Options]

T = TypeVar("T")
SAVE_S = 2.0  # a file of 2000 rows takes 50 ms to write: not after each of 500 problems
FORMATS = ("table", "json", "csv", "md")
PLOTS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class BenchOptions:
    """The options of `jetfire bench` as they were given."""

    ops: Sequence[str] = ()
    m: Sequence[str] = ()
    n: Sequence[str] = ()
    k: Sequence[str] = ()
    workload: str | None = None
    block: Sequence[str] = ()
    mode: Sequence[str] = ("fwd",)
    settings: Sequence[str] = ()
    kernels: Sequence[str] = ()
    config: Sequence[str] = ()
    peers: Sequence[str] = ()
    data: str = "normal"
    device: str = "auto"
    format: str | None = None
    output: Path | None = None
    append: bool = False
    plot: Path | None = None
    dry_run: bool = False
    seed: int = 0
    rounds: int | None = None
    remeasure_peaks: bool = False
    suite: str | None = None
    debug: bool = False


def bench(asked: BenchOptions) -> None:
    """Check and time what was asked for, show it, save it.

    Raises:
        JetfireError: with the exit code of what went wrong; results so far are shown and saved.
    """
    kind = file_format(asked)
    existing = existing_rows(asked)
    request = None if asked.suite is not None else request_of(asked)
    if asked.suite is not None:
        from jetfire.bench import suite

        kinds_of_data = any(entry.data is not None for entry in suite.entries(asked.suite))
        check_suite(asked, own_data=kinds_of_data)
    _check(asked, request)
    from jetfire.core.device import Device

    device = Device.parse(asked.device)
    from jetfire.bench import promotion, suite
    from jetfire.measure import runner

    options = _options(asked, device)
    if request is None:
        work = suite.cases(str(asked.suite), options)
    else:
        request = _sized(request, device)
        asked = replace(asked, workload=request.workload)
        work = [(case, options) for case in plan.cases(request, note)]
    runner.check_config([case for case, _ in work], options)
    there = len(existing.rows) if existing else 0
    plan.check_rows([case for case, _ in work], options.kernels, options.peers, there)
    if asked.suite == "promotion":
        promotion.require([case for case, _ in work], device, work[0][1])
    if asked.dry_run:
        _dry_run(work, device)
        return
    if request is not None:
        runner.check_device(work, device)
    if asked.suite not in (None, "promotion") and device.kind == "cpu":
        raise NoDeviceError(f"--suite {asked.suite}: its sizes are for a GPU; name an op instead")
    _measure(asked, work, device, existing, kind)


def _check(asked: BenchOptions, request: Request | None) -> None:
    """Refuse, before torch is loaded, what can be refused without: all names but a config's fields.

    Raises:
        UsageError: it says what is accepted.
    """
    devices.check_name(asked.device)
    plan.check_data(asked.data)
    plan.check_peers(plan.kept_peers(asked.peers) or ())
    _config(asked)
    if request is not None:
        plan.check_kernels(request.ops, asked.kernels)
        plan.check(request)


def _config(asked: BenchOptions) -> dict[str, str]:
    """The fields of `--config`, each with its one value."""
    settings = plan.parse_settings("--config", asked.config)
    for name, values in settings.items():
        if len(values) > 1:
            raise UsageError(f"--config {name}={','.join(values)}: expected one value")
    return {name: values[0] for name, values in settings.items()}


def _sized(request: Request, device: Device) -> Request:
    """With a size for the device where none was given, or the workload of the only op."""
    if request.workload or "m" in request.sizes:
        return request
    chosen = plan.choose_ops(request.ops)
    if device.kind == "cuda" and not request.sizes and len(chosen) == 1 and chosen[0].workload:
        return replace(request, workload=chosen[0].workload)
    default = 4096 if device.kind == "cuda" else 512
    return replace(request, sizes={**request.sizes, "m": [default]})


def check_suite(asked: BenchOptions, own_data: bool) -> None:
    """A suite says itself what is measured, and some on what data.

    Raises:
        UsageError: an option says something else.
    """
    chosen = (
        asked.ops,
        asked.m,
        asked.n,
        asked.k,
        asked.workload,
        asked.block,
        asked.settings,
        asked.kernels,
        asked.config,
        asked.peers,
        asked.rounds,
    )
    if any(chosen) or tuple(asked.mode) != ("fwd",) or (own_data and asked.data != "normal"):
        raise UsageError(
            f"--suite {asked.suite} says itself what is measured: leave out OP and its options"
        )


def request_of(asked: BenchOptions) -> Request:
    """The options that choose problems, parsed; UsageError says which is wrong."""
    plan.choose_ops(asked.ops)
    given = {"m": asked.m, "n": asked.n, "k": asked.k}
    sizes = {d: plan.parse_sizes(f"--{d}", ",".join(texts)) for d, texts in given.items() if texts}
    if asked.workload is not None:
        from jetfire.core import workloads

        if asked.workload not in workloads.names():
            raise unknown(f"no workload {asked.workload!r}", asked.workload, workloads.names())
        if sizes:
            raise UsageError(
                f"--workload {asked.workload} has its own sizes: leave out --m --n --k"
            )
    modes = plan.parse_list(asked.mode)
    for mode in modes:
        if mode not in ("fwd", "bwd"):
            raise UsageError(f"--mode {mode}: expected fwd, bwd or fwd,bwd")
    settings = plan.parse_settings("--set", asked.settings)
    for name in settings:
        if name in ("m", "n", "k", "block", "mode"):
            raise UsageError(f"--set {name}=…: expected --{name}, which sets it")
    return Request(
        ops=plan.parse_list(asked.ops),
        modes=modes,
        sizes=sizes,
        workload=asked.workload,
        blocks=asked.block or None,
        settings=settings,
    )


def file_format(asked: BenchOptions) -> str | None:
    """What `-o` is to hold: `--format`, else what the file's suffix says."""
    if asked.format is not None and asked.format not in FORMATS:
        raise unknown(f"--format {asked.format}", asked.format, FORMATS)
    if asked.rounds is not None and asked.rounds < 1:
        raise UsageError(f"--rounds {asked.rounds}: expected at least 1")
    check_output("--plot", asked.plot, *PLOTS)
    if asked.output is None:
        if asked.append:
            raise UsageError("--append: expected -o FILE.json to add to")
        return None
    kind = asked.format if asked.format in FORMATS[1:] else asked.output.suffix.lstrip(".")
    if kind not in FORMATS[1:]:
        raise UsageError(
            f"-o {asked.output}: expected a file named .json, .csv or .md, or --format"
        )
    if asked.append and kind != "json":
        raise UsageError(f"--append -o {asked.output}: only a JSON file can be added to")
    check_writable(asked.output)
    return kind


def existing_rows(asked: BenchOptions) -> Results | None:
    """What `--append` adds to."""
    if asked.append and asked.output is not None and asked.output.exists():
        return Results.load(asked.output)
    return None


def _options(asked: BenchOptions, device: Device) -> Options:
    from jetfire.measure.runner import Options

    return Options(
        kernels=asked.kernels or None,
        peers=plan.kept_peers(asked.peers),
        config=_config(asked),
        data=asked.data,
        seed=asked.seed,
        rounds=asked.rounds or (20 if device.kind == "cuda" else 7),
        budget_s=30.0 if device.kind == "cuda" else 10.0,
        recheck=device.kind == "cuda",  # on the CPU a call of 4096³ takes seconds
        debug=asked.debug,
    )


def _dry_run(work: Sequence[Work], device: Device) -> None:
    """What would be measured: a line for each kernel of each problem, or why it is left out."""
    from jetfire.measure import runner

    print(f"{device.label}: {len(work)} problems")
    for case, options in work:
        gib = runner.memory_needed(case, device) / 2**30
        sets = runner.sets_of(case, device)
        print(f"{case}: {sets} sets of inputs, {gib:.2f} GiB, {options.rounds} samples a row")
        for choice in runner.choices(case, device, options):
            if choice.reason is None:
                config = plan_text(choice.config.as_dict())
                print(f"  {choice.label} ({choice.profile or 'given'}) {config}".rstrip())
            else:
                print(f"  {choice.label} left out: {choice.reason}")


def plan_text(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def device_record(device: Device, peaks: Mapping[str, Any], driver: str | None) -> dict[str, Any]:
    """The `device` of a results file: what was measured on, with what."""
    import datetime
    import platform

    import torch

    import jetfire
    from jetfire.measure import timer

    record: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "capability": list(device.capability) if device.capability else None,
        "sms": device.sms,
        "l2_bytes": device.l2_bytes,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "jetfire": jetfire.__version__,
        "timer": timer.VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "peaks": dict(peaks),
    }
    return record


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _measure(
    asked: BenchOptions,
    work: Sequence[Work],
    device: Device,
    existing: Results | None,
    kind: str | None,
) -> None:
    from jetfire.measure.load import Load

    note_cpu(device)
    load = Load(device)  # before the peaks: a GPU's use is read beforehand
    runner = prepare(device, work[0][1], asked.remeasure_peaks)
    record = device_record(device, dict(runner.peaks), runner.driver)
    collect(
        asked,
        work,
        lambda item: runner.measure(*item),
        lambda item: item[0],
        record,
        existing,
        kind,
        replay(asked, work[0][0]),
        load,
    )


def note_cpu(device: Device) -> None:
    """Say where no GPU is in use."""
    from jetfire.report.text import NO_GPU

    if device.kind == "cpu":
        note(f"no GPU in use ({device.name}): {NO_GPU}")


def collect(
    asked: BenchOptions,
    work: Sequence[T],
    measure: Callable[[T], Sequence[Row]],
    label: Callable[[T], object],
    record: dict[str, Any],
    existing: Results | None,
    kind: str | None,
    again: str,
    load: Load,
) -> None:
    """Measure one thing after another; show and save the rows, also when it is cut short.

    What makes the figures doubtful is said in a line.

    Args:
        record: the device, as `device_record` has it.
        existing, kind: as `existing_rows` and `file_format` say.
        again: the command line that measures the same.
        load: what watches the device, since before anything was measured on it.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    from jetfire.bench.progress import watch

    name = record["name"]
    if existing is not None and existing.device.get("name") != name:
        raise UsageError(
            f"--append -o {asked.output}: it was measured on {existing.device.get('name')}, "
            f"this is {name}"
        )
    rows: list[Row] = []
    saved = time.monotonic()
    interrupted = False
    try:
        for item in watch(work, label):
            rows += measure(item)
            if time.monotonic() - saved > SAVE_S:
                _save(asked, record, rows, existing, kind)
                saved = time.monotonic()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if rows:
            with ExitStack() as stack:  # each, the last one first, though another fails
                stack.callback(_doubt, load, record, rows)
                stack.callback(_draw, asked, record, rows)
                stack.callback(_print, asked, rows, record, again, kind)
                stack.callback(_save, asked, record, rows, existing, kind)
    _finish(rows, interrupted)


def prepare(device: Device, options: Options, remeasure: bool = False) -> Runner:
    """A runner with the device's peaks."""
    from jetfire.bench.promotion import PromotionRunner
    from jetfire.measure import peaks
    from jetfire.measure.nvml import Nvml
    from jetfire.measure.runner import Runner

    made = PromotionRunner if options.schedules else Runner
    nvml = Nvml.open(device.torch_device)
    driver = nvml.driver() if nvml else None
    return made(device, peaks.cached(device, driver, remeasure), options, note, driver)


def _finish(rows: Sequence[Row], interrupted: bool) -> None:
    wrong = [row for row in rows if row.ok is False]
    if interrupted:
        raise Interrupted(f"interrupted after {len(rows)} rows, shown and saved")
    if not any(row.role == "kernel" for row in rows):
        raise UsageError("nothing was measured: every problem was left out, for the reasons above")
    if wrong:
        raise WrongResultError(f"{len(wrong)} of {len(rows)} rows are wrong: {wrong[0].error}")


def _save(
    asked: BenchOptions,
    record: dict[str, Any],
    rows: Sequence[Row],
    existing: Results | None,
    kind: str | None,
) -> None:
    if asked.output is None or kind is None:
        return
    results = Results(record, list(existing.rows) if existing else [])
    results.merge(rows)
    write(asked.output, render(results, kind))


def _draw(asked: BenchOptions, record: dict[str, Any], rows: Sequence[Row]) -> None:
    if asked.plot is None:
        return
    from jetfire.report.plot import plot

    with writing(asked.plot):
        plot(rows, record, asked.plot)


def _doubt(load: Load, record: dict[str, Any], rows: Sequence[Row]) -> None:
    from jetfire.measure.load import doubts

    if text := doubts(rows, load.text(), record.get("peaks") or {}):
        note(text)


def render(results: Results, kind: str) -> str:
    """Results as json, csv or md."""
    from jetfire.report import show

    if kind == "json":
        return results.to_json()
    if kind == "csv":
        return results.to_csv()
    title = device_title(results.device)
    return "\n".join(show.markdown(title, rows) for rows in show.by_op(results.rows))


def device_title(device: dict[str, Any]) -> str:
    from jetfire.report.text import where

    peaks = device.get("peaks") or {}
    if device.get("kind") == "cpu":
        return where(device)
    measured = [
        f"{label} {peaks[name]:.0f} {unit}"
        for name, label, unit in (
            ("copy_gbps", "copy", "GB/s"),
            ("int8_tops", "INT8", "TOPS"),
            ("bf16_tflops", "BF16", "TFLOP/s"),
        )
        if name in peaks
    ]
    return f"{device.get('name')} · measured peaks: {', '.join(measured)}"


def _print(
    asked: BenchOptions, rows: Sequence[Row], record: dict[str, Any], command: str, kind: str | None
) -> None:
    from jetfire.report import show

    shown = "table" if kind is not None else (asked.format or "table")
    if shown != "table":
        print(render(Results(record, list(rows)), shown), end="")
        return
    console = terminal.console(width=160)
    for part in show.by_op(rows):
        console.print(show.heading(device_title(record), part), soft_wrap=True)
        console.print(show.table(part, narrow=console.width < 110))
        for split in show.splits(part):
            console.print(split.rich())
    for line in show.footnotes(rows):
        console.print(line)
    console.print(command, soft_wrap=True, style="dim")


def replay(asked: BenchOptions, first: Case) -> str:
    """One command line that measures the same again."""
    words = ["jetfire", "bench", *plan.parse_list(asked.ops)]
    if asked.suite is not None:
        words += ["--suite", asked.suite]
    elif asked.workload is not None:
        words += ["--workload", asked.workload]
    else:
        words += ["--m", ",".join(asked.m) or str(first.problem.m)]
    pairs: list[tuple[str, str | None]] = [
        (f"--{name}", ",".join(getattr(asked, name))) for name in ("n", "k", "block")
    ]
    pairs += [("--mode", ",".join(asked.mode))] if tuple(asked.mode) != ("fwd",) else []
    pairs += [("--set", text) for text in asked.settings]
    pairs += [("--kernel", name) for name in asked.kernels]
    pairs += [("--config", text) for text in asked.config]
    pairs += [("--peer", name) for name in asked.peers]
    pairs += [("--data", asked.data if asked.data != "normal" else None)]
    pairs += [("--device", asked.device if asked.device != "auto" else None)]
    pairs += [("--seed", str(asked.seed))]
    pairs += [("--rounds", str(asked.rounds) if asked.rounds else None)]
    words += [word for pair in pairs if pair[1] for word in (pair[0], str(pair[1]))]
    return shlex.join(words)


def listing() -> str:
    """Every op with its kernels and fields, then workloads, peers and data, for `--list`."""
    import dataclasses

    from jetfire.core import workloads
    from jetfire.measure import peers
    from jetfire.measure.data import DISTRIBUTIONS

    lines = ["ops"]
    width = max(map(len, registry.names()))
    for name in registry.names():
        op = registry.get(name)
        fields = [
            f.name if f.default is dataclasses.MISSING else f"{f.name}={show_default(f.default)}"
            for f in dataclasses.fields(op.Problem)
        ]
        lines.append(f"  {name:<{width}} {op.summary}")
        lines.append(f"  {'':<{width}} kernels: {', '.join(registry.kernel_names(name)) or 'none'}")
        lines.append(f"  {'':<{width}} modes: {', '.join(op.modes)}; fields: {' '.join(fields)}")
    lines.append("workloads")
    lines += [f"  {name:<12} {_workload_text(name)}" for name in workloads.names()]
    lines.append("peers")
    lines += [f"  {name:<20} {what}" for name, what in peers.NAMES.items()]
    lines.append(f"data\n  {', '.join(DISTRIBUTIONS)}")
    return "\n".join(lines)


def _workload_text(name: str) -> str:
    from jetfire.core import workloads

    if name in workloads.MODELS:
        model = workloads.MODELS[name]
        return f"width {model.width}, hidden {model.hidden}, {model.tokens} tokens"
    if name in workloads.LAYERS:
        layers = workloads.LAYERS[name]
        return "m n k " + ", ".join(f"{x.tokens} {x.hidden} {x.width}" for x in layers)
    sizes = {"square": workloads.SQUARES, "ragged": workloads.RAGGED}[name]
    return f"sizes {', '.join(map(str, sizes))}"


def show_default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | None) else str(value)
