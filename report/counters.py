"""Counters of `measure.ncu` for a reader: a table, a chart of stalls, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetfire.measure.ncu import REASONS
from jetfire.measure.results import STALL, Row, shape_text
from jetfire.report.chart import (
    KERNEL_COLOURS,
    SMALL,
    canvas,
    legend,
    legend_height,
    plain,
    save,
    verbatim,
)
from jetfire.report.rows import grouped, varying
from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, fixed, scaled, time_text, times

Counted = Mapping[str, Any]
BUSY = 60.0  # percent of a peak, from which on it is what limits a kernel
SAME = 0.05  # of a counter: less is no difference
AGREES = (0.9, 1.1)  # DRAM bytes over those that the op must move
MOST_BARS = 30  # of a chart
TRAFFIC = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
# What goes first where a terminal is narrow.
SPARE = ("conflicts", "registers", "occupancy", "L2", "DRAM rate", "SM", "DRAM")
# What limits a kernel that has a share of its peak, by counter.
_LIMITS = {"tensor_pct": "the tensor pipes", "memory_pct": "memory's pipes"}
_LIMITS |= {"sm_pct": "instructions"}
# The parts of memory that have a share of their own.
_PARTS = {"dram_pct": "DRAM", "l2_pct": "the L2 cache", "l1_pct": "L1 and shared memory"}
# What two configs are compared in: its name, how its value is written, and an amount that is added
# to both values before their ratio is taken, so that small values do not count.
_PERCENT = "{:.0f}%".format
_COMPARED: dict[str, tuple[str, Any, float]] = {
    "dram": ("bytes from and to DRAM", lambda v: scaled(v, TRAFFIC), 1e4),
    "l2_bytes": ("bytes through L2", lambda v: scaled(v, TRAFFIC), 1e4),
    "bank_conflicts": ("bank conflicts of shared memory", lambda v: f"{v:.0f}", 0.0),
    "tensor_pct": ("use of the tensor pipes", _PERCENT, 2.0),
    "sm_pct": ("use of the SMs", _PERCENT, 2.0),
    "memory_pct": ("use of memory", _PERCENT, 2.0),
    "occupancy_pct": ("occupancy", _PERCENT, 2.0),
}
# Of all the warps that wait, the share that is added to both sides of a ratio of stalls: a reason
# that is new, but that few wait for, is not the largest difference.
_STALL_LEAST = 0.25


def profiled(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have counters."""
    return [row for row in rows if row.extra.get("counters")]


def stalls(counters: Counted) -> dict[str, float]:
    """Return for what warps wait, the most first: warps per issued instruction, by reason.

    Without those that are selected: it is they that issue.
    """
    found = {
        name.removeprefix(STALL): value
        for name, value in counters.items()
        if name.startswith(STALL) and name != f"{STALL}selected"
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def reason_text(reason: str) -> str:
    """Return ``global or local memory (long_scoreboard)``."""
    return f"{REASONS[reason]} ({reason})" if reason in REASONS else reason


def limiter(counters: Counted) -> str:
    """Return in one sentence what limits a kernel."""
    limits = _LIMITS | _PARTS
    shares = {name: counters[name] for name in limits if name in counters}
    most = max(shares, key=lambda name: shares[name], default=None)
    waits = next(iter(stalls(counters)), None)
    if most == "memory_pct":
        part = max(_PARTS, key=lambda name: shares.get(name, 0.0))
        most = part if shares.get(part, 0.0) > 0.95 * shares[most] else most
    if most is not None and shares[most] >= BUSY:
        return f"limited by {limits[most]}, at {shares[most]:.0f}% of the peak"
    if waits is not None:
        peak = "" if most is None else f", {limits[most]} at {shares[most]:.0f}% of the peak"
        return f"limited by latency{peak}: warps wait most for {reason_text(waits)}"
    return "limited by what no counter says"


def difference(winner: Counted, default: Counted) -> str:
    """Return in one sentence in what the winner of a search differs most from the default."""
    found: list[tuple[float, str]] = []  # how far apart, and in what

    def compare(
        named: str, left: float, right: float, written: Callable[[float], str], least: float
    ) -> None:
        if left + least > 0 and right + least > 0:
            text = f"{named}: {written(left)}, the default's {written(right)}"
            found.append((abs(math.log((left + least) / (right + least))), text))

    for name, (named, written, least) in _COMPARED.items():
        left, right = _value(winner, name), _value(default, name)
        if left is not None and right is not None:
            if name == "bank_conflicts":  # a hundredth of the accesses to L2 is none to speak of
                most = max(winner.get("l2_bytes", 0.0), default.get("l2_bytes", 0.0))
                least = 1.0 + most / 128 / 100
            compare(named, left, right, written, least)
    waits = stalls(winner), stalls(default)
    least = _STALL_LEAST * max(math.fsum(side.values()) for side in waits)
    for reason in dict.fromkeys([*waits[0], *waits[1]]):
        left, right = (side.get(reason, 0.0) for side in waits)
        named = f"warps that wait for {reason_text(reason)}"
        compare(named, left, right, "{:.2f} per issue".format, least)
    if not found:
        return "winner and default have no counter in common"
    apart, text = max(found, key=lambda one: one[0])
    if apart < math.log(1 + SAME):
        return f"winner and default differ by less than {SAME:.0%} in every counter"
    return f"the largest difference is in {text}"


def verdict(winner: Counted, default: Counted | None) -> str:
    """Return in one sentence what a search's winner owes its time to.

    Args:
        default: the default's; the same where it won, None where it was not counted.
    """
    if default is None:
        return f"the winner is {limiter(winner)}"
    if default == winner:
        return f"the winner is the default, {limiter(winner)}"
    return difference(winner, default)


def sides(winner: Counted, default: Counted | None) -> dict[str, Counted]:
    """Return who was counted: the winner and the default, or one that is both."""
    if default is None:
        return {"winner": winner}
    return {"default": default} if default == winner else {"winner": winner, "default": default}


def _value(counters: Counted, name: str) -> float | None:
    if name != "dram":
        return counters.get(name)
    parts = [counters.get(f"dram_{way}_bytes") for way in ("read", "write")]
    return None if None in parts else math.fsum(part or 0.0 for part in parts)


def cells(counters: Counted) -> dict[str, str]:
    """Return the texts of a line by column."""
    most = [f"{name} {value:.1f}" for name, value in list(stalls(counters).items())[:3]]
    return {
        "time": time_text(counters.get("duration_ms")),
        "SM": _share(counters.get("sm_pct")),
        "memory": _share(counters.get("memory_pct")),
        "DRAM rate": _share(counters.get("dram_pct")),
        "tensor": _share(counters.get("tensor_pct")),
        "DRAM": scaled(_value(counters, "dram"), TRAFFIC),
        "of counted": times(counters.get("dram_of_counted")),
        "L2": scaled(counters.get("l2_bytes"), TRAFFIC),
        "conflicts": fixed(counters.get("bank_conflicts")),
        "occupancy": _share(counters.get("occupancy_pct")),
        "registers": fixed(counters.get("registers")),
        "waits for": ", ".join(most),
    }


def _share(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:.0f}%"


def table(lines: Sequence[tuple[str, str, Counted]]) -> Table:
    """Return a table of counters.

    Args:
        lines: each with the problem, who was counted, and the counters.
    """
    head = ["counters of", "", *cells({})]
    rows = [[*names, *cells(one).values()] for *names, one in lines]
    return Table(head, rows, (0, 1, len(head) - 1))


def _named(rows: Sequence[Row]) -> list[tuple[str, str, Counted]]:
    """Return each row's problem, by what differs among those of its op, its label and counters."""
    by_op = grouped(rows, lambda row: row.op)
    differing = {op: varying(same)[1] for op, same in by_op.items()}
    return [
        (
            " ".join(
                [*([row.op] if len(by_op) > 1 else []), shape_text(row.problem, differing[row.op])]
            ),
            row.label,
            row.extra["counters"],
        )
        for row in rows
    ]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the table of the rows that have counters, if there are any."""
    found = profiled(rows)
    return [table(_named(found))] if found else []


def sentences(rows: Sequence[Row]) -> list[str]:
    """Return what limits each kernel that was counted."""
    found = _named(profiled(rows))
    return [f"{problem} {name}: {limiter(one)}".strip() for problem, name, one in found]


def footnotes(counters: Sequence[Counted]) -> list[str]:
    """Return what a reader must know where DRAM bytes are not those that the op must move."""
    ratios = [one["dram_of_counted"] for one in counters if "dram_of_counted" in one]
    return [] if all(AGREES[0] <= ratio <= AGREES[1] for ratio in ratios) else [OF_COUNTED]


OF_COUNTED = (
    "of counted: DRAM bytes over the fewest that the op must move; less where what was written is "
    "in the L2 cache still, more where something is read or written again."
)
TEXT = (
    "Counters of Nsight Compute, of one more run of each kernel with cold caches: its time there, "
    "percent of the peak throughput of the SMs, of the memory system and of DRAM alone, use of the "
    "tensor pipes, bytes from and to DRAM and through L2, bank conflicts of shared memory, the "
    "occupancy achieved, registers of a thread, and for what warps wait, in warps per issued "
    "instruction."
)


def section(rows: Sequence[Row], plot: str) -> Section:
    """Return the section of a page; without counters its table is empty."""
    said = "\n".join(f"- {one}" for one in sentences(rows))
    text = "\n\n".join([TEXT, f"{OF_COUNTED[:1].upper()}{OF_COUNTED[1:]}", said])
    alt = "For what the warps of each kernel wait"
    return Section("Why is it fast", text, tables(rows), plot, alt)


def plot(rows: Sequence[Row], path: Path, description: str) -> None:
    """Draw for what the warps of each kernel wait, as bars of stacked parts."""
    named = _named(profiled(rows))[:MOST_BARS]
    bars = [(f"{problem} {name}".strip(), stalls(one)) for problem, name, one in named]
    reasons = list(dict.fromkeys(reason for _, one in bars for reason in one))
    height = 1.0 + 0.3 * len(bars)
    figure = canvas(height + legend_height(reasons), "For what warps wait")
    ax = figure.subplots()
    left, handles = [0.0] * len(bars), []
    for i, reason in enumerate(reasons):
        values = [one.get(reason, 0.0) for _, one in bars]
        colour, hatch = KERNEL_COLOURS[i % len(KERNEL_COLOURS)], "" if i < 12 else "///"
        handles.append(
            ax.barh(
                range(len(bars)), values, left=left, color=colour, hatch=hatch, edgecolor="white"
            )
        )
        left = [a + b for a, b in zip(left, values, strict=True)]
    plain(ax)
    ax.set_yticks(range(len(bars)), [verbatim(name) for name, _ in bars], fontsize=SMALL)
    ax.invert_yaxis()
    ax.set_xlabel("warps that wait, per issued instruction", fontsize=SMALL)
    ax.tick_params(axis="x", labelsize=SMALL)
    legend(figure, handles, reasons)  # type: ignore[arg-type]
    save(figure, path, description)
