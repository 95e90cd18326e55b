"""What an operation and a kernel are: the contract of `ops/`, `kernels_*`, bench and tuner."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from jetfire.core import sources
from jetfire.core.device import Device
from jetfire.core.errors import UsageError, unknown
from jetfire.core.tensors import Specs, dtype_of, empty

if TYPE_CHECKING:
    import torch

    from jetfire.core.machine_code import Cubin
    from jetfire.core.suites import Exported, Timed

Block = Literal[32, 64, 128]
FloatName = Literal["bf16", "fp16", "fp32"]
Layout = Literal["q", "qt", "both"]
Mode = Literal["fwd", "bwd"]
Rounding = Literal["nearest", "stochastic"]
# Over what equal inputs give equal bits: every kernel and config of an op; every config of one
# kernel; or the runs of one config.
SameBits = Literal["kernels", "configs", "runs"]
Tensors = dict[str, "torch.Tensor"]
Value = TypeVar("Value")


@cache
def float_name(dtype: torch.dtype) -> FloatName:
    """Return the short name of a torch dtype."""
    names: dict[torch.dtype, FloatName] = {dtype_of(name): name for name in get_args(FloatName)}
    return names[dtype]


# Of a matrix, and so of each of its sizes: no device holds more, and bytes still fit in an int64.
MOST_ELEMENTS = 2**40
# 0.1 ms each time: a first step makes dozens of problems, a file of profiles hundreds.
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def _parse_field(name: str, annotation: Any, value: Any) -> Any:
    """One field's value, from itself or its text; UsageError says what is accepted."""
    if isinstance(annotation, UnionType):  # `int | None`
        if value is None or str(value).lower() == "none":
            return None
        annotation = get_args(annotation)[0]
    choices = get_args(annotation) if get_origin(annotation) is Literal else None
    if choices is not None:
        for choice in choices:
            if value == choice or value == str(choice):
                return choice
        raise unknown(f"{name}={value}", str(value), map(str, choices))
    if annotation is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes", "false", "0", "no"):
            return text in ("true", "1", "yes")
        raise UsageError(f"{name}={value}: expected true or false")
    try:
        number = annotation(value)
    except (TypeError, ValueError):
        kind = "an integer" if annotation is int else "a number"
        raise UsageError(f"{name}={value}: expected {kind}") from None
    if annotation is int and number < 1:
        raise UsageError(f"{name}={value}: expected an integer of at least 1")
    if annotation is int and number > MOST_ELEMENTS:
        raise UsageError(f"{name}={value}: expected an integer of at most {MOST_ELEMENTS}")
    return number


@dataclass(frozen=True)
class Problem:
    """Shape, dtypes, block and rounding of one call; each op derives its own.

    ``m`` and ``n`` are the rows and columns of the op's output (or of its only shape).
    """

    m: int
    n: int

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            value = _parse_field(field.name, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """A problem from texts or values; unknown and missing names are usage errors."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise unknown(f"no problem field {name!r}", name, known)
        for name, field in known.items():
            if name not in fields and field.default is dataclasses.MISSING:
                raise UsageError(f"problem field {name!r} is missing")
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


def at_least_zero(problem: Problem, *fields: str) -> None:
    """Have fields of a problem be finite numbers of at least 0.

    Raises:
        UsageError: one is not.
    """
    for name in fields:
        value = getattr(problem, name)
        if not 0 <= value < math.inf:
            raise UsageError(f"{name}={value}: expected a finite number of at least 0")


@dataclass(frozen=True)
class Check:
    """The outcome of comparing a kernel's outputs with the reference's.

    Attributes:
        ok: within tolerance.
        rel_err: the largest ‖out − ref‖/‖ref‖ over the outputs (codes are dequantised first).
        message: empty, or one line that says which output is wrong, where and by how much.
    """

    ok: bool
    rel_err: float
    message: str = ""


@dataclass(frozen=True)
class Gradient:
    """One of a backward's outputs: as it is, as it should be, and how far off it may be."""

    name: str
    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor | float


@dataclass(frozen=True)
class Model:
    """Widths of one transformer block and the tokens of a step.

    Attributes:
        width: the residual stream's width.
        hidden: the MLP's width.
        gated: the MLP has a gate (SwiGLU), so its first product is twice as wide.
        tokens: batch × sequence length.
    """

    width: int
    hidden: int
    tokens: int = 8 * 1024
    gated: bool = False

    def linears(self) -> list[tuple[int, int]]:
        """The block's linear layers as (out features, in features)."""
        first = (2 if self.gated else 1) * self.hidden
        return [
            (3 * self.width, self.width),
            (self.width, self.width),
            (first, self.width),
            (self.width, self.hidden),
        ]


@dataclass(frozen=True)
class Tuning:
    """How `make profiles` tunes an op.

    Attributes:
        trials: of each problem.
        peer: what is timed beside.
        kernel: the only one that is tuned; None is every one.
    """

    trials: int = 30
    peer: str = "copy"
    kernel: str | None = None


class Op(ABC):
    """An operation: problem, inputs, reference, tolerance, costs and peers.

    Tensors travel as dicts from name to tensor, the same names in the reference and every kernel.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Problem: ClassVar[type[Any]]
    dims: ClassVar[tuple[str, ...]] = ("m", "n")
    workload: ClassVar[str | None] = None  # what is timed on a GPU where no sizes are given
    modes: ClassVar[tuple[Mode, ...]] = ("fwd",)
    # Matrices that a launch takes contiguous alone; of others rows may be any distance apart.
    contiguous: ClassVar[frozenset[str]] = frozenset()
    # Why a backward has no `gradients`; every other op with one has.
    no_gradients: ClassVar[str | None] = None
    # Fields that a tuned problem has in common with every one that its config is used for.
    matched: ClassVar[tuple[str, ...]] = ("block", "mode", "out", "dtype")
    tuning: ClassVar[Tuning] = Tuning()
    # Its kernels launch those of other ops (`Kernel.parts`): nothing is its own to be tuned.
    composite: ClassVar[bool] = False
    # Peers that its time is compared with first, before those of `bench.show`.
    baselines: ClassVar[tuple[str, ...]] = ()
    # Sizes that may not be 0.
    never_empty: ClassVar[frozenset[str]] = frozenset()
    # By size, the outputs that are sums over it: of nothing they are 0, or what was to be added to.
    sums: ClassVar[Mapping[str, Collection[str]]] = {}

    def problems(self, mode: Mode, fields: Mapping[str, Any]) -> list[Any]:
        """Return the problems of one shape in one mode; a GEMM's backward is two of them.

        Gradients are rounded stochastically unless the caller says otherwise.
        """
        if mode not in self.modes:
            raise UsageError(
                f"{self.name} has no mode {mode!r}: expected {' or '.join(self.modes)}"
            )
        usual: dict[str, Any] = {"mode": mode} if len(self.modes) > 1 else {}
        if mode == "bwd" and "rounding" in _hints(self.Problem):
            usual["rounding"] = "stochastic"
        return [self.Problem.parse({**usual, **fields})]

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields drawn at random with sizes that go together, where few would otherwise."""
        return dict(fields)

    @abstractmethod
    def reads(self, problem: Any) -> Specs:
        """Return what a launch reads, by name."""

    @abstractmethod
    def writes(self, problem: Any) -> Specs:
        """Return what a launch writes, by name and in the order in which functions return it."""

    @abstractmethod
    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Return random tensors for `reads`.

        Args:
            data: a name of `measure.data.DISTRIBUTIONS`.
        """

    def outputs(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return tensors for `writes`: uninitialised, but copies of the inputs that are updated."""
        import torch

        outputs = empty(self.writes(problem), next(iter(inputs.values())).device)
        for name in self.updated(problem):
            outputs[name] = inputs[name].clone(memory_format=torch.contiguous_format)
        return outputs

    def on_meta(self, problem: Any) -> tuple[Tensors, Tensors]:
        """Return inputs and outputs without memory: their names, dtypes and shapes."""
        import torch

        meta = torch.device("meta")
        return empty(self.reads(problem), meta), empty(self.writes(problem), meta)

    def poison(self, problem: Any, outputs: Tensors) -> Tensors:
        """Fill outputs with what no kernel writes, so that an unwritten element shows.

        Those that are `updated` keep their values.
        """
        kept = self.updated(problem)
        for name, tensor in outputs.items():
            if name not in kept:
                poison(tensor)
        return outputs

    def updated(self, problem: Any) -> Collection[str]:
        """Outputs that a launch reads too: they begin as the inputs of their names."""
        return ()

    @abstractmethod
    def reference(self, problem: Any, inputs: Tensors) -> Tensors:
        """What the outputs must be, under the same names, from `jetfire.reference`.

        Keys that are no outputs hold what `check` needs besides.
        """

    @abstractmethod
    def check(
        self,
        problem: Any,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Compare a kernel's outputs with the reference's.

        Args:
            noise: the kernel's own (`Kernel.noise`), where the op's tolerance is not for it.
        """

    def same_bits(self, problem: Any) -> SameBits:
        """Over what the same inputs of a problem give the same bits.

        "runs" where a sum's order is the config's to choose, and of every kernel with a `noise`.
        """
        return "configs"

    def written(self, problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        """What a launch must write: outputs, or views of those that it may leave a part of.

        Reads inputs where they say how much that is: a device is waited for.
        """
        return outputs

    def nothing(self, problem: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write the outputs of a problem with a size of 0, which no kernel is asked to do.

        Those that have elements all the same are sums over nothing: zeros, unless an op knows more.
        """
        for tensor in outputs.values():
            tensor.zero_()

    def edges(self, problem: Any, inputs: Tensors, rng: Random) -> Tensors:
        """Inputs beside the matrices at the ends of what they may be, in place of what is usual.

        What a kernel reads in one place and may get wrong for all. Drawn by `measure.edges` on the
        CPU; seeds need none.
        """
        return {}

    def in_place(self, problem: Any, inputs: Tensors) -> Mapping[str, str]:
        """Outputs that may be written over an input that the caller gives up: its name."""
        return {}

    def returned(self, outputs: Mapping[str, Value]) -> dict[str, Value]:
        """Of all outputs, in order, those that the public function returns."""
        return dict(outputs)

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        """Return what the public function may be called with, for a problem of these fields.

        Those of no parameter's name are left out; sizes may be 0.
        """
        return {**fields, **inputs}

    def gradients(self, problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        """A backward's outputs beside what autograd makes of a float64 forward.

        That forward shares no formula of a gradient with the reference. What is allowed is what
        quantising or rounding the gradient takes, and a little for fp32: that a kernel rounds as it
        should is checked against the reference. Empty where inputs have no gradient to compare
        with.
        """
        raise NotImplementedError(
            f"{self.name} has a backward and no check of its gradients: expected `gradients` in "
            "its class, or `no_gradients`, why not"
        )

    @abstractmethod
    def shapes(self, model: Model) -> list[dict[str, int]]:
        """The op's shapes in one transformer block, as problem fields."""

    def peers(self, problem: Any, inputs: Tensors) -> dict[str, Callable[[], Callable[[], Any]]]:
        """What a user would use instead: name → a factory that prepares operands, gives a thunk."""
        return {}

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Further fields worth a row each in the suite `results`: by default one, then each other.

        Of a memory-bound op; the first also beside torch.compile, and each that has other fields
        than these, which change what is compiled.
        """
        fields = self.Problem.__dataclass_fields__
        rounded = "rounding" in fields
        usual = {"rounding": ["stochastic" if mode == "bwd" else "nearest"]} if rounded else {}
        found = [usual]
        if rounded and mode == "fwd":
            found.append({"rounding": ["stochastic"]})
        if "layout" in fields:
            found.append({**usual, "layout": ["both"]})
        return found

    def timed(self) -> list[Timed] | None:
        """What the suites measure of it; None for what they measure of any memory-bound op."""
        return None

    def exported(self) -> list[Exported]:
        """What the suite `export` measures of it."""
        return []

    def shipped(self, workload: str, mode: Mode) -> list[dict[str, Any]]:
        """Further fields worth a profile of their own, for each problem of a workload in a mode.

        Those that decide what is written; with other layouts, biases and roundings the same shape's
        entry is found as the nearest.
        """
        return [{}]

    def kinds(self, fields: Mapping[str, Any]) -> list[Any]:
        """Problems of some sizes of which one is drawn, to see how good a lookup's config is."""
        return [self.problems(mode, fields)[0] for mode in self.modes]

    def flops(self, problem: Any) -> float:
        """Multiply-add operations of the matrix unit, two each; 0 for a memory-bound op."""
        return 0.0

    def bytes(self, problem: Any) -> int:
        """The fewest bytes it must move: every input once, every output once."""
        return sum(tensor.nbytes for side in self.on_meta(problem) for tensor in side.values())


@dataclass(frozen=True)
class Config:
    """Tile sizes, stages, warps: what the tuner may choose; each kernel derives its own."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """A config from texts or values; unknown names are usage errors."""
        hints = _hints(cls)
        for name in fields:
            if name not in hints:
                raise unknown(f"no config field {name!r}", name, hints)
        return cls(**{k: _parse_field(k, hints[k], v) for k, v in fields.items()})


class Kernel(ABC):
    """An implementation of an op for some devices."""

    op: ClassVar[str]
    name: ClassVar[str]
    Config: ClassVar[type[Any]]

    @abstractmethod
    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        """None where this runs and is right; else the reason for a no, in one line.

        The only judge: the launcher, the tuner and the tests all ask here.
        """

    @abstractmethod
    def default(self, problem: Any, device: Device) -> Any:
        """The config to use where no profile knows better."""

    @abstractmethod
    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        """Config field → the values a tuner may try."""

    def schedules(self, problem: Any, device: Device) -> list[Any]:
        """A config for each ``schedule`` of `space`, the best known; none where there is none."""
        names = self.space(problem, device).get("schedule", ())
        config = self.default(problem, device)
        return [dataclasses.replace(config, schedule=name) for name in names]

    @abstractmethod
    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write `outputs` from `inputs` on the current stream, without synchronising.

        Inputs begin anywhere that their elements can, as outputs do that are updated
        (`Op.updated`); other outputs are new: contiguous, from a multiple of 16 bytes on.
        """

    def stages(
        self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors
    ) -> dict[str, Callable[[], None]]:
        """What a launch does, by name and in order, where that is several ops'; else nothing.

        Once all have been called each may be called again by itself, in any order: what it reads
        is still there.
        """
        return {}

    def parts(self, workload: str) -> list[tuple[str, Any]]:
        """Other ops, each with a problem that is solved for a workload of a composite.

        Profiles of these ops are shipped for these problems alone.
        """
        return []

    def noise(self, problem: Any, config: Any, inputs: Tensors) -> torch.Tensor | None:
        """What a config's own rounding may add to an element before it is stored.

        Returns:
            An absolute bound for each block of the output, ⌈m/block⌉×⌈n/block⌉, at least fp32;
            None where the op's tolerance is enough.
        """
        return None

    def estimate(self, problem: Any, config: Any, device: Device) -> float | None:
        """Microseconds that a launch should take, to tell configs apart by; None where unknown."""
        return None

    def device_code(self) -> dict[str, str]:
        """The code that a device runs, without comments, by file or by file and name."""
        return sources.device_code(self._classes())

    def source_hash(self) -> str:
        """12 hex digits that change with `device_code`: `core.sources` says with what not."""
        return sources.digest(self._classes())

    def _classes(self) -> tuple[type, ...]:
        own = type(self).__mro__
        return tuple(cls for cls in own if issubclass(cls, Kernel) and cls is not Kernel)

    def cubins(self, problem: Any, config: Any, capability: tuple[int, int]) -> list[Cubin] | None:
        """The machine code of every function that a launch runs, in order; no device is needed.

        Args:
            capability: an architecture on which `legal` takes the config.

        Returns:
            None where there is none: a CPU kernel.

        Raises:
            UsageError: a compiler is missing.
        """
        return None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def blocks_of(m: int, n: int, block: int) -> tuple[int, int]:
    """The shape of the scales of an m×n tensor."""
    return ceil_div(m, block), ceil_div(n, block)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no kernel writes: -128 for codes, NaN for floats."""
    return tensor.fill_(math.nan if tensor.is_floating_point() else -128)
