"""Random values with the shapes that break quantisation, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jetfire.ops.errors import UsageError

if TYPE_CHECKING:
    import torch


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=generator, device=generator.device)


def _outlier(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal, with one column in 64 fifty times larger (LLM.int8, §3)."""
    import torch

    columns = torch.rand(shape[-1], generator=generator, device=generator.device) < 1 / 64
    return _normal(shape, generator) * (1 + 49 * columns)


def _heavy(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Student's t with three degrees of freedom: finite variance, infinite kurtosis."""
    chi2 = _normal(shape, generator).square()
    for _ in range(2):
        chi2 += _normal(shape, generator).square()
    return _normal(shape, generator) / (chi2 / 3).sqrt()


def _gradient(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Rows whose size is log-normal around 1e-6, a tenth of them exactly zero."""
    import torch

    rows = torch.randn((*shape[:-1], 1), generator=generator, device=generator.device)
    alive = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) > 0.1
    return _normal(shape, generator) * (2 * rows).exp() * 1e-6 * alive


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "normal": _normal,
    "outlier": _outlier,
    "heavy": _heavy,
    "gradient": _gradient,
}


class Source:
    """Draws fp32 tensors of one distribution on one device, repeatably from a seed.

    Args:
        data: a name of `DISTRIBUTIONS`; or two, as in ``outlier/normal``, that of a product's
            first operand and that of its second.
    """

    def __init__(self, data: str, device: torch.device, seed: int) -> None:
        import torch

        first, slash, second = data.partition("/")
        for name in (first, second) if slash else (first,):
            if name not in DISTRIBUTIONS:
                raise UsageError(f"data {data!r}: expected one of {', '.join(DISTRIBUTIONS)}")
        self.device = device
        self._draws = DISTRIBUTIONS[first], DISTRIBUTIONS[second or first]
        self._generator = None
        if device.type != "meta":
            self._generator = torch.Generator(device).manual_seed(seed)

    def floats(self, *shape: int, operand: int = 0) -> torch.Tensor:
        """An fp32 tensor (empty on the meta device), a product's first or second operand."""
        import torch

        if self._generator is None:
            return torch.empty(shape, device=self.device)
        return self._draws[operand](shape, self._generator)

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal fp32 values whatever the distribution, for parameters such as weight and bias."""
        import torch

        if self._generator is None:
            return torch.empty(shape, device=self.device)
        return _normal(shape, self._generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high), each as likely, whatever the distribution."""
        import torch

        if self._generator is None:
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(high, shape, device=self.device, generator=self._generator)

    def quantised(
        self, m: int, n: int, block: int, operand: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (m×n int8) and scales of values drawn from the distribution."""
        import torch

        from jetfire.ops.op import blocks_of
        from jetfire.reference.quantize import quantize

        if self._generator is None:
            return (
                torch.empty((m, n), dtype=torch.int8, device=self.device),
                torch.empty(blocks_of(m, n, block), device=self.device),
            )
        return quantize(self.floats(m, n, operand=operand), block)

    def seed(self) -> torch.Tensor:
        """A Philox key, as the int64 tensor of one element that stochastic kernels read."""
        import torch

        if self._generator is None:
            return torch.empty(1, dtype=torch.int64, device=self.device)
        return torch.randint(
            2**62, (1,), dtype=torch.int64, device=self.device, generator=self._generator
        )
