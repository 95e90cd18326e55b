"""What ops on 4-bit codes share: groups and their transform, LSQ's step, bit splitting, specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jetfire.core.errors import UsageError
from jetfire.core.problem import Codes, Problem
from jetfire.core.tensors import Spec, Specs, Tensors, ceil_div
from jetfire.measure.bounds import higham, of_sum

if TYPE_CHECKING:
    from torch import Tensor

Bits = Literal[8, 4]
# A sum of a row in fp32: within a tile of at most 64 elements, then over a row's tiles, which have
# at least 32, then across threads.
TILE, LEAST_TILE = 64, 32


class SplitProblem(Problem):
    """A problem of a matrix that is split in parts of 4 bits: two of 8 `bits`, one of 4."""

    bits: Bits

    def __post_init__(self) -> None:
        super().__post_init__()
        even("n", self.n)

    @property
    def rows(self) -> int:
        """Rows of the codes."""
        return self.m * (2 if self.bits == 8 else 1)


def even(name: str, size: int) -> None:
    """Have a size be even.

    Raises:
        UsageError: it is not.
    """
    if size % 2:
        raise UsageError(f"{name}={size}: expected an even number, of two codes a byte")


def whole_groups(name: str, size: int, group: int) -> None:
    """Have a size be even and a multiple of the group.

    Raises:
        UsageError: it is not.
    """
    even(name, size)
    if size % group:
        most = min(size & -size, 1024)
        expected = f"a power of two that divides {name}={size}, at most {most}"
        raise UsageError(f"group={group}: expected {expected}")


def packed_specs(m: int, n: int) -> Specs:
    """Return the specs of an m×n matrix's packed codes and steps."""
    groups = ceil_div(n, 32)
    return {"packed": Spec("int8", (m, 16 * groups)), "steps": Spec("int8", (m, groups))}


def first_step(x: Tensor, group: int) -> Tensor:
    """Return LSQ's first step of x transformed, fp32 (1,).

    NaN and ±Inf count as 0: a learned step knows of none.
    """
    from jetfire.reference.hadamard import initial_step, transform

    return initial_step(transform(x.nan_to_num(0.0, 0.0, 0.0), group))


def transformed(x: Tensor, h: Tensor) -> Tensor:
    """Return x with the product by h of each group of a row's neighbours, by plain torch."""
    return (x.reshape(-1, len(h)) @ h).view(x.shape)


def step_gradient(terms: Tensor, name: str) -> Tensors:
    """Return the sum of each row's terms, and what summing them in fp32 may add.

    Roundings are those of the longest chain of additions and the two of a term, which may be
    subnormal.
    """
    n = terms.shape[1]
    chain = min(n, TILE + n // LEAST_TILE + 5) + 2
    return of_sum(name, terms.sum(dim=1), terms.abs().sum(dim=1), higham(chain), n * 2.0**-149)


def codes_in_torch(x: Tensor, step: Tensor, h: Tensor, layout: Codes) -> tuple[Tensor, ...]:
    """Return codes as `layout` says, and squares, by plain torch."""
    import torch

    from jetfire.reference.nibbles import pack, widen

    codes = (transformed(x, h) / step).round().clamp(-8, 7).to(torch.int8)
    found = [widen(codes)] if layout != "packed" else []
    if layout != "wide":
        found.insert(0, pack(codes))
    return (*found, codes.float().square().sum(dim=1))


def split_in_torch(bits: Bits, x: Tensor) -> tuple[Tensor, ...]:
    """Return packed codes, unit and squares by plain torch."""
    import torch

    from jetfire.reference.bit_split import HIGH, LARGEST, MOST
    from jetfire.reference.nibbles import pack

    unit = x.abs().amax() / MOST[bits]
    v = x / unit
    if bits == 4:
        codes = v.round()
    else:
        high = (v / HIGH).round()
        low = (v - HIGH * high + torch.rand_like(v)).floor()
        codes = torch.cat([high, low])
    q = codes.clamp(-LARGEST, LARGEST).to(torch.int8)
    return pack(q), unit, codes.square().sum(dim=1, dtype=torch.float32)
