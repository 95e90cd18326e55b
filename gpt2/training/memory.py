"""What a training run needs of a GPU's memory, counted from its sizes: no torch is loaded.

A family of models is a function of shape, recipe and batch that gives what its layers hold
(`FAMILIES`), an optimizer one of a parameter's shape (`MOMENTS`). The bytes are what the
modules hold: tests compare them with what torch's operators allocate on the CPU, and GPT-2's with
every peak in docs/results of a run that `needs` takes.

Not counted: the CUDA context and kernels' code, and what the allocator cannot use of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jetfire.core.errors import UsageError
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.training.held import Held, Sizes
from jetfire.gpt2.training.held_gpt2 import gpt2
from jetfire.gpt2.training.held_llama import llama
from jetfire.gpt2.training.settings import Settings
from jetfire.nn.recipes import Recipe
from jetfire.nn.sizes import moment_scales

FAMILIES: dict[str, Callable[[Shape, Recipe, int], Held]] = {"gpt2": gpt2, "llama": llama}


def _in_codes(shape: tuple[int, ...]) -> float:
    """Return the bytes of a parameter's two moments in 8 bits, where they are kept so."""
    scales = moment_scales(shape)
    if scales is None:
        return 8.0 * math.prod(shape)
    return 2.0 * math.prod(shape) + 8.0 * math.prod(scales)


# Bytes of both moments of a parameter, by their bits.
MOMENTS: dict[int, Callable[[tuple[int, ...]], float]] = {
    32: lambda shape: 8.0 * math.prod(shape),
    8: _in_codes,
}
# cuBLAS's workspaces on sm_90, which torch's allocator holds: one of the thread that runs forward,
# one of backward's, and one more where a step is on a stream of its own, for its graph. So measured
# on an H200: rows of one step differ by 0.03125 GiB where one of them stood already, and a run of
# that step as a graph peaks two of them above its row, which leaves out one (docs/results).
WORKSPACE = 32 * 2**20


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs.

    Attributes:
        parts: what is held at the peak, by name.
        when: where the peak is.
        beside: what an evaluation takes, for which a CUDA graph gives nothing of its memory back.
    """

    parts: Mapping[str, float]
    when: str
    beside: float

    @property
    def peak(self) -> float:
        """What the run logs as `peak_gib`."""
        return math.fsum(self.parts.values())

    @property
    def total(self) -> float:
        """What the device must have."""
        return self.peak + self.beside


def _check_counted(settings: Settings, recipe: Recipe) -> None:
    """Refuse settings of which it is not known what they hold."""
    if settings.compile:
        why = "what torch.compile keeps is known once it has compiled"
        raise UsageError(f"compile=true: {why}: expected compile=false")
    if settings.parallel != "none":
        why = "a plan is of one process"
        raise UsageError(f"parallel={settings.parallel}: {why}: expected parallel=none")
    if settings.weights == "bf16" and settings.family != "gpt2":
        why = f"what its gradients hold is not counted of {settings.family} yet"
        raise UsageError(f"weights=bf16: {why}: expected weights=fp32")
    if recipe.fallback is not None:
        why = "what its layers hold is not counted yet"
        raise UsageError(f"recipe={settings.recipe}: {why}: expected a recipe without fallback")


def needs(settings: Settings, vocabulary: int) -> Needs:
    """Return what a run of one process on a GPU needs.

    Raises:
        UsageError: torch.compile decides what is kept, processes share it, or it is not counted.
    """
    shape, recipe = settings.shape(vocabulary), settings.precision
    _check_counted(settings, recipe)
    sizes, graphed = shape.parameters().values(), settings.graph != "false"
    held, again = held_by(settings, shape, recipe), settings.accumulate > 1
    whole = _weight_bytes(settings, sizes)
    ids = 16.0 * settings.batch * settings.context * settings.accumulate * (1 + graphed)
    standing = {
        "weights": whole,
        "moments": math.fsum(map(MOMENTS[settings.moment_bits], sizes)),
        "codes": held.codes,
        "token ids, cuBLAS": ids + (2 + graphed) * WORKSPACE,
    }
    if held.rotary:
        standing["rotary tables"] = held.rotary
    # A graph's codes stand where it wrote them, so that an evaluation makes its own.
    beside = held.evaluation + held.remade if graphed else 0.0
    found = _moments(held, whole, again)
    return max(
        (Needs({**standing, **parts}, when, beside) for when, parts in found),
        key=lambda one: one.peak,
    )


def held_by(settings: Settings, shape: Shape, recipe: Recipe) -> Held:
    """Return what a run's model and one micro-batch hold."""
    held = FAMILIES[shape.family](shape, recipe, settings.batch)
    if settings.weights == "fp32":
        return held
    return _narrowed(held, Sizes(shape, settings.batch), recipe, settings.accumulate > 1)


def _weight_bytes(settings: Settings, sizes: Iterable[tuple[int, ...]]) -> float:
    """Return the bytes of parameters, which are those of their gradients too."""
    narrow = 2.0 if settings.weights == "bf16" else 4.0
    return math.fsum((narrow if moment_scales(x) else 4.0) * math.prod(x) for x in sizes)


def _narrowed(held: Held, s: Sizes, recipe: Recipe, again: bool) -> Held:
    """Return what a GPT-2 holds whose matrices, and their gradients, are in BF16.

    No product adds to a gradient in BF16: where one stands, a half of a block gives its own all
    together, the MLP's half first. The head's in INT8 is summed in FP32, and so is the table's.
    """
    ids, *blocks, head = held.parts
    found = []
    for part in blocks:
        before, moments = 0.0, []
        for moment in part.moments:
            last = moment is part.moments[-1]
            own = moment.made / 2 - (before if last else 0.0)
            before = moment.made / 2
            more = moment.more + (own if again else 0.0)
            moments.append(replace(moment, more=more, made=moment.made / 2))
        found.append(replace(part, moments=tuple(moments)))
    first, *rest = head.moments
    if recipe.head is None:  # reads the table itself, not a copy
        head = replace(head, kept=head.kept - 2 * s.table)
        of_head = [first]
    elif recipe.logits == "parts":  # the sum and what it is multiplied by, before that is narrowed
        of_head = [replace(first, more=first.more + 4.0 * s.table), *rest]
    else:
        beside = (first.more + 2 * s.table, 2 * s.x + 4.0 * s.table)
        of_head = [replace(first, more=more) for more in beside]
    of_head = [replace(moment, made=2.0 * s.table) for moment in of_head]
    (moment,) = ids.moments
    positions = moment.made / 2
    of_ids = replace(moment, more=2 * s.x + 4.0 * s.table + positions, made=positions)
    parts = replace(ids, moments=(of_ids,)), *found, replace(head, moments=tuple(of_head))
    return replace(held, parts=parts, carried=held.carried / 2)


def _moments(held: Held, whole: float, again: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the moments of a step: where they are, and what is held beside what stands.

    Args:
        whole: bytes of all gradients.
        again: the step is not at its first micro-batch, so that all gradients stand.
    """
    kept = made = 0.0
    for part in held.parts:
        kept += part.kept
        parts = {"gradients": whole if again else 0.0, "activations": kept}
        yield f"forward of the {part.name}", {**parts, "workspaces": part.forward}
    for part in reversed(held.parts):
        head = part is held.parts[-1]
        kept -= part.kept
        for moment in part.moments:
            still = part.kept - moment.freed
            loose = part.loose if moment.made else 0.0
            if made or moment.made:
                loose += held.carried
            yield (
                f"backward of the {part.name}",
                {
                    "gradients": whole if again else made + moment.made,
                    "activations": kept if head else kept + still,
                    "logits, head": still if head else 0.0,
                    "workspaces": moment.more + (loose if again else 0.0),
                },
            )
        made += part.moments[-1].made
    yield "the update", {"gradients": whole}
