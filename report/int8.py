"""What the documents say of the INT8 ops: the GEMM, its promotion, and the memory-bound ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from jetfire.core.suites import PRODUCTS
from jetfire.core.workloads import MODELS
from jetfire.measure.data import OPERANDS
from jetfire.measure.results import Results, Row, problem_text, shape_text
from jetfire.report import int4, show, training
from jetfire.report.rows import fastest, grouped, having, ops_of, ratio, varying
from jetfire.report.table import Section, Table
from jetfire.report.text import (
    NOTHING,
    data_text,
    error_text,
    fixed,
    rate_text,
    share,
    significant,
    time_text,
    times,
)

BLOCKS = (32, 64, 128)
LARGE = ((8192, 4096), (8192, 16384))
FEW_ROWS = 128


def timed(results: Results) -> list[Row]:
    """Return the timed rows of all ops but training's and INT4's; no curve's points."""
    own = (*training.OPS, *ops_of("int4"))
    return [
        row
        for row in results.rows
        if row.ms is not None and row.curve is None and row.op not in own
    ]


def gemm(results: Results) -> list[Row]:
    """Return the timed rows of the GEMM, which the part `PRODUCTS` measures."""
    return [row for row in timed(results) if row.op in ops_of(PRODUCTS)]


def memory_bound(results: Results, role: str = "kernel") -> list[Row]:
    return [row for row in timed(results) if not row.tflops and row.role == role]


def plain_gemm(results: Results) -> list[Row]:
    """Return the rows of products that write BF16 and no more."""
    return having(gemm(results), out="bf16", bias=False, accumulate=False)


def square_gemm(results: Results) -> list[Row]:
    """Return the rows of square products that write BF16 and no more."""
    rows = plain_gemm(results)
    return [row for row in rows if row.problem["m"] == row.problem["n"] == row.problem["k"]]


def _kernel_names(rows: Iterable[Row], role: str) -> list[str]:
    return list(dict.fromkeys(row.kernel for row in rows if row.role == role))


def _cell(rows: Iterable[Row], value: Callable[[Row], float | None], digits: int = 0) -> str:
    """Return the fastest row's value; a dash where there is no row."""
    row = fastest(rows)
    return NOTHING if row is None else fixed(value(row), digits)


def _tflops(rows: Iterable[Row]) -> str:
    return _cell(rows, lambda row: row.tflops)


def gemm_squares(results: Results) -> Section:
    """Return TFLOP/s of each kernel and block, and of each peer, by size."""
    rows = square_gemm(results)
    sizes = sorted({row.problem["m"] for row in rows})
    named: list[tuple[str, dict[str, int]]] = [
        (name, {"block": block}) for block in BLOCKS for name in _kernel_names(rows, "kernel")
    ]
    lines = []
    for name, fields in [*named, *((peer, {}) for peer in _kernel_names(rows, "peer"))]:
        same = [row for row in having(rows, **fields) if row.kernel == name]
        if same:
            label = ", ".join([name, *(f"block {block}" for block in fields.values())])
            lines.append([label, *(_tflops(having(same, m=size)) for size in sizes)])
    text = "TFLOP/s, BF16 out, m = n = k. Peers: the fastest of their samples beside each block."
    return Section("GEMM, squares", text, [Table(["", *map(str, sizes)], lines)])


def gemm_outputs(results: Results) -> Section:
    """Return what each output costs at 8192³."""
    every = having(gemm(results), m=8192, n=8192, k=8192)
    rows = [row for row in every if row.role == "kernel"]
    named = [name for name in varying(rows)[1] if name != "block"] if rows else []
    kinds = grouped(rows, lambda row: _fields(row, named))
    lines = [
        [f"{kind}, {name}", *(_tflops(having(same, block=block)) for block in BLOCKS)]
        for kind, members in kinds.items()
        for name in _kernel_names(rows, "kernel")
        if (same := [row for row in members if row.kernel == name])
    ]
    table = Table(["", *(f"block {block}" for block in BLOCKS)], lines if len(kinds) > 1 else [])
    return Section("GEMM 8192³, each output", "TFLOP/s.", [table])


def _fields(row: Row, names: Sequence[str]) -> str:
    return problem_text({name: row.problem[name] for name in names if name in row.problem})


def large(results: Results) -> Section:
    """Return each memory-bound op at the two large shapes: bandwidth, and against torch.compile."""

    def key(row: Row) -> tuple[Any, ...]:
        compared = (row.problem.get(name) for name in ("mode", "stats", "residual"))
        return row.op, *compared, _shape(row)

    peers = memory_bound(results, "peer")
    compiled = {key(row): row.ms for row in peers if row.kernel == "compile"}
    named = ("block", "out_block", "mode", "stats", "rounding", "layout", "residual")
    lines = []
    for row in memory_bound(results):
        if _shape(row) in LARGE:
            settings = _fields(row, [name for name in row.problem if name in named])
            ms = compiled.get(key(row))
            against = None if ms is None or row.ms is None else ms / row.ms
            shape = shape_text(row.problem, ())
            lines.append(int4.bandwidth_line(f"{row.op} {settings}", row, shape, against))
    text = (
        "Bytes counted: inputs once and outputs once. The share is of the copy bandwidth measured "
        "in the same run; `compile` is the op in BF16 under torch.compile, at the same shape."
    )
    return Section("Memory-bound ops, large shapes", text, [int4.bandwidth_table(lines)])


def _shape(row: Row) -> tuple[int, int]:
    return row.problem["m"], row.problem["n"]


def gemm_models(results: Results) -> Section:
    """Return the GEMMs of one transformer block of each model, against cuBLAS BF16."""
    rows = having(gemm(results), bias=False)
    lines = []
    pairs: dict[int, list[tuple[float, float]]] = {block: [] for block in BLOCKS}
    for name, model in MODELS.items():
        m, layers = model.tokens, list(model.linears())
        products: dict[str, list[dict[str, Any]]] = {
            "fwd": [{"m": m, "n": out, "k": inp, "out": "bf16"} for out, inp in layers],
            "dgrad": [{"m": m, "n": inp, "k": out, "out": "bf16"} for out, inp in layers],
            "wgrad": [{"m": out, "n": inp, "k": m, "out": "fp32"} for out, inp in layers],
        }
        for label, problems in products.items():
            found = {block: _layers(rows, problems, block) for block in BLOCKS}
            if any(found.values()):
                lines.append([f"{name} {label}", *map(_together, found.values())])
            for block, layer_pairs in found.items():
                pairs[block] += layer_pairs
    if lines:
        ratios = [[theirs / ours for ours, theirs in of] for of in pairs.values()]
        means = [times(geometric_mean(of)) if of else NOTHING for of in ratios]
        lines.append(["each product, geometric mean", *means])
    text = (
        "The four linear layers of one block, 8192 tokens: milliseconds together with the fastest "
        "kernel for each, and cuBLAS BF16's time over that (its own output is BF16 for wgrad too). "
        "The last line is the mean of the ratios of all products above it."
    )
    head = ["", *(f"block {block}: ms, × cuBLAS BF16" for block in BLOCKS)]
    return Section("GEMM, GPT-2's layers", text, [Table(head, lines)])


def gemm_few_rows(results: Results) -> Section:
    """Return products of few rows, which read their weights and do little else."""
    found = [
        row
        for row in plain_gemm(results)
        if row.role == "kernel" and row.problem["m"] <= FEW_ROWS < row.problem["n"]
    ]
    peers = ("cublas_bf16", "fp8_scaled_mm_block")
    lines = []
    for shape, same in grouped(found, lambda row: shape_text(row.problem, ("block",))).items():
        row = fastest(same) or same[0]
        ratios = [times(ratio(row, peer)) for peer in peers]
        lines.append([shape, time_text(row.ms), share(row.roofline), *ratios])
    text = (
        f"At most {FEW_ROWS} rows of A, BF16 out: the fastest kernel's time, and each peer's time "
        "over it."
    )
    head = ["", "time", "of roofline", *(f"× {peer}" for peer in peers)]
    return Section("GEMM, few rows", text, [Table(head, lines)])


def gemm_codes(results: Results) -> Section:
    """Return what INT8 output in blocks of 32 costs at the models' products of blocks of 128."""
    rows = [row for row in having(gemm(results), block=128, bias=False) if row.role == "kernel"]
    lines, ratios = [], []
    for name, model in MODELS.items():
        for n, k in dict.fromkeys(model.linears()):
            same = having(rows, m=model.tokens, n=n, k=k)
            floats = fastest(having(same, out="bf16"))
            codes = fastest(having(same, out="int8", out_block=32, rounding="nearest"))
            if floats is not None and codes is not None and floats.ms and codes.ms:
                shape = shape_text(codes.problem, ())
                ratios.append(floats.ms / codes.ms)
                both = [time_text(floats.ms), time_text(codes.ms), times(ratios[-1])]
                lines.append([name, shape, *both])
    if ratios:
        lines.append(["geometric mean", "", "", "", times(geometric_mean(ratios))])
    text = (
        "Forward's products in blocks of 128, each with BF16 out and with codes in blocks of 32 "
        "out: the first's time over the second's. Where it is below 1, codes take longer. The two "
        "may have been measured on two days."
    )
    head = ["", "", "BF16 out", "INT8 out", "BF16 / INT8"]
    return Section("GEMM, INT8 out", text, [Table(head, lines)])


def _layers(
    rows: Sequence[Row], problems: Sequence[dict[str, Any]], block: int
) -> list[tuple[float, float]]:
    """Return our time and cuBLAS's of each product; nothing where one of them has no row."""
    found = []
    for problem in problems:
        same = having(rows, **problem, block=block)
        kernel = fastest(row for row in same if row.role == "kernel")
        peer = fastest(row for row in same if row.kernel == "cublas_bf16")
        if kernel is None or peer is None or not kernel.ms or not peer.ms:
            return []
        found.append((kernel.ms, peer.ms))
    return found


def _together(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the time of some products together, and cuBLAS's over it."""
    if not pairs:
        return NOTHING
    ours, theirs = map(sum, zip(*pairs, strict=True))
    return f"{significant(ours)}, {times(theirs / ours)}"


def usual(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in layout q, rounded as training does, of one block, without a residual."""
    usual_of = {"bwd": "stochastic"}
    return [
        row
        for row in rows
        if row.problem.get("layout", "q") == "q"
        and not {"out_block", "residual"} & row.problem.keys()
        and row.problem.get("rounding")
        in (None, "", usual_of.get(row.problem.get("mode", ""), "nearest"))
    ]


def small_models(results: Results) -> Section:
    """Return memory-bound ops at the models' shapes: share of the copy bandwidth."""
    rows = memory_bound(results)
    found = [row for row in usual(rows) if row.problem.get("stats", "row") == "row"]
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        for mode in ("fwd", "bwd"):
            same = [r for r in found if (r.op, r.problem.get("mode", "fwd")) == (op, mode)]
            for width in sorted({row.problem["n"] for row in having(same, m=8192)}):
                here = [row for row in same if _shape(row) == (8192, width)]
                texts = (
                    _cell(
                        (r for r in here if r.problem.get("block", block) == block),
                        lambda r: r.roofline and 100 * r.roofline,
                    )
                    for block in BLOCKS
                )
                lines.append([f"{op} {mode} 8192×{width}", *texts])
    text = (
        "Percent of the measured copy bandwidth, fastest kernel; layout q; bwd stochastic; "
        "LayerNorm computes its own statistics."
    )
    if any("block" not in row.problem for row in rows):
        text += " An op that knows no blocks has the same figure for each."
    table = Table(["", *(f"block {block}, %" for block in BLOCKS)], lines)
    return Section("Memory-bound ops by width", text, [table])


def other_products(results: Results) -> Section:
    """Return products of other ops than the GEMM: the fastest kernel of each problem."""
    found = [row for row in timed(results) if row.tflops and row.op not in ops_of(PRODUCTS)]
    lines = []
    for same in grouped(found, lambda row: (row.op, problem_text(row.problem))).values():
        row = fastest(row for row in same if row.role == "kernel")
        if row is not None:
            name = f"{row.op} {shape_text(row.problem, row.problem)}"
            lines.append(
                [name, row.kernel, time_text(row.ms), rate_text(row), show.ratio_text(row)]
            )
    text = "The fastest kernel of each, and the fastest peer's time over its."
    return Section("Other products", text, [Table(["", "", "time", "rate", "faster than"], lines)])


def curve(results: Results) -> list[Row]:
    """Return the points of the promotion's curve."""
    return [
        row
        for row in results.rows
        if row.curve == "promotion"
        and row.tflops is not None
        and row.ms is not None
        and row.sqnr_db is not None
    ]


def promotion(results: Results) -> Section:
    """Return each schedule at each K per promotion: speed, worth of its output, its own error."""
    rows = curve(results)

    def curve_of(row: Row) -> tuple[str, int, str]:
        return row.role, row.problem["block"] if row.role == "kernel" else 0, row.label

    points = grouped(rows, curve_of)
    ordered = sorted(points.items(), key=lambda item: item[0][:2])
    lines = [_promoted(block, label, same) for (_, block, label), same in ordered]
    shape = shape_text(rows[0].problem, ()) if rows else ""
    names = [data_text(kind) for kind in OPERANDS]
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
    head = ["K per promotion", "", "TOPS", "× cuBLAS", *(f"{name}, dB" for name in names)]
    head += [f"{names[-1]}, median row, dB", "own error"]
    return Section("What a promotion costs", text, [Table(head, lines)])


def _promoted(block: int, label: str, rows: Sequence[Row]) -> list[str]:
    of = {kind: [row for row in rows if row.data == kind] for kind in OPERANDS}
    errors = [row.schedule_err for row in rows if row.schedule_err is not None]
    return [
        str(block or NOTHING),
        label,
        _tflops(of["normal"]),
        times(ratio(fastest(of["normal"]), "cublas_bf16")),
        *(_cell(of[kind], lambda row: row.sqnr_db, 1) for kind in OPERANDS),
        _cell(of[OPERANDS[-1]], lambda row: row.row_sqnr_db, 1),
        error_text(max(errors)) if errors else NOTHING,
    ]


def sections(results: Results) -> list[Section]:
    products = (gemm_squares, gemm_outputs, promotion, gemm_models, gemm_codes, gemm_few_rows)
    made = (*products, other_products, large, small_models)
    return [make(results) for make in made]


def readme(results: Results) -> Table:
    """Return the README's short table: the GEMM alone, one line per block."""
    kernels = [row for row in having(square_gemm(results), m=8192) if row.role == "kernel"]
    best = [(f"GEMM 8192³, block {b}", having(kernels, block=b)) for b in reversed(BLOCKS)]
    lines = [
        [name, time_text(row.ms), rate_text(row), share(row.roofline), show.ratio_text(row)]
        for name, same in best
        if (row := fastest(same)) is not None
    ]
    return Table(["", "time", "rate", "of roofline", "faster than"], lines)


# What each plot shows, in words.
ALTS = {
    PRODUCTS: "GEMM of square matrices: each kernel's and peer's time and rate by size, "
    "and roofline",
    "promotion": "What a promotion costs: each schedule's rate over its signal to noise",
    "memory-bound": "Memory-bound ops: time and bandwidth by size",
}


def plots(results: Results) -> dict[str, list[Row]]:
    """Return the rows of each plot: the GEMM's squares, its promotion, all other ops in one.

    Of these a plot has the ops with more than one size: points above each other are no curve.
    """
    square = [row for row in memory_bound(results) if row.problem["m"] == row.problem["n"]]
    rest = [
        replace(
            row,
            op="memory-bound ops",
            kernel=", ".join(filter(None, [row.op, row.problem.get("mode")])),
            problem={dim: row.problem[dim] for dim in ("m", "n")},
        )
        for row in usual(square)
        if row.problem.get("block", 32) == 32
    ]
    sizes = {(row.kernel, row.problem["m"]) for row in rest}
    several = {name for name, count in Counter(name for name, _ in sizes).items() if count > 1}
    rest = [row for row in rest if row.kernel in several]
    found = {PRODUCTS: square_gemm(results), "promotion": curve(results), "memory-bound": rest}
    return {name: rows for name, rows in found.items() if rows}
