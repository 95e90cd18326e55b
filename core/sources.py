"""What a kernel is made of, as files, and a hash of them that comments and layout do not change.

A profile keeps the hash of the kernel that was tuned. It is the same under every Python version.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_CUDA_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|\w+|[^\w\s])', re.DOTALL
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class _File:
    needs: tuple[Path, ...]
    code: str


def made_of(file: Path) -> tuple[Path, ...]:
    """A kernel's module and all that it needs of its backend, directly or not, sorted.

    That is what a module imports from its own `kernels_*` at its top level, the ``.cu`` files
    beside it that it names, and what those include.
    """
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _read(path).needs
    return tuple(sorted(found))


@cache
def digest(files: Sequence[Path]) -> str:
    """12 hex digits over the files' code: no comments, docstrings, white space or file names."""
    codes = sorted(_read(file).code for file in files)
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()[:12]


@cache
def _read(path: Path) -> _File:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        tokens = filter(None, _CUDA_TOKEN.findall(text))  # a comment is an empty one
        return _File(tuple(_included(path, text)), " ".join(tokens))
    tree = ast.parse(text)
    return _File((*_imported(path, tree), *_named(path, tree)), _code(tree))


def _included(path: Path, text: str) -> Iterator[Path]:
    """Headers beside a CUDA file or at its backend's root; `config.cuh` is written at run time."""
    for name in _INCLUDE.findall(text):
        yield from (file for file in (path.parent / name, path.parent.parent / name)
                    if file.exists())  # fmt: skip


def _named(path: Path, tree: ast.Module) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).endswith(".cu"):
            file = path.parent / str(node.value)
            if file.exists():
                yield file


def _imported(path: Path, tree: ast.Module) -> Iterator[Path]:
    """Modules of the same backend; of ``from package import module`` the module alone."""
    if not path.is_relative_to(ROOT):
        return
    backend = f"jetfire.{path.relative_to(ROOT).parts[0]}"
    for node in tree.body:
        names: Iterable[str] = ()
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
            names = (inner if _file_of(inner) else outer for inner, outer in modules)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
        for name in names:
            if name.startswith(f"{backend}.") and (file := _file_of(name)):
                yield file


def _file_of(module: str) -> Path | None:
    stem = ROOT.joinpath(*module.split(".")[1:])
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((file for file in files if file.exists()), None)


def _code(node: Any) -> str:
    """A syntax tree as text, without docstrings and the empty fields that Python versions add."""
    if isinstance(node, ast.JoinedStr):  # Python 3.12.3 ends a format with an empty string
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_code(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        )
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_code(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
