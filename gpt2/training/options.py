"""The options of a training run, and all of it that can be refused before torch is loaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetfire.core.environment import torchrun
from jetfire.core.errors import UsageError, not_installed, unknown
from jetfire.gpt2.data import corpora
from jetfire.gpt2.training.settings import (
    PRESETS,
    Settings,
    check_processes,
    checked,
    joined,
    load,
    make,
    split,
)

LOGGERS = ("tensorboard", "wandb")  # each the name of its library, and of our extra


@dataclass(frozen=True)
class TrainOptions:
    """The options of `jetfire train` as they were given; None where one was not."""

    preset: str | None = None
    recipe: str | None = None
    settings: Sequence[str] = ()
    steps: int | None = None
    data: str | None = None
    output: Path | None = None
    resume: bool = False
    init: Path | None = None
    device: str = "auto"
    seed: int | None = None
    watch: int | None = None
    loggers: Sequence[str] = ()

    def given(self) -> dict[str, Any]:
        """The settings that were asked for, by an option of their own or by `--set`."""
        if "preset" in split(self.settings):
            raise UsageError("--set preset=…: expected PRESET, as the first word")
        names = ("preset", "recipe", "steps", "data", "seed", "watch")
        found = joined(self.settings, {name: getattr(self, name) for name in names})
        if "data" in found and found["data"] not in corpora.NAMED:
            found["data"] = str(Path(found["data"]).absolute())
        return found

    def begun(self) -> Settings:
        """Return the settings of a run that begins."""
        if self.preset is None:
            raise UsageError(f"which preset? expected one of {', '.join(PRESETS)}")
        return make(self.preset, self.given())


@dataclass(frozen=True)
class RunRequest:
    """A run that was asked for, in which nothing is wrong that can be told without its folder.

    Attributes:
        settings: those that a run begins with; None for one that goes on.
        changes: the settings that were asked for of one that goes on.
        numbered: where the folder is taken, its name gets a number.
    """

    folder: Path
    settings: Settings | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    numbered: bool = False
    init: Path | None = None
    device: str = "auto"
    loggers: Sequence[str] = ()


def of_run(file: Path) -> dict[str, Any]:
    """Return the options that begin a run as the one whose `settings.json` it is, by long name.

    A step has as many micro-batches in all, whatever the number of processes.

    Raises:
        UsageError: the file holds no settings, or their micro-batches cannot be shared out.
    """
    found, world = load(file), _world()
    micros = found["accumulate"]
    if micros % world:
        raise UsageError(
            f"{file}: accumulate={micros} in all: expected processes that divide them, not {world}"
        )
    found["accumulate"] = micros // world
    return {"preset": found.pop("preset"), "data": found.pop("data"), "set": found}


def check_preset(preset: str, file: Path) -> None:
    """Check that a preset is that of the run whose `settings.json` gives the other options.

    Its sizes are among them, so that of another preset nothing but the name would be left.

    Raises:
        UsageError: it is another.
    """
    own = load(file)["preset"]
    if preset != own:
        raise UsageError(f"preset {preset}: expected {own}, as {file} has it, or none beside it")


def request_of(asked: TrainOptions) -> RunRequest:
    """Return the run that the options ask for.

    Raises:
        UsageError: what can be refused without a look into its folder.
    """
    for name in asked.loggers:
        check_logger(name)
    common: dict[str, Any] = {"device": asked.device, "loggers": asked.loggers}
    if asked.resume:
        values = checked(asked.given())
        request = RunRequest(_resumed(asked), changes=values, **common)
    else:
        settings = asked.begun()
        check_processes(settings, _world(), torchrun())
        values = settings.as_dict()
        usual = Path("runs", f"{settings.preset}-{settings.recipe}")
        folder, numbered = asked.output or usual, asked.output is None
        request = RunRequest(folder, settings, numbered=numbered, init=asked.init, **common)
    if asked.output is not None and asked.output.exists() and not asked.output.is_dir():
        raise UsageError(f"-o {asked.output}: expected a folder")
    if asked.init is not None and not asked.init.is_dir():
        raise UsageError(
            f"--init {asked.init}: no such folder: expected a run's, a checkpoint's or one of "
            "transformers' GPT-2 or Llama"
        )
    if (data := values.get("data")) is not None:
        check_data(data, asked.data or dict(split(asked.settings)).get("data", data))
    return request


def _resumed(asked: TrainOptions) -> Path:
    """Return the folder of a run that goes on."""
    if asked.output is None or asked.init is not None:
        wanted = "-o RUN, the run to go on with" if asked.output is None else "no --init"
        raise UsageError(f"--resume: expected {wanted}")
    if not asked.output.is_dir():
        raise UsageError(f"--resume: {asked.output} holds no run")
    return asked.output


def check_logger(name: str) -> None:
    """Refuse a logger that there is not, or whose library is not installed."""
    if name not in LOGGERS:
        raise unknown(f"--logger {name}", name, LOGGERS)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # W&B leaves folders called wandb behind
        raise UsageError(f"--logger {name}: {not_installed(name, name)}")


def check_data(data: str, given: str) -> None:
    """Refuse data that is neither a corpus nor a file or folder.

    Args:
        given: the word that named it.
    """
    if data not in corpora.NAMED and not Path(data).exists():
        what = f"--data {given}: no such file, folder or corpus"
        raise unknown(what, given, corpora.NAMED, ", or a path")


def _world() -> int:
    return int(os.environ["WORLD_SIZE"]) if torchrun() else 1


def no_run(path: Path) -> UsageError:
    """Return the error for a path at which there is no checkpoint."""
    return UsageError(f"{path}: expected a run with a checkpoint, or a checkpoint's folder")
