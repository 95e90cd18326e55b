"""What the documents say of the INT4 ops: products and layers against FP16, stages, bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from jetfire.core import registry
from jetfire.core.workloads import LAYERS
from jetfire.measure.results import Results, Row, problem_text
from jetfire.report import show
from jetfire.report.rows import fastest, grouped, having, ops_of, ratio
from jetfire.report.table import Section, Table
from jetfire.report.text import fixed, rate_text, share, significant, time_text, times

FP16 = "cublas_fp16"  # the paper's own peer (arXiv 2306.11987)
Shape = tuple[int, int, int]


def _kernels(results: Results, *names: str) -> list[Row]:
    """Return the timed rows of kernels of some ops."""
    return [row for row in results.rows if row.op in names and row.role == "kernel" and row.ms]


def bandwidth_table(lines: Sequence[Sequence[str]]) -> Table:
    """Return a table of lines that `bandwidth_line` makes."""
    head = ["", "kernel", "shape", "µs", "GB/s", "of copy", "faster than compile"]
    return Table(head, lines)


def bandwidth_line(name: str, row: Row, shape: str, compiled: float | None) -> list[str]:
    """Return how a memory-bound kernel uses the bandwidth.

    Args:
        compiled: torch.compile's time over its.
    """
    us = None if row.ms is None else row.ms * 1e3
    figures = [significant(us), fixed(row.gbps), share(row.roofline), times(compiled)]
    return [name, row.kernel, shape, *figures]


def _shapes() -> list[Shape]:
    """Return the paper's layers, as m, n, k."""
    return [(m.tokens, n, k) for m in LAYERS["int4-paper"] for n, k in m.linears()]


def _fastest(results: Results, op: str, **fields: Any) -> dict[Shape, Row]:
    """Return the fastest kernel's row at each of the paper's shapes, of those with these fields."""
    rows = having(_kernels(results, op), **fields)
    found = {(m, n, k): fastest(having(rows, m=m, n=n, k=k)) for m, n, k in _shapes()}
    return {shape: row for shape, row in found.items() if row is not None}


def _layers(results: Results, mode: str) -> dict[Shape, Row]:
    return _fastest(results, "hadamard_gemm", mode=mode, group=32, dtype="bf16")


def _columns(results: Results) -> dict[str, dict[Shape, Row]]:
    """Return what is compared with FP16, each by shape; without what was not measured."""
    codes = {"operands": "packed", "product": "fwd", "out": "bf16", "bias": False}
    found = {
        "GEMM, packed codes": _fastest(results, "int4_gemm", **codes),
        "forward": _layers(results, "fwd"),
        "backward": _layers(results, "bwd"),
    }
    return {name: rows for name, rows in found.items() if rows}


def _ratios(rows: dict[Shape, Row]) -> list[float]:
    """Return the ratios to FP16 at all of the paper's shapes; nothing where one is missing."""
    found = [ratio(rows.get(shape), FP16) for shape in _shapes()]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def _mean(ratios: list[float]) -> str:
    return times(geometric_mean(ratios) if ratios else None)


def layers(results: Results) -> Section:
    """Return the paper's six layers: products of packed codes, and whole forward and backward."""
    columns = _columns(results)
    lines = []
    for shape in _shapes() if columns else ():
        texts = []
        for rows in columns.values():
            row = rows.get(shape)
            texts += [time_text(row.ms if row else None), times(ratio(row, FP16))]
        lines.append(["×".join(map(str, shape)), *texts])
    if lines:
        means = [text for rows in columns.values() for text in ("", _mean(_ratios(rows)))]
        lines.append(["geometric mean", *means])
    text = (
        "Layers of the INT4 paper (arXiv 2306.11987) as m×n×k. The GEMM multiplies "
        "packed 4-bit codes. Forward is all of it: Hadamard transform and quantisation of input "
        "and weight, product, scales. Backward is both gradients, bit splitting, sampling, "
        "gathering and the quantiser's own included; the weight's transposed codes are given. "
        "× is FP16 cuBLAS's time over ours, of backward that of its two products."
    )
    head = ["m×n×k", *(part for name in columns for part in (name, "× FP16"))]
    return Section("INT4: a linear layer", text, [Table(head, lines)])


def stages(results: Results) -> Section:
    """Return what says where forward and backward spend their time."""
    tables = [
        table
        for mode in ("fwd", "bwd")
        for table in show.splits(list(_layers(results, mode).values()))
    ]
    text = (
        "Each stage timed by itself beside the whole, in the same run on the same tensors, with "
        "its inputs out of the L2 cache; the share is of the stages' sum. All in turn, a stage "
        "finds in the cache what the one before it left there, and the clock is one for all."
    )
    return Section("INT4: a linear layer by stage", text, tables)


def _described(row: Row) -> str:
    """Return the op with those of its problem's fields that are not its default's."""
    op = registry.get(row.op)
    mode = row.problem.get("mode", "fwd")
    sizes = {name: row.problem[name] for name in op.dims}
    plain = op.problems(mode, sizes)[0].as_dict()
    fields = {name: value for name, value in row.problem.items() if value != plain[name]}
    if "group" in row.problem and mode == "fwd":
        fields = {"group": row.problem["group"], "layout": row.problem["layout"]}
    named = [row.op, mode if "mode" in row.problem else "", problem_text(fields)]
    return " ".join(filter(None, named))


def memory_bound(results: Results) -> Section:
    """Return the other ops alone: bandwidth, and against torch.compile."""
    alone = [name for name in ops_of("int4") if not registry.get(name).baselines]
    rows = sorted(_kernels(results, *alone), key=lambda row: alone.index(row.op))
    lines = []
    for same in grouped(rows, lambda row: (row.op, problem_text(row.problem))).values():
        row = fastest(same) or same[0]
        shape = "×".join(str(row.problem[d]) for d in ("m", "n") if row.problem[d] != 1)
        lines.append(bandwidth_line(_described(row), row, shape, ratio(row, "compile")))
    text = (
        "Bytes counted: inputs once and outputs once (bit_split must read its input twice). The "
        "share is of the copy bandwidth measured in the same run; `compile` is the same in torch "
        "operations under torch.compile."
    )
    return Section("INT4: memory-bound ops", text, [bandwidth_table(lines)])


def sections(results: Results) -> list[Section]:
    return [layers(results), stages(results), memory_bound(results)]


def readme(results: Results) -> Table:
    """Return a short table for the README."""
    lines = []
    for name, rows in _columns(results).items():
        ratios = _ratios(rows)
        if ratios:
            spread = f"{times(min(ratios))} to {times(max(ratios))}"
            lines.append([_README[name], f"{_mean(ratios)} FP16 cuBLAS", spread])
    quantisers = having(
        _kernels(results, "hadamard_quantize"),
        **{"m": 8192, "n": 8192, "group": 32, "mode": "fwd", "layout": "packed", "dtype": "bf16"},
    )
    row = fastest(row for row in quantisers if row.roofline is not None)
    if row is not None:
        what = "Hadamard transform, quantise and pack, 8192×8192, group 32"
        lines.append([what, f"{share(row.roofline)} of copy bandwidth", rate_text(row)])
    return Table(["INT4, the paper's six layers", "geometric mean", "from, to"], lines)


_README = {
    "GEMM, packed codes": "GEMM of packed codes, BF16 out",
    "forward": "forward: transform and quantise both operands, multiply",
    "backward": "backward: split, sample, gather, both products, the quantiser's gradients",
}
