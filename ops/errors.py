"""Errors that end a command, each with its documented exit code (README, "Exit codes")."""


class JetfireError(Exception):
    """Base of every error shown to a user as one line."""

    exit_code = 1


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
