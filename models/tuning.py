"""`jetfire train tune MODEL`: tune every problem that a step of any model asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jetfire.core.device import Device
from jetfire.gpt2.bench import tuning
from jetfire.gpt2.bench.cases import EAGER
from jetfire.measure.plan import Case
from jetfire.models.bench import case_of
from jetfire.models.cases import ModelCase
from jetfire.models.subject import ModelSubject
from jetfire.tuner.options import TuneOptions

_LAYERS = 2  # the first reads no other's codes, and the last one's gradient comes without any


def run(asked: TuneOptions, word: str, texts: Sequence[str], recipes: Sequence[str]) -> None:
    """Tune what a model's steps ask for in some recipes.

    Args:
        word: names the model, as for `jetfire train bench`; texts: of `--set`.

    Raises:
        JetfireError: as `jetfire.gpt2.bench.tuning.tune` does.
    """

    def found(device: Device) -> Iterator[dict[str, list[Case]]]:
        case = case_of(word, texts, recipes, device)
        for name in case.recipes:
            yield cases(case, name, device, asked.kernels)

    tuning.tune(asked, found)


def cases(
    case: ModelCase, recipe: str, device: Device, kernels: Sequence[str] = ()
) -> dict[str, list[Case]]:
    """Return the problems that a step in a recipe gives each kernel, by its name.

    The step is run as it is, whatever `case` says: under torch.compile the problems are the same.

    Args:
        kernels: as `jetfire.gpt2.bench.tuning.planned` has them.
    """
    sizes = case.source.fields()
    few = case.source.sample(sizes.get("batch", 1), sizes.get("context", 1), _LAYERS)
    subject = ModelSubject(replace(case, source=few, run=EAGER), recipe, device.torch_device, 0)
    return tuning.planned(subject.first, device, kernels)
