"""Tables and plots of a committed results file: `jetfire report`.

Writes FILE.md and the FILE-*.svg beside it, and the README's table between its two markers, with
what the profiles shipped for that device and FILE-lookups.json say, and what the caller adds. The
same rows give the same bytes; `--check` writes nothing and fails if what stands there is stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetfire.core import files, registry, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable, write
from jetfire.core.workloads import MODELS
from jetfire.measure.results import Results, Row, blocks_text, problem_text, shape_text
from jetfire.ops.gemm import PROMOTION_DATA
from jetfire.report import exports, int4, show, training, tuned
from jetfire.report.table import MarkdownTable

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
BLOCKS = (32, 64, 128)
MOST_TEXT = 64 * files.MIB
LARGE = ((8192, 4096), (8192, 16384))
STATISTICS = ", statistics given (the peer computes them)"


@dataclass(frozen=True)
class Chart:
    """A plot's file, what it shows as JSON has it, and how it is drawn with a description."""

    path: Path
    content: Sequence[Any]
    draw: Callable[[Path, str], None]

    @property
    def digest(self) -> str:
        text = json.dumps(self.content, sort_keys=True)
        return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True)
class Addition:
    """What a caller adds: sections of the page after those on training, README lines, plots."""

    sections: Sequence[str] = ()
    readme: str = ""
    charts: Sequence[Chart] = ()


Adds = Callable[[Results, Path], Addition]


def _timed(results: Results, op: str | None = None) -> list[Row]:
    """Every timed row of an op that is no curve's: those, training's and INT4's have their own
    tables."""
    own = (*training.OPS, *int4.ops())
    return [
        row for row in results.rows
        if row.ms is not None and row.curve is None and row.op not in own
        and (op is None or row.op == op)
    ]  # fmt: skip


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row.ms or 0.0, default=None)


def _plain_gemm(row: Row) -> bool:
    p = row.problem
    return p["out"] == "bf16" and not p["bias"] and not p["accumulate"]


def _kernel_names(rows: Iterable[Row], role: str) -> list[str]:
    return list(dict.fromkeys(row.kernel for row in rows if row.role == role))


def _cell(rows: Sequence[Row], value: Callable[[Row], float | None], digits: int = 0) -> str:
    """The fastest row's value, or a dash where there is no row."""
    row = _fastest(rows)
    return "–" if row is None else show.number(value(row), digits)


def gemm_squares(results: Results) -> MarkdownTable | None:
    """TFLOP/s of each kernel and block, and of each peer, by size."""
    rows = [
        row for row in _timed(results, "gemm")
        if _plain_gemm(row) and row.problem["m"] == row.problem["n"] == row.problem["k"]
    ]  # fmt: skip
    sizes = sorted({row.problem["m"] for row in rows})
    if not sizes:
        return None

    def at(size: int, name: str, block: int | None) -> list[Row]:
        return [r for r in rows if r.problem["m"] == size and r.kernel == name
                and block in (None, r.problem["block"])]  # fmt: skip

    lines = [
        [f"{name}, block {block}", *(_cell(at(s, name, block), lambda r: r.tflops) for s in sizes)]
        for block in BLOCKS
        for name in _kernel_names(rows, "kernel")
        if any(at(size, name, block) for size in sizes)
    ]
    lines += [
        [name, *(_cell(at(size, name, None), lambda r: r.tflops) for size in sizes)]
        for name in _kernel_names(rows, "peer")
    ]
    text = "TFLOP/s, BF16 out, m = n = k. Peers: the fastest of their samples beside each block."
    return MarkdownTable("GEMM, squares", text, ["", *map(str, sizes)], lines)


def gemm_outputs(results: Results) -> MarkdownTable | None:
    """What each output costs at 8192³."""
    rows = [
        row for row in _timed(results, "gemm")
        if row.role == "kernel" and {row.problem[d] for d in "mnk"} == {8192}
    ]  # fmt: skip
    _, differing = show.varying(rows) if rows else ({}, [])
    named = [name for name in differing if name != "block"]
    kinds = list(dict.fromkeys(_fields(row, named) for row in rows))
    if len(kinds) < 2:
        return None
    lines = []
    for kind in kinds:
        for name in _kernel_names(rows, "kernel"):
            same = [row for row in rows if row.kernel == name and _fields(row, named) == kind]
            by_block = [[r for r in same if r.problem["block"] == block] for block in BLOCKS]
            if same:
                texts = [_cell(part, lambda r: r.tflops) for part in by_block]
                lines.append([f"{kind}, {name}", *texts])
    head = ["", *(f"block {block}" for block in BLOCKS)]
    return MarkdownTable("GEMM 8192³, each output", "TFLOP/s.", head, lines)


def _fields(row: Row, names: Sequence[str]) -> str:
    return problem_text({name: row.problem[name] for name in names if name in row.problem})


def _share(row: Row) -> str:
    return "–" if row.roofline is None else f"{row.roofline:.0%}"


def large(results: Results) -> MarkdownTable | None:
    """Every memory-bound op at the two large shapes: bandwidth, and against torch.compile."""
    rows = [row for row in _timed(results) if row.op != "gemm" and _shape(row) in LARGE]
    compiled = {
        (row.op, row.problem.get("mode"), row.problem.get("stats"), _shape(row)): row.ms
        for row in rows
        if row.kernel == "compile"
    }
    lines = []
    for row in rows:
        if row.role != "kernel":
            continue
        key = (row.op, row.problem.get("mode"), row.problem.get("stats"), _shape(row))
        other = compiled.get(key)
        named = ("block", "out_block", "mode", "stats", "rounding", "layout")
        settings = {name: v for name, v in row.problem.items() if name in named}
        lines.append([
            f"{row.op} {problem_text(settings)}", row.kernel,
            f"{row.problem['m']}×{row.problem['n']}", show.number((row.ms or 0) * 1e3, 1),
            show.number(row.gbps), _share(row),
            "–" if other is None or row.ms is None else f"{other / row.ms:.2f}×",
        ])  # fmt: skip
    if not lines:
        return None
    text = (
        "Bytes counted: inputs once and outputs once. The share is of the copy bandwidth measured "
        "in the same run; `compile` is the op in BF16 under torch.compile, at the same shape."
    )
    head = ["", "kernel", "shape", "µs", "GB/s", "of copy", "faster than compile"]
    return MarkdownTable("Memory-bound ops, large shapes", text, head, lines)


def _shape(row: Row) -> tuple[int, int]:
    return row.problem["m"], row.problem["n"]


def gemm_models(results: Results) -> MarkdownTable | None:
    """The GEMMs of one transformer block of each model, against cuBLAS BF16."""
    rows = [row for row in _timed(results, "gemm") if not row.problem["bias"]]
    lines = []
    for name, model in MODELS.items():
        passes: list[tuple[str, list[dict[str, Any]]]] = [("fwd", []), ("dgrad", []), ("wgrad", [])]
        for out, inp in model.linears():
            m = model.tokens
            passes[0][1].append({"m": m, "n": out, "k": inp, "out": "bf16"})
            passes[1][1].append({"m": m, "n": inp, "k": out, "out": "bf16"})
            passes[2][1].append({"m": out, "n": inp, "k": m, "out": "fp32"})
        for label, problems in passes:
            texts = [_ratio(rows, problems, block) for block in BLOCKS]
            if any(text != "–" for text in texts):
                lines.append([f"{name} {label}", *texts])
    if not lines:
        return None
    head = ["", *(f"block {block}: ms, × cuBLAS BF16" for block in BLOCKS)]
    text = (
        "The four linear layers of one block, 8192 tokens: milliseconds together with the fastest "
        "kernel for each, and cuBLAS BF16's time over that (its own output is BF16 for wgrad too)."
    )
    return MarkdownTable("GEMM, GPT-2's layers", text, head, lines)


def _ratio(rows: Sequence[Row], problems: Sequence[dict[str, Any]], block: int) -> str:
    ours = theirs = 0.0
    for problem in problems:
        wanted = {**problem, "block": block}
        same = [r for r in rows if wanted.items() <= r.problem.items()]
        kernel = _fastest(row for row in same if row.role == "kernel")
        peer = _fastest(row for row in same if row.kernel == "cublas_bf16")
        if kernel is None or peer is None:
            return "–"
        ours += kernel.ms or 0.0
        theirs += peer.ms or 0.0
    return f"{ours:.3f}, {theirs / ours:.2f}×"


def small_models(results: Results) -> MarkdownTable | None:
    """Memory-bound ops at the models' shapes: share of the copy bandwidth."""
    rows = [row for row in _timed(results) if row.op != "gemm" and row.role == "kernel"]
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        for mode in ("fwd", "bwd"):
            same = [r for r in rows if r.op == op and r.problem.get("mode", "fwd") == mode
                    and r.problem.get("layout", "q") == "q"
                    and r.problem.get("stats", "row") == "row" and "out_block" not in r.problem
                    and r.problem.get("rounding", "") in ("", _usual(mode))]  # fmt: skip
            for width in sorted({r.problem["n"] for r in same if r.problem["m"] == 8192}):
                here = [r for r in same if _shape(r) == (8192, width)]
                texts = [_cell([r for r in here if r.problem.get("block", block) == block],
                               lambda r: r.roofline and 100 * r.roofline)
                         for block in BLOCKS]  # fmt: skip
                lines.append([f"{op} {mode} 8192×{width}", *texts])
    if not lines:
        return None
    head = ["", *(f"block {block}, %" for block in BLOCKS)]
    text = (
        "Percent of the measured copy bandwidth, fastest kernel; layout q; bwd stochastic; "
        "LayerNorm computes its own statistics."
    )
    if any("block" not in row.problem for row in rows):
        text += " An op that knows no blocks has the same figure for each."
    return MarkdownTable("Memory-bound ops by width", text, head, lines)


def _curve(results: Results) -> list[Row]:
    return [
        row for row in results.rows
        if row.op == "gemm" and row.curve == "promotion" and row.tflops is not None
        and row.ms is not None and row.sqnr_db is not None
    ]  # fmt: skip


def promotion(results: Results) -> MarkdownTable | None:
    """Each schedule at each K per promotion: its speed, what its output is worth, its own error."""
    rows = _curve(results)
    if not rows:
        return None
    points: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        block = row.problem["block"] if row.role == "kernel" else 0
        points.setdefault((row.role, block, row.label), []).append(row)
    lines = []
    for (_, block, label), same in sorted(points.items(), key=lambda item: item[0][:2]):
        of = {kind: [row for row in same if row.data == kind] for kind in PROMOTION_DATA}
        usual = _fastest(of["normal"])
        ratio = None if usual is None else (usual.vs_peer or {}).get("cublas_bf16")
        errors = [row.schedule_err for row in same if row.schedule_err is not None]
        lines.append([
            str(block or "–"), label, _cell(of["normal"], lambda r: r.tflops),
            "–" if ratio is None else f"{ratio:.2f}×",
            *(_cell(of[kind], lambda r: r.sqnr_db, 1) for kind in PROMOTION_DATA),
            _cell(of[PROMOTION_DATA[-1]], lambda r: r.row_sqnr_db, 1),
            f"{max(errors):.1e}" if errors else "–",
        ])  # fmt: skip
    shape = shape_text(rows[0].problem, ())
    names = [show.data_text(kind) for kind in PROMOTION_DATA]
    text = (
        f"GEMM {shape}, BF16 out. With a scale for each block of K, the tensor cores' int32 sums "
        "are promoted to fp32 once a block. TOPS and × cuBLAS BF16 are of normal data. SQNR is "
        "10·log10(‖C‖²/‖out − C‖²) over the whole output, C in float64 from the operands before "
        "they were quantised, so that it holds their rounding, the schedule's and BF16's; the data "
        "are A's × B's, and peers' operands are cast from the same values. A few large rows decide "
        "it where A is gradients: beside it the median over the rows of C. The schedule's own "
        "error is ‖out − C‖/‖C‖ in fp32, C in float64 from the same codes, the largest of the "
        "three kinds of data."
    )
    head = ["K per promotion", "", "TOPS", "× cuBLAS", *(f"{name}, dB" for name in names),
            f"{names[-1]}, median row, dB", "own error"]  # fmt: skip
    return MarkdownTable("What a promotion costs", text, head, lines)


def _usual(mode: str) -> str:
    return "stochastic" if mode == "bwd" else "nearest"


def device_text(results: Results) -> str:
    """What it was measured on, and the ceilings."""
    device = results.device
    peaks = device.get("peaks") or {}
    how = peaks.get("how") or {}
    units = {"copy_gbps": "GB/s", "int8_tops": "TOPS", "bf16_tflops": "TFLOP/s"}
    lines = [
        f"{device.get('name')}, driver {device.get('driver')}, CUDA {device.get('cuda')}, "
        f"torch {device.get('torch')}, Triton {device.get('triton')}; {device.get('date')}.",
        "",
        "Every kernel was checked against its reference in the process that timed it. Times are "
        "medians of CUDA-graph replays over rotating input sets (cold L2), kernels and peers "
        "interleaved. Ceilings, measured on this device:",
        "",
    ]
    lines += [f"- {peaks[n]:.4g} {u}: {how.get(n, n)}" for n, u in units.items() if n in peaks]
    wrong = [row for row in results.rows if row.ok is False]
    throttled = [row for row in results.rows if row.throttled]
    if throttled:
        share = len(throttled) / max(1, sum(row.ms is not None for row in results.rows))
        reasons = ", ".join(sorted({reason for row in throttled for reason in row.throttled or ()}))
        lines += ["", f"The clock was held down in {share:.0%} of the rows ({reasons})."]
    if wrong:
        lines += ["", f"**{len(wrong)} rows are wrong and were not timed.**"]
    return "\n".join(lines) + "\n"


def page(
    results: Results, name: str, plots: Sequence[str], profiles: Sequence[str] = (),
    added: Sequence[str] = (),
) -> str:  # fmt: skip
    """The whole Markdown page; `profiles` are the sections on those, `added` the caller's."""
    results, exported = exports.split(results)
    kernels = (
        gemm_squares, gemm_outputs, promotion, gemm_models, large, small_models,
    )  # fmt: skip
    steps = (training.steps, training.models, training.blocks)
    parts = [
        f"# Results: {results.device.get('name')}\n",
        f"<!-- Generated from {name} by `make report`; do not edit. -->\n",
        device_text(results),
        *(f"![{plot}]({plot})\n" for plot in plots),
        *_markdown(results, steps),
        *added,
        *_markdown(results, kernels),
        *int4.sections(results),
        *exports.sections(exported),
        *profiles,
    ]
    return "\n".join(parts)


def _markdown(
    results: Results, made: Iterable[Callable[[Results], MarkdownTable | None]]
) -> list[str]:
    return [table.markdown() for make in made if (table := make(results)) is not None]


def readme_table(results: Results) -> str:
    """The README's short table: one line a claim."""
    lines: list[list[str]] = []
    for block in reversed(BLOCKS):
        rows = [
            row for row in _timed(results, "gemm")
            if _plain_gemm(row) and {row.problem[d] for d in "mnk"} == {8192}
            and row.problem["block"] == block
        ]  # fmt: skip
        best = _fastest(row for row in rows if row.role == "kernel")
        if best is not None:
            against = show.ratio_text(best)
            lines.append([f"GEMM 8192³, block {block}", show.time_text(best.ms),
                          show.rate_text(best), _share(best), against])  # fmt: skip
    compared = [
        row for row in _timed(results)
        if row.op != "gemm" and _shape(row) == LARGE[0] and "compile" in (row.vs_peer or {})
    ]  # fmt: skip
    for problem in dict.fromkeys((row.op, tuple(row.problem.items())) for row in compared):
        row = _fastest(r for r in compared if (r.op, tuple(r.problem.items())) == problem)
        if row is not None:
            mode = f" {row.problem['mode']}" if "mode" in row.problem else ""
            given = STATISTICS if row.problem.get("stats") == "given" else ""
            blocks = blocks_text(row.problem)
            block_text = f", block {blocks}" if blocks else ""
            lines.append([f"{row.op}{mode} 8192×4096{block_text}{given}",
                          show.time_text(row.ms), show.rate_text(row), _share(row),
                          show.ratio_text(row)])  # fmt: skip
    return MarkdownTable(
        "", "", ["", "time", "rate", "of roofline", "faster than"], lines
    ).markdown()


def _plots(results: Results, file: Path) -> dict[str, list[Row]]:
    """Plot file name → its rows: the GEMM's squares, its promotion, every other op in one chart."""
    square = [r for r in _timed(results) if r.problem["m"] == r.problem["n"]]
    gemm = [r for r in square if r.op == "gemm" and r.problem["k"] == r.problem["m"]]
    rest = [
        replace(
            row, op="memory-bound ops", kernel=f"{row.op} {row.problem.get('mode', '')}".strip(),
            problem={dim: row.problem[dim] for dim in ("m", "n")},
        )
        for row in square
        if row.op != "gemm" and row.role == "kernel" and row.problem.get("layout", "q") == "q"
        and row.problem.get("rounding", "") in ("", _usual(row.problem.get("mode", "fwd")))
        and row.problem.get("block", 32) == 32 and "out_block" not in row.problem
    ]  # fmt: skip
    gemm = [row for row in gemm if _plain_gemm(row)]
    found = {
        f"{file.stem}-gemm.svg": gemm, f"{file.stem}-promotion.svg": _curve(results),
        f"{file.stem}-memory-bound.svg": rest,
    }  # fmt: skip
    return {name: rows for name, rows in found.items() if rows}


def _with_table(readme: str, table: str) -> str:
    """The README with its table replaced.

    Raises:
        UsageError: it has not the two markers.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"README.md: expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def _charts(results: Results, file: Path) -> list[Chart]:
    def chart(name: str, rows: list[Row]) -> Chart:
        def draw(path: Path, description: str) -> None:
            from jetfire.report.plot import plot

            plot(rows, results.device, path, description)

        content = [results.device, *(row.as_dict() for row in rows)]
        return Chart(file.with_name(name), content, draw)

    return [chart(name, rows) for name, rows in _plots(results, file).items()]


def _tuned_chart(
    shipped: Sequence[tuned.ShippedEntry], found: Sequence[tuned.Lookup],
    results: Results, path: Path,
) -> Chart:  # fmt: skip
    def draw(path: Path, description: str) -> None:
        from jetfire.report import tuned_plot

        tuned_plot.plot(shipped, found, results.device, path, description)

    return Chart(path, tuned.records(shipped, found), draw)


def report(
    file: Path, readme: Path | None, check: bool, add: Adds = lambda results, file: Addition()
) -> list[Path]:
    """Write (or with `check` only compare) everything made from a results file.

    Args:
        add: what the caller adds, of the results and their file.

    Returns:
        The files that were not as they should be.
    """
    everything = _complete(Results.load(file), file)
    results, _ = exports.split(everything)
    added = add(results, file)
    charts = _charts(results, file)
    shipped = tuned.shipped(results.device)
    found = tuned.lookups(file.with_name(f"{file.stem}-lookups.json"), results.device)
    gains = _tuned_chart(shipped, found, results, file.with_name(f"{file.stem}-tuned.svg"))
    sections = tuned.sections(shipped, found, gains.path.name)
    names = [chart.path.name for chart in charts]
    texts = {file.with_suffix(".md"): page(everything, file.name, names, sections, added.sections)}
    if readme is not None:
        lines = "".join(f"\n{line}\n" for line in tuned.readme(shipped, found))
        table = readme_table(results) + int4.readme(results)
        table += training.readme(results) + added.readme + lines
        texts[readme] = _with_table(_read(readme), table)
    stale = [path for path, text in texts.items() if _read(path) != text]
    # Two versions of matplotlib draw different bytes: a plot is stale when its rows are others.
    charts += [*added.charts, *([gains] if shipped else [])]
    undrawn = [chart for chart in charts if chart.digest not in _read(chart.path)]
    if not check:
        for path in stale:
            write(path, texts[path])
        for chart in undrawn:
            chart.draw(chart.path, chart.digest)
    return stale + [chart.path for chart in undrawn]


def _complete(results: Results, file: Path) -> Results:
    """Return results whose problems have every field of their op, those of older versions too.

    Raises:
        Unreadable: a row's op is not known, or its problem is none of that op's.
    """
    rows = []
    for number, row in enumerate(results.rows):
        try:
            rows.append(replace(row, problem=_problem(row, file)))
        except UsageError as error:
            raise Unreadable(file, f"rows.{number}: {getattr(error, 'reason', error)}") from None
    return Results(results.device, rows)


def _problem(row: Row, file: Path) -> dict[str, Any]:
    if row.op in training.OPS:
        schema.convert(row.problem, training.problem_type(row.op), file)
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
        return files.read(path, MOST_TEXT).decode()
    except Missing:
        return ""
    except UnicodeDecodeError:
        raise Unreadable(path, "expected UTF-8") from None


def readme_of(file: Path) -> Path | None:
    """Return the README above docs/results/; None for a file elsewhere."""
    folder = file.absolute().parent
    return folder.parents[1] / "README.md" if folder.parts[-2:] == ("docs", "results") else None
