"""`jetfire report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.core import terminal

EPILOG = "Example: jetfire report docs/results/h200.json --check"


def run(
    file: Annotated[Path, o.argument("FILE.json", "Results of `jetfire bench`.")],
    readme: Annotated[
        Path | None,
        o.option(
            "--readme",
            "FILE.md",
            "Put the short tables between its two markers, too; for docs/results/FILE.json the "
            "README.md above.",
        ),
    ] = None,
    check: Annotated[bool, o.flag("--check", "Write nothing; exit 1 if a file is stale.")] = False,
    debug: o.Debug = False,
) -> None:
    """Write the page, the plots and the README's tables of a results file."""
    from jetfire.gpt2.training.finished import addition
    from jetfire.report import documents

    stale = documents.report(file, readme or documents.readme_of(file), check, addition)
    found = dict.fromkeys(map(str, stale), "stale" if check else "written")
    terminal.result({"files": found}, lambda: _show(found))
    if stale and check:
        raise typer.Exit(1)


def _show(files: Mapping[str, str]) -> None:
    for path, state in files.items():
        print(f"{path}: {state}")
