"""`jetfire bench`: from the command line's options to tables, files and an exit code."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.bench.judgement import expect_right
from jetfire.bench.progress import watch
from jetfire.core import loaded, profiles, terminal
from jetfire.core.device import Device
from jetfire.core.errors import (
    Interrupted,
    NoDeviceError,
    UsageError,
    unknown,
)
from jetfire.core.files import Unreadable, check_output, check_writable, locked, write, writing
from jetfire.core.terminal import note
from jetfire.measure import ncu, plan
from jetfire.measure.plan import Case, Request
from jetfire.measure.results import Results, Row
from jetfire.report.output import FORMATS

if TYPE_CHECKING:
    from jetfire.measure.runner import Options

    Work = tuple[Case, Options]

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

    def __post_init__(self) -> None:
        """Refuse options of which one is wrong on any machine, or two contradict each other.

        Raises:
            UsageError: it says which; or JETFIRE_PROFILES is no folder.
            NoDeviceError: there is no such profiler here.
        """
        if self.format is not None and self.format not in FORMATS:
            raise unknown(f"--format {self.format}", self.format, FORMATS)
        if self.rounds is not None and self.rounds < 1:
            raise UsageError(f"--rounds {self.rounds}: expected at least 1")
        if self.append and self.output is None:
            raise UsageError("--append: expected -o FILE.json to add to")
        if self.output is not None and self.file_format not in FORMATS[1:]:
            raise UsageError(
                f"-o {self.output}: expected a file named .json, .csv or .md, or --format"
            )
        if self.append and self.file_format != "json":
            raise UsageError(f"--append -o {self.output}: only a JSON file can be added to")
        if self.suite in ("training", "export") and (self.profile or self.profile_run):
            raise UsageError(f"--suite {self.suite}: it is not profiled: leave out --profile")
        if self.profile_run:
            given = {
                "--profile": self.profile,
                "-o": self.output,
                "--plot": self.plot,
                "--rounds": self.rounds,
                "--suite": self.suite,
            }
            for name, value in given.items():
                if value is not None:
                    raise UsageError(f"--profile-run: nothing is timed: leave out {name}")
        if self.suite is not None:
            from jetfire.bench import suite

            suite.check(self)
        check_output("--plot", self.plot, *PLOTS)
        if self.output is not None:
            check_writable(self.output)
        profiles.check_folder()
        if self.profile is not None:
            ncu.check(self.device)

    @property
    def file_format(self) -> str | None:
        """Return what `-o` holds: `--format`, else what the file's suffix says."""
        if self.output is None:
            return None
        return self.format if self.format in FORMATS[1:] else self.output.suffix.lstrip(".")


def bench(asked: BenchOptions) -> None:
    """Check and time what was asked for, show it, save it.

    Raises:
        JetfireError: with the exit code of what went wrong; results so far are shown and saved.
    """
    existing = existing_rows(asked)
    request = None
    # Before torch is loaded: all names but a config's fields.
    if asked.suite is None:
        request = plan.parse(
            ops=asked.ops,
            m=asked.m,
            n=asked.n,
            k=asked.k,
            workload=asked.workload,
            block=asked.block,
            mode=asked.mode,
            settings=asked.settings,
            kernels=asked.kernels,
            peers=asked.peers,
            config=asked.config,
        )
    device = Device.parse(asked.device)
    from jetfire.bench import profiling
    from jetfire.measure import runner

    request = request and request.on(device)
    work = _work(asked, request, device)
    runner.check_rows(work, len(existing.rows) if existing else 0)
    runner.check_config(work, device)
    if asked.suite == "promotion" or (request is not None and not asked.dry_run):
        runner.check_device(work, device)
    elif device.kind == "cpu" and not asked.dry_run:
        raise NoDeviceError(f"--suite {asked.suite}: its sizes are for a GPU; name an op instead")
    if asked.dry_run:
        _dry_run(work, device)
        return
    if asked.profile_run:
        profiling.run_once(work, device)
        return
    profiler = None if asked.profile is None else ncu.Ncu.begun(device)
    output = Output(asked, device, existing, command_again(asked, request, work[0][0]))
    _measure(work, output, profiler)


def _work(asked: BenchOptions, request: Request | None, device: Device) -> list[Work]:
    """Return the problems of a request, or of a suite, each with the options to measure it with."""
    from jetfire.bench import suite
    from jetfire.measure.runner import Options

    on_gpu = device.kind == "cuda"
    options = Options(
        kernels=asked.kernels or None,
        peers=request.peers if request else None,
        config=request.config if request else {},
        data=asked.data,
        seed=asked.seed,
        rounds=asked.rounds or (20 if on_gpu else 7),
        budget_s=30.0 if on_gpu else 10.0,
        debug=asked.debug,
    )
    if request is None:
        return suite.cases(str(asked.suite), options)
    return [(case, options) for case in plan.cases(request, note)]


def _measure(work: Sequence[Work], output: Output, profiler: ncu.Ncu | None) -> None:
    """Measure one problem after another; show and save the rows."""
    from jetfire.bench.promotion import PromotionRunner
    from jetfire.measure.runner import Runner

    first = work[0][1]
    kind = PromotionRunner if first.schedules else Runner
    runner = kind(output.device, output.peaks, first, note, output.load.monitor)
    with output.kept():
        for case, options in watch(work, lambda item: item[0]):
            rows = runner.measure(case, options)
            output.add(rows)
            if profiler is not None:
                output.add(profiler.rows(rows, case, options.seed, options.data, note))


def existing_rows(asked: BenchOptions) -> Results | None:
    """Return what `--append` adds to."""
    if asked.append and asked.output is not None and asked.output.exists():
        return Results.load(asked.output)
    return None


def _dry_run(work: Sequence[Work], device: Device) -> None:
    """Show what would be measured, a line per kernel and problem, or why it is left out."""
    from jetfire.measure import runner
    from jetfire.report.text import fields_text, plural

    lines = [f"{device.label}: {plural(len(work), 'problem')}"]
    for case, options in work:
        choices = runner.choices(case, device, options)
        if lack := runner.memory_lack(case, device):
            lines.append(f"{case}: left out: {lack}")
            continue
        gib = runner.memory_needed(case, device) / 2**30
        sets = runner.sets_of(case, device)
        needs = f"{plural(sets, 'set')} of inputs, {gib:.2f} GiB"
        lines.append(f"{case}: {needs}, {plural(options.rounds, 'sample')} per row")
        for choice in choices:
            if choice.reason is None:
                config = fields_text(choice.config.as_dict())
                text = f"  {choice.label} ({choice.profile or 'given'}) {config}".rstrip()
            else:
                text = f"  {choice.label} left out: {choice.reason}"
            lines.append(text)
    terminal.planned(lines)


class Output:
    """What takes a run's rows to the terminal, a file and a plot, also when it is cut short.

    Attributes:
        peaks: the device's.
        record: the device, as `provenance.device_record` has it.
    """

    def __init__(
        self,
        asked: BenchOptions,
        device: Device,
        existing: Results | None,
        again: str,
        peaks: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to watch the device, and measure its peaks where they are not known.

        Args:
            existing: as `existing_rows` returns it.
            again: the command line that measures the same.

        Raises:
            UsageError: the rows that there are were measured on another device.
        """
        from jetfire.measure.load import Load
        from jetfire.measure.peaks import cached
        from jetfire.measure.provenance import device_record
        from jetfire.report.text import NO_GPU

        self.asked, self.device, self.existing, self.again = asked, device, existing, again
        self._check_device(existing)
        if device.kind == "cpu":
            note(f"no GPU in use ({device.name}): {NO_GPU}")
        self.load = Load(device)
        if device.kind == "cuda" and self.load.monitor is None:
            note("NVML cannot be reached: clock, power and throttling are left out")
        self.peaks = peaks or cached(self.load, asked.remeasure_peaks)
        self.record = device_record(device, self.load.driver, self.peaks)
        self._by_key: dict[str, Row] = {}
        self._saved = time.monotonic()

    @property
    def rows(self) -> list[Row]:
        return list(self._by_key.values())

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, of which each replaces its like, and save them where it is time to."""
        self._by_key.update((row.key(), row) for row in rows)
        if time.monotonic() - self._saved > SAVE_S:
            self._save()
            self._saved = time.monotonic()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Show and save what is added meanwhile, and say what is doubtful.

        Raises:
            JetfireError: with the exit code of what went wrong.
        """
        interrupted = False
        try:
            yield
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
        name = self.device.name
        if there is not None and (before := there.device.get("name")) != name:
            what = f"it was measured on {before}, this is {name}"
            raise UsageError(f"--append -o {self.asked.output}: {what}")

    def _save(self) -> None:
        """Write the rows; where they are added to a file, to what it has by now."""
        file = self.asked.output
        if file is None or self.asked.file_format is None:
            return
        with ExitStack() as stack:
            there = self.existing
            if self.asked.append:  # as another bench may do meanwhile
                stack.enter_context(locked(file.with_name(f".{file.name}.lock"), wait=True))
                with suppress(Unreadable):  # broken meanwhile: what it had is written again
                    there = existing_rows(self.asked)
                self._check_device(there)
            results = Results(self.record)
            if there is not None:
                results.merge(there)
            results.merge(Results(self.record, self.rows))
            write(file, render(results, self.asked.file_format))

    def _print(self) -> None:
        results = Results(self.record, self.rows)
        terminal.result(results.as_dict(), lambda: self._show(results))

    def _show(self, results: Results) -> None:
        from jetfire.report import counters, show

        form = self.asked.format or "table"
        if self.asked.file_format is None and form != "table":
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

        rows = self.rows
        if interrupted:
            how = "shown" if self.asked.output is None else "shown and saved"
            kept = f", {how}" if rows else ""
            raise Interrupted(f"interrupted after {plural(len(rows), 'row')}{kept}")
        if not any(row.role == "kernel" for row in rows):
            raise UsageError(
                "nothing was measured: every problem was left out, for the reasons above"
            )
        expect_right(rows)


def render(results: Results, kind: str) -> str:
    """Return results as json, csv or md."""
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


def command_again(asked: BenchOptions, request: Request | None, first: Case) -> str:
    """Return one command line that measures the same again."""
    words = ["jetfire", "bench", *plan.parse_list(asked.ops)]
    if request is None:
        words += ["--suite", str(asked.suite)]
    elif request.workload is not None:
        words += ["--workload", request.workload]
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
