"""Ops and kernels from elsewhere: of files that were named, and of packages that are installed.

A module of either has what one of ours has: `OP`, `KERNELS` of any ops, or both. A file is code, so
none is run unless somebody names it, by ``--load`` or in ``$JETFIRE_LOAD``. The option adds to the
variable, so that processes that are started know the same files. A package names its modules by
entry points of the groups ``jetfire.ops`` and ``jetfire.kernels``, each called as its op. Such a
module is imported once its op is asked for.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from jetfire.core import broken
from jetfire.core.errors import UsageError

VARIABLE = "JETFIRE_LOAD"
OPS, KERNELS = "jetfire.ops", "jetfire.kernels"


def add(given: Sequence[Path]) -> None:
    """Name files, here and for the processes that are started; none of them is run yet.

    Raises:
        UsageError: there is no such file, or its path would be two in the variable.
    """
    for file in given:
        if not file.is_file() or file.suffix != ".py":
            raise UsageError(f"--load {file}: expected a Python file")
        if os.pathsep in str(file.resolve()):
            raise UsageError(f"--load {file}: expected a path without {os.pathsep!r}")
    named = dict.fromkeys([*files(), *(file.resolve() for file in given)])
    os.environ[VARIABLE] = os.pathsep.join(map(str, named))


def files() -> tuple[Path, ...]:
    """Return the files that were named, in order."""
    return _files(os.environ.get(VARIABLE, ""))


@cache
def _files(text: str) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(name).resolve() for name in text.split(os.pathsep) if name))


def modules() -> tuple[ModuleType, ...]:
    """Return the modules of the files that were named; each is run once.

    One that is running now, and asks for an op of ours, is none of them yet.

    Raises:
        UsageError: one cannot be run, or has neither an op nor kernels.
    """
    found = []
    for file in files():
        if file in _running:
            continue
        if not file.is_file():
            raise UsageError(f"--load {file}: expected a Python file")
        found.append(importlib.import_module(_name(file)))
    return tuple(found)


def _name(file: Path) -> str:
    """Return the name of a file's module: another for each path."""
    return f"jetfire_loaded_{crc32(os.fsencode(file)):08x}_{file.stem}"


_running: set[Path] = set()


class _Loader(SourceFileLoader):
    """Runs a file, and looks at what it has."""

    def exec_module(self, module: ModuleType) -> None:
        file = Path(self.path)
        _running.add(file)
        try:
            with broken.loading(f"--load {file}", file.parent):
                super().exec_module(module)
        finally:
            _running.remove(file)
        _check(f"--load {file}", module)

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Have no bytecode: it would hide an edit within a second that keeps the file's size."""
        raise OSError


class _Finder(MetaPathFinder):
    """Finds the modules of files that were named, so that pickle finds their classes anywhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file = next((file for file in files() if _name(file) == name), None)
        if file is None:
            return None
        return spec_from_file_location(name, file, loader=_Loader(name, str(file)))


sys.meta_path.append(_Finder())


def _check(what: str, module: ModuleType) -> None:
    """Raise UsageError where a module has neither an op nor kernels, or one not rightly named."""
    from jetfire.core.kernel import Kernel
    from jetfire.core.op import Op
    from jetfire.core.schema import NAME, NAME_WORDS

    op, kernels = getattr(module, "OP", None), getattr(module, "KERNELS", ())
    right = isinstance(kernels, tuple | list) and all(isinstance(k, Kernel) for k in kernels)
    if not (isinstance(op, Op | None) and right and (op or kernels)):
        raise UsageError(
            f"{what}: expected OP, an Op, or KERNELS, a tuple of Kernel objects, or both"
        )
    needed = [(kernel, ("op", "name", "Config")) for kernel in kernels]
    needed += [(op, ("name", "summary", "Problem"))] if op else []
    for thing, names in needed:
        for name in names:
            if not hasattr(thing, name):
                raise UsageError(f"{what}: {type(thing).__name__}: expected `{name} = …`")
        if not (isinstance(thing.name, str) and re.fullmatch(NAME, thing.name)):
            # It is part of files' names, and of what is read back from results.
            made = f"name={thing.name!r}"
            raise UsageError(f"{what}: {type(thing).__name__}: {made}: expected {NAME_WORDS}")


@cache
def _entry_points(group: str) -> dict[str, list[str]]:
    """Return the modules that installed packages name, by the name of their op."""
    from importlib import metadata

    found: dict[str, list[str]] = {}
    for point in metadata.entry_points(group=group):
        found.setdefault(point.name, []).append(point.value)
    return found


def installed_ops() -> list[str]:
    """Return the names of the ops of installed packages; none is imported."""
    return list(_entry_points(OPS))


def installed(group: str, op: str) -> list[ModuleType]:
    """Import an op's modules, or its kernels', from the packages that have such.

    Raises:
        UsageError: one cannot be imported, or has not what its group says.
    """
    found = []
    for name in _entry_points(group).get(op, ()):
        what = f"{name} ({group})"
        with broken.loading(what, Path(sys.prefix)):
            module = importlib.import_module(name)
        _check(what, module)
        if group == OPS and getattr(getattr(module, "OP", None), "name", None) != op:
            raise UsageError(f"{what}: expected OP, an Op with the name {op!r}")
        found.append(module)
    return found
