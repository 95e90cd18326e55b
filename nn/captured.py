"""A training step of a user's own as one CUDA graph: the host launches once per step.

A converted step is hundreds of kernels, and under FSDP2 thousands of calls of Python that decide
what to gather next. Where the host takes longer for that than the GPU for the kernels, the GPU
waits. A graph holds all of it, the collectives too, and is launched by one call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from jetfire.core.errors import UsageError
from jetfire.nn.made import within_capture
from jetfire.nn.optimizer import replaying

# Those that are in use.
_LIVE: WeakSet[CapturedStep] = WeakSet()
# Steps before the capture: the first compiles kernels, and FSDP2, the optimizer and cuBLAS must
# have made what they keep before a graph can find it where it stays.
LAUNCHED = 3


class CapturedStep:
    """A step that is launched three times, then captured in a CUDA graph, and replayed since.

    Every call takes a real step: capturing changes nothing. Parameters, gradients and the
    optimizer's state are written where they are, so that they can be read, saved or evaluated
    between steps. What is returned has no graph of autograd's; after the capture it is a copy.
    Random numbers follow torch's seed, as in the step.

    The step may call a model that `torch.compile` has compiled (without CUDA graphs of its own) or
    `fully_shard` has sharded; every process of a sharded one makes the same calls. All backward
    passes of the model must be within the step: a gradient is added up on the stream of the first.

    Args:
        step: forward, backward, the optimizer's step and what else belongs to it, such as clipping.
            It drops the gradients (`zero_grad()`) before backward. It must not wait for the device
            (`loss.item()`), and what it does must not depend on numbers but those of its tensors.
        optimizer: what the step calls, made with `capturable=True`. A rate that changes is a
            tensor, which torch's schedulers fill in place.

    Raises:
        UsageError: the optimizer is not capturable, or its parameters are on no CUDA device.
    """

    def __init__(self, step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
        self.step, self.optimizer = step, optimizer
        self.device = _device_of(optimizer)
        self._stream = torch.cuda.Stream(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launched = 0
        self._inputs: list[Any] = []
        self._layout: TreeSpec | None = None
        self._outputs: Any = None
        _LIVE.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; return what the step returns.

        Tensors, also within lists and mappings, may change their numbers from call to call; their
        shapes and dtypes, and all else, are those of the call that was captured.

        Raises:
            UsageError: a tensor is on another device, an argument is not as it was captured, or the
                step waits for the device.
        """
        if self._launched < LAUNCHED:
            self._launched += 1
            with self.beside():
                outputs = self.step(*args, **kwargs)
            return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        inputs, layout = tree_flatten((args, kwargs))
        if self._graph is None:
            self._capture(inputs, layout)
        self._take(inputs, layout)
        assert self._graph is not None
        with replaying(self.optimizer):
            self._graph.replay()
        return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), self._outputs)

    def beside(self) -> AbstractContextManager[None]:
        """Return a context whose work is on the capture's stream: for a backward of one's own."""
        return beside(self._stream)

    def release(self) -> None:
        """Let go of the graph; a later call captures anew.

        Before `destroy_process_group()`: NCCL waits, for ever, until no graph holds its
        collectives.
        """
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._outputs = None

    def _capture(self, inputs: list[Any], layout: TreeSpec) -> None:
        for value in inputs:
            if isinstance(value, torch.Tensor) and value.device != self.device:
                raise UsageError(f"a tensor on {value.device}: expected {self.device}, as captured")
        self._inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        args, kwargs = layout.unflatten(self._inputs)
        with replaying(self.optimizer):
            pass  # so that all weights' codes are made in the graph, but those that an update makes
        self.optimizer.zero_grad(set_to_none=True)  # or there would be two of each
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._stream):
            self._outputs = self.step(*args, **kwargs)
        self._graph, self._layout = graph, layout

    def _take(self, inputs: list[Any], layout: TreeSpec) -> None:
        """Copy a call's tensors to where the graph reads them."""
        if layout != self._layout:
            raise UsageError(
                "other arguments than were captured: expected as many, of the same names"
            )
        for kept, given in zip(self._inputs, inputs, strict=True):
            if not isinstance(kept, torch.Tensor):
                if kept is not given and kept != given:
                    raise UsageError(f"{given!r}: expected {kept!r}, as captured")
                continue
            if _kind(given) != _kind(kept):
                raise UsageError(f"{_kind(given)}: expected {_kind(kept)}, as captured")
            kept.copy_(given, non_blocking=True)


def release_all() -> None:
    """Release every captured step of the process, whoever still holds it."""
    for step in list(_LIVE):
        step.release()


@contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Enclose what runs on another stream, between what the current one has before and after.

    A node that adds up a gradient stays on the stream of the first call that has it, as long as
    anything holds the node; a capture that waited for another stream failed (a Llama block under
    torch.compile, H100). So what is captured has run on the capture's stream before.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is launched in here, on a stream.

    Raises:
        UsageError: it waits for the device, or does else what no graph can hold.
    """
    handled = sys.exception()
    # "global" would forbid other threads what they do: NCCL's watchdog asks after events, and a
    # loader of data pins memory.
    mode = "thread_local"
    try:
        with (
            within_capture(),
            _own_workspaces(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode=mode),
        ):
            yield
    except RuntimeError as error:
        leave_capture(stream.device)
        cause = _cause(error, handled)
        if not isinstance(cause, RuntimeError):  # Ctrl-C, or an error of the step's own
            raise cause from None
        reason = str(cause).partition("\n")[0]
        raise UsageError(f"the step cannot be captured in a CUDA graph: {reason}") from error


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Have cuBLAS's workspaces of a capture be of the graph's own memory.

    torch keeps one for each stream, and frees them where other graphs are made: `reduce-overhead`
    does before it captures. A graph that had found one from before would write to what is no more.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _cause(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return what went wrong first: ending a capture says only that it has failed.

    Args:
        handled: what was handled already when the capture began.
    """
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    return error


def leave_capture(device: torch.device) -> None:
    """Have torch draw on a device again, once a capture there has failed.

    Such a capture does not end for torch's generator, which then draws within a capture alone, and
    lets no graph that draws be replayed. Another one that does not fail ends it. Where even that
    does not, the generator begins anew, which graphs of before do not know.
    """
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
            torch.zeros(1, dtype=torch.float32, device=device)
        torch.rand(1, dtype=torch.float32, device=device)
    except RuntimeError:
        fresh = torch.Generator(device)
        default = torch.cuda.default_generators[device.index]
        default.graphsafe_set_state(fresh.graphsafe_get_state())


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the one CUDA device of an optimizer that can be captured.

    Raises:
        UsageError: there is none, or it cannot.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = {p.device for p in parameters}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise UsageError(f"parameters on {names}: expected one CUDA device")
    if not all(group.get("capturable", False) for group in optimizer.param_groups):
        raise UsageError(f"{type(optimizer).__name__}: expected it made with capturable=True")
    return next(iter(devices))


def _kind(value: Any) -> str:
    """Return a tensor's shape and dtype in words; the type of what is none."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = "×".join(map(str, value.shape)) or "scalar"
    return f"{shape} {str(value.dtype).removeprefix('torch.')}"
