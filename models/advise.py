"""`jetfire advise MODEL`: what each linear layer takes and loses in INT8, and what to convert.

A layer's time is that of its three products; in INT8 also of all that its forward and backward
launch beside them (quantising input, weight and gradient, and the bias's gradient). Casts in BF16
and FP8 are not counted, which favours these. One recipe is advised for the whole model, the one
that gains most: a layer is converted where it is then faster than BF16 and exact enough.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, first_line
from jetfire.core.problem import Block
from jetfire.gpt2.bench.cases import COMPILE
from jetfire.gpt2.data import tokens
from jetfire.gpt2.training import settings
from jetfire.measure import timer
from jetfire.measure.runner import memory_free
from jetfire.models import advice_text, sources, sqnr
from jetfire.models.advice import Advice, Advised, chosen, judged, pattern
from jetfire.models.cases import RUNS, ModelCase, run_of
from jetfire.models.costs import Cost, Measured, Times, cost_of, shipped
from jetfire.models.layers import LinearLayer, Traced, step_of, traced
from jetfire.models.options import AdviseOptions
from jetfire.models.problems import problems_of
from jetfire.models.sources import Batch, ModelSource
from jetfire.models.sqnr import Sqnr
from jetfire.models.subject import ModelSubject
from jetfire.nn import recipes

# Of what a CPU computes the SQNR: sequences, tokens of each and layers; rows and features of an
# operand. With all of them llama-4x4096 took over 8 minutes on two busy cores.
SAMPLE, FEATURES = (1, 128, 2), 1024
_STEPS, _STEP_MS = 10, 100.0


def advise(asked: AdviseOptions) -> None:
    """Print what to convert.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    device = Device.parse(asked.device)
    run, changes = run_of(settings.split(asked.settings))
    source = sources.parse(asked.model, changes, presets=True)
    found = traced(source)
    if not found.layers:
        raise UsageError(f"{source.name}: it calls no linear layer: expected a model that does")
    times = _times(asked, found, device)
    costs = {layer.name: _costs(layer, asked.recipes, times) for layer in found.layers}
    exact, batch = _exact(asked, source, found, device)
    advices = [
        Advice(layer, costs[layer.name], _of_layer(layer.name, exact)) for layer in found.layers
    ]
    recipe = chosen(advices, asked.recipes, asked.least)
    verdicts = [judged(advice, recipe, asked.least) for advice in advices]
    advised = Advised(source.fields(), times.source, batch, recipe, verdicts, found.left)
    if device.kind == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        advised = replace(advised, run=run or COMPILE, step_ms=_step(source, run, device, asked))
    advice_text.show(advised, asked.recipes, asked.format)


def _times(asked: AdviseOptions, found: Traced, device: Device) -> Times:
    """Return where times come from: this GPU, all of whose are measured now, or shipped rows."""
    if device.kind == "cpu":
        times = shipped()
        terminal.note(f"no GPU in use ({device.name}): times are {times.source}, or missing")
        return times
    measured = Measured(device, asked.seed, asked.debug)
    measured.measure(
        one
        for layer in found.layers
        for name in asked.recipes
        for one in problems_of(layer, _block(name))
    )
    return measured


def _costs(layer: LinearLayer, names: Sequence[str], times: Times) -> dict[str, Cost]:
    return {name: cost_of(problems_of(layer, _block(name)), layer.calls, times) for name in names}


def _exact(
    asked: AdviseOptions, source: ModelSource, found: Traced, device: Device
) -> tuple[dict[str, dict[str, Sqnr]], str]:
    """Return layers' SQNR by name and of what batch it is; on a CPU of a sample."""
    if not asked.sqnr:
        return {}, ""
    most = None
    if device.kind == "cpu":
        source, most = source.sample(*SAMPLE), FEATURES
        found = traced(source)
    names = [layer.name for layer in found.layers if not layer.kept]
    needed, free = 6 * found.parameters, memory_free(device)  # fp32, and one layer's codes
    if free is not None and needed > free:
        gib = f"about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        terminal.note(f"SQNR left out: {source.name} needs {gib}")
        return {}, ""
    torch.manual_seed(asked.seed)
    model, batch = source.make(device.torch_device)
    text = "random tokens"
    if asked.data is not None:
        batch, text = _given(asked, source, batch, device.torch_device)
    shape = source.fields()
    text = f"{shape['batch']}×{shape['context']} {text}" if "batch" in shape else "its own batch"
    if most is not None:
        layers = f" in {shape['layers']} layers" if "layers" in shape else ""
        text += f"{layers}, at most {most} features of an operand"
    blocks = {name: _block(name) for name in asked.recipes}
    try:
        with step_of(source):
            return sqnr.of_layers(model, batch, names, blocks, most), text
    except torch.OutOfMemoryError:
        terminal.note(f"SQNR left out: out of memory with {text}: give a smaller batch")
        return {}, ""


def _block(recipe: str) -> Block:
    block = recipes.get(recipe).block
    assert block is not None
    return block


def _given(
    asked: AdviseOptions, source: ModelSource, batch: Batch, where: torch.device
) -> tuple[Batch, str]:
    """Return a batch of prepared tokens in place of one of random tokens.

    Raises:
        UsageError: the batch is the user's own, or the model does not know the tokens.
    """
    assert asked.data is not None
    if source.own:
        raise UsageError(f"--data {asked.data}: {source.name} has its own batch: leave out --data")
    shape, text = source.fields(), f"tokens of {asked.data.name}"
    known = tokens.open_tokens(asked.data, terminal.note)
    known.require(shape["context"], shape["vocabulary"])
    ids, targets = tokens.batch(
        known.train, shape["context"], shape["batch"], seed=asked.seed, step=0, device=where
    )
    if isinstance(batch, tuple):
        return (ids, targets), text
    return {**batch, "input_ids": ids, "labels": ids}, text


def _of_layer(name: str, exact: Mapping[str, Mapping[str, Sqnr]]) -> dict[str, Sqnr]:
    """Return a layer's SQNR; where it was left out, the worst of those that it is repeated from."""
    alike = [exact[name]] if name in exact else []
    alike = alike or [one for other, one in exact.items() if pattern(other) == pattern(name)]
    found = {key for one in alike for key in one}
    return {key: min((one[key] for one in alike), key=lambda s: s.least) for key in sorted(found)}


def _step(
    source: ModelSource, run: str | None, device: Device, asked: AdviseOptions
) -> float | None:
    """Return the milliseconds of a BF16 step; None where it cannot be run, as is noted."""
    variant = RUNS[run or COMPILE].name
    try:
        case = ModelCase(source, (), variant)
        subject = ModelSubject(case, variant, device.torch_device, asked.seed)
        subject.first()
        calls = {variant: [subject.call]}
        timing = timer.time_calls(
            calls, device.torch_device, _STEPS, _STEP_MS, budget_s=60.0, capture=False
        )
    except (RuntimeError, UsageError) as error:
        terminal.note(f"step left out: {first_line(error)}")
        return None
    return timing[variant].ms
