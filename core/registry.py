"""The ops and their kernels, by name.

An op is found by its module's name in `ops`, its kernels by their folder's name in each
`kernels_*`. So adding either changes nothing here. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jetfire.core import broken
from jetfire.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from jetfire.core.kernel import Kernel
    from jetfire.core.op import Op

_ROOT = Path(__file__).parent.parent
# Backends in order of preference, for problems that several take.
_BACKENDS = ("kernels_cpu", "kernels_cuda", "kernels_triton")


@cache
def names() -> tuple[str, ...]:
    """Return the names of all ops."""
    found = (m.name for m in pkgutil.iter_modules([str(_ROOT / "ops")]))
    return tuple(sorted(found))


@cache
def get(name: str) -> Op:
    """Return the op of a name; dashes may stand for underscores.

    Raises:
        UsageError: there is no such op.
    """
    stem = name.replace("-", "_")
    if stem not in names():
        raise unknown(f"no op {name!r}", name, names())
    return importlib.import_module(f"jetfire.ops.{stem}").OP


@cache
def kernels(op: str) -> dict[str, Kernel]:
    """Return the kernels of an op by name, from the op's folder in every `kernels_*`.

    Raises:
        UsageError: a module cannot be imported; its `details` show the line.
    """
    found: dict[str, Kernel] = {}
    for backend in _BACKENDS:
        if (_ROOT / backend / op / "__init__.py").exists():
            with broken.loading(f"{op} of {backend}", _ROOT / backend):
                module = importlib.import_module(f"jetfire.{backend}.{op}")
            found.update({kernel.name: kernel for kernel in module.KERNELS})
    return found


@cache
def beside(op: str, module: str) -> tuple[ModuleType, ...]:
    """Return the modules of a name in the folders of an op's kernels, such as their ``host``."""
    folders = [backend for backend in _BACKENDS if (_ROOT / backend / op / f"{module}.py").exists()]
    return tuple(importlib.import_module(f"jetfire.{b}.{op}.{module}") for b in folders)


@cache
def kernel_names(op: str) -> tuple[str, ...]:
    """Return the names of an op's kernels, mostly without importing these."""
    from jetfire.core import declared

    folders = [_ROOT / backend / op for backend in _BACKENDS]
    found = [declared.names(folder) for folder in folders if (folder / "__init__.py").exists()]
    if any(some is None for some in found):
        return tuple(kernels(op))
    return tuple(dict.fromkeys(name for some in found for name in some or ()))


def register(kernel: Kernel) -> None:
    """Add a kernel from elsewhere to its op's, in this process.

    Raises:
        UsageError: there is no such op, or it has a kernel of that name.
    """
    known = kernels(get(kernel.op).name)
    if kernel.name in known:
        raise UsageError(f"{kernel.op} has a kernel {kernel.name!r} already: expected another name")
    known[kernel.name] = kernel


def get_kernel(op: str, name: str) -> Kernel:
    """Return one kernel of an op.

    Raises:
        UsageError: the op has no such kernel.
    """
    known = kernels(op)
    if name not in known:
        raise unknown(f"{op} has no kernel {name!r}", name, known)
    return known[name]
