"""Commits: of the checkout that the package is run from, and of what is measured."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import jetfire

_ROOT = Path(jetfire.__file__).parent


def commit() -> str | None:
    """Return the checkout's commit, if the package is run from one."""
    return _git(_ROOT, "rev-parse", "HEAD") if (_ROOT / ".git").exists() else None


def measured(files: Sequence[Path]) -> str | None:
    """Return the commit of what is measured, with a ``+`` where a tracked file differs from it.

    It is that of the first repository that holds one of the files, which kernels were loaded from,
    or is the checkout, or has the current folder in it. None where there is none.
    """
    checkout = [_ROOT] if (_ROOT / ".git").exists() else []
    for folder in [*(file.parent for file in files), *checkout, Path()]:
        if found := _git(folder, "rev-parse", "HEAD"):
            differs = _git(folder, "status", "--porcelain", "--untracked-files=no")
            return f"{found}+" if differs else found
    return None


def order(commits: Collection[str]) -> dict[str, int] | None:
    """Return the place of each commit after all its ancestors, by the current folder's repository.

    Args:
        commits: hexadecimal digits alone.

    Returns:
        None where one of them is not in that repository, or there is none.
    """
    text = "\n".join(commits)
    found = _git(Path(), "rev-list", "--topo-order", "--reverse", "--stdin", given=text)
    return None if found is None else {one: i for i, one in enumerate(found.split())}


def _git(folder: Path, *words: str, given: str = "") -> str | None:
    """Return what git says in a folder; None where it fails, or there is no git."""
    try:
        return subprocess.run(
            # Nothing is written to a repository, and no program of its own is run.
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            input=given,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
