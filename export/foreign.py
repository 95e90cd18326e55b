"""Text that a stranger may have chosen, such as a profile's: generated files get it escaped."""

from __future__ import annotations

import re
from dataclasses import dataclass

_QUOTED = '\\"'
_MARKDOWN = re.compile(r"([\\`*_\[\]{}<>|&~$!#])")


@dataclass(frozen=True)
class Foreign:
    """Text that no template and no f-string prints as it is: it has no `str`."""

    text: str

    def __str__(self) -> str:
        raise TypeError(f"{self!r} is printed without being escaped")

    def comment(self) -> str:
        r"""Return it for a comment of C, C++ or Python.

        It is one line, which neither a ``\``, a trigraph nor a ``*/`` ends or goes on.
        """
        return _escaped(self.text, r"\?*")

    def python(self) -> str:
        """Return a literal of Python that has this value."""
        return f'"{_escaped(self.text, _QUOTED)}"'

    def markdown(self) -> str:
        """Return it for a paragraph or a table's cell of Markdown."""
        return _MARKDOWN.sub(r"\\\1", _escaped(self.text, ""))


def _escaped(text: str, characters: str) -> str:
    """Return text with escapes of Python for some characters, and for all that do not print."""
    return "".join(_escape(ord(c)) if c in characters or not c.isprintable() else c for c in text)


def _escape(code: int) -> str:
    letter, digits = ("x", 2) if code < 1 << 8 else ("u", 4) if code < 1 << 16 else ("U", 8)
    return f"\\{letter}{code:0{digits}x}"
