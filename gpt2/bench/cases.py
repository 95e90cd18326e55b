"""What the training bench can measure: named problems, the presets' among them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from jetfire.core.errors import UsageError, unknown
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.training import settings
from jetfire.gpt2.training.settings import Settings
from jetfire.nn.recipes import RECIPES

STEP, LLAMA_STEP = "gpt2_step", "llama_step"
BLOCK, LLAMA_BLOCK = "gpt2_block", "llama_block"


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
        captured: the whole step is one CUDA graph. Of a model alone.
        causal: attention has no mask where a fused model's has none, for the same reason. Of a
            model of `transformers` alone.
    """

    name: str
    compiled: bool = True
    fp8: Literal["tensorwise", "rowwise"] | None = None
    own_loss: bool = False
    mode: Literal["reduce-overhead"] | None = None
    captured: bool = False
    causal: bool = False


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
INT8 = tuple(r.name for r in RECIPES.values() if r.block is not None and r.flow is not None)
# All but the one that the peers have.
MEASURED = tuple(recipe.name for recipe in RECIPES.values() if not recipe.plain)
SUITE = ("block", "wide", "gpt2-350m", "gpt2-124m")


@dataclass(frozen=True)
class _Sized:
    """Sizes of a model or of a block.

    Attributes:
        op: of its rows; preset: of the family, whose other settings it has.
    """

    op: ClassVar[str]
    preset: ClassVar[str] = "gpt2-124m"

    def __post_init__(self) -> None:
        self.run()

    def run(self, **changes: Any) -> Settings:
        """Return the settings of a run of one sequence, in BF16, but for some changes.

        Raises:
            UsageError: no model has these sizes.
        """
        sizes = {"layers": 1, **dataclasses.asdict(self), "batch": 1, "accumulate": 1}
        sizes.pop("vocabulary", None)
        return settings.make(self.preset, {**sizes, "recipe": "bf16", **changes})

    @property
    def shape(self) -> Shape:
        """Sizes of the model; a block alone has no vocabulary."""
        return self.run().shape(getattr(self, "vocabulary", 0))


@dataclass(frozen=True)
class StepProblem(_Sized):
    """One optimizer step of a GPT-2: `accumulate` micro-batches of batch × context tokens.

    50304 tokens fill whole rows of 64, so that no logit is padding that must be masked.
    """

    op = STEP

    layers: int
    heads: int
    width: int
    batch: int
    context: int
    vocabulary: int = 50304
    accumulate: int = 1


@dataclass(frozen=True, kw_only=True)
class LlamaStepProblem(StepProblem):
    """An optimizer step of a Llama with a head of its own, whose MLP is `hidden` wide."""

    op, preset = LLAMA_STEP, "llama-160m"

    kv_heads: int
    hidden: int


@dataclass(frozen=True)
class BlockProblem(_Sized):
    """Forward and backward of one block over batch × context tokens."""

    op = BLOCK

    width: int
    heads: int
    batch: int
    context: int


@dataclass(frozen=True)
class LlamaBlockProblem(BlockProblem):
    """Forward and backward of one block of Llama's, whose MLP is `hidden` wide."""

    op, preset = LLAMA_BLOCK, "llama-160m"

    kv_heads: int
    hidden: int


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
    """One problem, and the recipes to measure of it.

    Attributes:
        state: `STATE` settings of the recipes' steps that are not the defaults, by name.
    """

    problem: Problem
    recipes: Sequence[str] = INT8
    state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            self.problem.run(recipe=recipe, **self.state)

    @property
    def op(self) -> str:
        return self.problem.op

    @property
    def tokens(self) -> int:
        """Tokens per call."""
        return self.problem.batch * self.problem.context * self.as_dict().get("accumulate", 1)

    @property
    def flops(self) -> float:
        """Floating-point operations per call."""
        return self.tokens * self.problem.shape.flops_per_token

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.problem), **self.state}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.as_dict().items())
        return f"{self.op} {sizes}"


# Beside the presets, whose micro-batches these replace in part.
_SIZES: dict[str, dict[str, int]] = {
    "gpt2-124m": {"batch": 16},
    "tiny": {"vocabulary": 256},
    "tiny-llama": {"vocabulary": 256},
}
# What a step's recipes hold beside gradients, as training has it; the peers' is torch's AdamW.
STATE = ("logits", "optimizer", "weights")
_STEPS = {"gpt2": StepProblem, "llama": LlamaStepProblem}
# What `jetfire.models.sources` reads.
OTHER_MODELS = ", hf:NAME, a config.json or MODULE:FUNCTION"
_OTHERS: dict[str, Problem] = {
    "block": BlockProblem(width=4096, heads=32, batch=8, context=2048),
    "llama-block": LlamaBlockProblem(4096, 32, 4, 2048, kv_heads=32, hidden=11008),
    "wide": StepProblem(layers=4, heads=32, width=4096, batch=4, context=1024),
}


def names() -> list[str]:
    """Return what can be measured."""
    return [*_OTHERS, *settings.PRESETS]


def problem_of(name: str, changes: Mapping[str, str] | None = None) -> Problem:
    """A named problem with some of its sizes changed."""
    if name not in names():
        raise unknown(f"no case {name!r}", name, names(), OTHER_MODELS)
    found: Any = _OTHERS[name] if name in _OTHERS else _step_of(name)
    changed: Problem = replace(found, **_integers(found, changes or {}))
    return changed


def case_of(name: str, changes: Mapping[str, str], recipes: Sequence[str]) -> TrainingCase:
    """Return a named problem's case.

    Args:
        changes: sizes of the problem, and `STATE` of a step's recipes.

    Raises:
        UsageError: there is no such problem, size, setting or recipe.
    """
    chosen = recipes_of(recipes)
    named = {one: text for one, text in changes.items() if one in STATE}
    sizes = {one: text for one, text in changes.items() if one not in STATE}
    problem = problem_of(name, sizes)
    if named and not isinstance(problem, StepProblem):
        one = next(iter(named))
        raise UsageError(f"--set {one}={named[one]}: {name} takes no step: expected a preset")
    usual = problem.run()
    state = {
        one: value for one, value in settings.checked(named).items() if value != getattr(usual, one)
    }
    return TrainingCase(problem, chosen, state)


def _step_of(preset: str) -> StepProblem:
    """Return a micro-batch's step of a preset."""
    chosen = settings.make(preset, {})
    kind = _STEPS[chosen.family]
    known = {one.name for one in dataclasses.fields(kind)} - {"accumulate"}
    sizes = {name: size for name, size in chosen.as_dict().items() if name in known}
    return kind(**{**sizes, **_SIZES.get(preset, {})})


def _integers(problem: Problem, changes: Mapping[str, str]) -> dict[str, int]:
    known = [one.name for one in dataclasses.fields(problem)]
    for name, text in changes.items():
        if name not in known:
            more = STATE if isinstance(problem, StepProblem) else ()
            raise unknown(f"--set {name}={text}", name, [*known, *more])
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
            raise UsageError(
                f"--set {name}={text}: expected an integer of at least 1, and of at most 18 digits"
            )
    return {name: int(text) for name, text in changes.items()}


def peers_of(names: Sequence[str], known: Iterable[str] = PEERS) -> list[str]:
    """Return peers by name: all where no name is given; ``none`` is BF16 eager alone.

    Raises:
        UsageError: a name is no peer's.
    """
    if list(names) == ["none"]:
        return [EAGER]
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
    usual = settings.make(preset, settings.joined(given, {"data": data})).recipe
    return [
        settings.make(preset, settings.joined(given, {"data": data, "recipe": recipe}))
        for recipe in recipes_of(recipes or [usual])
    ]


def recipes_of(names: Sequence[str]) -> list[str]:
    """Recipes by name; all that are INT8 where none is given."""
    chosen = list(dict.fromkeys(names or INT8))
    for name in chosen:
        if name not in MEASURED:
            raise unknown(f"--recipe {name}", name, MEASURED)
    return chosen
