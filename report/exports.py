"""The report's table of exported kernels: their speed beside the workbench's own launch."""

from __future__ import annotations

from collections.abc import Sequence

from jetfire.measure.results import Results, Row, shape_text
from jetfire.report.rows import grouped, ratio
from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, time_text, times

LAUNCH = "launch"


def split(results: Results) -> tuple[Results, list[Row]]:
    """Return the results without their exports, and these."""
    exports = [row for row in results.rows if row.export is not None]
    others = [row for row in results.rows if row.export is None]
    return Results(results.device, others, results.runs), exports


def section(exports: Sequence[Row]) -> Section:
    targets = list(dict.fromkeys(row.export or "" for row in exports))
    lines = []

    def described(row: Row) -> str:
        """Return ``gemm wgmma 8192×8192×8192 block=128``."""
        shape = shape_text(row.problem, ("block", "out_block"))
        return " ".join(filter(None, [row.op, row.problem.get("mode", ""), row.kernel, shape]))

    for name, rows in grouped(exports, described).items():
        of = {row.export: times(ratio(row, LAUNCH), 3).replace(NOTHING, "failed") for row in rows}
        launches = (
            row.ms * by for row in rows if row.ms is not None and (by := ratio(row, LAUNCH))
        )
        launch = time_text(next(launches, None))  # beside the first that was timed
        lines.append([name, launch, *(of.get(target, "") for target in targets)])
    text = (
        "`jetfire-export` wrote each, built it in a folder of its own and ran its self-test; then "
        "it was checked against the reference, and timed in turn with the workbench's own launch "
        "of the same config on the same tensors. Under each target is the launch's time over the "
        "export's: above 1 the export is faster."
    )
    return Section("Exported kernels", text, [Table(["", "launch", *targets], lines)])
