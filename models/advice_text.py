"""What `jetfire advise` prints: a table, JSON or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetfire.core import terminal
from jetfire.models.advice import Advice, Advised, pattern
from jetfire.report import output
from jetfire.report.rows import grouped
from jetfire.report.table import Table
from jetfire.report.text import NOTHING, fixed, times

SCHEMA = 1
_FEW = 6  # names in a line
_VERDICTS = {True: "convert", False: "keep", None: "unknown"}


def show(advised: Advised, recipes: Sequence[str], form: str) -> None:
    """Give what is advised.

    Args:
        recipes: in the order of the columns.
        form: table, json or csv.
    """
    output.give(
        form,
        _as_dict(advised),
        lambda: _print(advised, recipes),
        dict,
        lambda: [_line(advice, advised.recipe) for advice in advised.layers],
    )


def _layer(advice: Advice, recipe: str) -> dict[str, Any]:
    """Return a layer's figures; times in milliseconds of a step, SQNR in dB."""
    layer, cost = advice.layer, advice.cost(recipe)
    return {
        "name": layer.name,
        "m": layer.m,
        "n": layer.n,
        "k": layer.k,
        "calls": layer.calls,
        "bf16_ms": _rounded(cost.bf16),
        "fp8_ms": _rounded(cost.fp8),
        "int8": {
            name: {
                "products_ms": _rounded(c.products),
                "rest_ms": _rounded(c.rest),
                "missing": list(c.missing),
            }
            for name, c in advice.costs.items()
        },
        "sqnr_db": {
            name: {"y": _rounded(s.y), "dx": _rounded(s.dx), "dw": _rounded(s.dw)}
            for name, s in advice.sqnr.items()
        },
        "verdict": _VERDICTS[advice.convert],
        "why": advice.why,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _as_dict(advised: Advised) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": dict(advised.model),
        "times": advised.source,
        "sqnr_of": advised.tokens or None,
        "recipe": advised.recipe,
        "skip": advised.skip,
        "totals": {
            "layers": len(advised.layers),
            "known": len(advised.known),
            "bf16_ms": _rounded(advised.bf16_ms),
            "advised_ms": _rounded(advised.advised_ms),
            "run": advised.run,
            "step_ms": _rounded(advised.step_ms),
            "predicted_step_ms": _rounded(advised.predicted_ms),
        },
        "layers": [_layer(advice, advised.recipe) for advice in advised.layers],
        "left": dict(advised.left),
    }


def _line(advice: Advice, recipe: str) -> dict[str, Any]:
    """Return a layer as CSV has it, with columns such as ``int8-block64.products_ms``."""
    found = _layer(advice, recipe)
    times, exact = found.pop("int8"), found.pop("sqnr_db")
    for name, cost in times.items():
        found |= {f"{name}.{key}": cost[key] for key in ("products_ms", "rest_ms")}
    for name, decibels in exact.items():
        found |= {f"{name}.sqnr_{key}": value for key, value in decibels.items()}
    return found


def _print(advised: Advised, recipes: Sequence[str]) -> None:
    console, table = terminal.console(width=160), _table(advised, recipes)
    sizes = " ".join(f"{name}={value}" for name, value in advised.model.items())
    console.print(terminal.styled(sizes, "bold"), soft_wrap=True)
    console.print(f"times in ms a step: {advised.source}", soft_wrap=True)
    console.print(table.rich(folded=(len(table.head) - 1,)))
    for line in _summary(advised):
        console.print(line, soft_wrap=True)


def _table(advised: Advised, recipes: Sequence[str]) -> Table:
    """Return a line per layer; of layers that only their number tells apart, one together."""

    def alike(advice: Advice) -> tuple[Any, ...]:
        layer = advice.layer
        return pattern(layer.name), layer.m, layer.n, layer.k, advice.convert

    heads = ("layer", "", "m×n×k", "BF16", "FP8", *recipes, "SQNR dB: y dx dW", "verdict")
    groups = grouped(advised.layers, alike).values()
    lines = [_cells(same, advised, recipes) for same in groups]
    return Table(heads, lines, (0, len(heads) - 1))


def _cells(same: Sequence[Advice], advised: Advised, recipes: Sequence[str]) -> list[str]:
    """Return the texts of layers that are repeated: times of one, the worst one's SQNR."""
    first = same[0]
    layer, cost, several = first.layer, first.cost(advised.recipe), len(same) > 1
    texts = [pattern(layer.name) if several else layer.name, f"{len(same)} ×" if several else ""]
    texts += [f"{layer.m}×{layer.n}×{layer.k}", fixed(cost.bf16, 3), fixed(cost.fp8, 3)]
    for name in recipes:
        products, total = first.costs[name].products, first.costs[name].total
        known = products if total is None else total
        unknown = " + ?" if total is None and products is not None else ""
        texts.append(f"{fixed(known, 3)}{unknown}")
    exact = [advice.sqnr[advised.recipe] for advice in same if advised.recipe in advice.sqnr]
    worst = min(exact, key=lambda sqnr: sqnr.least, default=None)
    texts.append(NOTHING if worst is None else f"{worst.y:.1f} {worst.dx:.1f} {worst.dw:.1f}")
    return [*texts, f"{_VERDICTS[first.convert]}: {first.why}"]


def _summary(advised: Advised) -> list[str]:
    known, every = len(advised.known), len(advised.layers)
    lines = []
    if advised.tokens:
        lines.append(f"SQNR is {advised.recipe}'s, of {advised.tokens}")
    if advised.left:
        text = "; ".join(f"{n}: {why}" for n, why in list(advised.left.items())[:_FEW])
        lines.append(f"{len(advised.left)} other modules have a matrix and stay: {text}")
    if known:
        gain = f"{advised.bf16_ms:.3f} → {advised.advised_ms:.3f} ms a step"
        lines.append(f"{known} of {every} layers are known: {gain} in what they launch")
    if advised.step_ms is not None and advised.predicted_ms is not None:
        ratio = advised.step_ms / advised.predicted_ms
        step = f"{advised.step_ms:.2f} → {advised.predicted_ms:.2f} ms ({times(ratio)})"
        lines.append(f"predicted step, run {advised.run}: {step}")
    return [*lines, _advice(advised)]


def _advice(advised: Advised) -> str:
    """Return the call that converts what is to be converted."""
    count, unknown = (sum(a.convert is verdict for a in advised.layers) for verdict in (True, None))
    beside = f"; {unknown} layers are unknown" if unknown else ""
    if not count:
        return f"convert nothing{beside}"
    names = ", ".join(f'"{pattern}"' for pattern in advised.keep)
    text = f", keep=[{names}]" if names else ""
    return f'convert(model, "{advised.recipe}"{text}): {count} layers gain{beside}'
