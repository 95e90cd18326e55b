"""`jetfire tune`: every kernel of every problem searched, compared, and kept in a profile."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jetfire.core import registry, terminal
from jetfire.core.device import Device
from jetfire.core.errors import Interrupted, NoDeviceError, TimedOutError, UsageError, unknown
from jetfire.core.files import write
from jetfire.core.kernel import Kernel
from jetfire.core.launch import needs_another_device
from jetfire.measure.ncu import Ncu
from jetfire.measure.plan import Case
from jetfire.report.text import plural, significant
from jetfire.tuner import display, unseen
from jetfire.tuner.device import DeviceRunner
from jetfire.tuner.display import SearchDisplay
from jetfire.tuner.options import EFFORTS, TuneOptions
from jetfire.tuner.recording import Recording, replayed
from jetfire.tuner.search import FinishedSearch, SearchTarget
from jetfire.tuner.session import Session, is_current
from jetfire.tuner.space import Space

SEARCHES = ("search", "searches")
Give = Callable[[Sequence[FinishedSearch], Device, str], None]


def targets(asked: TuneOptions, device: Device) -> list[SearchTarget]:
    """Return every kernel of every problem that has something to tune.

    The list is empty where the shard has no problem, or where only what is missing is asked for and
    all of it has a current profile.

    Raises:
        UsageError: nothing can be tuned for any other reason.
        NoDeviceError: there is none on this device, and one on another.
    """
    index, count = asked.shard
    pairs = []
    for case in asked.cases[index::count]:
        known = registry.kernels(case.op.name)
        pairs += [(case, known[name]) for name in asked.kernels or known if name in known]
    found = [_target(asked, case, kernel, device) for case, kernel in dict.fromkeys(pairs)]
    tunable = [target for target in found if isinstance(target, SearchTarget)]
    if pairs and not tunable:
        _check_space(asked, pairs, device)
        why = "; ".join(dict.fromkeys(str(reason) for reason in found))
        elsewhere = any(needs_another_device(k, case.problem, device) for case, k in pairs)
        kind = NoDeviceError if elsewhere else UsageError
        raise kind(f"no kernel to tune for these problems on {device.label}: {why}")
    if not asked.missing:
        return tunable
    return [target for target in tunable if not is_current(target.found(device), asked.objective)]


def _check_space(asked: TuneOptions, pairs: Sequence[tuple[Case, Kernel]], device: Device) -> None:
    """Refuse a field of --space that no kernel searches, be it one that runs here or not.

    Raises:
        UsageError: the message lists the fields that they search.
    """
    fields = dict.fromkeys(n for case, kernel in pairs for n in kernel.space(case.problem, device))
    for name in asked.space:
        if fields and name not in fields:
            raise unknown(f"--space {name}: no kernel searches it", name, fields)


def _target(asked: TuneOptions, case: Case, kernel: Kernel, device: Device) -> SearchTarget | str:
    """Return a kernel with what it may be tuned over, or why there is nothing."""
    default = kernel.default(case.problem, device)
    if reason := kernel.legal(case.problem, default, device):
        return f"{kernel.name}: {reason}"
    if not kernel.space(case.problem, device):
        return f"{kernel.name}: has nothing to tune"
    space = Space.of(kernel, case.problem, device, asked.space)
    if asked.space and space.whole and not space.pool:
        why = space.reason(space.config((0,) * len(space.fields)))
        return f"{kernel.name}: no config within --space is legal (the first: {why})"
    return SearchTarget(case, kernel, space)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Have SIGTERM, as batch systems send it, end the command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def tune(asked: TuneOptions, give: Give = display.show) -> None:
    """Tune every kernel that takes each problem, and keep the winners in the user's profiles.

    Args:
        give: shows what the searches came to, or keeps it to be shown with others'.

    Raises:
        JetfireError: nothing can be tuned, or the study or the profile cannot be written; with exit
            code 130 after Ctrl-C, when the best so far has been saved.
    """
    first = Device.parse(asked.device)
    devices = [first] if ":" in asked.device else first.alike()
    work = unseen.targets(asked, first) if asked.unseen else targets(asked, first)
    if not work:
        terminal.note("nothing to tune: the shard is empty, or all has its profile already")
        give([], first, asked.format)
        return
    if asked.record is not None and len(work) > 1:
        raise UsageError(f"--record {asked.record}: it holds one search, and these are {len(work)}")
    if asked.dry_run:
        lines = [f"{first.label}: {plural(len(work), *SEARCHES)}"]
        for target in work:
            space = target.space
            legal = f"{len(space.pool)} legal" if space.whole else "too many to count"
            lines.append(f"{target}: {plural(space.size, 'config')}, {legal}")
        terminal.planned(lines)
        return
    profiler = None if asked.profile is None else Ncu.begun(first)
    with _terminated_as_interrupted(), SearchDisplay(asked.objective, len(work)) as shown:
        runner = DeviceRunner(devices, asked.trial_s)
        session = Session(asked, first, runner, work, shown)
        session.run(profiler)
    give(session.tuned, first, asked.format)
    if session.counted:
        display.show_counted(session.counted)
    if session.searches:
        for file, content in _contents(asked, session):
            write(file, content)
    _judge(session)


def _judge(session: Session) -> None:
    """Raise what a session ends with, where that is not well."""
    failed, stopped, count = session.failed, session.stopped, len(session.work)
    if isinstance(stopped, KeyboardInterrupt):
        done = len(session.tuned)
        raise Interrupted(f"interrupted: {done} of {plural(count, *SEARCHES)} decided and saved")
    if stopped is not None:
        raise UsageError(str(stopped))
    if failed:
        if count > 1:
            text = f"{len(failed)} of {plural(count, *SEARCHES)} failed, the first: {failed[0]}"
            failed[0].args = (text,)  # its details and its exit code stay
        raise failed[0]
    if session.untried and not session.tuned:
        raise TimedOutError(
            f"no config was tried within the budget: {session.untried} of "
            f"{plural(count, *SEARCHES)} left; give a higher --budget"
        )


def _contents(asked: TuneOptions, session: Session) -> Iterator[tuple[Path, bytes | str]]:
    """Yield the files that were asked for and what they hold; of lookups, say how near they are."""
    first = session.searches[0]
    device = first.study.optuna.user_attrs["device"]
    if asked.unseen:
        rows = unseen.rows(session.tuned)
        said = unseen.conclusion(rows)
        say = print if asked.format == "table" else terminal.progress  # stdout has the searches
        terminal.result({"lookups": rows, "conclusion": said}, lambda: say(said))
        if asked.output is not None:
            yield asked.output, unseen.render(rows, device, asked.seed)
    if asked.record is not None:
        target, space = first.target, first.target.space
        recording = Recording(
            target.kernel,
            target.case.problem,
            device,
            space.fields,
            space.base,
            dict(first.trials),
        )
        yield asked.record, recording.render(asked.record)
    if asked.report is not None:
        from jetfire.report import tuning
        from jetfire.tuner.saved_study import SavedStudy

        studies = [SavedStudy.of(one.study.optuna) for one in session.searches]
        yield asked.report, tuning.render(studies)


def replay(
    file: Path, strategy: str, trials: int | None, seed: int, record: Path | None = None
) -> str:
    """Show in one line what a strategy finds on a recorded space; no device is needed.

    Args:
        file: a recording, or another tuner's table.
        trials: by default 15% of the space, and no more than a full search has.
        record: where the recording is written too, in that name's format.

    Raises:
        UsageError: the file is no recording, `record` cannot be written, or there is no such
            strategy.
    """
    recording = Recording.load(file)
    if record is not None:
        write(record, recording.render(record))
    legal = len(recording.space().pool)
    usual = min(math.ceil(0.15 * legal), EFFORTS["full"].trials)
    found = replayed(recording, strategy, trials or usual, seed)
    best, ms = recording.optimum_ms, found.final.timing.ms
    return (
        f"{recording.title}: {strategy} found "
        f"{significant(ms, 5)} ms after {found.trials} of {legal} configs, the optimum is "
        f"{significant(best, 5)} ms ({ms / best - 1:.1%} more)"
    )
