"""`jetfire train plan`: what a run will need of a GPU's memory, and what would make it fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jetfire.core import terminal
from jetfire.core.errors import UsageError
from jetfire.gpt2.data import corpora, tokenizers
from jetfire.gpt2.data.prepared import META, read_meta
from jetfire.gpt2.model.config import read_shape
from jetfire.gpt2.training.memory import Needs, needs
from jetfire.gpt2.training.options import TrainOptions
from jetfire.gpt2.training.settings import Settings, make
from jetfire.nn.recipes import RECIPES
from jetfire.report.table import Table
from jetfire.report.text import fixed

GIB = 2.0**30
# Tokens by tokenizer, and by text whose characters are known without it.
_VOCABULARIES = {"byte": 256, "gpt2": tokenizers.GPT2_VOCABULARY, "shakespeare-char": 65}


@dataclass(frozen=True)
class PlanOptions(TrainOptions):
    """The options of `jetfire train plan`.

    Attributes:
        preset: its name, or the path of a GPT-2's config.json.
        memory: bytes that the device has; None where it was not said.
    """

    memory: float | None = None
    as_json: bool = False

    def planned(self) -> tuple[Settings, int]:
        """Return the settings, and the number of tokens in the vocabulary.

        Raises:
            UsageError: there is no such preset, file or setting, or the vocabulary is not known.
        """
        if self.preset is None or not self.preset.endswith(".json"):
            settings = self.begun()
            return settings, _vocabulary(settings)
        shape = read_shape(Path(self.preset))
        names = ("layers", "heads", "width", "context", "dropout")
        given = {k: v for k, v in self.given().items() if k != "preset"}
        sizes = {name: getattr(shape, name) for name in names}
        return make("gpt2-124m", sizes | given), shape.vocabulary


def _vocabulary(settings: Settings) -> int:
    """Return the tokens that the run's data will have."""
    data = settings.data
    if data not in corpora.NAMED and (Path(data) / META).exists():
        return read_meta(Path(data))["vocabulary"]
    name = settings.tokenizer
    if name == "auto":
        name = corpora.TOKENIZERS.get(data, "gpt2")
    known = _VOCABULARIES.get(data if name == "char" else name)
    if known is None:
        raise UsageError(
            f"tokenizer=char: how many characters {data} has is known once it is prepared: "
            "expected --data FOLDER of jetfire train prepare"
        )
    return known


class Choice(NamedTuple):
    """What to give in place of what was asked for, and what the run needs then."""

    words: str
    needs: Needs


def choices(settings: Settings, vocabulary: int, limit: float) -> Iterator[Choice]:
    """Yield of every recipe, the settings' own first, the largest micro-batch within the limit.

    A step has as many tokens as before. A recipe of which none fits is left out.
    """
    for recipe in sorted(RECIPES, key=lambda name: name != settings.recipe):
        own: dict[str, Any] = {} if recipe == settings.recipe else _OWN
        parts = [n for n in range(1, settings.batch + 1) if settings.batch % n == 0]
        for graph, n in product(dict.fromkeys((settings.graph, "false")), parts):
            batch, accumulate = settings.batch // n, settings.accumulate * n
            one = replace(settings, recipe=recipe, batch=batch, graph=graph, **own)
            found = needs(replace(one, accumulate=accumulate), vocabulary)
            if found.total <= limit:
                words = f"--recipe {recipe} --set batch={batch},accumulate={accumulate}"
                if graph != settings.graph:
                    words += f",graph={graph}"
                yield Choice(words, found)
                break


_OWN = dict.fromkeys(("group", "block", "flow", "head"), "recipe")


def advice(settings: Settings, vocabulary: int, limit: float) -> str:
    """Return a line for a run that was out of memory: what it needs, and what needs less.

    Args:
        limit: bytes that it could have.
    """
    try:
        own = needs(settings, vocabulary)
    except UsageError as error:
        return f"expected a smaller batch, context or model (no plan: {error})"
    parts = sorted(own.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    text = f"by its sizes the run needs {own.total / GIB:.1f} GiB ({largest}) and could have "
    text += f"{limit / GIB:.1f}: expected "
    found = next(choices(settings, vocabulary, min(limit, 0.99 * own.total)), None)
    if found is None:
        return f"{text}a smaller model or context"
    return f"{text}{found.words}, which needs {found.needs.total / GIB:.1f}"


def plan(asked: PlanOptions) -> None:
    """Print what the run needs, and if that is more than there is, what would fit.

    Raises:
        UsageError: it needs more than `memory`; or no plan can be made.
    """
    settings, vocabulary = asked.planned()
    own, limit = needs(settings, vocabulary), asked.memory
    short = limit is not None and own.total > limit
    others = list(choices(settings, vocabulary, limit)) if short and limit is not None else []
    if asked.as_json:
        print(json.dumps(_fields(settings, vocabulary, own, limit, others), indent=1))
    else:
        _show(settings, vocabulary, own, others)
    if short and limit is not None:
        wanted = "one of these" if others else "a smaller model or context"
        what = f"{asked.preset} needs {own.total / GIB:.2f} GiB of {limit / GIB:.2f}"
        raise UsageError(f"{what}: expected {wanted}, or more memory")


def _fields(
    settings: Settings, vocabulary: int, own: Needs, limit: float | None, others: list[Choice]
) -> dict[str, Any]:
    instead = [{"give": one.words, "needs_gib": one.needs.total / GIB} for one in others]
    return {
        "settings": settings.as_dict(),
        "vocabulary": vocabulary,
        "parts_gib": {name: size / GIB for name, size in own.parts.items()},
        "peak": own.when,
        "peak_gib": own.peak / GIB,
        "evaluation_gib": own.beside / GIB,
        "needs_gib": own.total / GIB,
        "fits": None if limit is None else own.total <= limit,
        "instead": instead,
    }


def _show(settings: Settings, vocabulary: int, own: Needs, others: list[Choice]) -> None:
    one, console = settings, terminal.console(100)
    console.print(
        f"{one.recipe}, {one.layers} layers of width {one.width}, vocabulary {vocabulary} "
        f"({one.data}), {one.batch}×{one.context} tokens, {one.accumulate} times a step"
    )
    rows = [(name, fixed(size / GIB, 2)) for name, size in own.parts.items()]
    rows.append((f"peak, in {own.when}", fixed(own.peak / GIB, 2)))
    if own.beside:
        rows.append(("an evaluation beside the CUDA graph", fixed(own.beside / GIB, 2)))
    console.print(
        Table(("held at the peak", "GiB"), [*rows, ("in all", fixed(own.total / GIB, 2))]).rich()
    )
    if others:
        fits = [(choice.words, fixed(choice.needs.total / GIB, 2)) for choice in others]
        console.print(Table(("would fit", "GiB"), fits).rich())
