"""A table for the terminal that fits its width, in which no text is cut.

Where there is no room columns are left out, then texts wrap between words; and where that does not
do, each row stands as lines of its own, a value under the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from jetfire.core import terminal

BETWEEN = 3  # spaces between two columns
FOLDED = 24  # the least width of a column whose longer texts may take several lines


class _Line(NamedTuple):
    """One row, or the title of the rows below it, which stands in their first column."""

    cells: Sequence[Text]
    style: str = ""
    title: bool = False


class FittedTable:
    """Rows under a head, as a terminal of any width shows them.

    Args:
        left: the columns whose texts begin at the left, by number.
        folded: the columns whose texts may take several lines before another column goes.
        spare: the names of columns that may be left out, in the order in which they go.
    """

    def __init__(
        self,
        head: Sequence[str],
        left: Collection[int],
        folded: Collection[int] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self.head, self.left, self.folded, self.spare = head, left, folded, spare
        self._lines: list[_Line] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        texts = [cell if isinstance(cell, Text) else terminal.styled(cell) for cell in cells]
        self._lines.append(_Line(texts, style))

    def add_section(self, title: str) -> None:
        """Begin a group of rows, under a title."""
        self._lines.append(_Line([terminal.styled(title, "cyan")], title=True))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        columns, widths = self._fitting(options.max_width)
        if columns:
            yield from self._table(columns, widths)
        else:
            yield from self._stacked()
        yield Text()

    def _table(self, columns: Sequence[int], widths: Sequence[int]) -> RenderResult:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, width in zip(columns, widths, strict=True):
            justify = "left" if i in self.left else "right"
            name = terminal.styled(self.head[i])
            table.add_column(name, justify=justify, overflow="fold", width=width)  # type: ignore[arg-type]
        for line in self._lines:
            if line.title:
                table.add_section()
                table.add_row(*line.cells)
            else:
                table.add_row(*(line.cells[i] for i in columns), style=line.style)
        yield table
        if left_out := [name for i, name in enumerate(self.head) if i not in columns]:
            names = ", ".join(dict.fromkeys(left_out))
            yield Text(f"left out, for the width: {names}", "dim", overflow="fold")

    def _stacked(self) -> RenderResult:
        for line in self._lines:
            if line.title:
                yield line.cells[0]
                continue
            yield Text()
            for name, cell in zip(self.head, line.cells, strict=True):
                if cell.plain:
                    head = terminal.styled(f"{name}: " if name else "", "dim")
                    yield Text.assemble(head, cell, style=line.style, overflow="fold")

    def _fitting(self, width: int) -> tuple[list[int], list[int]]:
        """Return the columns that are shown at a width, and each one's own: none if none fit."""
        columns = list(range(len(self.head)))
        spare = list(self.spare)
        while sum(self._wanted(columns)) > _room(columns, width) and spare:
            name = spare.pop(0)
            columns = [i for i in columns if self.head[i] != name]
        widths = self._widths(columns, _room(columns, width))
        return (columns, widths) if sum(widths) <= _room(columns, width) else ([], [])

    def _texts(self, i: int, titles: bool = True) -> list[str]:
        lines = [line for line in self._lines if not line.title or (titles and i == 0)]
        return [self.head[i], *(line.cells[i].plain for line in lines)]

    def _least(self, columns: Iterable[int]) -> list[int]:
        """Return the widths at which no text takes more lines than it may."""
        found = []
        for i in columns:
            least = _widest(self._texts(i, titles=False))
            found.append(min(least, FOLDED) if i in self.folded else least)
        return found

    def _wanted(self, columns: Sequence[int]) -> list[int]:
        """Return the least widths, with room in the first column for the words of titles.

        Words longer than `FOLDED` do not count: where they have no room, they break.
        """
        first, *rest = self._least(columns)
        words = [word for line in self._lines if line.title for word in line.cells[0].plain.split()]
        return [max([first, *(n for n in map(_longest_word, words) if n <= FOLDED)]), *rest]

    def _widths(self, columns: Sequence[int], room: int) -> list[int]:
        """Return a width for each column: its texts', or down to its longest word's."""
        widths = self._least(columns)
        words = [max(map(_longest_word, self._texts(i, titles=False))) for i in columns]
        both = list(zip(columns, words, widths, strict=True))
        _shrink(widths, [word if i in self.left else width for i, word, width in both], room)
        _shrink(widths, words, room)  # numbers, too, come apart from their units
        _widen(widths, [_widest(self._texts(i)) for i in columns], room)
        return widths


def _shrink(widths: list[int], floors: Sequence[int], room: int) -> None:
    """Take from the widths, the widest first, until they fit or each is at its floor."""
    while sum(widths) > room:
        above = [i for i, floor in enumerate(floors) if widths[i] > floor]
        if not above:
            return
        widths[max(above, key=widths.__getitem__)] -= 1


def _widen(widths: list[int], wanted: Sequence[int], room: int) -> None:
    """Give the room that is left to columns that want more, first to the one that lacks most."""
    while sum(widths) < room:
        short = [wish - width for wish, width in zip(wanted, widths, strict=True)]
        if max(short) <= 0:
            return
        widths[short.index(max(short))] += 1


def _room(columns: Sequence[int], width: int) -> int:
    """Return how wide the texts of so many columns may be together."""
    return width - BETWEEN * (len(columns) - 1)


def _widest(texts: Iterable[str]) -> int:
    return max(Text(line).cell_len for text in texts for line in text.split("\n"))


def _longest_word(text: str) -> int:
    return max((Text(word).cell_len for word in text.split()), default=1)
