"""`jetfire tune show`: which profiles there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetfire.core import profiles, registry, terminal, workloads
from jetfire.core.device import Device
from jetfire.core.op import Op
from jetfire.core.profiles import Entry
from jetfire.core.terminal import note
from jetfire.measure.plan import Request, choose_ops
from jetfire.measure.results import problem_text, shape_text
from jetfire.report import output
from jetfire.report.rows import varying
from jetfire.report.show import first_ratio
from jetfire.report.table import Table
from jetfire.report.text import time_text, times

COLUMNS = ("kernel", "problem", "config", "time", "gain", "× peer", "tuned", "state")
SPARE = ("tuned", "× peer", "gain")  # what goes first where a terminal is narrow


@dataclass(frozen=True)
class Profile:
    """One file's entries of one op.

    Attributes:
        source: ``"user"``, or ``"shipped"`` with the package.
    """

    file: Path
    source: str
    device: str
    op: str
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Wanted:
    """The entries that are listed; all, unless something says otherwise.

    Attributes:
        fields: field of a problem → the values that it may have, as texts.
        shapes: op → the sizes that its problems may have, of a workload; None for any.
        kernels: their names.
    """

    fields: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, Collection[tuple[int, ...]]] | None = None
    kernels: Sequence[str] = ()

    @classmethod
    def of(cls, request: Request, kernels: Sequence[str]) -> Wanted:
        """Return the filter that a request for problems stands for."""
        fields: dict[str, Collection[str]] = {
            name: [str(size) for size in sizes] for name, sizes in request.sizes.items()
        }
        fields |= {name: [v.lower() for v in values] for name, values in request.settings.items()}
        if request.blocks:
            fields["block"] = request.blocks
        shapes = None
        if request.workload is not None:
            shapes = {
                op.name: {
                    _sizes(op, problem.as_dict())
                    for mode in op.modes
                    for problem in workloads.problems(op, request.workload, mode, {})
                }
                for op in request.ops
            }
        return cls(fields, shapes, kernels)

    def __call__(self, op: str, entry: Entry) -> bool:
        problem = entry.problem
        if self.kernels and entry.kernel not in self.kernels:
            return False
        meant = {"out_block": problem.get("block"), **problem}
        if any(str(meant.get(name)).lower() not in v for name, v in self.fields.items()):
            return False
        return self.shapes is None or _sizes(registry.get(op), problem) in self.shapes.get(op, ())


def _sizes(op: Op, problem: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(problem[dim] for dim in op.dims)


def found(names: Sequence[str], device: Device | None, wanted: Wanted) -> Iterator[Profile]:
    """Return the profiles of some ops (of all where none is named) on one device or on all."""
    chosen = [op.name for op in choose_ops(names or ["all"])]
    for file in profiles.files():
        here = device is None or file.parent.name == profiles.device_slug(device)
        if not here or file.stem not in chosen:
            continue
        if entries := [entry for entry in profiles.read(file) if wanted(file.stem, entry)]:
            source = "shipped" if file.is_relative_to(profiles.SHIPPED) else "user"
            gpu = str(entries[0].provenance.get("gpu", file.parent.name))
            yield Profile(file, source, gpu, file.stem, entries)


def show(
    names: Sequence[str],
    device: Device | None,
    wanted: Wanted | None = None,
    form: str = "table",
) -> None:
    """Print the profiles of some ops (of all where none is named), the user's first.

    Raises:
        UsageError: there is no such op.
    """
    shown = list(found(names, device, wanted or Wanted()))
    records = [_record(profile, entry) for profile in shown for entry in profile.entries]
    output.give(
        form,
        {"profiles": records},
        lambda: _print(shown),
        lambda: {f"{one.op} on {one.device}, {one.source}": _table(one) for one in shown},
        lambda: records,
    )
    if not shown:
        folders = f"{profiles.user_folder()} or {profiles.SHIPPED}"
        of = f" of {', '.join(names)}" if names else ""
        on = f" on {device.label}" if device else ""
        left = " that the options leave" if wanted not in (None, Wanted()) else ""
        note(f"no profile{of}{on}{left} in {folders}: jetfire-tune OP makes one")


def _print(shown: Sequence[Profile]) -> None:
    console = terminal.console(width=240)
    for profile in shown:
        shared, _ = varying(profile.entries)
        where = f" on {profile.device}, {profile.source}: {profile.file}"
        text = f"{where}\n{problem_text(shared)}".rstrip()
        console.print(terminal.styled(profile.op, "bold"), text, soft_wrap=True, sep="")
        console.print(_table(profile, shared).rich(folded=(1, 2), spare=SPARE))


def _table(profile: Profile, shared: Mapping[str, Any] | None = None) -> Table:
    """Return a line per entry, without the fields of problems that are said elsewhere."""
    rows = [_row(profile.op, entry, shared or {}) for entry in profile.entries]
    return Table(COLUMNS, rows, left=(0, 1, 2, 5, 6, 7))


def _record(profile: Profile, entry: Entry) -> dict[str, Any]:
    return {
        "device": profile.device,
        "op": profile.op,
        "file": str(profile.file),
        "shipped": profile.source == "shipped",
        "state": profiles.state(profile.op, entry) or "current",
        "gain": entry.gain,
        **dataclasses.asdict(entry),
    }


def _row(op: str, entry: Entry, shared: Mapping[str, Any]) -> list[str]:
    return [
        entry.kernel,
        shape_text(entry.problem, [name for name in entry.problem if name not in shared]),
        problem_text(entry.config),
        time_text(entry.ms),
        "" if entry.gain is None else times(entry.gain),
        first_ratio(entry.vs_peer),
        str(entry.provenance.get("date", "")),
        profiles.state(op, entry),
    ]
