"""A kernel's sources as one text: headers in place of their `#include`, what is unused left out.

Sources are taken line by line and never rewritten, so that an export reads as they do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetfire.export.c_text import WIDTH
from jetfire.kernels_cuda.compile import ROOT

_INCLUDE = re.compile(r'#include "(?P<name>[^"]+)"')
# Lines that an export has no use for: <stdint.h> has the types, and nobody there counts again.
_DROPPED = re.compile(r"using u?int\d+_t = |#pragma once$|static_assert\(SHARED_BYTES == EXPECTED_")
_DEFAULT = re.compile(r"#ifndef (?P<name>\w+)\n#define (?P=name) (?P<value>\w+).*\n#endif\n")
_DEFINE = re.compile(r"^#define (?P<name>\w+) (?P<value>\d+)\n", re.MULTILINE)
_KERNEL = re.compile(r'extern "C" (?P<declaration>__global__ [^{]+)')
_RULE = re.compile(r"// --- (?P<title>.+?) -+$")
_NAMES = (
    re.compile(r"^(?:__host__ )?(?:DEVICE|__device__)[\w :<>&*]*?\b(\w+)\(", re.MULTILINE),
    re.compile(r"^struct (?:alignas\(\d+\) )?(\w+)", re.MULTILINE),
    re.compile(r"^constexpr [\w ]+ (\w+) =", re.MULTILINE),
)


@dataclass(frozen=True)
class KernelSource:
    """One kernel's text.

    Attributes:
        comment: of the `.cu`, before its first line of code.
        defined: what it defines for its headers, or they do where it does not.
        headers: title and text of each that it includes, those that they include before them.
        body: its own code.
    """

    comment: str
    defined: dict[str, int]
    headers: tuple[tuple[str, str], ...]
    body: str


def _split_comment(text: str) -> tuple[str, str]:
    """The comment that a file begins with, and the rest."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return "\n".join(lines[:end]), "\n".join(lines[end:]).strip() + "\n"


def _own_lines(text: str) -> str:
    """Return lines without what makes sense of several files alone."""
    kept = [
        line for line in text.splitlines() if not (_INCLUDE.match(line) or _DROPPED.match(line))
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def _included(source: Path, seen: dict[str, str]) -> None:
    for name in _INCLUDE.findall(source.read_text()):
        if name == "config.cuh" or name in seen:
            continue
        beside = source.with_name(name)
        file = beside if beside.exists() else ROOT / name
        _included(file, seen)
        seen[name] = file.read_text()


def read(source: Path) -> KernelSource:
    """A `.cu` and all that it includes, but `config.cuh`."""
    seen: dict[str, str] = {}
    _included(source, seen)
    comment, code = _split_comment(source.read_text())
    defined = {name: int(value) for name, value in _DEFINE.findall(code)}
    headers = []
    for text in seen.values():
        for name, value in _DEFAULT.findall(text):
            defined.setdefault(name, int(value))
        title, own = _split_comment(_DEFAULT.sub("", text))
        headers.append((title, _own_lines(own)))
    body = _KERNEL.sub(_as_cpp, _own_lines(_DEFINE.sub("", code)))
    return KernelSource(comment, defined, tuple(headers), body)


def _as_cpp(kernel: re.Match[str]) -> str:
    """A kernel's declaration with its name as C++ has it, what hangs below its parameters too."""
    return kernel["declaration"].replace("\n" + 22 * " ", "\n" + 11 * " ")


# --- what is used --------------------------------------------------------------------------------


def _blocks(text: str) -> list[str]:
    """Return what blank lines part outside of braces."""
    blocks: list[str] = []
    depth = 0
    for paragraph in re.split(r"\n\n+", text.strip()):
        if depth:
            blocks[-1] += "\n\n" + paragraph
        else:
            blocks.append(paragraph)
        depth += paragraph.count("{") - paragraph.count("}")
    return blocks


def _names(block: str) -> set[str]:
    """Return what a block defines; empty for what is not known to be a definition."""
    return {name for pattern in _NAMES for name in pattern.findall(block)}


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))


def used(headers: Sequence[tuple[str, str]], body: str) -> list[tuple[str, str]]:
    """The headers without definitions that nothing names; those of which nothing is left, neither.

    A definition may be named by later ones alone, so they are judged from the last to the first.
    """
    words = _words(body)
    found: list[tuple[str, str]] = []
    for title, text in reversed(headers):
        kept: list[str] = []
        for block in reversed(_blocks(text)):
            if _RULE.match(block) and "\n" not in block:
                if kept and not _RULE.match(kept[0]):  # not a rule without a section
                    kept.insert(0, block)
                continue
            names = _names(block)
            if names and not names & words:
                continue
            kept.insert(0, block)
            words |= _words(block)
        if kept:
            found.insert(0, (title, "\n\n".join(kept) + "\n"))
    return found


# --- generated lines -----------------------------------------------------------------------------


def constants(header: str, notes: Mapping[str, str]) -> str:
    """The constants of a `config.cuh`, each with what it means beside or above it."""
    found = {
        name: f"constexpr {kind} {name} = {('false', 'true')[int(n)] if kind == 'bool' else n};"
        for kind, name, n in re.findall(r"^constexpr (\w+) (\w+) = (\d+);$", header, re.MULTILINE)
        if not name.startswith("EXPECTED_")
    }
    width = max(map(len, found.values()))
    return "\n".join(f"{line:<{width}}  // {notes[name]}" for name, line in found.items())


def functions(header: str) -> str:
    """Return what follows the constants of a `config.cuh`, in lines of at most `WIDTH`."""
    _, _, rest = header.rpartition(";\n\n") if ";\n\n" in header else ("", "", "")
    return "\n".join(part for line in rest.splitlines() for part in _folded(line)).strip()


def _folded(line: str) -> list[str]:
    """A line too long, broken after commas; a string literal into several."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    quote = '"' if line.lstrip().startswith('"') else ""
    hanging = indent if quote else indent + "  "
    lines, current = [], indent
    for piece in re.split(r"(?<=, )|(?= : \")", line.strip()):
        if piece.startswith(" : "):  # an asm statement's inputs
            lines.append(current)
            current, piece = indent, piece[1:]
        if len(current) + len(piece) > WIDTH - len(quote) and current.strip():
            lines.append(current.rstrip() if not quote else current + quote)
            current = hanging + quote
        current += piece
    return [*lines, current]
