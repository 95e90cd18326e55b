"""Kill tuners at random moments, two of a study at once among them, and see that nothing is lost.

    python storm.py FOLDER SEED KILLS PAIRS

Configs are not measured, so that a tuner does little but write: its study, its log, its profile.
Prints one JSON object: how many kills hit a tuner that was at work, and what studies held then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from jetfire import cli
from jetfire.core import profiles
from jetfire.core.device import Device
from jetfire.tuner import session
from jetfire.tuner.recording import ReplayRunner
from jetfire.tuner.trial import Measurement

TRIALS = 12


class Runner(ReplayRunner):
    """Takes 10 ms a config; some fail, which the log says."""

    def __init__(self, devices: Sequence[Device], trial_s: float) -> None:
        super().__init__(self)  # type: ignore[arg-type]

    def get(self, config: Any, default: object = None) -> Measurement:
        time.sleep(0.01)
        if config.tile % 4 == 0:
            return Measurement("crash", message="it crashed\n" * 20)
        return Measurement("ok", 1.0 + config.tile / 100)

    def start(self) -> None:
        pass

    def begin(self, job: object) -> None:
        self.cancel()


class Storm:
    """Tuners of one problem after another, killed until each has its profile.

    Attributes:
        hits: kills of a tuner that had not ended yet.
        kept: problem's size → parameters as text → outcome, of its study when last looked at.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.hits, self.size = 0, 32
        self.kept: dict[str, str] = {}
        self.tuned: set[int] = set()
        self.lasts = 1.0  # seconds of a tuner that is left alone

    @property
    def journal(self) -> Path:
        return self.folder / "studies" / f"{self.size}.journal"

    def words(self) -> list[str]:
        return [
            "transpose",
            "--kernel",
            "faulty",
            "--m",
            str(self.size),
            "--block",
            "32",
            "--device",
            "cpu",
            "--peer",
            "none",
            "--space=fault=none",
            "--space=ms=1",
            "--trials",
            str(TRIALS),
            "--storage",
            str(self.journal),
        ]

    def start(self) -> int:
        """A tuner in a process of its own."""
        child = os.fork()
        if child == 0:
            with (self.folder / "said").open("ab") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            os._exit(cli.execute("tune", self.words()))
        return child

    def alone(self) -> None:
        """A tuner that is let to its end, which the problem's profile then is."""
        begin = time.monotonic()
        _, status = os.waitpid(self.start(), 0)
        assert os.waitstatus_to_exitcode(status) == 0, (self.folder / "said").read_text()[-2000:]
        self.lasts = time.monotonic() - begin
        self.look()
        assert TRIALS <= len(self.kept) <= TRIALS + 1
        assert not self.running()
        self.tuned.add(self.size)
        assert self.sizes() == self.tuned
        assert not list(self.folder.rglob("*.part"))
        self.size, self.kept = self.size + 32, {}

    def kill(self, count: int) -> None:
        """So many tuners of the study at once, each killed at a moment of its own."""
        alive = {}
        for _ in range(count):
            moment = time.monotonic() + self.rng.uniform(0.0, 1.1 * self.lasts)
            alive[self.start()] = moment
        while alive:
            child = min(alive, key=lambda pid: alive[pid])
            time.sleep(max(0.0, alive.pop(child) - time.monotonic()))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            self.hits += os.WIFSIGNALED(status)
        self.look()
        if self.size in self.sizes():
            self.alone()  # which has nothing left to do

    def look(self) -> None:
        """What was there is there still; no profile and no line but the last is torn."""
        now = self.outcomes()
        assert self.kept.items() <= now.items(), (self.kept, now)
        self.kept = now
        assert self.sizes() >= self.tuned
        said = (self.folder / "said").read_text()
        assert "Traceback" not in said, said[-2000:]
        assert "internal error" not in said, said[-2000:]

    def trials(self) -> list[Any]:
        if not self.journal.exists():
            return []
        *lines, _ = self.journal.read_bytes().split(b"\n")
        assert all(isinstance(json.loads(line), dict) for line in lines)
        storage = JournalStorage(JournalFileBackend(str(self.journal)))
        studies = storage.get_all_studies()
        return storage.get_all_trials(studies[0]._study_id) if studies else []

    def outcomes(self) -> dict[str, str]:
        found = [
            (json.dumps(t.params), t.user_attrs["outcome"])
            for t in self.trials()
            if "outcome" in t.user_attrs
        ]
        assert max(Counter(params for params, _ in found).values(), default=1) == 1
        return dict(found)

    def running(self) -> list[int]:
        return [t.number for t in self.trials() if t.state == TrialState.RUNNING]

    def sizes(self) -> set[int]:
        """Those that there is a profile for."""
        profiles.forget()
        files = list((self.folder / "profiles").rglob("*.json"))
        return {entry.problem["m"] for file in files for entry in profiles._parsed(file)}


def main() -> None:
    """Run as the module says."""
    folder, (seed, kills, pairs) = Path(sys.argv[1]), map(int, sys.argv[2:])
    os.environ.update(
        JETFIRE_PROFILES=str(folder / "profiles"), JETFIRE_STUDIES=str(folder / "studies")
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    faulty.register()
    session.DeviceRunner = Runner  # type: ignore[assignment,misc]
    storm = Storm(folder, seed)
    storm.alone()
    order = [1] * (kills - 2 * pairs) + [2] * pairs
    storm.rng.shuffle(order)
    for count in order:
        storm.kill(count)
    storm.alone()
    print(json.dumps({"hits": storm.hits, "tuned": len(storm.tuned)}))


if __name__ == "__main__":
    main()
