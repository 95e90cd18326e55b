"""What is made of a weight, such as its codes, and kept until the weight changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

Made = TypeVar("Made")


def stamp(weight: torch.Tensor) -> tuple[int, int]:
    """Return what changes when torch sees a weight change."""
    return weight._version, weight.data_ptr()


class MadeOfWeight(Generic[Made]):
    """What is made of a weight as it is, once per optimizer step.

    It is a tuple of tensors, or of such tuples. A CUDA stream that is not the one where it was made
    waits for that one before it reads it.
    """

    def __init__(self) -> None:
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._key: tuple[tuple[int, int], Hashable, int] | None = None
        self._made: Made | None = None
        self._stream: torch.cuda.Stream | None = None

    def found(
        self, weight: torch.Tensor, key: Hashable, make: Callable[[], Made], *beside: torch.Tensor
    ) -> Made:
        """Return what `make` gave for this weight and key since the last step, or gives now.

        What `torch.compile` traces is made anew each time: a version cannot be a constant.

        Args:
            beside: other tensors that it is made of.
        """
        if torch.compiler.is_compiling() or weight.is_inference():  # which has no version
            return make()
        if beside:
            key = (key, *map(stamp, beside))
        # A dead weight's id and memory may be another's by now: its weak reference is not.
        known = self._weight is not None and self._weight() is weight
        if self._made is None or not known or (stamp(weight), key, _changes) != self._key:
            # Backward could save nothing of that mode. Leaving it where it is off takes 0.2 ms.
            inference = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if inference else nullcontext():
                made = make()
            self._keep(weight, key, made, stamp(weight))
        assert self._made is not None
        if self._stream is not None:
            _wait_for(self._stream, self._made)
        return self._made

    @property
    def latest(self) -> Made | None:
        """What was made last, which may no longer be of the weight as it is."""
        return self._made

    def _keep(self, weight: torch.Tensor, key: Hashable, made: Made, of: tuple[int, int]) -> None:
        self._made, self._weight, self._key = made, weakref.ref(weight), (of, key, _changes)
        self._stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None

    def __deepcopy__(self, memo: object) -> MadeOfWeight[Made]:
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _wait_for(stream: torch.cuda.Stream, made: object) -> None:
    """Have the current stream wait for another, and its memory wait for the current one.

    Not while a CUDA graph is captured, which may not wait for what lies outside: `torch.cuda.graph`
    waits for the whole device before it begins.
    """
    current = torch.cuda.current_stream(stream.device)
    if current == stream or torch.cuda.is_current_stream_capturing():
        return
    current.wait_stream(stream)
    for tensor in tree_leaves(made):
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(current)


# FSDP2 gathers a weight under an unchanged version; CUDA graphs and DTensors change it under one:
# what tells is that an optimizer has stepped, or that someone has said so.
_changes = 0


def weights_changed(*_: object) -> None:
    """Have every weight quantised anew: call it where they change and no optimizer's step ran.

    Changes that torch sees (in-place operations, a loaded state dict, another tensor as the
    weight's `data`) need no call; those in place through `weight.data` do.
    """
    global _changes
    _changes += 1


register_optimizer_step_post_hook(weights_changed)
