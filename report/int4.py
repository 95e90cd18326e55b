"""The report's tables of the INT4 ops: products and whole layers against FP16, stages, bandwidth.

Each is nothing where its rows were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from jetfire.core import registry
from jetfire.core.workloads import LAYERS
from jetfire.measure.results import Results, Row, problem_text
from jetfire.report import show
from jetfire.report.table import MarkdownTable
from jetfire.report.tuned import mean

Shape = tuple[int, int, int]


@cache
def ops() -> tuple[str, ...]:
    """Return the names of the ops that the part `int4` of the results measures."""
    timed = {name: registry.get(name).timed() or () for name in registry.names()}
    return tuple(name for name, found in timed.items() if any(t.part == "int4" for t in found))


def _shapes() -> list[Shape]:
    """The paper's layers, as m, n, k."""
    return [(m.tokens, n, k) for m in LAYERS["int4-paper"] for n, k in m.linears()]


def _fastest(results: Results, op: str, **fields: Any) -> dict[Shape, Row]:
    """The fastest kernel's row at each of the paper's shapes, of those with these fields."""
    found: dict[Shape, Row] = {}
    for row in results.rows:
        p = row.problem
        if row.op != op or row.role != "kernel" or row.ms is None:
            continue
        if not fields.items() <= p.items():
            continue
        shape = p["m"], p["n"], p["k"]
        if shape in _shapes() and (shape not in found or row.ms < (found[shape].ms or 0.0)):
            found[shape] = row
    return found


def _columns(results: Results) -> dict[str, dict[Shape, Row]]:
    """What is compared with FP16, each by shape; without what was not measured."""
    found = {
        "GEMM, packed codes": _fastest(
            results, "int4_gemm", operands="packed", product="fwd", out="bf16", bias=False
        ),
        "forward": _fastest(results, "hadamard_gemm", mode="fwd", group=32, dtype="bf16"),
        "backward": _fastest(results, "hadamard_gemm", mode="bwd", group=32, dtype="bf16"),
    }
    return {name: rows for name, rows in found.items() if rows}


def _ratio(row: Row | None) -> float | None:
    return None if row is None else (row.vs_peer or {}).get(show.FP16)


def _ratios(rows: dict[Shape, Row]) -> list[float] | None:
    """Against FP16 at all of the paper's shapes; None where one is missing."""
    found = [_ratio(rows.get(shape)) for shape in _shapes()]
    known = [ratio for ratio in found if ratio is not None]
    return known if len(known) == len(found) else None


def _mean(rows: dict[Shape, Row]) -> str:
    ratios = _ratios(rows)
    return "–" if ratios is None else f"{mean(ratios):.2f}×"


def layers(results: Results) -> MarkdownTable | None:
    """The paper's six layers: the product of packed codes, and the whole forward and backward."""
    columns = _columns(results)
    if not columns:
        return None
    lines = []
    for shape in _shapes():
        texts = []
        for rows in columns.values():
            row, ratio = rows.get(shape), _ratio(rows.get(shape))
            times = "–" if ratio is None else f"{ratio:.2f}×"
            texts += ["–" if row is None else show.time_text(row.ms), times]
        lines.append(["×".join(map(str, shape)), *texts])
    means = [text for rows in columns.values() for text in ("", _mean(rows))]
    lines.append(["geometric mean", *means])
    text = (
        "Layers of the INT4 paper (arXiv 2306.11987) as m×n×k. The GEMM multiplies "
        "packed 4-bit codes. Forward is all of it: Hadamard transform and quantisation of input "
        "and weight, product, scales. Backward is both gradients, bit splitting, sampling, "
        "gathering and the quantiser's own included; the weight's transposed codes are given. "
        "× is FP16 cuBLAS's time over ours, of backward that of its two products."
    )
    head = ["m×n×k", *(part for name in columns for part in (name, "× FP16"))]
    return MarkdownTable("INT4: a linear layer", text, head, lines)


def stages(results: Results) -> str | None:
    """Where forward and backward spend their time: a table of each, as Markdown."""
    shapes = _shapes()
    parts = []
    for mode in ("fwd", "bwd"):
        found = _fastest(results, "hadamard_gemm", mode=mode, group=32, dtype="bf16")
        rows = [found[shape] for shape in shapes if shape in found]
        parts += [MarkdownTable("", "", s.head, s.lines).markdown() for s in show.splits(rows)]
    if not parts:
        return None
    text = (
        "Each stage timed by itself beside the whole, in the same run on the same tensors, with "
        "its inputs out of the L2 cache; the share is of the stages' sum. All in turn, a stage "
        "finds in the cache what the one before it left there, and the clock is one for all.\n"
    )
    return "\n".join(["## INT4: a linear layer by stage", "", text, *parts])


def _described(row: Row) -> str:
    """The op with those of its problem's fields that are not its default's."""
    op = registry.get(row.op)
    mode = row.problem.get("mode", "fwd")
    sizes = {name: row.problem[name] for name in op.dims}
    plain = op.problems(mode, sizes)[0].as_dict()
    fields = {name: value for name, value in row.problem.items() if value != plain[name]}
    if "group" in row.problem and mode == "fwd":
        fields = {"group": row.problem["group"], "layout": row.problem["layout"]}
    return " ".join(filter(None, [row.op, mode if "mode" in row.problem else "",
                                  problem_text(fields)]))  # fmt: skip


def memory_bound(results: Results) -> MarkdownTable | None:
    """The other ops alone: bandwidth, and against torch.compile."""
    best: dict[str, Row] = {}
    names = ops()
    alone = [name for name in names if not registry.get(name).baselines]
    for row in results.rows:
        if row.op not in alone or row.role != "kernel" or row.ms is None:
            continue
        key = problem_text({"op": row.op, **row.problem})
        if key not in best or row.ms < (best[key].ms or 0.0):
            best[key] = row
    if not best:
        return None
    lines = []
    for row in sorted(best.values(), key=lambda row: names.index(row.op)):
        ratio = (row.vs_peer or {}).get("compile")
        shape = "×".join(str(row.problem[d]) for d in ("m", "n") if row.problem[d] != 1)
        lines.append([
            _described(row), row.kernel, shape, show.number((row.ms or 0) * 1e3, 1),
            show.number(row.gbps), "–" if row.roofline is None else f"{row.roofline:.0%}",
            "–" if ratio is None else f"{ratio:.2f}×",
        ])  # fmt: skip
    text = (
        "Bytes counted: inputs once and outputs once (bit_split must read its input twice). The "
        "share is of the copy bandwidth measured in the same run; `compile` is the same in torch "
        "operations under torch.compile."
    )
    head = ["", "kernel", "shape", "µs", "GB/s", "of copy", "faster than compile"]
    return MarkdownTable("INT4: memory-bound ops", text, head, lines)


def sections(results: Results) -> list[str]:
    """The page's sections, those that have rows."""
    tables: Sequence[Callable[[Results], MarkdownTable | None]] = (layers, memory_bound)
    made = [table.markdown() for make in tables if (table := make(results)) is not None]
    split = stages(results)
    return [*made[:1], split, *made[1:]] if split is not None else made


def _quantiser(results: Results) -> Row | None:
    """The fastest that packs 8192×8192 in groups of 32."""
    wanted = {"m": 8192, "n": 8192, "group": 32, "mode": "fwd", "layout": "packed", "dtype": "bf16"}
    rows = [
        row for row in results.rows
        if row.op == "hadamard_quantize" and row.role == "kernel" and row.roofline is not None
        and wanted.items() <= row.problem.items()
    ]  # fmt: skip
    return min(rows, key=lambda row: row.ms or 0.0, default=None)


def readme(results: Results) -> str:
    """A short table for the README; empty where nothing was measured."""
    lines = []
    for name, rows in _columns(results).items():
        ratios = _ratios(rows)
        if ratios is not None:
            spread = f"{min(ratios):.2f}× to {max(ratios):.2f}×"
            lines.append([_README[name], f"{mean(ratios):.2f}× FP16 cuBLAS", spread])
    row = _quantiser(results)
    if row is not None:
        lines.append([
            "Hadamard transform, quantise and pack, 8192×8192, group 32",
            f"{row.roofline:.0%} of copy bandwidth", f"{row.gbps:.0f} GB/s",
        ])  # fmt: skip
    if not lines:
        return ""
    head = ["INT4, the paper's six layers", "geometric mean", "from, to"]
    return "\n" + MarkdownTable("", "", head, lines).markdown()


_README = {
    "GEMM, packed codes": "GEMM of packed codes, BF16 out",
    "forward": "forward: transform and quantise both operands, multiply",
    "backward": "backward: split, sample, gather, both products, the quantiser's gradients",
}
