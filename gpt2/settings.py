"""What a training run is made of: presets, and one flat namespace for `--set key=value`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetfire.core import schema
from jetfire.core.errors import UsageError, unknown
from jetfire.core.files import Unreadable
from jetfire.nn import recipes

_LONG = {
    "accumulate": 64,
    "steps": 20000,
    "warmup": 700,
    "evaluate_every": 500,
    "evaluate_batches": 40,
    "checkpoint_every": 500,
}

PRESETS: dict[str, dict[str, Any]] = {
    # Bytes of text, for a CPU: 0.4 M parameters.
    "tiny": {
        "layers": 2,
        "heads": 4,
        "width": 128,
        "context": 64,
        "batch": 16,
        "steps": 50,
        "rate": 2e-3,
        "warmup": 5,
        "evaluate_every": 25,
        "evaluate_batches": 4,
        "checkpoint_every": 25,
        "tokenizer": "byte",
    },
    # As nanoGPT's train_shakespeare_char publishes it.
    "shakespeare-char": {
        "layers": 6,
        "heads": 6,
        "width": 384,
        "context": 256,
        "batch": 64,
        "dropout": 0.2,
        "steps": 5000,
        "rate": 1e-3,
        "warmup": 100,
        "beta2": 0.99,
        "evaluate_every": 250,
        "evaluate_batches": 20,
        "checkpoint_every": 1000,
        "data": "shakespeare-char",
    },
    # Rates of Brown et al. (2020), table 2.1; half a million tokens a step.
    "gpt2-124m": {"layers": 12, "heads": 12, "width": 768, **_LONG},
    "gpt2-350m": {"layers": 24, "heads": 16, "width": 1024, **_LONG, "rate": 3e-4},
    "gpt2-774m": {"layers": 36, "heads": 20, "width": 1280, **_LONG, "rate": 2.5e-4},
    "gpt2-1558m": {
        "layers": 48,
        "heads": 25,
        "width": 1600,
        **_LONG,
        "rate": 2e-4,
        "batch": 4,
        "accumulate": 128,
    },
}

# A run's file of them, and what that has beside them.
SETTINGS, PROCESSES = "settings.json", "processes"
# What --resume may change: the rest would make it another run.
PRECISION = ("recipe", "group", "block", "flow")
PACE = ("steps", "evaluate_every", "evaluate_batches", "checkpoint_every", "keep")
MANNER = ("compile", "graph", "deterministic", "parallel")
CHANGEABLE = frozenset({*PRECISION, *PACE, *MANNER})


Group = Literal[
    "recipe", "search", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"
]
Side = Literal["recipe", "32", "64", "128"]


@dataclass(frozen=True)
class Settings:
    """One run. A step is `accumulate` micro-batches a process of `batch` sequences each.

    Attributes:
        recipe: a name of `jetfire.nn.recipes.RECIPES`.
        group: of an INT4 recipe's Hadamard transforms, in place of its own.
        block, flow, head: of an INT8 recipe's products, of the flow between and of the output
            head's products, in place of its own.
        floor: the rate at the end of the cosine, as a fraction of `rate`.
        warmup: steps in which the rate rises linearly.
        decay: AdamW's weight decay, of matrices alone; clip: the largest gradient norm, 0 for any.
        evaluate_every, checkpoint_every: steps between, 0 for only the end.
        keep: checkpoints to keep beside the best.
        order: windows of tokens drawn at random, any of them again, or all of them shuffled, each
            once an epoch.
        data: a data set's name, a folder of prepared tokens, or text to prepare.
        tokenizer: what text is prepared with; auto is what that data usually gets.
        compile: torch.compile the model.
        graph: replay steps as CUDA graphs; auto does where it can, unless the model is compiled.
        deterministic: only algorithms that give the same bits again, as resuming bit for bit needs
            on a GPU, where attention's backward then takes longer: 40.3, not 29.3 ms at 124M.
    """

    preset: str
    layers: int
    heads: int
    width: int
    recipe: str = "int8"
    group: Group = "recipe"
    block: Side = "recipe"
    flow: Side = "recipe"
    head: Literal["recipe", "bf16", "32", "64", "128"] = "recipe"
    context: int = 1024
    dropout: float = 0.0
    batch: int = 8
    accumulate: int = 1
    steps: int = 1000
    rate: float = 6e-4
    floor: float = 0.1
    warmup: int = 50
    decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    evaluate_every: int = 250
    evaluate_batches: int = 20
    checkpoint_every: int = 250
    keep: int = 2
    seed: int = 0
    order: Literal["drawn", "shuffled"] = "drawn"
    data: str = "python"
    tokenizer: Literal["auto", "byte", "char", "gpt2"] = "auto"
    compile: bool = False
    graph: Literal["auto", "true", "false"] = "auto"
    deterministic: bool = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise _wrong(name, value, _range(low, high, value))
        if self.width % self.heads:
            raise UsageError(f"width={self.width}: expected a multiple of heads={self.heads}")
        if (parameters := 12 * self.layers * self.width**2) > MOST_PARAMETERS:
            raise UsageError(
                f"layers={self.layers} width={self.width}: {parameters:.2g} parameters: expected "
                f"at most {MOST_PARAMETERS:.2g}"
            )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def precision(self) -> recipes.Recipe:
        """Return the recipe, with the group and the blocks that were asked for.

        Raises:
            UsageError: there is no such recipe, or it has no groups, or no such one, or no blocks.
        """
        chosen: dict[str, Any] = {
            name: int(side)
            for name in ("block", "flow", "head")
            if (side := getattr(self, name)) not in ("recipe", "bf16")
        }
        if self.head == "bf16":
            chosen["head"] = "bf16"
        if self.group == "search":
            chosen["group"] = "search"
        elif self.group != "recipe":
            chosen["group"] = recipes.as_group(int(self.group))
        return recipes.get(self.recipe, **chosen)

    def rate_at(self, step: int) -> float:
        """The rate of a step, counted from 1: linear warm-up, then a cosine down to the floor."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        low = self.floor * self.rate
        return low + (self.rate - low) * 0.5 * (1 + math.cos(math.pi * share))


MOST_PARAMETERS = 10**13  # of the blocks: no machine holds more
# A checkpoint's folder has eight digits for its step.
MOST_STEPS = 10**8 - 1
# Far above what anyone trains, and far below what would take hours to refuse.
BOUNDS: dict[str, tuple[float, float]] = {
    "layers": (1, 1024),
    "heads": (1, 1024),
    "width": (1, 1 << 16),
    "context": (1, 1 << 20),
    **dict.fromkeys(("batch", "accumulate", "evaluate_batches", "keep"), (1, 1 << 16)),
    "steps": (1, MOST_STEPS),
    **dict.fromkeys(("warmup", "evaluate_every", "checkpoint_every"), (0, MOST_STEPS)),
    "seed": (0, 1 << 62),
    **dict.fromkeys(("rate", "decay", "clip"), (0.0, 1e6)),
    "floor": (0.0, 1.0),
    "dropout": (0.0, 0.999),
    "beta1": (0.0, 0.99999),
    "beta2": (0.0, 0.99999),
}


def _range(low: float, high: float, value: float) -> str:
    """Return the bounds as a text; the one that a value is beyond where the upper one is large."""
    least, most = (f"{end:.19g}" if end == int(end) else f"{end:g}" for end in (low, high))
    if high < 1e6:
        return f"{least} to {most}"
    return f"at least {least}" if value < low else f"at most {most}"


def _value(name: str, annotation: Any, given: Any) -> Any:
    """One setting from text, or from itself as JSON has it.

    Raises:
        UsageError: it is no value of that type.
    """
    if get_origin(annotation) is Literal:
        # As checkpoints had once what was yes or no.
        word = str(given).lower() if isinstance(given, bool) else given
        if word in get_args(annotation):
            return word
        raise unknown(f"{name}={_shown(given)}", str(given), get_args(annotation))
    if isinstance(given, str):
        return _parsed(name, annotation, given)
    if type(given) is annotation or (annotation is float and type(given) is int):
        return annotation(given)
    raise _wrong(name, given, _KINDS[annotation])


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_TRUTHS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _parsed(name: str, annotation: Any, text: str) -> Any:
    """One setting from text."""
    try:
        if annotation is str:  # logs and checkpoints hold it
            return schema.convert(text, schema.Line, Path(name))
        if not text.isascii() or "_" in text:  # Python's int and float take them
            raise ValueError
        value = _TRUTHS[text.lower()] if annotation is bool else annotation(text)
    except (ValueError, KeyError):
        raise _wrong(name, text, _KINDS[annotation]) from None
    except Unreadable:
        raise _wrong(name, text, "a line of at most 2000 characters, all of them text") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(name, text, "a finite number")
    return value


def _wrong(name: str, given: Any, expected: str) -> UsageError:
    return UsageError(f"{name}={_shown(given)}: expected {expected}")


def _shown(given: Any) -> str:
    text = str(given)
    return text if text.isprintable() and len(text) <= 100 else ascii(text)[:100]


def split(texts: Iterable[str]) -> dict[str, str]:
    """``key=value`` texts, several to a text where commas part them."""
    found: dict[str, str] = {}
    for text in texts:
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise UsageError(f"--set {part}: expected key=value")
            found[key] = value
    return found


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of their right types, by name; unknown names are usage errors."""
    hints = get_type_hints(Settings)
    for name in values:
        if name not in hints:
            raise unknown(f"no setting {name!r}", name, hints)
    return {name: _value(name, hints[name], value) for name, value in values.items()}


def make(preset: str, values: Mapping[str, Any]) -> Settings:
    """A preset with some of its settings changed.

    Raises:
        UsageError: there is no such preset, recipe or setting, or a value is out of bounds.
    """
    if preset not in PRESETS:
        raise unknown(f"no preset {preset!r}", preset, PRESETS)
    fields = {"preset": preset, **PRESETS[preset], **checked(values)}
    if "warmup" not in values and "steps" in values:  # a short run warms up for a twentieth of it
        fields["warmup"] = min(fields["warmup"], max(1, fields["steps"] // 20))
    return _settings(fields)


def _settings(fields: Mapping[str, Any]) -> Settings:
    for one in dataclasses.fields(Settings):
        if one.default is dataclasses.MISSING and one.name not in fields:
            raise UsageError(f"the setting {one.name} is missing")
    settings = Settings(**fields)
    precision = settings.precision()
    if precision.int4 is not None:
        reason = precision.int4.why_not(settings.width, settings.width)
        if reason is not None:
            raise UsageError(f"width={settings.width}: {reason}")
    return settings


def resumed(before: Mapping[str, Any], given: Mapping[str, Any], run: str) -> Settings:
    """The settings of a run that goes on, with those changed that may be.

    Args:
        before: as the checkpoint holds them, without `head` where it was made when every head was
            in BF16; given: what the user asked for now.

    Raises:
        UsageError: what was asked for would make it another run.
    """
    asked = checked(given)
    before = {"head": "recipe" if before.get("recipe") != "int8" else "bf16", **before}
    for name, value in asked.items():
        if name not in CHANGEABLE and name in before and before[name] != value:
            raise UsageError(
                f"--resume {name}={value}: {run} was begun with {name}={before[name]}; "
                f"leave it out, or begin another run with --init {run}"
            )
    return _settings({**checked(before), **asked})
