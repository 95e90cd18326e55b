"""Few of many combinations of parameters, in which every two values still meet."""

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairs(cases: Iterable[Case]) -> list[Case]:
    """Choose cases in which any two values of two parameters meet that meet in any case.

    Args:
        cases: each a value of every parameter, in one order.
    """
    cases = list(dict.fromkeys(cases))
    meets = [set(combinations(enumerate(case), 2)) for case in cases]
    left = set().union(*meets)
    chosen = set()
    while left:
        best = max(range(len(cases)), key=lambda i: len(meets[i] & left))
        chosen.add(best)
        left -= meets[best]
    return [case for i, case in enumerate(cases) if i in chosen]
