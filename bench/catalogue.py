"""What there is to measure, for `jetfire list`: ops, kernels, workloads, peers and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jetfire.core import registry, terminal, workloads
from jetfire.measure import peers as peer_ops
from jetfire.measure.data import DISTRIBUTIONS


def show() -> None:
    """Print the catalogue, or give it as a result to a program."""
    found = catalogue()
    terminal.result(found, lambda: print(listing(found)))


def catalogue() -> dict[str, Any]:
    """Return every op with its kernels, modes and fields; workloads, peers and data, by name."""
    ops = {}
    for name in registry.names():
        op, shown = registry.get(name), []
        for one in dataclasses.fields(op.Problem):
            default = str(one.default)
            default = default.lower() if isinstance(one.default, bool | None) else default
            missing = one.default is dataclasses.MISSING
            shown.append(one.name if missing else f"{one.name}={default}")
        ops[name] = {
            "summary": op.summary,
            "kernels": list(registry.kernel_names(name)),
            "modes": list(op.modes),
            "fields": shown,
        }
    models = {
        name: f"width {model.width}, hidden {model.hidden}, {model.tokens} tokens"
        for name, model in workloads.MODELS.items()
    }
    layers = {
        name: "m n k " + ", ".join(f"{x.tokens} {x.hidden} {x.width}" for x in found)
        for name, found in workloads.LAYERS.items()
    }
    sizes = {
        name: f"sizes {', '.join(map(str, found))}"
        for name, found in (("square", workloads.SQUARES), ("ragged", workloads.RAGGED))
    }
    return {
        "ops": ops,
        "workloads": {**models, **layers, **sizes},
        "peers": dict(peer_ops.NAMES),
        "data": list(DISTRIBUTIONS),
    }


def listing(found: Mapping[str, Any]) -> str:
    """Return the catalogue as text."""
    lines = ["ops"]
    width = max(map(len, found["ops"]))
    for name, op in found["ops"].items():
        lines.append(f"  {name:<{width}} {op['summary']}")
        lines.append(f"  {'':<{width}} kernels: {', '.join(op['kernels']) or 'none'}")
        lines.append(
            f"  {'':<{width}} modes: {', '.join(op['modes'])}; fields: {' '.join(op['fields'])}"
        )
    lines.append("workloads")
    lines += [f"  {name:<12} {text}" for name, text in found["workloads"].items()]
    lines.append("peers")
    lines += [f"  {name:<20} {what}" for name, what in found["peers"].items()]
    lines.append(f"data\n  {', '.join(found['data'])}")
    return "\n".join(lines)
