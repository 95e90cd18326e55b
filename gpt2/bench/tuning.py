"""`jetfire train tune CASE`: tune every problem that a training step or a block asks for."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from jetfire.core import calls, lookup, profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import Interrupted, JetfireError, JetfireWarning, NoDeviceError, UsageError
from jetfire.gpt2.bench.cases import StepProblem, TrainingCase
from jetfire.gpt2.bench.subjects import maker
from jetfire.gpt2.data import corpora, prepare, prepared, tokenizers
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.training.settings import Settings
from jetfire.gpt2.training.step import Step
from jetfire.measure.plan import Case
from jetfire.tuner import command, display
from jetfire.tuner.options import TuneOptions
from jetfire.tuner.search import FinishedSearch

Sized = TypeVar("Sized", Settings, StepProblem)


def vocabulary_of(settings: Settings) -> int:
    """Tokens that a run's model knows; nothing is prepared or downloaded to find out."""
    chosen: str = settings.tokenizer
    if chosen == "auto":
        chosen = corpora.TOKENIZERS.get(settings.data, "gpt2")
    named = settings.data in corpora.NAMED
    folder = prepare.default_folder([settings.data], chosen) if named else Path(settings.data)
    if (folder / prepared.META).is_file():
        return prepared.read_meta(folder)["vocabulary"]
    known = {"byte": tokenizers.Bytes.vocabulary, "gpt2": tokenizers.GPT2_VOCABULARY}
    if chosen not in known:
        raise UsageError(
            f"data {settings.data}: its vocabulary is not known before "
            f"jetfire train prepare {settings.data} --tokenizer {chosen}"
        )
    return known[chosen]


def planned(
    step: Callable[[], object], device: Device, kernels: Sequence[str] = ()
) -> dict[str, list[Case]]:
    """Return the problems that a step gives each kernel, by its name, found by taking it.

    Args:
        kernels: instead of those that the step calls, these of the same ops that take the problem;
            and the step's own where it is not tuned, as which is faster is known of tuned ones.
    """
    profiles.forget()  # and what was asked for before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JetfireWarning)  # that profiles are missing is why
        step()
    found: dict[str, list[Case]] = {}
    for call in calls.planned():
        problem = call.problem
        others = registry.kernels(call.op.name).values()
        named = [
            kernel
            for kernel in others
            if kernel.name in kernels
            and kernel.legal(problem, kernel.default(problem, device), device) is None
        ]
        if not kernels or (named and not lookup.exact(call.op, call.kernel, problem, device)):
            named.append(call.kernel)
        for kernel in dict.fromkeys(named):
            found.setdefault(kernel.name, []).append(Case(call.op, problem))
    return found


def cases(
    settings: Settings, vocabulary: int, device: Device, kernels: Sequence[str] = ()
) -> dict[str, list[Case]]:
    """Return the problems that a run's step gives each kernel, by its name.

    Args:
        vocabulary: tokens that the model knows.
        kernels: as `planned` has them.
    """
    where = device.torch_device
    alone = dataclasses.replace(_short(settings), compile=False, parallel="none")
    if settings.compile or settings.parallel != "none":  # autograd adds their gradients
        alone = dataclasses.replace(alone, accumulate=1)
    with where:
        model = model_of(alone.shape(vocabulary), settings.precision)
    step = Step(model, alone, where)
    ids = torch.randint(vocabulary, (settings.batch, settings.context), device=where)
    return planned(lambda: step([(ids, ids)] * alone.accumulate), device, kernels)


def case_problems(
    case: TrainingCase, recipe: str, device: Device, kernels: Sequence[str] = ()
) -> dict[str, list[Case]]:
    """Return the problems that a case of `train bench` gives each kernel in a recipe, by its name.

    Args:
        kernels: as `planned` has them.
    """
    if isinstance(case.problem, StepProblem):
        case = dataclasses.replace(case, problem=_short(case.problem))
    subject = maker(case, device.torch_device, 0)(recipe)()
    return planned(subject.first, device, kernels)


def _short(step: Sized) -> Sized:
    """Return a step that asks for the same problems in less time.

    The first of two layers reads no other's codes, and the last one's gradient comes without any.
    The first of two micro-batches writes gradients, and the second adds to them.
    """
    return dataclasses.replace(step, layers=min(2, step.layers), accumulate=min(2, step.accumulate))


def run(asked: TuneOptions, runs: Sequence[Settings]) -> None:
    """Tune what the steps of some settings ask for.

    Raises:
        JetfireError: as `tune` does.
    """

    def found(device: Device) -> Iterator[dict[str, list[Case]]]:
        for settings in runs:
            yield cases(settings, vocabulary_of(settings), device, asked.kernels)

    tune(asked, found)


def run_case(asked: TuneOptions, case: TrainingCase) -> None:
    """Tune what a case of `train bench` asks for in its recipes.

    Raises:
        JetfireError: as `tune` does.
    """

    def found(device: Device) -> Iterator[dict[str, list[Case]]]:
        for recipe in case.recipes:
            yield case_problems(case, recipe, device, asked.kernels)

    tune(asked, found)


def tune(
    asked: TuneOptions, find: Callable[[Device], Iterable[Mapping[str, Sequence[Case]]]]
) -> None:
    """Tune what steps ask for, each kernel's problems in one search of many.

    Args:
        asked: the options of the tuner, whose cases are set here.
        find: returns what each step asks for, as `planned` does.

    Raises:
        JetfireError: as `tuner.command.tune` does; the other kernels have been tuned all the same.
    """
    device = Device.parse(asked.device)
    if device.kind == "cpu":
        raise NoDeviceError(f"nothing to tune for training on {device.label}: expected a GPU")
    os.environ.pop(lookup.STRICT, None)  # a profile that is missing is no error here
    wanted: dict[str, dict[Case, None]] = {}
    for found in find(device):
        for kernel, problems in found.items():
            wanted.setdefault(kernel, {}).update(dict.fromkeys(problems))
    if not wanted:
        names = ",".join(asked.kernels)
        raise UsageError(f"--kernel {names}: takes no problem of these steps")
    gc.collect()
    torch.cuda.empty_cache()  # the tuner measures in processes of its own
    _tune_all(asked, {kernel: list(problems) for kernel, problems in wanted.items()})


def _tune_all(asked: TuneOptions, wanted: dict[str, list[Case]]) -> None:
    """Tune each kernel in its share of the time that is left, by how many problems it has.

    What the searches came to is shown in one, once the last of them has ended.
    """
    searches: list[Sequence[FinishedSearch]] = []
    try:
        _tune_each(asked, wanted, lambda tuned, *_: searches.append(tuned))
    finally:
        if searches:  # a dry run has none
            tuned = [one for of_kernel in searches for one in of_kernel]
            display.show(tuned, Device.parse(asked.device), asked.format)


def _tune_each(asked: TuneOptions, wanted: dict[str, list[Case]], give: command.Give) -> None:
    """Tune each kernel, and raise the first error once all have had their turn."""
    end = time.monotonic() + asked.budget_s
    left = sum(map(len, wanted.values()))
    failed: list[JetfireError] = []
    for kernel, problems in wanted.items():
        share = (end - time.monotonic()) * len(problems) / left
        left -= len(problems)
        try:
            of_kernel = dataclasses.replace(asked, cases=problems, kernels=[kernel], budget_s=share)
            command.tune(of_kernel, give)
        except Interrupted:
            raise
        except JetfireError as error:
            failed.append(error)
    if failed:
        raise failed[0]
