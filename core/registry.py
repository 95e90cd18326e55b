"""The ops and their kernels, by name.

An op is found by its module's name in `ops`, its kernels by their folder's name in each
`kernels_*`. So adding either changes nothing here. Beside them are those from elsewhere (`loaded`).
Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jetfire.core import broken, loaded
from jetfire.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from jetfire.core.kernel import Kernel
    from jetfire.core.op import Op

_ROOT = Path(__file__).parent.parent
# Backends in order of preference, for problems that several take.
_BACKENDS = ("kernels_cpu", "kernels_cuda", "kernels_triton")


@cache
def _own_names() -> tuple[str, ...]:
    found = (m.name for m in pkgutil.iter_modules([str(_ROOT / "ops")]))
    return tuple(sorted(found))


def names() -> tuple[str, ...]:
    """Return the names of all ops.

    Raises:
        UsageError: one from elsewhere has the name of another.
    """
    found = list(_own_names())
    others = [(module.OP.name, f"--load {module.__file__}") for module in _loaded_ops()]
    others += [(name, f"entry points of {loaded.OPS}") for name in loaded.installed_ops()]
    for name, where in others:
        if name in found:
            raise UsageError(f"{where}: there is an op {name!r} already: expected another name")
        found.append(name)
    return tuple(sorted(found))


def _loaded_ops() -> list[ModuleType]:
    return [module for module in loaded.modules() if hasattr(module, "OP")]


def module(name: str) -> ModuleType:
    """Return the module of an op; dashes may stand for underscores.

    Raises:
        UsageError: there is no such op.
    """
    stem = name.replace("-", "_")
    if stem not in names():
        raise unknown(f"no op {name!r}", name, names())
    if stem in _own_names():
        return importlib.import_module(f"jetfire.ops.{stem}")
    files = (module for module in _loaded_ops() if module.OP.name == stem)
    return next(files, None) or loaded.installed(loaded.OPS, stem)[0]


def get(name: str) -> Op:
    """Return the op of a name; dashes may stand for underscores.

    Raises:
        UsageError: there is no such op.
    """
    op: Op = module(name).OP
    return op


def kernels(op: str) -> dict[str, Kernel]:
    """Return the kernels of an op by name: ours, then those from elsewhere.

    Raises:
        UsageError: a module cannot be imported; its `details` show the line. Or two have one name.
    """
    return _kernels(op, loaded.modules())


@cache
def _kernels(op: str, files: tuple[ModuleType, ...]) -> dict[str, Kernel]:
    """Return an op's kernels, those of loaded files among them."""
    found: dict[str, Kernel] = {}
    for backend in _BACKENDS:
        if (_ROOT / backend / op / "__init__.py").exists():
            with broken.loading(f"{op} of {backend}", _ROOT / backend):
                module = importlib.import_module(f"jetfire.{backend}.{op}")
            found.update({kernel.name: kernel for kernel in module.KERNELS})
    for kernel in _elsewhere(op, files):
        if kernel.name in found:
            raise UsageError(
                f"{op} has a kernel {kernel.name!r} already, in {_file(found[kernel.name])}: "
                f"expected another name than in {_file(kernel)}"
            )
        found[kernel.name] = kernel
    return found


def _file(kernel: Kernel) -> str | None:
    """Return the file that has a kernel's class."""
    return sys.modules[type(kernel).__module__].__file__


def _elsewhere(op: str, files: Iterable[ModuleType]) -> list[Kernel]:
    """Return an op's kernels of loaded files and of installed packages."""
    modules = [*files]
    for group in (loaded.OPS, loaded.KERNELS):
        modules += loaded.installed(group, op)
    every = (kernel for module in dict.fromkeys(modules) for kernel in _kernels_of(module))
    return [kernel for kernel in every if kernel.op == op]


def _kernels_of(module: ModuleType) -> Sequence[Kernel]:
    """Return the kernels of a module from elsewhere.

    Raises:
        UsageError: one is for an op that there is not.
    """
    found: Sequence[Kernel] = getattr(module, "KERNELS", ())
    for kernel in found:
        if kernel.op not in names():
            raise unknown(f"{module.__file__}: no op {kernel.op!r}", kernel.op, names())
    return found


@cache
def beside(op: str, module: str) -> tuple[ModuleType, ...]:
    """Return the modules of a name in the folders of an op's kernels, such as their ``host``."""
    folders = [backend for backend in _BACKENDS if (_ROOT / backend / op / f"{module}.py").exists()]
    return tuple(importlib.import_module(f"jetfire.{b}.{op}.{module}") for b in folders)


def kernel_names(op: str) -> tuple[str, ...]:
    """Return the names of an op's kernels, mostly without importing ours."""
    others = (kernel.name for kernel in _elsewhere(op, loaded.modules()))
    return tuple(dict.fromkeys([*_declared(op), *others]))


@cache
def _declared(op: str) -> tuple[str, ...]:
    """Return the names of our kernels of an op."""
    from jetfire.core import declared

    folders = [_ROOT / backend / op for backend in _BACKENDS]
    found = [declared.names(folder) for folder in folders if (folder / "__init__.py").exists()]
    if any(some is None for some in found):
        return tuple(_kernels(op, ()))
    return tuple(dict.fromkeys(name for some in found for name in some or ()))


def get_kernel(op: str, name: str) -> Kernel:
    """Return one kernel of an op.

    Raises:
        UsageError: the op has no such kernel.
    """
    known = kernels(op)
    if name not in known:
        raise unknown(f"{op} has no kernel {name!r}", name, known)
    return known[name]


def check_kernels(ops: Iterable[Op], given: Sequence[str]) -> None:
    """Refuse a name that no kernel of these ops has, without loading kernels where possible.

    Raises:
        UsageError: there is such a name.
    """
    chosen = [op.name for op in ops] if given else []
    known = dict.fromkeys(kernel for op in chosen for kernel in kernel_names(op))
    if "torch" in sys.modules:  # kernels may be loaded, and a caller have added some
        known |= dict.fromkeys(kernel for op in chosen for kernel in kernels(op))
    for name in given:
        if name not in known:
            raise unknown(f"no kernel {name!r}", name, known)
