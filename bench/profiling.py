"""`jetfire bench --profile-run`: a run of each kernel for a profiler around the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetfire.bench.judgement import expect_right
from jetfire.core import terminal
from jetfire.core.errors import UsageError
from jetfire.core.terminal import note
from jetfire.measure.results import shape_text

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.measure.plan import Case
    from jetfire.measure.runner import Options

    Work = tuple[Case, Options]


def run_once(work: Sequence[Work], device: Device) -> None:
    """Check each kernel and run it once more, where a profiler around this process sees it.

    Raises:
        WrongResultError: one is wrong.
    """
    from jetfire.measure.once import OnceRunner, range_name

    runner = OnceRunner(device, {}, work[0][1], note)
    rows = [row for case, options in work for row in runner.measure(case, options)]
    right = [row for row in rows if row.ok]
    lines = [
        f"{row.op} {shape_text(row.problem, row.problem)}: {row.kernel} ran once"
        + (f", in NVTX range {range_name(row.op, row.label)!r}" if device.kind == "cuda" else "")
        for row in right
    ]
    terminal.result(
        {"device": device.label, "rows": [row.as_dict() for row in rows]},
        lambda: terminal.show("\n".join(lines)) if lines else None,
    )
    if not rows:
        raise UsageError("nothing was run: every problem was left out, for the reasons above")
    expect_right(rows)
