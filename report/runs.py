"""What the documents say of training runs: tables and plots of their logs, and of studies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from jetfire.nn.recipes import RECIPES
from jetfire.report import study
from jetfire.report.chart import Chart
from jetfire.report.curves import Curve, CurveGroup, image
from jetfire.report.documents import Addition
from jetfire.report.rows import grouped
from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, fixed, times

if TYPE_CHECKING:
    from jetfire.gpt2.training.study_record import StudyRecord

FOLDER, BASE = "training", "bf16"
Loss = Literal["final", "best"]


@dataclass(frozen=True)
class FinishedRun:
    """A finished run's log."""

    file: Path
    records: Sequence[Mapping[str, Any]]

    @property
    def ended(self) -> bool:
        """Whether it came to its end, and was evaluated."""
        kinds = {record["kind"] for record in self.records}
        return self.records[-1]["kind"] == "end" and {"evaluation", "step"} <= kinds

    @property
    def head(self) -> Mapping[str, Any]:
        return self.records[0]

    def setting(self, name: str) -> Any:
        return self.head["settings"][name]

    def _of(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def final(self) -> float:
        return float(self._of("evaluation")[-1]["loss"])

    @property
    def best(self) -> float:
        return min(float(record["loss"]) for record in self._of("evaluation"))

    @property
    def shared(self) -> bool:
        """Whether its device had other runs at any time, so that no step's time is its own.

        `jetfire.gpt2.training.keep` may have been told so later.
        """
        at_once = [head.get("runs_at_once", 1) for head in [*self._of("run"), *self._of("resume")]]
        return max(*at_once, self.head.get("kept", {}).get("runs_at_once", 1)) > 1

    @property
    def ms(self) -> float | None:
        """Milliseconds a step, the median; None where the run had not the GPU to itself."""
        if self.shared:
            return None
        return median(record["ms"] for record in self._of("step"))

    @property
    def tokens(self) -> int:
        """Tokens of one step, of all processes together."""
        s, processes = self.head["settings"], self.head["device"]["processes"]
        return int(s["batch"] * s["accumulate"] * s["context"] * processes)

    @property
    def peak_gib(self) -> float:
        return max(float(record["peak_gib"]) for record in self._of("step"))

    @property
    def how(self) -> str:
        """The way in which its steps were run."""
        if self.setting("graph"):
            return "CUDA graph"
        return "torch.compile" if self.setting("compile") else "eager"

    def curve(self) -> Curve:
        return Curve.of(self.file, self.records, self.setting("recipe"))


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one preset and recipe, of different seeds."""

    name: str
    runs: list[FinishedRun]

    def losses(self, kind: Loss) -> list[float]:
        return [run.final if kind == "final" else run.best for run in self.runs]

    def loss(self, kind: Loss) -> str:
        """The mean, and of several runs the lowest and the highest."""
        values = self.losses(kind)
        text = f"{fmean(values):.4f}"
        return text if len(values) == 1 else f"{text} ({min(values):.4f} to {max(values):.4f})"

    def over(self, base: RecipeRuns | None, kind: Loss) -> str:
        """The mean over the base's, in nats and in %."""
        if base is None or base is self:
            return NOTHING
        ours, theirs = fmean(self.losses(kind)), fmean(base.losses(kind))
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
        """Return what was trained on what, by the runs' headers, less what differs among them."""
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
            "nats per token, of the same windows of validation tokens for all."
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

    def section(self, plot: str) -> Section:
        timed = any(recipe.ms is not None for recipe in self.recipes)
        over = f"over {BASE}'s"
        head = ["recipe", "as", "final validation loss", over, "best validation loss", over]
        speed = ["ms per step", "tokens/s", f"× {BASE}"] if timed else []
        lines = [
            [
                recipe.name,
                recipe.runs[0].how,
                recipe.loss("final"),
                recipe.over(self.base, "final"),
                recipe.loss("best"),
                recipe.over(self.base, "best"),
                *(_speed(recipe, self.base) if timed else []),
                fixed(max(run.peak_gib for run in recipe.runs), 2),
            ]
            for recipe in self.recipes
        ]
        table = Table([*head, *speed, "peak GiB"], lines)
        alt = f"Loss of {self.name} by step, a line per recipe; below, validation loss {over}"
        return Section(f"Training runs, {self.name}", self.text(), [table], plot, alt)

    def chart(self, file: Path) -> Chart:
        groups = [CurveGroup.of(r.name, [run.curve() for run in r.runs]) for r in self.recipes]
        content = [
            [c.label, c.steps, c.losses, c.evaluated, c.validation]
            for group in groups
            for c in (group.mean, *group.runs)
        ]
        device = self.runs[0].head["device"]["name"]
        draw = partial(image, groups, title=f"{self.name}\n{device}", first=self.recipes[0].name)
        path = file.with_name(f"{file.stem}-{FOLDER}-{self.plot}.svg")
        return Chart(path, content, draw)


def _speed(recipe: RecipeRuns, base: RecipeRuns | None) -> list[str]:
    """Return ms, tokens/s and the base's time over this one's."""
    ms = recipe.ms
    if ms is None:
        return [NOTHING] * 3
    theirs = base.ms if base is not None and base is not recipe else None
    ratio = times(None if theirs is None else theirs / ms)
    return [fixed(ms, 2), fixed(recipe.runs[0].tokens / ms * 1e3), ratio]


def presets(runs: Iterable[FinishedRun]) -> list[Preset]:
    """Return the runs by preset and recipe."""
    found = []
    for name, same in grouped(runs, lambda run: run.setting("preset")).items():
        recipes = grouped(same, lambda run: run.setting("recipe"))
        ordered = sorted(recipes, key=_order)
        found.append(Preset(name, [RecipeRuns(recipe, recipes[recipe]) for recipe in ordered]))
    return found


def _order(recipe: str) -> tuple[int, str]:
    """Return a key that sorts recipes as they are listed, BF16 first, unknown ones last."""
    known = list(RECIPES)
    return known.index(recipe) if recipe in known else len(known), recipe


def readme(found: Sequence[Preset]) -> Table:
    """Return the README's table."""
    head = ["training run", "seeds", "best validation loss", f"over {BASE}'s"]
    lines = [
        [
            f"{preset.name}, {preset.runs[0].setting('steps')} steps, {recipe.name}",
            str(len(recipe.runs)),
            recipe.loss("best"),
            recipe.over(preset.base, "best"),
        ]
        for preset in found
        for recipe in preset.recipes
    ]
    return Table(head, lines)


def addition(runs: Iterable[FinishedRun], studies: Sequence[StudyRecord], file: Path) -> Addition:
    """Return what runs and studies add to the documents of a results file."""
    found = presets(runs)
    charts = [preset.chart(file) for preset in found]
    sections = [
        preset.section(chart.path.name) for preset, chart in zip(found, charts, strict=True)
    ]
    return Addition(
        [*sections, *map(study.section, studies)],
        [*map(study.readme, studies), readme(found)],
        charts,
    )
