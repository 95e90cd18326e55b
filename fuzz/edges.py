"""An op's inputs beside its matrices, and logits, at the ends of what they may be.

`Op.inputs` draws what a training has. Here a step is the first or the millionth, lists of rows are
empty or ask for one row alone, seeds are negative: what a kernel reads in one place and may get
wrong for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from jetfire.core.contract import Op, Tensors
from jetfire.reference.bit_split import HIGH
from jetfire.reference.cross_entropy import IGNORED

# Either word of a key, and its sign.
SEEDS = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63))
SEGMENT = 128  # rows: counts of a weight gradient's are multiples of it


def apply(op: Op, problem: Any, inputs: Tensors, seed: int) -> Tensors:
    """The inputs with some in place of others, on the same device; the same for the same seed."""
    rng = Random(seed)
    rare = {name: _all(rng, SEEDS, x) for name, x in inputs.items() if name.startswith("seed")}
    if op.name in _OF:
        rare |= _OF[op.name](problem, inputs, rng)
    return inputs | {name: value.to(inputs[name]) for name, value in rare.items()}


def _all(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One of the values, throughout."""
    return torch.full_like(like, rng.choice(values), device="cpu")


def _each(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One of the values for each element."""
    choices = torch.tensor(values, dtype=torch.float64, device="cpu")
    drawn = torch.randint(len(values), like.shape, generator=_generator(rng), device="cpu")
    return choices[drawn]


def _int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(62))


def _adamw(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Any step of a long training; one that is left out; moments that have just been made."""
    rare = {
        "rate": _all(rng, (0.0, 1e-8, 1e-3, 0.1, 1.0), inputs["rate"]),
        "step": _all(rng, (1, 2, 10, 1000, 10**4, 10**5, 10**6), inputs["step"]),
    }
    if problem.guarded:
        rare["found_inf"] = _all(rng, (0, 1, 1, 2), inputs["found_inf"])
        rare["grad_scale"] = _all(rng, (1.0, 2.0**16, 2.0**-10), inputs["grad_scale"])
    if rng.random() < 0.5:
        rare |= {name: torch.zeros_like(inputs[name]) for name in ("exp_avg", "exp_avg_sq")}
    return rare


def _cross_entropy(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Half of the targets are the first column, the last one or none; in one case of two some are
    no column, but in 32 bits the first, or to be ignored. Forward, rows lie far from 0."""
    targets, columns = inputs["targets"].cpu(), problem.columns
    wrong = (-1, columns, 2**32, 2**32 + IGNORED, -(2**63))
    ends = _each(rng, (0, columns - 1, IGNORED, *rng.choice(((), wrong))), targets).long()
    kept = _each(rng, (0, 1), targets).bool()
    rare = {"targets": torch.where(kept, targets, ends)}
    if problem.mode == "fwd":
        # Where a maximum begins at a number, or a sum of exponentials is taken without it.
        far = _each(rng, (0.0, -(2.0**15), 2.0**15), inputs["logits"][:, :1])
        rare["logits"] = inputs["logits"].cpu() + far.to(inputs["logits"].dtype)
    else:
        rare["dloss"] = _each(rng, (0.0, 1.0, -1.0, 1 / problem.m, 1e4), inputs["dloss"])
    return rare


def _gather_rows(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Rows in any order, the first and the last of a part more often; few wanted, or all."""
    if problem.rows is None:
        return {}
    m, room = problem.m, problem.rows
    any_row = torch.randint(-1, 2 * m, (room,), generator=_generator(rng), device="cpu")
    ends = _each(rng, (-1, 0, m - 1, m, 2 * m - 1), inputs["rows"]).long()
    count = rng.choice((0, 1, room - 1, room, room))
    rare = {
        "rows": torch.where(_each(rng, (0, 1), ends).bool(), any_row, ends),
        "counts": _int64(rng.randint(0, count), count),
    }
    return rare | ({"repeat": _each(rng, (0, 1, 16), ends)} if problem.repeat else {})


def _step(rng: Random, step: torch.Tensor) -> torch.Tensor:
    """A power of two, with which values may be ties; one that clips all or nothing; or no step."""
    size = float(step)
    power = 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0
    return _all(rng, (power, power, size * 50, size / 50, 0.0, -1.0, math.nan, 2.0**-135), step)


def _hadamard_quantize(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    rare = {"step": _step(rng, inputs["step"])} if "step" in inputs else {}
    if "slots" in inputs:
        room = len(inputs["dx_hat"])
        rare["slots"] = torch.randint(
            -1, rng.choice((0, 1, room)), inputs["slots"].shape, generator=_generator(rng),
            device="cpu",
        )  # fmt: skip
        rare["unit"] = _all(rng, (0.0, 1.0, math.inf, math.nan), inputs["unit"])
    return rare


def _hadamard_gemm(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    return {name: _step(rng, inputs[name]) for name in ("step_x", "step_w") if name in inputs}


def _int4_gemm(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Scales of any size; all rows wanted, one or none; of a depth a part, or none."""
    scales = (0.0, 1.0, 2.0**-60, 2.0**60, math.nan)
    rare = {name: _all(rng, scales, inputs[name]) for name in ("a_scale", "b_scale")}
    if problem.bias:
        rare["bias"] = _each(rng, (0.0, 1.0, -1e4), inputs["bias"])
    if problem.product == "dgrad":
        end = rng.choice((0, 1, int(inputs["counts"][1])))
        rare["counts"] = _int64(rng.randint(0, end), end)
        rare["weight"] = _each(rng, (0.0, 1.0, 14.0, 2.0**20), inputs["weight"])
    elif problem.product == "wgrad":
        end = rng.randint(0, int(inputs["counts"][1]) // SEGMENT)
        high = rng.choice((0, end, rng.randint(0, end)))
        rare["counts"] = _int64(high * SEGMENT, end * SEGMENT)
    return rare


def _gemm(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """What is added to a product is much larger than it, or much smaller."""
    rare = {}
    if problem.bias:
        rare["bias"] = _each(rng, (0.0, 1e-4, -1e4), inputs["bias"])
    if problem.accumulate:
        rare["c"] = inputs["c"] * rng.choice((0.0, 2.0**-12, 2.0**10))
    return rare


def _layernorm(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Weights of all sizes and signs; statistics that are not the row's own."""
    rare = {"weight": _each(rng, (0.0, 1.0, -1.0, 1e-3, 1e3), inputs["weight"])}
    if "bias" in inputs:
        rare["bias"] = _each(rng, (0.0, 1.0, -1e3), inputs["bias"])
    if "mean" in inputs:
        rare["mean"] = _each(rng, (0.0, 1.0, -3.0), inputs["mean"])
        rare["rstd"] = _each(rng, (0.01, 1.0, 30.0), inputs["rstd"])
    return rare


def _sample_rows(problem: Any, inputs: Tensors, rng: Random) -> Tensors:
    """Sizes from 1 to 2^23, of all rows, half of them or few: so that levels rise many times.

    Or sizes of which every row weighs the same: the most that weights sum to.
    """
    if rng.random() < 0.25:
        alike = {name: torch.ones_like(x) for name, x in inputs.items() if name != "seed"}
        if problem.parts == 2:
            alike["squares"][problem.m :] = HIGH**2
        return alike
    return {name: _sizes(rng, inputs[name]) for name in ("squares", "x_squares") if name in inputs}


def _sizes(rng: Random, like: torch.Tensor) -> torch.Tensor:
    generator, double = _generator(rng), torch.float64
    most, share = rng.choice((0, 4, 23)), rng.choice((0.02, 0.5, 1.0))
    powers = most * torch.rand(like.shape, dtype=double, generator=generator, device="cpu")
    some = torch.rand(like.shape, dtype=double, generator=generator, device="cpu") < share
    return powers.exp2().floor() * some


_OF: dict[str, Callable[[Any, Tensors, Random], Tensors]] = {
    "adamw": _adamw,
    "cross_entropy": _cross_entropy,
    "gather_rows": _gather_rows,
    "gemm": _gemm,
    "hadamard_gemm": _hadamard_gemm,
    "hadamard_quantize": _hadamard_quantize,
    "int4_gemm": _int4_gemm,
    "layernorm": _layernorm,
    "sample_rows": _sample_rows,
}
