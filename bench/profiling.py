"""Profilers of `jetfire bench`: counters of what was timed, and a run for one from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jetfire.core import terminal
from jetfire.core.errors import UsageError, WrongResultError
from jetfire.core.terminal import note
from jetfire.measure import ncu
from jetfire.measure.results import Row, shape_text

if TYPE_CHECKING:
    from jetfire.bench.command import BenchOptions
    from jetfire.core.device import Device
    from jetfire.measure.plan import Case
    from jetfire.measure.runner import Options

    Work = tuple[Case, Options]


def check(asked: BenchOptions) -> None:
    """Refuse what can be refused before torch is loaded.

    Raises:
        UsageError: options say two things.
        NoDeviceError: there is no ncu, or no GPU is asked for.
    """
    if asked.profile_run:
        given = {
            "--profile": asked.profile,
            "-o": asked.output,
            "--plot": asked.plot,
            "--rounds": asked.rounds,
            "--suite": asked.suite,
        }
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"--profile-run: nothing is timed: leave out {name}")
    if asked.profile is not None:
        ncu.check(asked.device)


def counter(
    asked: BenchOptions, device: Device
) -> Callable[[Work, Sequence[Row]], list[Row]] | None:
    """Return what makes of rows those with counters; None where they are not asked for.

    Raises:
        NoDeviceError: they cannot be read, with the remedy.
    """
    if asked.profile is None:
        return None
    begun = ncu.Ncu.begun(device)

    def counted(work: Work, rows: Sequence[Row]) -> list[Row]:
        case, options = work
        return begun.rows(rows, case, options.seed, options.data, note)

    return counted


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
    if wrong := [row for row in rows if row.ok is False]:
        raise WrongResultError(f"{len(wrong)} of {len(rows)} rows are wrong: {wrong[0].error}")
