"""Op: the contract of `ops/` with the code that checks, times, tunes and exports an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, final

from jetfire.core.errors import UsageError
from jetfire.core.problem import Mode, hints_of
from jetfire.core.tensors import Specs, Tensors, empty, poison

if TYPE_CHECKING:
    import torch

    from jetfire.core.suites import Exported, Timed

# The scope in which equal inputs give equal bits: all kernels and configs of an op, all configs of
# one kernel, or the runs of one config.
SameBits = Literal["kernels", "configs", "runs"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Check:
    """The outcome of comparing a kernel's outputs with the reference's.

    Attributes:
        ok: the outputs are within tolerance.
        rel_err: the largest ‖out − ref‖/‖ref‖ over the outputs (codes are dequantised first).
        message: empty, or one line that says which output is wrong, where and by how much.
    """

    ok: bool
    rel_err: float
    message: str = ""


@dataclass(frozen=True)
class Gradient:
    """An output of a backward, beside the exact gradient and the allowed error."""

    name: str
    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor | float


@dataclass(frozen=True)
class Model:
    """The widths of one transformer block, and the tokens of a step.

    Attributes:
        width: the residual stream's width.
        hidden: the MLP's width.
        tokens: batch × sequence length.
        gated: the MLP has a gate (SwiGLU), so its first product is twice as wide.
    """

    width: int
    hidden: int
    tokens: int = 8 * 1024
    gated: bool = False

    def linears(self) -> list[tuple[int, int]]:
        """Return the block's linear layers as (out features, in features)."""
        first = (2 if self.gated else 1) * self.hidden
        return [
            (3 * self.width, self.width),
            (self.width, self.width),
            (first, self.width),
            (self.width, self.hidden),
        ]

    def inputs(self) -> list[dict[str, int]]:
        """Return the shapes of these layers' inputs, each once."""
        return [{"m": self.tokens, "n": n} for n in dict.fromkeys(n for _, n in self.linears())]

    def outputs(self) -> list[dict[str, int]]:
        """Return the shapes of these layers' outputs, each once."""
        return [{"m": self.tokens, "n": n} for n in dict.fromkeys(n for n, _ in self.linears())]

    def operands(self) -> list[dict[str, int]]:
        """Return the shapes of these layers' inputs and of their weights, each once."""
        pairs = ((rows, n) for out, n in self.linears() for rows in (self.tokens, out))
        return [{"m": m, "n": n} for m, n in dict.fromkeys(pairs)]


@dataclass(frozen=True)
class Tuning:
    """The options with which `make profiles` tunes an op.

    Attributes:
        trials: trials per problem.
        peer: the peer that is timed beside the kernels.
        kernel: the only kernel that is tuned; None is every one.
    """

    trials: int = 30
    peer: str = "copy"
    kernel: str | None = None


class Op(ABC):
    """An operation: problem, tensors, reference, tolerance, workloads, peers and costs.

    Tensors travel as dicts from name to tensor, the same names in the reference and every kernel.

    Attributes:
        workload: the workload that is timed on a GPU where no sizes are given.
        matched: fields, or what follows from them, that a tuned problem shares with every problem
            that its config is used for.
        composite: its kernels launch those of other ops (`Kernel.parts`), so it is not tuned.
        untuned: no profiles of it are shipped for the H200 yet, though another GPU may have some.
        contiguous: matrices that a launch takes contiguous alone; others may have any row stride.
        no_gradients: why a backward has no `gradients`; every other op with a backward has them.
        never_empty: sizes that may not be 0.
        sums: by size, the outputs that are sums over it. Where it is 0 they are 0, or the tensor
            that was to be added to.
        baselines: the peers that its time is compared with first, before those of `report.show`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Problem: ClassVar[type[Any]]
    dims: ClassVar[tuple[str, ...]] = ("m", "n")
    modes: ClassVar[tuple[Mode, ...]] = ("fwd",)
    workload: ClassVar[str | None] = None
    matched: ClassVar[tuple[str, ...]] = ("block", "out_block", "mode", "out", "dtype")
    tuning: ClassVar[Tuning] = Tuning()
    composite: ClassVar[bool] = False
    untuned: ClassVar[bool] = False
    contiguous: ClassVar[frozenset[str]] = frozenset()
    no_gradients: ClassVar[str | None] = None
    never_empty: ClassVar[frozenset[str]] = frozenset()
    sums: ClassVar[Mapping[str, Collection[str]]] = {}
    baselines: ClassVar[tuple[str, ...]] = ()

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

    # Tensors.

    @abstractmethod
    def reads(self, problem: Any) -> Specs:
        """Return the specs of a launch's inputs, by name."""

    @abstractmethod
    def writes(self, problem: Any) -> Specs:
        """Return the specs of a launch's outputs by name, in the order of a function's results."""

    def updated(self, problem: Any) -> Collection[str]:
        """Return the outputs that a launch also reads: they begin as the inputs of their names."""
        return ()

    @abstractmethod
    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Return random tensors for `reads`.

        Args:
            data: a name of `measure.data.DISTRIBUTIONS`.
        """

    def floats(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Return the fp32 ``a`` (m×k) and ``b`` (n×k) whose codes `inputs` gives for that seed.

        Only an op whose `timed` has a part ``promotion`` is asked for them.
        """
        raise NotImplementedError(f"{self.name} is in the suite promotion: expected `floats`")

    @final  # `core.calls` makes them of `writes` itself
    def outputs(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return tensors for `writes`: copies of updated inputs, uninitialised for the rest."""
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

    def in_place(self, problem: Any, inputs: Tensors) -> Mapping[str, str]:
        """Return, for outputs that may overwrite an input given up by the caller, its name."""
        return {}

    def function(self, fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Return which public function solves problems of these fields; None where there is none.

        By default the first whose name ends with ``_backward``, or does not, as the mode says; of
        an op without modes the first of all.
        """
        backward = fields.get("mode") == "bwd"
        chosen = (n for n in names if "mode" not in fields or n.endswith("_backward") == backward)
        return next(chosen, None)

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        """Return the arguments that the public function may take, for a problem of these fields.

        Those that are no parameter of it are left out later. Sizes may be 0.
        """
        return {**fields, **inputs}

    def returned(self, outputs: Mapping[str, Value]) -> dict[str, Value]:
        """Return the outputs that the public function returns, in order."""
        return dict(outputs)

    # Right results.

    @abstractmethod
    def reference(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return the right outputs under the same names, from `jetfire.reference`.

        Keys that are no outputs hold what else `check` needs.
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
            noise: the kernel's own (`Kernel.noise`), which the op's tolerance does not include.
        """

    def poison(self, problem: Any, outputs: Tensors) -> Tensors:
        """Fill outputs with values that no kernel writes, so that an unwritten element shows.

        Those that are `updated` keep their values.
        """
        kept = self.updated(problem)
        for name, tensor in outputs.items():
            if name not in kept:
                poison(tensor)
        return outputs

    def written(self, problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        """Return the outputs that a launch must write, as views where it may leave a part.

        This reads inputs where they say how large the part is, and so waits for the device.
        """
        return outputs

    def same_bits(self, problem: Any) -> SameBits:
        """Return over what the same inputs of a problem give the same bits.

        "runs" where the order of a sum depends on the config, and for kernels with a `noise`.
        """
        return "configs"

    def gradients(self, problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        """Return a backward's outputs beside the gradients that autograd has of a float64 forward.

        That forward shares no formula of a gradient with the reference. The allowed error is that
        of quantising or rounding the gradient, and a little for fp32: whether a kernel rounds right
        is checked against the reference. Empty where inputs have no gradient to compare with.
        """
        raise NotImplementedError(
            f"{self.name} has a backward and no check of its gradients: expected `gradients` in "
            "its class, or `no_gradients`, why not"
        )

    # Edge cases.

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return randomly drawn fields, changed so that they go together: few would by chance.

        Without codes there are no fields of codes. An op changes its sizes, too, where it must.
        """
        return self.Problem.without_codes(fields)

    def edges(self, problem: Any, inputs: Tensors, rng: Random) -> Tensors:
        """Return extreme values for inputs other than the matrices, to replace the usual ones.

        A kernel reads a scalar, a list or a parameter in one place, where an error spoils every
        result. Values are drawn by `measure.edges` on the CPU. Seeds need none.
        """
        return {}

    def nothing(self, problem: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write the outputs of a problem with a size of 0, for which no kernel is launched.

        Outputs with elements are then sums over nothing: zeros, unless an op overrides this.
        """
        for tensor in outputs.values():
            tensor.zero_()

    # Workloads, peers and suites.

    @abstractmethod
    def shapes(self, model: Model) -> list[dict[str, int]]:
        """Return the op's shapes in one transformer block, as problem fields."""

    def peers(self, problem: Any, inputs: Tensors) -> dict[str, Callable[[], Callable[[], Any]]]:
        """Return factories by peer: each prepares operands and returns the call to time."""
        return {}

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Return the further fields of each row of a memory-bound op in the suite `results`.

        By default the first are the usual ones, and each other entry changes one. The first is also
        timed beside torch.compile, and so is each with fields beyond rounding and layout, which
        change what is compiled.
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
        """Return what the suites measure of the op; None for the usual of a memory-bound op."""
        return None

    def exported(self) -> list[Exported]:
        """Return what the suite `export` measures of the op."""
        return []

    def shipped(self, workload: str, mode: Mode) -> list[dict[str, Any]]:
        """Return the further fields worth a profile, for each problem of a workload in a mode.

        Only fields that decide what is written are worth one. With another layout, bias or rounding
        the same shape's entry is found as the nearest.
        """
        return [{}]

    def kinds(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return problems of some sizes; one is drawn, to see how good a looked-up config is."""
        return [self.problems(mode, fields)[0] for mode in self.modes]

    # Costs.

    def flops(self, problem: Any) -> float:
        """Return twice the matrix unit's multiply-add operations; 0 for a memory-bound op."""
        return 0.0

    def bytes(self, problem: Any) -> int:
        """Return the fewest bytes that the op must move: every input once, every output once."""
        return sum(tensor.nbytes for side in self.on_meta(problem) for tensor in side.values())
