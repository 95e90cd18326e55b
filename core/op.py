"""What an operation is: the contract of `ops/` with whoever checks, times, tunes or exports one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, final

from jetfire.core.errors import UsageError
from jetfire.core.problem import Mode, hints_of
from jetfire.core.tensors import Specs, Tensors, empty, poison

if TYPE_CHECKING:
    import torch

    from jetfire.core.suites import Exported, Timed

# Over what equal inputs give equal bits: every kernel and config of an op; every config of one
# kernel; or the runs of one config.
SameBits = Literal["kernels", "configs", "runs"]
Value = TypeVar("Value")


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
        if mode == "bwd" and "rounding" in hints_of(self.Problem):
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

    @final  # `core.calls` makes them of `writes` itself
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
