"""Checkpoints: a folder each, whole or absent whatever kills the process.

RUN/checkpoints/step-00000100 holds `model.safetensors`, `optimizer.safetensors`, `state.json`
(step, settings, shape, best evaluation) and `SHA256SUMS`, the digests of the three as sha256sum
has them. It is written under another name, forced to the disk and renamed; random numbers and data
are functions of the step, so nothing else is needed to go on.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import Discriminator, Field, FiniteFloat, Tag
from torch import nn
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import MIB, Missing, Unreadable
from jetfire.core.schema import Fields, Plain
from jetfire.gpt2.data.vocabulary import Vocabulary
from jetfire.gpt2.model import tensors
from jetfire.gpt2.model.shape import LlamaShape, Shape
from jetfire.gpt2.model.tensors import as_sharded, of_recipe, whole
from jetfire.gpt2.training.parallel import ALONE, Group
from jetfire.gpt2.training.settings import (
    CHANGEABLE,
    MOMENT_BITS,
    SETTINGS,
    StepNumber,
    checked,
    of_all,
)
from jetfire.nn import RECIPES, moments
from jetfire.nn.sizes import moment_scales

FOLDER, PREFIX = "checkpoints", "step-"
MODEL, OPTIMIZER, STATE, SUMS = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "SHA256SUMS",
)


def _family(shape: Any) -> str:
    """Return the family that a shape in a file is of; earlier versions had one and said none."""
    family = shape.get("family") if isinstance(shape, dict) else None
    return "llama" if family == "llama" else "gpt2"


AnyShape = Annotated[
    Annotated[Shape, Tag("gpt2")] | Annotated[LlamaShape, Tag("llama")], Discriminator(_family)
]


class Best(TypedDict):
    step: StepNumber
    loss: FiniteFloat


class State(TypedDict):
    """What state.json holds.

    Attributes:
        processes: that trained together; tokens: as `TokenDigests`, or without digests.
        best: the lowest evaluation so far.
        sums: the file of digests beside it; earlier versions wrote none.
    """

    step: StepNumber
    settings: Fields
    vocabulary: Vocabulary
    shape: AnyShape
    processes: NotRequired[Annotated[int, Field(ge=1, le=1 << 16)]]
    tokens: NotRequired[Plain]
    best: NotRequired[Best | None]
    sums: NotRequired[Literal["SHA256SUMS"]]


@dataclass(frozen=True)
class Checkpoint:
    """One on disk, whose files are what was written."""

    path: Path
    state: State

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def shape(self) -> Shape:
        return self.state["shape"]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its run, as `of_all` has them."""
        return of_all(checked(self.state["settings"]), self.state.get("processes", 1))

    def model(self) -> dict[str, torch.Tensor]:
        return tensors.load(self.path / MODEL)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put its parameters into a model, and what AdamW keeps of them into its optimizer."""
        tensors.load_model(model, self.model(), self.path)
        if optimizer is not None:
            load_optimizer(model, optimizer, tensors.load(self.path / OPTIMIZER))


def open_checkpoint(
    path: Path,
    parts: Sequence[str] = (MODEL, OPTIMIZER),
    begun: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint in a folder of its own.

    Args:
        parts: the files of tensors that are wanted; others may be missing.
        begun: settings of the run that it must be of, as far as they are known.

    Raises:
        Unreadable: there is none; it is not what was written, or not of one model.
    """
    saved = Checkpoint(path, schema.load(path / STATE, State))
    _check_sums(saved, (STATE, *parts))
    _check_state(saved)
    if begun is not None:
        _check_run(saved, begun)
    for part in parts:
        _check_tensors(saved, part)
    return saved


def _check_sums(saved: Checkpoint, names: Sequence[str]) -> None:
    file = saved.path / SUMS
    try:
        text = files.read(file, MIB).decode(errors="replace")
    except Missing:
        if "sums" in saved.state:
            raise
        warnings.warn(
            f"{saved.path}: has no {SUMS}, as earlier versions wrote none: its files are not "
            "checked",
            JetfireWarning,
            stacklevel=2,
        )
        return
    sums = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", text, re.M)}
    for name in names:
        if sums.get(name) != files.digest(saved.path / name):
            raise Unreadable(saved.path / name, f"is damaged: its SHA-256 is not that in {SUMS}")


def _check_state(saved: Checkpoint) -> None:
    """See that the folder's name, settings and shape tell of one model at one step."""
    file, state, shape = saved.path / STATE, saved.state, saved.shape
    name = saved.path.name
    if name.startswith(PREFIX) and name != f"{PREFIX}{saved.step:08d}":
        raise Unreadable(file, f"is of step {saved.step}, not {name}'s")
    told = {"family": "gpt2", **state["settings"], "vocabulary": state["vocabulary"]}
    for name, size in _described(shape).items():
        if told.get(name) != size:
            reason = f"{name} is {str(told.get(name))[:50]} in settings, {size} in shape"
            raise Unreadable(file, reason)
    try:
        shape.check(RECIPES["bf16"])
    except UsageError as error:
        raise Unreadable(file, str(error)) from None


def _check_run(saved: Checkpoint, begun: Mapping[str, Any]) -> None:
    """See that the checkpoint is of the run that began with these settings."""
    file = saved.path / STATE
    try:
        own = saved.settings
    except UsageError as error:
        raise Unreadable(file, str(error)) from None
    for name in own.keys() & begun.keys() - CHANGEABLE:
        mine, expected = own[name], begun[name]
        if mine != expected:
            reason = f"{name}={mine} is another run's: {SETTINGS} has {expected}"
            if name == "accumulate":
                reason = f"{mine} micro-batches a step are another run's: expected {expected}"
            raise Unreadable(file, reason)


def _described(shape: Shape) -> dict[str, Any]:
    """Return the sizes and their family, as a file has them."""
    return {**dataclasses.asdict(shape), "family": shape.family}


def _check_tensors(saved: Checkpoint, part: str) -> None:
    """See that a file's tensors are those of the shape, before a model is built of it."""
    narrow = part == MODEL and saved.state["settings"].get("weights") == "bf16"
    wanted = {
        name: tensors.Kind("BF16" if narrow and moment_scales(size) else "F32", size)
        for name, size in saved.shape.parameters().items()
    }
    if part == OPTIMIZER:
        in_codes = MOMENT_BITS.get(saved.state["settings"].get("optimizer", "")) == 8
        wanted = {
            f"{name}/{what}": kind
            for name, whole in wanted.items()
            for what, kind in _kept(whole.shape, in_codes).items()
        }
    found = tensors.header(saved.path / part)
    for name in sorted(wanted.keys() | found.keys()):
        parameter = name if part == MODEL else name.rpartition("/")[0]
        if found.get(name) != wanted.get(name) and not of_recipe(parameter):
            reason = f"{name} is {found.get(name, 'absent')}: expected {wanted.get(name, 'none')}"
            raise Unreadable(saved.path / part, reason)


def _kept(shape: tuple[int, ...], in_codes: bool) -> dict[str, tensors.Kind]:
    """Return what AdamW keeps of a parameter: moments, in fp32 or as codes, and a count."""
    scales = moment_scales(shape) if in_codes else None
    of_moment = tensors.Kind("F32" if scales is None else "I8", shape)
    kept = {"step": tensors.Kind("F32", ()), **dict.fromkeys(moments.MOMENTS, of_moment)}
    if scales is not None:
        kept |= dict.fromkeys(moments.SCALES, tensors.Kind("F32", scales))
    return kept


def _is_step(name: str) -> bool:
    return re.fullmatch(rf"{PREFIX}[0-9]{{8}}", name) is not None


def listed(run: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return sorted(path for path in (run / FOLDER).glob(f"{PREFIX}*") if _is_step(path.name))


def clean(run: Path) -> None:
    """Remove what killed processes left of checkpoints that they wrote or removed."""
    left = {path.name.split(".")[1] for path in (run / FOLDER).glob(f".{PREFIX}*")}
    for name in filter(_is_step, left):
        files.tidy(run / FOLDER, name)


def newest(
    run: Path,
    parts: Sequence[str] = (MODEL, OPTIMIZER),
    begun: Mapping[str, Any] | None = None,
) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint of a run that can be used, and the newer ones, each told in a warning.

    Args:
        parts, begun: as of `open_checkpoint`.

    Returns:
        None, and no newer ones, for a run without a checkpoint.
    """
    errors: list[Unreadable] = []
    paths = listed(run)
    for path in reversed(paths):
        try:
            saved = open_checkpoint(path, parts, begun)
        except Unreadable as error:
            errors.append(error)
            continue
        for passed in errors:
            text = f"{passed}: taking {path.name}, an older checkpoint"
            warnings.warn(text, JetfireWarning, stacklevel=2)
        return saved, paths[paths.index(path) + 1 :]
    if errors:
        first = errors[0]
        raise Unreadable(first.path, f"{first.reason}; no older checkpoint of {run} is whole")
    return None, []


def find(folder: Path, parts: Sequence[str] = (MODEL, OPTIMIZER)) -> Checkpoint | None:
    """The checkpoint that a folder is, or the newest whole one of the run that it is, if any.

    Raises:
        Unreadable: it cannot be used, or none of the run's can.
    """
    if (folder / STATE).is_file():
        return open_checkpoint(folder, parts)
    return newest(folder, parts)[0]


def set_aside(paths: Sequence[Path]) -> None:
    """Rename checkpoints that cannot be used, so that they are in nobody's way and not lost."""
    for path in paths:
        number, there = 1, path.with_name(f"{path.name}.damaged")
        while there.exists():
            number += 1
            there = path.with_name(f"{path.name}.damaged-{number}")
        with files.writing(path):
            path.rename(there)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments and counts by parameter name, so that any recipe can go on with them."""
    return {
        f"{name}/{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `optimizer_state` gave, but for steps that INT4 recipes once learned."""
    parameters = dict(model.named_parameters())
    for key, value in given.items():
        name, _, kind = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None and of_recipe(name):
            continue
        in_codes = f"{name}/{moments.SCALES[0]}" in given
        kinds = {} if parameter is None else _kept(tuple(parameter.shape), in_codes)
        if parameter is None or kind not in kinds or value.shape != kinds[kind].shape:
            raise UsageError(f"optimizer state {key}: the model has no such parameter")
        # Where the update reads counts: on a GPU beside the parameter, as with moments.
        value = value.to(parameter.device, copy=True)
        if value.dim():
            value = as_sharded(value, parameter).clone()
        optimizer.state[parameter][kind] = value
    moments.fit(optimizer)


def _on_cpu(values: Mapping[str, torch.Tensor], group: Group) -> dict[str, torch.Tensor]:
    """All of them whole in the first process, none in the others, which help to gather them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        gathered = whole(value.detach())
        if group.leads:
            found[name] = gathered.cpu().contiguous()
    return found


def save(
    run: Path,
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group = ALONE,
) -> Path:
    """Write the checkpoint of `state["step"]`, then drop the run's older ones but `keep` and best.

    It is the same whatever the processes: the first writes what all of them gather.

    Raises:
        Unwritable: the disk is full, or will not be written to.
    """
    path = run / FOLDER / f"{PREFIX}{state['step']:08d}"
    parameters = _on_cpu(model.state_dict(), group)
    kept = _on_cpu(optimizer_state(model, optimizer), group)

    def keep() -> Path:
        with files.new_folder(path, alone=True) as part:
            _write(part, state, parameters, kept)
        best = state.get("best")
        prune(run, int(state["settings"]["keep"]), best["step"] if best else None)
        return path

    return group.once(keep)


def _write(
    part: Path, state: State, model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]
) -> None:
    tensors.save(model, part / MODEL)
    tensors.save(optimizer, part / OPTIMIZER)
    kept = {**state, "shape": _described(state["shape"]), "sums": SUMS}
    text = json.dumps(kept, indent=1) + "\n"
    (part / STATE).write_text(text, encoding="utf-8")
    sums = (f"{files.digest(part / name)}  {name}\n" for name in (MODEL, OPTIMIZER, STATE))
    (part / SUMS).write_text("".join(sums), encoding="utf-8")


def prune(run: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` and the best; a removal cut short leaves no half of one."""
    for path in listed(run)[:-keep]:
        if best is None or path.name != f"{PREFIX}{best:08d}":
            with files.writing(path):
                files.remove(path)
