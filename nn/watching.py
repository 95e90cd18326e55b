"""What quantisation does to a model's products in one step: layer by layer, of the codes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core.fused import bodies_in_python
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn import products
from jetfire.nn.head import Int8Head
from jetfire.nn.linear import Int8Conv1D, Int8Linear
from jetfire.nn.made import MadeOfWeight
from jetfire.nn.products import Int8Weights, QuantisedWeight, is_dtensor, quantised_weight

# Variance of a rounding error, in squares of a code's step: to nearest the error is uniform over
# one step; stochastically it is f·(1 − f) of a fraction f that is uniform.
_NEAREST, _STOCHASTIC = 1 / 12, 1 / 6
# Elements that are looked at at once: what is made of each takes 10 bytes.
_AT_ONCE = 2**24


@dataclass(frozen=True)
class CodesQuality:
    """How well a matrix's codes hold it.

    Attributes:
        sqnr: signal to quantisation noise in dB, estimated: the codes' energy over that of errors
            as rounding makes them. Infinite where all is 0, NaN where something is not finite.
        zeros: share of the codes that are 0.
        clipped: share of the codes that are ±127, the largest.
        largest: the largest scale.
        fallback: share of the blocks that have a second plane of codes.
    """

    sqnr: float
    zeros: float
    clipped: float
    largest: float
    fallback: float = 0.0

    @classmethod
    def of(
        cls, x: Quantized, stochastic: bool = False, missed: Quantized | None = None
    ) -> CodesQuality:
        """Return the quality of a matrix's codes, rounded to nearest or stochastically.

        Args:
            missed: the second plane of codes, where there is one.
        """
        q, scale = x.tensors[:2]
        scale = scale.double()
        step, share = scale, scale.new_zeros(())
        if missed is not None:
            assert missed.scale is not None
            falls = missed.scale != 0
            step, share = torch.where(falls, missed.scale.double(), scale), falls.double().mean()
        rows, columns = (
            torch.full((blocks,), float(x.block), dtype=torch.float64, device=q.device)
            for blocks in scale.shape
        )
        for counts, size in ((rows, q.shape[0]), (columns, q.shape[1])):
            counts[-1] = size - (len(counts) - 1) * x.block
        noise = (_STOCHASTIC if stochastic else _NEAREST) * (rows @ step.square() @ columns)
        at_once = max(1, _AT_ONCE // (q.shape[1] * x.block))  # rows of blocks
        parts = zip(q.split(at_once * x.block), scale.split(at_once), strict=True)
        sums = torch.stack([_sums(*part, x.block) for part in parts]).sum(0)
        found = torch.cat([sums, torch.stack([noise, scale.max(), share])])
        signal, zeros, clipped, error, largest, fallback = found.tolist()  # waits once
        sqnr = 10 * math.log10(signal / error) if signal and error else math.inf
        return cls(sqnr, zeros / q.numel(), clipped / q.numel(), largest, fallback)


def _sums(q: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Return the energy of codes, and how many are 0 and how many ±127, as float64.

    By torch's own operations: ours would want a profile for shapes that no step has.
    """
    (rows, columns), (down, across) = q.shape, scale.shape
    whole = F.pad(q, (0, across * block - columns, 0, down * block - rows))
    squares = whole.float().square_().view(down, block, across, block).sum((1, 3))
    energy = (squares * scale.square()).sum()
    return torch.stack([energy, (q == 0).sum().double(), (q.abs() == 127).sum().double()])


@dataclass
class Watched:
    """What was seen, by the name of each converted layer.

    An output head that multiplies by an embedding's table has the embedding's name. Layers that
    read the same input in a fused block are multiplied by as one: the gradients of their outputs
    are seen as one matrix. That of a layer whose input needs no gradient is not seen.
    """

    weight: dict[str, CodesQuality] = field(default_factory=dict)
    input: dict[str, CodesQuality] = field(default_factory=dict)
    gradient: dict[str, CodesQuality] = field(default_factory=dict)

    def worst(self, count: int = 1) -> list[tuple[str, str, CodesQuality]]:
        """Return layer, ``weight``, ``input`` or ``gradient``, and quality: the lowest SQNR first.

        What is not finite is lower than any.
        """
        found = [(layer, kind, of[layer]) for kind, of in vars(self).items() for layer in of]
        found.sort(key=lambda one: -math.inf if math.isnan(one[2].sqnr) else one[2].sqnr)
        return found[:count]


@contextmanager
def watch(model: nn.Module) -> Iterator[Watched]:
    """See what quantisation does to the products of a converted model.

    ``with watch(model) as seen: model(x).backward()`` sees the last product of each layer with its
    weight, in forward (its input) and in backward (the gradient of its output). The step's results
    are what they are without it; it takes some times as long. Not seen are what `torch.compile` has
    compiled or a CUDA graph replays, weights divided over processes, gathered as codes or without
    elements, what runs in inference mode, frozen layers and layers in 4 bits; nor the gradient of a
    layer whose input needs none, such as a first layer of floats.
    """
    seen, layers = Watched(), _layers(model)
    for name, layer in layers.items():
        with torch.no_grad():
            codes = quantised_weight(layer.weight, layer.block)  # both ways, as a step does
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

    def see(x: Quantized, missed: Quantized | None, weight: Quantized) -> None:
        assert weight.q is not None
        if x.q is None or not x.q.numel() or (found := find(weight.q.data_ptr())) is None:
            return
        names, backward, _ = found
        layer = layers[names[0]].module
        if backward and isinstance(layer, Int8Head):
            x = layer.unpadded(x)
        with torch.no_grad():
            quality = CodesQuality.of(x, stochastic=backward, missed=missed)
        (seen.gradient if backward else seen.input).update(dict.fromkeys(names, quality))

    products.watchers.append(see)
    try:
        with bodies_in_python():
            yield seen
    finally:
        products.watchers.remove(see)


class _Layer(NamedTuple):
    """A weight that is multiplied by in INT8, and the module that says so."""

    module: nn.Module
    weight: torch.Tensor
    cache: QuantisedWeight
    block: Block


def _layers(model: nn.Module) -> dict[str, _Layer]:
    """Return the weights of INT8 products by name.

    Not those that are divided over processes or have no elements. That of a layer has the layer's
    name, any other the parameter's, less `.weight`.
    """
    found = {}
    own: dict[torch.Tensor, str] = {
        weight: name.removesuffix(".weight") for name, weight in model.named_parameters()
    }
    for name, module in model.named_modules():
        listed = list(module.int8_weights()) if isinstance(module, Int8Weights) else []
        if isinstance(module, Int8Head):
            listed.append(module.watched_weight())
        for weight, cache, block in listed:
            if weight.numel() and not is_dtensor(weight):
                layer = isinstance(module, Int8Linear | Int8Conv1D)
                found[name if layer else own[weight]] = _Layer(module, weight, cache, block)
    return found


def _products(
    model: nn.Module, layers: Mapping[str, _Layer]
) -> list[tuple[list[str], MadeOfWeight[Quantized], bool]]:
    """Return the layers that are multiplied by as one, or alone, and who keeps their codes.

    The last says whether these are of the weight as it is stored, in×out.
    """
    names = {layer.module: name for name, layer in layers.items()}
    found: list[tuple[list[str], MadeOfWeight[Quantized], bool]] = [
        ([name], layer.cache, isinstance(layer.module, Int8Conv1D))
        for name, layer in layers.items()
    ]
    for block in model.modules():
        for joined, group in getattr(block, "joined_groups", tuple)():
            if all(layer in names for layer in group):
                found.append(([names[layer] for layer in group], joined, False))
    return found
