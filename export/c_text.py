"""C in lines of at most `WIDTH` columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 100


def capital(text: str) -> str:
    """Return a text with its first letter in upper case, and all others as they are."""
    return text[:1].upper() + text[1:]


def fields(values: Mapping[str, object]) -> str:
    """Names and values in prose: ``block=128, bias=false``."""
    return ", ".join(
        f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items()
    )


def hang(
    start: str, items: Sequence[str], end: str, indent: int = 0, joint: str = ", "
) -> list[str]:
    """A list between `start` and `end`, further lines hanging below the first item.

    Args:
        indent: that all lines will be given.
        joint: between items; a line may end after it.
    """
    lines = [start]
    for i, item in enumerate(items):
        piece = item + (end if i + 1 == len(items) else joint)
        if indent + len(lines[-1]) + len(piece.rstrip()) > WIDTH and i:
            lines[-1] = lines[-1].rstrip()
            lines.append(" " * len(start))
        lines[-1] += piece
    return lines


def unless(
    start: str, items: Sequence[str], end: str, result: str, indent: int, joint: str = ", "
) -> list[str]:
    """Write ``if (…) return result;`` of a condition that is a list as `hang` has it."""
    line = f"if ({start}{joint.join(items)}{end}) return {result};"
    if indent + len(line) <= WIDTH:
        return [line]
    return [*hang(f"if ({start}", items, f"{end}) {{", indent, joint), f"  return {result};", "}"]


def comment(text: str, further: str = "") -> list[str]:
    """Lines of a comment; `further` begins all but the first."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="// ",
        subsequent_indent=f"// {further}",
        break_long_words=False,
        break_on_hyphens=False,
    )
