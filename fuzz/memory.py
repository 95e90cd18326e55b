"""Tensors inside buffers whose every other byte is known: padding, guard zones, copies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from jetfire.core.tensors import span
from jetfire.fuzz.example import GUARD

# Of bytes around inputs: NaN in every float type. And around outputs.
INPUT_FILL, OUTPUT_FILL = 0xFF, 0xA5


@dataclass(frozen=True)
class Placed:
    """A tensor that is a view of a buffer of bytes.

    Attributes:
        start: the byte of the buffer where the view starts.
    """

    buffer: torch.Tensor
    view: torch.Tensor
    start: int

    def on(self, buffer: torch.Tensor) -> Placed:
        """Return the same view of another buffer."""
        end = self.start + span(self.view) * self.view.itemsize
        typed = buffer[self.start : end].view(self.view.dtype)
        view = typed.as_strided(self.view.shape, self.view.stride())
        return Placed(buffer, view, self.start)

    def to(self, device: torch.device) -> Placed:
        """Copy it to a device, by one copy of contiguous bytes."""
        return self.on(self.buffer.to(device)) if device != self.buffer.device else self

    def outside(self) -> torch.Tensor:
        """The bytes before and after a contiguous view."""
        end = self.start + self.view.nbytes
        return torch.cat([self.buffer[: self.start], self.buffer[end:]])


def place(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    fill: int,
    padding: int = 0,
    offset: int = 0,
    guard: int = GUARD,
) -> Placed:
    """A row-major tensor in a buffer filled with one byte, its elements too.

    Args:
        padding: elements by which a matrix's rows are further apart than they are wide.
        offset: elements by which the first one is moved from an aligned address.
        guard: bytes around it.
    """
    steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if padding and len(shape) == 2:
        steps[0] = max(1, shape[1]) + padding
    like = torch.empty_strided(shape, steps, dtype=dtype, device="meta")
    start = guard + offset * dtype.itemsize
    size = start + span(like) * dtype.itemsize + guard
    buffer = torch.full((size,), fill, dtype=torch.uint8, device=device)
    return Placed(buffer, like, start).on(buffer)


def fill_bytes(x: torch.Tensor, byte: int) -> None:
    """Fill every byte of a contiguous tensor."""
    x.view(-1).view(torch.uint8).fill_(byte)


def shown(x: torch.Tensor, at: tuple[int, ...]) -> Any:
    value = x[at].item()
    return f"{value:.9g}" if isinstance(value, float) else value
