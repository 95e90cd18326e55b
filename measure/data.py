"""Distributions of random values by name: some break quantisation, some are fp32's extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jetfire.core.errors import unknown
from jetfire.core.tensors import dtype_of

if TYPE_CHECKING:
    import torch

    from jetfire.core.problem import FloatName


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


def _outlier(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal values, with one column in 64 fifty times larger (LLM.int8, §3)."""

    columns = _uniform(shape[-1:], generator) < 1 / 64
    return _normal(shape, generator) * (1 + 49 * columns)


def _heavy(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return Student's t with three degrees of freedom: finite variance, infinite kurtosis."""
    chi2 = _normal(shape, generator).square()
    for _ in range(2):
        chi2 += _normal(shape, generator).square()
    return _normal(shape, generator) / (chi2 / 3).sqrt()


def _gradient(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return rows whose size is log-normal around 1e-6, a tenth of them exactly zero."""

    rows = _normal((*shape[:-1], 1), generator)
    alive = _uniform((*shape[:-1], 1), generator) > 0.1
    return _normal(shape, generator) * (2 * rows).exp() * 1e-6 * alive


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return 1.0 - 2.0 * (_uniform(shape, generator) < 0.5).float()


def _one_hot(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return one nonzero element per row: sums of one term, and blocks of zeros beside others."""
    import torch

    at = (_uniform((*shape[:-1], 1), generator) * shape[-1]).long()
    columns = torch.arange(shape[-1], device=generator.device)
    return _normal((*shape[:-1], 1), generator) * (columns == at)


def _constant(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return the same value everywhere: no variance, and all codes 127 or all -127."""
    return _normal((1,) * len(shape), generator).expand(shape).clone()


def _alternating(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a chessboard of a value and its negative: sums that cancel, codes of 127 and -127."""
    import torch

    rows = torch.arange(shape[-2] if len(shape) > 1 else 1, device=generator.device)
    columns = torch.arange(shape[-1], device=generator.device)
    white = (rows[:, None] + columns) % 2 == 0
    value = _normal((1,) * len(shape), generator)
    return torch.where(white, value, -value).reshape(shape)


def _shifted(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return tiles of 128×128, each within some percent of its own value between −20 and 20.

    Means are far larger than deviations, and whole blocks lie in one tail of a function.
    """
    tiles = tuple(-(-size // 128) for size in shape)
    center = 40 * _uniform(tiles, generator) - 20
    for axis, size in enumerate(shape):
        center = center.repeat_interleave(128, axis).narrow(axis, 0, size)
    return center * (1 + 0.05 * _normal(shape, generator))


def _halves(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return multiples of half a code's step, which quantise to ties.

    Every tile of 32×32 begins with the largest value: 127, 98 or 7 steps.
    """
    import torch

    most = torch.tensor([127.0, 98.0, 7.0], dtype=torch.float32, device=generator.device)
    halves = 2 * most[(_uniform((1,), generator) * 3).long()].reshape((1,) * len(shape))
    x = ((2 * _uniform(shape, generator) - 1) * halves).round()
    x[tuple(slice(None, None, 32) for _ in shape)] = halves
    power = (16 * _uniform((1,) * len(shape), generator)).floor() - 9
    return torch.ldexp(x, power)


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.zeros(shape, dtype=torch.float32, device=generator.device)


def _subnormal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return tiles of 32×32 with values just above or below 2^-100, where a scale becomes 0.

    Some tiles hold fp32's subnormal numbers alone.
    """
    import torch

    tiles = tuple(-(-size // 32) for size in shape)
    # Floats: from these ldexp makes fp32 values, from integers values of torch's default dtype.
    powers = torch.tensor(
        [-96, -99, -100, -101, -125, -135, -146], dtype=torch.float32, device=generator.device
    )
    power = powers[(_uniform(tiles, generator) * len(powers)).long()]
    for axis, size in enumerate(shape):
        power = power.repeat_interleave(32, axis).narrow(axis, 0, size)
    return torch.ldexp(1 + _uniform(shape, generator), power) * _signs(shape, generator)


LARGEST = (2 - 2.0**-7) * 2.0**127  # bf16's largest number


def _largest(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return values within a factor of 16 of bf16's largest finite number.

    One in eight is that number itself, one in eight is 0.
    """
    size = LARGEST * (-4 * _uniform(shape, generator)).exp2()
    kind = _uniform(shape, generator)
    size = size.masked_fill(kind < 1 / 8, LARGEST).masked_fill(kind > 7 / 8, 0.0)
    return size * _signs(shape, generator)


def _nonfinite(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal values with one or two faults, so that most of many blocks stay finite.

    The faults are NaN first, ∞ last, −∞ in a block's corner and a row of all three.
    """
    import torch

    one, other, both = _uniform((3,), generator).tolist()  # drawn first: the same for every shape
    x = _normal(shape, generator)
    corner, rows = [min(31, size - 1) for size in shape], x.view(-1, shape[-1])
    places = {int(4 * one)} | ({int(4 * other)} if both < 0.5 else set())
    if 0 in places:
        x.view(-1)[0] = torch.nan
    if 1 in places:
        x[tuple(corner)] = -torch.inf
    if 2 in places:
        kinds = x.new_tensor([torch.nan, torch.inf, -torch.inf])
        drawn = (_uniform(rows[:1].shape, generator) * len(kinds)).long()
        rows[len(rows) // 2] = kinds[drawn[0]]
    if 3 in places:
        x.view(-1)[-1] = torch.inf
    return x


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "normal": _normal,
    "outlier": _outlier,
    "heavy": _heavy,
    "gradient": _gradient,
    "one_hot": _one_hot,
    "constant": _constant,
    "alternating": _alternating,
    "shifted": _shifted,
    "halves": _halves,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "largest": _largest,
    "nonfinite": _nonfinite,
}
# Distributions that a training's tensors have; the others are extremes of arithmetic.
TYPICAL = ("normal", "outlier", "heavy", "gradient")
# Of a product's operands, as a linear layer has them: activations, activations with outliers and
# gradients, times weights. Of two such operands the few places where outliers or large rows meet
# would decide everything.
OPERANDS = ("normal", "outlier/normal", "gradient/normal")


def check(data: str, given: str | None = None) -> None:
    """Raise UsageError for a text that names no distribution, nor two of them as in `Source`.

    Args:
        given: the error's beginning; None is ``data 'nope'``.
    """
    for name in data.split("/", 1):
        if name not in DISTRIBUTIONS:
            raise unknown(given or f"data {data!r}", name, DISTRIBUTIONS)


class Source:
    """A source of fp32 tensors of one distribution on one device, repeatable from its seed.

    Args:
        data: a name of `DISTRIBUTIONS`; or two, as in ``outlier/normal``, for a product's first and
            second operand.
    """

    def __init__(self, data: str, device: torch.device, seed: int) -> None:
        import torch

        check(data)
        first, _, second = data.partition("/")
        self.device = device
        self._draws = DISTRIBUTIONS[first], DISTRIBUTIONS[second or first]
        self._generator = torch.Generator(device).manual_seed(seed)

    def floats(self, *shape: int, operand: int = 0, dtype: FloatName = "fp32") -> torch.Tensor:
        """Return a tensor of a dtype, for a product's first or second operand.

        Values too large for fp16 are scaled by the power of two between its largest number and
        bf16's.
        """
        x = self._draws[operand](shape, self._generator)
        if dtype == "fp16" and self._draws[operand] is _largest:
            x *= 2.0**-112
        return x.to(dtype_of(dtype))

    def normal(self, *shape: int) -> torch.Tensor:
        """Return fp32 values that are normal whatever the distribution, for a weight or a bias."""
        return _normal(shape, self._generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return uniform int64 in [0, high), whatever the distribution."""
        import torch

        return torch.randint(high, shape, device=self.device, generator=self._generator)

    def quantised(
        self, m: int, n: int, block: int, operand: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes (m×n int8) and scales of values from the distribution."""
        from jetfire.reference.quantize import quantize

        return quantize(self.floats(m, n, operand=operand), block)

    def seed(self) -> torch.Tensor:
        """Return a Philox key: the int64 tensor of one element that stochastic kernels read."""
        import torch

        return torch.randint(
            -(2**63), 2**63 - 1, (1,), device=self.device, generator=self._generator
        )
