"""`jetfire train plan`: what a run will need of a GPU's memory, and what would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jetfire.core import terminal
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing
from jetfire.gpt2.data import corpora, tokenizers
from jetfire.gpt2.data.prepared import META, read_meta
from jetfire.gpt2.model.layouts import shape_of
from jetfire.gpt2.training.memory import Needs, needs
from jetfire.gpt2.training.options import TrainOptions, check_data
from jetfire.gpt2.training.settings import Settings, make, split
from jetfire.nn.recipes import RECIPES
from jetfire.report import output
from jetfire.report.table import Table
from jetfire.report.text import fixed, plural

GIB = 2.0**30
# Tokens by tokenizer, and by the text whose characters are known.
_VOCABULARIES = {"byte": 256, "gpt2": tokenizers.GPT2_VOCABULARY, "shakespeare-char": 65}
_MICROS = 1 << 16  # of a step at most, as `Settings` bounds them
_OWN: dict[str, Any] = dict.fromkeys(("group", "block", "flow", "head", "logits"), "recipe")


@dataclass(frozen=True)
class PlanOptions(TrainOptions):
    """The options of `jetfire train plan`.

    Attributes:
        preset: its name, or the path of a GPT-2's or a Llama's config.json.
        memory: bytes that the device has; None where it was not said.
    """

    memory: float | None = None
    format: str = "table"

    def planned(self) -> tuple[Settings, int]:
        """Return the settings, and the number of tokens in the vocabulary.

        Raises:
            UsageError: there is no such preset, file or setting, the vocabulary is not known, or
                there are data or a tokenizer beside a file that says it.
        """
        if self.preset is None or not self.preset.endswith(".json"):
            settings = self.begun()
            check_data(settings.data, self.data or settings.data)
            return settings, _vocabulary(settings)
        file = Path(self.preset)
        try:
            shape = shape_of(file)
        except Missing as error:
            raise UsageError(
                f"{error}: expected a preset, or GPT-2's or Llama's config.json"
            ) from None
        given = self.given()
        if "data" in given:
            named = self.data or split(self.settings)["data"]
            raise UsageError(f"--data {named}: {file} has a vocabulary of its own")
        if "tokenizer" in given:
            named = given["tokenizer"]
            raise UsageError(f"tokenizer={named}: {file} has a vocabulary of its own")
        sizes = {**dataclasses.asdict(shape), "family": shape.family}
        vocabulary = sizes.pop("vocabulary")
        base = "gpt2-124m"
        return make(base, {**sizes, **given, "preset": base}), vocabulary


def _vocabulary(settings: Settings) -> int:
    """Return how many tokens the run's data will have."""
    data = settings.data
    if data not in corpora.NAMED and (Path(data) / META).exists():
        return read_meta(Path(data))["vocabulary"]
    usual = corpora.TOKENIZERS.get(data, "gpt2")
    name = usual if settings.tokenizer == "auto" else settings.tokenizer
    known = _VOCABULARIES.get(data if name == "char" else name)
    if known is None:
        raise UsageError(
            f"tokenizer=char: how many characters {data} has is known once it is prepared: "
            "expected --data FOLDER of jetfire train prepare"
        )
    return known


class Fit(NamedTuple):
    """What to give in place of what was asked for, and what the run needs then."""

    words: str
    needs: Needs


def fitting(settings: Settings, vocabulary: int, limit: float) -> Iterator[Fit]:
    """Yield for every recipe, the settings' own first, the largest micro-batch within the limit.

    A step has as many tokens as before. A recipe of which none fits is left out.
    """
    for recipe in dict.fromkeys((settings.recipe, *RECIPES)):
        own = {} if recipe == settings.recipe else _OWN
        try:
            found = _largest(replace(settings, recipe=recipe, **own), vocabulary, limit)
        except UsageError:  # its blocks or groups do not divide a size, or it is not counted
            continue
        if found is not None:
            yield found


def _largest(settings: Settings, vocabulary: int, limit: float) -> Fit | None:
    """Return the largest micro-batch within the limit."""
    batch, micros = settings.batch, settings.accumulate
    parts = [n for n in range(1, batch + 1) if batch % n == 0 and n * micros <= _MICROS]
    for graph, n in product(dict.fromkeys((settings.graph, "false")), parts):
        sizes = {"batch": batch // n, "accumulate": micros * n}
        found = needs(replace(settings, graph=graph, **sizes), vocabulary)
        if found.total <= limit:
            given = sizes if graph == settings.graph else {**sizes, "graph": graph}
            words = ",".join(f"{name}={value}" for name, value in given.items())
            return Fit(f"--recipe {settings.recipe} --set {words}", found)
    return None


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
    found = next(fitting(settings, vocabulary, min(limit, 0.99 * own.total)), None)
    if found is None:
        return f"{text}a smaller model or context"
    return f"{text}{found.words}, which needs {found.needs.total / GIB:.1f}"


def plan(asked: PlanOptions) -> None:
    """Print what the run needs, and if that is more than there is, what would fit.

    Raises:
        UsageError: it needs more than `memory`; or no plan can be made.
    """
    settings, vocabulary = asked.planned()
    own, limit = needs(settings, vocabulary), asked.memory or float("inf")
    others = [] if own.total <= limit else list(fitting(settings, vocabulary, limit))
    record: dict[str, Any] = {
        "settings": settings.as_dict(),
        "vocabulary": vocabulary,
        "parts_gib": {name: size / GIB for name, size in own.parts.items()},
        "peak": own.when,
        "peak_gib": own.peak / GIB,
        "evaluation_gib": own.beside / GIB,
        "needs_gib": own.total / GIB,
        "fits": None if asked.memory is None else own.total <= limit,
        "instead": [{"give": x.words, "needs_gib": x.needs.total / GIB} for x in others],
    }
    output.give(
        asked.format,
        record,
        lambda: _show(settings, vocabulary, own, others),
        lambda: {title: _table(title, sizes) for title, sizes in _sizes(own, others).items()},
        lambda: _lines(own, others),
    )
    if own.total > limit:
        what = f"{asked.preset} needs {own.total / GIB:.2f} GiB of {limit / GIB:.2f}"
        wanted = "one of these" if others else "a smaller model or context"
        raise UsageError(f"{what}: expected {wanted}, or more memory")


def _show(settings: Settings, vocabulary: int, own: Needs, others: Sequence[Fit]) -> None:
    one, console = settings, terminal.console(100)
    console.print(
        f"{one.recipe}, {plural(one.layers, 'layer')} of width {one.width}, "
        f"vocabulary {vocabulary} ({one.data}), {one.batch}×{one.context} tokens, "
        f"{plural(one.accumulate, 'time')} per step"
    )
    for title, sizes in _sizes(own, others).items():
        console.print(_table(title, sizes).rich(folded=(0,)))


def _sizes(own: Needs, others: Sequence[Fit]) -> dict[str, dict[str, float]]:
    """Return bytes by what needs them, in each of the tables that has any."""
    sizes = {**own.parts, f"peak, in {own.when}": own.peak}
    if own.beside:
        sizes |= {"an evaluation beside the CUDA graph": own.beside, "in all": own.total}
    instead = {one.words: one.needs.total for one in others}
    return {"held at the peak": sizes} | ({"would fit": instead} if instead else {})


def _table(title: str, sizes: Mapping[str, float]) -> Table:
    return Table((title, "GiB"), [(name, fixed(size / GIB, 2)) for name, size in sizes.items()])


def _lines(own: Needs, others: Sequence[Fit]) -> list[dict[str, Any]]:
    """Return a record per line of the tables, for CSV."""
    return [
        {"table": title, "what": name, "gib": size / GIB}
        for title, sizes in _sizes(own, others).items()
        for name, size in sizes.items()
    ]
