"""`jetfire history`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire history results/ --report history.html --fail-on-regression 5%"


def run(
    paths: Annotated[list[Path], o.argument("PATH...", "Results, or folders of such.")],
    fail_on_regression: Annotated[
        o.Text,
        o.option(
            "--fail-on-regression",
            "SHARE",
            "Exit 4 if a kernel has become slower by more, e.g. 5%, and still is.",
        ),
    ] = None,
    format: o.Format = None,
    report: Annotated[
        o.File, o.option("--report", "FILE.html", "Write the changes and all times as a page.")
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Find the commits at which kernels became slower, or faster, in results of many."""
    from jetfire.bench import history

    history.history(paths, fail_on_regression, format or "table", report)
