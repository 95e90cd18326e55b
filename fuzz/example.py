"""One example, all that follows from it, and what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from jetfire.core import schema
from jetfire.core.schema import Count, Fields, Line, Name

# Elements by which a tensor is moved, or its rows are further apart: far above what is drawn.
Shift = Annotated[int, Field(ge=0, le=1 << 16)]
Layout = Annotated[dict[Name, tuple[Shift, Shift]], Field(max_length=100)]

Kind = Literal[
    "wrong",
    "nondeterministic",
    "unwritten",
    "guard",
    "input",
    "config",
    "kernel",
    "gradient",
    "crash",
    "timeout",
    "raised",
    "sanitizer",
]


@dataclass(frozen=True)
class Other:
    """What must give the same as a case's kernel and config: another kernel, or another config."""

    kernel: Name
    config: Fields


@dataclass(frozen=True)
class Example:
    """One example, enough to run it again anywhere.

    Attributes:
        problem, config: fields of the op's Problem and the kernel's Config. With a size of 0 it is
            a call of the op's public function, and the config says nothing.
        data: the distribution of the inputs, as `measure.data.Source` takes it.
        data_seed: the seed of its draws.
        layout: by input, how many elements its rows are further apart than they are wide, and by
            how many its first one is moved from an aligned address; none where not named.
        offset: by how many elements outputs that are updated are moved from an aligned address;
            others by 16 times as many.
        edges: scalars, lists and parameters are at the ends of what they may be (`Op.edges`).
        version: of this format.
    """

    op: Name
    kernel: Name
    problem: Fields
    config: Fields
    data: Line = "normal"
    data_seed: Count = 0
    layout: Layout = field(default_factory=dict)
    offset: Shift = 0
    other: Other | None = None
    edges: bool = False
    version: Literal[1] = 1

    @property
    def id(self) -> str:
        return f"{self.op}-{self.kernel}-{hashlib.sha256(self.as_json().encode()).hexdigest()[:8]}"

    @property
    def empty(self) -> bool:
        return 0 in (v for v in self.problem.values() if not isinstance(v, bool | float))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Example:
        """Return the case that a text holds.

        Raises:
            Unreadable: it holds none, or one of another version.
        """
        return schema.decode(text.encode(), cls, Path("case"))


@dataclass(frozen=True)
class Outcome:
    """What came of one run of a case.

    Attributes:
        kind: what is wrong; None where nothing is; "skipped" where the device lacks the memory.
        differing, compared: elements of a comparison with another kernel.
        known: reports of a sanitizer that are no fault (`core.sanitizer`).
        case: what it came of, where that is another than the one that was run.
    """

    kind: Kind | Literal["skipped"] | None = None
    message: str = ""
    differing: int = 0
    compared: int = 0
    known: int = 0
    case: Example | None = None

    @property
    def checked(self) -> bool:
        return self.kind != "skipped"

    @property
    def failed(self) -> bool:
        return self.checked and self.kind is not None


@dataclass(frozen=True)
class Failure:
    """A case, as small as it could be made, that went wrong, and how."""

    case: Example
    message: str
    kind: Kind
