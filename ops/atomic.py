"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def replace(file: Path, content: bytes) -> None:
    """Write a file under another name, force it to the disk, and rename it.

    Callers see to it that there is one writer: a killed one's leavings are the next one's.
    """
    part = file.with_name(f"{file.name}.tmp")
    try:
        with part.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
