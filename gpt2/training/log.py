"""A run's log: JSON lines that are only ever added to, the first a header.

``{"kind": "run"}`` has settings, versions, device, how many runs shared it, the counts and digests
of the tokens and what text they were made of; ``step`` has step, loss, norm, rate, ms,
tokens_per_s, mfu and peak_gib; ``evaluation`` step and loss; ``checkpoint`` the step of one that
was written; ``watch`` what INT8 is about to do to the first micro-batch of a step, for the first
process; ``fault`` and ``end`` what they say. ``resume`` has what ``run`` has and the step that
a process goes on after, of which what was logged before of later steps no longer counts; ``cut``
says that the line before it was never finished. Losses are nats per token.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Discriminator, Field, FiniteFloat, Tag
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import MIB, Unreadable
from jetfire.core.schema import MOST_ENTRIES, BadLine, Count, Line, Name, NotNegative, Size

if TYPE_CHECKING:
    from jetfire.nn import CodesQuality, Watched

Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
NAME = "log.jsonl"
# In the environment of a run: how many runs share its device, where they are more than one.
RUNS_AT_ONCE = "JETFIRE_RUNS_AT_ONCE"
Record = dict[str, Any]
# Bytes: a million steps have 230 MB, and 16000 that are watched at 124M.
MOST = 256 * MIB
MOST_LINES = 2_000_000


class _Open(TypedDict):
    """What may hold more, of a later version too."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class _Settings(_Open):
    preset: Line
    recipe: Line
    seed: Count


class _Device(_Open, total=False):
    name: Line
    processes: Annotated[int, Field(ge=1, le=1 << 16)]


class _Other(_Open):
    kind: Name
    step: NotRequired[Count]


class _Head(_Other):
    settings: _Settings
    device: _Device
    cut: NotRequired[bool]
    runs_at_once: NotRequired[Size]


class _Evaluation(_Open):
    kind: Name
    step: Count
    loss: FiniteFloat


class _Step(_Evaluation, total=False):
    norm: FiniteFloat
    ms: NotNegative
    peak_gib: NotNegative | None


class _Codes(_Open):
    """What `CodesQuality` has; null where that is not finite."""

    sqnr: FiniteFloat | None
    zeros: Share
    clipped: Share
    largest: NotNegative | None
    fallback: NotRequired[Share]


class _Worst(_Open):
    layer: Name
    kind: Name
    sqnr: FiniteFloat | None


class _Layer(_Open, total=False):
    weight: _Codes
    input: _Codes
    gradient: _Codes


class _Watch(_Open):
    kind: Name
    step: Count
    worst: _Worst
    layers: Annotated[dict[Name, _Layer], schema.most(MOST_ENTRIES)]


def watched(step: int, seen: Watched) -> Record:
    """Return the line on what was seen of a step, four digits of a number."""
    layers = {
        layer: {kind: _codes(of[layer]) for kind, of in vars(seen).items() if layer in of}
        for layer in seen.weight
    }
    ((layer, kind, quality),) = seen.worst()
    worst = {"layer": layer, "kind": kind, "sqnr": _codes(quality)["sqnr"]}
    return {"kind": "watch", "step": step, "worst": worst, "layers": layers}


def _codes(quality: CodesQuality) -> dict[str, float | None]:
    return {
        name: float(f"{value:.4g}") if math.isfinite(value) else None
        for name, value in vars(quality).items()
    }


def _tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else None
    own = {name: name for name in ("step", "evaluation", "watch")}
    tags = {"run": "head", "resume": "head", **own}
    return tags.get(kind, "other") if isinstance(kind, str) else "other"


_Record: Any = Annotated[
    Annotated[_Head, Tag("head")]
    | Annotated[_Step, Tag("step")]
    | Annotated[_Evaluation, Tag("evaluation")]
    | Annotated[_Watch, Tag("watch")]
    | Annotated[_Other, Tag("other")],
    Discriminator(_tag),
]


def read(path: Path) -> list[Record]:
    """The records of a log, or of the run in a folder, each step's once.

    A line cut short is left out: the last, or one after which a process went on. Other lines that
    are no records are left out too, with a warning.

    Args:
        path: the run's folder, or its log under any name; one that ends in .gz is unpacked.
    """
    file = path / NAME if path.is_dir() else path
    try:
        found = records(file)
    except Unreadable as error:
        said = f"{path}: expected a run's folder or its {NAME}: {error.reason}"
        raise UsageError(said) from None
    if not found or found[0]["kind"] not in ("run", "resume"):
        raise UsageError(f'{file}: expected a first line of kind "run"')
    return found


def records(file: Path) -> list[Record]:
    """Return what `read` does, whatever the first line is.

    Raises:
        Missing: there is no such file.
        Unreadable: it cannot be read.
    """
    kept: list[Record] = []
    bad: list[BadLine] = []
    for found in schema.lines(file, _Record, MOST, MOST_LINES):
        if isinstance(found, BadLine):
            bad.append(found)
            continue
        if found["kind"] == "resume":
            if found.get("cut") and bad:
                bad.pop()
            step = found.get("step", 0)  # after which nothing that was logged counts any more
            while len(kept) > 1 and (kept[-1]["kind"] == "end" or kept[-1].get("step", 0) > step):
                kept.pop()
        kept.append(found)
    if bad and bad[-1].cut:
        bad.pop()
    if bad:
        warnings.warn(f"{file}: {_passed_over(bad)}", JetfireWarning, stacklevel=3)
    return kept


def _passed_over(bad: Sequence[BadLine]) -> str:
    """Return which lines hold no record, and why the first does not."""
    # To the parser a line is a text of its own, whose errors are all in line 1.
    reason = bad[0].reason.replace(" at line 1 column ", " at column ")
    if len(bad) == 1:
        own = f"line {bad[0].number}"
        return f"{own} passed over: {reason.removeprefix(f'{own}: ')}"
    numbers = ", ".join(str(line.number) for line in bad[:10])
    more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
    return f"lines {numbers}{more} passed over: {reason}"


class Log:
    """Adds to a run's log; each line is in the file before the next step is read.

    Attributes:
        empty: whether nothing was in it before.
        cut: whether a line in it was never finished.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self._file = files.append(self.path)
        size = self._file.tell()
        self.empty = size == 0
        self.cut = size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n"
        if self.cut:
            self._add(b"\n")

    def write(self, record: Record) -> None:
        """Add a line.

        Raises:
            Unwritable: the disk is full.
        """
        self._add(json.dumps(record).encode() + b"\n")

    def _add(self, line: bytes) -> None:
        with files.writing(self.path):
            files.add(self._file, line)

    def close(self) -> None:
        self._file.close()
