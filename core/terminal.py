"""Text for people: notes, tables, and the two standard streams; or a result as JSON for a program.

Text from elsewhere (arguments, files, devices' names) is printed as it is: markup in it does not
count, and its control characters are shown as escapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from jetfire.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MOST = 2000  # characters of a note: a name of a megabyte is not repeated whole
# C0 and C1 without tab and newline, characters that reorder text, and surrogates, which stand for
# undecodable bytes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Manner:
    """How a command speaks, as the options of every command say.

    Attributes:
        json: its result is one JSON document on stdout.
        quiet: on stderr there are errors alone.
        verbose: on stderr there is what it decides, too.
        document: what there is of its result yet, where that is JSON.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    document: dict[str, Any] = field(default_factory=dict)


manner = Manner()


@contextlib.contextmanager
def speaking(words: Collection[str]) -> Iterator[Manner]:
    """Speak as a command line's words ask for; what is not its result leaves stdout to the JSON.

    The words are looked at as they are, so that one that cannot be parsed is answered so, too.
    """
    global manner
    before = manner
    manner = Manner(json="--json" in words, quiet="--quiet" in words, verbose="--verbose" in words)
    stdout = sys.stderr if manner.json else sys.stdout
    try:
        with contextlib.redirect_stdout(stdout):
            yield manner
    finally:
        manner = before


def result(value: Mapping[str, Any], display: Callable[[], object]) -> None:
    """Give a result, or a part of it: to the JSON document, or to people as `display` prints it."""
    if manner.json:
        manner.document.update(value)
    else:
        display()


def planned(lines: Sequence[str]) -> None:
    """Give what would be done, as the lines of a dry run, below those of its part before."""
    result({"plan": [*manner.document.get("plan", ()), *lines]}, lambda: show("\n".join(lines)))


def print_document(document: Mapping[str, Any]) -> None:
    """Print what a command came to as JSON."""
    print(json.dumps(_plain(document), indent=1, allow_nan=False, default=str), flush=True)


def _plain(value: Any) -> Any:
    """Return a value with JSON's types: objects for dataclasses, None for NaN and infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def visible(text: str) -> str:
    """Return a text with its control characters as escapes, ``\\x1b`` for an ESC."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def line(text: str) -> str:
    """Return a text as one line: white space folded, control characters shown, not too long."""
    text = visible(" ".join(text.split()))
    if len(text) <= MOST:
        return text
    return f"{text[: MOST * 3 // 4]} … {text[-MOST // 4 :]}"  # messages end with what is accepted


def progress(text: str) -> None:
    """Print one line on stderr of how far a command is, unless it is to be quiet."""
    if not manner.quiet:
        print(visible(text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print one line on stderr that a user is to know, unless the command is to be quiet."""
    progress(f"jetfire: {line(text)}")


def decision(text: str) -> None:
    """Print one line on stderr of what a command chose by itself, where it is to be verbose."""
    if manner.verbose:
        note(text)


def error(text: str) -> None:
    """Print one line on stderr of what a command ends with."""
    print(f"jetfire: {line(text)}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print text from elsewhere on stdout; on a terminal, with control characters as escapes."""
    print(visible(text) if sys.stdout.isatty() else text)


def details(text: str) -> None:
    """Print a compiler's lines on stderr, below a note."""
    if text:
        print(visible(text.rstrip("\n")), file=sys.stderr, flush=True)


def styled(text: str, style: str = "") -> Text:
    """Return text for a table or a console in one style."""
    from rich.text import Text

    return Text(visible(text), style)


def console(width: int | None = None, stderr: bool = False) -> Console:
    """Return a Rich console that prints strings as they are, on stdout unless told otherwise.

    On stderr it shows how far a command is: nothing, where that is to be quiet.

    Args:
        width: columns where the stream is no terminal; None is Rich's default.
    """
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    stream = sys.stderr if stderr else sys.stdout
    return Plain(
        width=None if stream.isatty() else width,
        stderr=stderr,
        quiet=stderr and manner.quiet,
        markup=False,
        emoji=False,
        highlight=False,
    )


class _Stream:
    """A standard stream that is given up once it cannot be written.

    A reader that stops early (``| head``) is no error: the command goes on to its end, for its
    files and its exit code. Where `needed`, any other refusal ends the command.
    """

    def __init__(self, stream: TextIO, needed: bool) -> None:
        self._stream, self._needed = stream, needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # the locale lacks "×"
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # On exit Python itself writes what is left in the buffer, and would fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._needed and not isinstance(error, BrokenPipeError):
            raise UsageError(f"standard output cannot be written: {error.strerror}")


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that may be closed, full or cut off meanwhile."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # for a stream that is closed
        out, err = (stream or nowhere for stream in before)
        made: list[Any] = [_Stream(out, needed=True), _Stream(err, needed=False)]
        sys.stdout, sys.stderr = made
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
