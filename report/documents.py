"""Tables and plots of a committed results file: `jetfire report`.

Writes FILE.md and the FILE-*.svg beside it, and the README's tables between its two markers, with
what the profiles shipped for that device and FILE-lookups.json say, and what the caller adds. The
same rows give the same bytes, and nothing is written where what stands there is not stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jetfire.core import files, registry, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable, write
from jetfire.measure.results import Results, Row
from jetfire.report import counters, exports, int4, int8, training, tuned
from jetfire.report.chart import Chart
from jetfire.report.plot import plot
from jetfire.report.table import Section, Table, filled
from jetfire.report.text import NOTHING, plural, significant

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
# The first may name the file that the tables are made of: `results:begin h200.json`.
MARKED = re.compile(
    BEGIN.replace(" -->", r"(?: (?P<file>[^\s>]+))? -->\n(?P<text>.*?)") + END, re.DOTALL
)
MOST_TEXT = 64 * files.MIB


@dataclass(frozen=True)
class Addition:
    """What a caller adds: sections of the page after those on training, README tables, plots."""

    sections: Sequence[Section] = ()
    readme: Sequence[Table] = ()
    charts: Sequence[Chart] = ()


Adds = Callable[[Results, Path], Addition]


def device_text(results: Results) -> str:
    """Return what it was measured on, and the ceilings."""
    device = results.device
    peaks = device.get("peaks") or {}
    how = peaks.get("how") or {}
    units = {"copy_gbps": "GB/s", "int8_tops": "TOPS", "bf16_tflops": "TFLOP/s"}
    lines = [
        f"{device.get('name')}, driver {device.get('driver')}, CUDA {device.get('cuda')}, "
        f"torch {device.get('torch')}, Triton {device.get('triton')}; {_when(results)}.",
        "",
        "Every kernel was checked against its reference in the process that timed it. Times are "
        "medians of CUDA-graph replays over rotating input sets (cold L2), kernels and peers "
        "interleaved. Ceilings, measured on this device:",
        "",
    ]
    lines += [
        f"- {significant(peaks[n], 4)} {u}: {how.get(n, n)}" for n, u in units.items() if n in peaks
    ]
    wrong = [row for row in results.rows if row.ok is False]
    throttled = [row for row in results.rows if row.throttled]
    if throttled:
        share = len(throttled) / max(1, sum(row.ms is not None for row in results.rows))
        reasons = ", ".join(sorted({reason for row in throttled for reason in row.throttled or ()}))
        lines += ["", f"The clock was held down in {share:.0%} of the rows ({reasons})."]
    if wrong:
        lines += ["", f"**{plural(len(wrong), 'row is', 'rows are')} wrong, without a time.**"]
    return "\n".join(lines) + "\n"


def _when(results: Results) -> str:
    """Return the day of the measurements, or the first and the last with the timers' versions."""
    runs = [results.measured(row) for row in results.rows] or [results.device]
    days = sorted({str(run["date"]) for run in runs if "date" in run})
    timers = sorted({run["timer"] for run in runs if "timer" in run})
    if len(days) < 2:
        return days[0] if days else NOTHING
    return f"{days[0]} to {days[-1]}, timer {', '.join(map(str, timers))}"


def page(
    results: Results,
    name: str,
    plots: Sequence[tuple[str, str]],
    profiles: Sequence[Section] = (),
    added: Sequence[Section] = (),
) -> str:
    """Return the whole Markdown page.

    Args:
        plots: files that stand at its top, and what each shows, in words.
        profiles: the sections on those.
        added: the caller's sections.
    """
    results, exported = exports.split(results)
    sections = filled(
        [
            *training.sections(results),
            *added,
            *int8.sections(results),
            *int4.sections(results),
            exports.section(exported),
            *profiles,
        ]
    )
    parts = [
        f"# Results: {results.device.get('name')}\n",
        f"<!-- Generated from {name} by `make report`; do not edit. -->\n",
        device_text(results),
        *(f"- {section.link}" for section in sections),
        *([""] if sections else []),
        *(f"![{alt}]({file})\n" for file, alt in plots),
        *(section.markdown() for section in sections),
    ]
    return "\n".join(parts)


def _readme(readme: Path, text: str, file: str) -> str:
    """Return the README with another text between its markers, unless they name another file."""
    old = _text(readme)
    found = MARKED.search(old)
    if found is None:
        raise UsageError(f"{readme}: expected the markers {BEGIN} and {END}")
    if found["file"] not in (None, file):
        return old
    return f"{old[: found.start('text')]}{text}{old[found.end('text') :]}"


def report(
    file: Path, readme: Path | None, check: bool, add: Adds = lambda results, file: Addition()
) -> list[Path]:
    """Write (or with `check` only compare) everything made from a results file.

    Args:
        add: what the caller adds, of the results and their file.

    Returns:
        The files that were not as they should be.
    """
    loaded, rows = Results.load(file), []
    for number, row in enumerate(loaded.rows):
        try:
            rows.append(replace(row, problem=_problem(row, file)))
        except UsageError as error:
            raise Unreadable(file, f"rows.{number}: {getattr(error, 'reason', error)}") from None
    everything = Results(loaded.device, rows, loaded.runs)
    results, _ = exports.split(everything)
    added = add(results, file)
    charts = {
        name: Chart(
            file.with_name(f"{file.stem}-{name}.svg"),
            [results.device, *(row.as_dict() for row in rows)],
            partial(plot, rows, results.device),
        )
        for name, rows in int8.plots(results).items()
    }
    shipped = tuned.shipped(results.device)
    found = tuned.lookups(file.with_name(f"{file.stem}-lookups.json"), results.device)
    gains = Chart(
        file.with_name(f"{file.stem}-tuned.svg"),
        tuned.records(shipped, found),
        partial(tuned.plot, shipped, found, results.device),
    )
    waits = Chart(
        file.with_name(f"{file.stem}-counters.svg"),
        [results.device, *(row.as_dict() for row in counters.profiled(results.rows))],
        partial(counters.plot, results.rows),
    )
    counted = counters.section(results.rows, waits.path.name)
    sections = [counted, *tuned.sections(shipped, found, gains.path.name)]
    plots = [(chart.path.name, int8.ALTS[name]) for name, chart in charts.items()]
    texts = {file.with_suffix(".md"): page(everything, file.name, plots, sections, added.sections)}
    if readme is not None:
        tables = [module.readme(results) for module in (training, int8, int4)]
        shown = [table.markdown() for table in (*tables, *added.readme) if table.rows]
        lines = [f"{line}\n" for line in tuned.readme(shipped, found)]
        texts[readme] = _readme(readme, "\n".join([*shown, *lines]), file.name)
    stale = [path for path, text in texts.items() if _read(path) != text]
    # Two versions of matplotlib draw different bytes: a plot is stale when its rows are others.
    every = [*charts.values(), *added.charts, *([gains] if shipped else [])]
    every += [waits] if counters.profiled(results.rows) else []
    undrawn = [chart for chart in every if chart.digest not in _read(chart.path)]
    if not check:
        for path in stale:
            write(path, texts[path])
        for chart in undrawn:
            chart.draw(chart.path, chart.digest)
    return stale + [chart.path for chart in undrawn]


def _problem(row: Row, file: Path) -> dict[str, Any]:
    """Return a row's problem with every field of its op, that of an older version too."""
    if row.op in training.OPS:
        kind = training.ModelStepProblem if row.op == training.MODEL else training.TrainingProblem
        schema.convert(row.problem, kind, file)
        return row.problem
    if row.op not in registry.names():
        raise UsageError(f"no op {row.op!r}")
    op = registry.get(row.op)
    parsed = op.Problem.parse(row.problem)
    problem: dict[str, Any] = parsed.as_dict()
    for name, value in row.problem.items():
        if value != (meant := getattr(parsed, name)):
            raise UsageError(f"problem.{name}={value!r}: expected {meant!r}")
    for name in op.dims:
        if problem[name] > schema.LARGEST:
            raise UsageError(f"problem.{name}={problem[name]}: expected at most {schema.LARGEST}")
    return problem


def _read(path: Path) -> str:
    """Return a file's text; nothing where there is none."""
    try:
        return _text(path)
    except Missing:
        return ""


def _text(path: Path) -> str:
    try:
        return files.read(path, MOST_TEXT).decode()
    except UnicodeDecodeError:
        raise Unreadable(path, "expected UTF-8") from None


def readme_of(file: Path) -> Path | None:
    """Return the README above docs/results/; None for a file elsewhere."""
    folder = file.absolute().parent
    return folder.parents[1] / "README.md" if folder.parts[-2:] == ("docs", "results") else None
