"""A space with what became of each of its configs, in a small file: for tests and `--replay`."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import FailFast, Field

from jetfire.core import registry, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Unreadable, write
from jetfire.core.kernel import Config, Kernel
from jetfire.core.schema import Count, Fields, Measured, Name, NotNegative, Plain, Scalars, most
from jetfire.tuner.space import WHOLE, Space
from jetfire.tuner.trial import OUTCOMES, Measurement, Outcome

SCHEMA = 1
Values = Annotated[Scalars, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Recording:
    """Measurements of one kernel's configs for one problem.

    Attributes:
        device: as `jetfire.bench.command.device_record` has it.
        fields: those searched, with their values.
        base: all the fields of the default config.
        trials: config → what became of it.
    """

    kernel: Kernel
    problem: Any
    device: Mapping[str, Any]
    fields: Mapping[str, Sequence[Any]]
    base: Config
    trials: Mapping[Config, Measurement]

    def space(self) -> Space:
        """The recorded configs, and no others, however many combinations there are."""
        every = Space(self.fields, self.base, lambda _: None)
        points = [every.point(config.as_dict()) for config in self.trials]
        return Space(
            self.fields,
            self.base,
            lambda c: None if c in self.trials else "not recorded",
            sorted(point for point in points if point is not None),
        )

    @property
    def optimum_ms(self) -> float:
        """The least time of all."""
        return min(m.ms for m in self.trials.values() if m.outcome == "ok" and m.ms is not None)

    def save(self, file: Path) -> None:
        """Write it, gzipped where the name ends in .gz.

        Raises:
            UsageError: it cannot be written.
        """
        space = self.space()
        trials = []
        for config, m in self.trials.items():
            point = space.point(config.as_dict())
            assert point is not None
            ms = [None if v is None else float(f"{v:.5g}") for v in (m.ms, m.ms_p20, m.ms_p80)]
            trials.append([*point, OUTCOMES.index(m.outcome), *ms, m.joules, round(m.seconds, 3)])
        content = {
            "schema": SCHEMA,
            "op": self.kernel.op,
            "kernel": self.kernel.name,
            "problem": self.problem.as_dict(),
            "device": dict(self.device),
            "fields": {name: list(values) for name, values in self.fields.items()},
            "base": self.base.as_dict(),
            "outcomes": OUTCOMES,
            "trials": trials,
        }
        text = json.dumps(content, separators=(",", ":"))
        packed = file.suffix == ".gz"
        write(file, gzip.compress(text.encode(), mtime=0) if packed else text)

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read one.

        Raises:
            UsageError: it cannot be read, or is no recording.
        """
        try:
            return _parsed(schema.load(file, _File, version=SCHEMA), file)
        except Unreadable as error:
            raise UsageError(f"recording {error}") from None
        except UsageError as error:
            raise UsageError(f"recording {file}: {error}") from None


@dataclass(frozen=True)
class _File:
    """A recording as it is saved.

    Attributes:
        trials: the rank of each field's value, then the rest of a `_Trial`.
    """

    op: Name
    kernel: Name
    problem: Fields
    device: Annotated[dict[Name, Plain], most(100)]
    fields: Annotated[dict[Name, Values], Field(min_length=1), most(100)]
    base: Fields
    outcomes: Annotated[list[Outcome], most(100)]
    trials: Annotated[list[list[Any]], FailFast(), most(WHOLE)]


@dataclass(frozen=True)
class _Trial:
    """One trial; `outcome` is a place in `_File.outcomes`."""

    ranks: Annotated[list[Count], most(100)]
    outcome: Count
    ms: Measured | None
    ms_p20: Measured | None
    ms_p80: Measured | None
    joules: NotNegative | None
    seconds: NotNegative


@dataclass(frozen=True)
class _Trials:
    trials: Annotated[list[_Trial], FailFast()]


_REST = [field.name for field in dataclasses.fields(_Trial)][1:]


def _parsed(content: _File, file: Path) -> Recording:
    """Return what a file holds.

    Raises:
        UsageError: what it names is not there, or does not fit together.
    """
    op, kernel = registry.get(content.op), registry.get_kernel(content.op, content.kernel)
    fields = {name: _typed(kernel, name, values) for name, values in content.fields.items()}
    base = kernel.Config.parse(content.base)
    space = Space(fields, base, lambda _: None)
    trials = {}
    for i, trial in enumerate(_trials(content, file)):
        ranks = tuple(trial.ranks)
        if trial.outcome >= len(content.outcomes) or not space.has(ranks):
            raise Unreadable(file, f"trials.{i}: expected ranks of {', '.join(fields)} and outcome")
        trials[space.config(ranks)] = Measurement(
            content.outcomes[trial.outcome],
            trial.ms,
            trial.ms_p20,
            trial.ms_p80,
            trial.joules,
            seconds=trial.seconds,
        )
    if not any(m.outcome == "ok" and m.ms is not None for m in trials.values()):
        raise UsageError("none of its configs was timed")
    problem = op.Problem.parse(content.problem)
    return Recording(kernel, problem, content.device, fields, base, trials)


def _trials(content: _File, file: Path) -> list[_Trial]:
    count = len(content.fields)
    named = [
        {"ranks": row[:count], **dict(zip(_REST, row[count:], strict=False))}
        for row in content.trials
    ]
    return schema.convert({"trials": named}, _Trials, file).trials


def _typed(kernel: Kernel, name: str, values: Sequence[Any]) -> list[Any]:
    """Return a config field's values, each of the field's own type."""
    return [kernel.Config.parse({name: value}).as_dict()[name] for value in values]
