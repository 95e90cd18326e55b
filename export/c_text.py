"""C in lines of at most `WIDTH` columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from jetfire.core.problem import value_text

WIDTH = 100
_fill = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)


def capital(text: str) -> str:
    """Return a text with its first letter in upper case, and all others as they are."""
    return text[:1].upper() + text[1:]


def fields(values: Mapping[str, object]) -> str:
    """Names and values in prose: ``block=128, bias=false``."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in values.items())


def hang(start: str, items: Sequence[str], end: str) -> str:
    """A list between `start` and `end`, further lines hanging below the first item."""
    text = ", ".join(item.replace(" ", "\0") for item in items) + end
    found = _fill(text, initial_indent=start, subsequent_indent=" " * len(start))
    return found.replace("\0", " ")


def comment(text: str) -> str:
    """Prose as a comment."""
    return _fill(text, initial_indent="// ", subsequent_indent="// ")
