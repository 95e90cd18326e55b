"""The names of an op's kernels, read from the text of its modules: importing these takes 2 s."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def names(package: Path) -> list[str] | None:
    """Return the names of the kernels in a package's ``KERNELS``, in order.

    Returns:
        None where they are not written as usual: ``KERNELS = (AKernel(), …)``, with classes that
        are defined there or imported by name from this package, each with a ``name = "…"``.
    """
    classes = _called(_tree(package / "__init__.py"))
    found = [_name_of(package / "__init__.py", name) for name in classes]
    known = [name for name in found if name is not None]
    return known if known and len(known) == len(found) else None


@cache
def _tree(file: Path) -> ast.Module:
    """Return a file's syntax tree; an empty one where it is no Python: importing it says so."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _called(tree: ast.Module) -> list[str]:
    """Return the names of the classes whose instances are in ``KERNELS``."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "KERNELS" for target in targets):
            items = getattr(getattr(node, "value", None), "elts", [])
            return [ast.unparse(getattr(item, "func", item)) for item in items]
    return []


def _name_of(file: Path, cls: str) -> str | None:
    """Return the ``name`` that a class of a module has or inherits; None where none is found."""
    for node in _tree(file).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            bases = (_name_of(file, ast.unparse(base)) for base in node.bases)
            return _own_name(node) or next(filter(None, bases), None)
        if isinstance(node, ast.ImportFrom) and any(alias.name == cls for alias in node.names):
            parts = (node.module or "").split(".")[1:]
            stem = ROOT.joinpath(*parts)
            module = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
            return _name_of(module, cls)
    return None


def _own_name(node: ast.ClassDef) -> str | None:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
            value = getattr(line.value, "value", None)
            return value if isinstance(value, str) else None
    return None
