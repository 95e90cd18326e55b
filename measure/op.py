"""StandardOp, the base of most ops: inputs, checks and peers that follow from their specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jetfire.core.op import Check, Model, Op, SameBits
from jetfire.core.problem import written_block
from jetfire.core.tensors import Specs, Tensors, names_of
from jetfire.measure import peers
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch

    from jetfire.core.problem import FloatName


class StandardOp(Op):
    """An op whose tensors' names and specs say how they are drawn and compared.

    Attributes:
        same_bits_over: what `same_bits` says of every problem.
        in_part: outputs whose reference may be smaller: the rest may hold anything.
    """

    same_bits_over: ClassVar[SameBits] = "configs"
    in_part: ClassVar[tuple[str, ...]] = ()

    def shapes(self, model: Model) -> list[dict[str, int]]:
        """Return the products of a block where there is a k, else what flows between its layers."""
        if "k" in self.dims:
            return [{"m": model.tokens, "n": out, "k": inp} for out, inp in model.linears()]
        widths = (model.width, 3 * model.width, model.hidden)
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        return self.drawn(problem, Source(data, device, seed))

    def drawn(self, problem: Any, source: Source) -> Tensors:
        """Return tensors for `reads`; an op has its own where `draw` says too little."""
        return draw(self.reads(problem), source)

    def check(
        self, problem: Any, outputs: Tensors, expected: Tensors, noise: torch.Tensor | None = None
    ) -> Check:
        """Compare each output by the kind of its expected tensor.

        Where floats are expected of codes (`unrounded`), the codes may be any that quantising these
        allows. An output with a ``…_bound`` must be within it, but where ``…_over`` says that it
        may overflow. Any other must have equal bits.
        """
        from jetfire.measure import check

        known = [name for name in self.in_part if name in expected]
        parts = {name: tuple(map(slice, expected[name].shape)) for name in known}
        got = outputs | {name: outputs[name][part] for name, part in parts.items()}
        return check.outputs(self.writes(problem), got, expected)

    def same_bits(self, problem: Any) -> SameBits:
        return self.same_bits_over

    def eager(self, problem: Any, inputs: Tensors) -> Callable[[], Any] | None:
        """Return a call of the same in torch operations, on BF16 tensors in place of codes.

        None leaves the peers `eager` and `compile` out.
        """
        return None

    def peers(self, problem: Any, inputs: Tensors) -> dict[str, peers.Factory]:
        device = next(iter(inputs.values())).device
        return peers.elementwise(self.eager(problem, inputs), self.bytes(problem), device)


def unrounded(
    problem: Any,
    inputs: Tensors,
    value: torch.Tensor,
    noise: torch.Tensor,
    over: torch.Tensor | None = None,
    name: str = "q",
    second: bool = False,
) -> Tensors:
    """Return the expected tensors for codes of a matrix that no two kernels evaluate alike.

    Args:
        value: the matrix in float64, m×n.
        noise: per block of the codes, what evaluation in fp32 may add to a value.
        over: per block of the codes, whether evaluation may overflow.
        name: the name of the codes among the outputs.
        second: it is the op's second output, which has random bits of its own.
    """
    from jetfire.reference.philox import STREAM_ROUNDING, STREAM_SECOND, uniform
    from jetfire.reference.quantize import scales

    m, n = value.shape
    expected = {
        name: value,
        names_of(name)["scale"]: scales(value.float(), written_block(problem))[0],
        f"{name}_noise": noise,
    }
    if over is not None:
        expected[f"{name}_over"] = over
    if problem.rounding == "stochastic":
        stream = STREAM_SECOND if second else STREAM_ROUNDING
        expected[f"{name}_u"] = uniform(inputs["seed"], m, n, stream)
    return expected


def values_of(problem: Any, inputs: Tensors, *names: str) -> list[torch.Tensor]:
    """Return the float64 matrices whose codes the inputs of these names are."""
    import torch

    from jetfire.reference.dequantize import dequantize

    parts = ((inputs[name], inputs[f"{name}_scale"]) for name in names)
    return [dequantize(q, scale, problem.block, torch.float64) for q, scale in parts]


def draw(specs: Specs, source: Source) -> Tensors:
    """Return a tensor for each spec, drawn in their order.

    Codes with their scales and float matrices have the source's distribution, other floats are
    normal.

    Raises:
        ValueError: integers that are neither codes nor a seed: only their op can draw them.
    """
    drawn: Tensors = {}
    for name, (dtype, shape, block) in specs.items():
        if name in drawn:  # scales, drawn with their codes
            continue
        if name == "qt" and block is not None:
            n, m = shape
            codes = source.quantised(m, n, block)
            drawn["qt"], drawn["scale_t"] = (part.t().contiguous() for part in codes)
        elif block is not None:
            parts = names_of(name)
            m, n = shape
            drawn[name], drawn[parts["scale"]] = source.quantised(m, n, block)
        elif name == "seed":
            drawn[name] = source.seed()
        elif dtype.startswith("int"):
            raise ValueError(f"{name} is {dtype}: expected an `inputs` of the op's own")
        elif len(shape) == 2:
            drawn[name] = source.floats(*shape, dtype=cast("FloatName", dtype))
        else:
            drawn[name] = source.normal(*shape)
    return drawn
