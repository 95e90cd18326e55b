"""One example, all that follows from it, and what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetfire.ops.errors import UsageError

VERSION = 1  # of a case's JSON

Kind = Literal[
    "wrong", "nondeterministic", "unwritten", "guard", "input", "config", "kernel", "gradient",
    "crash", "timeout", "raised", "sanitizer",
]  # fmt: skip


@dataclass(frozen=True)
class Other:
    """What must give the same as a case's kernel and config: another kernel, or another config."""

    kernel: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One example, enough to run it again anywhere.

    Attributes:
        problem, config: fields of the op's Problem and the kernel's Config. With a size of 0 it is
            a call of the op's public function, and the config says nothing.
        data: the distribution of the inputs, as `ops.data.Source` takes it; data_seed: its seed.
        layout: by input, how many elements its rows are further apart than they are wide, and by
            how many its first one is moved from an aligned address; none where not named.
        offset: by how many elements outputs that are updated are moved from an aligned address;
            others by 16 times as many.
        edges: scalars, lists and parameters are at the ends of what they may be (`fuzz.edges`).
    """

    op: str
    kernel: str
    problem: Mapping[str, Any]
    config: Mapping[str, Any]
    data: str = "normal"
    data_seed: int = 0
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    offset: int = 0
    other: Other | None = None
    edges: bool = False

    @property
    def id(self) -> str:
        return f"{self.op}-{self.kernel}-{hashlib.sha256(self.as_json().encode()).hexdigest()[:8]}"

    @property
    def empty(self) -> bool:
        return 0 in (v for v in self.problem.values() if not isinstance(v, bool | float))

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def parse(cls, fields: Any) -> Case:
        """A case from its JSON's object.

        Raises:
            UsageError: it is no case, or one of another version.
        """
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            raise UsageError(f"not a case of version {VERSION}, as jetfire-fuzz saves them")
        known = {**fields}
        del known["version"]
        try:
            if known.get("other") is not None:
                known["other"] = Other(**known["other"])
            known["layout"] = {k: (int(a), int(b)) for k, (a, b) in known["layout"].items()}
            return cls(**known)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a case that jetfire-fuzz saved ({error})") from None

    @classmethod
    def from_json(cls, text: str) -> Case:
        try:
            return cls.parse(json.loads(text))
        except ValueError:
            raise UsageError("not a case: no JSON") from None


@dataclass(frozen=True)
class Outcome:
    """What came of one run of a case.

    Attributes:
        kind: what is wrong; None where nothing is; "skipped" where the device lacks the memory.
        differing, compared: elements of a comparison with another kernel.
        known: reports of a sanitizer that are no fault (`sanitize.KNOWN`).
        case: what it came of, where that is another than the one that was run.
    """

    kind: Kind | Literal["skipped"] | None = None
    message: str = ""
    differing: int = 0
    compared: int = 0
    known: int = 0
    case: Case | None = None

    @property
    def checked(self) -> bool:
        return self.kind != "skipped"

    @property
    def failed(self) -> bool:
        return self.checked and self.kind is not None


@dataclass(frozen=True)
class Failure:
    """A case, as small as it could be made, that went wrong, and how."""

    case: Case
    message: str
    kind: Kind
