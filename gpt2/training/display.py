"""A run on stderr as it goes: one live line on a terminal, else a line now and then."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jetfire.core import terminal
from jetfire.report.text import scaled, time_text

Record = dict[str, Any]
TOKENS = (("M tokens/s", 1e6), ("k tokens/s", 1e3), ("tokens/s", 1.0))
# Seconds between lines where there is no terminal.
_PAUSE = 2.0


def step_text(record: Record, short: bool = False) -> str:
    """A step's figures in a line; short fits a terminal beside the bar."""
    parts = [f"loss {record['loss']:.4f}"]
    if not short:
        parts += [f"norm {record['norm']:.2f}", f"rate {record['rate']:.2e}"]
    parts += [time_text(record["ms"]), scaled(record["tokens_per_s"], TOKENS)]
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record["peak_gib"] is not None:
        parts.append(f"{record['peak_gib']:.1f} GiB")
    return "  ".join(parts)


def worst_text(worst: Record) -> str:
    """Return ``lowest SQNR 21.3 dB: gradient of blocks.11.contract``."""
    sqnr = "not finite" if worst["sqnr"] is None else f"{worst['sqnr']:.1f} dB"
    return f"lowest SQNR {sqnr}: {worst['kind']} of {worst['layer']}"


class TrainingDisplay(ExitStack):
    """Shows the log's records.

    Args:
        begin, end: the step after which the run goes on, and its last.
    """

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.end, self._said = end, -_PAUSE
        self._progress: Progress | None = None
        console = terminal.console(stderr=True)
        if console.is_terminal:
            columns = (
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(12),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", markup=False),
            )
            self._progress = self.enter_context(
                Progress(*columns, console=console, transient=True, refresh_per_second=4)
            )
            self._task = self._progress.add_task("", total=end, completed=begin)

    def show(self, record: Record) -> None:
        if record["kind"] == "evaluation":
            self._line(f"step {record['step']:6d}  validation loss {record['loss']:.4f}")
        elif record["kind"] == "watch":
            self._line(f"step {record['step']:6d}  {worst_text(record['worst'])}")
        elif record["kind"] == "step" and self._progress is not None:
            self._progress.update(
                self._task, completed=record["step"], description=step_text(record, short=True)
            )
        elif record["kind"] == "step":
            now = time.monotonic()
            if now - self._said >= _PAUSE or record["step"] == self.end:
                self._said = now
                self._line(f"step {record['step']:6d}  {step_text(record)}")

    def _line(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text)
        else:
            terminal.progress(text)
