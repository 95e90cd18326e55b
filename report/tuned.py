"""What the documents say and draw of the shipped profiles, and of lookups without one.

The profiles are those of the results' device. The lookups are beside the results, in
FILE-lookups.json, as `jetfire-tune --unseen N -o FILE-lookups.json` writes them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FailFast, Field
from typing_extensions import TypedDict

from jetfire.core import profiles, registry, schema
from jetfire.core.device import Device
from jetfire.core.files import Missing, Unreadable
from jetfire.core.profiles import Entry
from jetfire.core.schema import Count, Fields, Line, Name
from jetfire.measure.results import Amount, Milliseconds, blocks_text, shape_text
from jetfire.report.chart import (
    KERNEL_COLOURS,
    MARKERS,
    SMALL,
    canvas,
    legend,
    legend_height,
    plain,
    save,
)
from jetfire.report.rows import grouped
from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, plural, times, where, with_share

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

LOOKUPS_SCHEMA = 1
NEAR = 1.1
# Of two times that differ by less, neither is the slower one.
ROUNDING = 0.999
PASS = "copy"  # the peer of what is no product


def peer_of(op: str) -> str:
    """Return the peer that an op was tuned beside."""
    return registry.get(op).tuning.peer


@dataclass(frozen=True)
class ShippedEntry:
    """One entry of a shipped profile."""

    op: str
    entry: Entry

    @property
    def gain(self) -> float | None:
        """The default's time over the tuned config's; None where the default failed."""
        return self.entry.gain

    @property
    def slower(self) -> bool:
        return self.gain is not None and self.gain < ROUNDING

    @property
    def kind(self) -> str:
        """The direction, or what a GEMM writes; empty where there is but one."""
        return str(self.entry.problem.get("mode") or self.entry.problem.get("out") or "")

    @property
    def peer(self) -> float | None:
        """The time of the op's peer over the tuned config's."""
        return self.entry.vs_peer.get(peer_of(self.op))

    @property
    def read(self) -> int:
        """The block of what is read; 0 where there are no blocks."""
        return int(self.entry.problem.get("block", 0))

    @property
    def written(self) -> int:
        return int(self.entry.problem.get("out_block", self.read))

    @property
    def stale(self) -> bool:
        return profiles.state(self.op, self.entry) != ""


@dataclass(frozen=True)
class Lookup:
    """A problem without a profile: the config that a lookup gives, the default and the tuned one.

    Attributes:
        source: ``"nearest"``, or ``"default"`` where no profile was near.
        distance: to the nearest, as the root of the squares of each size's ratio as a log2.
        trials: what tuning it took.
    """

    op: Name
    kernel: Name
    problem: Fields
    source: Literal["nearest", "default"]
    distance: Amount | None
    lookup_ms: Milliseconds
    default_ms: Milliseconds
    tuned_ms: Milliseconds
    trials: Count

    @property
    def ratio(self) -> float:
        return self.lookup_ms / self.tuned_ms

    @property
    def default_ratio(self) -> float:
        return self.default_ms / self.tuned_ms


class _Device(TypedDict):
    name: Line


@dataclass(frozen=True)
class _File:
    device: _Device
    rows: Annotated[list[Lookup], Field(max_length=10_000), FailFast()]


def shipped(device: Mapping[str, Any]) -> list[ShippedEntry]:
    """Return every entry shipped for a device, op by op."""
    folder = profiles.path(profiles.SHIPPED, Device("cuda", name=str(device.get("name"))), "")
    return [
        ShippedEntry(op, entry)
        for op in registry.names()
        for entry in profiles.read(folder.parent / f"{op}.json")
    ]


def lookups(file: Path, device: Mapping[str, Any]) -> list[Lookup]:
    """Return the rows of a lookups file, op by op; none where there is no file.

    Raises:
        Unreadable: it cannot be used, or is of another device.
    """
    try:
        content = schema.load(file, _File, version=LOOKUPS_SCHEMA)
    except Missing:
        return []
    if content.device["name"] != device.get("name"):
        raise Unreadable(file, f"of {content.device['name']}, not {device.get('name')}")
    return sorted(content.rows, key=lambda one: one.op)


def records(entries: Sequence[ShippedEntry], found: Sequence[Lookup]) -> list[Any]:
    """Return the entries and the lookups as JSON values."""
    both: list[ShippedEntry | Lookup] = [*entries, *found]
    return [dataclasses.asdict(one) for one in both]


def gains(entries: Iterable[ShippedEntry]) -> list[float]:
    """Return the gains over defaults that did not fail."""
    return [one.gain for one in entries if one.gain is not None]


def mean_gain(entries: Iterable[ShippedEntry], digits: int = 2) -> str:
    """Return the geometric mean as text; empty where every default failed."""
    known = gains(entries)
    return times(geometric_mean(known), digits) if known else ""


def in_use(entries: Sequence[ShippedEntry]) -> list[ShippedEntry]:
    """Return each problem's entry of the fastest kernel, which is the one that a model runs."""
    same = grouped(entries, lambda one: json.dumps([one.op, one.entry.problem], sort_keys=True))
    return [min(part, key=lambda one: one.entry.ms) for part in same.values()]


def _parts(entries: Sequence[ShippedEntry]) -> dict[str, list[ShippedEntry]]:
    kinds = grouped(entries, lambda one: "the other ops" if peer_of(one.op) == PASS else "products")
    named = {"all ops": list(entries), "products": [], "the other ops": [], **kinds}
    return {name: part for name, part in named.items() if part}


# The shipped configs.


def overall(entries: Sequence[ShippedEntry]) -> Table:
    """Return products and the other ops, each problem once."""
    rows = []
    for name, part in _parts(in_use(entries)).items():
        ratios = grouped((one for one in part if one.peer), lambda one: peer_of(one.op))
        means = {peer: geometric_mean(one.peer or 0 for one in of) for peer, of in ratios.items()}
        peers = [f"{times(ratio)} {peer}" for peer, ratio in means.items()]
        rows.append(
            [
                name,
                str(len(part)),
                mean_gain(part, 3),
                with_share(sum(gain > 1 for gain in gains(part)), len(part)),
                str(sum(one.slower for one in part)),
                ", ".join(peers) or NOTHING,
            ]
        )
    head = ["", "problems", "gain", "faster than the default", "slower", "× peer"]
    return Table(head, rows)


def by_kernel(entries: Sequence[ShippedEntry]) -> Table:
    """Return a row for each op, kernel, direction or output, and block."""
    found = grouped(entries, lambda one: (one.op, one.entry.kernel, one.kind))

    order = {op: i for i, op in enumerate(dict.fromkeys(one.op for one in entries))}
    rows = []
    for op, kernel, kind in sorted(found, key=lambda k: (order[k[0]], k[1], k[2] == "bwd", k[2])):
        blocks = grouped(found[op, kernel, kind], lambda one: (one.read, one.written))
        for _, part in sorted(blocks.items()):
            best = max(part, key=lambda one: one.gain or 0)
            where = shape_text(best.entry.problem, ()) if (best.gain or 0) > 1 else NOTHING
            text = blocks_text(part[0].entry.problem) or NOTHING
            rows.append(
                [
                    f"{op} {kind}".strip(),
                    kernel,
                    text,
                    str(len(part)),
                    mean_gain(part),
                    mean_gain([best]),
                    where,
                    str(sum(one.slower for one in part)),
                    str(sum(one.entry.trials for one in part)),
                ]
            )
    head = ["", "kernel", "block", "problems", "gain", "largest", "at", "slower", "trials"]
    return Table(head, rows)


def _provenance(entries: Sequence[ShippedEntry]) -> str:
    """Return what they were tuned with, and whether the kernels are still the same."""

    def values(name: str) -> str:
        found = {str(one.entry.provenance.get(name)) for one in entries}
        return ", ".join(sorted(found))

    stale = sum(one.stale for one in entries)
    sources = (
        f"**The kernel's source has changed since for {plural(stale, 'config')}.**"
        if stale
        else "No kernel's source has changed since."
    )
    return (
        f"Tuned on {values('gpu')}, driver {values('driver')}, CUDA {values('cuda')}, "
        f"torch {values('torch')}, Triton {values('triton')}, timer {values('timer')}; "
        f"{values('date')}. {sources}"
    )


def _tuned_section(entries: Sequence[ShippedEntry], plot: str, found: Sequence[Lookup]) -> Section:
    trials = sum(one.entry.trials for one in entries)
    problems = in_use(entries)
    text = (
        f"`profiles/` has {len(entries)} configs for {len(problems)} problems, found in {trials} "
        "trials; `jetfire-tune show` lists them. The gain is the default's time over the tuned "
        "config's, both timed in turn in the tuner's last comparison. There a config displaces the "
        "default only where it is faster beyond the noise and by half a percent; else the default "
        "is kept, and the gain is 1. Means are geometric. Of a problem tuned for several kernels "
        "the first table has the fastest, which is the one that models run; `× peer` is the peer's "
        "time over the tuned config's, `copy` a pass that moves as many bytes."
    )
    if failed := len(problems) - len(gains(problems)):
        text += f" The default fails {plural(failed, 'problem')}, in no mean here."
    return Section(
        "Tuned configs",
        f"{text}\n\n{_provenance(entries)}",
        [overall(entries), by_kernel(entries)],
        plot,
        alt(entries, found),
    )


def alt(entries: Sequence[ShippedEntry], found: Sequence[Lookup]) -> str:
    """Return what the plot shows, in words."""
    problems = [one for one in in_use(entries) if one.gain is not None]
    text = f"Gain over the default of {len(problems)} tuned problems, sorted within each op"
    if problems:
        best = max(problems, key=lambda one: one.gain or 0)
        text += f": from {times(min(gains(problems)))} to {times(best.gain)} ({best.op})"
    text += "."
    if found:
        worst = max(found, key=lambda one: one.ratio)
        text += (
            f" Time of {plural(len(found), 'looked-up config')} over the tuned one's: "
            f"up to {times(worst.ratio)} ({worst.op})."
        )
    return text


# Lookups.


def _worst(part: Sequence[Lookup], ratio: Callable[[Lookup], float]) -> str:
    worst = max(part, key=ratio)
    return f"{times(ratio(worst))} ({shape_text(worst.problem, ('block', 'out_block'))})"


def near(found: Iterable[Lookup]) -> int:
    """Return how many lookups are within 10% of what tuning gave, or faster."""
    return sum(one.ratio <= NEAR for one in found)


def _lookup_section(found: Sequence[Lookup]) -> Section:
    parts = {**grouped(found, lambda one: one.op), "all ops": list(found)}
    rows = [
        [
            name,
            str(len(part)),
            with_share(near(part), len(part)),
            times(geometric_mean(one.ratio for one in part), 3),
            _worst(part, lambda one: one.ratio),
            with_share(sum(one.default_ratio <= NEAR for one in part), len(part)),
            times(geometric_mean(one.default_ratio for one in part), 3),
            _worst(part, lambda one: one.default_ratio),
        ]
        for name, part in parts.items()
    ]
    nearest = sum(one.source == "nearest" for one in found)
    text = (
        "Random shapes that no profile is for: the time of the config that a lookup gives over "
        "the time of the one that tuning the shape gives, and the same of the kernel's default, "
        f"all timed in turn. {nearest} lookups gave the nearest profile's config, "
        f"{len(found) - nearest} found none near and gave the default. Tuning took "
        f"{sum(one.trials for one in found)} trials. Means are geometric."
    )
    head = ["", "shapes", "within 10%", "mean", "worst", "default within 10%", "mean", "worst"]
    return Section("Shapes without a profile", text, [Table(head, rows)])


# For the documents.


def sections(entries: Sequence[ShippedEntry], found: Sequence[Lookup], plot: str) -> list[Section]:
    """Return the sections of the page; none of what there is nothing of."""
    made = [_tuned_section(entries, plot, found)] if entries else []
    return [*made, _lookup_section(found)] if found else made


def readme(entries: Sequence[ShippedEntry], found: Sequence[Lookup]) -> list[str]:
    """Return the README's line of each."""
    lines = []
    if entries:
        problems = in_use(entries)
        means = {name: mean_gain(part, 3) for name, part in _parts(problems).items() if gains(part)}
        apart = ", ".join(f"{name} {means[name]}" for name in list(means)[1:])
        speed = (
            f"{means['all ops']} the defaults' speed in the geometric mean ({apart})"
            if means
            else "no default could run"
        )
        slower = sum(one.slower for one in problems)
        lines.append(
            f"Tuned configs are shipped for {len(problems)} problems: {speed}, "
            f"{slower or 'none'} slower."
        )
    if found:
        lines.append(
            f"For shapes without one, a lookup is within 10% of what tuning gives in {near(found)} "
            f"of {len(found)} ({near(found) / len(found):.0%})."
        )
    return lines


# The chart.


def plot(
    entries: Sequence[ShippedEntry],
    found: Sequence[Lookup],
    device: Mapping[str, Any],
    path: Path,
    description: str = "",
) -> None:
    """Draw a line for each op, its problems sorted; below them the same of the lookups, if any."""
    tuned = [one for one in in_use(entries) if one.gain is not None]
    strips = [
        _Strips(
            "default / tuned, each problem; beside the op, the geometric mean",
            "gain over the default",
            [(one.op, one.gain or math.nan, _block_text(one)) for one in tuned],
            {op: mean_gain(part) for op, part in grouped(tuned, lambda one: one.op).items()},
        )
    ]
    if found:
        ops = grouped(found, lambda one: one.op)
        strips.append(
            _Strips(
                "lookup / tuned, each shape without a profile; "
                f"beside the op, those within {NEAR - 1:.0%}",
                "time over the tuned config's",
                [(one.op, one.ratio, _SOURCES[one.source]) for one in found],
                {op: f"{near(part)} of {len(part)}" for op, part in ops.items()},
                NEAR,
            )
        )
    heights = [one.height for one in strips]
    fig = canvas(0.5 + sum(heights), f"Tuned configs\n{where(device)}")
    parts = fig.subfigures(len(strips), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, one in zip(parts, strips, strict=True):
        one.draw(part)
    save(fig, path, description)


_SOURCES = {"nearest": "nearest profile", "default": "default (none near)"}


def _block_text(one: ShippedEntry) -> str:
    text = blocks_text(one.entry.problem)
    return f"block {text}" if text else "no blocks"


@dataclass(frozen=True)
class _Strips:
    """Sorted points, a line per op and a colour per kind.

    Attributes:
        points: op, value and kind of each.
        said: what stands beside each op's name.
        level: a value to mark.
    """

    title: str
    label: str
    points: Sequence[tuple[str, float, str]]
    said: Mapping[str, str]
    level: float | None = None

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for *_, kind in self.points}, key=lambda name: (len(name), name))

    @property
    def height(self) -> float:
        """Inches of the chart and its legend."""
        return 0.8 + 0.25 * len(self.said) + legend_height(self.kinds)

    def draw(self, part: SubFigure) -> None:
        ax = part.subplots()
        ops = list(self.said)
        marks: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in self.kinds}
        for op, points in grouped(self.points, lambda point: point[0]).items():
            for rank, (_, value, kind) in enumerate(sorted(points, key=lambda point: point[1])):
                xs, ys = marks[kind]
                xs.append(value)
                ys.append(round(ops.index(op) + 0.4 - 0.8 * (rank + 0.5) / len(points), 4))
        for i, (xs, ys) in enumerate(marks.values()):
            ax.plot(
                xs,
                ys,
                linestyle="",
                marker=MARKERS[i % len(MARKERS)],
                markersize=3.5,
                alpha=0.8,
                color=KERNEL_COLOURS[i % len(KERNEL_COLOURS)],
            )
        lines = list(ax.lines)
        for i in range(1, len(ops)):
            ax.axhline(i - 0.5, color="#e6e6e6", linewidth=0.8)
        if self.level is not None:
            ax.axvline(self.level, color="#999999", linewidth=1, linestyle=":", zorder=1)
        ax.set_yticks(range(len(ops)), [f"{op}  {self.said[op]}" for op in ops], fontsize=SMALL)
        ax.set_ylim(max(1, len(ops)) - 0.5, -0.5)  # the first op on top
        ax.xaxis.set_major_formatter(lambda x, _: times(x))
        ax.set_xlabel(self.label)
        ax.set_title(self.title, fontsize=10)
        plain(ax)
        ax.grid(False, axis="y")
        legend(part, lines, self.kinds)
