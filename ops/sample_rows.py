"""Leverage-score sampling: which rows of a split gradient a product keeps, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.kept_rows import Keep, Parts, Product, SampledRows, capacity, named
from jetfire.core.op import Model
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import Problem
from jetfire.core.suites import COMPILED, STEADY_MS, Timed
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_sample_rows", "int4_sample_rows_both"]


@dataclass(frozen=True)
class SampleRowsProblem(Problem):
    """Sums of squares of the parts·m rows of a gradient's codes to the rows that a product keeps.

    Args:
        m: tokens. There is no n: the rows' lengths do not matter here.
        parts: 2 for the high and low codes of a split gradient, 1 for codes that were not split.
        product: dgrad weighs a row by the norm of its codes, wgrad by that times the norm of the
            other operand's row; both are two draws of a seed each. Scores are sums of squares
            times 14² in int64: those of codes fit to beyond any row that `int4_gemm` takes.
        keep: half of 2m rows by their probabilities, or all that are not zero.
    """

    n: Literal[1] = 1
    parts: Parts = 2
    product: Product = "dgrad"
    keep: Keep = "half"

    @property
    def products(self) -> tuple[Product, ...]:
        """The products that rows are drawn for."""
        return ("dgrad", "wgrad") if self.product == "both" else (self.product,)

    @property
    def sampled(self) -> bool:
        """Whether rows are drawn by their weights; else all that are not zero are kept."""
        return self.keep == "half" and self.parts == 2

    def room(self, product: Product) -> int:
        """Return how many rows there is room for in a product's outputs."""
        return capacity(self.m, self.parts, product, self.keep)


class SampleRows(StandardOp):
    name = "sample_rows"
    summary = "leverage-score sampling of a split gradient's rows, and their compaction"
    Problem = SampleRowsProblem
    same_bits_over = "kernels"
    dims = ("m",)

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens}]

    def reads(self, problem: SampleRowsProblem) -> Specs:
        specs = {"squares": Spec("int32", (problem.parts * problem.m,))}
        if "wgrad" in problem.products:
            specs["x_squares"] = Spec("int32", (problem.m,))
        return specs | {"seed": Spec("int64", (len(problem.products),))}

    def writes(self, problem: SampleRowsProblem) -> Specs:
        return named(*(_written(problem, product) for product in problem.products))

    def function(self, fields: Mapping[str, Any], names: Sequence[str]) -> str:
        return names[fields["product"] == "both"]

    def drawn(self, problem: SampleRowsProblem, source: Source) -> Tensors:
        """Return squares of a random gradient's codes, 64 wide; as `bit_split`'s of NaN or ±Inf."""
        import torch

        gradient, x = source.floats(problem.m, 64), source.floats(problem.m, 64, operand=1)
        v = gradient * (98 / gradient.abs().amax().clamp(min=1e-30))
        v = torch.where(gradient.isfinite().all(), v, 0.0)
        v[:1, :1] = torch.where(gradient.isfinite().all(), v[:1, :1], 14.0)
        high = (v / 14).round()
        codes = torch.cat([high, (v - 14 * high).round()]) if problem.parts == 2 else high
        inputs = {"squares": _squares(codes)}
        if "wgrad" in problem.products:
            x = x.nan_to_num(0.0, 0.0, 0.0)
            step = x.abs().mean(dtype=torch.float64).clamp(min=1e-30).float()
            inputs["x_squares"] = _squares((x / step).round().clamp(-8, 7))
        inputs["seed"] = torch.cat([source.seed() for _ in problem.products])
        return inputs

    def reference(self, problem: SampleRowsProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.sample_rows import sample_rows

        squares, parts, keep = inputs["squares"], problem.parts, problem.keep
        draws = []
        for product, seed in zip(problem.products, inputs["seed"].split(1), strict=True):
            x_squares = inputs["x_squares"] if product == "wgrad" else None
            room = problem.room(product)
            draws.append(sample_rows(squares, seed, parts, keep, room, x_squares))
        return named(*draws)

    def edges(self, problem: SampleRowsProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw sizes from 1 to 2^23, of all rows, half or few: so that levels rise many times.

        Or sizes of which every row weighs the same: the most that weights sum to.
        """
        import torch

        from jetfire.reference.bit_split import HIGH

        if rng.random() < 0.25:
            alike = {name: torch.ones_like(x) for name, x in inputs.items() if name != "seed"}
            if problem.parts == 2:
                alike["squares"][problem.m :] = HIGH**2
            return alike
        return {
            name: _sizes(rng, inputs[name]) for name in ("squares", "x_squares") if name in inputs
        }

    def timed(self) -> list[Timed]:
        at = partial(Timed, "int4", 3, peers=COMPILED, rounds=20, power_ms=STEADY_MS)
        return [at(sizes={"m": [8192, 16384]}, settings={"product": ["dgrad", "wgrad", "both"]})]

    def eager(self, problem: SampleRowsProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same sampling in torch operations that do not wait for the device."""
        draws = [partial(_in_torch, problem, product, inputs) for product in problem.products]
        return lambda: [found for draw in draws for found in draw()]


def _written(problem: SampleRowsProblem, product: Product) -> Specs:
    """Return the specs of a product's draw."""
    room = problem.room(product)
    specs = {"rows": Spec("int32", (room,)), "counts": Spec("int32", (2,))}
    if product == "wgrad":
        return specs | {"repeat": Spec("int8", (room,))}
    return specs | {"weight": Spec("fp32", (room,)), "slots": Spec("int32", (problem.m, 2))}


def _in_torch(problem: SampleRowsProblem, product: Product, inputs: Tensors) -> tuple[Tensor, ...]:
    """Return rows (in order, those that are not kept last), how many, and 1/p of each, in fp32."""
    import torch

    m, parts = problem.m, problem.parts
    scores = inputs["squares"].float().view(parts, m)
    if parts == 2:
        scores = scores * scores.new_tensor([[196.0], [1.0]])
    if product == "wgrad":
        scores = scores * inputs["x_squares"].float()
    p = (scores > 0).float().flatten()
    if problem.keep == "half":
        # Of the k largest at 1, the first k whose next one is then below 1.
        w, order = scores.flatten().sqrt().sort(descending=True)
        rest = w.double().flip(0).cumsum(0).flip(0)
        left = m - torch.arange(parts * m, device=w.device)
        some = ((w * left < rest) & (left > 0)).int().argmax()
        level = left[some] / rest[some].clamp(min=1e-30)
        filled = torch.empty_like(p).scatter_(0, order, (w * level).clamp(max=1).float())
        p = torch.where(p.sum() <= m, p, filled)
    ends = p.double().cumsum(0) + torch.rand((), dtype=torch.float32, device=p.device)
    kept = ends.floor() > (ends - p.double()).floor()
    rows = (~kept).to(torch.int8).argsort(stable=True)
    return rows, kept.sum(), 1 / p[rows]


def _squares(codes: Tensor) -> Tensor:
    import torch

    return codes.square().sum(dim=1).to(torch.int32)


def _sizes(rng: Random, like: Tensor) -> Tensor:
    import torch

    from jetfire.measure import edges

    generator, double = edges.generator(rng), torch.float64
    most, share = rng.choice((0, 4, 23)), rng.choice((0.02, 0.5, 1.0))
    powers = most * torch.rand(like.shape, dtype=double, generator=generator, device="cpu")
    some = torch.rand(like.shape, dtype=double, generator=generator, device="cpu") < share
    return powers.exp2().floor() * some


OP = SampleRows()


def _tokens(squares: Shape, parts: int) -> dict[str, Any]:
    return {"m": squares[0] // parts}


_sample_rows = Operator(
    "sample_rows(Tensor squares, Tensor? x_squares, Tensor seed, int parts, str product, str keep)"
    " -> Tensor[]",
    derive=_tokens,
)


@checked
def int4_sample_rows(
    squares: Tensor,
    *,
    x_squares: Tensor | None = None,
    parts: Parts = 2,
    keep: Keep = "half",
    seed: Tensor | None = None,
) -> SampledRows:
    """Return the rows of a split gradient to multiply, drawn with probabilities as their norms are.

    Args:
        squares: int32, parts·m, of `int4_bit_split`.
        x_squares: int32, m, of `int4_quantize`: the draw is then for the weight's gradient.
        keep: "half" of the rows of both parts (m) are expected to be kept, or "all" but the zero
            ones.
    """
    squares = _expected(squares, parts, keep)
    if x_squares is not None:
        x_squares = _expected_x(x_squares, squares, parts)
    seed = expect.seed_on(seed, squares)
    product: Product = "dgrad" if x_squares is None else "wgrad"
    found = _sample_rows(squares, x_squares, seed, parts, product, keep)
    return _of_input(found) if x_squares is None else _of_weight(found)


@checked
def int4_sample_rows_both(
    squares: Tensor,
    *,
    x_squares: Tensor,
    parts: Parts = 2,
    keep: Keep = "half",
    seed: Tensor,
) -> tuple[SampledRows, SampledRows]:
    """Return what `int4_sample_rows` does for the input's gradient, and for the weight's.

    Args:
        seed: int64, two elements: the input's, and the weight's.
    """
    squares = _expected(squares, parts, keep)
    x_squares = _expected_x(x_squares, squares, parts)
    seed = expect.exactly("seed", seed, "int64", (2,), squares)
    found = _sample_rows(squares, x_squares, seed, parts, "both", keep)
    return _of_input(found[:4]), _of_weight(found[4:])


def _expected(squares: Tensor, parts: Parts, keep: Keep) -> Tensor:
    """Return squares, contiguous, once they and the choices are what is expected."""
    expect.choice("parts", parts, Parts)
    expect.choice("keep", keep, Keep)
    m = squares.shape[0] // parts if squares.dim() == 1 else 0
    return expect.exactly("squares", squares, "int32", (parts * m,), squares)


def _expected_x(x_squares: Tensor, squares: Tensor, parts: Parts) -> Tensor:
    return expect.exactly("x_squares", x_squares, "int32", (len(squares) // parts,), squares)


def _of_input(found: Sequence[Tensor]) -> SampledRows:
    rows, counts, weight, slots = found
    return SampledRows(rows, counts, weight, slots, None)


def _of_weight(found: Sequence[Tensor]) -> SampledRows:
    rows, counts, repeat = found
    return SampledRows(rows, counts, None, None, repeat)
