"""The environment's variables that a command runs with: switches, how threads wait, and caches."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jetfire.core import files
from jetfire.core.errors import UsageError

replaced: list[str] = []  # the variables of caches that this process keeps for itself alone
_AT_HOME = ("TRITON_HOME", "CUPY_CACHE_DIR", "MPLCONFIGDIR")  # caches of others, in the home
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switch(name: str, *, default: bool) -> bool:
    """Return whether an environment variable is on. Upper and lower case count alike.

    Args:
        default: what it is where it is not set, or is empty.

    Raises:
        UsageError: its value is neither on nor off.
    """
    given = os.environ.get(name, "")
    if not given:
        return default
    if given.lower() not in (*_ON, *_OFF):
        on, off = ", ".join(_ON), ", ".join(_OFF)
        raise UsageError(f"{name}={given[:50]!r}: expected one of {on}, or one of {off}")
    return given.lower() in _ON


def share_cores() -> None:
    """Have OpenMP's threads wait for each other asleep, unless the user has said how they wait.

    It is read when torch loads, and worker processes inherit it. By default they spin for
    milliseconds, on cores that other programs want: on 2 cores with 4 busy processes torch's
    512×512 GELU took 12.0 ms instead of 0.2, and 20 steps of tiny 86 s instead of 17. Without any
    spinning a quiet machine of 16 cores took 55 µs instead of 23; with 1000 turns, 23.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")


def torchrun() -> bool:
    """Return whether torchrun started this process, which it tells by the environment."""
    told = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in told)


def leads() -> bool:
    """Return whether this is the only process, or the first of those that torchrun started."""
    return not torchrun() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def caches() -> Iterator[None]:
    """Have what is compiled kept in a folder for this run alone, where its own cannot be written.

    Triton and CuPy fail without their caches, and so would kernels, as if they were wrong. Tokens,
    which are to be kept, are looked for and refused where they would be.
    """
    missing = _unwritable()
    if not missing:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="jetfire-", ignore_cleanup_errors=True) as folder:
        values = dict.fromkeys(missing, folder)
        if "JETFIRE_CACHE" in missing and "JETFIRE_TOKENS" not in os.environ:
            values["JETFIRE_TOKENS"] = str(files.cache())
        os.environ |= values
        replaced[:] = missing
        try:
            yield
        finally:
            replaced.clear()
            for name in values:
                del os.environ[name]


def _unwritable() -> list[str]:
    """Return the variables of caches whose usual folders cannot be written."""
    found = []
    if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        found = [name for name in _AT_HOME if name not in os.environ]
    if not os.environ.get("JETFIRE_CACHE") and not holds_files(files.cache()):
        found.append("JETFIRE_CACHE")
    return found


def holds_files(folder: Path) -> bool:
    """Say whether a folder can hold files, or be made, by making one that is gone again.

    To root `os.access` grants /proc too.
    """
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".jetfire-", dir=place):
            return True
    except OSError:
        return False
