"""A problem: the shape, dtypes, block and rounding of one call, from values or their texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from jetfire.core.errors import UsageError, unknown

Block = Literal[32, 64, 128]
FloatName = Literal["bf16", "fp16", "fp32"]
Layout = Literal["q", "qt", "both"]
# Of an op that may write no codes.
LayoutOrNone = Literal["none", "q", "qt", "both"]
# How many neighbouring columns a Hadamard transform mixes, and how its 4-bit codes lie.
Group = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
Codes = Literal["packed", "wide", "both"]
# Where what was transformed is written in blocks of INT8 codes, the most columns of a group times
# the side of a block: threads that meet to find a block's largest number hold no more.
MOST_IN_CODES = 512 * 32
Mode = Literal["fwd", "bwd"]
Rounding = Literal["nearest", "stochastic"]

# The default of a field `out_block`, for which `Problem` puts what `block` is: codes are written in
# blocks as they are read.
AS_READ: Any = None
# The most in a matrix, and so the largest size: no device holds more, and bytes fit in an int64.
MOST_ELEMENTS = 2**40


def _hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields by name."""
    hints = get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


# Cached: it takes 0.1 ms, and a training's first step makes dozens of problems, a profile hundreds.
hints_of: Callable[[type], dict[str, Any]] = cache(_hints)


def is_size(annotation: Any) -> bool:
    """Return whether a field of this type is a size, which may be missing: `int`, `int | None`."""
    return annotation is int or isinstance(annotation, UnionType)


def parse_field(name: str, annotation: Any, value: Any) -> Any:
    """Return a field's value, given as it is or as text; UsageError says what is accepted."""
    if isinstance(annotation, UnionType):  # `int | None`
        if value is None or str(value).lower() == "none":
            return None
        annotation = get_args(annotation)[0]
    choices = get_args(annotation) if get_origin(annotation) is Literal else None
    if choices is not None:
        for choice in choices:
            if value == choice or value == str(choice):
                return choice
        raise unknown(f"{name}={value}", str(value), map(str, choices))
    if annotation is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes", "false", "0", "no"):
            return text in ("true", "1", "yes")
        raise UsageError(f"{name}={value}: expected true or false")
    try:
        number = annotation(value)
    except (TypeError, ValueError):
        kind = "an integer" if annotation is int else "a number"
        raise UsageError(f"{name}={value}: expected {kind}") from None
    if annotation is int and number < 1:
        raise UsageError(f"{name}={value}: expected an integer of at least 1")
    if annotation is int and number > MOST_ELEMENTS:
        raise UsageError(f"{name}={value}: expected an integer of at most {MOST_ELEMENTS}")
    return number


@dataclass(frozen=True)
class Problem:
    """The shape, dtypes, block and rounding of one call; each op derives its own.

    ``m`` and ``n`` are the rows and columns of the op's output (or of its only shape). ``block`` is
    the side of the blocks of the codes that it reads. An op that also writes codes may have, after
    it, ``out_block``: the side of theirs, by default `AS_READ`; one that reads none has it alone.

    Attributes:
        of_codes: fields that have a meaning only where ``out`` is int8.
        extras: fields, false by default, that ask for a small output more. A config is as good with
            it as without, so one profile serves both; and where they are false, no text has them.
    """

    of_codes: ClassVar[tuple[str, ...]] = ()
    extras: ClassVar[tuple[str, ...]] = ()
    m: int
    n: int

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "out_block" and str(value).lower() == "none":
                value = vars(self).get("block", value)
            value = parse_field(field.name, hints[field.name], value)
            object.__setattr__(self, field.name, value)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Return a problem from texts or values; unknown and missing names are usage errors."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise unknown(f"no problem field {name!r}", name, known)
        for name, field in known.items():
            if name not in fields and field.default is dataclasses.MISSING:
                raise UsageError(f"problem field {name!r} is missing")
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without an `out_block` that is what `block` is.

        Those of codes are there only where codes are written, and extras where they are asked for.
        So what was saved before there were such fields has the same text, and the same hash.
        """
        fields = self.without_codes(dataclasses.asdict(self))
        for name in self.extras:
            if not fields[name]:
                del fields[name]
        if "out_block" in fields and fields["out_block"] == fields.get("block"):
            del fields["out_block"]
        return fields

    @classmethod
    def without_codes(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields by name without those in `of_codes`, unless `out` says int8."""
        codes = fields.get("out") == "int8"
        return {name: value for name, value in fields.items() if codes or name not in cls.of_codes}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


def value_text(value: Any) -> str:
    """Return a field's value as it is given: true and false, not Python's names of them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def written_block(problem: Any) -> int:
    """Return the block of the codes that a problem has written; `block` where it has one alone."""
    return int(problem.out_block if hasattr(problem, "out_block") else problem.block)


def at_least_zero(problem: Problem, *fields: str) -> None:
    """Check that fields of a problem are finite numbers of at least 0.

    Raises:
        UsageError: one is not.
    """
    for name in fields:
        value = getattr(problem, name)
        if not 0 <= value < math.inf:
            raise UsageError(f"{name}={value}: expected a finite number of at least 0")
