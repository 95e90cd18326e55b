"""Loss curves of several runs over each other: an image by matplotlib, a page by Plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetfire.gpt2 import log
from jetfire.ops.errors import UsageError

IMAGES, PAGE = (".png", ".svg", ".pdf"), ".html"


@dataclass(frozen=True)
class Curve:
    """One run: steps and losses in nats, of every step and of every evaluation."""

    label: str
    steps: list[int]
    losses: list[float]
    evaluated: list[int]
    validation: list[float]

    @classmethod
    def of(cls, path: Path) -> Curve:
        records = log.read(path)
        steps = [r for r in records if r["kind"] == "step"]
        evaluations = [r for r in records if r["kind"] == "evaluation"]
        if not steps:
            raise UsageError(f"{path}: no step is in its log yet")
        folder = (path if path.is_dir() else path.parent).resolve().name
        settings = records[0]["settings"]
        label = f"{folder}: {settings['preset']} {settings['recipe']}"
        if evaluations:
            label += f", best validation {min(r['loss'] for r in evaluations):.4f}"
        return cls(
            label, [r["step"] for r in steps], [r["loss"] for r in steps],
            [r["step"] for r in evaluations], [r["loss"] for r in evaluations],
        )  # fmt: skip

    def smooth(self) -> list[float]:
        """A running mean over about a fiftieth of the run, unbiased at its start."""
        keep = 1 - 1 / max(1.0, len(self.losses) / 50)
        mean, weight, out = 0.0, 0.0, []
        for loss in self.losses:
            mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
            out.append(mean / weight)
        return out


def apart(base: Curve, other: Curve) -> tuple[list[int], list[float]]:
    """Steps that both evaluated, and there the other's validation loss above the base's, in %."""
    known = dict(zip(base.evaluated, base.validation, strict=True))
    both = [(s, v) for s, v in zip(other.evaluated, other.validation, strict=True) if s in known]
    return [s for s, _ in both], [100 * (v / known[s] - 1) for s, v in both]


def plot(runs: Sequence[Path], output: Path) -> None:
    """Draw the runs' logs to a file of one of the kinds that its suffix may name.

    Raises:
        UsageError: there is no run, no such kind, or the file cannot be written.
    """
    if not runs:
        raise UsageError("plot: expected at least one run's folder")
    kind = output.suffix.lower()
    if kind not in (*IMAGES, PAGE):
        raise UsageError(f"-o {output}: expected a file named {', '.join(IMAGES)} or {PAGE}")
    curves = [Curve.of(path) for path in runs]
    try:
        _page(curves, output) if kind == PAGE else _image(curves, output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Losses to show: all but the first steps' fall, which would flatten the rest."""
    shown = [loss for c in curves for loss in c.smooth()[len(c.losses) // 20 :] + c.validation]
    low, high = min(shown), max(shown)
    return low - 0.03 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3


def _image(curves: Sequence[Curve], output: Path) -> None:
    from matplotlib.figure import Figure

    from jetfire.bench.plot import KERNEL_COLOURS, plain, save

    below = len(curves) > 1 and any(apart(curves[0], c)[0] for c in curves[1:])
    fig = Figure(figsize=(9, 7 if below else 5), layout="constrained")
    axes = fig.subplots(2 if below else 1, 1, squeeze=False, sharex=True,
                        height_ratios=[3, 1] if below else [1])[:, 0]  # fmt: skip
    for index, curve in enumerate(curves):
        colour = KERNEL_COLOURS[index % len(KERNEL_COLOURS)]
        axes[0].plot(curve.steps, curve.losses, color=colour, linewidth=0.6, alpha=0.25)
        axes[0].plot(curve.steps, curve.smooth(), color=colour, linewidth=1.4, label=curve.label)
        axes[0].plot(curve.evaluated, curve.validation, color=colour, linestyle="--", marker="o",
                     markersize=3.5, linewidth=0.8)  # fmt: skip
        if below and index:
            axes[1].plot(*apart(curves[0], curve), color=colour, marker="o", markersize=3.5)
    axes[0].set_ylim(*_limits(curves))
    axes[0].set_ylabel("loss (nats a token); dashed: validation")
    axes[0].legend(frameon=False, fontsize=9)
    if below:
        axes[1].axhline(0, color=KERNEL_COLOURS[0], linewidth=1)
        axes[1].set_ylabel("validation\nover the first's (%)")
    for ax in axes:
        plain(ax)
    axes[-1].set_xlabel("step")
    save(fig, output, "; ".join(curve.label for curve in curves))


def _page(curves: Sequence[Curve], output: Path) -> None:
    import plotly.graph_objects as go

    from jetfire.bench.plot import KERNEL_COLOURS
    from jetfire.bench.results import write_text

    figure = go.Figure()
    for index, curve in enumerate(curves):
        line = {"color": KERNEL_COLOURS[index % len(KERNEL_COLOURS)], "width": 1.6}
        shared = {"legendgroup": str(index), "line": line}
        figure.add_scatter(x=curve.steps, y=curve.smooth(), name=curve.label, **shared)
        figure.add_scatter(x=curve.steps, y=curve.losses, opacity=0.25, hoverinfo="skip",
                           showlegend=False, **shared)  # fmt: skip
        if curve.evaluated:
            figure.add_scatter(
                x=curve.evaluated, y=curve.validation, mode="lines+markers", showlegend=False,
                name=f"{curve.label} (validation)", legendgroup=str(index),
                line={**line, "dash": "dash", "width": 1},
            )  # fmt: skip
    figure.update_layout(
        template="plotly_white", xaxis_title="step", hovermode="x unified",
        yaxis={"title": "loss (nats a token); dashed: validation", "range": _limits(curves)},
        legend={"orientation": "h", "y": -0.15},
    )  # fmt: skip
    write_text(output, figure.to_html(include_plotlyjs=True, full_html=True))
