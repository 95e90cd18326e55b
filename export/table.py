"""A C table of what differs between problems; the rest is C where it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from jetfire.export.c_text import hang
from jetfire.export.signature import DIVISORS, Extent


@dataclass
class Column:
    """One field.

    Attributes:
        values: by row; rows without one never read it.
    """

    c_type: str
    about: str
    values: dict[int, int | str] = field(default_factory=dict)


class ProblemTable:
    """A row for each problem, which begins with its sizes.

    Args:
        sizes: of each problem, by dim.
    """

    def __init__(self, sizes: Sequence[dict[str, int]]) -> None:
        self.sizes = sizes
        self.columns: dict[str, Column] = {}

    def number(
        self, name: str, c_type: str, rows: Sequence[int], values: Sequence[int], about: str = ""
    ) -> str:
        """Write as C has it an integer that has these values in these rows.

        Returns:
            Itself, an expression of the sizes, or ``problem->name``.
        """
        if len(set(values)) == 1:
            return str(values[0])
        dims = self.sizes[0]
        tried = [Extent(dim) for dim in dims]
        tried += [Extent(dim, 1, divisor) for dim in dims for divisor in DIVISORS]
        for extent in tried:
            if all(extent.of(self.sizes[r]) == v for r, v in zip(rows, values, strict=True)):
                return extent.c()
        return self._field(name, c_type, rows, values, about)

    def choice(
        self, name: str, c_type: str, rows: Sequence[int], values: Sequence[str], about: str = ""
    ) -> str:
        """Write a C expression that has these values in these rows."""
        if len(set(values)) == 1:
            return values[0]
        return self._field(name, c_type, rows, values, about)

    def _field(
        self, name: str, c_type: str, rows: Sequence[int], values: Sequence[int | str], about: str
    ) -> str:
        wanted = dict(zip(rows, values, strict=True))
        unique, count = name, 1
        while not self._takes(unique, c_type, wanted):
            count += 1
            unique = f"{name}_{count}"
        column = self.columns.setdefault(unique, Column(c_type, about))
        column.values.update(wanted)
        return f"problem->{unique}"

    def _takes(self, name: str, c_type: str, wanted: dict[int, int | str]) -> bool:
        """Return whether a column may have that name and these values."""
        column = self.columns.get(name)
        if column is None:
            return name not in self.sizes[0]
        return column.c_type == c_type and all(
            column.values.get(row, value) == value for row, value in wanted.items()
        )

    @property
    def fields(self) -> Iterator[str]:
        """The columns as members of a struct."""
        alike = groupby(self.columns.items(), lambda item: (item[1].c_type, item[1].about))
        for (c_type, about), columns in alike:
            names = hang(f"{c_type} ", [name for name, _ in columns], ";", 2)
            if about:
                yield f"// {about[0].upper()}{about[1:]}."
            yield from names

    def row(self, i: int) -> list[str]:
        """A problem's initialiser, in lines."""
        fields = [f".{dim} = {size}" for dim, size in self.sizes[i].items()]
        fields += [f".{n} = {c.values[i]}" for n, c in self.columns.items() if i in c.values]
        return hang("{", fields, "},", 4)
