"""A Markdown table of the generated documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MarkdownTable:
    """A title, a line of explanation, the head and the rows of texts."""

    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.text, ""] if self.title else []
        lines.append("| " + " | ".join(self.head) + " |")
        lines.append("|" + "---|" + "---:|" * (len(self.head) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"
