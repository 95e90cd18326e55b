"""The report's table of exported kernels: their speed beside the workbench's own launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jetfire.measure.results import Results, Row, shape_text
from jetfire.report.rows import grouped, ratio
from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, time_text, times

LAUNCH = "launch"


def split(results: Results) -> tuple[Results, list[Row]]:
    """Return the results without their exports, and these."""
    exports = [row for row in results.rows if row.export is not None]
    others = [row for row in results.rows if row.export is None]
    return Results(results.device, others), exports


def _described(row: Row) -> str:
    """Return ``gemm wgmma 8192×8192×8192 block=128``."""
    fields = ("block", "out_block")
    mode = row.problem.get("mode", "")
    return " ".join(filter(None, [row.op, mode, row.kernel, shape_text(row.problem, fields)]))


def _launch(rows: Iterable[Row]) -> str:
    """Return the workbench's time beside the first that was timed."""
    found = (row.ms * by for row in rows if row.ms is not None and (by := ratio(row, LAUNCH)))
    return time_text(next(found, None))


def section(exports: Sequence[Row]) -> Section:
    targets = list(dict.fromkeys(row.export or "" for row in exports))
    lines = []
    for name, rows in grouped(exports, _described).items():
        of = {row.export: times(ratio(row, LAUNCH), 3).replace(NOTHING, "failed") for row in rows}
        lines.append([name, _launch(rows), *(of.get(target, "") for target in targets)])
    text = (
        "`jetfire-export` wrote each, built it in a folder of its own and ran its self-test; then "
        "it was checked against the reference, and timed in turn with the workbench's own launch "
        "of the same config on the same tensors. Under each target is the launch's time over the "
        "export's: above 1 the export is faster."
    )
    return Section("Exported kernels", text, [Table(["", "launch", *targets], lines)])
