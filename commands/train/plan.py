"""`jetfire train plan`."""

from __future__ import annotations

import re
from typing import Annotated

from jetfire.commands import options as o
from jetfire.commands.train.run import Data, Recipe, Settings
from jetfire.core.errors import UsageError

EPILOG = "Example: jetfire train plan gpt2-1558m --data openwebtext --memory 141GiB"
_UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


def _bytes(text: str) -> float:
    found = re.fullmatch(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?) ?({'|'.join(_UNITS)})", text)
    if not found or not float(found[1]):
        raise UsageError(f"--memory {text}: expected a size such as 141GiB or 80GB")
    return float(found[1]) * _UNITS[found[2]]


def run(
    preset: Annotated[
        str,
        o.argument("PRESET", "As for training, or a GPT-2's or a Llama's config.json.", o.PRESETS),
    ],
    recipe: Recipe = None,
    settings: Settings = None,
    data: Data = None,
    memory: Annotated[
        float | None,
        o.option("--memory", "SIZE", "What the GPU has: 141GiB, 80GB.", parser=_bytes),
    ] = None,
    format: o.Format = None,
    debug: o.Debug = False,
) -> None:
    """Say what a run needs of a GPU's memory, by part, and which settings would make it fit."""
    from jetfire.gpt2.training import plan

    plan.plan(o.collect(plan.PlanOptions, locals()))
