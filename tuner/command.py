"""`jetfire tune`: every kernel of every problem searched, compared, and kept in a profile."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetfire import ops
from jetfire.bench import command as bench_command
from jetfire.bench import peaks
from jetfire.bench.nvml import Nvml
from jetfire.bench.plan import Case
from jetfire.bench.results import check_writable
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireError, UsageError, WrongResultError
from jetfire.ops.op import Config, Kernel
from jetfire.ops.profiles import Entry, Found
from jetfire.tuner import summary
from jetfire.tuner.device import DeviceRunner
from jetfire.tuner.display import Display
from jetfire.tuner.final import Final, decide
from jetfire.tuner.measure import Job
from jetfire.tuner.recording import Recording
from jetfire.tuner.search import Limits, search
from jetfire.tuner.space import Point, Space
from jetfire.tuner.strategies import strategy_of
from jetfire.tuner.study import Identity, StorageError, Study
from jetfire.tuner.trial import OBJECTIVES, Objective

NEAREST = 3  # configs of neighbouring problems' profiles that are tried first
# Seconds that the final comparison takes at first guess, and that a search gets at least: of many
# searches and little time the first are done well, and the others left.
FINAL_S, LEAST_S = 3.0, 2.0


@dataclass(frozen=True)
class Effort:
    """How much is worth spending on a search.

    Attributes:
        trials: configs.
        finalists: those that are measured again.
        rounds_s: seconds of the final comparison's rounds.
    """

    trials: int
    finalists: int
    rounds_s: float


EFFORTS = {"quick": Effort(40, 3, 4.0), "full": Effort(250, 6, 20.0)}


@dataclass(frozen=True)
class Asked:
    """The options as they were given."""

    cases: Sequence[Case]
    kernels: Sequence[str]
    device: str
    budget_s: float
    trials: int | None = None
    effort: str = "quick"
    strategy: str = "tpe"
    objective: str = "time"
    seed: int = 0
    data: str = "normal"
    space: Mapping[str, Sequence[str]] = field(default_factory=dict)
    storage: str | None = None
    trial_s: float = 30.0
    peers: Sequence[str] | None = None
    report: Path | None = None
    record: Path | None = None
    missing: bool = False
    shard: tuple[int, int] = (0, 1)
    dry_run: bool = False


@dataclass(frozen=True)
class Target:
    """One kernel at one problem, and what it may be tuned over."""

    case: Case
    kernel: Kernel
    space: Space

    def __str__(self) -> str:
        return f"{self.case.op.name}/{self.kernel.name} {self.case.problem}"


@dataclass(frozen=True)
class Tuned:
    """A search that has come to its end."""

    target: Target
    final: Final
    study: Study
    saved: Path | None

    @property
    def outcome(self) -> summary.Outcome:
        """It as the summary shows it."""
        target = self.target
        return summary.Outcome(
            target.kernel, target.case.problem, target.space.base, self.final,
            self.study.finished(), self.saved is not None,
        )  # fmt: skip


class Interrupted(JetfireError):
    """Ctrl-C, after what was found has been shown and saved."""

    exit_code = 130


def devices_of(text: str) -> list[Device]:
    """The devices to measure on: the one that is named, or all GPUs like the first."""
    first = Device.parse(text)
    if first.kind == "cpu" or ":" in text:
        return [first]
    import torch

    found = [Device.parse(f"cuda:{i}") for i in range(torch.cuda.device_count())]
    return [device for device in found if device.name == first.name]


def targets(asked: Asked, device: Device) -> list[Target]:
    """Every kernel of every problem that has something to tune.

    Raises:
        UsageError: there is none.
    """
    found: list[Target] = []
    reasons: list[str] = []
    _check_kernels(asked.cases, asked.kernels)
    index, count = asked.shard
    for case in asked.cases[index::count]:
        for kernel in _kernels(case, asked.kernels):
            default = kernel.default(case.problem, device)
            if reason := kernel.legal(case.problem, default, device):
                reasons.append(f"{kernel.name}: {reason}")
            elif not kernel.space(case.problem, device):
                reasons.append(f"{kernel.name}: has nothing to tune")
            elif asked.missing and _is_tuned(kernel, case.problem, device):
                reasons.append(f"{kernel.name}: is tuned for them already")
            else:
                space = Space.of(kernel, case.problem, device, asked.space)
                found.append(Target(case, kernel, space))
    if not found:
        why = "; ".join(dict.fromkeys(reasons))
        raise UsageError(f"no kernel to tune for these problems on {device.label}: {why}")
    return found


def _is_tuned(kernel: Kernel, problem: Any, device: Device) -> bool:
    found = profiles.find(kernel, problem, device)
    return found.source == "tuned" and not found.stale


def _kernels(case: Case, names: Sequence[str]) -> list[Kernel]:
    known = ops.kernels(case.op.name)
    return [known[name] for name in names or known if name in known]


def _check_kernels(cases: Sequence[Case], names: Sequence[str]) -> None:
    known = {name for op in {case.op.name for case in cases} for name in ops.kernels(op)}
    for name in names:
        if name not in known:
            raise UsageError(f"no kernel {name!r}: expected one of {', '.join(sorted(known))}")


class Session:
    """The devices, the display and the limits that all the searches of one command share."""

    def __init__(
        self, asked: Asked, objective: Objective, devices: Sequence[Device], display: Display
    ) -> None:
        self.asked, self.objective = asked, objective
        self.device, self.display = devices[0], display
        self.effort = EFFORTS[asked.effort]
        self.trials = asked.trials or self.effort.trials
        self.runner = DeviceRunner(devices, asked.trial_s)
        self.end = self.runner.now() + asked.budget_s
        self.final_s = FINAL_S
        nvml = Nvml.open(self.device.torch_device)
        self.driver = nvml.driver() if nvml else None
        if objective != "time" and (nvml is None or nvml.joules() is None):
            raise UsageError(
                f"--objective {asked.objective}: {self.device.label} has no energy counter to read"
            )
        self.peaks = peaks.cached(self.device, self.driver)

    def study(self, target: Target, first: Sequence[Point]) -> Study:
        """The target's study, described for whoever reads it."""
        asked, problem = self.asked, target.case.problem
        name = asked.strategy
        if name == "tpe" and target.space.whole and len(target.space.pool) <= self.trials:
            name = "exhaustive"
        identity = Identity(
            target.kernel, problem, self.device, target.space, self.objective, asked.data
        )
        record = bench_command.device_record(self.device, dict(self.peaks), self.driver)
        attributes = {
            "op": target.case.op.name, "kernel": target.kernel.name, "problem": problem.as_dict(),
            "device": record, "default": target.space.base.as_dict(),
            "objective": self.objective, "strategy": name, "seed": asked.seed,
            "space": {field: list(v) for field, v in target.space.fields.items()},
            "source": target.kernel.source_hash(), "peaks": dict(self.peaks),
            "flops": target.case.op.flops(problem), "bytes": target.case.op.bytes(problem),
        }  # fmt: skip
        strategy = strategy_of(name, target.space, asked.seed, first)
        return Study(identity, strategy, asked.storage, self.display.note, attributes)

    def tune(self, target: Target, searches_left: int) -> Tuned | None:
        """Search one target with its share of the time left, decide, save.

        Returns:
            None where an earlier run has done it all, or there was no time for a single config.

        Raises:
            KeyboardInterrupt: after the best so far has been saved.
        """
        found = profiles.find(target.kernel, target.case.problem, self.device)
        study = self.study(target, self._first(target, found))
        if self._done(study, found.source == "tuned" and not found.stale):
            return None
        asked = self.asked
        now = self.runner.now()
        share = max(LEAST_S, (self.end - now) / searches_left - self.final_s)
        share = min(share, max(0.0, self.end - now - self.final_s))
        self.display.begin(str(target), self.trials, share, study.finished())
        self.runner.begin(Job(target.case.op, target.kernel, target.case.problem, asked.seed,
                              asked.data, self.objective != "time", asked.peers))  # fmt: skip
        stopped: BaseException | None = None
        try:
            search(study, self.runner, Limits(self.trials, now + share), self.display.trial)
        except (KeyboardInterrupt, StorageError) as error:
            self.display.note(f"{str(error) or 'interrupted'}: keeping the best so far")
            stopped = error
        if not study.finished():
            if stopped is not None:
                raise stopped
            self.display.note(f"{target}: no config was tried in {share:.0f} s: nothing is saved")
            return None
        tuned = self._finish(target, study, found)
        if stopped is not None:
            raise Stopped(tuned) from stopped
        return tuned

    def _first(self, target: Target, found: Found) -> list[Point]:
        """The default, the profile's config, and those of the nearest problems."""
        near = profiles.nearest(target.kernel, target.case.problem, self.device, NEAREST)
        configs = [target.space.base.as_dict(), found.config.as_dict(), *(e.config for e in near)]
        points = [target.space.point(config) for config in configs]
        return [p for p in dict.fromkeys(points) if p is not None and target.space.legal(p)]

    def _done(self, study: Study, fresh: bool) -> bool:
        tried = len(study.finished())
        if not (fresh and "final" in study.optuna.user_attrs and tried >= self.trials):
            return False
        self.display.index += 1
        self.display.note(f"{study.identity.name}: tuned already, {tried} trials: "
                          "a higher --trials goes on")  # fmt: skip
        return True

    def _finish(self, target: Target, study: Study, found: Found) -> Tuned:
        begin, tuned = self.runner.now(), found.source == "tuned"
        rounds_s = min(self.effort.rounds_s, max(1.0, self.end - begin))
        final = decide(
            self.runner, study.best(self.effort.finalists), target.space.base, found.config, tuned,
            self.objective, rounds_s,
            {config: m.message for config, m in study.finished() if not m.measured},
        )  # fmt: skip
        self.final_s = self.runner.now() - begin
        for config, reason in final.failed.items():
            self.display.note(f"{target}: left out of the final comparison: {config}: {reason}")
        saved = None
        if not (final.kept and tuned and not found.stale):
            saved = self._save(target, study, final)
        study.conclude(final.as_dict())
        return Tuned(target, final, study, saved)

    def _save(self, target: Target, study: Study, final: Final) -> Path:
        timing = final.timing
        default = final.default or final.timing
        entry = Entry(
            kernel=target.kernel.name, problem=target.case.problem.as_dict(),
            config=final.config.as_dict(), ms=timing.ms, ms_p20=timing.ms_p20,
            ms_p80=timing.ms_p80, samples=timing.samples, default_ms=default.ms,
            joules=timing.joules, objective=self.objective, vs_peer=final.vs_peer,
            trials=len(study.finished()), strategy=str(study.optuna.user_attrs["strategy"]),
            provenance=profiles.provenance(target.kernel, self.device, self.driver),
        )  # fmt: skip
        return profiles.save(profiles.user_folder(), self.device, target.case.op.name, [entry])


class Stopped(Exception):
    """A search that was cut short, and what it found."""

    def __init__(self, tuned: Tuned) -> None:
        super().__init__()
        self.tuned = tuned


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


def tune(asked: Asked) -> None:
    """Tune every kernel that takes each problem, and keep the winners in the user's profiles.

    Raises:
        JetfireError: nothing can be tuned, or the study or the profile cannot be written; with exit
            code 130 after Ctrl-C, when the best so far has been saved.
    """
    objective = _check(asked)
    devices = devices_of(asked.device)
    work = targets(asked, devices[0])
    if asked.dry_run:
        _dry_run(work, devices)
        return
    tuned: list[Tuned] = []
    wrong: list[JetfireError] = []
    stopped: BaseException | None = None
    with _terminated_as_interrupted(), Display(objective, len(work)) as display:
        session = Session(asked, objective, devices, display)
        try:
            session.runner.start()
            wrong = _tune_all(session, work, tuned)
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
    if wrong:
        raise wrong[0]


def _tune_all(session: Session, work: Sequence[Target], tuned: list[Tuned]) -> list[JetfireError]:
    """Each target in turn while there is time; those of which nothing is right are named."""
    wrong: list[JetfireError] = []
    for i, target in enumerate(work):
        if session.runner.now() + session.final_s >= session.end:
            session.display.note(f"the budget is spent: {len(work) - i} of {len(work)} searches "
                                 "are left; the same command goes on")  # fmt: skip
            break
        try:
            if (done := session.tune(target, len(work) - i)) is not None:
                tuned.append(done)
        except WrongResultError as error:
            session.display.note(f"{target}: {error}")
            wrong.append(WrongResultError(f"{target}: {error}"))
    return wrong


def _check(asked: Asked) -> Objective:
    """The objective; whatever can be refused before a device is touched is."""
    from jetfire.ops.data import DISTRIBUTIONS

    if asked.data not in DISTRIBUTIONS:
        raise UsageError(f"--data {asked.data}: expected one of {', '.join(DISTRIBUTIONS)}")
    if asked.effort not in EFFORTS:
        raise UsageError(f"--effort {asked.effort}: expected {' or '.join(EFFORTS)}")
    strategy_of(asked.strategy, Space({}, Config(), lambda _: None), 0, ())
    for file in (asked.report, asked.record):
        if file is not None:
            check_writable(file)
    for objective in OBJECTIVES:
        if objective == asked.objective:
            return objective
    raise UsageError(f"--objective {asked.objective}: expected {', '.join(OBJECTIVES)}")


def _dry_run(work: Sequence[Target], devices: Sequence[Device]) -> None:
    print(f"{devices[0].label}: {len(work)} searches")
    for target in work:
        space = target.space
        legal = f"{len(space.pool)} legal" if space.whole else "too many to count"
        print(f"{target}: {space.size} configs, {legal}")


def _write_files(asked: Asked, tuned: Sequence[Tuned], session: Session) -> None:
    if asked.report is not None:
        from jetfire.tuner import report

        report.write_all([t.study.optuna for t in tuned], asked.report)
    if asked.record is not None:
        if len(tuned) > 1:
            session.display.note(f"--record {asked.record}: only the first search is recorded")
        _recording(tuned[0]).save(asked.record)


def _recording(tuned: Tuned) -> Recording:
    study, target = tuned.study, tuned.target
    return Recording(
        target.kernel, target.case.problem, study.optuna.user_attrs["device"],
        target.space.fields, target.space.base, dict(study.finished()),
    )  # fmt: skip


def replay(file: Path, strategy: str, trials: int | None, seed: int) -> str:
    """What a strategy finds on a recorded space, in one line; no device is needed.

    Raises:
        UsageError: the file is no recording, or there is no such strategy.
    """
    from jetfire.tuner.replay import replayed

    recording = Recording.load(file)
    legal = len(recording.space().pool)
    found = replayed(recording, strategy, trials or max(1, math.ceil(0.15 * legal)), seed)
    return (
        f"{recording.kernel.op}/{recording.kernel.name} {recording.problem}: {strategy} found "
        f"{found.ms:.5g} ms after {found.trials} of {legal} configs, the optimum is "
        f"{recording.optimum_ms:.5g} ms ({found.ms / recording.optimum_ms - 1:.1%} more)"
    )
