"""What the bench of any model measures: a source, recipes, and how the step is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetfire.core.errors import UsageError, unknown
from jetfire.gpt2.bench.cases import COMPILE, EAGER, INT8, MEASURED, TorchVariant, peers_of
from jetfire.gpt2.training import settings
from jetfire.models import sources
from jetfire.models.sources import ModelSource
from jetfire.nn.recipes import Recipe
from jetfire.nn.recipes import get as recipe_by_name

OP = "model_step"
SET = ("run", "parallel", "unit", "adapters")  # what a bench's `--set` says beside sizes
# What `convert` replaces has one block: `int8` and `int8-block128` are the same.
USUAL = ("int8",)
# Ends the name of a recipe whose layers are not only converted, but their blocks fused.
FUSED = "-fused"
REDUCE_OVERHEAD, GRAPH = "reduce_overhead", "graph"
COMPILE_CAUSAL = "compile_causal"
# How a model is spread over processes, `parallel` of its problem; where it is not, there is none.
FSDP = "fsdp"
# How a recipe's step is run, `run` of its problem; torch's own in BF16 is measured in each.
RUNS = {
    COMPILE: TorchVariant(COMPILE),
    EAGER: TorchVariant(EAGER, compiled=False),
    REDUCE_OVERHEAD: TorchVariant(REDUCE_OVERHEAD, mode="reduce-overhead"),
    # For a mask transformers asks the GPU about positions, which no graph can hold.
    GRAPH: TorchVariant(GRAPH, captured=True, causal=True),
}
PEERS = {
    variant.name: variant
    for variant in (
        RUNS[EAGER],
        RUNS[COMPILE],
        RUNS[REDUCE_OVERHEAD],
        RUNS[GRAPH],
        TorchVariant("fp8_tensorwise", fp8="tensorwise"),
        TorchVariant("fp8_rowwise", fp8="rowwise"),
        TorchVariant(COMPILE_CAUSAL, causal=True),
    )
}
# What takes the layers on which adapters are trained as they are: torchao has no frozen ones.
ADAPTED_PEERS = {name: variant for name, variant in PEERS.items() if variant.fp8 is None}
MOST_RANK = 1024
MOST_UNIT = 1000  # blocks, of any model
# Under FSDP2 a model's blocks are compiled, not the model, and no mask is made. Weights that it
# gathers move, so torch's own graphs are captured anew: 1.55 s for a step of 0.13 (GPT-2 350M, two
# H100s).
SPREAD_PEERS = {
    name: variant
    for name, variant in PEERS.items()
    if name not in (REDUCE_OVERHEAD, COMPILE_CAUSAL)
}


@dataclass(frozen=True)
class ModelCase:
    """A training step of a model, and the recipes to measure of it.

    Attributes:
        run: of `RUNS`, how the recipes' steps are run.
        layers: names of the linear layers that a recipe replaces.
        tokens: the most rows of a linear layer's input.
        flops: of the linear layers' products, forward and backward; attention's are not counted.
        parallel: how the model is spread over `processes`, `FSDP`; empty where there is one. Batch,
            tokens and flops are those of each.
        unit: how many blocks are gathered at once, where they are.
        adapters: the rank of the LoRA adapters that learn, on layers that do not; 0 for none.
    """

    source: ModelSource
    recipes: Sequence[str]
    run: str
    layers: Sequence[str] = ()
    tokens: int = 0
    flops: float = 0.0
    parallel: str = ""
    processes: int = 1
    unit: int = 1
    adapters: int = 0

    @property
    def op(self) -> str:
        return OP

    def as_dict(self) -> dict[str, Any]:
        spread = {"parallel": self.parallel, "processes": self.processes} if self.parallel else {}
        united = {"unit": self.unit} if self.unit > 1 else {}
        adapted = {"adapters": self.adapters} if self.adapters else {}
        return {**self.source.fields(), "run": self.run, **spread, **united, **adapted}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.as_dict().items())
        return f"{self.op} {sizes}"


def recipes_named(given: Sequence[str]) -> list[str]:
    """Return recipes by name; one that ends with `FUSED` has blocks fused, which is of INT8 alone.

    Raises:
        UsageError: one is none.
    """
    names = list(dict.fromkeys(given or USUAL))
    known = [*MEASURED, *(name + FUSED for name in INT8)]
    for name in names:
        if name not in known:
            raise unknown(f"--recipe {name}", name, known)
    return names


def recipe_of(name: str) -> Recipe:
    """Return the recipe of a name that may end with `FUSED`."""
    return recipe_by_name(name.removesuffix(FUSED))


def run_of(changes: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return how the step is to be run, None where nothing says, and the other changes.

    Raises:
        UsageError: a step is not run that way.
    """
    rest = {name: text for name, text in changes.items() if name != "run"}
    run = changes.get("run")
    if run is not None and run not in RUNS:
        raise unknown(f"--set run={run}", run, RUNS)
    return run, rest


def parallel_of(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Return how a model is to be spread, empty where nothing says, and the other texts of `--set`.

    Raises:
        UsageError: a model is not spread that way, or a step not run so then.
    """
    changes = settings.split(texts)
    parallel = changes.pop("parallel", "")
    if parallel and parallel != FSDP:
        raise unknown(f"--set parallel={parallel}", parallel, [FSDP])
    if parallel and changes.get("run") == REDUCE_OVERHEAD:
        raise UsageError(
            f"--set run={REDUCE_OVERHEAD} parallel={parallel}: expected run={COMPILE}, {EAGER} or "
            f"{GRAPH}"
        )
    return parallel, [f"{name}={text}" for name, text in changes.items()]


def unit_of(changes: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return how many blocks FSDP2 is to gather at once, 1 where nothing says, and other changes.

    Raises:
        UsageError: it is no such number.
    """
    return _number_of("unit", changes, 1, f"a number of blocks from 1 to {MOST_UNIT}", MOST_UNIT)


def adapters_of(changes: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return the rank of a model's adapters, 0 where nothing says, and the other changes.

    Raises:
        UsageError: it is no rank.
    """
    return _number_of("adapters", changes, 0, f"a rank from 1 to {MOST_RANK}", MOST_RANK)


def _number_of(
    name: str, changes: Mapping[str, str], usual: int, expected: str, most: int
) -> tuple[int, dict[str, str]]:
    """Return what is set by a name, or what is usual, and the other changes."""
    rest = {other: text for other, text in changes.items() if other != name}
    text = changes.get(name)
    if text is None:
        return usual, rest
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise UsageError(f"--set {name}={text}: expected {expected}")
    return int(text), rest


def check_bench(
    word: str, texts: Sequence[str], recipes: Sequence[str], peers: Sequence[str]
) -> str:
    """Refuse what can be refused of a bench before torch is loaded; return its `parallel`.

    Raises:
        UsageError: as `parallel_of`, `unit_of`, `adapters_of` and `check` say; or what is not
            sharded has units; or what is sharded, fused or in 4 bits is to have adapters.
    """
    parallel, rest = parallel_of(texts)
    unit, changes = unit_of(settings.split(rest))
    rank, changes = adapters_of(changes)
    check(word, [f"{name}={text}" for name, text in changes.items()], recipes, SET)
    if unit > 1 and not parallel:
        raise UsageError(f"--set unit={unit}: expected parallel={FSDP} beside it")
    if rank and parallel:
        raise UsageError(f"--set adapters={rank} parallel={parallel}: expected one of them")
    for name in recipes_named(recipes) if rank else ():
        if name not in INT8 or recipe_of(name).fallback is not None:
            raise UsageError(
                f"--recipe {name} with adapters: expected an INT8 recipe, neither fused nor with "
                "fallback, whose layers are frozen"
            )
    peers_of(peers, SPREAD_PEERS if parallel else ADAPTED_PEERS if rank else PEERS)
    return parallel


def check(
    word: str, texts: Sequence[str], recipes: Sequence[str], others: Sequence[str] = SET[:1]
) -> None:
    """Refuse what can be refused before torch is loaded.

    Args:
        texts: of `--set`.
        others: as of `jetfire.models.sources.parse`.

    Raises:
        UsageError: there is no such model, size or recipe.
    """
    _, changes = run_of(settings.split(texts))
    sources.parse(word, changes, others=others)
    recipes_named(recipes)
