"""`jetfire train study`: recipes × seeds, each an ordinary run in a folder of the study's.

Each run is `jetfire train` in a process of its own, one at a time on each GPU. All that is known of
a study is in its runs' logs: whatever ended it, the same command goes on.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jetfire.core import files, processes, terminal
from jetfire.core.errors import Interrupted, JetfireError, NoDeviceError, UsageError
from jetfire.core.terminal import note
from jetfire.gpt2.data import prepare, prepared
from jetfire.gpt2.training import arms, log, options, study_record
from jetfire.gpt2.training.arms import Arm
from jetfire.gpt2.training.options import TrainOptions
from jetfire.gpt2.training.settings import SETTINGS, Settings, split
from jetfire.gpt2.training.stop import Stop
from jetfire.gpt2.training.study_record import StudyRecord, StudyRun
from jetfire.report import output
from jetfire.report import study as report
from jetfire.report.text import plural

RECORD = "study.json"
_NAME = re.compile(r"(.+)-seed([0-9]{1,19})")
_STEP_S, _POLL_S = 20.0, 0.1  # between a run's lines on steps; between looks at the children


@dataclass(frozen=True)
class StudyOptions:
    """The options of `jetfire train study` as they were given.

    Attributes:
        recipes: as `Arm.parse` reads them.
        base: so, too; None for bf16, which another command may train.
        jobs: runs at a time; None for one on each GPU.
        record: the file of the result; None for RECORD in the folder.
        window: the first and last step whose training losses count; None for the last fifth.
    """

    preset: str
    output: Path
    recipes: Sequence[str] = ("bf16", "int8")
    seeds: Sequence[int] = (0,)
    settings: Sequence[str] = ()
    steps: int | None = None
    data: str | None = None
    device: str = "auto"
    jobs: int | None = None
    base: str | None = None
    window: str | None = None
    record: Path | None = None
    strict_profile: bool = False
    format: str = "table"

    @property
    def file(self) -> Path:
        """Where the result is written."""
        return self.record or self.output / RECORD

    @property
    def baseline(self) -> Arm:
        """What others are compared with."""
        return Arm.parse(self.base or "bf16", "--base")

    @property
    def pairs(self) -> list[tuple[Arm, int]]:
        """Arms and seeds, in the order of running: what is compared ends together."""
        found = dict.fromkeys(Arm.parse(text, "--recipe") for text in self.recipes)
        return [(arm, seed) for seed in self.seeds for arm in found]

    def run(self, arm: Arm, seed: int) -> TrainOptions:
        """Return the options of one run; its tokens are fresh ones unless told otherwise."""
        settings = {"order": "shuffled", **split(self.settings), **arm.settings}
        return TrainOptions(
            preset=self.preset,
            recipe=arm.recipe,
            settings=[f"{name}={value}" for name, value in settings.items()],
            steps=self.steps,
            data=self.data,
            output=self.output / name_of(arm, seed),
            device=self.device,
            seed=seed,
        )

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Return the words of `jetfire train` that begin a run."""
        one = self.run(arm, seed)
        words = [self.preset, "--recipe", arm.recipe, "--seed", str(seed)]
        words += [word for text in one.settings for word in ("--set", text)]
        words += [] if self.steps is None else ["--steps", str(self.steps)]
        return words + ([] if self.data is None else ["--data", self.data])

    def bounds(self, steps: int) -> tuple[int, int]:
        """Return the window's first and last step."""
        if self.window is None:
            return study_record.usual_window(steps)
        found = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", self.window)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= first <= last <= steps:
            raise UsageError(
                f"--window {self.window}: expected FIRST:LAST, two steps from 1 to {steps}"
            )
        return first, last


def name_of(arm: Arm, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{arm.name}-seed{seed}"


def check(asked: StudyOptions) -> None:
    """Refuse what can be refused without a look into the study's folder."""
    for name, option in (("recipe", "--recipe"), ("seed", "--seed"), ("parallel", "one GPU a run")):
        if name in split(asked.settings):
            raise UsageError(f"--set {name}=…: expected {option}")
    base, first = asked.baseline, asked.pairs[0]
    if asked.output.exists() and not asked.output.is_dir():
        raise UsageError(f"-o {asked.output}: expected a folder")
    if (asked.output / SETTINGS).exists():
        raise UsageError(f"-o {asked.output}: holds a run: name another folder")
    for arm in dict.fromkeys(arm for arm, _ in asked.pairs):
        options.request_of(asked.run(arm, asked.seeds[0]))
    settings = asked.run(*first).begun()
    window = asked.bounds(settings.steps)
    files.check_output("--record", asked.record, ".json")
    recorded: Collection[str] = ()
    if asked.record is not None and asked.record.exists():
        earlier = study_record.read(asked.record)
        common = study_record.unnamed(settings.as_dict(), first[0])
        study_record.check_goes_on(common, asked.preset, window, base.name, earlier, asked.record)
        recorded = earlier["recipes"]
    _check_base(asked, recorded)


def _check_base(asked: StudyOptions, recorded: Collection[str]) -> None:
    """Refuse a base that was named where there would be no run of it to compare with.

    Args:
        recorded: names of the arms whose runs are in the record.
    """
    base, names = asked.baseline.name, list(dict.fromkeys(arm.name for arm, _ in asked.pairs))
    known = base in names or base in recorded or any(asked.output.glob(f"{base}-seed*"))
    if asked.base is not None and not known:
        raise UsageError(f"--base {asked.base}: expected one of {', '.join(names)}")


def study(asked: StudyOptions) -> None:
    """Do the runs that are not finished, and print what all in the folder come to.

    Raises:
        UsageError: a run in the folder is of another study, or of other data.
        Interrupted: after Ctrl-C; the runs' checkpoints are written.
        StudyFailed: a run failed; the others are done.
    """
    with _alone(asked.output):
        runs = begun(asked.output)
        _check_asked(asked, runs)
        study_record.check_alike(runs)
        finished = {run.folder.name for run in runs if run.finished}
        waiting = [pair for pair in asked.pairs if name_of(*pair) not in finished]
        workers = Workers(asked, {run.folder.name for run in runs})
        if waiting:
            _check_data(asked.run(*waiting[0]).begun(), runs)
            workers.run(waiting)
        record = _record(asked)
        if record is not None:
            show(record, asked.format)
            note(f"wrote {asked.file}")
        workers.verdict()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a study's folder, made where there is none."""
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / ".lock", busy=f"{folder}: another study is running there"):
        yield


def begun(folder: Path) -> list[StudyRun]:
    """Return a study's runs, as recipes are listed and by seed."""
    found = []
    for path in sorted(folder.iterdir()):
        named = _NAME.fullmatch(path.name)
        arm = arms.known(named[1]) if named else None
        run = StudyRun.read(path, arm) if named and path.is_dir() else None
        if run is not None:
            right = arm is not None and arm.names(run.settings)
            name = name_of(run.arm if right else Arm.of(run.settings), run.seed)
            if name != path.name:
                raise UsageError(f"{path}: holds a run of another name: expected {name}")
            found.append(run)
    return sorted(found, key=lambda run: (run.arm.order, run.seed))


def _check_asked(asked: StudyOptions, runs: Sequence[StudyRun]) -> None:
    """Refuse runs that were begun with other settings than those asked for, or to compare with."""
    for run in runs:
        pair, ours = (run.arm, run.seed), run.settings.as_dict()
        same = pair in asked.pairs
        like = pair if same else asked.pairs[0]
        wanted = asked.run(*like).begun().as_dict()
        free = study_record.FREE | run.arm.settings.keys() | like[0].settings.keys()
        name = study_record.differing(wanted, ours, {"data"} if same else free)
        if name is not None:
            raise UsageError(
                f"{run.folder}: was begun with {name}={ours[name]}: expected {wanted[name]}, "
                "as asked for; move it away, or name another -o FOLDER"
            )


def _check_data(settings: Settings, runs: Sequence[StudyRun]) -> None:
    """Prepare the tokens, once for all runs, and warn where some are read again."""
    folder = prepare.folder_of(settings.data, settings.tokenizer)
    meta = prepared.read_meta(folder)
    for run in runs:
        if run.records and run.head["tokens"]["sha256"] != meta["sha256"]:
            raise UsageError(
                f"{run.folder}: was begun with other tokens than those in {folder}; "
                "move it away, or name another -o FOLDER"
            )
    if not study_record.fresh(settings, meta["train"]):
        often = study_record.epochs(settings, meta["train"])
        note(
            f"tokens are read again within a run (order={settings.order}, {often:.2f} epochs): "
            "expected order=shuffled and at most one epoch for losses of fresh tokens"
        )


def _record(asked: StudyOptions) -> StudyRecord | None:
    """Write the result of all finished runs, and return it; None where there is none yet."""
    runs = begun(asked.output)
    done = [run for run in runs if run.finished]
    if not done:
        return None
    names = [name_of(*pair) for pair in asked.pairs]
    window = asked.bounds(done[0].settings.steps)
    record = study_record.make(runs, window, asked.baseline.name, names)
    if asked.record is not None and asked.record.exists():
        record = study_record.added(record, study_record.read(asked.record), asked.record)
    study_record.write(record, asked.file)
    return record


def show(record: StudyRecord, form: str = "table") -> None:
    """Give a record, in one of `report.output.FORMATS`."""
    output.give(
        form,
        report.document(record),
        lambda: _print(record),
        lambda: {report.explained(record): report.table(record)},
        lambda: report.lines(record),
    )


def _print(record: StudyRecord) -> None:
    terminal.console(width=160).print(report.table(record).rich(spare=("seeds", "ms per step")))
    print(report.explained(record))


class StudyFailed(JetfireError):
    """Runs of a study that failed; the exit code is the first one's."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code if 1 <= code <= 6 else 1  # a signal's is none of ours


def places(device: str) -> list[str | None]:
    """Return what CUDA_VISIBLE_DEVICES may be for a run: each GPU's; None alone for the CPU.

    No GPU is opened, as each run is to have its own whole.

    Raises:
        NoDeviceError: that device is not on this machine.
    """
    kind, _, index = device.partition(":")
    count = 0
    if kind != "cpu":
        import torch

        count = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and not count):
        return [None]
    if int(index or 0) >= count:
        raise NoDeviceError(f"device {device!r}: this machine has {plural(count, 'CUDA device')}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    return [names[int(index)]] if index else [*names]


class Child:
    """A run under way: `jetfire train` with the words that are given."""

    def __init__(self, name: str, words: Sequence[str], place: str | None, at_once: int) -> None:
        self.name, self.place, self.said = name, place, ""
        chosen = {log.RUNS_AT_ONCE: str(at_once)}
        if place is not None:
            chosen["CUDA_VISIBLE_DEVICES"] = place
        device = ["--device", "cpu" if place is None else "cuda"]
        command = [sys.executable, "-m", "jetfire.cli", "train", *words, *device]
        self._process = processes.started(command, {**os.environ, **chosen})
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def _relay(self) -> None:
        """Say on what it says, of steps now and then one, and keep its last message."""
        shown = -_STEP_S
        for line in self._process.stdout or ():
            text, now = line.strip(), time.monotonic()
            if re.match(r"step +[0-9]+ +loss ", text):
                if now - shown < _STEP_S:
                    continue
                shown = now
            if text.startswith("jetfire: "):
                text = self.said = text.removeprefix("jetfire: ")
            if text:
                note(f"{self.name}: {text}")

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to stop after the step under way, with a checkpoint."""
        self._process.terminate()

    def close(self) -> None:
        """End it, and all that it has started, if need be at once."""
        processes.killed(self._process)
        self._reader.join(10.0)


class Workers:
    """Runs under way, one in each place, and what became of those before.

    Args:
        begun: names of the runs that go on rather than begin.
    """

    def __init__(self, asked: StudyOptions, begun: set[str]) -> None:
        self.asked, self._begun = asked, begun
        self.failed: list[tuple[str, int, str]] = []
        self.stopped = self._unfinished = False
        self._children: list[Child] = []

    def run(self, pairs: Sequence[tuple[Arm, int]]) -> None:
        """Do all runs, or those that are under way until Ctrl-C stops them."""
        gpus = places(self.asked.device)
        jobs = min(self.asked.jobs or len(gpus), len(pairs))
        free = deque(gpus[number % len(gpus)] for number in range(jobs))
        at_once, waiting, stop = -(-jobs // len(gpus)), deque(pairs), Stop()
        note(f"{len(pairs)} of {plural(len(self.asked.pairs), 'run')} to do, {jobs} at a time")
        try:
            with stop.listening():
                while self._children or (waiting and not stop.asked):
                    while free and waiting and not stop.asked:
                        self._start(waiting.popleft(), free.popleft(), at_once)
                    if stop.asked and not self.stopped:
                        self.stopped = True
                        for child in self._children:
                            child.stop()
                    free.extend(self._ended())
                    time.sleep(_POLL_S)
                self.stopped = self._unfinished or bool(waiting)
        finally:
            for child in self._children:
                child.close()

    def _start(self, pair: tuple[Arm, int], place: str | None, at_once: int) -> None:
        name = name_of(*pair)
        folder = self.asked.output / name
        words = ["--resume"] if name in self._begun else self.asked.words(*pair)
        words += ["-o", str(folder), *(["--strict-profile"] if self.asked.strict_profile else [])]
        self._children.append(Child(name, words, place, at_once))

    def _ended(self) -> list[str | None]:
        """Return the places of children that have ended, of which the record then tells."""
        gone = [child for child in self._children if child.code is not None]
        for child in gone:
            self._children.remove(child)
            child.close()
            code = child.code or 0
            if code and self.stopped:
                self._unfinished = True
            elif code:
                self.failed.append((child.name, code, child.said))
                note(f"{child.name}: failed with exit code {code}")
            else:
                try:
                    _record(self.asked)
                except UsageError as error:  # the other runs are not to end for it
                    note(str(error))
        return [child.place for child in gone]

    def verdict(self) -> None:
        """
        Raises:
            Interrupted, StudyFailed: not all runs are finished.
        """
        if self.failed:
            name, code, said = self.failed[0]
            raise StudyFailed(
                f"{len(self.failed)} of {plural(len(self.asked.pairs), 'run')} failed; the same "
                f"command tries again; {name}, exit code {code}: {said or 'it said nothing'}",
                code,
            )
        if self.stopped:
            raise Interrupted("stopped before all runs were finished; the same command goes on")
