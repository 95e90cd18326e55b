"""What quantisation does to a model's products in one step: layer by layer, of the codes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from jetfire.core.fused import bodies_in_python
from jetfire.core.tensors import Quantized
from jetfire.nn import products
from jetfire.nn.linear import Int8Conv1D, Int8Linear
from jetfire.nn.products import MadeOfWeight, is_dtensor, quantised_weight
from jetfire.ops import int8_dequantize

# Variance of a rounding error, in squares of a code's step: to nearest the error is uniform over
# one step; stochastically it is f·(1 − f) of a fraction f that is uniform.
_NEAREST, _STOCHASTIC = 1 / 12, 1 / 6


@dataclass(frozen=True)
class CodesQuality:
    """How well a matrix's codes hold it.

    Attributes:
        sqnr: signal to quantisation noise in dB, estimated: the codes' energy over that of errors
            as rounding makes them. Infinite where all is 0.
        zeros: share of the codes that are 0.
        clipped: share of the codes that are ±127, the largest.
        largest: the largest scale.
    """

    sqnr: float
    zeros: float
    clipped: float
    largest: float

    @classmethod
    def of(cls, x: Quantized, stochastic: bool = False) -> CodesQuality:
        """Return the quality of a matrix's codes, rounded to nearest or stochastically."""
        assert x.q is not None
        assert x.scale is not None
        q, scale = x.q, x.scale.double()
        energy = int8_dequantize(products.alone(x), out="fp32").double().square().sum()
        rows, columns = (
            torch.full((blocks,), float(x.block), dtype=torch.float64, device=q.device)
            for blocks in scale.shape
        )
        for counts, size in ((rows, q.shape[0]), (columns, q.shape[1])):
            counts[-1] = size - (len(counts) - 1) * x.block
        noise = (_STOCHASTIC if stochastic else _NEAREST) * (rows @ scale.square() @ columns)
        signal, error = float(energy), float(noise)
        sqnr = 10 * math.log10(signal / error) if signal > 0 and error > 0 else math.inf
        zeros, clipped = (q == 0).float().mean(), (q.abs() == 127).float().mean()
        return cls(sqnr, float(zeros), float(clipped), float(scale.max()))


@dataclass
class Watched:
    """What was seen, by the name of each converted layer.

    Layers that read the same input in a fused block are multiplied by as one: the gradients of
    their outputs are seen as one matrix. That of a layer whose input needs no gradient is not seen.
    """

    weight: dict[str, CodesQuality] = field(default_factory=dict)
    input: dict[str, CodesQuality] = field(default_factory=dict)
    gradient: dict[str, CodesQuality] = field(default_factory=dict)


@contextmanager
def watch(model: nn.Module) -> Iterator[Watched]:
    """See what quantisation does to the products of a converted model.

    ``with watch(model) as seen: model(x).backward()`` sees the last product of each layer with its
    weight, in forward (its input) and in backward (the gradient of its output). The step's results
    are what they are without it; it takes some times as long. Not seen are what `torch.compile` has
    compiled or a CUDA graph replays, weights divided over processes or gathered as codes, what runs
    in inference mode, frozen layers and layers in 4 bits.
    """
    seen, layers = Watched(), _layers(model)
    for name, module in layers.items():
        with torch.no_grad():
            codes = quantised_weight(module.weight, module.block, "q")
            seen.weight[name] = CodesQuality.of(codes)
    products_of = _products(model, layers)
    # By the address of codes, whose they are, and they themselves: nobody else has it meanwhile.
    known: dict[int, tuple[list[str], bool, Quantized]] = {}

    def find(place: int) -> tuple[list[str], bool, Quantized] | None:
        """Return whose codes are at an address, and whether it is the transpose's."""
        if place not in known:
            for names, cache, transposed in products_of:
                made = cache.latest
                if made is not None:
                    codes = made.t if transposed else made
                    for part, backward in ((codes.q, False), (codes.qt, True)):
                        if part is not None:
                            known[part.data_ptr()] = names, backward, codes
        return known.get(place)

    def see(x: Quantized, weight: Quantized) -> None:
        assert weight.q is not None
        if x.q is None or not x.q.numel() or (found := find(weight.q.data_ptr())) is None:
            return
        names, backward, _ = found
        with torch.no_grad():
            quality = CodesQuality.of(x, stochastic=backward)
        (seen.gradient if backward else seen.input).update(dict.fromkeys(names, quality))

    products.watchers.append(see)
    try:
        with bodies_in_python():
            yield seen
    finally:
        products.watchers.remove(see)


def _layers(model: nn.Module) -> dict[str, Int8Linear | Int8Conv1D]:
    """Return the converted layers by name, but those that are divided over processes."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Int8Linear | Int8Conv1D) and not is_dtensor(module.weight)
    }


def _products(
    model: nn.Module, layers: Mapping[str, Int8Linear | Int8Conv1D]
) -> list[tuple[list[str], MadeOfWeight[Quantized], bool]]:
    """Return the layers that are multiplied by as one, or alone, and who keeps their codes.

    The last says whether these are of the weight as it is stored, in×out.
    """
    names: dict[nn.Module, str] = {module: name for name, module in layers.items()}
    found: list[tuple[list[str], MadeOfWeight[Quantized], bool]] = [
        ([name], module._quantised, isinstance(module, Int8Conv1D))
        for name, module in layers.items()
    ]
    for block in model.modules():
        for joined, group in getattr(block, "joined_groups", tuple)():
            if all(layer in names for layer in group):
                found.append(([names[layer] for layer in group], joined, False))
    return found
