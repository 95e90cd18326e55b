"""`jetfire tune`: every kernel of every problem searched, compared, and kept in a profile."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jetfire.core import profiles, registry, terminal
from jetfire.core.device import Device
from jetfire.core.errors import Interrupted, JetfireError, NoDeviceError, TimedOutError, UsageError
from jetfire.core.kernel import Kernel
from jetfire.core.launch import needs_another_device
from jetfire.measure import plan
from jetfire.measure.plan import Case
from jetfire.tuner import summary, unseen
from jetfire.tuner.display import SearchDisplay
from jetfire.tuner.options import EFFORTS, TuneOptions, check
from jetfire.tuner.recording import Recording
from jetfire.tuner.session import FinishedSearch, SearchTarget, Session, Stopped, is_current
from jetfire.tuner.space import Space
from jetfire.tuner.study import Study
from jetfire.tuner.trial import OBJECTIVES, Objective


def devices_of(text: str) -> list[Device]:
    """The devices to measure on: the one that is named, or all GPUs like the first."""
    first = Device.parse(text)
    if first.kind == "cpu" or ":" in text:
        return [first]
    import torch

    found = [Device.parse(f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [device for device in found if device.name == first.name]


def targets(asked: TuneOptions, device: Device) -> list[SearchTarget]:
    """Every kernel of every problem that has something to tune.

    None where the shard is empty, or where nothing is missing of what was to be tuned if it is.

    Raises:
        UsageError: there is none otherwise.
        NoDeviceError: there is none on this device, and one on another.
    """
    plan.check_kernels([case.op.name for case in asked.cases], asked.kernels)
    index, count = asked.shard
    pairs = [(case, k) for case in asked.cases[index::count] for k in _kernels(case, asked.kernels)]
    found = [_target(asked, case, kernel, device) for case, kernel in pairs]
    tunable = [target for target in found if isinstance(target, SearchTarget)]
    if pairs and not tunable:
        why = "; ".join(dict.fromkeys(str(reason) for reason in found))
        elsewhere = any(needs_another_device(k, case.problem, device) for case, k in pairs)
        kind = NoDeviceError if elsewhere else UsageError
        raise kind(f"no kernel to tune for these problems on {device.label}: {why}")
    if not asked.missing:
        return tunable
    return [t for t in tunable if not _is_tuned(t, device, asked.objective)]


def _target(asked: TuneOptions, case: Case, kernel: Kernel, device: Device) -> SearchTarget | str:
    """A kernel with what it may be tuned over, or why there is nothing."""
    default = kernel.default(case.problem, device)
    if reason := kernel.legal(case.problem, default, device):
        return f"{kernel.name}: {reason}"
    if not kernel.space(case.problem, device):
        return f"{kernel.name}: has nothing to tune"
    space = Space.of(kernel, case.problem, device, asked.space)
    if asked.space and space.whole and not space.pool:
        return f"{kernel.name}: no config within --space is legal"
    return SearchTarget(case, kernel, space)


def _unseen(asked: TuneOptions, device: Device) -> list[SearchTarget]:
    names = list(dict.fromkeys(case.op.name for case in asked.cases))
    drawn = unseen.draw(names, asked.unseen, asked.seed, device)
    return [
        SearchTarget(
            Case(registry.get(kernel.op), problem), kernel, Space.of(kernel, problem, device)
        )
        for kernel, problem in drawn
    ]


def _is_tuned(target: SearchTarget, device: Device, objective: str) -> bool:
    found = profiles.find(target.kernel, target.case.problem, device)
    return is_current(found, objective)


def _kernels(case: Case, names: Sequence[str]) -> list[Kernel]:
    known = registry.kernels(case.op.name)
    return [known[name] for name in dict.fromkeys(names or known) if name in known]


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, as batch systems send it, ends the command as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def tune(asked: TuneOptions) -> None:
    """Tune every kernel that takes each problem, and keep the winners in the user's profiles.

    Raises:
        JetfireError: nothing can be tuned, or the study or the profile cannot be written; with exit
            code 130 after Ctrl-C, when the best so far has been saved.
    """
    check(asked)
    objective: Objective = next(name for name in OBJECTIVES if name == asked.objective)
    devices = devices_of(asked.device)
    work = _unseen(asked, devices[0]) if asked.unseen else targets(asked, devices[0])
    if not work:
        terminal.note("nothing to tune: the shard is empty, or all has its profile already")
        return
    if asked.record is not None and len(work) > 1:
        raise UsageError(f"--record {asked.record}: it holds one search, and these are {len(work)}")
    if asked.dry_run:
        _dry_run(work, devices)
        return
    tuned: list[FinishedSearch] = []
    failed: list[JetfireError] = []
    stopped: BaseException | None = None
    with _terminated_as_interrupted(), SearchDisplay(objective, len(work)) as display:
        session = Session(asked, objective, devices, display)
        try:
            failed = _tune_all(session, work, tuned)
        except Stopped as error:
            tuned.append(error.tuned)
            stopped = error.__cause__
        except KeyboardInterrupt as error:
            stopped = error
        finally:
            session.runner.close()
    if tuned:
        summary.show([t.outcome for t in tuned], devices[0])
    _write_files(asked, tuned, session)
    if isinstance(stopped, KeyboardInterrupt):
        raise Interrupted(f"interrupted: {len(tuned)} of {len(work)} searches decided and saved")
    if stopped is not None:
        raise UsageError(str(stopped))
    if failed and len(work) > 1:
        text = f"{len(failed)} of {len(work)} searches failed, the first: {failed[0]}"
        failed[0].args = (text,)  # its details and its exit code stay
    if failed:
        raise failed[0]
    if session.untried and not tuned:
        raise TimedOutError(
            f"no config was tried within the budget: {session.untried} of {len(work)} searches are "
            "left; give a higher --budget"
        )


def _tune_all(
    session: Session, work: Sequence[SearchTarget], tuned: list[FinishedSearch]
) -> list[JetfireError]:
    """Each target in turn while there is time; those that fail are named."""
    failed: list[JetfireError] = []
    for i, target in enumerate(work):
        if session.runner.now() + session.final_s >= session.end:
            session.untried += len(work) - i
            session.display.note(
                f"the budget is spent: {len(work) - i} of {len(work)} searches "
                "are left; the same command goes on"
            )
            break
        try:
            if (done := session.tune(target, len(work) - i)) is not None:
                tuned.append(done)
        except JetfireError as error:
            if len(work) > 1:
                session.display.note(f"{target}: {error}")
            failed.append(error)
    return failed


def _dry_run(work: Sequence[SearchTarget], devices: Sequence[Device]) -> None:
    print(f"{devices[0].label}: {len(work)} searches")
    for target in work:
        space = target.space
        legal = f"{len(space.pool)} legal" if space.whole else "too many to count"
        print(f"{target}: {space.size} configs, {legal}")


def _write_files(asked: TuneOptions, tuned: Sequence[FinishedSearch], session: Session) -> None:
    if not session.studies:
        return
    if asked.report is not None:
        from jetfire.report import tuning
        from jetfire.tuner.digest import Digest

        tuning.write([Digest.of(study.optuna) for _, study in session.studies], asked.report)
    if asked.unseen:
        rows = unseen.rows(tuned)
        print(unseen.conclusion(rows))
        if asked.output is not None:
            device = session.studies[0][1].optuna.user_attrs["device"]
            unseen.write(rows, device, asked.seed, asked.output)
    if asked.record is not None:
        _recording(*session.studies[0]).save(asked.record)


def _recording(target: SearchTarget, study: Study) -> Recording:
    return Recording(
        target.kernel,
        target.case.problem,
        study.optuna.user_attrs["device"],
        target.space.fields,
        target.space.base,
        dict(study.finished()),
    )


def replay(file: Path, strategy: str, trials: int | None, seed: int) -> str:
    """What a strategy finds on a recorded space, in one line; no device is needed.

    Args:
        trials: by default 15% of the space, and no more than a full search has.

    Raises:
        UsageError: the file is no recording, or there is no such strategy.
    """
    from jetfire.report.text import significant
    from jetfire.tuner.replay import replayed

    recording = Recording.load(file)
    legal = len(recording.space().pool)
    usual = min(math.ceil(0.15 * legal), EFFORTS["full"].trials)
    found = replayed(recording, strategy, trials or usual, seed)
    best = recording.optimum_ms
    return (
        f"{recording.kernel.op}/{recording.kernel.name} {recording.problem}: {strategy} found "
        f"{significant(found.ms, 5)} ms after {found.trials} of {legal} configs, the optimum is "
        f"{significant(best, 5)} ms ({found.ms / best - 1:.1%} more)"
    )
