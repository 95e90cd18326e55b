"""Rows of packed 4-bit codes as INT8: all of them, or those that a sampled product wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import Problem
from jetfire.core.suites import COMPILED, STEADY_MS, Timed
from jetfire.core.tensors import Quantized4, Spec, Specs, Tensors, dtype_of
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_gather_rows"]


@dataclass(frozen=True)
class GatherRowsProblem(Problem):
    """Packed codes (m×n/2) to INT8: all m rows in order, or `rows` of them as a list says.

    With `rows`, the inputs are ``rows`` (int32: source row modulo m, -1 for zeros) and ``counts``
    (int32 (2,)): only the first counts[1] are wanted, what lies beyond may hold anything. `repeat`:
    codes are multiplied by an int8 of their row, 0 to 16. `wide`: they come in the high halves of
    their bytes (`reference.nibbles`), else a byte is the code. `transpose`: the output is n×rows.
    """

    rows: int | None = None
    repeat: bool = False
    transpose: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n % 2:
            raise UsageError(f"n={self.n}: expected an even number, of two codes a byte")
        if self.repeat and self.rows is None:
            raise UsageError("repeat=true rows=none: expected a number of rows")
        if self.repeat and self.wide:
            raise UsageError(
                "repeat=true wide=true: expected one of them, for which a byte has room"
            )

    @property
    def height(self) -> int:
        """Rows of the output that there is room for."""
        return self.m if self.rows is None else self.rows


def wanted(problem: GatherRowsProblem) -> int:
    """Return how many rows `GatherRows.drawn` asks for: of a list, fifteen sixteenths."""
    return problem.m if problem.rows is None else problem.rows - problem.rows // 16


class GatherRows(StandardOp):
    name = "gather_rows"
    summary = "rows of packed 4-bit codes as INT8, chosen, repeated, transposed"
    Problem = GatherRowsProblem
    same_bits_over = "kernels"
    in_part = ("codes",)
    matched = (*StandardOp.matched, "transpose")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = dict.fromkeys(width for linear in model.linears() for width in linear)
        return [{"m": model.tokens, "n": width} for width in widths]

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        """Return a matrix of any scale, which is handed on."""
        q = inputs["q"]
        x = Quantized4(q, None, q.new_ones(1, dtype=dtype_of("fp32")))
        return {**super().arguments(fields, inputs), "x": x}

    def reads(self, problem: GatherRowsProblem) -> Specs:
        specs = {"q": Spec("int8", (problem.m, problem.n // 2))}
        if problem.rows is not None:
            specs |= {"rows": Spec("int32", (problem.rows,)), "counts": Spec("int32", (2,))}
            if problem.repeat:
                specs["repeat"] = Spec("int8", (problem.rows,))
        return specs

    def writes(self, problem: GatherRowsProblem) -> Specs:
        shape = (problem.height, problem.n)
        return {"codes": Spec("int8", shape[::-1] if problem.transpose else shape)}

    def drawn(self, problem: GatherRowsProblem, source: Source) -> Tensors:
        """Draw any bytes; rows as a sample of 2m has them, in order, each half ending in zeros."""
        import torch

        inputs = {"q": (source.integers(256, problem.m, problem.n // 2) - 128).to(torch.int8)}
        if problem.rows is None:
            return inputs
        count = wanted(problem)
        high = (count + 1) // 2
        rows = source.integers(problem.m, problem.rows)
        rows[:high] = rows[:high].sort().values
        rows[high:count] = rows[high:count].sort().values + problem.m
        rows[high - count // 64 : high] = -1
        rows[count - count // 64 :] = -1
        inputs["rows"] = rows.to(torch.int32)
        inputs["counts"] = torch.tensor([high, count], dtype=torch.int32, device=source.device)
        if problem.repeat:
            inputs["repeat"] = source.integers(17, problem.rows).to(torch.int8)
        return inputs

    def reference(self, problem: GatherRowsProblem, inputs: Tensors) -> Tensors:
        """Return ``codes``, of the rows that are wanted."""
        from jetfire.reference.gather_rows import gather_rows

        rows, counts, repeat = (inputs.get(name) for name in ("rows", "counts", "repeat"))
        form = {"transpose": problem.transpose, "wide": problem.wide}
        return {"codes": gather_rows(inputs["q"], rows, counts, repeat, **form)}

    def bytes(self, problem: GatherRowsProblem) -> int:
        """Return those of the rows that `drawn` asks for: packed codes, codes, and the list."""
        listed = 0 if problem.rows is None else 5 if problem.repeat else 4
        return wanted(problem) * (problem.n // 2 + problem.n + listed)

    def written(self, problem: GatherRowsProblem, inputs: Tensors, outputs: Tensors) -> Tensors:
        """Return the rows that are wanted."""
        if problem.rows is None:
            return outputs
        codes, count = outputs["codes"], int(inputs["counts"][1])
        return {"codes": codes[:, :count] if problem.transpose else codes[:count]}

    def edges(self, problem: GatherRowsProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw rows in any order, a part's first and last more often; few wanted, or all."""
        import torch

        from jetfire.measure import edges

        if problem.rows is None:
            return {}
        m, room = problem.m, problem.rows
        any_row = torch.randint(-1, 2 * m, (room,), generator=edges.generator(rng), device="cpu")
        ends = edges.each(rng, (-1, 0, m - 1, m, 2 * m - 1), inputs["rows"]).long()
        count = rng.choice((0, 1, room - 1, room, room))
        rare = {
            "rows": torch.where(edges.each(rng, (0, 1), ends).bool(), any_row, ends),
            "counts": edges.int64(rng.randint(0, count), count),
        }
        return rare | ({"repeat": edges.each(rng, (0, 1, 16), ends)} if problem.repeat else {})

    def timed(self) -> list[Timed]:
        """Return the kept of 8192 tokens' split rows, as each product reads them; a weight's."""
        from jetfire.core.kept_rows import capacity

        at = partial(Timed, "int4", 3, peers=COMPILED, rounds=20, power_ms=STEADY_MS)
        kept = partial(at, sizes={"m": [2 * 8192], "n": [8192]})
        dgrad, wgrad = ([str(capacity(8192, 2, p, "half"))] for p in ("dgrad", "wgrad"))
        repeated = {"repeat": ["true"], "transpose": ["true"]}
        weight = {"transpose": ["false", "true"], "wide": ["true"]}
        return [
            kept(settings={"rows": dgrad, "wide": ["true"]}),
            kept(settings={"rows": wgrad, **repeated}),
            at(sizes={"m": [8192], "n": [8192]}, settings=weight),
        ]

    def eager(self, problem: GatherRowsProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return a gather of as many rows as `drawn` asks for."""
        return lambda: _in_torch(problem, inputs)


def _in_torch(problem: GatherRowsProblem, inputs: Tensors) -> Tensor:
    import torch

    from jetfire.reference.nibbles import unpack, widen

    q, rows, repeat = inputs["q"], inputs.get("rows"), inputs.get("repeat")
    count = wanted(problem)
    if rows is not None:
        chosen = rows[:count]
        q = torch.where((chosen >= 0)[:, None], q[chosen % problem.m], 0)
    codes = unpack(q)
    if problem.wide:
        codes = widen(codes)
    if repeat is not None:
        codes = codes * repeat[:count, None]
    return codes.t().contiguous() if problem.transpose else codes


OP = GatherRows()


def _sizes(q: Shape, rows: Shape | None, repeat: Shape | None) -> dict[str, Any]:
    listed = None if rows is None else rows[0]
    return {"m": q[0], "n": 2 * q[1], "rows": listed, "repeat": repeat is not None}


_gather_rows = Operator(
    "gather_rows(Tensor q, Tensor? rows, Tensor? counts, Tensor? repeat, bool transpose,"
    " bool wide) -> Tensor",
    derive=_sizes,
)


@checked
def int4_gather_rows(
    x: Quantized4,
    *,
    rows: Tensor | None = None,
    counts: Tensor | None = None,
    repeat: Tensor | None = None,
    transpose: bool = False,
    wide: bool = False,
) -> Quantized4:
    """Return packed codes (m×n/2) one per byte: all rows, or those that `int4_sample_rows` drew.

    Args:
        rows, counts: of `int4_sample_rows`, both or neither; row i of them is x's row i mod m.
            What rows from counts[1] on hold is not said.
        repeat: multiplies each row; not with `wide`, for which a byte then has no room.
        wide: codes are put in the high halves of their bytes, as `int4_gemm` reads them but in a
            weight's gradient.

    Returns:
        Of x's scale, rows×n, or n×rows where transposed.
    """
    q = expect.packed("x", x)
    if (rows is None) != (counts is None):
        raise UsageError("rows and counts: expected both or neither")
    if rows is not None and counts is not None:
        rows = expect.exactly("rows", rows, "int32", (rows.numel(),), q)
        counts = expect.exactly("counts", counts, "int32", (2,), q)
    if repeat is not None:
        if rows is None:
            raise UsageError("repeat: expected rows and counts with it")
        repeat = expect.exactly("repeat", repeat, "int8", (rows.numel(),), q)
    codes = _gather_rows(q, rows, counts, repeat, transpose, wide)
    return Quantized4(None, codes, x.scale)
