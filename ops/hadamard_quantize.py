"""The Hadamard quantiser of 4-bit training: transform, codes of a given step; and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import capacity
from jetfire.core.op import Gradient, Model, SameBits
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import (
    MOST_IN_CODES,
    Block,
    Codes,
    FloatName,
    Group,
    Mode,
    Problem,
    Rounding,
)
from jetfire.core.suites import COMPILED, STEADY_MS, Exported, Timed
from jetfire.core.tensors import (
    Quantized,
    Quantized4,
    Spec,
    Specs,
    Tensors,
    ceil_div,
    dtype_of,
    quantized,
    seed_of,
)
from jetfire.measure import peers
from jetfire.measure.data import Source
from jetfire.measure.int4 import (
    codes_in_torch,
    first_step,
    step_gradient,
    transformed,
    whole_groups,
)
from jetfire.measure.op import StandardOp, draw

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_quantize", "int4_quantize_backward"]

Given = Literal["codes", "x", "wide"]
Out = Literal["float", "int8"]


@dataclass(frozen=True)
class HadamardQuantizeProblem(Problem):
    """x (m×n, `dtype`) to 4-bit codes of X·blockdiag(H/√group), or their gradient to x's.

    fwd: x and step (1,) to codes as `layout` says: ``packed`` is q (int8 m×n/2, two codes per byte,
    as `reference.nibbles`), ``wide`` one in a byte's high half; to scale (1,), the step, NaN where
    x or the step is not finite; and to squares (m,) int32, Σ codes² of each row.

    bwd: dx_hat (m×n), the gradient of the codes times scale, to dx. ``given=codes``: with q packed;
    ``given=wide``: with wide. ``given=x``: with x and step, and then dstep (m,) is the step's
    gradient by rows. ``gathered``: dx_hat holds the kept rows alone, as many as it may be; slots
    (m×2 int32) says which two of them sum to a row, −1 for one that is not there, which counts as
    0·unit (1,). ``out=int8``, of ``given=codes`` alone: dx in `dtype`, and then quantised with
    `rounding`, in blocks of `out_block`.

    A step is usable where (1/√group)/step, rounded in fp32, is finite and above 0. With another one
    (NaN, ±Inf, 0, negative, or below about 2⁻¹²⁸/√group) scale is NaN, and where x is finite codes
    are 0: so backward clips nothing, and dstep is 0.
    """

    of_codes: ClassVar[tuple[str, ...]] = ("out", "out_block", "rounding")
    group: Group = 32
    dtype: FloatName = "bf16"
    mode: Mode = "fwd"
    layout: Codes = "packed"
    given: Given = "codes"
    gathered: bool = False
    out: Out = "float"
    out_block: Block = 32
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_groups("n", self.n, self.group)
        if self.out == "float":
            for name, usual in (("out_block", 32), ("rounding", "nearest")):
                if (value := getattr(self, name)) != usual:
                    raise UsageError(f"{name}={value} out=float: expected out=int8")
        elif self.mode == "fwd" or self.given != "codes":
            asked = f"mode={self.mode} given={self.given}"
            raise UsageError(f"out=int8 {asked}: expected mode=bwd given=codes")
        elif self.group * self.out_block > MOST_IN_CODES:
            most = MOST_IN_CODES // self.out_block
            raise UsageError(
                f"group={self.group} out_block={self.out_block}: expected a group of at most {most}"
            )

    @property
    def clipped_by(self) -> str:
        """The tensor that tells backward what was clipped."""
        return "q" if self.given == "codes" else self.given


class HadamardQuantize(StandardOp):
    name = "hadamard_quantize"
    summary = "Hadamard transform and rounding to 4-bit codes, and the gradient"
    Problem = HadamardQuantizeProblem
    contiguous = frozenset({"slots"})
    modes = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.operands()

    def problems(self, mode: Mode, fields: Mapping[str, Any]) -> list[Any]:
        """Return the problem; only codes are rounded stochastically, if nothing else is asked."""
        floats = {} if fields.get("out") == "int8" else {"rounding": "nearest"}
        return super().problems(mode, {**floats, **fields})

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole groups."""
        unit = max(2, fields["group"])
        return {**super().fitted(fields), "n": ceil_div(fields["n"], unit) * unit}

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        """Return codes with any scale: a backward reads none of it."""
        given = super().arguments(fields, inputs)
        packed, wide = inputs.get("q"), inputs.get("wide")
        if (codes := wide if packed is None else packed) is not None:
            given["q"] = Quantized4(packed, wide, codes.new_ones(1, dtype=dtype_of("fp32")))
        return given

    def reads(self, problem: HadamardQuantizeProblem) -> Specs:
        """Return of gathered rows as many as `sample_rows` has room for."""
        m, n, dtype, one = problem.m, problem.n, problem.dtype, Spec("fp32", (1,))
        quantised = {"x": Spec(dtype, (m, n)), "step": one}
        if problem.mode == "fwd":
            return quantised
        specs: Specs = {"dx_hat": Spec(dtype, (m, n))}
        if problem.gathered:
            rows = capacity(m, 2, "dgrad", "half")
            slots = Spec("int32", (m, 2))
            specs = {"slots": slots, "unit": one, "dx_hat": Spec(dtype, (rows, n))}
        codes = {"q": Spec("int8", (m, n // 2)), "wide": Spec("int8", (m, n))}
        told = problem.clipped_by
        return specs | (quantised if told == "x" else {told: codes[told]}) | seed_of(problem)

    def writes(self, problem: HadamardQuantizeProblem) -> Specs:
        m, n = problem.m, problem.n
        if problem.out == "int8":
            return quantized(m, n, problem.out_block, "dx")
        if problem.mode == "bwd":
            dx = {"dx": Spec(problem.dtype, (m, n))}
            return dx | {"dstep": Spec("fp32", (m,))} if problem.given == "x" else dx
        codes = {"q": Spec("int8", (m, n // 2)), "wide": Spec("int8", (m, n))}
        if problem.layout != "both":
            del codes["q" if problem.layout == "wide" else "wide"]
        return codes | {"scale": Spec("fp32", (1,)), "squares": Spec("int32", (m,))}

    def drawn(self, problem: HadamardQuantizeProblem, source: Source) -> Tensors:
        """Draw LSQ's first step; of gathered rows a few are dropped, a few kept in two parts."""
        from jetfire.reference.hadamard_quantize import quantize
        from jetfire.reference.nibbles import pack, widen

        x = source.floats(problem.m, problem.n, dtype=problem.dtype)
        quantised = {"x": x, "step": first_step(x, problem.group)}
        if problem.mode == "fwd":
            return quantised
        inputs: Tensors = {}
        if problem.gathered:
            inputs = {"slots": _slots(source, problem.m), "unit": source.normal(1).abs()}
        rows = self.reads(problem)["dx_hat"].shape[0]
        inputs["dx_hat"] = source.floats(rows, problem.n, dtype=problem.dtype)
        if problem.given == "x":
            return inputs | quantised
        q = quantize(**quantised, group=problem.group)[0]
        codes = {"wide": widen(q)} if problem.given == "wide" else {"q": pack(q)}
        return inputs | codes | draw(seed_of(problem), source)

    def reference(self, problem: HadamardQuantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import hadamard_quantize as reference
        from jetfire.reference.nibbles import pack, widen
        from jetfire.reference.quantize import quantize

        group = problem.group
        if problem.mode == "fwd":
            q, scale, squares = reference.quantize(inputs["x"], inputs["step"], group)
            return {"q": pack(q), "wide": widen(q), "scale": scale, "squares": squares}
        dx_hat = inputs["dx_hat"]
        if problem.gathered:
            dx_hat = reference.gathered(dx_hat, inputs["slots"], inputs["unit"])
        expected: Tensors = {}
        if problem.given == "x":
            q, terms = reference.step_terms(dx_hat, inputs["x"], inputs["step"], group)
            expected = step_gradient(terms, "dstep")
        else:
            q = _codes(problem, inputs)
        dx = reference.input_gradient(dx_hat, q, group).to(dtype_of(problem.dtype))
        if problem.out == "int8":
            codes = quantize(dx, problem.out_block, problem.rounding, inputs.get("seed"))
            return dict(zip(("dx", "dx_scale"), codes, strict=True))
        return expected | {"dx": dx}

    def nothing(self, problem: HadamardQuantizeProblem, inputs: Tensors, outputs: Tensors) -> None:
        """Write the step for the scale, or NaN where it is no step."""
        import torch

        from jetfire.reference.hadamard_quantize import multiplier

        super().nothing(problem, inputs, outputs)
        if problem.mode == "fwd":
            step = inputs["step"]
            bad = multiplier(step, problem.group) == 0
            outputs["scale"].copy_(step.masked_fill(bad, torch.nan))

    def edges(self, problem: HadamardQuantizeProblem, inputs: Tensors, rng: Random) -> Tensors:
        import torch

        from jetfire.measure import edges

        rare = {"step": edges.step(rng, inputs["step"])} if "step" in inputs else {}
        if "slots" in inputs:
            shape, end = inputs["slots"].shape, rng.choice((0, 1, len(inputs["dx_hat"])))
            generator = edges.generator(rng)
            rare["slots"] = torch.randint(-1, end, shape, generator=generator, device="cpu")
            rare["unit"] = edges.throughout(rng, (0.0, 1.0, math.inf, math.nan), inputs["unit"])
        return rare

    def gradients(
        self, problem: HadamardQuantizeProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """Return those of codes times the step, by LSQ: rounding passes them on, clipping does not.

        Only the Hadamard matrix and how nibbles are packed are the reference's. With a step that is
        not usable nothing is quantised: there is no gradient to compare with.
        """
        import torch

        from jetfire.measure import gradient
        from jetfire.reference.hadamard import matrix
        from jetfire.reference.hadamard_quantize import multiplier

        group, device = problem.group, inputs["dx_hat"].device
        h = matrix(group).to(device)
        upstream = _dense(inputs) if problem.gathered else inputs["dx_hat"].double()
        given = problem.given == "x"
        if given and not bool(multiplier(inputs["step"], group)):
            return []
        one = torch.ones(1, dtype=torch.float64, device=device)
        step = inputs["step"].double() if given else one
        x = inputs["x"].double() if given else transformed(_codes(problem, inputs).double(), h)
        steps = step.expand(len(x)).clone().requires_grad_()  # its gradient comes by rows
        v = transformed(x.requires_grad_(), h) / steps[:, None]
        q = v.detach().round().clamp(-8, 7)
        passed = (q > -8) & (q < 7)
        y = steps[:, None] * (torch.where(passed, v, v.detach()) + (q - v).detach())
        dx, dstep = gradient.of(y, upstream, x, steps)
        v = v.detach()
        terms = upstream.abs().amax(1, keepdim=True) * group**0.5
        rounded = gradient.HALF[problem.dtype] * dx.abs()
        allowed = rounded + gradient.FP32 * terms + gradient.LEAST
        if problem.out == "int8":
            return gradient.quantised(problem, outputs, dx, allowed, "dx")
        if not given:
            return [Gradient("dx", outputs["dx"], dx, allowed)]
        # In fp32 what is nearly a tie may be rounded the other way.
        sure = ~((v % 1.0 - 0.5).abs() < 1e-4 * (1 + v.abs())).any(1)
        noise = 10 * gradient.FP32 * (upstream.abs() * (9 + v.abs())).sum(1) + 2.0**-126
        return [
            Gradient("dx", outputs["dx"][sure], dx[sure], allowed[sure]),
            Gradient("dstep", outputs["dstep"][sure], dstep[sure], noise[sure]),
        ]

    def same_bits(self, problem: HadamardQuantizeProblem) -> SameBits:
        """Return "runs" where there is the step's gradient: it is a sum."""
        return "runs" if problem.mode == "bwd" and problem.given == "x" else "kernels"

    def timed(self) -> list[Timed]:
        """Return, at 8192×8192, each direction beside torch.compile; groups and layouts alone."""
        at = partial(Timed, "int4", sizes={"m": [8192], "n": [8192]}, rounds=20)
        compiled = partial(at, turn=2, peers=COMPILED, power_ms=STEADY_MS)
        settings = {"group": ["1", "32", "128", "1024"], "layout": ["packed", "both"]}
        return [
            compiled(),
            compiled(modes=["bwd"], settings={"gathered": ["true"]}),
            compiled(modes=["bwd"], settings={"gathered": ["true"], "out": ["int8"]}),
            compiled(modes=["bwd"], settings={"given": ["x", "wide"]}),
            at(turn=4, settings=settings, peers=("copy",)),
        ]

    def exported(self) -> list[Exported]:
        return [Exported("rows", {"m": 8192, "n": 4096, "layout": "both"}, ("cuda",), turn=3)]

    def eager(self, problem: HadamardQuantizeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same with a product with H for the transform, in the input's dtype."""
        from jetfire.reference.hadamard import matrix

        backward = problem.mode == "bwd"
        h = matrix(problem.group).to(inputs["dx_hat" if backward else "x"])
        if backward:
            return lambda: _backward_in_torch(problem, inputs, h)
        return lambda: codes_in_torch(inputs["x"], inputs["step"], h, problem.layout)


def _slots(source: Source, m: int) -> Tensor:
    """Return about half of 2m parts kept, high ones first: the places of each row's two."""
    import torch

    kept = source.integers(2, 2, m) == 0
    kept &= kept.flatten().cumsum(0).view(2, m) <= m
    slots = torch.where(kept, kept.flatten().cumsum(0).view(2, m) - 1, -1)
    return slots.t().contiguous().int()


def _dense(inputs: Tensors) -> Tensor:
    """Return a gradient whose rows are the sums of the kept ones that belong to them."""
    import torch

    rows, missing = inputs["dx_hat"].double(), 0.0 * inputs["unit"].double()
    parts = (
        torch.where((slot >= 0)[:, None], rows[slot.clamp(min=0).long()], missing)
        for slot in inputs["slots"].unbind(1)
    )
    return sum(parts, start=torch.zeros((), dtype=torch.float64, device=rows.device))


def _codes(problem: HadamardQuantizeProblem, inputs: Tensors) -> Tensor:
    """Return the codes that a backward is given, one per byte."""
    from jetfire.reference.nibbles import narrow, unpack

    return narrow(inputs["wide"]) if problem.given == "wide" else unpack(inputs["q"])


def _backward_in_torch(
    problem: HadamardQuantizeProblem, inputs: Tensors, h: Tensor
) -> tuple[Tensor, ...]:
    import torch

    dx_hat = inputs["dx_hat"]
    if problem.gathered:
        slots = inputs["slots"].long()
        parts = dx_hat[slots.clamp(min=0)] * (slots >= 0)[:, :, None]
        dx_hat = parts[:, 0] + parts[:, 1]
    sums: tuple[Tensor, ...] = ()
    if problem.given == "x":
        x = inputs["x"]
        v = transformed(x, h) / inputs["step"]
        q = v.round().clamp(-8, 7)
        passed = (q > -8) & (q < 7)
        delta = torch.where(passed, q - v, q)
        sums = ((dx_hat * delta).sum(dim=1, dtype=torch.float32),)
    else:
        q = _codes(problem, inputs)
        passed = (q > -8) & (q < 7)
    dx = transformed(torch.where(passed, dx_hat, 0.0).to(h.dtype), h)
    if problem.out == "int8":
        return peers.codes(problem, dx)
    return (dx, *sums)


OP = HadamardQuantize()


def _given(
    dx_hat: Shape, x: Shape | None, wide: Shape | None, slots: Shape | None
) -> dict[str, Any]:
    """Return fields: of q, x and step, or wide; with slots, dx_hat holds the kept rows alone."""
    rows, n = dx_hat
    of_codes: Given = "codes" if wide is None else "wide"
    return {
        "m": rows if slots is None else slots[0],
        "n": n,
        "given": of_codes if x is None else "x",
        "gathered": slots is not None,
    }


def _given_codes(dx_hat: Shape, slots: Shape | None) -> dict[str, Any]:
    return _given(dx_hat, None, None, slots)


_hadamard_quantize = Operator(
    "hadamard_quantize(Tensor x, Tensor step, int group, str layout) -> Tensor[]",
    dtype_field="dtype",
)
_hadamard_quantize_backward = Operator(
    "hadamard_quantize_backward(Tensor dx_hat, Tensor? q, Tensor? x, Tensor? step, Tensor?"
    " wide, Tensor? slots, Tensor? unit, int group) -> Tensor[]",
    derive=_given,
    dtype_field="dtype",
)


_hadamard_quantize_backward_quantized = Operator(
    "hadamard_quantize_backward_quantized(Tensor dx_hat, Tensor q, Tensor? slots, Tensor? unit,"
    " Tensor? seed, int group, int out_block, str rounding) -> Tensor[]",
    derive=_given_codes,
    dtype_field="dtype",
    out="int8",
)


@checked
def int4_quantize(
    x: Tensor, step: Tensor, *, group: Group = 32, layout: Codes = "packed"
) -> Quantized4:
    """Return the codes of x (m×n bf16, fp16 or fp32), each `group` columns Hadamard-transformed.

    Args:
        step: fp32, one element: what codes are multiples of.
        group: a power of two up to 1024 that divides n; 1 transforms nothing.
        layout: "packed", "wide" or "both".

    Returns:
        Codes in [−8, 7], with squares; their scale is NaN if x is not finite or the step not finite
        and above 0.
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.scalar("step", step, x)
    expect.choice("group", group, Group)
    expect.choice("layout", layout, Codes)
    return Quantized4.of(_hadamard_quantize(x, step.view(1), group, layout), layout)


@checked
def int4_quantize_backward(
    dx_hat: Tensor,
    *,
    q: Quantized4 | None = None,
    x: Tensor | None = None,
    step: Tensor | None = None,
    group: Group = 32,
    slots: Tensor | None = None,
    unit: Tensor | None = None,
    out: Out = "float",
    out_block: Block = 32,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
) -> Any:
    """Return the gradient of x: that of its codes (dx_hat), where not clipped, transformed back.

    Args:
        dx_hat: m×n bf16, fp16 or fp32; with `slots` the kept rows alone, as `int4_gemm` leaves
            them.
        q: what x was quantised to, of which packed codes are read, else wide ones: one at either
            end counts as clipped. Or else
        x, step: what was quantised, and its step: then the step has a gradient too.
        slots, unit: of `int4_sample_rows` and the scale of `int4_bit_split`: the rows that belong
            to each row of x; both or neither.
        out: "float", or with packed codes "int8": what `int8_quantize` makes of dx in blocks of
            `out_block`, with this `rounding` and `seed`. Of a group of more than 512 columns there
            are none, in blocks of 64 of more than 256, of 128 of more than 128.

    Returns:
        dx, m×n as dx_hat, or `Quantized`; with `x` the pair (dx, dstep), the step's gradient by
        rows, fp32, m.
    """
    expect.matrix("dx_hat", dx_hat, expect.FLOATS)
    expect.choice("group", group, Group)
    expect.choice("out", out, Out)
    expect.choice("out_block", out_block, Block)
    _expect_together(q, x, step, slots, unit, out)
    rows, n = dx_hat.shape
    if slots is not None and unit is not None:
        rows = len(slots) if slots.dim() else 0
        slots = expect.exactly("slots", slots, "int32", (rows, 2), dx_hat)
        expect.scalar("unit", unit, dx_hat)
        unit = unit.view(1)
    packed, wide = _codes_read(q, out, rows, dx_hat)
    if x is not None and step is not None:
        expect.matrix("x", x, (expect.named(dx_hat.dtype),))
        expect.shaped("x", x, (rows, n), dx_hat)
        expect.scalar("step", step, dx_hat)
        step = step.view(1)
    if out == "int8":
        seed = expect.rounding_seed(rounding, seed, "q", dx_hat)
        options = group, out_block, rounding
        found = _hadamard_quantize_backward_quantized(dx_hat, packed, slots, unit, seed, *options)
        return Quantized.of(found, "q", out_block)
    found = _hadamard_quantize_backward(dx_hat, packed, x, step, wide, slots, unit, group)
    return found[0] if x is None else tuple(found)


def _expect_together(
    q: Quantized4 | None,
    x: Tensor | None,
    step: Tensor | None,
    slots: Tensor | None,
    unit: Tensor | None,
    out: Out,
) -> None:
    """Refuse arguments of `int4_quantize_backward` that do not go together."""
    if (q is None) == (x is None) or (x is None) != (step is None):
        raise UsageError("q, x and step: expected q alone, or x and step")
    if out == "int8" and q is None:
        raise UsageError("out=int8 with x and step: expected q alone")
    if (slots is None) != (unit is None):
        raise UsageError("slots and unit: expected both or neither")


def _codes_read(
    q: Quantized4 | None, out: Out, rows: int, dx_hat: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the packed and the wide codes for backward: one is None, and both are without q."""
    if q is None:
        return None, None
    n = dx_hat.shape[1]
    if q.packed is None and q.wide is not None and out == "float":
        expect.matrix("q", q.wide, ("int8",))
        expect.shaped("q", q.wide, (rows, n), dx_hat)
        return None, q.wide
    packed = expect.packed("q", q)
    expect.shaped("q", packed, (rows, n // 2), dx_hat)
    return packed, None
