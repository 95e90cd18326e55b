"""A result in the format that `--format` names: a table for people, JSON, CSV or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jetfire.core import terminal
from jetfire.measure.results import as_csv
from jetfire.report.table import Table

FORMATS = ("table", "json", "csv", "md")
Titled = Mapping[str, Table]  # by what stands above each in Markdown; empty where nothing does


def give(
    form: str,
    document: Mapping[str, Any],
    display: Callable[[], object],
    tables: Callable[[], Titled],
    records: Callable[[], Sequence[Mapping[str, Any]]],
) -> None:
    """Give a result, or a part of it, in one of `FORMATS`; where `--json` is given, as JSON.

    Args:
        document: the result as JSON.
        display: prints it for people.
        tables: makes what Markdown has.
        records: makes what CSV has a line of each.
    """

    def show() -> None:
        if form == "csv":
            _print(as_csv(records()))
        elif form == "md":
            _print(as_markdown(tables()))
        elif form == "json":
            terminal.print_document(document)
        else:
            display()

    terminal.result(document, show)


def _print(text: str) -> None:
    if text:
        terminal.show(text.rstrip("\n"))


def as_markdown(tables: Titled) -> str:
    """Return tables with their titles, an empty line between two."""

    def part(title: str, table: Table) -> str:
        return f"### {title}\n\n{table.markdown()}" if title else table.markdown()

    return "\n".join(part(*titled) for titled in tables.items())
