"""The checkout that the package is run from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jetfire


def commit() -> str | None:
    """Return the checkout's commit, if the package is run from one."""
    root = Path(jetfire.__file__).parent
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
