"""What is advised of a model's layers: times, SQNR and a verdict of each, and the recipe of all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from jetfire.models.costs import Cost
from jetfire.models.layers import LinearLayer
from jetfire.models.sqnr import Sqnr


@dataclass(frozen=True)
class Advice:
    """What is known of a layer, and what to do with it.

    Attributes:
        costs, sqnr: by recipe; `sqnr` by the names of FP8's too, and empty where there is none.
        convert: None where nothing tells.
        why: in a few words.
    """

    layer: LinearLayer
    costs: Mapping[str, Cost]
    sqnr: Mapping[str, Sqnr]
    convert: bool | None = None
    why: str = ""

    def cost(self, recipe: str) -> Cost:
        """Return the cost with a recipe; one with another's BF16 and FP8 where its own lacks them.

        A run has its own times of peers, which are to be compared with its kernels' alone.
        """
        own = self.costs[recipe]
        if own.bf16 is not None:
            return own
        other = next((c for c in self.costs.values() if c.bf16 is not None), own)
        return replace(own, bf16=other.bf16, fp8=other.fp8)


@dataclass(frozen=True)
class Advised:
    """What is advised of a model.

    Attributes:
        source: where times come from; tokens: of what batch SQNR is, in words.
        recipe: the one to convert to.
        step_ms: a BF16 step, run as `run`; None without a GPU.
    """

    model: Mapping[str, Any]
    source: str
    tokens: str
    recipe: str
    layers: Sequence[Advice]
    left: Mapping[str, str]
    run: str | None = None
    step_ms: float | None = None

    @property
    def known(self) -> list[Advice]:
        """The layers whose time is known, in BF16 and as advised."""
        return [a for a in self.layers if a.convert is not None and a.cost(self.recipe).bf16]

    @property
    def bf16_ms(self) -> float:
        return sum(a.cost(self.recipe).bf16 or 0.0 for a in self.known)

    @property
    def advised_ms(self) -> float:
        """What the known layers take once those advised are converted."""
        costs = [(a.convert, a.cost(self.recipe)) for a in self.known]
        return sum((cost.total if convert else cost.bf16) or 0.0 for convert, cost in costs)

    @property
    def predicted_ms(self) -> float | None:
        """The step, less what its layers gain."""
        return None if self.step_ms is None else self.step_ms - self.bf16_ms + self.advised_ms

    @property
    def skip(self) -> list[str]:
        """Layers that `convert` would replace and is to leave."""
        return [a.layer.name for a in self.layers if a.convert is False and not a.layer.kept]

    @property
    def keep(self) -> list[str]:
        """The same layers as patterns for `convert`, which match no layer that is to be replaced.

        A pattern stands for repeated layers; a layer without a sound one stands by its name.
        """
        replaced = [a.layer.name for a in self.layers if a.convert is not False]
        repeated = Counter(map(pattern, self.skip))

        def shortest(name: str) -> str:
            wide = pattern(name)
            sound = not any(fnmatchcase(one, wide) for one in replaced)
            return wide if sound and repeated[wide] > 1 else name

        return list(dict.fromkeys(map(shortest, self.skip)))


def pattern(name: str) -> str:
    """Return a module's name with its numbers as stars: what repeated layers share."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def judged(advice: Advice, recipe: str, least: float) -> Advice:
    """Return the advice with its verdict for a recipe.

    Args:
        least: the SQNR in dB that each product must have.
    """
    cost, exact = advice.cost(recipe), advice.sqnr.get(recipe)
    if advice.layer.kept:
        return replace(advice, convert=False, why=advice.layer.kept)
    if exact is not None and exact.least < least:
        return replace(advice, convert=False, why=f"SQNR of {exact.worst} {exact.least:.1f} dB")
    if cost.total is None or cost.bf16 is None:
        lacking = f"{len(cost.missing)} of {cost.launches} launches" if cost.missing else "BF16"
        return replace(advice, convert=None, why=f"no row of {lacking}")
    ratio = cost.bf16 / cost.total
    return replace(advice, convert=ratio > 1, why=f"{ratio:.2f}× BF16")


def chosen(advices: Sequence[Advice], names: Sequence[str], least: float) -> str:
    """Return the recipe that gains most, of those that gain alike the one most is known of."""

    def worth(name: str) -> tuple[float, int]:
        verdicts = [judged(advice, name, least) for advice in advices]
        costs = [advice.cost(name) for advice in verdicts if advice.convert]
        known = sum(advice.convert is not None for advice in verdicts)
        return sum((cost.bf16 or 0.0) - (cost.total or 0.0) for cost in costs), known

    return max(names, key=worth)
