"""`jetfire compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire compare before.json after.json --fail-on-regression 5%"


def run(
    before: Annotated[Path, o.argument("A.json", "Results to compare with.")],
    after: Annotated[Path, o.argument("B.json", "Results to judge.")],
    fail_on_regression: Annotated[
        o.Text,
        o.option(
            "--fail-on-regression",
            "SHARE",
            "Exit 4 if a kernel is slower by more, e.g. 5%, broken or missing.",
        ),
    ] = None,
    ignore_config: Annotated[
        bool, o.flag("--ignore-config", "Match rows whose configs differ.")
    ] = False,
    format: o.Format = None,
    debug: o.Debug = False,
) -> None:
    """Match the rows of two results files and show what got faster and slower."""
    from jetfire.bench import compare

    compare.compare(
        before, after, fail_on_regression, config=not ignore_config, form=format or "table"
    )
