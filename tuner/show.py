"""`jetfire tune show`: which profiles there are."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire import ops
from jetfire.bench import show as texts
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.profiles import Entry

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("kernel", "problem", "config", "time", "gain", "× peer", "tuned", "state")


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


def found(names: Sequence[str], device: Device | None) -> Iterator[Profile]:
    """The profiles of some ops (of all where none is named) on a device, or on every one."""
    wanted = [ops.get(name).name for name in names]
    for file in profiles.files():
        here = device is None or file.parent.name == profiles.device_slug(device)
        if here and (not wanted or file.stem in wanted) and (entries := profiles.read(file)):
            source = "shipped" if file.is_relative_to(profiles.SHIPPED) else "user"
            gpu = str(entries[0].provenance.get("gpu", file.parent.name))
            yield Profile(file, source, gpu, file.stem, entries)


def show(names: Sequence[str], device: Device | None, as_json: bool = False) -> None:
    """Print the profiles of some ops (of all where none is named), the user's first.

    Raises:
        UsageError: there is no such op.
    """
    shown = list(found(names, device))
    if as_json:
        records = [_record(profile, entry) for profile in shown for entry in profile.entries]
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    for profile in shown:
        console.print(_heading(profile), soft_wrap=True)
        console.print(_table(profile))
    if not shown:
        folders = f"{profiles.user_folder()} or {profiles.SHIPPED}"
        of = f" of {', '.join(names)}" if names else ""
        on = f" on {device.label}" if device else ""
        print(f"jetfire: no profile{of}{on} in {folders}: jetfire-tune OP makes one",
              file=sys.stderr)  # fmt: skip


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


def _shared(problems: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields, sizes apart, that all the problems have alike."""
    first = problems[0]
    return {
        name: first[name]
        for name in first
        if name not in ("m", "n", "k") and all(p.get(name) == first[name] for p in problems)
    }


def _heading(profile: Profile) -> str:
    from rich.markup import escape

    shared = texts.problem_text(_shared([entry.problem for entry in profile.entries]))
    where = escape(f"{profile.device}, {profile.source}: {profile.file}")
    return f"[bold]{profile.op}[/bold] on {where}\n{shared}".rstrip()


def _table(profile: Profile) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        right = name in ("time", "gain")
        table.add_column(name, justify="right" if right else "left",
                         overflow="fold", no_wrap=name != "config")  # fmt: skip
    shared = _shared([entry.problem for entry in profile.entries])
    for entry in profile.entries:
        rest = [name for name in entry.problem if name not in shared]
        table.add_row(
            entry.kernel,
            texts.shape_text(entry.problem, rest),
            texts.problem_text(entry.config),
            texts.time_text(entry.ms),
            "" if entry.gain is None else f"{entry.gain:.2f}×",
            _peer_text(entry),
            str(entry.provenance.get("date", "")),
            profiles.state(profile.op, entry),
        )
    return table


def _peer_text(entry: Entry) -> str:
    name = next((n for n in texts.BASELINES if n in entry.vs_peer), None)
    return "" if name is None else f"{entry.vs_peer[name]:.2f}× {name}"
