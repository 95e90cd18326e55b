"""What the documents and the terminal say of a study of recipes."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from jetfire.report.table import Section, Table
from jetfire.report.text import NOTHING, fixed, plural

if TYPE_CHECKING:
    from jetfire.gpt2.training.study_record import Difference, RecipeLosses, StudyRecord


def table(record: StudyRecord, of: str = "") -> Table:
    """Return a line per recipe.

    Args:
        of: what stands before the head.
    """
    minus = f"minus {record['base']}'s"
    head = [f"{of}recipe", "seeds", "training loss", minus, "validation loss", minus, "ms per step"]
    return Table(
        head, [[_label(record, name), *_row(record["recipes"][name])] for name in record["recipes"]]
    )


def _label(record: StudyRecord, recipe: str) -> str:
    """Return a recipe's name, and its runs' devices where they are not those of the base's."""
    devices = {
        name: list(dict.fromkeys(run["device"] for run in found["runs"]))
        for name, found in record["recipes"].items()
    }
    own = devices[recipe]
    if own == devices.get(record["base"], own):
        return recipe
    return f"{recipe} ({', '.join(own)})"


def lines(record: StudyRecord) -> list[dict[str, Any]]:
    """Return a record per run, for CSV, each with how its recipe differs from the base."""
    return [
        {"recipe": name, **run, **_differences(found)}
        for name, found in record["recipes"].items()
        for run in found["runs"]
    ]


def _differences(found: RecipeLosses) -> dict[str, Any]:
    return {
        "paired_difference": found["paired_difference"] or {},
        "validation_difference": found["validation_difference"] or {},
    }


def document(record: StudyRecord) -> dict[str, Any]:
    """Return a record as JSON has it, with the means over each recipe's runs."""
    recipes = {name: {**found, "means": means(found)} for name, found in record["recipes"].items()}
    return {**record, "recipes": recipes}


def means(found: RecipeLosses) -> dict[str, float | None]:
    """Return a recipe's means over its runs; no time where they have none in common."""
    runs = found["runs"]
    ms = [run["ms"] for run in runs if run["ms"] is not None]
    if len({run["settings"].get("compile") for run in runs}) > 1:
        ms = []  # runs of which torch.compile made some have no time in common
    return {
        "training_loss": fmean(run["training_loss"] for run in runs),
        "final_validation_loss": fmean(run["final_validation_loss"] for run in runs),
        "ms": fmean(ms) if ms else None,
    }


def readme(record: StudyRecord) -> Table:
    """Return the README's table."""
    return table(record, f"{_model(record)}, {record['tokens'] / 1e6:.1f} M tokens: ")


def section(record: StudyRecord) -> Section:
    s, data = record["settings"], record["data"]
    text = (
        f"{s['steps']} steps of {record['tokens'] // s['steps']} tokens, "
        f"{record['tokens'] / 1e6:.1f} M in all, of {data['name']}'s "
        f"{data['tokens']['train'] / 1e6:.1f} M. {explained(record)}"
    )
    return Section(f"Study of recipes, {_model(record)}", text, [table(record)])


def _model(record: StudyRecord) -> str:
    """Return the preset; with planted outliers how large they are, and the rate, which decides."""
    settings = record["settings"]
    if not (planted := settings.get("outliers")):
        return record["preset"]
    return f"{record['preset']} with outliers ×{planted:g}, rate {settings['rate']:g}"


def _row(found: RecipeLosses) -> list[str]:
    count, mean = len(found["runs"]), means(found)
    return [
        str(count),
        fixed(mean["training_loss"], 4),
        _difference(found["paired_difference"], count),
        fixed(mean["final_validation_loss"], 4),
        _difference(found["validation_difference"], count),
        fixed(mean["ms"], 1),
    ]


def _difference(found: Difference | None, runs: int) -> str:
    if found is None:
        return NOTHING
    text = f"{found['mean']:+.4f}"
    if found["low"] is not None:
        text += f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    pairs = len(found["seeds"])
    return text if pairs == runs else f"{text}, {pairs} of them"


def explained(record: StudyRecord) -> str:
    """Return what is paired and how, in a line."""
    first, last = record["window"]
    found = [one["paired_difference"] for one in record["recipes"].values()]
    over = {one["over"] for one in found if one is not None}
    often = f"{record['epochs']:.2f} epochs"
    parts = [
        f"Paired by seed: the same initial weights, the same batches in the same order. Training "
        f"loss is the mean of steps {first} to {last}, "
        f"{'each token read once' if record['fresh'] else 'of tokens read again too'} ({often}); "
        f"validation loss is the last. Nats per token."
    ]
    if "seeds" in over:
        parts.append("Brackets: 95%, Student's t over seeds.")
    if "steps" in over:
        whose = "Of a single seed brackets are" if "seeds" in over else "Brackets are"
        parts.append(f"{whose} over its steps, and say nothing of another seed.")
    if record["unfinished"]:
        parts.append(f"{plural(len(record['unfinished']), 'run is', 'runs are')} not finished.")
    return " ".join(parts)
