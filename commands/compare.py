"""`jetfire compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def compare(
    before: Annotated[Path, o.argument("A.json", "Results to compare with.")],
    after: Annotated[Path, o.argument("B.json", "Results to judge.")],
    fail_on_regression: Annotated[
        str | None,
        o.option(
            "--fail-on-regression",
            "SHARE",
            "Exit 4 if a kernel is slower by more, e.g. 5%, broken or missing.",
        ),
    ] = None,
    ignore_config: Annotated[
        bool, o.flag("--ignore-config", "Match rows whose configs differ.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Match the rows of two results files and show what got faster and slower."""
    from jetfire.bench.compare import compare as compare_files

    compare_files(before, after, fail_on_regression, config=not ignore_config)
