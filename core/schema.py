"""The one way in which files become values: JSON or TOML, checked against types with bounds.

A format is a dataclass or a TypedDict whose annotations state all the bounds of its values. The
names below are for such annotations. Keys that a type does not name are skipped, so that a file of
a later version can be read. The parser is pydantic's, in Rust: msgspec 0.22 crashed on a tuple
whose second element was of a wrong type.
"""

from __future__ import annotations

import gc
import io
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import TypedDict

from jetfire.core import files
from jetfire.core.files import MIB, Unreadable

T = TypeVar("T")
LARGEST = 2**63 - 1
MOST_ENTRIES = 10_000  # in a list or an object without a type of its own
MOST_BAD = 10_000  # lines without a value: a million took 14 s and 600 MiB

_SHOWN = 100  # characters of a value in a message

# Control characters of a terminal, line ends that would end a comment in generated code, and
# characters that turn the direction of text: each hides or forges the text after it.
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\x{2028}-\x{202e}\x{2066}-\x{2069}"
_LINE, _LINES = rf"^[^\t\n{_CONTROL}]*$", rf"^[^{_CONTROL}]*$"
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$"
NAME_WORDS = "letters, digits and _ . + -"
# Our words for pydantic's description of accepted values.
_WORDS = {
    f"String should match pattern '{_LINE}'": "text without control characters",
    f"String should match pattern '{_LINES}'": "text without control characters but \\t and \\n",
    f"String should match pattern '{NAME}'": NAME_WORDS,
    "a valid dictionary": "a JSON object",
    "an object": "a JSON object",
    "a valid string": "text",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid array": "a list",
}


def _scalar(value: Any) -> Any:
    """Return a value that is a finite number, a boolean, a line of text or None.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, str):
        return _adapter(Line).validate_python(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return value
    raise ValueError("a finite number, text, true, false or null")


def _scalars(value: list[Any]) -> list[Any]:
    """Return a list as it is.

    Raises:
        ValueError: `_scalar` refuses an entry; those after it are not checked.
    """
    return [_scalar(entry) for entry in value]


def _plain(value: Any, depth: int = 4) -> Any:
    """Return a value that `_scalar` takes, or lists and objects of such values.

    Raises:
        ValueError: it is anything else, deeper, or longer.
    """
    if isinstance(value, list | dict) and len(value) > MOST_ENTRIES:
        raise ValueError(f"at most {MOST_ENTRIES} entries")
    if depth and isinstance(value, list):
        return [_plain(entry, depth - 1) for entry in value]
    if depth and isinstance(value, dict):
        return {_scalar(name): _plain(entry, depth - 1) for name, entry in value.items()}
    return _scalar(value)


def most(count: int) -> BeforeValidator:
    """Return a validator that refuses a longer list or object before its entries are checked.

    pydantic keeps every wrong entry for an error's text: those of half a million took 2 GiB.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"at most {count} entries")
        return value

    return BeforeValidator(check)


def also(kind: Any) -> AfterValidator:
    """Return a validator of a second type, which leaves the value as it is."""

    def check(value: Any) -> Any:
        _adapter(kind).validate_python(value, strict=True)
        return value

    return AfterValidator(check)


Line = Annotated[str, StringConstraints(max_length=2000, pattern=_LINE)]
Text = Annotated[str, StringConstraints(max_length=MIB, pattern=_LINES)]
# A word that may stand in a path: no separator, and no dot first.
Name = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=NAME)]
Digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
# Milliseconds, or a rate. Beyond these bounds it is a mistake; within, the ratio of two is finite.
Measured = Annotated[FiniteFloat, Field(ge=1e-9, le=1e9)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Scalar = Annotated[Any, AfterValidator(_scalar)]
Scalars = Annotated[list[Any], AfterValidator(_scalars)]
# A value without a type of its own, which is kept and shown but not computed with.
Plain = Annotated[Any, AfterValidator(_plain)]
Fields = Annotated[dict[Name, Scalar], most(100)]
Ratios = Annotated[dict[Name, Positive], most(100)]


class _Versioned(TypedDict, total=False):
    """The part of a file that states its version; the rest is not made into values yet."""

    schema: Any


def load(path: Path, kind: type[T], most: int = 16 * MIB, version: int | None = None) -> T:
    """Return the value that a JSON file holds.

    Args:
        path: the file; unpacked where its name ends in ``.gz``.
        kind: the type of the value.
        most: bytes that the file may hold.
        version: the ``schema`` that it must have; None for a format without one.

    Raises:
        Missing: there is no such file.
        Unreadable: it cannot be read, is of another version, or holds no such value; the message
            says at which place, and what is accepted there.
    """
    return decode(files.read(path, most), kind, path, version)


def load_toml(path: Path, kind: type[T], most: int) -> T:
    """Return the value that a TOML file holds; arguments and errors as `load` has them."""
    try:
        return _adapter(kind).validate_python(tomllib.loads(files.read(path, most).decode()))
    except ValidationError as error:
        raise Unreadable(path, _reason(error)) from None
    except RecursionError:
        raise Unreadable(path, "nested too deeply") from None
    except ValueError as error:  # tomllib's, of UTF-8, or of a number of thousands of digits
        raise Unreadable(path, f"no TOML: {_printable(str(error))}") from None


def decode(content: bytes, kind: type[T], path: Path, version: int | None = None) -> T:
    """Return the value that JSON text holds.

    Args:
        path: the file that it came from.
        version: as of `load`.

    Raises:
        Unreadable: it is of another version, or holds no such value.
    """
    if version is not None:
        found = decode(content, _Versioned, path).get("schema")
        if type(found) is not int or found != version:
            reason = f"schema {str(found)[:20]!r}: this version reads schema {version}"
            raise Unreadable(path, reason)
    collects = gc.isenabled()
    # The collector would pass over millions of values again and again: half of the time.
    gc.disable()
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        raise Unreadable(path, _reason(error)) from None
    finally:
        if collects:
            gc.enable()


def convert(value: Any, kind: type[T], path: Path) -> T:
    """Return a value of a type, made from one that was read from JSON.

    Raises:
        Unreadable: no such value can be made from it.
    """
    return decode(json.dumps(value).encode(), kind, path)


class BadLine(Unreadable):
    """A line of a file that holds no value.

    Attributes:
        number: the line's, from 1.
        cut: the line is the last and has no end, as where its writer was killed.
    """

    def __init__(self, path: Path, number: int, reason: str, cut: bool) -> None:
        super().__init__(path, f"line {number}: {reason}")
        self.number, self.cut = number, cut


def lines(path: Path, kind: type[T], most: int, most_lines: int) -> Iterator[T | BadLine]:
    """Yield the value of each line of a file of JSON lines; for a line without one, its error.

    Args:
        path: the file.
        kind: the type of a line's value.
        most, most_lines: bytes and lines that the file may hold.

    Raises:
        Missing: there is no such file.
        Unreadable: it cannot be read, or more than `MOST_BAD` of its lines hold no value.
    """
    content, bad = files.read(path, most), 0
    if content.count(b"\n") > most_lines:
        raise Unreadable(path, f"more than {most_lines} lines: expected at most that many")
    for number, text in enumerate(io.BytesIO(content), 1):
        if text.strip():
            try:
                yield decode(text.removesuffix(b"\n"), kind, path)
            except Unreadable as error:
                bad += 1
                if bad > MOST_BAD:
                    reason = f"more than {MOST_BAD} lines hold no value, the last {number}"
                    raise Unreadable(path, f"{reason}: {error.reason}") from None
                yield BadLine(path, number, error.reason, not text.endswith(b"\n"))


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _reason(error: ValidationError) -> str:
    """Return one line on the first error: its place, the value found there and what is accepted."""
    first = error.errors(include_url=False)[0]
    where = _printable(".".join(str(part) for part in first["loc"]))
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    wanted = _WORDS.get(wanted, wanted)
    if first["type"] == "json_invalid":
        return f"no JSON: {first['ctx']['error']}"
    if first["type"] == "missing":
        return f"{where} is missing"
    shown = _printable(repr(_beginning(first["input"])))
    return f"{where + '=' if where else ''}{shown}: expected {_printable(wanted)}"


def _beginning(value: Any, entries: Iterator[int] | None = None) -> Any:
    """Return a JSON value without what its text would not show: all of 12 MB took 0.7 s.

    Args:
        entries: yields as often as an entry may still be taken, each a character at least.
    """
    left = iter(range(_SHOWN)) if entries is None else entries
    if isinstance(value, str):
        return value[:_SHOWN]
    if isinstance(value, list):
        return [_beginning(entry, left) for entry, _ in zip(value, left, strict=False)]
    if isinstance(value, dict):
        items = zip(value.items(), left, strict=False)
        return {name[:_SHOWN]: _beginning(entry, left) for (name, entry), _ in items}
    return value


def _printable(text: str) -> str:
    """Return the beginning of a text, with escapes for characters that do not print."""
    short = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)
