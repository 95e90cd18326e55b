"""What an Optuna study of the tuner holds, read back as plain values for the report."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Required

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import TrialState
from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.files import Unreadable
from jetfire.core.schema import Fields, Line, Measured, Name, NotNegative, Ratios, Scalars, most
from jetfire.measure.results import Counters
from jetfire.report.counters import sides
from jetfire.report.text import fields_text
from jetfire.tuner.strategies import can_be
from jetfire.tuner.trial import OUTCOMES, Measurement, Objective, score

# Of a trial that nobody finished: under way or waiting, or told as failed after its tuner died.
RUNNING, LOST = "running", "lost"
FATES = (*OUTCOMES, LOST, RUNNING)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\S\n]|[\x00-\x09\x0b-\x1f\x7f\ud800-\udfff]")


class FinalRecord(TypedDict, total=False):
    """A final comparison, as `search.Final.as_dict` gives it."""

    config: Required[Fields]
    ms: Required[Measured]
    ms_p20: Measured
    ms_p80: Measured
    joules: NotNegative | None
    default_ms: Measured | None
    before_ms: Measured | None
    kept: bool
    vs_peer: Ratios
    counters: Counters
    default_counters: Counters | None


class Where(TypedDict, total=False):
    """What was measured on, of `jetfire.measure.provenance.device_record`."""

    name: Line
    capability: tuple[int, int] | None
    driver: Line | None
    cuda: Line | None
    torch: Line | None
    triton: Line | None
    jetfire: Line
    timer: int
    date: Line


class PeaksRecord(TypedDict, total=False):
    """A device's, in GB/s and TOPS, and what disturbed their measuring."""

    copy_gbps: Measured | None
    int8_tops: Measured | None
    busy: Line


_Work = Annotated[FiniteFloat, Field(ge=0, le=1e30)]
# Attributes of a study → their types.
_ATTRIBUTES: dict[str, Any] = {
    **dict.fromkeys(("op", "kernel", "strategy", "source"), Line),
    **dict.fromkeys(("problem", "default"), Fields),
    "objective": Objective,
    "device": Where,
    "peaks": PeaksRecord,
    "space": Annotated[dict[Name, Scalars], most(100)],
    **dict.fromkeys(("flops", "bytes"), _Work),
    "final": FinalRecord,
}


def _valid(value: Any, kind: Any) -> Any:
    """Return a value as a type has it; None where it is none, since a file may hold anything."""
    try:
        return schema.convert(value, kind, Path())
    except Unreadable:
        return None


def clean(text: object) -> str:
    """Return text without a terminal's escapes and without what no UTF-8 file can hold."""
    return _ESCAPES.sub(" ", str(text)).strip()


@dataclass(frozen=True)
class Attempt:
    """One trial.

    Attributes:
        fate: one of `FATES`.
        values: what the objective minimises (ms, J, or both), where it was measured and is above 0.
        said: what came of trying the config; a crash where nothing is known.
    """

    number: int
    fate: str
    config: Mapping[str, Any]
    values: tuple[float, ...] | None
    said: Measurement
    message: str

    @classmethod
    def of(cls, trial: optuna.trial.FrozenTrial, objectives: int) -> Attempt:
        """Return what a trial says, without what cannot be."""
        said = Measurement.parse(trial.user_attrs)
        measured = trial.state == TrialState.COMPLETE and can_be(trial.values, objectives)
        lost = LOST if trial.state.is_finished() else RUNNING
        config = _valid(trial.user_attrs.get("config"), Fields) or _valid(trial.params, Fields)
        return cls(
            trial.number,
            lost if said is None else said.outcome,
            config or {},
            tuple(trial.values) if measured and min(trial.values) > 0 else None,
            said or Measurement("crash"),
            "" if said is None else clean(said.message),
        )

    @property
    def ms(self) -> float | None:
        return self.said.ms

    @property
    def joules(self) -> float | None:
        return self.said.joules

    def has(self, name: str, value: Any) -> bool:
        """Return whether its config has just that value of a field; 1 and True are two."""
        return name in self.config and same(self.config[name], value)


@dataclass(frozen=True)
class SavedStudy:
    """A study: its attributes as the tuner set them, and its trials in order.

    What a file cannot mean, such as a time below 0, is left out.
    """

    name: str
    attributes: Mapping[str, Any]
    attempts: Sequence[Attempt]
    importances: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, study: optuna.Study) -> SavedStudy:
        trials = study.get_trials(deepcopy=False)
        known = {
            name: value
            for name, given in study.user_attrs.items()
            if name in _ATTRIBUTES and (value := _valid(given, _ATTRIBUTES[name])) is not None
        }
        count = len(study.directions)
        units = _units(known.get("objective"))[:count]
        return cls(
            name=" ".join(clean(study.study_name).split()),
            attributes=known,
            attempts=[Attempt.of(trial, count) for trial in trials],
            importances={unit: _importances(study, i) for i, unit in enumerate(units)},
        )

    def get(self, name: str) -> Any:
        return self.attributes.get(name)

    @property
    def title(self) -> str:
        return f"{self.get('op') or self.name} · {self.get('kernel') or 'unknown kernel'}"

    @property
    def problem(self) -> str:
        return fields_text(self.get("problem") or {})

    @property
    def device(self) -> Mapping[str, Any]:
        return self.get("device") or {}

    @property
    def final(self) -> Mapping[str, Any] | None:
        """The final comparison, once there was one."""
        return self.get("final") or None

    @property
    def counted(self) -> dict[str, Mapping[str, Any]]:
        """The counters of the winner and of the default, where a profiler has counted them."""
        final = self.final or {}
        winner = final.get("counters")
        return sides(winner, final.get("default_counters")) if winner else {}

    @property
    def units(self) -> tuple[str, ...]:
        """The units of what was to be small: ms, J, or both."""
        return _units(self.get("objective"))

    @cached_property
    def measured(self) -> list[Attempt]:
        """The trials that have a time: ok, and slow, whose time is rough."""
        return [a for a in self.attempts if a.values is not None and a.ms is not None]

    @cached_property
    def ok(self) -> list[Attempt]:
        return [a for a in self.measured if a.fate == "ok"]

    @cached_property
    def best(self) -> Attempt | None:
        """The trial of the final's config; without a final, the best trial."""
        if self.final is not None:
            return self.of_config(self.final["config"])
        return min(self.ok, key=lambda a: (score(a.values or ()), a.number), default=None)

    @cached_property
    def default(self) -> Attempt | None:
        return self.of_config(self.get("default") or {})

    def of_config(self, config: Mapping[str, Any]) -> Attempt | None:
        return next((a for a in self.ok if a.config == config), None)

    def role(self, attempt: Attempt) -> str:
        """``best``, ``default``, both or neither; a default that failed is the default still."""
        default = attempt.fate in OUTCOMES and attempt.config == self.get("default")
        roles = {"default": default, "best": attempt is self.best}
        return ", ".join(name for name, held in roles.items() if held)

    @property
    def ms(self) -> tuple[float, float | None, float | None] | None:
        """Median, p20 and p80 of the best: the final comparison's, else its trial's."""
        if self.final is not None:
            return self.final["ms"], self.final.get("ms_p20"), self.final.get("ms_p80")
        if self.best is None or self.best.ms is None:
            return None
        said = self.best.said
        return self.best.ms, said.ms_p20, said.ms_p80

    @property
    def default_ms(self) -> float | None:
        if self.final is not None:
            return self.final.get("default_ms")
        return self.default.ms if self.default else None

    @property
    def gain(self) -> float | None:
        """The default's time over the best's, of one comparison where there was one."""
        if self.ms is None or self.default_ms is None:
            return None
        return self.default_ms / self.ms[0]

    @cached_property
    def fates(self) -> dict[str, int]:
        counted = Counter(a.fate for a in self.attempts)
        return {fate: counted[fate] for fate in FATES if counted[fate]}

    @property
    def seconds(self) -> float:
        return sum(a.said.seconds for a in self.attempts)

    @cached_property
    def fields(self) -> dict[str, list[Any]]:
        """Config fields that were varied → their values that were tried, by rank in the space."""
        space = self.get("space") or {}
        tried: dict[str, list[Any]] = {name: [] for name in space}
        for attempt in self.attempts:
            for name, value in attempt.config.items():
                values = tried.setdefault(name, [])
                if not any(same(value, known) for known in values):
                    values.append(value)
        return {
            name: sorted(values, key=_rank(space.get(name, ())))
            for name, values in tried.items()
            if len(values) > 1
        }

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """Config fields that no trial varied."""
        configs: Iterable[Mapping[str, Any]] = [a.config for a in self.attempts]
        merged = {name: value for config in configs for name, value in config.items()}
        return {name: value for name, value in merged.items() if name not in self.fields}


def _units(objective: str | None) -> tuple[str, ...]:
    return {"energy": ("J",), "both": ("ms", "J")}.get(objective or "time", ("ms",))


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; 1 and True are not."""
    return type(a) is type(b) and bool(a == b)


def _rank(order: Sequence[Any]) -> Callable[[Any], tuple[int, str, Any]]:
    """Return a value's place in the space's list; values outside it follow, by size."""

    def key(value: Any) -> tuple[int, str, Any]:
        place = next((i for i, known in enumerate(order) if same(value, known)), len(order))
        if isinstance(value, (bool, int, float)):
            return place, "", value
        return place, type(value).__name__, str(value)

    return key


def _importances(study: optuna.Study, objective: int) -> dict[str, float]:
    """Return each parameter's share in being among the best tenth (PED-ANOVA, arXiv 2304.10255).

    Returns:
        Highest first, summing to 1; empty where the trials say nothing.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not all(can_be(t.values, len(study.directions)) for t in complete):
        return {}
    values = [t.values[objective] for t in complete]
    if len(set(values)) < 2 or not any(t.params for t in complete):
        return {}
    with warnings.catch_warnings():  # that `target` is minimised, which is what we want
        warnings.simplefilter("ignore")
        found = get_param_importances(
            study,
            evaluator=PedAnovaImportanceEvaluator(),
            target=lambda trial: trial.values[objective],
            normalize=False,
        )
    total = sum(found.values())
    if not total > 0:
        return {}
    shares = {name: value / total for name, value in found.items()}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))
