"""An Optuna study that survives its tuners: every trial durable, none left running by the dead.

A study is of one op, kernel, problem, device, kernel source and objective; the same command finds
it again. It lies in a journal file of its own, in one that is named, or behind a database's URL.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from jetfire.core import files, interrupts, profiles
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, first_line
from jetfire.core.files import MIB, Unreadable, Unwritable
from jetfire.core.kernel import Config, Kernel
from jetfire.measure import provenance
from jetfire.measure.plan import Note
from jetfire.measure.timer import VERSION as TIMER_VERSION
from jetfire.report.text import plural
from jetfire.tuner.options import without_password
from jetfire.tuner.space import Space
from jetfire.tuner.strategies import Exhausted, Strategy, distributions, is_taken
from jetfire.tuner.trial import Measurement, Objective, score

# A trial of another machine that has run for so long has lost its tuner.
ABANDONED_S = 3600.0
# What another tuner may take between beginning a trial and choosing its config.
CHOOSING_S = 10.0
# Characters of a failure's message that a trial keeps: as many as a report shows.
MESSAGE = 2000
# Bytes of a journal. A trial of eight fields takes 4000, without its message.
MOST = 64 * MIB
# Commas and opening brackets in it: such a trial has 160. For each, an object within an object
# takes 200 bytes of memory.
MOST_VALUES = 3_000_000
# CPU time that it may take to check one, or Optuna to read one: a good one takes it 18 µs a line.
READ_S, LINE_S = 1.0, 60e-6
# What says that a study cannot be written, or read, any more.
BROKEN = (OSError, Unwritable, optuna.exceptions.StorageInternalError, json.JSONDecodeError)
T = TypeVar("T")


def studies_folder() -> Path:
    """Return the folder of journals and logs: JETFIRE_STUDIES, else in the user's data folder."""
    if set_by_user := os.environ.get("JETFIRE_STUDIES"):
        return Path(set_by_user)
    import platformdirs

    return platformdirs.user_data_path("jetfire") / "studies"


@dataclass(frozen=True)
class Identity:
    """All that makes two searches the same one.

    Attributes:
        same_bits: only outputs of the same bits as those of the config in use were right. Which
            config that was does not count: a search may go on after it has changed that itself.
    """

    kernel: Kernel
    problem: Any
    device: Device
    space: Space
    objective: Objective
    data: str
    same_bits: bool = False

    @property
    def name(self) -> str:
        """Readable, and a hash of what the readable part leaves out."""
        shape = "-".join(str(value) for value in self.problem.as_dict().values())
        told = [
            self.kernel.source_hash(),
            TIMER_VERSION,
            self.objective,
            self.data,
            self.problem.as_dict(),
            {k: list(v) for k, v in self.space.fields.items()},
            self.space.base.as_dict(),
            provenance.software(),
            *(["same bits"] if self.same_bits else []),
        ]
        key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        device = profiles.device_slug(self.device)
        return f"{device}/{self.kernel.op}/{self.kernel.name}-{shape}-{key}"


def _locked(file: Path) -> AbstractContextManager[None]:
    """Return the lock of whoever reads a journal to mend it, or adds to it."""
    return files.locked(file.with_name(f"{file.name}.lock"), wait=True)


class _FileLock:
    """What Optuna asks of a lock, without its base class."""

    def __init__(self, file: Path) -> None:
        self._file, self._held = file, ExitStack()

    def acquire(self) -> bool:
        with ExitStack() as held:
            held.enter_context(_locked(self._file))
            # Nobody else writes now: half a line is what a killed tuner or a full disk left.
            with self._file.open("rb+") as journal:
                size = journal.seek(0, os.SEEK_END)
                journal.seek(max(0, size - 1))
                if journal.read(1) not in (b"", b"\n"):
                    journal.seek(0)
                    journal.truncate(journal.read().rfind(b"\n") + 1)
            self._held = held.pop_all()
        return True

    def release(self) -> None:
        self._held.close()


class _JournalFile(JournalFileBackend):
    """Optuna's own, but for journals that would take it a time as the square of their lines."""

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        logs = super().read_logs(log_number_from)
        yield from _in_time(logs, Path(self._file_path), log_number_from)


def _in_time(lines: Iterable[T], file: Path, first: int = 1) -> Generator[T, None, None]:
    """Yield a journal's lines while they, and what is done with them, take the time of good ones.

    Args:
        first: the number of the first.

    Raises:
        Unreadable: they take longer.
    """
    begin = time.process_time()
    for count, line in enumerate(lines):
        if time.process_time() - begin > READ_S + count * LINE_S:
            raise Unreadable(file, f"takes too long to read, from line {first + count} on")
        yield line


def _is_operation(line: bytes) -> bool:
    """Return whether a line of a journal is whole, and a JSON object."""
    with suppress(ValueError, RecursionError):
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    return False


def _repair(file: Path, note: Note) -> None:
    """Cut a journal before its first line that is torn or no JSON.

    Unless that is half of the last one, which a process killed while it wrote leaves, the whole
    file is kept beside it.

    Raises:
        Unreadable, Unwritable: it is no regular file, too large, or cannot be read or written.
    """
    if file.is_symlink():  # whoever made it may want another file written
        raise Unreadable(file, "is a link: expected a regular file")
    content = files.read(file, MOST)
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise Unreadable(file, f"more than {MOST_VALUES} values: expected at most that many")
    good = 0
    for line in _in_time(io.BytesIO(content), file):
        if not _is_operation(line):
            break
        good += len(line)
    if good == len(content):
        return
    if not content.startswith(b"{", good) or content.find(b"\n", good) != -1:
        aside = file.with_name(f"{file.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}")
        files.write(aside, content)
        line_number = content.count(b"\n", 0, good) + 1
        note(
            f"study {file}: line {line_number} is corrupt: goes on from the lines before it; "
            f"the whole file is kept as {aside.name}"
        )
    files.write(file, content[:good], alone=True)


def _journal(file: Path, note: Note) -> JournalStorage:
    """Return the storage of a journal, which is made where there is none.

    Raises:
        UsageError: the file cannot be opened, or holds something else.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            if file.exists() or file.is_symlink():
                _repair(file, note)
        lock: Any = _FileLock(file)
        return JournalStorage(_JournalFile(str(file), lock))
    except (OSError, Unreadable, Unwritable) as error:
        raise UsageError(f"cannot use study {_told(error, file)}") from None
    except Exception as error:  # what Optuna makes of another program's JSON
        raise UsageError(f"study {file} is no journal of Optuna's: {first_line(error)}") from None


def _told(error: Exception, where: object) -> str:
    """Return what could not be used, and why; of an error of Optuna's what was beneath it."""
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or where}: {error.strerror or error}"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{where}: {first_line(cause)}"


def _database(url: str) -> RDBStorage:
    """Return the storage behind a URL.

    Raises:
        UsageError: it cannot be reached, or its driver is missing.
    """
    # A tuner waits for others' writes; SQLite's 5 s are short on a slow disk.
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    for attempt in range(5):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except Exception as error:  # what a database's driver raises, or the lack of one
            # Of two tuners that make the tables at once, one is too late.
            if attempt < 4 and re.search("already exists|UNIQUE|duplicate", str(error)):
                time.sleep(0.1 * 2**attempt)
                continue
            shown = without_password(url)
            reason = first_line(error).replace(url, shown)
            raise UsageError(f"cannot open --storage {shown}: {reason}") from None
    raise AssertionError("unreachable")


def storage_of(text: str | None, name: str, note: Note) -> tuple[BaseStorage, Path | None]:
    """Return a study's storage, and the folder or file that is this machine's own.

    Args:
        text: a database's URL, a journal's path, a folder for a journal a study, or None for the
            default folder.

    Raises:
        UsageError: it cannot be opened.
    """
    if text is not None and "://" in text:
        return _database(text), None
    file = studies_folder() if text is None else Path(text)
    if text is None or not text.endswith(".journal"):
        file /= f"{name}.journal"
    return _journal(file, note), file


class StorageError(UsageError):
    """The study cannot be written any more: a full disk, a database that is gone."""


class Study:
    """Asks a strategy for configs and keeps what became of them.

    Args:
        storage: as `storage_of` takes it, or an open one.
        attributes: set on the study; `jetfire.tuner.saved_study` reads them back.
    """

    def __init__(
        self,
        identity: Identity,
        strategy: Strategy,
        storage: str | BaseStorage | None,
        note: Note,
        attributes: Mapping[str, Any],
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._asked: dict[int, optuna.Trial] = {}
        self.identity, self.space, self.objective = identity, identity.space, identity.objective
        self._trial_s = strategy.trial_s
        self._broken = False
        opened, self.file = (
            (storage, None)
            if isinstance(storage, BaseStorage)
            else storage_of(storage, identity.name, note)
        )
        self._where = str(self.file) if self.file else without_password(str(storage))
        self._read: dict[int, tuple[Config, Measurement] | None] = {}
        with self._using(), self._alone():
            self.optuna = self._opened(opened, strategy)
            known = self.optuna.user_attrs
            for name, value in attributes.items():
                if known.get(name) != value:
                    self.optuna.set_user_attr(name, value)
            self._reap()
        self.finished()
        if wrong := [number for number, found in self._read.items() if found is None]:
            note(
                f"study {self._where}: passed over {plural(len(wrong), 'trial')} "
                f"saying what cannot be, the first {wrong[0]}"
            )

    def _opened(self, storage: BaseStorage, strategy: Strategy) -> optuna.Study:
        """Return the study, new or there.

        Raises:
            StorageError: Optuna cannot read it, or it is one of something else.
        """
        directions = [StudyDirection.MINIMIZE] * (2 if self.objective == "both" else 1)
        try:
            found = optuna.create_study(
                storage=storage,
                sampler=strategy,
                study_name=self.identity.name,
                load_if_exists=True,
                directions=directions,
            )
            trials = found.get_trials(deepcopy=False)
            known = found.directions, found.user_attrs
        except BROKEN:
            raise
        except Exception as error:  # what Optuna makes of what another program wrote
            raise StorageError(f"cannot use study {self._where}: {first_line(error)}") from None
        fields = distributions(self.space)
        if known[0] != directions or any(
            trial.distributions.get(name, fields[name]) != fields[name]
            for trial in trials
            for name in fields
        ):
            raise StorageError(
                f"cannot use study {self._where}: its {self.identity.name} is of "
                "other configs or of another objective"
            )
        return found

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Do steps whole in spite of Ctrl-C, and tell in one line what fails."""
        try:
            with interrupts.deferred():
                yield
        except BROKEN as error:
            self._broken = True
            raise StorageError(f"cannot use study {_told(error, self._where)}") from None

    @property
    def log(self) -> Path:
        """Return the file for the full messages of its trials."""
        if self.file is not None and self.file.stem == Path(self.identity.name).name:
            return self.file.with_suffix(".log")
        return studies_folder() / f"{self.identity.name}.log"

    def _alone(self) -> AbstractContextManager[None]:
        """Hold a lock while a trial is begun, so that no other tuner here sees half of one."""
        if self.file is None:
            return nullcontext()
        return files.locked(self.file.with_name(f"{self.file.name}.ask.lock"), wait=True)

    def _reap(self) -> None:
        """End the trials whose tuner has died; configs without an outcome may be tried again."""
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not _is_dead(trial, local=self.file is not None):
                continue
            self._end(trial.number, Measurement.parse(trial.user_attrs))
        # No tuner leaves such; Optuna would hand them out in place of what the strategy chooses.
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self.optuna._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def ask(self) -> tuple[int, Config]:
        """Return a new trial's number and config.

        Raises:
            Exhausted: the strategy has none left.
            StorageError: the trial cannot be written.
        """
        with self._using(), self._alone():
            if self.exhausted():
                raise Exhausted
            while True:
                trial = self.optuna.ask(distributions(self.space))
                trial.set_user_attr("owner", _owner())
                if not self._tried_before(trial):
                    break
                self._give_up(trial.number)  # another machine was quicker
            self._asked[trial.number] = trial
            point = self.space.point(trial.params)
            assert point is not None
            return trial.number, self.space.config(point)

    def exhausted(self) -> bool:
        """Return whether every legal config is taken."""
        if not self.space.whole or self.taken() < len(self.space.pool):
            return False
        seen = {self.space.point(t.params) for t in self._trials() if self._is_taken(t)}
        return seen.issuperset(self.space.pool)

    def _tried_before(self, asked: optuna.Trial) -> bool:
        """Return whether an earlier trial has the config, and an outcome or one yet to come."""
        end = time.monotonic() + CHOOSING_S
        params = asked.params  # a copy each time
        while True:
            trials = self.optuna.get_trials(deepcopy=False)
            earlier = [t for t in trials if t.number < asked.number and self._is_taken(t)]
            if any(t.params == params for t in earlier):
                return True
            # Of tuners that choose at once, those who began later wait for what the first takes.
            running = (t for t in earlier if t.state == TrialState.RUNNING)
            if all(t.params.keys() == params.keys() for t in running):
                return False
            if time.monotonic() > end:
                return False
            time.sleep(0.05)

    def finish(self, number: int, config: Config, measurement: Measurement) -> None:
        """End a trial; it is durable when this returns.

        One that another tuner took for dead, and has given up, stays so.

        Raises:
            StorageError: it cannot be written.
        """
        attributes = {"config": config.as_dict(), **measurement.as_dict()}
        attributes["message"] = measurement.message[:MESSAGE]  # the log has it whole
        del attributes["outcome"]
        if measurement.limit is None:  # as of nearly all
            del attributes["limit"]
        with self._using():
            trial = self._asked[number]
            try:
                # The outcome comes last: with it, a trial whose tuner dies here is whole.
                for name, value in {**attributes, "outcome": measurement.outcome}.items():
                    trial.set_user_attr(name, value)
                self._end(number, measurement)
            except RuntimeError:  # in Optuna 5 its UpdateFinishedTrialError
                trials = self.optuna.get_trials(deepcopy=False)
                if not any(t.number == number and t.state.is_finished() for t in trials):
                    raise
            del self._asked[number]

    def _end(self, number: int, measurement: Measurement | None) -> None:
        """End a trial with what was measured; without that it is given up."""
        values = None if measurement is None else measurement.values(self.objective)
        if values is None:
            self._give_up(number)
        else:  # another tuner may have given it up at the same time
            self.optuna.tell(number, values, skip_if_finished=True)

    def _give_up(self, number: int) -> None:
        """End a trial without a value."""
        self.optuna.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def give_up(self) -> None:
        """End the trials under way, of which nothing is known; their configs may be tried again."""
        with self._using():
            while self._asked:
                self._give_up(self._asked.popitem()[0])

    def _trials(self) -> list[FrozenTrial]:
        with self._using():
            return self.optuna.get_trials(deepcopy=False)

    def _is_taken(self, trial: FrozenTrial) -> bool:
        return is_taken(trial, self._trial_s)

    def taken(self) -> int:
        """Return how many trials have configs that are not tried again, of whichever tuner."""
        return sum(map(self._is_taken, self._trials()))

    def finished(self) -> list[tuple[Config, Measurement]]:
        """Return every trial that has an outcome, of whichever tuner, in order."""
        for trial in self._trials():
            told = trial.state.is_finished() and "outcome" in trial.user_attrs
            if told and trial.number not in self._read:  # it will not change any more
                point = self.space.point(trial.params)
                measurement = Measurement.parse(trial.user_attrs)
                self._read[trial.number] = None  # it says what cannot be
                if point is not None and measurement is not None:
                    self._read[trial.number] = self.space.config(point), measurement
        return [found for _, found in sorted(self._read.items()) if found is not None]

    def best(self, count: int) -> list[Config]:
        """Return the configs of the least values; of two objectives, of the least product."""
        scores: dict[Config, float] = {}
        for config, measurement in self.finished():
            values = measurement.values(self.objective)
            if measurement.outcome == "ok" and values is not None:
                scores[config] = score(values)
        return sorted(scores, key=lambda config: scores[config])[:count]

    def conclude(self, final: Mapping[str, Any]) -> None:
        """Keep what the final comparison found, but in a study that could not be written before."""
        if self._broken:
            return
        with self._using():
            self.optuna.set_user_attr("final", dict(final))


def _start_time(pid: int) -> str | None:
    """Return when a process began, in clock ticks since boot; None where there is no such one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _is_alive(pid: int, began_at: str) -> bool:
    known = _start_time(pid)
    if known is not None:
        return known == began_at
    # Gone, or hidden, or this system has no /proc.
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _process_space() -> str:
    """Return what a process's number is unique in: the boot, and a container's namespace.

    Containers may share a host's name. Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{re.sub('[^0-9]', '', os.readlink('/proc/self/ns/pid'))}"
    except OSError:
        return ""


def _owner() -> str:
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{_start_time(pid)}:{_process_space()}"


def _is_dead(trial: FrozenTrial, local: bool) -> bool:
    """Return whether the tuner that ran a trial is gone, so that nobody will end it.

    Args:
        local: the caller holds the lock under which a trial here gets its owner.
    """
    began = trial.datetime_start
    age = 0.0 if began is None else time.time() - began.timestamp()
    owner = str(trial.user_attrs.get("owner", ""))
    if not owner:
        return local or age > 60.0
    # Older tuners wrote no process space.
    host, pid, began_at, space = [*owner.split(":"), "", "", ""][:4]
    here = _process_space()
    booted = space.partition("/")[0] != here.partition("/")[0]
    if local and host == socket.gethostname() and space and booted:
        return True  # a journal lies on this machine, which was started anew since
    if host != socket.gethostname() or space not in ("", here):
        return age > ABANDONED_S
    return not re.fullmatch(r"[1-9][0-9]{0,9}", pid) or not _is_alive(int(pid), began_at)
