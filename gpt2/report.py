"""Documents of a results file, with the training runs: `python -m jetfire.gpt2.report FILE.json`.

`jetfire.report.documents` writes them; from here come a section for each preset of the logs in
training/*.jsonl.gz beside the file (`jetfire.gpt2.keep`) that are of its device, its plot of the
losses, a section for each study-*.json there (`jetfire train study --record`), and the README's
lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

from jetfire.gpt2 import study_record
from jetfire.gpt2.curves import CurveGroup, image
from jetfire.gpt2.finished import FinishedRun
from jetfire.gpt2.study_record import StudyRecord
from jetfire.measure.results import Results
from jetfire.nn.recipes import RECIPES
from jetfire.report import documents, show
from jetfire.report.documents import Addition, Chart
from jetfire.report.table import MarkdownTable

FOLDER, BASE = "training", "bf16"


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one preset and recipe, of different seeds."""

    name: str
    runs: list[FinishedRun]

    def mean(self, value: Callable[[FinishedRun], float]) -> float:
        return fmean(value(run) for run in self.runs)

    def loss(self, value: Callable[[FinishedRun], float]) -> str:
        """The mean, and of several runs the lowest and the highest."""
        values = [value(run) for run in self.runs]
        text = f"{fmean(values):.4f}"
        return text if len(values) == 1 else f"{text} ({min(values):.4f} to {max(values):.4f})"

    def over(self, base: RecipeRuns | None, value: Callable[[FinishedRun], float]) -> str:
        """The mean over the base's, in nats and in %."""
        if base is None or base is self:
            return "–"
        ours, theirs = self.mean(value), base.mean(value)
        return f"{ours - theirs:+.4f} ({100 * (ours / theirs - 1):+.2f}%)"

    @property
    def ms(self) -> float | None:
        known = [run.ms for run in self.runs if run.ms is not None]
        return median(known) if known else None


@dataclass(frozen=True)
class Preset:
    """All the runs of one preset, by recipe, BF16 first."""

    name: str
    recipes: list[RecipeRuns]

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for recipe in self.recipes for run in recipe.runs]

    @property
    def base(self) -> RecipeRuns | None:
        return next((recipe for recipe in self.recipes if recipe.name == BASE), None)

    @property
    def plot(self) -> str:
        """What the plot's file is named by: 124m, shakespeare, …"""
        return self.name.removeprefix("gpt2-").removesuffix("-char")

    def text(self) -> str:
        """What was trained on what, of the runs' headers; what differs among them is not said."""
        head, s = self.runs[0].head, self.runs[0].head["settings"]
        seeds = sorted({run.setting("seed") for run in self.runs})
        tokens = self.runs[0].tokens
        parts = [
            f"{s['layers']} layers of width {s['width']}, context {s['context']}, "
            f"{head['parameters'] / 1e6:.1f} M parameters; {s['steps']} steps of {tokens} tokens, "
            f"{s['steps'] * tokens / 1e6:.1f} M in all, of {s['data']}'s "
            f"{head['tokens']['train'] / 1e6:.2f} M; dropout {s['dropout']}. "
            f"{'Seed' if len(seeds) == 1 else 'Seeds'} {', '.join(map(str, seeds))}; initial "
            "weights and the order of the data are the seed's, whatever the recipe. Losses are "
            "nats a token, of the same windows of validation tokens for all."
        ]
        if len(seeds) == 1:
            parts.append("With one seed a recipe, how much another seed would change is not known.")
        else:
            parts.append(
                "Losses are means over the seeds, with the lowest and the highest; so are the "
                "plot's lines and bands."
            )
        if all(run.ms is None for run in self.runs):
            parts.append("Several runs shared a GPU, so their steps' times are no recipe's.")
        else:
            parts.append("Times are medians of the steps.")
        parts.append(f"How to repeat it: [{FOLDER}/]({FOLDER}/README.md).")
        return " ".join(parts)

    def table(self) -> MarkdownTable:
        timed = any(recipe.ms is not None for recipe in self.recipes)
        head = ["recipe", "as", "final validation loss", f"over {BASE}'s", "best validation loss",
                f"over {BASE}'s", *(["ms a step", "tokens/s", f"× {BASE}"] if timed else []),
                "peak GiB"]  # fmt: skip
        return MarkdownTable(f"Training runs, {self.name}", self.text(), head, [
            [recipe.name, recipe.runs[0].how, recipe.loss(_final), recipe.over(self.base, _final),
             recipe.loss(_best), recipe.over(self.base, _best),
             *(_speed(recipe, self.base) if timed else []),
             show.number(max(run.peak_gib for run in recipe.runs), 2)]
            for recipe in self.recipes
        ])  # fmt: skip

    def chart(self, file: Path) -> Chart:
        groups = [CurveGroup.of(r.name, [run.curve() for run in r.runs]) for r in self.recipes]
        content = [[c.label, c.steps, c.losses, c.evaluated, c.validation]
                   for group in groups for c in (group.mean, *group.runs)]  # fmt: skip
        device = self.runs[0].head["device"]["name"]
        draw = partial(image, groups, title=f"{self.name}\n{device}",
                       first=self.recipes[0].name)  # fmt: skip
        path = file.with_name(f"{file.stem}-{FOLDER}-{self.plot}.svg")
        return Chart(path, content, draw)


def _final(run: FinishedRun) -> float:
    return run.final


def _best(run: FinishedRun) -> float:
    return run.best


def _speed(recipe: RecipeRuns, base: RecipeRuns | None) -> list[str]:
    """ms, tokens/s and the base's time over this one's."""
    ms, theirs = recipe.ms, base.ms if base is not None else None
    if ms is None:
        return ["–"] * 3
    ratio = "–" if theirs is None or base is recipe else f"{theirs / ms:.2f}×"
    return [show.number(ms, 2), show.number(recipe.runs[0].tokens / ms * 1e3), ratio]


def presets(folder: Path, device: str | None) -> list[Preset]:
    """The runs in a folder that are of a device, by preset and recipe."""
    runs = [FinishedRun.read(file) for file in sorted(folder.glob("*.jsonl.gz"))]
    runs = [run for run in runs if run.head["device"]["name"] == device]
    found: dict[str, dict[str, list[FinishedRun]]] = {}
    for run in runs:
        recipes = found.setdefault(run.setting("preset"), {})
        recipes.setdefault(run.setting("recipe"), []).append(run)
    return [
        Preset(
            name, [RecipeRuns(recipe, recipes[recipe]) for recipe in sorted(recipes, key=_order)]
        )
        for name, recipes in found.items()
    ]


def _order(recipe: str) -> tuple[int, str]:
    """As recipes are listed, BF16 first; those of earlier versions last."""
    known = list(RECIPES)
    return known.index(recipe) if recipe in known else len(known), recipe


def readme(found: Sequence[Preset]) -> str:
    """The README's lines; empty without runs."""
    if not found:
        return ""
    rows = [
        [f"{preset.name}, {preset.runs[0].setting('steps')} steps, {recipe.name}",
         str(len(recipe.runs)), recipe.loss(_best), recipe.over(preset.base, _best)]
        for preset in found for recipe in preset.recipes
    ]  # fmt: skip
    head = ["training run", "seeds", "best validation loss", f"over {BASE}'s"]
    return "\n" + MarkdownTable("", "", head, rows).markdown()


def studies(folder: Path, device: str | None) -> list[StudyRecord]:
    """The records of studies in a folder that are of a device."""
    found = [study_record.read(file) for file in sorted(folder.glob("study-*.json"))]
    return [record for record in found if record["device"] == device]


def study_table(record: StudyRecord) -> MarkdownTable:
    s, data = record["settings"], record["data"]
    text = (
        f"{s['steps']} steps of {record['tokens'] // s['steps']} tokens, "
        f"{record['tokens'] / 1e6:.1f} M in all, of {data['name']}'s "
        f"{data['tokens']['train'] / 1e6:.1f} M. {study_record.explained(record)}"
    )
    title = f"Study of recipes, {record['preset']}"
    return MarkdownTable(title, text, study_record.columns(record), study_record.rows(record))


def _study_lines(found: Sequence[StudyRecord]) -> str:
    """The README's lines; empty without studies."""
    tables = []
    for record in found:
        head, *more = study_record.columns(record)
        tokens = f"{record['preset']}, {record['tokens'] / 1e6:.1f} M tokens"
        tables.append(MarkdownTable("", "", [f"{tokens}: {head}", *more],
                                    study_record.rows(record)).markdown())  # fmt: skip
    return "".join(f"\n{table}" for table in tables)


def addition(results: Results, file: Path) -> Addition:
    """What the runs and studies beside a results file add to its documents."""
    studied = studies(file.parent, results.device.get("name"))
    found = presets(file.parent / FOLDER, results.device.get("name"))
    charts = [preset.chart(file) for preset in found]
    sections = [
        f"{preset.table().markdown()}\n![{chart.path.name}]({chart.path.name})\n"
        for preset, chart in zip(found, charts, strict=True)
    ]
    sections += [study_table(record).markdown() for record in studied]
    return Addition(sections, readme(found) + _study_lines(studied), charts)


if __name__ == "__main__":
    sys.exit(documents.main(sys.argv[1:], addition))
