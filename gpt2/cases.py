"""What the training bench can measure: named problems, the presets' among them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from jetfire.core.errors import UsageError, unknown
from jetfire.gpt2 import settings
from jetfire.gpt2.utilisation import flops_per_token
from jetfire.nn.recipes import RECIPES

STEP, BLOCK = "gpt2_step", "gpt2_block"


@dataclass(frozen=True)
class TorchVariant:
    """What recipes are measured against: torch's own modules, under BF16 autocast.

    Attributes:
        name: as rows name it.
        compiled: by torch.compile.
        fp8: torchao's recipe of float8 training, for the blocks' linear layers.
        mode: how torch.compile compiles; None as it does by default.
        own_loss: the head and its loss are `jetfire.nn.linear_cross_entropy`, as recipes have them,
            so that what INT8 gains shows by itself. Of a step alone.
    """

    name: str
    compiled: bool = True
    fp8: Literal["tensorwise", "rowwise"] | None = None
    own_loss: bool = False
    mode: Literal["reduce-overhead"] | None = None


EAGER, COMPILE = "eager", "compile"
PEERS = {
    variant.name: variant
    for variant in (
        TorchVariant(EAGER, compiled=False),
        TorchVariant(COMPILE),
        TorchVariant("compile_own_loss", own_loss=True),
        TorchVariant("fp8_tensorwise", fp8="tensorwise"),
        TorchVariant("fp8_rowwise", fp8="rowwise"),
    )
}
INT8 = tuple(recipe.name for recipe in RECIPES.values() if recipe.block is not None)
# All but the one that the peers have.
MEASURED = tuple(recipe.name for recipe in RECIPES.values() if not recipe.plain)
SUITE = ("block", "wide", "gpt2-350m", "gpt2-124m")


@dataclass(frozen=True)
class StepProblem:
    """One optimizer step of a GPT-2: `accumulate` micro-batches of batch × context tokens.

    50304 tokens fill whole rows of 64, so that no logit is padding that must be masked.
    """

    layers: int
    heads: int
    width: int
    batch: int
    context: int
    vocabulary: int = 50304
    accumulate: int = 1

    def __post_init__(self) -> None:
        _check_heads(self.width, self.heads)


@dataclass(frozen=True)
class BlockProblem:
    """Forward and backward of one block over batch × context tokens."""

    width: int
    heads: int
    batch: int
    context: int

    def __post_init__(self) -> None:
        _check_heads(self.width, self.heads)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise UsageError(f"width={width}: expected a multiple of heads={heads}")


Problem = StepProblem | BlockProblem


class TrainingWork(Protocol):
    """What a training bench measures.

    Attributes:
        recipes: what is measured of it.
        op: of its rows.
        tokens, flops: of a call.
    """

    @property
    def recipes(self) -> Sequence[str]: ...

    @property
    def op(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def flops(self) -> float: ...

    def as_dict(self) -> dict[str, Any]:
        """Return a row's problem."""


@dataclass(frozen=True)
class TrainingCase:
    """One problem, and the recipes to measure of it."""

    problem: Problem
    recipes: Sequence[str] = INT8

    @property
    def op(self) -> str:
        return STEP if isinstance(self.problem, StepProblem) else BLOCK

    @property
    def tokens(self) -> int:
        """Tokens per call."""
        micros = self.problem.accumulate if isinstance(self.problem, StepProblem) else 1
        return micros * self.problem.batch * self.problem.context

    @property
    def flops(self) -> float:
        """Floating-point operations per call."""
        p = self.problem
        layers, vocabulary = 1, 0
        if isinstance(p, StepProblem):
            layers, vocabulary = p.layers, p.vocabulary
        sizes = {"layers": layers, "width": p.width, "heads": p.heads, "context": p.context}
        return self.tokens * flops_per_token(settings.make("gpt2-124m", sizes), vocabulary)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.problem)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.as_dict().items())
        return f"{self.op} {sizes}"


# Beside the presets, whose micro-batches these replace in part.
_SIZES: dict[str, dict[str, int]] = {
    "wide": {"layers": 4, "heads": 32, "width": 4096, "batch": 4, "context": 1024},
    "gpt2-124m": {"batch": 16},
    "tiny": {"vocabulary": 256},
}
_USUAL = {"batch": 8, "context": 1024}
# What `jetfire.models.sources` reads.
OTHER_MODELS = ", hf:NAME, a config.json or MODULE:FUNCTION"
_BLOCK = BlockProblem(width=4096, heads=32, batch=8, context=2048)


def names() -> list[str]:
    """What can be measured."""
    return ["block", "wide", *settings.PRESETS]


def problem_of(name: str, changes: Mapping[str, str] | None = None) -> Problem:
    """A named problem with some of its sizes changed.

    Raises:
        UsageError: there is no such problem or size, or a size is below 1.
    """
    if name not in names():
        raise unknown(f"no case {name!r}", name, names(), OTHER_MODELS)
    if name == "block":
        return replace(_BLOCK, **_integers(_BLOCK, changes or {}))
    found = StepProblem(**{**_USUAL, **_preset(name), **_SIZES.get(name, {})})
    return replace(found, **_integers(found, changes or {}))


def _preset(name: str) -> dict[str, int]:
    """A preset's sizes of one micro-batch."""
    preset = settings.PRESETS.get(name, {})
    wanted = ("layers", "heads", "width", "batch", "context")
    return {field: preset[field] for field in wanted if field in preset}


def _integers(problem: Problem, changes: Mapping[str, str]) -> dict[str, int]:
    known = [field.name for field in dataclasses.fields(problem)]
    for name, text in changes.items():
        if name not in known:
            raise unknown(f"--set {name}={text}", name, known)
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
            raise UsageError(
                f"--set {name}={text}: expected an integer of at least 1, and of at most 18 digits"
            )
    return {name: int(text) for name, text in changes.items()}


def peers_of(names: Sequence[str], known: Iterable[str] = PEERS) -> list[str]:
    """Peers by name; all where none is given.

    Raises:
        UsageError: one is none.
    """
    for name in names:
        if name not in known:
            raise unknown(f"--peer {name}", name, known)
    return list(names or known)


def runs_of(
    preset: str, recipes: Sequence[str], given: Sequence[str], data: str | None
) -> list[settings.Settings]:
    """The settings of a run with each recipe; with the preset's own where none is named.

    Args:
        given: further settings, ``key=value``.

    Raises:
        UsageError: there is no such preset, recipe or setting, or it has no kernel of ours.
    """
    values = settings.split(given)
    if data is not None:
        values["data"] = data
    chosen = recipes_of(recipes or [settings.make(preset, values).recipe])
    return [settings.make(preset, {**values, "recipe": recipe}) for recipe in chosen]


def recipes_of(names: Sequence[str]) -> list[str]:
    """Recipes by name; all that are INT8 where none is given.

    Raises:
        UsageError: one is none, or has no kernel of ours.
    """
    chosen = list(dict.fromkeys(names or INT8))
    for name in chosen:
        if name not in MEASURED:
            raise unknown(f"--recipe {name}", name, MEASURED)
    return chosen
