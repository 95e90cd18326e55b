"""A study as one HTML file that needs nothing else: figures, figures' data and Plotly inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from jetfire.report import counters, page
from jetfire.report.page import PageChart
from jetfire.report.table import Table
from jetfire.report.text import NOTHING, fields_text, plural, significant, times

if TYPE_CHECKING:
    from jetfire.tuner.saved_study import Attempt, SavedStudy

TEMPLATE = "tuning.html.j2"
Pairs = list[tuple[str, str]]


def render(studies: Sequence[SavedStudy]) -> str:
    """Return the report of studies as HTML: of several a table, then a section each.

    The same studies give the same text.

    Raises:
        UsageError: Plotly is missing.
    """
    gains = [study.gain for study in studies if study.gain]
    of = f"over {len(gains)} of {plural(len(studies), 'study', 'studies')}"
    return page.render(
        TEMPLATE,
        title="Tuning report" if len(studies) != 1 else f"{studies[0].title}: tuning report",
        index=_index(studies) if len(studies) > 1 else None,
        mean=f"{times(geometric_mean(gains), 3)} {of}" if gains else None,
        sections=[_section(f"study-{i}", study) for i, study in enumerate(studies)],
    )


def _digits(value: float | None) -> str:
    return significant(value, 4)


def _ratio(before: float | None, after: float | None) -> str:
    return times(before / after if before and after else None, 3)


def _index(studies: Sequence[SavedStudy]) -> Table:
    head = ["op · kernel", "problem", "device", "objective", "trials"]
    head += ["default ms", "best ms", "gain"]
    rows = []
    for study in studies:
        best = study.ms[0] if study.ms else None
        rows.append(
            (
                study.title,
                study.problem,
                str(study.device.get("name", NOTHING)),
                str(study.get("objective") or "time"),
                str(len(study.attempts)),
                _digits(study.default_ms),
                _digits(best),
                _ratio(study.default_ms, best),
            )
        )
    return Table(head, rows)


def _section(identifier: str, study: SavedStudy) -> dict[str, Any]:
    """Return what the page says of one study, by the template's names."""
    outcomes = ", ".join(f"{count} {fate}" for fate, count in study.fates.items())
    energy = ["J"] if any(attempt.joules is not None for attempt in study.attempts) else []
    first = ["", "trial", "outcome", "ms", "p20–p80", *energy, "seconds"]
    trials = [_row(study, attempt, bool(energy)) for attempt in study.attempts]
    return {
        "id": identifier,
        "title": study.title,
        "problem": study.problem,
        "provenance": _provenance(study),
        "summary": [
            *_result(study),
            ("trials", f"{len(study.attempts)}: {outcomes or 'none'}"),
            ("time spent on trials", _duration(study.seconds)),
        ],
        "charts": _charts(identifier, study),
        "counted": _counted(study),
        "trials": Table([*first, *study.fields, "message"], trials),
        "messages": [attempt.message for attempt in study.attempts],
        "fixed": fields_text(study.fixed),
    }


def _counted(study: SavedStudy) -> dict[str, Any] | None:
    """Return the table of counters, and what they come to; None where nothing was counted."""
    if not (found := study.counted):
        return None
    sides = list(found.values())
    table = counters.table([("", name, one) for name, one in found.items()])
    said = counters.verdict(sides[0], sides[-1] if "default" in found else None)
    return {
        "table": Table(table.head[1:], [row[1:] for row in table.rows]),
        "said": [said, *counters.footnotes(sides)],
        "kernels": str(sides[0].get("kernels", NOTHING)),
    }


def _provenance(study: SavedStudy) -> Pairs:
    """Return what was measured, on what, with what: as the study says."""
    device = study.device
    capability = device.get("capability")
    found = {
        "device": device.get("name"),
        "compute capability": ".".join(map(str, capability)) if capability else None,
        **{name: device.get(name) for name in ("driver", "cuda", "torch", "triton", "jetfire")},
        "timer": device.get("timer"),
        "kernel source": study.get("source"),
        "strategy": study.get("strategy"),
        "objective": study.get("objective"),
        "measured": device.get("date"),
        "study": study.name,
        "peaks": _peaks(study),
    }
    return [(name, str(value)) for name, value in found.items() if value is not None]


def _peaks(study: SavedStudy) -> str:
    peaks = study.get("peaks") or {}
    units = {"copy_gbps": "copy {} GB/s", "int8_tops": "INT8 {} TOPS"}
    known = [form.format(_digits(peaks[name])) for name, form in units.items() if peaks.get(name)]
    when = f"; meanwhile {peaks['busy']}" if known and peaks.get("busy") else ""
    return f"{', '.join(known)}{when}" if known else "not measured"


def _result(study: SavedStudy) -> Pairs:
    if study.ms is None:
        return [("result", "none: no config was measured to the end")]
    median, p20, p80 = study.ms
    final = study.final
    config = final["config"] if final else study.best.config if study.best else {}
    if final:
        kept = "the incumbent, kept: no gain beyond the noise" if final.get("kept") else "the best"
        name = f"config ({kept}, of the final comparison)"
    else:
        name = "config (the best trial; there was no final comparison)"
    spread = (
        f" (p20–p80: {_digits(p20)}–{_digits(p80)})" if p20 is not None and p80 is not None else ""
    )
    pairs = [
        (name, fields_text(config)),
        ("time per call", f"{_digits(median)} ms{spread}"),
        ("gain over the default", _gain(study.default_ms, median)),
    ]
    joules = (final or {}).get("joules") or (study.best.joules if study.best else None)
    if joules is not None:
        pairs.append(("energy per call", f"{_digits(joules)} J"))
    if final and final.get("before_ms") is not None:
        pairs.append(("gain over the config in use before", _gain(final["before_ms"], median)))
    peers: Mapping[str, float] = (final or {}).get("vs_peer") or {}
    return [*pairs, *((f"gain over {peer}", f"{_digits(ratio)}×") for peer, ratio in peers.items())]


def _gain(before: float | None, after: float) -> str:
    if before is None:
        return "unknown: it was not measured"
    return f"{_ratio(before, after)} ({_digits(before)} ms)"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _charts(identifier: str, study: SavedStudy) -> list[PageChart]:
    from jetfire.report import tuning_charts as charts

    cost = "time" if study.units[0] == "ms" else "energy"
    no_time = "No config was measured."
    found = [
        (
            "history",
            charts.history,
            f"Each trial's {cost} in the order of the search; a hollow one was stopped early, a "
            "cross failed and says why under the pointer.",
            "There are no trials.",
        ),
        (
            "importance of each parameter",
            charts.importance,
            "How much a parameter decides whether a config is among the best tenth (PED-ANOVA); "
            "the shares sum to one.",
            "Nothing can be said: that needs two measured configs at least, that differ in "
            f"{cost}.",
        ),
        (
            "parallel coordinates",
            charts.parallel,
            f"A line a measured config, blue where it is best, orange where worst in {cost}. "
            "Within a value's band the best stand lowest.",
            no_time if not study.measured else "Every config tried was the same.",
        ),
        (
            "roofline",
            charts.roofline,
            _roofline_caption(study),
            no_time if study.get("bytes") else "The study does not say what bytes it moves.",
        ),
    ]
    if study.counted:
        caption = (
            "Warps that wait for each issued instruction, by what they wait for (Nsight Compute)."
        )
        found.append(("stalls", charts.stalls, caption, "No warp waited for anything."))
    if study.get("objective") == "both":
        caption = "Energy over time; nothing beats the configs on the line in both."
        found.append(("time and energy", charts.pareto, caption, no_time))
    return [
        PageChart(
            f"{identifier}-{title.split()[0]}",
            title,
            caption,
            draw(study),
            missing,
            charts.parallel_width(study) if draw == charts.parallel else 0,
        )
        for title, draw, caption, missing in found
    ]


def _roofline_caption(study: SavedStudy) -> str:
    missing = "" if study.get("peaks") else " The device's peaks were not measured: no roof."
    if not study.get("flops"):
        return f"The op is memory-bound: bytes it must move at least, over time.{missing}"
    return f"Operations over time, by operations over the fewest bytes to move.{missing}"


def _row(study: SavedStudy, attempt: Attempt, energy: bool) -> list[str]:
    """Return a trial's texts; config fields that varied have a column each."""
    spread = NOTHING
    said = attempt.said
    if said.ms_p20 is not None and said.ms_p80 is not None:
        spread = f"{_digits(said.ms_p20)}–{_digits(said.ms_p80)}"
    return [
        study.role(attempt),
        str(attempt.number),
        attempt.fate,
        _digits(attempt.ms),
        spread,
        *([_digits(attempt.joules)] if energy else []),
        f"{said.seconds:.1f}",
        *(str(attempt.config.get(name, NOTHING)) for name in study.fields),
        attempt.message.split("\n", 1)[0].rstrip(),
    ]
