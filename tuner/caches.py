"""Tables of configs and times in the formats of others: Kernel Tuner's caches, and T4.

T4 is a format for what any tuner has found; its results schema 1.0.0 lies in Kernel Tuner's
repository, and in github.com/odgaard/TuningSchema.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Required

from pydantic import FailFast, Field, StringConstraints
from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.files import MIB, Unreadable
from jetfire.core.kernel import Config
from jetfire.core.schema import Line, Measured, NotNegative, Plain, Scalar, most
from jetfire.tuner.trial import Measurement, Outcome

MOST = 32 * MIB  # bytes: a public cache of 18,000 configs takes 17 MB, T4 of 11,000 19 MB
_MOST_CONFIGS = 50_000
_VERSION = "1.0.0"
# T4's words for what became of a config, and ours; a time that is rough is one still.
_OUTCOMES: dict[str, Outcome] = {
    "correct": "ok",
    "constraints": "illegal",
    "compile": "compile",
    "runtime": "crash",
    "timeout": "timeout",
    "correctness": "wrong",
}
_WORDS = {ours: word for word, ours in _OUTCOMES.items()} | {"slow": "correct"}
# What Kernel Tuner puts in place of a time, and T4's words for it.
_ERRORS = {
    "InvalidConfig": "constraints",
    "CompilationFailedConfig": "compile",
    "RuntimeFailedConfig": "runtime",
    "ErrorConfig": "runtime",
}

# A macro or a variable in a kernel's source, and a field of a config here.
Parameter = Annotated[str, StringConstraints(max_length=100, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Configuration = Annotated[dict[Parameter, Scalar], Field(min_length=1), most(100)]


class _Times(TypedDict, total=False):
    """What a config cost, in ms; `compilation_time` stands in the schema, `compilation` in files.

    Attributes:
        runtimes: of each call.
    """

    compilation: NotNegative
    compilation_time: NotNegative
    validation: NotNegative
    benchmark: NotNegative
    runtimes: Annotated[list[Measured], FailFast(), most(10_000)]


class _Value(TypedDict, total=False):
    name: Line
    value: Any
    unit: Line


class _Result(TypedDict, total=False):
    """What became of a config."""

    configuration: Required[Configuration]
    invalidity: Required[
        Literal["correct", "constraints", "compile", "runtime", "timeout", "correctness"]
    ]
    times: _Times
    measurements: Annotated[list[_Value], FailFast(), most(100)]


class _T4(TypedDict):
    results: Annotated[list[_Result], FailFast(), Field(min_length=1), most(_MOST_CONFIGS)]


class _Cache(TypedDict):
    """Kernel Tuner's.

    Attributes:
        cache: of each config its parameters, its time in ms or an error's name, and what it cost.
    """

    kernel_name: Line
    device_name: Line
    problem_size: Plain
    tune_params_keys: Annotated[list[Parameter], Field(min_length=1), most(100)]
    cache: Annotated[dict[str, Any], Field(min_length=1), most(_MOST_CONFIGS)]


class _Entries(TypedDict):
    cache: Annotated[list[dict[str, Any]], FailFast()]


class _Checked(TypedDict):
    """The times of all configs, in ms; None where there is none."""

    time: Annotated[list[Measured | None], FailFast()]


class _Kinds(TypedDict, total=False):
    """What tells one format from another."""

    cache: Any
    results: Any


@dataclass(frozen=True)
class ForeignTable:
    """Configs, all of the same fields, with what became of each.

    Attributes:
        format: ``kernel_tuner`` or ``t4``.
        kernel: its name; T4 has none, and the file's stands for it.
        problem: its sizes, as text.
        device: its name, where that is known.
    """

    format: str
    kernel: str
    problem: str
    device: Mapping[str, Any]
    rows: list[tuple[dict[str, Any], Measurement]]


def read(content: bytes, file: Path) -> ForeignTable | None:
    """Return the table that a file holds; None where it is in neither format.

    Raises:
        Unreadable: it is in one of them, and broken.
    """
    kinds = schema.decode(content, _Kinds, file)
    if "cache" in kinds:
        cache = schema.decode(content, _Cache, file)
        sizes = cache["problem_size"]
        problem = "×".join(map(str, sizes if isinstance(sizes, list) else [sizes]))
        rows = _rows(schema.convert({"results": _results(cache, file)}, _T4, file), file)
        device = {"name": cache["device_name"]}
        return ForeignTable("kernel_tuner", cache["kernel_name"], problem, device, rows)
    if "results" in kinds:
        rows = _rows(schema.decode(content, _T4, file), file)
        return ForeignTable("t4", file.name.partition(".")[0], "", {}, rows)
    return None


def _results(cache: _Cache, file: Path) -> list[dict[str, Any]]:
    """Return the entries of a cache as T4 has them."""
    found = []
    entries = schema.convert({"cache": list(cache["cache"].values())}, _Entries, file)["cache"]
    for entry in entries:
        time = entry.get("__error__", entry.get("time"))
        found.append(
            {
                "configuration": {n: entry[n] for n in cache["tune_params_keys"] if n in entry},
                "invalidity": _ERRORS.get(time, time) if isinstance(time, str) else "correct",
                "measurements": [{"name": "time", "value": time}],
                "times": {
                    "compilation": entry.get("compile_time", 0),
                    "validation": entry.get("verification_time", 0),
                    "benchmark": entry.get("benchmark_time", 0),
                },
            }
        )
    return found


def _rows(t4: _T4, file: Path) -> list[tuple[dict[str, Any], Measurement]]:
    """Return each config with what became of it.

    Raises:
        Unreadable: two have other parameters, or one that ran has no time.
    """
    results = t4["results"]
    names = list(results[0]["configuration"])
    times = schema.convert({"time": [_time(result) for result in results]}, _Checked, file)["time"]
    rows = []
    for i, (result, ms) in enumerate(zip(results, times, strict=True)):
        config, outcome = result["configuration"], _OUTCOMES[result["invalidity"]]
        if sorted(config) != sorted(names):
            raise Unreadable(file, f"config {i}: expected {', '.join(names)}, as the first has")
        if outcome == "ok" and ms is None:
            raise Unreadable(file, f"config {i}: expected a time in ms")
        parts: Any = result.get("times", {})
        spent = sum(parts.get(name, 0.0) for name in _Times.__annotations__ if name != "runtimes")
        rows.append((config, Measurement(outcome, ms, seconds=spent / 1e3)))
    return rows


def _time(result: _Result) -> Any:
    """Return a config's time: as given, else the median of its calls; None where it failed."""
    if result["invalidity"] != "correct":
        return None
    for given in result.get("measurements", ()):
        if given.get("name") == "time":
            known = given.get("unit", "") in ("", "ms", "milliseconds", "miliseconds")
            return given.get("value") if known else f"{given.get('value')} {given.get('unit')}"
    runs = result.get("times", {}).get("runtimes")
    return statistics.median(runs) if runs else None


def t4(metadata: Mapping[str, Any], trials: Mapping[Config, Measurement]) -> dict[str, Any]:
    """Return configs, and what became of them, as T4; times in ms, energy in J.

    Args:
        metadata: what else is known.
    """
    results = []
    for config, m in trials.items():
        values = {"time": m.ms, "time_p20": m.ms_p20, "time_p80": m.ms_p80, "joules": m.joules}
        results.append(
            {
                "configuration": config.as_dict(),
                "objectives": ["time"],
                "times": {"runtimes": [], "benchmark": round(m.seconds * 1e3, 3)},
                "invalidity": _WORDS[m.outcome],
                "correctness": int(m.measured),
                "measurements": [
                    {"name": name, "value": value, "unit": "J" if name == "joules" else "ms"}
                    for name, value in values.items()
                    if value is not None
                ],
            }
        )
    about = {"timeunit": "milliseconds", **metadata}
    return {"schema_version": _VERSION, "metadata": about, "results": results}
