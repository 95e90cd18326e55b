"""A run's folder: who may train in it, what it holds, and what it goes on from.

It holds settings.json, log.jsonl, tokenizer/ and checkpoints/, and while a process trains in it
.lock. Nothing in it is a link: what is written here stays here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetfire.core import files
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import Missing, Unreadable
from jetfire.core.terminal import note
from jetfire.gpt2.data import tokenizers
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.training import checkpoint, log
from jetfire.gpt2.training.checkpoint import Checkpoint
from jetfire.gpt2.training.options import RunRequest
from jetfire.gpt2.training.parallel import Group
from jetfire.gpt2.training.settings import (
    PROCESSES,
    SETTINGS,
    Settings,
    check_processes,
    load,
    resumed,
)
from jetfire.report.text import plural

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Run:
    """A run's folder, its settings, and the checkpoint that it goes on from, if any.

    Attributes:
        damaged: newer checkpoints, which cannot be used.
        init: the folder of the weights that it begins with; None for the seed's.
        loggers: the libraries that get its log too.
    """

    folder: Path
    settings: Settings
    saved: Checkpoint | None = None
    damaged: Sequence[Path] = ()
    init: Path | None = None
    loggers: Sequence[str] = ()

    def begin(self, tokens: data.Tokens, processes: int) -> None:
        """Make the folder hold a run, which can be resumed and, elsewhere, sampled."""
        checkpoint.set_aside(self.damaged)
        with files.new_folder(self.folder / TOKENIZER, alone=True) as part:
            tokenizers.keep(tokens.meta["tokenizer"], tokens.folder, part)
        with files.writing(self.folder):
            (self.folder / checkpoint.FOLDER).mkdir(exist_ok=True)
        begun = {**self.settings.as_dict(), PROCESSES: processes}
        files.write(self.folder / SETTINGS, json.dumps(begun, indent=1) + "\n", alone=True)


@contextmanager
def opened(asked: RunRequest, group: Group) -> Iterator[Run]:
    """Give the run that was asked for; nobody else trains in its folder meanwhile."""
    folder = _free(asked.folder) if asked.numbered else asked.folder
    with _alone(folder):
        if asked.settings is None:
            yield _resumed(asked, group)
            return
        begun = any((folder / name).exists() for name in (SETTINGS, log.NAME))
        if begun or checkpoint.listed(folder):
            raise UsageError(f"-o {folder}: holds a run: --resume goes on with it; or name another")
        if not tokenizers.may_keep(folder / TOKENIZER):
            raise UsageError(f"-o {folder}: its {TOKENIZER} is something else: name another folder")
        yield Run(folder, asked.settings, init=asked.init, loggers=asked.loggers)


def _free(folder: Path) -> Path:
    """The folder, or with the first number that is free."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder, made where there is none; one in which nothing began is removed.

    What a killed process left half done is removed too.
    """
    made: list[Path] = []
    with files.writing(folder):
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        busy = f"{folder}: another process is training there"
        with files.locked(folder / ".lock", busy=busy):
            for name in (checkpoint.FOLDER, TOKENIZER):
                if (folder / name).is_symlink():
                    wanted = "expected a folder of the run's own"
                    raise UsageError(f"{folder / name}: is a link: {wanted}")
            for name in (TOKENIZER, SETTINGS):
                files.tidy(folder, name)
            checkpoint.clean(folder)
            yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _resumed(asked: RunRequest, group: Group) -> Run:
    """Return the run that goes on, from its newest checkpoint or its first step."""
    folder, world = asked.folder, group.world
    begun = _begun(folder)
    saved, damaged = checkpoint.newest(folder, begun=begun)
    if saved is not None:
        begun = saved.settings
    if not begun:
        raise UsageError(f"--resume: {folder} holds no run")
    _check_log(folder, saved)
    settings = resumed(begun, asked.changes, str(folder), world)
    check_processes(settings, world, group.host is not None)
    if saved is not None and saved.step > settings.steps:
        raise UsageError(f"steps={settings.steps}: {folder} is at step {saved.step} already")
    if saved is None:
        note(f"{folder} has no checkpoint: beginning at its first step")
    return Run(folder, settings, saved, damaged, loggers=asked.loggers)


def _begun(folder: Path) -> dict[str, Any]:
    """The settings of the run that a folder holds, as `of_all` has them; none if it holds none.

    What checkpoints tell too is no loss: then a warning says what is wrong with the file.
    """
    try:
        return load(folder / SETTINGS)
    except Missing:
        return {}
    except UsageError as error:
        if not checkpoint.listed(folder):
            raise
        warnings.warn(f"{error}; taking a checkpoint's", JetfireWarning, stacklevel=2)
        return {}


def _check_log(folder: Path, saved: Checkpoint | None) -> None:
    """Warn of what in the log is none, and go on at the first step only where nothing is lost."""
    try:
        records = log.records(folder / log.NAME)
    except Missing:
        return
    except Unreadable as error:
        if saved is None:
            raise
        warnings.warn(str(error), JetfireWarning, stacklevel=2)
        return
    steps = [record["step"] for record in records if record["kind"] == "step"]
    # `Run.begin` makes the folder: only somebody else can have removed it.
    gone = not (folder / checkpoint.FOLDER).is_dir()
    written = any(record["kind"] == "checkpoint" for record in records)
    if saved is None and steps and (gone or written):
        raise UsageError(
            f"--resume: the log of {folder} has {plural(max(steps), 'step')}, and its checkpoints "
            f"are gone: put {folder / checkpoint.FOLDER} back, or begin another run with -o"
        )
