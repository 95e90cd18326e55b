"""Recipes: the named precisions in which a model's linear layers multiply; no torch is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from jetfire.core.arguments import shown
from jetfire.core.errors import UsageError, unknown
from jetfire.core.kept_rows import MOST_K, Keep, Parts
from jetfire.core.problem import Block, Group

Gradient = Literal["sampled", "split", "int8", "nearest"]
# The side of the blocks of a gradient that is "int8": the widest, whose products are the fastest.
GRADIENT_BLOCK: Block = 128
# Bits of what backward keeps of a number of a layer's input.
Kept = Literal[8, 4]
# How the head's loss and its gradient are made: of all logits, or of a part of the rows at a time.
Logits = Literal["whole", "parts"]
GROUPS = get_args(Group)


def as_group(number: int) -> Group:
    """Return the number, as a group.

    Raises:
        UsageError: there is no such transform.
    """
    if not isinstance(number, int) or number not in GROUPS:
        given = shown(number, True)
        raise UsageError(
            f"group{given}: expected a power of two from 1 to {GROUPS[-1]}, or 'search'"
        )
    return cast(Group, number)


def checked_kept(kept: int, fallback: float | None = None) -> Kept:
    """Return the number of bits.

    Raises:
        UsageError: nothing is kept in so many, or not with fallback.
    """
    if not isinstance(kept, int) or kept not in get_args(Kept):
        raise UsageError(f"kept{shown(kept, True)}: expected 8 or 4")
    if kept == 4 and fallback is not None:
        raise UsageError(f"kept=4 with fallback{shown(fallback)}: expected one of them")
    return cast(Kept, kept)


def parts_and_rows(gradient: str) -> tuple[Parts, Keep]:
    """Return how many parts a split gradient has, and which of their rows are kept."""
    return 1 if gradient == "nearest" else 2, "half" if gradient == "sampled" else "all"


@dataclass(frozen=True)
class Int4:
    """Products of 4-bit codes ("Training Transformers with 4-bit Integers", arXiv 2306.11987).

    Attributes:
        group: how many neighbouring inputs a Hadamard transform mixes before they are quantised, a
            power of two up to 1024 that divides a layer's inputs; 1 mixes none. "search" takes, for
            each layer, the one that quantises its first batch with the least error.
        gradient: what of a layer's output gradient is multiplied. "sampled": two 4-bit parts, of
            whose rows as many as there are tokens are drawn by leverage score; "split": the same
            parts with all their rows; "int8": INT8 codes, which one product reads in the time of
            one 4-bit part's, as Hopper has no faster one; "nearest": one
            4-bit part, rounded to nearest, which biases the products.
    """

    group: Group | Literal["search"] = 32
    gradient: Gradient = "sampled"

    def __post_init__(self) -> None:
        if not isinstance(self.group, str) or self.group != "search":
            as_group(self.group)
        if not isinstance(self.gradient, str) or self.gradient not in get_args(Gradient):
            given = f"gradient{shown(self.gradient, True)}"
            raise unknown(given, str(self.gradient), get_args(Gradient))

    def why_not(self, inputs: int, outputs: int) -> str | None:
        """Return why no layer has these sizes, in a line; None if one can."""
        if outputs % 2 or inputs % 2:
            return f"{inputs} inputs, {outputs} outputs: expected even numbers, two codes to a byte"
        if max(outputs, inputs) > (most := MOST_K["fwd"]):
            return f"{inputs} inputs, {outputs} outputs: expected at most {most} of each"
        if self.group != "search" and inputs % self.group:
            legal = " or ".join(str(group) for group in GROUPS if inputs % group == 0)
            return f"group={self.group} with {inputs} inputs: expected {legal}"
        return None


DEFAULT = Int4()


@dataclass(frozen=True)
class Recipe:
    """A name and what it stands for.

    Attributes:
        block: side of the blocks whose codes are multiplied.
        flow: side of the blocks of what flows between products in a fused block (`Int8Block`; in 4
            bits `Int4Block`, of GPT-2 in `jetfire train` alone); None is `block`, or with fallback
            none.
        head: as `block`, of the output head's products in `jetfire train`, and in `convert` with
            fused blocks; None multiplies it in BF16.
        int4: how the products are made in 4 bits.
        fallback: the share of an input's blocks that have two planes of codes (`Fallback`). Such
            layers are converted one by one: nothing flows between them in INT8.
        kept: bits of what INT8 layers keep of an input for their weight's gradient: 8, the codes
            that are multiplied; or 4, rounded so that the gradient stays right in the mean. With 4,
            fused blocks keep less besides, as `Int8Block` says.
        logits: of a `head` in INT8, whether its logits stand whole between forward and backward, or
            the loss and its gradient are made of them in parts, in forward.
    """

    name: str
    block: Block | None = None
    flow: Block | None = None
    head: Block | None = None
    int4: Int4 | None = None
    fallback: float | None = None
    kept: Kept = 8
    logits: Logits = "whole"

    def __post_init__(self) -> None:
        if checked_kept(self.kept, self.fallback) == 4 and self.block is None:
            raise UsageError(f"kept=4 with recipe={self.name}: expected an INT8 recipe")
        if self.logits == "parts" and self.head is None:
            raise UsageError(f"logits=parts with recipe={self.name}: expected a head in INT8")
        if self.flow is None and self.fallback is None:
            object.__setattr__(self, "flow", self.block)

    @property
    def plain(self) -> bool:
        """Whether layers are torch's own, with products in BF16 under autocast."""
        return self.block is None and self.int4 is None

    @property
    def noisy(self) -> bool:
        """Whether gradients are of 4-bit codes: right on average, not each time."""
        return self.int4 is not None or self.kept == 4


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16"),
        # The speed is in the products, the accuracy in what flows between them: 124M over 82M
        # tokens ended 0.0028 nats over BF16's training loss (95%: -0.0013 to 0.0068, 4 pairs of
        # seeds, docs/results/study-124m.json). Of two pairs, with both in blocks of 128 it ended
        # 0.0100 over it, and 0.0009 with both in blocks of 32, which multiply half as fast.
        Recipe("int8", 128, 32, head=128),
        *(Recipe(f"int8-block{block}", block) for block in get_args(Block)),
        Recipe("int8-kept4", 128, 32, head=128, kept=4),
        Recipe("int8-fallback", 128, fallback=0.2),
        Recipe("int4-hq-lss", flow=32, int4=DEFAULT),
        Recipe("int4-hq-bs", flow=32, int4=Int4(gradient="split")),
        Recipe("int4-hq", flow=32, int4=Int4(gradient="int8")),
        Recipe("int4-naive", flow=32, int4=Int4(1, "nearest")),
    )
}


def get(
    name: str,
    group: Group | Literal["search"] | None = None,
    block: Block | None = None,
    flow: Block | None = None,
    head: Block | Literal["bf16"] | None = None,
    logits: Logits | None = None,
) -> Recipe:
    """Return the recipe of a name.

    Args:
        group: in place of that of an INT4 recipe.
        block, flow, head, logits: in place of those of an INT8 recipe.

    Raises:
        UsageError: there is none, or it has no groups, or no blocks.
    """
    if name not in RECIPES:
        raise unknown(f"no recipe {name!r}", name, RECIPES)
    recipe = RECIPES[name]
    sides: dict[str, Any] = {"block": block, "flow": flow, "head": head, "logits": logits}
    sides = {field: side for field, side in sides.items() if side is not None}
    for field, side in sides.items():
        if recipe.block is None:
            raise UsageError(f"{field}={side} with recipe={name}: expected an INT8 recipe")
    if flow is not None and recipe.flow is None:
        raise UsageError(f"flow={flow} with recipe={name}: expected a recipe with a flow")
    if head == "bf16":
        sides["head"] = None
    recipe = replace(recipe, **sides)
    if group is None:
        return recipe
    if recipe.int4 is None:
        raise UsageError(f"group={group} with recipe={name}: expected an INT4 recipe")
    return replace(recipe, int4=replace(recipe.int4, group=group))
