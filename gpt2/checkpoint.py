"""Checkpoints: a folder each, whole or absent whatever kills the process.

RUN/checkpoints/step-00000100 holds `model.safetensors`, `optimizer.safetensors` and `state.json`
(step, settings, shape, best evaluation). It is written under another name, forced to the disk and
renamed; random numbers and data are functions of the step, so nothing else is needed to go on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from jetfire.gpt2.parallel import ALONE, Group, as_sharded, whole
from jetfire.nn import is_int4_state, weights_changed
from jetfire.ops.errors import JetfireError, UsageError

FOLDER, PREFIX, TEMPORARY = "checkpoints", "step-", ".part-"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """One on disk. `state` has ``step``, ``settings``, ``shape``, ``vocabulary`` and ``best``."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def model(self) -> dict[str, torch.Tensor]:
        return _load(self.path / MODEL)

    def optimizer(self) -> dict[str, torch.Tensor]:
        return _load(self.path / OPTIMIZER)


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder of its own.

    Raises:
        UsageError: there is none, or its state cannot be read.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path, {**state, "step": int(state["step"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path / STATE}: cannot be read: {error}") from None


def listed(run: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return sorted((run / FOLDER).glob(f"{PREFIX}[0-9]*"))


def find(folder: Path) -> Checkpoint | None:
    """The checkpoint that a folder is, or the newest of the run that it is; None for neither."""
    if (folder / STATE).is_file():
        return open_checkpoint(folder)
    paths = listed(folder)
    return open_checkpoint(paths[-1]) if paths else None


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments and counts by parameter name, so that any recipe can go on with them."""
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `optimizer_state` gave; what is of an INT4 recipe's steps goes where they are.

    Raises:
        UsageError: a tensor belongs to no parameter or has another shape.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None and is_int4_state(name):
            continue
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise UsageError(f"optimizer state {key}: the model has no such parameter")
        # Where the update reads counts: on a GPU beside the parameter, as with moments.
        value = value.to(parameter.device, copy=True)
        if value.dim():
            value = as_sharded(value, parameter).clone()
        optimizer.state[parameter][kind] = value


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor], where: Path) -> None:
    """Put parameters back; every name and shape must agree.

    But an INT4 recipe's steps may be absent on either side: another recipe has none, and where
    there are none the next batch in training sets them.

    Raises:
        UsageError: one does not; names the first.
    """
    own = model.state_dict()
    given = {
        name: value for name, value in tensors.items() if name in own or not is_int4_state(name)
    }
    steps = {name for name in own if is_int4_state(name)}
    for name in [*own, *given]:
        if name in steps and not steps & given.keys():
            continue
        there = tuple(given[name].shape) if name in given else "absent"
        wanted = tuple(own[name].shape) if name in own else "absent"
        if there != wanted:
            raise UsageError(f"{where}: {name} is {there}: the model's is {wanted}")
    model.load_state_dict({name: as_sharded(value, own[name]) for name, value in given.items()})
    weights_changed()  # of a sharded weight the layers see no change


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _on_cpu(tensors: Mapping[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """All of them whole in the first process, none in the others, which help to gather them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        gathered = whole(value.detach())
        if group.leads:
            found[name] = gathered.cpu().contiguous()
    return found


def save(
    run: Path, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer,
    group: Group = ALONE,
) -> Path:  # fmt: skip
    """Write the checkpoint of `state["step"]`, then drop the run's older ones but `keep` and best.

    It is the same whatever the processes: the first writes what all of them gather.

    Raises:
        JetfireError: the disk is full, or will not be written to.
    """
    path = run / FOLDER / f"{PREFIX}{state['step']:08d}"
    tensors = _on_cpu(model.state_dict(), group)
    moments = _on_cpu(optimizer_state(model, optimizer), group)

    def keep() -> Path:
        try:
            if not path.exists():
                _write(path, state, tensors, moments)
        except (OSError, SafetensorError) as error:
            raise JetfireError(f"checkpoint {path}: cannot be written: {error}") from None
        best = (state.get("best") or {}).get("step")
        prune(run, int(state["settings"]["keep"]), best)
        return path

    return group.once(keep)


def _write(
    path: Path, state: Mapping[str, Any], model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    part = path.parent / f"{TEMPORARY}{path.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(model, part / MODEL)
    save_file(optimizer, part / OPTIMIZER)
    (part / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    for name in (MODEL, OPTIMIZER, STATE):
        _sync(part / name)
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best; a removal cut short leaves no half of one."""
    for path in listed(run)[:-keep]:
        if best is None or path.name != f"{PREFIX}{best:08d}":
            gone = path.parent / f"{TEMPORARY}{path.name}"
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what a killed process left unfinished."""
    for path in (run / FOLDER).glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
