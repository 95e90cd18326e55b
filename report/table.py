"""Tables, and the sections of a page that hold them: as Markdown, and for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetfire.report.fitted import FittedTable


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head.

    Attributes:
        left: the columns whose texts begin at the left, by number; those of others end at the
            right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    left: Collection[int] = (0,)

    def markdown(self) -> str:
        rules = ("---" if i in self.left else "---:" for i in range(len(self.head)))
        rows = [self.head, *self.rows]
        head, *lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
        return "\n".join([head, f"|{'|'.join(rules)}|", *lines, ""])

    def rich(self, folded: Collection[int] = (), spare: Sequence[str] = ()) -> FittedTable:
        """Return it for the terminal, as wide as that.

        Args:
            folded: the columns whose texts may take several lines before another column goes.
            spare: the names of columns that may be left out, in the order in which they go.
        """
        from jetfire.report.fitted import FittedTable

        made = FittedTable(self.head, self.left, folded, spare)
        for row in self.rows:
            made.add_row(*row)
        return made


def _cell(text: str) -> str:
    """Return a text as a cell of Markdown: on one line, and with its bars as such."""
    return text.replace("|", "\\|").replace("\n", "<br>")


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        text: what the tables hold, in paragraphs.
        plot: the file of a plot that stands above the tables; alt: what it shows, in words.
    """

    title: str
    text: str
    tables: Sequence[Table]
    plot: str = ""
    alt: str = ""

    def markdown(self) -> str:
        plot = [f"![{self.alt or self.plot}]({self.plot})\n"] if self.plot else []
        tables = [table.markdown() for table in self.tables]
        return "\n".join([f"## {self.title}\n", f"{self.text}\n", *plot, *tables])

    @property
    def link(self) -> str:
        """The title as a link to the section, as GitHub names its heading."""
        kept = (c for c in self.title.lower() if c.isalpha() or c.isdecimal() or c in "-_ ")
        return f"[{self.title}](#{''.join(kept).replace(' ', '-')})"


def filled(sections: Sequence[Section]) -> list[Section]:
    """Return those of which something was measured."""
    return [section for section in sections if any(table.rows for table in section.tables)]
