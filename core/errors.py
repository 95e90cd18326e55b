"""Errors that end a command, each with its documented exit code (README, "Exit codes")."""

from __future__ import annotations

from collections.abc import Iterable


class JetfireError(Exception):
    """Base of every error shown to a user as one line.

    Attributes:
        details: a compiler's own lines, shown below that one; mostly empty.
    """

    exit_code = 1
    details = ""


class JetfireWarning(UserWarning):
    """What a user should know of, in one line; the command line prints it so."""


class UsageError(JetfireError):
    """What was asked for cannot be: a bad name, size, option or file."""

    exit_code = 2


class WrongResultError(JetfireError):
    """A kernel disagreed with its reference."""

    exit_code = 3


class RegressionError(JetfireError):
    """A measurement is slower than the one it is compared with, beyond noise."""

    exit_code = 4


class NoDeviceError(JetfireError):
    """The device or architecture that was asked for is not here."""

    exit_code = 5


class TimedOutError(JetfireError):
    """All that was tried took longer than it was given."""

    exit_code = 6


def unknown(given: str, name: str, known: Iterable[str], also: str = "") -> UsageError:
    """Return the error for a name that is none of those known: it suggests one and lists all.

    Args:
        given: what the line begins with, for instance ``no op 'gmem'`` or ``--format jsno``.
        name: the name alone.
        also: what is accepted beside the names, as the line ends: ``, or none``.
    """
    names = list(known)
    near = nearest(name, names)
    hint = f" (did you mean {near}?)" if near else ""
    few = len(names) <= 3 and not also
    accepted = " or ".join(names) if few else f"one of {', '.join(names)}{also}"
    return UsageError(f"{given}{hint}: expected {accepted}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt most like this one, or begins so; None where none is."""
    import difflib

    # A wrong number is no slip of the finger, nor is a text that long, which is slow to compare.
    if len(name) > 60 or not any(map(str.isalpha, name)):
        return None
    spelling = _spelling(name)
    by_spelling = {_spelling(other): other for other in known}
    found = difflib.get_close_matches(spelling, by_spelling, 1)
    found += [other for other in by_spelling if len(spelling) > 1 and other.startswith(spelling)]
    return by_spelling[found[0]] if found else None


def _spelling(name: str) -> str:
    """Return what of a name counts for likeness: an option's dashes are all options'."""
    return name.lower().replace("_", "-").strip("-")


def refused(error: OSError) -> str:
    """Return what the operating system refused, after the file's name where there is one."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}"
