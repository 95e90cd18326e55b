"""One example, how it is run, what came of it, and what it is a case of."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from jetfire.core import registry
from jetfire.core.problem import hints_of, is_size
from jetfire.core.schema import Count, Fields, Line, Name

GUARD = 4096  # bytes on either side of a tensor
# Of tall problems: what counts of rows, of programs in a grid and of 16 bits end at.
TALL = (2**16, 2**17, 2**15)
UNCOUNTED = 2**31  # elements of a matrix, beyond which 32 bits do not count them
# Elements by which a tensor is moved, or its rows are further apart: far above what is drawn.
Shift = Annotated[int, Field(ge=0, le=1 << 16)]
Layout = Annotated[dict[Name, tuple[Shift, Shift]], Field(max_length=100)]

Kind = Literal[
    "wrong",
    "nondeterministic",
    "unwritten",
    "guard",
    "bounds",
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
        """Whether a size is 0; a choice, such as a share of blocks, may well be."""
        hints = hints_of(registry.get(self.op).Problem)
        return any(v == 0 and is_size(hints.get(name)) for name, v in self.problem.items())

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"), sort_keys=True)


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


@dataclass(frozen=True)
class Mode:
    """How a case is run.

    Attributes:
        host: inputs, poison, reference and checks are the CPU's, and copied: no other kernel than
            the one that is tested runs on the device.
        guard: bytes around tensors.
        initialised: outputs are filled before a launch, and read after it.
    """

    host: bool = False
    guard: int = GUARD
    initialised: bool = True


def is_huge(case: Example) -> bool:
    """Whether two of its sizes make a matrix of more elements than 32 bits count, or it has one."""
    op = registry.get(case.op)
    dims = [case.problem[name] for name in op.dims]
    if any(a * b > UNCOUNTED for i, a in enumerate(dims) for b in dims[i + 1 :]):
        return True
    outputs = op.writes(op.Problem.parse(case.problem)).values() if min(dims) else ()
    return any(math.prod(spec.shape) > UNCOUNTED for spec in outputs)


def traits(case: Example, outcome: Outcome) -> list[str]:
    """Names of what a case covers."""
    dims = [case.problem[name] for name in registry.get(case.op).dims]
    block: int = case.problem.get("block") or case.problem.get("group", 32)
    block = max(block, case.problem.get("out_block", block))
    found = {
        "skipped": outcome.kind == "skipped",
        "known reports": outcome.known > 0,
        "empty": case.empty,
        "ragged": any(size % max(block, 2) for size in dims),
        "two blocks": {"block", "out_block"} <= case.problem.keys(),
        "whole": not any(size % 16 for size in dims),
        "one": 1 in dims,
        "tall": max(dims) >= min(TALL) - 1,
        "huge": is_huge(case) and outcome.checked,
        "edges": case.edges,
        "strided": any(padding for padding, _ in case.layout.values()),
        "moved": any(offset for _, offset in case.layout.values()) or case.offset > 0,
        "compared": case.other is not None,
        "stochastic": case.problem.get("rounding") == "stochastic",
        "backward": case.problem.get("mode") == "bwd",
    }
    data = [f"data {name}" for name in dict.fromkeys(case.data.split("/"))]
    return [name for name, true in found.items() if true] + data
