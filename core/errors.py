"""Errors that end a command, each with its documented exit code (docs/commands.md)."""

from __future__ import annotations

from collections.abc import Iterable


class JetfireError(Exception):
    """The base of every error that a user is shown as one line.

    Attributes:
        details: a compiler's own lines, shown below that line; mostly empty.
    """

    exit_code = 1
    details = ""


class JetfireWarning(UserWarning):
    """A warning to the user in one line, which the command line prints as a note."""


class UsageError(JetfireError):
    """A request that cannot be met: a bad name, size, option or file."""

    exit_code = 2


class WrongResultError(JetfireError):
    """A kernel's result that differs from the reference's."""

    exit_code = 3


class RegressionError(JetfireError):
    """A measurement slower than the one it is compared with, beyond noise."""

    exit_code = 4


class NoDeviceError(JetfireError):
    """A device or architecture that was asked for and is not present."""

    exit_code = 5


class TimedOutError(JetfireError):
    """A time limit that everything tried has passed."""

    exit_code = 6


class Interrupted(JetfireError):
    """Ctrl-C or a signal ended it, after what there was has been shown or saved."""

    exit_code = 130


def not_installed(library: str, extra: str = "") -> UsageError:
    """Return the error for a library that is not there.

    Args:
        extra: Jetfire's extra that brings it.
    """
    wanted = f"'jetfire[{extra}]'" if extra else library
    return UsageError(f"needs {library}, which is not installed: pip install {wanted}")


def unknown(given: str, name: str, known: Iterable[str], also: str = "") -> UsageError:
    """Return the error for an unknown name: it suggests the nearest known one and lists all.

    Args:
        given: the line's beginning, for instance ``no op 'gmem'`` or ``--format jsno``.
        name: the name alone.
        also: the line's end, for what is accepted beside the names: ``, or none``.
    """
    names = list(known)
    near = nearest(name, names)
    hint = f" (did you mean {near}?)" if near else ""
    few = len(names) <= 3 and not also
    accepted = " or ".join(names) if few else f"one of {', '.join(names)}{also}"
    return UsageError(f"{given}{hint}: expected {accepted}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name spelt most like this one, or beginning with it; None without any."""
    import difflib

    # A number has no near name. A text that long is no typing error, and is slow to compare.
    if len(name) > 60 or not any(map(str.isalpha, name)):
        return None
    spelling = _spelling(name)
    by_spelling = {_spelling(other): other for other in known}
    found = difflib.get_close_matches(spelling, by_spelling, 1)
    found += [other for other in by_spelling if len(spelling) > 1 and other.startswith(spelling)]
    return by_spelling[found[0]] if found else None


def _spelling(name: str) -> str:
    """Return a name without what does not count for likeness: case, and an option's dashes."""
    return name.lower().replace("_", "-").strip("-")


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def refused(error: OSError) -> str:
    """Return the operating system's reason, after the file's name where there is one."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
