"""A space with what became of each of its configs, in a small file, and searches of that."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import optuna
from pydantic import FailFast, Field

from jetfire.core import files, registry, schema
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, unknown
from jetfire.core.files import Unreadable
from jetfire.core.kernel import Config, Kernel
from jetfire.core.schema import Count, Fields, Measured, Name, NotNegative, Plain, Scalars, most
from jetfire.measure.timer import Timing
from jetfire.tuner import caches
from jetfire.tuner.caches import ForeignTable
from jetfire.tuner.search import Final, Limits, decide, search
from jetfire.tuner.space import WHOLE, Space
from jetfire.tuner.strategies import STRATEGIES
from jetfire.tuner.study import Identity, Study
from jetfire.tuner.trial import OUTCOMES, Comparison, Measurement, Outcome

SCHEMA = 1
T4 = ".t4.json"
Values = Annotated[Scalars, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Recording:
    """Measurements of one kernel's configs for one problem.

    Attributes:
        device: as `jetfire.measure.provenance.device_record` has it.
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
        """Return the space of the recorded configs alone, however many combinations there are."""
        every = Space(self.fields, self.base, lambda _: None)
        points = [every.point(config.as_dict()) for config in self.trials]
        return Space(
            self.fields,
            self.base,
            lambda c: None if c in self.trials else "not recorded",
            sorted(point for point in points if point is not None),
        )

    @property
    def title(self) -> str:
        """Return the kernel's name, after its op's, and the problem."""
        return f"{self.kernel.op}/{self.kernel.name} {self.problem}".rstrip()

    @property
    def optimum_ms(self) -> float:
        """The least time of all."""
        return min(m.ms for m in self.trials.values() if m.outcome == "ok" and m.ms is not None)

    def render(self, file: Path) -> bytes | str:
        """Return what a file of this name is to hold.

        It is gzipped where the name ends in .gz, and T4 where .t4.json is before that.

        Raises:
            UsageError: it is of another's kernel and not to be T4.
        """
        content = self._t4() if file.name.removesuffix(".gz").endswith(T4) else self._own(file)
        text = json.dumps(content, separators=(",", ":"))
        return gzip.compress(text.encode(), mtime=0) if file.suffix == ".gz" else text

    def _t4(self) -> dict[str, Any]:
        kernel = f"{self.kernel.op}/{self.kernel.name}"
        about = {"kernel": kernel, "problem": self.problem.as_dict(), "device": dict(self.device)}
        return caches.t4(about, self.trials)

    def _own(self, file: Path) -> dict[str, Any]:
        if isinstance(self.kernel, _Foreign):
            reason = f"{self.title}: no kernel of ours: expected a file named {T4} or {T4}.gz"
            raise UsageError(f"--record {file}: {reason}")
        space = self.space()
        trials = []
        for config, m in self.trials.items():
            point = space.point(config.as_dict())
            assert point is not None
            ms = [None if v is None else float(f"{v:.5g}") for v in (m.ms, m.ms_p20, m.ms_p80)]
            trials.append([*point, OUTCOMES.index(m.outcome), *ms, m.joules, round(m.seconds, 3)])
        return {
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

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read one, or a table of another tuner that `caches.read` knows.

        Raises:
            UsageError: it cannot be read, or is neither.
        """
        try:
            content = files.read(file, caches.MOST)
            if (table := caches.read(content, file)) is not None:
                return _of_another(table, file)
            return _parsed(schema.decode(content, _File, file, SCHEMA), file)
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
    fields = {
        name: [kernel.Config.parse({name: value}).as_dict()[name] for value in values]
        for name, values in content.fields.items()
    }
    base = kernel.Config.parse(content.base)
    space = Space(fields, base, lambda _: None)
    count = len(content.fields)
    named = [
        {"ranks": row[:count], **dict(zip(_REST, row[count:], strict=False))}
        for row in content.trials
    ]
    trials = {}
    for i, trial in enumerate(schema.convert({"trials": named}, _Trials, file).trials):
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
    _check_timed(trials)
    problem = op.Problem.parse(content.problem)
    return Recording(kernel, problem, content.device, fields, base, trials)


class _Foreign(Kernel):
    """A kernel of which only times are known."""

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        return None

    def default(self, problem: Any, device: Device) -> Any:
        return self.Config()

    def launch(self, problem: Any, config: Any, inputs: Any, outputs: Any) -> None:
        raise UsageError(f"{self.name} is known by its times alone: it cannot be run")

    def source_hash(self) -> str:
        return ""


@dataclass(frozen=True)
class _ForeignProblem:
    sizes: str

    def __str__(self) -> str:
        return self.sizes

    def as_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes}


def _of_another(table: ForeignTable, file: Path) -> Recording:
    """Return a table as a recording without a default: no search begins with a known config.

    Raises:
        Unreadable: a parameter's name can be no field's.
        UsageError: none of its configs was timed.
    """
    names = list(table.rows[0][0])
    if wrong := [name for name in names if iskeyword(name) or hasattr(Config, name)]:
        raise Unreadable(file, f"parameter {wrong[0]}: expected another name")
    own = [(name, Any, dataclasses.field(default=None)) for name in names]
    kind = dataclasses.make_dataclass("ForeignConfig", own, bases=(Config,), frozen=True)
    about = {"op": table.format, "name": table.kernel, "Config": kind}
    kernel: Kernel = type("Foreign", (_Foreign,), about)()
    trials = {kind(**config): measurement for config, measurement in table.rows}
    values = {name: list(dict.fromkeys(c[name] for c, _ in table.rows)) for name in names}
    fields = {  # numbers by size: a search takes neighbours for alike
        name: sorted(v) if all(isinstance(x, int | float) for x in v) else v
        for name, v in values.items()
    }
    _check_timed(trials)
    return Recording(kernel, _ForeignProblem(table.problem), table.device, fields, kind(), trials)


def _check_timed(trials: Mapping[Config, Measurement]) -> None:
    if not any(m.outcome == "ok" and m.ms is not None for m in trials.values()):
        raise UsageError("none of its configs was timed")


class ReplayRunner:
    """Answers from recorded measurements, on a clock that runs as they did.

    Args:
        recorded: config → what became of it.
        slots: configs under way at once.
    """

    def __init__(self, recorded: Mapping[Config, Measurement], slots: int = 1) -> None:
        self.recorded = recorded
        self.capacity = slots
        self.seconds = 0.0
        self._queue: list[tuple[int, Config]] = []
        self._spent = 0.0  # on the first of the queue

    def submit(self, number: int, config: Config) -> None:
        self._queue.append((number, config))

    def wait(self, timeout: float) -> list[tuple[int, Measurement]]:
        number, config = self._queue[0]
        found = self.recorded.get(config, Measurement("illegal", message="not recorded"))
        left = found.seconds - self._spent
        if left > timeout:
            self.seconds += timeout
            self._spent += timeout
            return []
        self.seconds += left
        self._queue.pop(0)
        self._spent = 0.0
        return [(number, found)]

    def cancel(self) -> None:
        self._queue.clear()
        self._spent = 0.0

    def compare(
        self, configs: Sequence[Config], budget_s: float, rounds: int, peers: bool
    ) -> Comparison:
        timings, failed = {}, {}
        for config in configs:
            found = self.recorded.get(config)
            if found is None or found.ms is None:
                failed[config] = "not recorded" if found is None else found.message or found.outcome
            else:
                self.seconds += found.seconds
                timings[config] = _timing(found)
        return Comparison(timings, {}, failed)

    def now(self) -> float:
        return self.seconds

    def close(self) -> None:
        self._queue.clear()


def _timing(found: Measurement) -> Timing:
    assert found.ms is not None
    values = (found.ms_p20 or found.ms, found.ms, found.ms_p80 or found.ms)
    timing = Timing(found.ms, values[0], values[2], len(values), values=values)
    if found.joules is not None:
        energies = (found.joules,) * len(values)
        timing = replace(timing, watts=found.joules / found.ms * 1e3, energies=energies)
    return timing


@dataclass(frozen=True)
class Replayed:
    """What a search found.

    Attributes:
        final: the decision, by recorded times.
        trials: configs that were looked at.
        seconds: that it would have taken.
    """

    final: Final
    trials: int
    seconds: float


def _unheard(*_: object) -> None:
    pass


def replayed(
    recording: Recording, strategy: str, trials: int, seed: int, budget_s: float = math.inf
) -> Replayed:
    """Search a recorded space from its default config on, and decide as the tuner does.

    Raises:
        WrongResultError: none of the configs that were looked at is right.
        UsageError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise unknown(f"--strategy {strategy}", strategy, STRATEGIES)
    space = recording.space()
    default = space.point(recording.base.as_dict())
    first = [default] if default is not None and space.legal(default) else []
    identity = Identity(
        recording.kernel, recording.problem, Device("cpu", name="replay"), space, "time", "normal"
    )
    study = Study(
        identity,
        STRATEGIES[strategy](space, seed, first),
        optuna.storages.InMemoryStorage(),
        _unheard,
        {"strategy": strategy},
    )
    runner = ReplayRunner(recording.trials)
    search(study, runner, Limits(trials, budget_s), _unheard)
    best = study.best(3)
    holder = recording.base if recording.base in recording.trials or not best else best[0]
    final = decide(runner, best, holder, holder, False, "time", math.inf)
    return Replayed(final, len(study.finished()), runner.now())
