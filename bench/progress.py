"""How far a run is, on stderr: a bar on a terminal, a line per problem elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from jetfire.core import terminal

T = TypeVar("T")


def watch(
    items: Sequence[T], label: Callable[[T], object] = str, pause_s: float = 0.0
) -> Iterator[T]:
    """Yield the items, each announced before it is worked on.

    Args:
        pause_s: seconds between two lines at least, where there is no bar.
    """
    if not sys.stderr.isatty():
        last = -math.inf
        for i, item in enumerate(items, 1):
            if time.monotonic() - last >= pause_s:
                terminal.progress(f"[{i}/{len(items)}] {terminal.line(str(label(item)))}")
                last = time.monotonic()
            yield item
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        MofNCompleteColumn(),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=terminal.console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=terminal.visible(str(label(item))))
            yield item
            progress.advance(task)
