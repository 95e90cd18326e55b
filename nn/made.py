"""What is made of a weight, such as its codes, and kept until the weight changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Generic, Self, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

Made = TypeVar("Made")


Stamp = tuple[int, int, StorageWeakRef]


def stamp(weight: torch.Tensor) -> Stamp:
    """Return what changes when torch sees a weight change.

    A weight's `data` that was replaced twice may lie where the first lay: its storage is another.
    """
    return weight._version, weight.data_ptr(), StorageWeakRef(weight.untyped_storage())


def capturing(tensor: torch.Tensor) -> bool:
    """Return whether what is launched on a tensor's device becomes part of a CUDA graph."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def off_meta(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a layer's buffer, or zeros on a device where it is on meta.

    Weights that are assigned to a layer made on meta leave its buffers there.
    """
    if not buffer.is_meta:
        return buffer
    with torch.inference_mode(False):  # training writes into it later
        return torch.zeros_like(buffer, device=device)


class MadeOfWeight(Generic[Made]):
    """What is made of a weight as it is, once per optimizer step.

    It is a tuple of tensors, or of such tuples. A CUDA stream that is not the one where it was made
    waits for that one before it reads it. What is made while a CUDA graph is captured is there only
    once that is replayed, and a graph must renew what it reads: neither takes what the other made,
    but for what an optimizer renews where it lies.
    """

    def __init__(self) -> None:
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._key: tuple[Stamp, Hashable, int] | None = None
        self._made: Made | None = None
        self._stream: torch.cuda.Stream | None = None
        # Whether it was made in a capture; None where an optimizer renews it.
        self._captured: bool | None = False
        self.forgotten = 0  # how often

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
        captured, made = capturing(weight), self._made
        usable = known and self._captured in (None, captured)
        if made is None or not usable or (stamp(weight), key, _changes) != self._key:
            # Backward could save nothing of that mode. Leaving it where it is off takes 0.2 ms.
            inference = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if inference else nullcontext():
                made = make()
            if captured and not _OURS:
                return made  # or the next graph of someone else would read this one's
            self._keep(weight, key, made, stamp(weight), captured)
        if self._stream is not None:
            wait_for(self._stream, made)
        return made

    def forget(self) -> None:
        """Drop what was made, unless an optimizer renews it."""
        if self._captured is not None:
            self._made, self.forgotten = None, self.forgotten + 1

    @property
    def latest(self) -> Made | None:
        """What was made last, which may no longer be of the weight as it is."""
        return self._made

    def _keep(
        self, weight: torch.Tensor, key: Hashable, made: Made, of: Stamp, captured: bool | None
    ) -> None:
        self._made, self._weight, self._key = made, weakref.ref(weight), (of, key, _changes)
        self._captured = captured
        self._stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None

    def __deepcopy__(self, memo: object) -> MadeOfWeight[Made]:
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def wait_for(stream: torch.cuda.Stream, made: object) -> None:
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
    weight's `data`) need no call, nor do any before `train` or `eval` changes the mode, unless
    `AdamW` of this package renews the codes. Others in place through `weight.data` do: an update by
    hand, an adapter that is merged.
    """
    global _changes
    _changes += 1


register_optimizer_step_post_hook(weights_changed)


class RenewedByMode(nn.Module):
    """A module that makes of weights anew what it keeps, where `train` or `eval` changes its mode.

    About these, averaged weights are swapped in and out through `data`, which torch does not count.
    What an optimizer renews stays: there is one copy of it.
    """

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as any module does."""
        if mode != self.training:
            for value in vars(self).values():
                if isinstance(value, MadeOfWeight):
                    value.forget()
        return super().train(mode)


_OURS: list[None] = []  # one for each capture of ours under way


@contextmanager
def within_capture() -> Iterator[None]:
    """Keep what is made in a capture for the rest of it; forget it where the capture fails.

    What is made in one must be forgotten before the next begins, as `weights_changed` does.
    """
    _OURS.append(None)
    try:
        yield
    except BaseException:
        weights_changed()
        raise
    finally:
        _OURS.pop()
