"""Loss curves of runs over each other, of their logs, and maps of what was watched of them.

Runs whose settings differ in the seed alone are drawn as one: their mean, between the lowest and
the highest of them. How often they were watched does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetfire.core import files, terminal
from jetfire.core.errors import UsageError
from jetfire.core.terminal import note
from jetfire.gpt2.training import log
from jetfire.gpt2.training.settings import EARLIER
from jetfire.report.curves import Curve, CurveGroup, image, page, watched_of
from jetfire.report.watched import worst

IMAGES, PAGE = (".png", ".svg", ".pdf"), ".html"


def name_of(path: Path) -> str:
    """A run's name: its folder's, or its log's where that has a name of its own."""
    file = path.resolve()
    if path.is_dir():
        return file.name
    return file.parent.name if file.name == log.NAME else file.name.partition(".jsonl")[0]


def grouped(runs: Sequence[Path]) -> list[CurveGroup]:
    """The runs' logs, those that differ in their seed alone together, in order of the first."""
    logs = [(path, log.read(path)) for path in runs]
    kinds: dict[str, list[tuple[Path, list[log.Record]]]] = {}
    for path, records in logs:
        settings = {**EARLIER, **records[0]["settings"]}
        rest = {key: value for key, value in settings.items() if key not in ("seed", "watch")}
        kinds.setdefault(repr(rest), []).append((path, records))
    groups = []
    for same in kinds.values():
        seeds = {records[0]["settings"]["seed"] for _, records in same}
        parts = [same] if len(seeds) == len(same) else [[one] for one in same]
        for part in parts:
            curves = [Curve.of(path, records, _label(path, records)) for path, records in part]
            s = part[0][1][0]["settings"]
            label = curves[0].label if len(part) == 1 else f"{s['preset']} {s['recipe']}"
            groups.append(CurveGroup.of(label, curves))
    return groups


def _label(path: Path, records: Sequence[log.Record]) -> str:
    name, settings = name_of(path), records[0]["settings"]
    known = all(settings[key] in name for key in ("preset", "recipe"))
    return name if known else f"{name}: {settings['preset']} {settings['recipe']}"


def plot(runs: Sequence[Path], output: Path) -> None:
    """Draw the runs' logs to a file of one of the kinds that its suffix may name."""
    if not runs:
        raise UsageError("plot: expected at least one run's folder")
    kind = output.suffix.lower()
    if kind not in (*IMAGES, PAGE):
        raise UsageError(f"-o {output}: expected a file named {', '.join(IMAGES)} or {PAGE}")
    groups = grouped(runs)
    seen = watched_of(groups)
    maps = worst(seen)
    if len(maps) < len(seen):
        note(f"of {len(seen)} watched runs the {len(maps)} with the lowest ratios have maps")
    with files.writing(output):
        if kind == PAGE:
            page(groups, output, maps)
        else:
            image(groups, output, "; ".join(group.mean.label for group in groups), maps=maps)
    terminal.result({"file": output}, lambda: terminal.decision(f"{output}: written"))
