"""A run for people: what it is, its steps as they go, and what it came to.

Steps are one live line on a terminal, else a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jetfire.core import terminal
from jetfire.report.text import plural, scaled, time_text

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.gpt2.training.log import Record
    from jetfire.gpt2.training.runs import Run
    from jetfire.gpt2.training.state import Trained

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


def announce(training: Trained, run: Run, device: Device) -> None:
    """Say what is trained, where and how."""
    one = run.settings
    million = sum(p.numel() for p in training.model.parameters()) / 1e6
    going = f"from step {training.done} " if training.done else ""
    where, how = device.label, list[str]()
    if one.parallel != "none":
        where, how = f"{training.group.world} × {where}", [one.parallel]
    if device.kind == "cuda":
        how.append("CUDA graph" if training.graphed else "no CUDA graph")
    if how:
        where += f" ({', '.join(how)})"
    terminal.note(
        f"{one.preset} ({million:.1f} M parameters), {one.recipe}, on {where}; "
        f"{training.tokens_per_step} tokens per step, {going}to step {one.steps}; in {run.folder}"
    )
    if training.peak is not None:
        terminal.note(
            f"MFU is of {training.peak.tflops:g} TFLOP/s in BF16 ({training.peak.source})"
        )


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


class RunSummary:
    """Passes a run's records on, and keeps what the summary needs of them."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.readers: list[Callable[[Record], None]] = []
        self.first: float | None = None
        self.records: dict[str, Record] = {}

    def __call__(self, record: Record) -> None:
        if record["kind"] == "step" and self.first is None:
            self.first = record["loss"]
        self.records[record["kind"]] = record
        for read in self.readers:
            read(record)

    def end(self, training: Trained) -> None:
        """Pass the last record on."""
        seconds = round(time.monotonic() - self.begin, 1)
        self({"kind": "end", "step": training.done, "best": training.best, "seconds": seconds})

    def show(self, run: Run) -> None:
        """Print the run's folder and settings, and the last record of each kind but `watch`."""
        one, end = run.settings, self.records["end"]
        moved = ""
        if "step" in self.records:
            moved = f"loss {self.first:.4f} → {self.records['step']['loss']:.4f}, "
        if end["best"] is not None:
            best = end["best"]
            moved += f"best validation loss {best['loss']:.4f} at step {best['step']}, "
        took = f"{plural(end['step'], 'step')}, {end['seconds']:.1f} s"
        text = f"{one.preset} {one.recipe}: {moved}{took}; {run.folder}"
        last = {kind: record for kind, record in self.records.items() if kind != "watch"}
        whole = {"run": run.folder, "settings": one.as_dict(), "last": last}
        terminal.result(whole, lambda: print(text))
