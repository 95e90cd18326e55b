"""The record of a study: its runs' losses, and each recipe's difference from one, paired by seed.

The runs of one seed begin with the same weights and read the same batches in the same order,
whatever their recipe: what chance does to both alike cancels in the difference of their losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable
from jetfire.core.schema import Count, Fields, Line, Measured, Name, NotNegative, Size
from jetfire.gpt2.data.prepared import CorpusSource, TokenDigests
from jetfire.gpt2.training import arms, log
from jetfire.gpt2.training.arms import Arm
from jetfire.gpt2.training.settings import (
    EARLIER,
    PROCESSES,
    SETTINGS,
    Settings,
    resumed,
)
from jetfire.measure.noise import quantile
from jetfire.report.runs import FinishedRun

SCHEMA: Final = 1
# Of a run, beside its recipe and seed, what does not change which numbers it computes with; where
# data was found, as its digests tell it from other data.
FREE = frozenset(
    {"recipe", "seed", "data", "compile", "graph", "deterministic"}
    | {"keep", "checkpoint_every", "watch"}
)
Sources = Annotated[list[CorpusSource], Field(max_length=1000)]


class _Head(TypedDict):
    """What a study needs of a log's first line beside what every reader does."""

    device: dict[Name, Any]
    versions: dict[Name, Line]
    commit: Line | None
    tokens: TokenDigests
    sources: NotRequired[Sources]


class Data(TypedDict):
    """What was trained on: `sources` is the text, by name and digest."""

    name: Line
    tokens: TokenDigests
    sources: Sources


class Difference(TypedDict):
    """A recipe's loss minus the base's, in nats a token.

    Attributes:
        low, high: of the mean's 95% confidence interval, by Student's t.
        over: what the interval is over: seeds, or the steps of the window of the only seed, which
            do not tell what another seed would change. None where it has no bounds.
        seeds: those that both recipes ran with; values: their differences.
    """

    mean: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    over: Literal["seeds", "steps"] | None
    seeds: Annotated[list[Count], Field(min_length=1, max_length=1000)]
    values: Annotated[list[FiniteFloat], Field(min_length=1, max_length=1000)]


class RunLosses(TypedDict):
    """A run's losses in nats a token.

    Attributes:
        training_loss: the mean over the window, with its standard error over the steps.
        ms: the median step's; None where other runs shared the GPU, or it went on on another.
        settings: those that not all runs of the study have alike, as arms of two optimizers.
    """

    seed: Count
    device: Line
    training_loss: FiniteFloat
    standard_error: NotNegative | None
    final_validation_loss: FiniteFloat
    best_validation_loss: FiniteFloat
    ms: Measured | None
    settings: Fields


class RecipeLosses(TypedDict):
    """An arm's runs, and how it differs from the base; None for the base, or without a pair."""

    runs: Annotated[list[RunLosses], Field(min_length=1, max_length=1000)]
    paired_difference: Difference | None
    validation_difference: Difference | None


class StudyRecord(TypedDict):
    """What a study's file holds.

    Attributes:
        tokens: that each run read; epochs: the share of the training tokens.
        fresh: whether no run read a token twice.
        window: the first and last step whose training losses count.
        unfinished: runs that were begun, or asked for, and are not in it.
        recipes: by the arm's name; without further words a recipe's.
    """

    schema: Literal[1]
    device: Line
    versions: dict[Name, Line]
    commits: Annotated[list[Line], Field(max_length=1000)]
    preset: Line
    settings: Fields
    data: Data
    tokens: Size
    epochs: NotNegative
    fresh: bool
    window: tuple[Size, Size]
    base: Name
    unfinished: Annotated[list[Name], Field(max_length=10_000)]
    recipes: Annotated[dict[Name, RecipeLosses], schema.most(100)]


@dataclass(frozen=True)
class StudyRun:
    """A run of a study, finished or not.

    Attributes:
        records: its log's; none where it was killed before the first.
        arm: what of it the study compares.
    """

    folder: Path
    settings: Settings
    records: list[log.Record]
    arm: Arm

    @classmethod
    def read(cls, folder: Path, arm: Arm | None = None) -> StudyRun | None:
        """Return the run in a folder; None where none was begun.

        Args:
            arm: as the folder's name says; None for what its settings say.
        """
        try:
            found = log.records(folder / log.NAME)
        except Missing:
            found = []
        try:
            heads = _heads(found)
            begun = heads[-1]["settings"] if heads else schema.load(folder / SETTINGS, Fields)
        except Missing:
            return None
        try:
            settings = resumed(_without(begun, (PROCESSES,)), {}, str(folder))
            return cls(folder, settings, found if heads else [], arm or Arm.of(settings))
        except UsageError as error:
            raise UsageError(f"{folder}: {error}") from None

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def outcome(self) -> FinishedRun:
        return FinishedRun(self.folder, self.records)

    @property
    def finished(self) -> bool:
        ended = bool(self.records) and self.outcome.ended
        return ended and bool(self.records[-1].get("step") == self.settings.steps)

    @property
    def head(self) -> _Head:
        """
        Raises:
            UsageError: its log's first line does not tell what it was trained on.
        """
        return schema.convert(_heads(self.records)[0], _Head, self.folder / log.NAME)

    @property
    def devices(self) -> list[str]:
        """The devices that it ran on, by name."""
        names = (str(head["device"].get("name")) for head in _heads(self.records))
        return list(dict.fromkeys(names))

    def losses(self, window: tuple[int, int]) -> list[float]:
        """Return the training losses of the window's steps."""
        first, last = window
        found = {r["step"]: r["loss"] for r in self.records if r["kind"] == "step"}
        for step in range(first, last + 1):
            if step not in found:
                raise UsageError(f"{self.folder / log.NAME}: expected the loss of step {step}")
        return [found[step] for step in range(first, last + 1)]


def _heads(records: Sequence[log.Record]) -> list[log.Record]:
    return [record for record in records if record["kind"] in ("run", "resume")]


def differing(one: Mapping[str, Any], other: Mapping[str, Any], free: Iterable[str]) -> str | None:
    """Return the first setting that differs and is not among those that may; None without."""
    return next((name for name in one.keys() - set(free) if one[name] != other[name]), None)


def unnamed(settings: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """Return the settings that an arm shares with others: those that it does not name."""
    return _without(settings, arm.settings)


def _without(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _recorded(run: StudyRun) -> dict[str, Any]:
    """Return a run's settings but for those that a record has a place of their own for."""
    return _without(run.settings.as_dict(), ("recipe", "seed", "data", "preset"))


def _common(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs have alike."""
    return {
        name: value
        for name, value in every[0].items()
        if all(other.get(name) == value for other in every)
    }


def check_alike(runs: Sequence[StudyRun]) -> None:
    """Refuse runs of one folder that are not of one study."""
    first_with: dict[str, StudyRun] = {}  # a setting that its arm does not name
    for run in runs:
        theirs = unnamed(run.settings.as_dict(), run.arm)
        for name in theirs.keys() - FREE:
            first = first_with.setdefault(name, run)
            ours = getattr(first.settings, name)
            if theirs[name] != ours:
                raise _unlike(run, f"{name}={theirs[name]}", first, ours)
    logged = [run for run in runs if run.records]
    for run in logged[1:]:
        first = logged[0]
        if run.head["tokens"]["sha256"] != first.head["tokens"]["sha256"]:
            raise _unlike(run, "other tokens", first, "the same")
        here, there = first.head["device"].get("kind"), run.head["device"].get("kind")
        if here != there:  # initial weights are drawn by another generator
            raise _unlike(run, f"device {there}", first, here)


def _unlike(run: StudyRun, what: str, first: StudyRun, expected: Any) -> UsageError:
    return UsageError(
        f"{run.folder}: was begun with {what}: expected {expected}, as {first.folder.name} was; "
        "move it away, or name another -o FOLDER"
    )


def usual_window(steps: int) -> tuple[int, int]:
    """Return the last fifth of a run's steps."""
    return steps - max(1, steps // 5) + 1, steps


def fresh(one: Settings, train: int) -> bool:
    """Return whether a run reads no token twice, of so many."""
    rows = one.steps * one.accumulate * one.batch
    return one.order == "shuffled" and rows <= (train - 1) // one.context


def epochs(one: Settings, train: int) -> float:
    """Return how often a run reads as many tokens as there are."""
    return tokens_of(one) / train


def tokens_of(one: Settings) -> int:
    """Return how many tokens a run reads."""
    return one.steps * one.accumulate * one.batch * one.context


def make(
    runs: Sequence[StudyRun], window: tuple[int, int], base: str, asked: Iterable[str] = ()
) -> StudyRecord:
    """Return the record of a folder's runs, of which one at least is finished.

    Args:
        runs: all that were begun, in the order in which they are shown.
        asked: names of runs that were asked for, begun or not.

    Raises:
        UsageError: they are not of one study, or a log lacks a step of the window.
    """
    check_alike(runs)
    done = [run for run in runs if run.finished]
    first, one = done[0].head, done[0].settings
    common = _common([_recorded(run) for run in done])
    names = [run.folder.name for run in runs if not run.finished]
    begun = {run.folder.name for run in runs}
    recipes: dict[str, list[StudyRun]] = {}
    for run in done:
        recipes.setdefault(run.arm.name, []).append(run)
    return {
        "schema": SCHEMA,
        "device": ", ".join(dict.fromkeys(name for run in done for name in run.devices)),
        "versions": first["versions"],
        "commits": list(dict.fromkeys(c for run in done if (c := run.head["commit"]) is not None)),
        "preset": one.preset,
        "settings": common,
        "data": {
            "name": Path(one.data).name,
            "tokens": first["tokens"],
            "sources": first.get("sources", []),
        },
        "tokens": tokens_of(one),
        "epochs": round(epochs(one, first["tokens"]["train"]), 4),
        "fresh": fresh(one, first["tokens"]["train"]),
        "window": window,
        "base": base,
        "unfinished": [*names, *(name for name in asked if name not in begun)],
        "recipes": {
            recipe: _recipe(ours, recipes.get(base, []), window, common)
            for recipe, ours in recipes.items()
        },
    }


def _recipe(
    ours: Sequence[StudyRun],
    base: Sequence[StudyRun],
    window: tuple[int, int],
    common: Mapping[str, Any],
) -> RecipeLosses:
    theirs = {run.seed: run for run in base}
    pairs = [(run, theirs[run.seed]) for run in ours if run.seed in theirs]
    training = validation = None
    if pairs and ours[0].arm != base[0].arm:
        steps = {
            run.seed: [a - b for a, b in zip(run.losses(window), other.losses(window), strict=True)]
            for run, other in pairs
        }
        training = difference({seed: fmean(apart) for seed, apart in steps.items()}, steps)
        validation = difference(
            {run.seed: run.outcome.final - other.outcome.final for run, other in pairs}
        )
    runs = [_losses(run, window, common) for run in ours]
    return {"runs": runs, "paired_difference": training, "validation_difference": validation}


def _losses(run: StudyRun, window: tuple[int, int], common: Mapping[str, Any]) -> RunLosses:
    outcome, losses = run.outcome, run.losses(window)
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
    ms = outcome.ms if len(run.devices) == 1 else None
    return {
        "seed": run.seed,
        "device": ", ".join(run.devices),
        "training_loss": _nats(fmean(losses)),
        "standard_error": None if error is None else _nats(error),
        "final_validation_loss": _nats(outcome.final),
        "best_validation_loss": _nats(outcome.best),
        "ms": None if ms is None else round(ms, 3),
        "settings": _without(_recorded(run), common),
    }


def added(record: StudyRecord, earlier: StudyRecord, file: Path) -> StudyRecord:
    """Return a record with the runs of an earlier one of the same study that it lacks.

    Of one seed the interval stays that of the record which has it: logs of steps are not kept.

    Raises:
        UsageError: the earlier one is of another study.
    """
    check_goes_on(
        _shared(record), record["preset"], record["window"], record["base"], earlier, file
    )
    ours, theirs = (one["data"]["tokens"]["sha256"]["train"][:12] for one in (record, earlier))
    _check_same("data", ours, theirs, file)
    runs: dict[str, dict[int, RunLosses]] = {}
    for one in (earlier, record):  # of a run that both have, the later one counts
        for recipe, losses in one["recipes"].items():
            for run in losses["runs"]:
                known = {**one["settings"], **run["settings"]}
                runs.setdefault(recipe, {})[run["seed"]] = {**run, "settings": known}
    every = [run for by_seed in runs.values() for run in by_seed.values()]
    common = _common([run["settings"] for run in every])
    for run in every:
        run["settings"] = _without(run["settings"], common)
    names = {f"{recipe}-seed{seed}" for recipe, by_seed in runs.items() for seed in by_seed}
    unfinished = dict.fromkeys((*earlier["unfinished"], *record["unfinished"]))
    base = runs.get(record["base"], {})
    return {
        **record,
        "device": ", ".join(
            dict.fromkeys(name for one in (earlier, record) for name in one["device"].split(", "))
        ),
        "commits": list(dict.fromkeys((*earlier["commits"], *record["commits"]))),
        "settings": common,
        "unfinished": [name for name in unfinished if name not in names],
        "recipes": {
            recipe: _paired(
                [by_seed[seed] for seed in sorted(by_seed)],
                {} if recipe == record["base"] else base,
                [
                    one["recipes"][recipe]["paired_difference"]
                    for one in (record, earlier)
                    if recipe in one["recipes"]
                ],
            )
            for recipe in _ordered(runs)
            if (by_seed := runs[recipe])
        },
    }


def _ordered(names: Iterable[str]) -> list[str]:
    """Return names of arms as recipes are listed; without those that this version does not know."""
    found = [arm for name in names if (arm := arms.known(name)) is not None]
    return [arm.name for arm in sorted(found, key=lambda arm: arm.order)]


def check_goes_on(
    settings: Mapping[str, Any],
    preset: str,
    window: tuple[int, int],
    base: str,
    earlier: StudyRecord,
    file: Path,
) -> None:
    """Check that a study of these settings may be added to a record.

    Raises:
        UsageError: the record is of another study.
    """
    for name, ours in (("preset", preset), ("window", window), ("base", base)):
        _check_same(name, ours, earlier[name], file)  # type: ignore[literal-required]
    before = _shared(earlier)
    for name in sorted((settings.keys() & before.keys()) - FREE):
        _check_same(name, settings[name], before[name], file)


def _shared(record: StudyRecord) -> dict[str, Any]:
    """Return the settings that a record's arms have in common, of those that name no other."""
    found: dict[str, Any] = {}
    for name, losses in record["recipes"].items():
        arm = arms.known(name) or Arm(name)
        for run in losses["runs"]:
            found = {**unnamed({**record["settings"], **run["settings"]}, arm), **found}
    return found


def _check_same(name: str, ours: Any, theirs: Any, file: Path) -> None:
    if ours != theirs:
        raise UsageError(
            f"{file}: holds a study with {name}={theirs}, this one has {ours}: "
            "name another --record, or move it away"
        )


def _paired(
    runs: list[RunLosses], base: Mapping[int, RunLosses], known: Iterable[Difference | None]
) -> RecipeLosses:
    """Return a recipe's runs and their differences from the base's runs of the same seeds.

    Args:
        known: differences with intervals over steps; that of just these two runs stays.
    """
    pairs = {run["seed"]: (run, base[run["seed"]]) for run in runs if run["seed"] in base}
    if not pairs:
        return {"runs": runs, "paired_difference": None, "validation_difference": None}
    training, validation = (
        difference({seed: ours[loss] - theirs[loss] for seed, (ours, theirs) in pairs.items()})
        for loss in ("training_loss", "final_validation_loss")
    )
    for one in known:
        if one is not None and len(pairs) == 1 and one["seeds"] == training["seeds"]:
            same = abs(one["mean"] - training["mean"]) < 1e-6
            training = one if same and training["over"] is None else training
    return {"runs": runs, "paired_difference": training, "validation_difference": validation}


def _nats(value: float) -> float:
    """Return a loss with the digits that are recorded: differences are of some ten-thousandths."""
    return round(value, 7)


def difference(
    values: Mapping[int, float], steps: Mapping[int, Sequence[float]] | None = None
) -> Difference:
    """Return the mean of paired differences, with its 95% confidence interval.

    Args:
        values: a difference for each seed.
        steps: those of each step behind one, for the interval where there is one seed.
    """
    seeds = sorted(values)
    sample, over = list(values.values()), "seeds"
    if len(seeds) == 1:
        sample, over = list((steps or {}).get(seeds[0], ())), "steps"
    mean, low, high = fmean(values.values()), None, None
    if len(sample) > 1:
        half = quantile(len(sample) - 1) * stdev(sample) / math.sqrt(len(sample))
        low, high = _nats(mean - half), _nats(mean + half)
    return {
        "mean": _nats(mean),
        "low": low,
        "high": high,
        "over": None if low is None else over,  # type: ignore[typeddict-item]
        "seeds": seeds,
        "values": [_nats(values[seed]) for seed in seeds],
    }


def write(record: StudyRecord, file: Path) -> None:
    """
    Raises:
        Unwritable: a full disk, a missing folder, a lack of rights.
    """
    files.write(file, json.dumps(record, indent=1) + "\n")


class _Kind(TypedDict, total=False):
    """What tells a study's record from a bench's, which may have the same version."""

    recipes: Any


def read(file: Path) -> StudyRecord:
    """Return a study's record.

    Raises:
        Unreadable: the file holds none, or one of another version.
    """
    if "recipes" not in schema.load(file, _Kind, version=SCHEMA):
        raise Unreadable(file, "has no recipes: expected a study's record")
    record = schema.load(file, StudyRecord, version=SCHEMA)
    every = [run["settings"] for losses in record["recipes"].values() for run in losses["runs"]]
    unsaid = {name: value for name, value in EARLIER.items() if not any(name in s for s in every)}
    record["settings"] = {**unsaid, **record["settings"]}
    return record
