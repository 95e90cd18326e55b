"""The options of `jetfire advise`, checked before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetfire.core.errors import UsageError, unknown
from jetfire.gpt2.training import settings
from jetfire.models import sources
from jetfire.models.cases import run_of

ADVISED = ("int8-block32", "int8-block64", "int8-block128")


@dataclass(frozen=True)
class AdviseOptions:
    """The options of `jetfire advise` as they were given.

    Attributes:
        model: the words that name it; settings: texts of `--set`.
        recipes: INT8 recipes to compare.
        data: a folder of prepared tokens; None draws random ones.
        sqnr: whether the products' SQNR is computed.
        least: the SQNR in dB below which a layer is kept.
    """

    model: str
    settings: Sequence[str] = ()
    recipes: Sequence[str] = ADVISED
    data: Path | None = None
    sqnr: bool = True
    least: float = 20.0
    format: str = "table"
    device: str = "auto"
    seed: int = 0
    debug: bool = False


def check(asked: AdviseOptions) -> None:
    """Refuse what is wrong on any device.

    Raises:
        UsageError: it says what is accepted.
    """
    for name in asked.recipes:
        if name not in ADVISED:
            raise unknown(f"--recipe {name}", name, ADVISED)
    _, changes = run_of(settings.split(asked.settings))
    sources.parse(asked.model, changes, presets=True)
    if asked.data is not None and not asked.data.is_dir():
        raise UsageError(f"--data {asked.data}: expected a folder that jetfire train prepare made")
