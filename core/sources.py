"""The device code of a kernel, found in its source files, and a hash of it.

A profile keeps the hash of the kernel that was tuned. Device code is

* for a CUDA kernel, the ``.cu`` and ``.cubin`` files that its host code names, its texts with a
  kernel function, the headers that these include, and Python functions that write CUDA;
* for a Triton or Gluon kernel, the jit functions that its host code names, and all functions and
  globals that those reach;
* for a kernel with neither, as on the CPU, its class and all that it reaches.

Files are read as text. Nothing is imported or compiled, so the hash needs no GPU and is the same
under every version of Python and Triton. Comments, docstrings, layout, a function's module and its
place there, and other imports do not count.

Host code does not count either. It makes grid, tile sizes and constants from the problem and the
config, which a profile holds beside the hash, and moving or sharing it leaves the device code as it
was. So the hash does not change where a launch makes something else of the same config (a warp
group's share of the registers, a layout): whoever changes that must tune anew.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
# Packages of `jetfire` whose modules are followed, beside the kernel's own.
_FOLLOWED = re.compile(r"jetfire\.(kernels_\w+|reference)\b")
_CUDA_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|\w+|[^\w\s])', re.DOTALL
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class _Definition:
    """A function, class or global of a module, with every statement that defines it."""

    file: Path
    name: str
    nodes: tuple[ast.stmt, ...] = field(compare=False)

    def is_class(self) -> bool:
        return any(isinstance(node, ast.ClassDef) for node in self.nodes)

    def is_device_code(self) -> bool:
        """Return whether this is a jit function, or one that writes CUDA."""
        return any(
            isinstance(node, ast.FunctionDef)
            and (any(map(_is_jit, node.decorator_list)) or "__device__" in "".join(_texts(node)))
            for node in self.nodes
        )


@dataclass(frozen=True)
class _Module:
    """A module's top level: its definitions, and its imports with their dotted names."""

    tree: ast.Module
    definitions: dict[str, tuple[ast.stmt, ...]]
    imports: dict[str, str]


@cache
def digest(classes: tuple[type, ...]) -> str:
    """Return 12 hex digits that change with `device_code` alone.

    Args:
        classes: the kernel's own class and those that it inherits from.
    """
    codes = sorted(device_code(classes).values())
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()[:12]


def device_code(classes: Iterable[type]) -> dict[str, str]:
    """Return the device code of a kernel's classes, by file or by ``file:name``."""
    own = [_definition_of(cls) for cls in classes]
    host = _reached(own, lambda found: not found.is_class() and not found.is_device_code())
    named = {needed for found in host for needed in _needs(found)}
    device = _reached((found for found in named if found.is_device_code()), lambda _: True)
    texts = [(found, text) for found in host for text in _cuda_texts(found)]
    included = (file for found, text in texts for file in _included(text, found.file))
    named_files = (file for found in host for file in _cuda_files(found))
    files = _with_headers([*named_files, *included])
    if not device and not files and not texts:
        device = _reached(own, lambda _: True)
    return {
        **{f"{found.file}:{found.name}": _code(list(found.nodes)) for found in device},
        **{f"{found.file}:{found.name}": cuda_code(text) for found, text in texts},
        **{str(file): cuda_code(_file_text(file)) for file in files},
    }


def cuda_code(text: str) -> str:
    """Return the tokens of CUDA C++, without comments."""
    return " ".join(filter(None, _CUDA_TOKEN.findall(text)))  # comments match as empty tokens


# Definitions and what they name.


def _definition_of(cls: type) -> _Definition:
    file = Path(inspect.getfile(cls))
    nodes = (node for node in ast.walk(_module(file).tree) if isinstance(node, ast.ClassDef))
    return _Definition(file, cls.__name__, tuple(n for n in nodes if n.name == cls.__name__))


def _reached(
    first: Iterable[_Definition], follow: Callable[[_Definition], bool]
) -> set[_Definition]:
    """Return definitions and those that they name, directly or not, where `follow` takes them."""
    return _closure(first, lambda found: filter(follow, _needs(found)))


def _closure(first: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return what is given and all that follows from it, directly or not."""
    found: set[T] = set()
    waiting = list(first)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += following(one)
    return found


@cache
def _needs(definition: _Definition) -> frozenset[_Definition]:
    """Return the definitions that one names; a local variable counts as the global of its name."""
    parts = [part for node in definition.nodes for part in ast.walk(node)]
    imports = dict(_imports(parts))
    dotted = {name for part in parts if (name := _dotted(part)) is not None}
    found = {_find(definition.file, name, imports) for name in dotted}
    return frozenset(found - {None, definition})  # type: ignore[arg-type]


def _find(file: Path, dotted: str, imports: dict[str, str] | None = None) -> _Definition | None:
    """Return the definition of a name in a file; the given imports go before the file's own."""
    first, _, rest = dotted.partition(".")
    module = _module(file)
    absolute = {**module.imports, **(imports or {})}.get(first)
    if absolute is None:
        nodes = module.definitions.get(first)
        return None if nodes is None else _Definition(file, first, nodes)
    names = absolute.split(".") + (rest.split(".") if rest else [])
    for end in range(len(names) - 1, 0, -1):  # the longest name of a module, then one in it
        if (inner := _file_of(".".join(names[:end]))) is not None:
            return _find(inner, names[end])
    return None


@cache
def _file_of(module: str) -> Path | None:
    if not _FOLLOWED.match(module):
        return None
    stem = ROOT.joinpath(*module.split(".")[1:])
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((file for file in files if file.exists()), None)


@cache
def _module(file: Path) -> _Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    definitions: dict[str, tuple[ast.stmt, ...]] = {}
    for node in _top_level(tree.body):
        for name in _defined(node):
            definitions[name] = (*definitions.get(name, ()), node)
    return _Module(tree, definitions, dict(_imports(_top_level(tree.body))))


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under an `if` or a `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, name, ()):
                    nested = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _top_level(nested)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that absolute imports bind, each with the dotted name that it stands for."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)


def _dotted(node: ast.AST) -> str | None:
    """Return ``a.b.c`` for a name or an attribute of one, and None for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _is_jit(decorator: ast.expr) -> bool:
    """Return whether this is ``@triton.jit`` or ``@gluon.jit``, with arguments or without."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (_dotted(called) or "").rpartition(".")[2] == "jit"


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings in some code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


# CUDA files.


def _cuda_files(definition: _Definition) -> Iterator[Path]:
    """Yield the ``.cu`` and ``.cubin`` files beside its module that a definition names."""
    for text in (text for node in definition.nodes for text in _texts(node)):
        if text.endswith((".cu", ".cubin")) and (file := definition.file.parent / text).exists():
            yield file


def _cuda_texts(definition: _Definition) -> Iterator[str]:
    """Yield a definition's texts of several lines that have a kernel function."""
    for node in definition.nodes:
        yield from (text for text in _texts(node) if "__global__" in text and "\n" in text)


def _included(text: str, file: Path) -> Iterator[Path]:
    """Yield the headers that CUDA C++ of a file includes.

    They lie beside it, above it or at our backend's root. `config.cuh` is written at run time.
    """
    folders = (file.parent, file.parent.parent, ROOT / "kernels_cuda")
    places = (folder / name for name in _INCLUDE.findall(text) for folder in folders)
    yield from filter(Path.exists, places)


def _with_headers(files: Iterable[Path]) -> set[Path]:
    """Return CUDA files and the headers that they include, directly or not."""
    return _closure(files, lambda file: _included(_file_text(file), file))


def _file_text(file: Path) -> str:
    """Return a file's text; of a cubin a digest."""
    if file.suffix == ".cubin":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return file.read_text(encoding="utf-8")


# Python code as text.


def _code(node: Any) -> str:
    """Return a tree as text, without docstrings and the empty fields that Python versions add."""
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
