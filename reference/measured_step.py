"""The step of a 4-bit quantiser, measured on the matrix that it rounds.

The paper learns its steps (arXiv 2306.11987, section 3.3). A measured one is a fixed share of the
root mean square, which a Hadamard transform leaves as it is.
"""

from __future__ import annotations

import torch

# A step, in root mean squares of what it rounds: with it 16 levels err least of normal numbers
# (J. Max, "Quantizing for minimum distortion", 1960, table II). GPT-2 124M learned more slowly with
# 0.22, 0.3, 0.4 and 0.5 (one run each, of 700 steps and more, on an H100).
OF_RMS = 0.3352
# The least that is measured, so that a step of zeros is one.
LEAST = 2.0**-60
# About so many rows of a matrix tell its step.
MOST_ROWS = 512


def rows_read(m: int) -> slice:
    """Return which of m rows tell the step: the same ones each time.

    They lie an odd number apart, so that no position of a sequence is read more often than others.
    """
    apart = max(1, m // MOST_ROWS) | 1
    return slice(apart // 2, m, apart)


def measured_step(x: torch.Tensor) -> torch.Tensor:
    """Return max(`OF_RMS`·rms, `LEAST`) of the rows that are read, in float64, (1,).

    Args:
        x: float64, m×n. A number that is not finite makes the step NaN or infinite.
    """
    some = x[rows_read(len(x))]
    mean = some.square().mean() if some.numel() else some.sum()
    return (OF_RMS * mean.sqrt()).clamp(min=LEAST).reshape(1)
