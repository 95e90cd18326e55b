"""The gradient of an embedding's table: each position's row added to the row of its token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Model
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import FloatName, Mode, Problem
from jetfire.core.tensors import Spec, Specs, Tensors, dtype_of
from jetfire.measure.bounds import OVER, ROUNDING
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_rows"]

VOCABULARY = 50304  # GPT-2's 50257, to a multiple of 128


@dataclass(frozen=True)
class AddRowsProblem(Problem):
    """Rows of a k×n gradient (`dtype`) added to the rows of an m×n fp32 table that ids name."""

    k: int
    dtype: FloatName = "bf16"


class AddRows(StandardOp):
    name = "add_rows"
    summary = "a gradient's rows added to those of a table: the backward of an embedding"
    Problem = AddRowsProblem
    same_bits_over = "runs"
    dims = ("m", "n", "k")
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"k": ("table",)}
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": VOCABULARY, "n": model.width, "k": model.tokens}]

    def reads(self, problem: AddRowsProblem) -> Specs:
        m, n, k = problem.m, problem.n, problem.k
        positions = dict.fromkeys(("ids", "order"), Spec("int64", (k,)))
        return {
            "table": Spec("fp32", (m, n)),
            **positions,
            "gradient": Spec(problem.dtype, (k, n)),
        }

    def writes(self, problem: AddRowsProblem) -> Specs:
        return {"table": Spec("fp32", (problem.m, problem.n))}

    def updated(self, problem: AddRowsProblem) -> tuple[str, ...]:
        return ("table",)

    def drawn(self, problem: AddRowsProblem, source: Source) -> Tensors:
        """Draw ids that are as often as words are: the r-th most frequent 1/r as often."""
        m, n, k = problem.m, problem.n, problem.k
        table, gradient = source.normal(m, n), source.floats(k, n, dtype=problem.dtype)
        places, names = (source.integers(2**62, size).argsort() for size in (k, m))
        ids = names[_ranks(m, k).to(source.device)[places]]
        return {"table": table, "ids": ids, "order": grouped(ids, m), "gradient": gradient}

    def reference(self, problem: AddRowsProblem, inputs: Tensors) -> Tensors:
        """Return the sums in float64, and a bound on what summing in fp32 may add.

        A row that c positions name is c additions, in any order: `bounds.higham` of c.
        """
        from jetfire.reference.add_rows import add_rows

        table, ids, gradient = (inputs[name] for name in ("table", "ids", "gradient"))
        roundings = ids.bincount(minlength=problem.m).double()[:, None] * ROUNDING
        size = add_rows(table.abs(), ids, gradient.abs())
        return {
            "table": add_rows(table, ids, gradient),
            "table_bound": roundings / (1 - roundings) * size.nan_to_num(0.0),
            "table_over": size >= OVER,
        }

    def edges(self, problem: AddRowsProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw runs of equal lengths, of one position or of all or between; the first and last row.

        Runs are by turns of all rows, so that where there are more than rows an id comes again.
        """
        import torch

        from jetfire.measure import edges

        m, k = problem.m, problem.k
        positions = torch.arange(k, device="cpu")
        length = rng.choice((1, 2, 15, 16, 31, 32, 33, 64, 100, k))
        runs = (positions + rng.randrange(length)) // length % m
        ends = edges.each(rng, (0, m - 1), inputs["ids"]).long()
        ids = rng.choice((runs, m - 1 - runs, ends))
        if rng.random() < 0.5:
            by = edges.generator(rng)
            ids = ids[torch.randperm(k, generator=by, dtype=torch.int64, device="cpu")]
        return {"ids": ids, "order": grouped(ids, m)}

    def nothing(self, problem: AddRowsProblem, inputs: Tensors, outputs: Tensors) -> None:
        """Leave the table as it is."""

    def shipped(self, workload: str, mode: Mode) -> list[dict[str, Any]]:
        """Return both dtypes: a gradient has that of what the forward returned, often fp32."""
        return [{"dtype": "fp32"}, {}]

    def bytes(self, problem: AddRowsProblem) -> int:
        """Return those of the positions, the gradient, and the rows that `drawn` names, twice."""
        of_gradient = dtype_of(problem.dtype).itemsize * problem.n
        named = len(_ranks(problem.m, problem.k).unique())
        return problem.k * (16 + of_gradient) + named * 8 * problem.n

    def eager(self, problem: AddRowsProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's addition, whose order, and so whose bits, no two runs share."""
        table, ids, gradient = (inputs[name] for name in ("table", "ids", "gradient"))
        table = table.clone()
        return lambda: table.index_add_(0, ids, gradient.float())


OP = AddRows()


def _ranks(m: int, k: int) -> Tensor:
    """Return k ranks of 0 to m − 1, int64, rising, of which r is 1/(r + 1) as often as 0."""
    import torch

    places = (torch.arange(k, dtype=torch.float64, device="cpu") + 0.5) / k
    return ((m + 1.0) ** places).long().clamp(max=m) - 1


def grouped(ids: Tensor, rows: int) -> Tensor:
    """Return positions, int64, in an order that brings equal ids together, each in its own order.

    Sorts the narrowest integers that tell rows apart, and what is none from them, in whatever
    order: a GPU's radix sort takes two passes over two bytes, eight over eight.

    Args:
        ids: int64; what is not 0 to rows − 1 comes with no row.
    """
    import torch

    narrow = torch.int16 if rows < 2**16 else torch.int32 if rows < 2**32 else torch.int64
    return ids.clamp(-1, rows).to(narrow).sort(stable=True).indices


def _sizes(gradient: Shape, table: Shape) -> dict[str, Any]:
    return {"m": table[0], "n": table[1], "k": gradient[0]}


_add_rows = Operator(
    "add_rows(Tensor gradient, Tensor ids, Tensor order, Tensor(a!) table) -> ()",
    derive=_sizes,
    dtype_field="dtype",
)


@checked
def add_rows(
    table: Tensor, ids: Tensor, gradient: Tensor, *, order: Tensor | None = None
) -> Tensor:
    """Add row i of the gradient to row ids[i] of the table, in place, to the same bits each time.

    Args:
        table: fp32 m×n, whose rows do not overlap.
        ids: int64, k, each of 0 to m − 1. What is no row is refused on a CPU; on a GPU, which
            nothing waits for, it is left out.
        gradient: k×n bf16, fp16 or fp32.
        order: int64, k: all positions, such that equal ids follow one another. By default they are
            sorted.

    Returns:
        The table.
    """
    expect.matrix("table", table, ("float32",))
    expect.matrix("gradient", gradient, expect.FLOATS)
    expect.same_device("gradient", gradient, table)
    (m, n), k = table.shape, gradient.shape[0]
    if gradient.shape[1] != n:
        raise UsageError(f"gradient has shape {tuple(gradient.shape)}: expected {n} columns")
    ids = expect.exactly("ids", ids, "int64", (k,), table)
    order = grouped(ids, m) if order is None else expect.exactly("order", order, "int64", (k,), ids)
    refuse_in_place({"table": table}, {"ids": ids, "gradient": gradient, "order": order})
    _add_rows(gradient, ids, order, table)
    return table
