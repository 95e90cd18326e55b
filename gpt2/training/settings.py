"""What a training run is made of: presets, and one flat namespace for `--set key=value`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field

from jetfire.core import schema
from jetfire.core.errors import UsageError, unknown
from jetfire.core.files import Unreadable
from jetfire.core.problem import value_text
from jetfire.gpt2.model.shape import (
    SHAPES,
    Context,
    Depth,
    Dropout,
    Family,
    Hidden,
    LlamaShape,
    Shape,
    SomeHeads,
    Width,
)
from jetfire.nn import recipes
from jetfire.report.text import COUNTS, scaled

# As `--set` has settings, which is what a preset stands for.
_LONG = "steps=20000,warmup=700,evaluate_every=500,evaluate_batches=40,checkpoint_every=500"
_PRESETS = {
    # Bytes of text, for a CPU: 0.4 M parameters.
    "tiny": "layers=2,heads=4,width=128,context=64,batch=16,steps=50,rate=2e-3,warmup=5,"
    "evaluate_every=25,evaluate_batches=4,checkpoint_every=25,tokenizer=byte",
    # As nanoGPT's train_shakespeare_char publishes it.
    "shakespeare-char": "layers=6,heads=6,width=384,context=256,batch=64,dropout=0.2,steps=5000,"
    "rate=1e-3,warmup=100,beta2=0.99,evaluate_every=250,evaluate_batches=20,"
    "checkpoint_every=1000,data=shakespeare-char",
    # Rates of Brown et al. (2020), table 2.1; half a million tokens per step.
    "gpt2-124m": f"{_LONG},accumulate=64,layers=12,heads=12,width=768",
    "gpt2-350m": f"{_LONG},accumulate=64,layers=24,heads=16,width=1024,rate=3e-4",
    "gpt2-774m": f"{_LONG},accumulate=64,layers=36,heads=20,width=1280,rate=2.5e-4",
    "gpt2-1558m": f"{_LONG},layers=48,heads=25,width=1600,rate=2e-4,batch=4,accumulate=128",
    # Bytes of text, for a CPU: 1.3 M parameters.
    "tiny-llama": "family=llama,tied=false,layers=2,heads=4,kv_heads=2,width=256,hidden=512,"
    "context=64,batch=16,steps=50,rate=2e-3,warmup=5,evaluate_every=25,evaluate_batches=4,"
    "checkpoint_every=25,tokenizer=byte",
    # Blocks of as many weights as gpt2-124m's, and a head of its own: 162 M parameters.
    "llama-160m": f"{_LONG},accumulate=64,family=llama,tied=false,layers=12,heads=12,width=768,"
    "hidden=2048",
    # TinyLlama 1.1B's sizes and rate (Zhang et al., 2024, arXiv 2401.02385).
    "llama-1b": f"{_LONG},accumulate=64,family=llama,tied=false,layers=22,heads=32,kv_heads=4,"
    "width=2048,hidden=5632,context=2048,rate=4e-4,batch=4",
}

# A run's file of them, and what that has beside them.
SETTINGS, PROCESSES = "settings.json", "processes"
# What --resume may change: the rest would make it another run.
PRECISION = ("recipe", "group", "block", "flow", "logits", "optimizer", "weights")
PACE = ("steps", "evaluate_every", "evaluate_batches", "checkpoint_every", "keep", "watch")
MANNER = ("compile", "graph", "deterministic", "parallel")
CHANGEABLE = frozenset({*PRECISION, *PACE, *MANNER})
# What earlier versions, which knew nothing else, did not say.
EARLIER: dict[str, Any] = {"family": "gpt2", "kv_heads": 0, "hidden": 0, "tied": True}
EARLIER |= {"optimizer": "adamw", "weights": "fp32", "outliers": 0.0, "logits": "recipe"}

# Looks at layers in a run: their lines are 170 MB of the 256 that are read of a log.
MOST_LOOKS = 500_000
MOST_PARAMETERS = 10**13  # of the blocks: no machine holds more
# A checkpoint's folder has eight digits for its step.
MOST_STEPS = 10**8 - 1
# Types with bounds far above what anyone trains.
Some = Annotated[int, Field(ge=1, le=1 << 16)]
StepNumber = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Every = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seed = Annotated[int, Field(ge=0, le=1 << 62)]
Amount = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, le=0.99999)]
Group = Literal[
    "recipe", "search", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"
]
Side = Literal["recipe", "32", "64", "128"]
Optimizer = Literal["adamw", "adamw8"]
# Bits of a number of each optimizer's moments.
MOMENT_BITS: dict[str, int] = dict(zip(get_args(Optimizer), (32, 8), strict=True))


@dataclass(frozen=True)
class Settings:
    """One run. A step is `accumulate` micro-batches a process of `batch` sequences each.

    Attributes:
        recipe: a name of `jetfire.nn.recipes.RECIPES`.
        family, kv_heads, hidden, tied: as `LlamaShape` has them; the last three are of Llama alone.
        group: of an INT4 recipe's Hadamard transforms, in place of its own.
        block, flow, head: of an INT8 recipe's products, of the flow between and of the output
            head's products, in place of its own.
        logits: whether the logits of a head in INT8 stand whole, or the loss and its gradient are
            made of them in parts, in place of the recipe's own.
        floor: the rate at the end of the cosine, as a fraction of `rate`.
        warmup: steps in which the rate rises linearly.
        optimizer: AdamW with moments in fp32, or in 8 bits.
        weights: fp32, or bf16 with stochastic rounding of all whose moments are in 8 bits.
        decay: AdamW's weight decay, of matrices alone; clip: the largest gradient norm, 0 for any.
        evaluate_every, checkpoint_every: steps between, 0 for only the end.
        keep: checkpoints to keep beside the best.
        watch: steps between looks at what INT8 does to each layer, 0 for none.
        outliers: as `jetfire.gpt2.model.outliers.plant` makes them at the beginning, 0 for none.
        order: windows of tokens drawn at random, any of them again, or all of them shuffled, each
            once an epoch.
        data: a data set's name, a folder of prepared tokens, or text to prepare.
        tokenizer: what text is prepared with; auto is what that data usually gets.
        compile: torch.compile the model.
        graph: replay steps as CUDA graphs; auto does on a GPU, unless the model is compiled or
            sharded.
        deterministic: only algorithms that give the same bits again, as resuming bit for bit needs
            on a GPU, where attention's backward then takes longer: 40.3, not 29.3 ms at 124M.
    """

    preset: str
    layers: Depth
    heads: Depth
    width: Width
    recipe: str = "int8"
    group: Group = "recipe"
    block: Side = "recipe"
    flow: Side = "recipe"
    head: Literal["recipe", "bf16", "32", "64", "128"] = "recipe"
    logits: Literal["recipe", "whole", "parts"] = "recipe"
    context: Context = 1024
    dropout: Dropout = 0.0
    family: Family = "gpt2"
    kv_heads: SomeHeads = 0
    hidden: Hidden = 0
    tied: bool = True
    batch: Some = 8
    accumulate: Some = 1
    steps: StepNumber = 1000
    rate: Amount = 6e-4
    floor: Share = 0.1
    warmup: Every = 50
    optimizer: Optimizer = "adamw"
    weights: Literal["fp32", "bf16"] = "fp32"
    decay: Amount = 0.1
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    clip: Amount = 1.0
    evaluate_every: Every = 250
    evaluate_batches: Some = 20
    checkpoint_every: Every = 250
    keep: Some = 2
    watch: Every = 0
    outliers: Amount = 0.0
    seed: Seed = 0
    order: Literal["drawn", "shuffled"] = "drawn"
    data: str = "python"
    tokenizer: Literal["auto", "byte", "char", "gpt2"] = "auto"
    compile: bool = False
    graph: Literal["auto", "true", "false"] = "auto"
    deterministic: bool = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"

    def __post_init__(self) -> None:
        for name, (_, bounds) in _types().items():
            value = getattr(self, name)
            if bounds and not bounds[0] <= value <= bounds[1]:
                raise _wrong(name, value, _range(*bounds, value))
        shape = self.shape(1)
        for one in dataclasses.fields(LlamaShape):
            if not hasattr(shape, one.name) and (value := getattr(self, one.name)) != one.default:
                given = f"{one.name}={value_text(value)}"
                raise UsageError(f"{given} with family={self.family}: expected family=llama")
        shape.check(self.precision)
        self._check_weights()
        if (parameters := shape.block_weights) > MOST_PARAMETERS:
            raise UsageError(
                f"layers={self.layers} width={self.width}: {scaled(parameters, COUNTS)} "
                f"parameters: expected at most {scaled(MOST_PARAMETERS, COUNTS)}"
            )
        for name in _sizes(type(shape)):  # for 0 the size that it stands for
            object.__setattr__(self, name, getattr(shape, name))

    def _check_weights(self) -> None:
        if self.weights == "fp32":
            return
        wanted = None
        recipe = self.precision
        if recipe.block is None or recipe.flow is None:
            wanted = f"recipe={self.recipe}: expected an INT8 recipe without fallback"
        elif self.moment_bits != 8:
            wanted = f"optimizer={self.optimizer}: expected optimizer=adamw8"
        elif self.parallel == "fsdp":  # which shards parameters of one dtype together
            wanted = "parallel=fsdp: expected parallel=none or ddp"
        if wanted:
            raise UsageError(f"weights={self.weights} with {wanted}")

    @property
    def moment_bits(self) -> int:
        """Bits of a number of the optimizer's moments."""
        return MOMENT_BITS[self.optimizer]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def shape(self, vocabulary: int) -> Shape:
        """Return the sizes of the model."""
        kind = SHAPES[self.family]
        return kind(vocabulary=vocabulary, **{name: getattr(self, name) for name in _sizes(kind)})

    @cached_property
    def precision(self) -> recipes.Recipe:
        """The recipe, with the group and the blocks that were asked for.

        Raises:
            UsageError: there is no such recipe, or it has no groups, or no such one, or no blocks.
        """
        chosen: dict[str, Any] = {
            name: int(value) if value.isdecimal() else value
            for name in ("block", "flow", "head", "logits", "group")
            if (value := getattr(self, name)) != "recipe"
        }
        return recipes.get(self.recipe, **chosen)

    def rate_at(self, step: int) -> float:
        """The rate of a step, counted from 1: linear warm-up, then a cosine down to the floor."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        low = self.floor * self.rate
        return low + (self.rate - low) * 0.5 * (1 + math.cos(math.pi * share))


def _sizes(kind: type[Shape]) -> tuple[str, ...]:
    """The settings that are a shape's sizes."""
    return tuple(one.name for one in dataclasses.fields(kind) if one.name != "vocabulary")


@cache
def _types() -> dict[str, tuple[Any, tuple[float, float] | None]]:
    """The settings' types, and of a number the least and the largest value."""
    found = {}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        bounds = None
        if get_origin(hint) is Annotated:
            hint, field = get_args(hint)
            bounds = field.metadata[0].ge, field.metadata[1].le
        found[name] = hint, bounds
    return found


def _range(low: float, high: float, value: float) -> str:
    """Return the bounds as a text; the one that a value is beyond where the upper one is large."""
    least, most = (f"{end:.19g}" if end == int(end) else f"{end:g}" for end in (low, high))
    if high < 1e6:
        return f"{least} to {most}"
    return f"at least {least}" if value < low else f"at most {most}"


_KINDS = {bool: "true or false", int: "an integer", float: "a number"}
_TRUTHS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def _value(name: str, given: Any) -> Any:
    """One setting from text, or from itself as JSON has it."""
    types = _types()
    if name not in types:
        raise unknown(f"no setting {name!r}", name, types)
    annotation, _ = types[name]
    # A word may be yes or no in JSON, as checkpoints had it once.
    text = value_text(given)
    if get_origin(annotation) is Literal:
        if text in get_args(annotation):
            return text
        raise unknown(f"{name}={_shown(given)}", text, get_args(annotation))
    try:
        if annotation is str:  # logs and checkpoints hold it
            return schema.convert(given, schema.Line, Path(name))
        if not text.isascii() or "_" in text:  # Python's int and float take them
            raise ValueError
        value = _TRUTHS[text.lower()] if annotation is bool else annotation(text)
    except (ValueError, KeyError):
        raise _wrong(name, given, _KINDS[annotation]) from None
    except Unreadable:
        raise _wrong(name, given, "a line of at most 2000 characters, all of them text") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(name, given, "a finite number")
    return value


def _wrong(name: str, given: Any, expected: str) -> UsageError:
    return UsageError(f"{name}={_shown(given)}: expected {expected}")


def _shown(given: Any) -> str:
    text = value_text(given)
    return text if text.isprintable() and len(text) <= 100 else ascii(text)[:100]


def split(texts: Iterable[str]) -> dict[str, str]:
    """``key=value`` texts, several to a text where commas part them.

    Raises:
        UsageError: one is something else, or a key has two values.
    """
    found: dict[str, str] = {}
    for text in texts:
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise UsageError(f"--set {part}: expected key=value")
            if found.setdefault(key, value) != value:
                raise UsageError(f"--set {key}={found[key]},{key}={value}: expected one of them")
    return found


def joined(texts: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as `--set` has them, and as options of the same names do; None is not given.

    Raises:
        UsageError: as `split` does, or the two are not the same.
    """
    found: dict[str, Any] = dict(split(texts))
    for name, value in options.items():
        if value is None:
            continue
        if found.get(name, str(value)) != str(value):
            raise UsageError(f"--set {name}={found[name]} --{name} {value}: expected one of them")
        found[name] = value
    return found


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of their right types, by name; unknown names are usage errors."""
    return {name: _value(name, value) for name, value in values.items()}


PRESETS = {name: checked(split([text])) for name, text in _PRESETS.items()}


def make(preset: str, values: Mapping[str, Any]) -> Settings:
    """A preset with some of its settings changed."""
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
    if settings.watch and settings.precision.block is None:
        raise UsageError(f"watch={settings.watch}: expected an INT8 recipe, not {settings.recipe}")
    if settings.watch and settings.parallel == "fsdp":
        raise UsageError(f"watch={settings.watch}: expected parallel=none or ddp, not fsdp")
    if settings.watch:
        _check_looks(settings)
    return settings


def _check_looks(settings: Settings) -> None:
    """Refuse a run that would be watched so often that its log is too long to be read."""
    layers = len(settings.shape(1).linears()) * settings.layers + 1  # and the head
    if layers * (settings.steps // settings.watch) > MOST_LOOKS:
        least = settings.steps // (MOST_LOOKS // layers + 1) + 1
        what = f"the log of {settings.steps} steps of {layers} layers would be too long to read"
        raise UsageError(f"watch={settings.watch}: {what}: expected at least {least}")


def check_processes(settings: Settings, world: int, told: bool) -> None:
    """Refuse settings with which so many processes cannot train.

    Args:
        told: whether torchrun started them.
    """
    how = settings.parallel
    if how == "none" and world > 1:
        raise UsageError(f"parallel=none: expected ddp or fsdp with {world} processes")
    if how == "none":
        return
    if not told:
        raise UsageError(
            f"parallel={how}: expected to be started by torchrun --standalone --nproc_per_node=N"
        )
    if settings.compile and how == "fsdp":
        raise UsageError("compile=true: expected parallel=none or ddp, not fsdp")


def load(file: Path) -> dict[str, Any]:
    """Return the settings that a run's file holds, as `of_all` has them.

    Raises:
        Missing: there is no such file.
        UsageError: it holds anything else.
    """
    found = schema.load(file, schema.Fields)
    try:
        processes = found.pop(PROCESSES, 1)
        if type(processes) is not int or not 1 <= processes <= 1 << 16:
            given = repr(str(processes)[:50])
            raise UsageError(f"{PROCESSES}={given}: expected 1 to {1 << 16}")
        return of_all(resumed(found, {}, str(file.parent)).as_dict(), processes)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def of_all(settings: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Settings with the micro-batches of all processes, of which a step has the same for ever."""
    return {**settings, "accumulate": settings.get("accumulate", 1) * processes}


def resumed(
    before: Mapping[str, Any], changes: Mapping[str, Any], run: str, processes: int = 1
) -> Settings:
    """The settings of a run that goes on, with those changed that may be.

    As many processes as there are now train on the same sequences.

    Args:
        before: as `of_all` has them, without `head` where they were written when every head was in
            BF16, without a family where that was GPT-2; changes: what the user asked for now.
    """
    asked = checked(changes)
    head = "recipe" if before.get("recipe") != "int8" else "bf16"
    before = checked({"head": head, "accumulate": 1, **EARLIER, **before})
    micros = before["accumulate"]
    if micros % processes:
        raise UsageError(
            f"--resume with {processes} processes: {run} has {micros} micro-batches per step: "
            f"expected a number of processes that divides them"
        )
    before["accumulate"] = micros // processes
    for name, value in asked.items():
        if name not in CHANGEABLE and name in before and before[name] != value:
            asked_for, begun = f"{name}={value_text(value)}", f"{name}={value_text(before[name])}"
            raise UsageError(
                f"--resume {asked_for}: {run} was begun with {begun}; "
                f"leave it out, or begin another run with --init {run}"
            )
    return _settings({**before, **asked})
