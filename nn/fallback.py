"""Inputs with fallback: blocks with outliers are held by two planes of codes (arXiv 2503.08040)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from jetfire.core.errors import UsageError
from jetfire.core.problem import Block, Layout
from jetfire.core.tensors import Quantized
from jetfire.nn.made import capturing, off_meta
from jetfire.nn.products import Placed
from jetfire.ops import int8_fallback_quantize, int8_quantize

# A step multiplies a threshold by this to the power of the share less the rate. Of normal values,
# where blocks of 128 are the most alike, rates of 5% to 50% settle; at its square 50% does not.
GAIN = 1.3
# Outside, a threshold would leave what it could come back from: blocks below count as zero.
LEAST, MOST = 2.0**-100, 2.0**127


class Fallback(nn.Module):
    """A layer's quantiser of its input, in which a set share of the blocks falls back.

    The first batch in training sets the threshold to its own, that of the blocks that are not zero.
    A batch in which every block is zero or not finite cannot set it: the first batch after the next
    step is then asked.

    After an optimizer's step the threshold moves where the share of the blocks that fell back, in
    the last batch in training, is not within half the rate of it: it is multiplied by
    1.3^(share - rate). Within that range it rests, so that one between outliers and all else stays
    there. All of it stays on the device, but that the host asks once whether it was set, and a CUDA
    graph of the step replays it.

    Args:
        rate: the share of the blocks that is to fall back, between 0 and 1.

    Attributes:
        threshold: fp32, one element: a buffer, which state dicts have; 0 before the first batch,
            2^-100 where that could not set it. A linear layer's state dict has none: loading it
            keeps the present one.
        share: fp32, one element.
    """

    threshold: torch.Tensor
    share: torch.Tensor

    def __init__(self, rate: float, device: Placed = None) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise UsageError(f"fallback={rate}: expected a share between 0 and 1")
        self.rate = rate
        zero = torch.zeros(1, dtype=torch.float32, device=device)
        self.register_buffer("threshold", zero)
        self.register_buffer("share", zero.clone(), persistent=False)
        self._known = False
        self._asks = False  # whether what was set is still to be looked at
        self._begin()

    def _begin(self) -> None:
        self.ran = False  # in training, since the last step
        _quantisers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def forward(self, x: torch.Tensor, block: Block, layout: Layout) -> tuple[Quantized, Quantized]:
        """Return the codes of x, m×n, and of what they miss, as `int8_fallback_quantize` does."""
        if self.threshold.is_meta or self.share.is_meta:
            self.threshold = off_meta(self.threshold, x.device)
            self.share = off_meta(self.share, x.device)
        counts = self.training and x.numel() > 0
        if counts and not self._known:
            self.threshold.copy_(_quantile(x, block, 1 - self.rate))
            self._known = self._asks = True
        a, r = int8_fallback_quantize(x, self.threshold, block=block, layout=layout)
        if counts:
            assert r.scale is not None
            self.share.copy_((r.scale != 0).float().mean())
            self.ran = True
        return a, r

    def is_set(self) -> bool:
        """Return whether a batch has set the threshold, for which the host waits once.

        While a CUDA graph is captured, which nobody can ask, it counts as set.
        """
        if self._asks and not capturing(self.threshold):
            self._known, self._asks = float(self.threshold) > LEAST, False
        return self._known

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.setdefault(f"{prefix}threshold", self.threshold)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._known = not self.threshold.is_meta and float(self.threshold) > LEAST

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply as any module, but for a change of dtype; what comes from no memory is not set."""
        kept = self.threshold, self.share
        super()._apply(fn, recurse)
        if kept[0].is_meta and not self.threshold.is_meta:
            self.threshold.zero_()
            self._known = False
        if self.threshold.dtype != torch.float32:
            self.threshold, self.share = (x.to(self.threshold.device) for x in kept)
        return self

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


@torch.no_grad()
def _quantile(x: torch.Tensor, block: Block, below: float) -> torch.Tensor:
    """Return what the largest magnitudes of a share of the blocks are below: fp32, one element.

    Blocks that are zero or not finite do not count; where all are so, it is `LEAST`.
    """
    _, scale = int8_quantize(x, block=block).tensors
    largest = 127 * scale.flatten()
    found = torch.nanquantile(largest.where(largest > 0, math.nan), below, keepdim=True)
    return found.nan_to_num(LEAST).clamp(LEAST, MOST)


_quantisers: WeakSet[Fallback] = WeakSet()


@torch.no_grad()
def _adapt(*_: object) -> None:
    """Move the thresholds of all layers that ran since the last step: a few kernels for all."""
    ran = [quantiser for quantiser in _quantisers if quantiser.ran and quantiser.is_set()]
    if not ran:
        return
    thresholds = [quantiser.threshold for quantiser in ran]
    shares = [quantiser.share for quantiser in ran]
    halves = [quantiser.rate / 2 for quantiser in ran]
    nearest = torch._foreach_maximum(shares, halves)  # in the range from 1 half of the rate to 3
    torch._foreach_minimum_(nearest, [3 * half for half in halves])
    errors = torch._foreach_sub(shares, nearest)
    torch._foreach_add_(errors, torch._foreach_mul(torch._foreach_sign(errors), halves))
    torch._foreach_mul_(thresholds, torch._foreach_pow(GAIN, errors))
    torch._foreach_clamp_min_(thresholds, LEAST)
    torch._foreach_clamp_max_(thresholds, MOST)
    for quantiser in ran:
        quantiser.ran = False


register_optimizer_step_post_hook(_adapt)
