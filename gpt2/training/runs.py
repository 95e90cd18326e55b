"""A run's folder: who may train in it, what it holds, and what it goes on from.

It holds settings.json, log.jsonl, tokenizer/ and checkpoints/, and while a process trains in it
.lock. Nothing in it is a link: what is written here stays here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from jetfire.gpt2.training import checkpoint, log, parallel
from jetfire.gpt2.training.checkpoint import Checkpoint
from jetfire.gpt2.training.options import TrainOptions
from jetfire.gpt2.training.parallel import Group
from jetfire.gpt2.training.settings import (
    CHANGEABLE,
    PROCESSES,
    SETTINGS,
    Settings,
    checked,
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
    """

    folder: Path
    settings: Settings
    saved: Checkpoint | None = None
    damaged: Sequence[Path] = ()

    def begin(self, tokens: data.Tokens, processes: int) -> None:
        """Make the folder hold a run, which can be resumed and, elsewhere, sampled."""
        with files.new_folder(self.folder / TOKENIZER, alone=True) as part:
            tokenizers.keep(tokens.meta["tokenizer"], tokens.folder, part)
        with files.writing(self.folder):
            (self.folder / checkpoint.FOLDER).mkdir(exist_ok=True)
        checkpoint.set_aside(self.damaged)
        begun = {**self.settings.as_dict(), PROCESSES: processes}
        files.write(self.folder / SETTINGS, json.dumps(begun, indent=1) + "\n", alone=True)


@contextmanager
def opened(asked: TrainOptions, group: Group) -> Iterator[Run]:
    """Give the run that the options name; nobody else trains in its folder meanwhile."""
    if asked.resume:
        folder = asked.resumed()
        with _alone(folder):
            yield _resumed(folder, asked.given(), group)
        return
    settings = asked.begun()
    folder = asked.output or _free_folder(settings)
    with _alone(folder):
        begun = any((folder / name).exists() for name in (SETTINGS, log.NAME))
        if begun or checkpoint.listed(folder):
            raise UsageError(f"-o {folder}: holds a run: --resume goes on with it; or name another")
        if not tokenizers.may_keep(folder / TOKENIZER):
            raise UsageError(f"-o {folder}: its {TOKENIZER} is something else: name another folder")
        yield Run(folder, settings)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a run's folder, made where there is none; one in which nothing began is removed."""
    made: list[Path] = []
    with files.writing(folder):
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        busy = f"{folder}: another process is training there"
        with files.locked(folder / ".lock", busy=busy):
            _tidy(folder)
            yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _tidy(folder: Path) -> None:
    """Remove what a killed process left half done."""
    for name in (checkpoint.FOLDER, TOKENIZER):
        if (folder / name).is_symlink():
            raise UsageError(f"{folder / name}: is a link: expected a folder of the run's own")
    checkpoint.tidy(folder)
    for name in (TOKENIZER, SETTINGS):
        files.tidy(folder, name)


def _free_folder(settings: Settings) -> Path:
    """runs/PRESET-RECIPE, or with the first number that is free."""
    name, number = f"{settings.preset}-{settings.recipe}", 1
    while (folder := Path("runs", name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def _resumed(folder: Path, given: Mapping[str, Any], group: Group) -> Run:
    begun = _begun(folder)
    saved, damaged = checkpoint.newest(folder, check=lambda one: _check_same(one, begun))
    if saved is not None:
        begun = _of_all(saved.state["settings"], saved.state.get("processes", 1))
    if begun is None:
        raise UsageError(f"--resume: {folder} holds no run")
    _check_log(folder, saved)
    settings = resumed(_shared_out(begun, folder, group.world), given, str(folder))
    parallel.check(settings, group)
    if saved is not None and saved.step > settings.steps:
        raise UsageError(f"steps={settings.steps}: {folder} is at step {saved.step} already")
    if saved is None:
        note(f"{folder} has no checkpoint: beginning at its first step")
    return Run(folder, settings, saved, damaged)


def _begun(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that a folder holds, as `_of_all` has them; None if none.

    What checkpoints tell too is no loss: then a warning says what is wrong with the file.
    """
    file = folder / SETTINGS
    try:
        settings, processes = load(file)
        return _of_all(settings.as_dict(), processes)
    except Missing:
        return None
    except UsageError as error:
        if not checkpoint.listed(folder):
            raise
        warnings.warn(f"{error}; taking a checkpoint's", JetfireWarning, stacklevel=2)
        return None


def _check_same(saved: Checkpoint, begun: Mapping[str, Any] | None) -> None:
    """Refuse a checkpoint that is not of the run that began with these settings."""
    file = saved.path / checkpoint.STATE
    try:
        own = _of_all(checked(saved.state["settings"]), saved.state.get("processes", 1))
    except UsageError as error:
        raise Unreadable(file, str(error)) from None
    ours = begun or {}
    for name in own.keys() & ours.keys() - CHANGEABLE:
        mine, expected = own[name], ours[name]
        if mine != expected:
            reason = f"{name}={mine} is another run's: {SETTINGS} has {expected}"
            if name == "accumulate":
                reason = f"{mine} micro-batches a step are another run's: expected {expected}"
            raise Unreadable(file, reason)


def _of_all(settings: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Settings with the micro-batches of all processes, of which a step has the same for ever."""
    return {**settings, "accumulate": settings.get("accumulate", 1) * processes}


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


def _shared_out(begun: Mapping[str, Any], run: Path, world: int) -> dict[str, Any]:
    """Settings under which as many processes as there are now train on the same sequences."""
    micros = begun["accumulate"]
    if micros % world:
        raise UsageError(
            f"--resume with {world} processes: {run} has {micros} micro-batches per step: "
            f"expected a number of processes that divides them"
        )
    return {**begun, "accumulate": micros // world}
