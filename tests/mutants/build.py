"""Plants a bug: a copy of a backend with one text replaced, as a file for `jetfire-fuzz --load`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jetfire.core.sources import ROOT

Bug = Literal[
    "bound", "scale", "tile", "race", "edge", "draw", "nonfinite", "view", "input", "rounding"
]

# A config may be found to be wrong as the one that another is compared with.
WRONG = frozenset({"wrong", "config"})


@dataclass(frozen=True)
class Edit:
    """A text that a source has just once, and what stands there instead."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """One bug in one of our kernels.

    Attributes:
        name: of the bug, and of the kernel that has it.
        bug: its class. ``bound``: one row or column too many, or another's; ``scale``: one is
            missing, or another's; ``tile``: the last one is dropped; ``race``: what comes first
            decides; ``edge``: a block's edge in the wrong place; ``draw``: the random bits of
            another element; ``nonfinite``: NaN, infinity or very small or large values are taken
            for others; ``view``: rows are taken to be a width apart, or aligned; ``input``: one is
            written; ``rounding``: toward zero.
        op, kernel: the kernel that it is planted in.
        file: the source, from the repository's root, which has `find` just once.
        most: what the shrunk problem's sizes must not exceed; none where a problem is not shrunk:
            where each failure ends the process, so that it takes minutes, and for races on a GPU.
        kinds: what the failure may be reported as.
        largest: the largest size drawn.
        also: what else is replaced, in files of the same backend, where one text is not enough.
    """

    name: str
    bug: Bug
    op: str
    kernel: str
    file: str
    find: str
    replace: str
    most: Mapping[str, int]
    kinds: frozenset[str] = WRONG
    largest: int = 40
    also: tuple[Edit, ...] = ()

    @property
    def backend(self) -> str:
        return self.file.partition("/")[0]

    @property
    def package(self) -> str:
        """What the copy of the backend is called."""
        return f"mutant_{self.name.replace('-', '_')}"

    def sources(self) -> dict[str, str]:
        """Return the texts with the bug, by file.

        Raises:
            MovedOnError: a file does not have what is to be replaced in it just once.
        """
        texts: dict[str, str] = {}
        for edit in (Edit(self.file, self.find, self.replace), *self.also):
            text = texts.get(edit.file) or (ROOT / edit.file).read_text(encoding="utf-8")
            if (count := text.count(edit.find)) != 1:
                raise MovedOnError(
                    f"{self.name}: {edit.file} has the text of this mutant {count} times, expected "
                    f"once: see what has become of it, and plant the bug there.\n{edit.find}"
                )
            texts[edit.file] = text.replace(edit.find, edit.replace)
        return texts


class MovedOnError(Exception):
    """A source has changed under a mutant."""


def build(mutant: Mutant, folder: Path) -> Path:
    """A file whose `KERNELS` is the kernel with the bug.

    The whole backend is copied as a package of its own, so that a bug in what kernels share is in
    this kernel alone, and CUDA sources find the headers beside them.
    """
    package = mutant.package
    root = folder / package
    shutil.copytree(ROOT / mutant.backend, root, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in mutant.sources().items():
        (folder / file.replace(mutant.backend, package, 1)).write_text(text, encoding="utf-8")
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"jetfire.{mutant.backend}", package), encoding="utf-8")
    entry = folder / f"{mutant.name}.py"
    entry.write_text(
        f"""import sys

sys.path.insert(0, {str(folder)!r})

from {package} import {mutant.op}

KERNELS = [kernel for kernel in {mutant.op}.KERNELS if kernel.name == {mutant.kernel!r}]
for kernel in KERNELS:
    type(kernel).name = {mutant.name!r}
""",
        encoding="utf-8",
    )
    return entry
