"""What a run's log gets, to TensorBoard or Weights & Biases as well.

Each is an optional library, imported where it is asked for. A run that is resumed goes on in the
same place: TensorBoard's events lie in the run's folder, and so does the name that W&B knows it by.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from typing_extensions import TypedDict

from jetfire.core import files, schema, terminal
from jetfire.core.errors import JetfireError, JetfireWarning, UsageError
from jetfire.gpt2.training.log import Record
from jetfire.gpt2.training.runs import Run

TENSORBOARD, WANDB = "tensorboard", "wandb.json"  # in the run's folder


class _Place(TypedDict):
    """The place where W&B keeps a run."""

    id: schema.Name


def figures(record: Record) -> dict[str, float]:
    """Return the figures of a line of the log by name; none for a line without any.

    A watched layer's are called ``watch/sqnr/gradient/blocks.11.contract``.
    """
    kind, found = record["kind"], {}
    if kind == "step":
        found = {f"train/{name}": value for name, value in record.items() if name != "step"}
    elif kind == "evaluation":
        found = {"validation/loss": record["loss"]}
    elif kind == "watch":
        found = {
            f"watch/{figure}/{of}/{layer}": value
            for layer, tensors in record["layers"].items()
            for of, codes in tensors.items()
            for figure, value in codes.items()
        }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


class TensorBoard:
    """Events in the run's folder."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what was written of steps that are taken again.
        again = run.saved.step + 1 if run.saved else None
        self._writer = SummaryWriter(str(run.folder / TENSORBOARD), purge_step=again)

    def write(self, step: int, found: dict[str, float]) -> None:
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)

    def close(self, well: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B's, in the project that WANDB_PROJECT names (jetfire)."""

    def __init__(self, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jetfire"),
            id=_place(run),
            resume="allow",
            name=run.folder.name,
            dir=str(run.folder),
            config=run.settings.as_dict(),
            settings={"console": "off", "silent": terminal.manner.quiet},
        )
        # W&B's own step only grows; ours goes back to the checkpoint's where a run is resumed.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, found: dict[str, float]) -> None:
        self._run.log({"step": step, **found})

    def close(self, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


def _place(run: Run) -> str:
    """Return the name by which W&B knows a run, kept in its folder."""
    file = run.folder / WANDB
    try:
        return schema.load(file, _Place)["id"]
    except files.Missing:
        name = secrets.token_hex(8)
        files.write(file, json.dumps({"id": name}) + "\n", alone=True)
        return name


class Logger(AbstractContextManager["Logger"]):
    """Passes a run's records on to a library. Where that fails, the run goes on without it.

    Raises:
        UsageError: the library cannot begin.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self._library: TensorBoard | WeightsAndBiases | None = None
        try:
            self._library = LIBRARIES[name](run)
        except Exception as error:
            raise UsageError(f"--logger {name}: {_reason(error)}") from error

    def __call__(self, record: Record) -> None:
        if found := figures(record):
            self._attempt(lambda library: library.write(record["step"], found))

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self._attempt(lambda library: library.close(kind is None))

    def _attempt(self, act: Callable[[TensorBoard | WeightsAndBiases], None]) -> None:
        if self._library is None:
            return
        try:
            act(self._library)
        except Exception as error:
            self._library = None
            text = f"--logger {self.name}: the run goes on without it: {_reason(error)}"
            warnings.warn(text, JetfireWarning, stacklevel=3)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, JetfireError) else f"{type(error).__name__}: {error}"


LIBRARIES: dict[str, type[TensorBoard | WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
