"""Text for people: notes, tables, and the two standard streams.

Text from elsewhere (arguments, files, devices' names) is printed as it is: markup in it does not
count, and its control characters are shown as escapes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from jetfire.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MOST = 2000  # characters of a note: a name of a megabyte is not repeated whole
# C0 and C1 without tab and newline, characters that reorder text, and surrogates, which stand for
# undecodable bytes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text with its control characters as escapes, ``\\x1b`` for an ESC."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def line(text: str) -> str:
    """Return a text as one line: white space folded, control characters shown, not too long."""
    text = visible(" ".join(text.split()))
    if len(text) <= MOST:
        return text
    return f"{text[: MOST * 3 // 4]} … {text[-MOST // 4 :]}"  # messages end with what is accepted


def note(text: str) -> None:
    """Print one line on stderr."""
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
