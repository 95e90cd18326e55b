"""StandardOp, the base of most ops: inputs, checks and peers that follow from their specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from jetfire.core.op import Check, Op
from jetfire.core.tensors import Specs, Tensors, names_of
from jetfire.measure import peers
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch

    from jetfire.core.problem import FloatName


class StandardOp(Op):
    """An op whose inputs are drawn, and outputs compared, by their names and specs."""

    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        return draw(self.reads(problem), Source(data, device, seed))

    def check(
        self,
        problem: Any,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Compare each output by the kind of its expected tensor.

        Where floats are expected of codes (`unrounded`), the codes may be any that quantising these
        allows. An output with a ``…_bound`` must be within it, but where ``…_over`` says that it
        may overflow. Any other must have equal bits.
        """
        from jetfire.measure import check

        return check.outputs(self.writes(problem), outputs, expected)

    def eager(self, problem: Any, inputs: Tensors) -> Callable[[], Any]:
        """Return a call of the same in torch operations, on BF16 tensors in place of codes."""
        raise NotImplementedError(f"{self.name}: expected `eager` or `peers` in its class")

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
        noise: per block, what evaluation in fp32 may add to a value.
        over: per block, whether evaluation may overflow.
        name: the name of the codes among the outputs.
        second: it is the op's second output, which has random bits of its own.
    """
    from jetfire.reference.philox import STREAM_ROUNDING, STREAM_SECOND, uniform
    from jetfire.reference.quantize import scales

    m, n = value.shape
    expected = {
        name: value,
        names_of(name)["scale"]: scales(value.float(), problem.block)[0],
        f"{name}_noise": noise,
    }
    if over is not None:
        expected[f"{name}_over"] = over
    if problem.rounding == "stochastic":
        stream = STREAM_SECOND if second else STREAM_ROUNDING
        expected[f"{name}_u"] = uniform(inputs["seed"], m, n, stream)
    return expected


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
        if block is not None:
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
