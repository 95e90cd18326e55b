"""The report's table of exported kernels: their speed beside the workbench's own launch."""

from __future__ import annotations

from collections.abc import Sequence

from jetfire.measure.results import Results, Row, shape_text
from jetfire.report import show
from jetfire.report.table import MarkdownTable

LAUNCH = "launch"


def split(results: Results) -> tuple[Results, list[Row]]:
    """The results without their exports, and these."""
    exports = [row for row in results.rows if row.export is not None]
    others = [row for row in results.rows if row.export is None]
    return Results(results.device, others), exports


def _described(row: Row) -> str:
    """``gemm wgmma 8192×8192×8192 block=128``"""
    fields = ("block", "out_block")
    mode = row.problem.get("mode", "")
    return " ".join(filter(None, [row.op, mode, row.kernel, shape_text(row.problem, fields)]))


def _ratio(row: Row | None) -> str:
    if row is None:
        return ""
    ratio = (row.vs_peer or {}).get(LAUNCH)
    return "failed" if ratio is None else f"{ratio:.3f}×"


def _launch(rows: Sequence[Row]) -> str:
    """The workbench's time beside the first that was timed."""
    for row in rows:
        ratio = (row.vs_peer or {}).get(LAUNCH)
        if row.ms is not None and ratio is not None:
            return show.time_text(row.ms * ratio)
    return "–"


def sections(exports: Sequence[Row]) -> list[str]:
    """The page's section; nothing without rows."""
    if not exports:
        return []
    targets = list(dict.fromkeys(row.export or "" for row in exports))
    found: dict[str, dict[str, Row]] = {}
    for row in exports:
        found.setdefault(_described(row), {})[row.export or ""] = row
    lines = [
        [name, _launch(list(rows.values())), *(_ratio(rows.get(target)) for target in targets)]
        for name, rows in found.items()
    ]
    text = (
        "`jetfire-export` wrote each, built it in a folder of its own and ran its self-test; then "
        "it was checked against the reference, and timed in turn with the workbench's own launch "
        "of the same config on the same tensors. Under each target is the launch's time over the "
        "export's: above 1 the export is faster."
    )
    return [MarkdownTable("Exported kernels", text, ["", "launch", *targets], lines).markdown()]
