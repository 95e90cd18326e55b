"""What a study compares: recipes, and what some of them keep otherwise, as ``int8+adamw8``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jetfire.core.errors import UsageError, unknown
from jetfire.gpt2.training.settings import MOMENT_BITS, Settings
from jetfire.nn.recipes import RECIPES

# The words after a recipe: each a setting's value.
WORDS: dict[str, tuple[str, str | bool]] = {
    **{name: ("optimizer", name) for name in MOMENT_BITS},
    "fp32weights": ("weights", "fp32"),
    "bf16weights": ("weights", "bf16"),
    "deterministic": ("deterministic", True),
}


@dataclass(frozen=True)
class Arm:
    """A recipe, and the values of settings that are named beside it.

    Attributes:
        words: of `WORDS`, in that order, one of a setting.
    """

    recipe: str
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, option: str) -> Arm:
        """Return what a text names.

        Raises:
            UsageError: it names no recipe, a word that is none, or two of one setting.
        """
        recipe, *words = text.split("+")
        if recipe not in RECIPES:
            raise unknown(f"{option} {text}", recipe, RECIPES)
        by_setting: dict[str, str] = {}
        for word in words:
            if word not in WORDS:
                raise unknown(f"{option} {text}", word, WORDS)
            other = by_setting.setdefault(WORDS[word][0], word)
            if other != word:
                raise UsageError(f"{option} {text}: {other} and {word}: expected one of them")
        return cls(recipe, tuple(word for word in WORDS if word in by_setting.values()))

    @classmethod
    def of(cls, settings: Settings) -> Arm:
        """Return a run's recipe with a word for each value that is not the usual one."""
        usual = {one.name: one.default for one in dataclasses.fields(Settings)}
        words = [
            word
            for word, (name, value) in WORDS.items()
            if getattr(settings, name) == value != usual[name]
        ]
        return cls(settings.recipe, tuple(words))

    @property
    def name(self) -> str:
        return "+".join((self.recipe, *self.words))

    @property
    def settings(self) -> dict[str, str]:
        """The settings that are named beside the recipe."""
        return {name: str(value).lower() for name, value in map(WORDS.__getitem__, self.words)}

    @property
    def order(self) -> tuple[int, ...]:
        """A key that sorts arms as recipes are listed, those without words first."""
        return list(RECIPES).index(self.recipe), *map(list(WORDS).index, self.words)

    def names(self, settings: Settings) -> bool:
        """Return whether a run's settings are what is named."""
        named = {"recipe": self.recipe, **dict(WORDS[word] for word in self.words)}
        return all(getattr(settings, name) == value for name, value in named.items())


def known(text: str) -> Arm | None:
    """Return what a text names; None where it names nothing."""
    try:
        return Arm.parse(text, "")
    except UsageError:
        return None
