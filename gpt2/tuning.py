"""`jetfire train tune`: tune every problem that a training step asks for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import torch

from jetfire.bench.plan import Case
from jetfire.gpt2.model import GPT2, Shape
from jetfire.gpt2.settings import Settings
from jetfire.gpt2.step import Step
from jetfire.ops import library
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireWarning
from jetfire.tuner import command
from jetfire.tuner.session import Asked


def cases(settings: Settings, vocabulary: int, device: Device) -> dict[str, list[Case]]:
    """Kernel name → the problems that one micro-batch's step gives it, found by taking one.

    Args:
        vocabulary: tokens that the model knows.
    """
    where = device.torch_device
    shape = Shape(
        min(2, settings.layers), settings.heads, settings.width, settings.context, vocabulary,
        settings.dropout,
    )  # fmt: skip
    with where:
        model = GPT2(shape, settings.recipe)
    step = Step(model, dataclasses.replace(settings, accumulate=1, compile=False), where)
    ids = torch.randint(vocabulary, (settings.batch, settings.context), device=where)
    before = {(op.name, problem) for op, problem, _ in library.planned()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JetfireWarning)  # that profiles are missing is why
        step([(ids, ids)])
    found: dict[str, list[Case]] = {}
    for op, problem, kernel in library.planned():
        if (op.name, problem) not in before:
            found.setdefault(kernel.name, []).append(Case(op, problem))
    return found


def run(asked: Asked, runs: Sequence[Settings], vocabulary: int = 50257) -> None:
    """Tune what the steps of some settings ask for, each kernel's problems in one search of many.

    Args:
        asked: the options of the tuner; its cases and kernels are set here.

    Raises:
        JetfireError: as `tuner.command.tune` does.
    """
    device = Device.parse(asked.device)
    wanted: dict[str, dict[Case, None]] = {}
    for settings in runs:
        for kernel, problems in cases(settings, vocabulary, device).items():
            wanted.setdefault(kernel, {}).update(dict.fromkeys(problems))
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    for kernel, problems in wanted.items():
        command.tune(dataclasses.replace(asked, cases=list(problems), kernels=[kernel]))
