"""Recipes: the named precisions in which a model's linear layers multiply."""

from __future__ import annotations

from dataclasses import dataclass

from jetfire.ops.errors import UsageError


@dataclass(frozen=True)
class Recipe:
    """A name and what it stands for.

    Attributes:
        block: side of an INT8 quantisation block; None leaves the products in BF16.
    """

    name: str
    block: int | None


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", None),
        *(Recipe(f"int8-block{block}", block) for block in (32, 64, 128)),
    )
}


def get(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in RECIPES:
        raise UsageError(f"no recipe {name!r}: expected one of {', '.join(RECIPES)}")
    return RECIPES[name]
