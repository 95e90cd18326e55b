"""A run's log: JSON lines, the first a header.

``{"kind": "run"}`` has settings, versions and device; ``step`` has step, loss, norm, rate, ms,
tokens_per_s, mfu and peak_gib; ``evaluation`` step and loss; ``resume``, ``fault`` and ``end``
what they say. Losses are nats a token.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jetfire
from jetfire.core.files import write
from jetfire.gpt2.utilisation import Peak
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError

NAME = "log.jsonl"
Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a log, or of the run in a folder; a last line cut short is left out.

    Args:
        path: the run's folder, or its log under any name; one that ends in .gz is unpacked.

    Raises:
        UsageError: it cannot be read, or is no log.
    """
    file = path / NAME if path.is_dir() else path
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        lines = content.decode("utf-8").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"{path}: expected a run's folder or its {NAME}: {reason}") from None
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise UsageError(f"{file}:{number}: expected a JSON object with a kind") from None
        records.append(record)
    if not records or records[0]["kind"] != "run":
        raise UsageError(f'{file}: expected a first line of kind "run"')
    return records


class Log:
    """Appends to a run's log; each line is in the file before the next step is read.

    Args:
        after: keep only what an earlier process logged up to this step, that the lines after it
            stand once; None begins a new log.
    """

    def __init__(self, run: Path, after: int | None = None) -> None:
        self.path = run / NAME
        kept: list[Record] = []
        if after is not None and self.path.exists():
            kept = [r for r in read(self.path) if r.get("step", 0) <= after and r["kind"] != "end"]
        write(self.path, "".join(_line(record) for record in kept))
        self.empty = not kept
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def commit() -> str | None:
    """The checkout's commit, if the package is run from one."""
    root = Path(jetfire.__file__).parent
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True,
            check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None


def header(
    kind: str, settings: Record, device: Device, peak: Peak | None, processes: int, **more: Any
) -> Record:  # fmt: skip
    """What a process says of itself before its first step; `more` is the model's and the data's."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "jetfire"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "kind": kind, "settings": settings, "versions": versions,
        "device": {"name": device.label, "kind": device.kind, "processes": processes},
        "peak": None if peak is None else {"bf16_tflops": peak.tflops, "from": peak.source},
        "commit": commit(), "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]], **more,
    }  # fmt: skip
