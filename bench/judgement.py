"""The judgement of a bench: whether every row is right."""

from __future__ import annotations

from collections.abc import Sequence

from jetfire.core.errors import WrongResultError
from jetfire.measure.results import Row


def expect_right(rows: Sequence[Row]) -> None:
    """Raise a WrongResultError that counts the wrong rows and says what is wrong with the first."""
    wrong = [row for row in rows if row.ok is False]
    if not wrong:
        return
    from jetfire.report.text import plural

    are = "is" if len(wrong) == 1 else "are"
    what = f"{len(wrong)} of {plural(len(rows), 'row')} {are} wrong"
    raise WrongResultError(f"{what}: {wrong[0].error}")
