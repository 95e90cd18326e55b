"""`jetfire train bench MODEL`: a training step of any model, as rows `model_step`.

A step is forward under BF16 autocast, backward and fused AdamW over fp32 parameters. Each variant's
loss and gradients are compared with BF16 eager's in the same process before any is timed. Peers are
torch's own in BF16 (eager, under torch.compile, with its CUDA graphs, mode reduce-overhead, and as
one CUDA graph, by `jetfire.nn.CapturedStep`) and torchao's float8 training of the same linear
layers under torch.compile. Recipes are converted by `jetfire.nn.convert` and run as the problem's
`run` says.

`tflops` counts the linear layers' products alone. Rows have the further fields of
`jetfire.gpt2.bench`; the memory of CUDA graphs, reduce-overhead's or one, is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from jetfire.bench import command
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.bench import steps as training
from jetfire.gpt2.bench.cases import COMPILE, EAGER, TorchVariant
from jetfire.gpt2.bench.steps import LOSS_TOLERANCE, Deviation, TrainingBench, compared
from jetfire.gpt2.bench.subjects import Subject, Tensors
from jetfire.gpt2.training import settings
from jetfire.models import cases, sources
from jetfire.models.cases import ADAPTED_PEERS, PEERS, ModelCase, run_of
from jetfire.models.layers import traced
from jetfire.models.subject import ModelSubject

# Of a user's loss, which need not be a cross-entropy: the mean of the squares of two layers' output
# is off by 0.005 to 0.007.
OWN_LOSS_TOLERANCE = 0.05


class ModelBench(TrainingBench):
    """Measures training steps of models."""

    variants: ClassVar[Mapping[str, TorchVariant]] = PEERS

    def _peers_of(self, case: Any) -> list[str]:
        """Return the peers that a case has.

        Of the two that keep a step's memory in graphs it is one, where none was named.
        """
        peers = [peer for peer in self.peers if peer in ADAPTED_PEERS or not case.adapters]
        if self.chosen is None:
            other = cases.REDUCE_OVERHEAD if case.run == cases.GRAPH else cases.GRAPH
            peers = [peer for peer in peers if peer != other]
        return peers

    def _compared(self, case: Any, name: str, ours: Tensors, theirs: Tensors) -> Deviation:
        """Compare a recipe's first call with BF16 eager's; any name may be one of attention's."""
        return compared(
            ours,
            theirs,
            cases.recipe_of(name).noisy,
            attention=("",),
            loss_tolerance=OWN_LOSS_TOLERANCE if case.source.own else LOSS_TOLERANCE,
        )

    def _maker(self, case: Any) -> Callable[[str], Callable[[], Subject]]:
        return lambda name: partial(ModelSubject, case, name, self.where, self.seed)


def case_of(word: str, texts: Sequence[str], recipes: Sequence[str], device: Device) -> ModelCase:
    """Return what a model's word and `--set` stand for.

    Raises:
        UsageError: there is no such model, size or recipe.
    """
    run, changes = run_of(settings.split(texts))
    unit, changes = cases.unit_of(changes)
    adapters, changes = cases.adapters_of(changes)
    # Compiling for a CPU wants a C++ compiler.
    run = run or (COMPILE if device.kind == "cuda" else EAGER)
    if run == cases.GRAPH and device.kind != "cuda":
        raise UsageError(f"--set run={run}: expected a CUDA device, not {device.kind}")
    source = sources.parse(word, changes)
    found = traced(source)
    return ModelCase(
        source,
        cases.recipes_named(recipes),
        run,
        layers=[layer.name for layer in found.layers if not layer.kept],
        tokens=max((layer.m for layer in found.layers), default=0),
        flops=found.flops * (2 / 3 if adapters else 1),  # frozen weights have no gradient
        unit=unit,
        adapters=adapters,
    )


def bench(asked: command.BenchOptions, word: str, recipes: Sequence[str]) -> None:
    """Measure one model's step.

    Raises:
        JetfireError: with the exit code of what went wrong.
    """
    case = case_of(word, asked.settings, recipes, Device.parse(asked.device))
    training.run(asked, [case], training.command_again(asked, word, case.recipes), ModelBench)
