"""`jetfire bench`: from the command line's options to tables, files and an exit code."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jetfire import __version__
from jetfire.core import checkout, loaded, registry, terminal, workloads
from jetfire.core import device as devices
from jetfire.core.errors import (
    Interrupted,
    NoDeviceError,
    UsageError,
    WrongResultError,
    unknown,
)
from jetfire.core.files import Unreadable, check_output, check_writable, locked, write, writing
from jetfire.core.terminal import note
from jetfire.measure import peers as peer_ops
from jetfire.measure import plan
from jetfire.measure.plan import Case, Request
from jetfire.measure.results import Results, Row
from jetfire.report.output import FORMATS

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.measure.load import Load
    from jetfire.measure.runner import Options, Runner

    Work = tuple[Case, Options]

T = TypeVar("T")
SAVE_S = 2.0  # a file of 2000 rows takes 50 ms to write: not after each of 500 problems
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
    profile: str | None = None
    profile_run: bool = False
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
    from jetfire.bench import profiling, suite

    request = None
    if asked.suite is None:
        request = request_of(asked)
    else:
        suite.check(asked)
    # Before torch is loaded: all names but a config's fields.
    peers, config = plan.kept_peers(asked.peers), _config(asked)
    plan.check_peers(peers or ())
    profiling.check(asked)
    device = devices.Device.parse(asked.device)
    from jetfire.bench import promotion
    from jetfire.measure import runner

    options = _options(asked, device, peers, config)
    if request is None:
        work = suite.cases(str(asked.suite), options)
    else:
        request = _sized(request, device)
        asked = replace(asked, workload=request.workload)
        work = [(case, options) for case in plan.cases(request, note)]
    cases = [case for case, _ in work]
    runner.check_config(cases, options)
    there = len(existing.rows) if existing else 0
    plan.check_rows(cases, options.kernels, options.peers, there)
    if asked.suite == "promotion":
        promotion.require(cases, device, work[0][1])
    if asked.dry_run:
        _dry_run(work, device)
        return
    if request is not None:
        runner.check_device(work, device)
    if asked.suite not in (None, "promotion") and device.kind == "cpu":
        raise NoDeviceError(f"--suite {asked.suite}: its sizes are for a GPU; name an op instead")
    if asked.profile_run:
        profiling.run_once(work, device)
        return
    from jetfire.measure.load import Load

    note_cpu(device)
    count = profiling.counter(asked, device)
    load = Load(device)  # before the peaks: a GPU's use is read beforehand
    made = prepare(device, work[0][1], asked.remeasure_peaks)
    record = device_record(device, made.peaks)
    again = replay(asked, work[0][0])
    output = Output(asked, record, existing, kind, again, load)
    output.collect(work, lambda item: made.measure(*item), lambda item: item[0], count)


def _config(asked: BenchOptions) -> dict[str, str]:
    """The fields of `--config`, each with its one value."""
    settings = plan.parse_settings("--config", asked.config)
    for name, values in settings.items():
        if len(values) > 1:
            raise UsageError(f"--config {name}={','.join(values)}: expected one value")
    return {name: values[0] for name, values in settings.items()}


def _sized(request: Request, device: Device) -> Request:
    """Return a request with a size for the device, or the only op's workload, if it has none."""
    on_gpu = device.kind == "cuda"
    if on_gpu and not request.workload and not request.sizes:
        chosen = plan.choose_ops(request.ops)
        if len(chosen) == 1 and chosen[0].workload:
            return replace(request, workload=chosen[0].workload)
    return request.sized(4096 if on_gpu else 512)


def request_of(asked: BenchOptions) -> Request:
    """What OP, ``--m``, ``--block``, ``--set`` and so on ask for, checked without torch.

    Raises:
        UsageError: it says which is wrong.
    """
    given = {"m": asked.m, "n": asked.n, "k": asked.k}
    sizes = {d: plan.parse_sizes(f"--{d}", ",".join(texts)) for d, texts in given.items() if texts}
    if asked.workload is not None:
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
    ops, blocks = plan.parse_list(asked.ops), asked.block or None
    request = Request(ops, modes, sizes, asked.workload, blocks, settings)
    plan.check(request, asked.kernels)
    return request


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


def _options(
    asked: BenchOptions, device: Device, peers: Sequence[str] | None, config: Mapping[str, str]
) -> Options:
    from jetfire.measure.runner import Options

    return Options(
        kernels=asked.kernels or None,
        peers=peers,
        config=config,
        data=asked.data,
        seed=asked.seed,
        rounds=asked.rounds or (20 if device.kind == "cuda" else 7),
        budget_s=30.0 if device.kind == "cuda" else 10.0,
        debug=asked.debug,
    )


def _dry_run(work: Sequence[Work], device: Device) -> None:
    """What would be measured: a line for each kernel of each problem, or why it is left out."""
    from jetfire.measure import runner
    from jetfire.report.text import fields_text, plural

    lines = [f"{device.label}: {plural(len(work), 'problem')}"]
    for case, options in work:
        gib = runner.memory_needed(case, device) / 2**30
        sets = runner.sets_of(case, device)
        needs = f"{plural(sets, 'set')} of inputs, {gib:.2f} GiB"
        lines.append(f"{case}: {needs}, {plural(options.rounds, 'sample')} per row")
        for choice in runner.choices(case, device, options):
            if choice.reason is None:
                config = fields_text(choice.config.as_dict())
                text = f"  {choice.label} ({choice.profile or 'given'}) {config}".rstrip()
            else:
                text = f"  {choice.label} left out: {choice.reason}"
            lines.append(text)
    terminal.planned(lines)


def device_record(device: Device, peaks: Mapping[str, Any]) -> dict[str, Any]:
    """The `device` of a results file: what was measured on, with what, of which commit and when."""
    from jetfire.measure import provenance, timer
    from jetfire.measure.nvml import driver_of

    now = datetime.datetime.now(datetime.UTC)
    return {
        "name": device.name,
        "kind": device.kind,
        "capability": list(device.capability) if device.capability else None,
        "sms": device.sms,
        "l2_bytes": device.l2_bytes,
        "driver": driver_of(device),
        **provenance.software(),
        "python": platform.python_version(),
        "jetfire": __version__,
        "timer": timer.VERSION,
        "commit": checkout.measured(loaded.files()),
        "time": now.isoformat(timespec="seconds"),
        "date": now.date().isoformat(),
        "peaks": dict(peaks),
    }


def note_cpu(device: Device) -> None:
    """Say where no GPU is in use."""
    from jetfire.report.text import NO_GPU

    if device.kind == "cpu":
        note(f"no GPU in use ({device.name}): {NO_GPU}")


def prepare(device: Device, options: Options, remeasure: bool = False) -> Runner:
    """A runner with the device's peaks."""
    from jetfire.bench.promotion import PromotionRunner
    from jetfire.measure import peaks
    from jetfire.measure.runner import Runner

    made = PromotionRunner if options.schedules else Runner
    return made(device, peaks.cached(device, remeasure), options, note)


@dataclass
class Output:
    """What takes a run's rows to the terminal, a file and a plot, also when it is cut short.

    Attributes:
        record: the device, as `device_record` has it.
        existing, kind: as `existing_rows` and `file_format` say.
        again: the command line that measures the same.
        load: what watches the device, since before anything was measured on it.
    """

    asked: BenchOptions
    record: dict[str, Any]
    existing: Results | None
    kind: str | None
    again: str
    load: Load
    rows: list[Row] = field(default_factory=list)

    def collect(
        self,
        work: Sequence[T],
        measure: Callable[[T], Sequence[Row]],
        label: Callable[[T], object] = str,
        count: Callable[[T, Sequence[Row]], Sequence[Row]] | None = None,
    ) -> None:
        """Measure one thing after another; show and save the rows, and say what is doubtful.

        Args:
            count: makes of one thing's rows those with counters.

        Raises:
            JetfireError: with the exit code of what went wrong.
        """
        from jetfire.bench.progress import watch

        self._check_device(self.existing)
        saved = time.monotonic()
        interrupted = False
        try:
            for item in watch(work, label):
                self.rows += (rows := measure(item))
                if count is not None and rows:
                    self.rows[-len(rows) :] = count(item, rows)
                if time.monotonic() - saved > SAVE_S:
                    self._save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if self.rows:
                with ExitStack() as stack:  # each, the last one first, though another fails
                    for step in (self._doubt, self._draw, self._print, self._save):
                        stack.callback(step)
        self._finish(interrupted)

    def _check_device(self, there: Results | None) -> None:
        """Refuse to add rows to those of another device."""
        name = self.record["name"]
        if there is not None and (before := there.device.get("name")) != name:
            what = f"it was measured on {before}, this is {name}"
            raise UsageError(f"--append -o {self.asked.output}: {what}")

    def _save(self) -> None:
        """Write the rows; where they are added to a file, to what it has by now."""
        file = self.asked.output
        if file is None or self.kind is None:
            return
        with ExitStack() as stack:
            there = self.existing
            if self.asked.append:  # as another bench may do meanwhile
                stack.enter_context(locked(file.with_name(f".{file.name}.lock"), wait=True))
                with suppress(Unreadable):  # broken meanwhile: what it had is written again
                    there = existing_rows(self.asked)
                self._check_device(there)
            results = Results(self.record, list(there.rows) if there else [])
            results.merge(self.rows)
            write(file, render(results, self.kind))

    def _print(self) -> None:
        results = Results(self.record, list(self.rows))
        terminal.result(results.as_dict(), lambda: self._show(results))

    def _show(self, results: Results) -> None:
        from jetfire.report import counters, show

        form = self.asked.format or "table"
        if self.kind is None and form != "table":
            print(render(results, form), end="")
            return
        console = terminal.console(width=160)
        for part in show.by_op(self.rows):
            console.print(show.heading(device_title(self.record), part), soft_wrap=True)
            console.print(show.table(part))
            for split in show.splits(part):
                console.print(split.rich())
            for counted in counters.tables(part):
                folded = (len(counted.head) - 1,)
                console.print(counted.rich(folded=folded, spare=counters.SPARE))
            for line in counters.sentences(part):
                console.print(line, soft_wrap=True)
        for line in show.footnotes(self.rows):
            console.print(line)
        console.print(self.again, soft_wrap=True, style="dim")

    def _draw(self) -> None:
        if self.asked.plot is not None:
            from jetfire.report.plot import plot

            with writing(self.asked.plot):
                plot(self.rows, self.record, self.asked.plot)

    def _doubt(self) -> None:
        from jetfire.measure.load import doubts

        if text := doubts(self.rows, self.load.text(), self.record.get("peaks") or {}):
            note(text)

    def _finish(self, interrupted: bool) -> None:
        from jetfire.report.text import plural

        rows, wrong = self.rows, [row for row in self.rows if row.ok is False]
        if interrupted:
            raise Interrupted(f"interrupted after {plural(len(rows), 'row')}, shown and saved")
        if not any(row.role == "kernel" for row in rows):
            raise UsageError(
                "nothing was measured: every problem was left out, for the reasons above"
            )
        if wrong:
            are = "is" if len(wrong) == 1 else "are"
            what = f"{len(wrong)} of {plural(len(rows), 'row')} {are} wrong"
            raise WrongResultError(f"{what}: {wrong[0].error}")


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
    units = {
        "copy_gbps": "copy {} GB/s",
        "int8_tops": "INT8 {} TOPS",
        "bf16_tflops": "BF16 {} TFLOP/s",
    }
    measured = [form.format(f"{peaks[n]:.0f}") for n, form in units.items() if n in peaks]
    return f"{device.get('name')} · measured peaks: {', '.join(measured)}"


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
    pairs += [("--load", str(file)) for file in loaded.files()]
    pairs += [("--kernel", name) for name in asked.kernels]
    pairs += [("--config", text) for text in asked.config]
    pairs += [("--peer", name) for name in asked.peers]
    pairs += [("--data", asked.data if asked.data != "normal" else None)]
    pairs += [("--device", asked.device if asked.device != "auto" else None)]
    pairs += [("--seed", str(asked.seed))]
    pairs += [("--rounds", str(asked.rounds) if asked.rounds else None)]
    pairs += [("--profile", asked.profile)]
    words += [word for pair in pairs if pair[1] for word in (pair[0], str(pair[1]))]
    return shlex.join(words)


def catalogue() -> dict[str, Any]:
    """Every op with its kernels, modes and fields, then workloads, peers and data, by name."""
    from jetfire.measure.data import DISTRIBUTIONS

    ops = {}
    for name in registry.names():
        op, shown = registry.get(name), []
        for one in dataclasses.fields(op.Problem):
            default = str(one.default)
            default = default.lower() if isinstance(one.default, bool | None) else default
            missing = one.default is dataclasses.MISSING
            shown.append(one.name if missing else f"{one.name}={default}")
        ops[name] = {
            "summary": op.summary,
            "kernels": list(registry.kernel_names(name)),
            "modes": list(op.modes),
            "fields": shown,
        }
    models = {
        name: f"width {model.width}, hidden {model.hidden}, {model.tokens} tokens"
        for name, model in workloads.MODELS.items()
    }
    layers = {
        name: "m n k " + ", ".join(f"{x.tokens} {x.hidden} {x.width}" for x in found)
        for name, found in workloads.LAYERS.items()
    }
    sizes = {
        name: f"sizes {', '.join(map(str, found))}"
        for name, found in (("square", workloads.SQUARES), ("ragged", workloads.RAGGED))
    }
    return {
        "ops": ops,
        "workloads": {**models, **layers, **sizes},
        "peers": dict(peer_ops.NAMES),
        "data": list(DISTRIBUTIONS),
    }


def listing() -> str:
    """The catalogue as text, for `jetfire list`."""
    found, lines = catalogue(), ["ops"]
    width = max(map(len, found["ops"]))
    for name, op in found["ops"].items():
        lines.append(f"  {name:<{width}} {op['summary']}")
        lines.append(f"  {'':<{width}} kernels: {', '.join(op['kernels']) or 'none'}")
        lines.append(
            f"  {'':<{width}} modes: {', '.join(op['modes'])}; fields: {' '.join(op['fields'])}"
        )
    lines.append("workloads")
    lines += [f"  {name:<12} {text}" for name, text in found["workloads"].items()]
    lines.append("peers")
    lines += [f"  {name:<20} {what}" for name, what in found["peers"].items()]
    lines.append(f"data\n  {', '.join(found['data'])}")
    return "\n".join(lines)
