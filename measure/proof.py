"""Proof that the calls that were timed do the work: they run again, on inputs that are new to them.

A kernel could be right when it is checked and do less when it is timed: keep its outputs, skip a
launch, or leave what memory happens to hold. And it could change what times are taken with.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.op import Check, Op
from jetfire.core.tensors import Tensors, alias, changed
from jetfire.measure import timer
from jetfire.measure.timer import Call

_PERSISTING_L2 = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


@dataclass(frozen=True)
class Sets:
    """The sets of inputs and outputs among which the timed calls of a problem rotate.

    Attributes:
        draw: makes inputs of a seed.
    """

    op: Op
    problem: Any
    draw: Callable[[int], Tensors]
    inputs: Sequence[Tensors]
    outputs: Sequence[Tensors]

    @classmethod
    def drawn(
        cls, op: Op, problem: Any, device: torch.device, count: int, seed: int, data: str
    ) -> Sets:
        """Return as many sets, their inputs of consecutive seeds."""

        def draw(seed: int) -> Tensors:
            return op.inputs(problem, device, seed, data)

        inputs = [draw(seed + i) for i in range(count)]
        return cls(op, problem, draw, inputs, [op.outputs(problem, one) for one in inputs])

    def calls(self, kernel: Kernel, config: Any) -> list[Call]:
        """Return a launch for each set."""
        return [
            partial(kernel.launch, self.problem, config, alias(inputs), alias(outputs))
            for inputs, outputs in zip(self.inputs, self.outputs, strict=True)
        ]

    def proved(self, kernel: Kernel, config: Any, run: Call) -> Check:
        """Check what timed calls write into poisoned outputs, of inputs drawn anew in place.

        Nothing holds a right result before they have run: the seed is drawn, and the reference is
        computed afterwards. Outputs are copied in the order of the stream that is timed, the last
        call's first, so that what is still to come from another stream is missing.

        Args:
            run: runs every set's call, as `time_calls` tells it. Where a call adds to its outputs,
                and a graph may hold it several times, each is made once instead.
        """
        seed = secrets.randbits(32)
        fresh = [self.draw(seed + i) for i in range(len(self.inputs))]
        updated = self.op.updated(self.problem)
        for new, inputs, outputs in zip(fresh, self.inputs, self.outputs, strict=True):
            for name, tensor in inputs.items():
                tensor.copy_(new[name])
            for name in updated:
                outputs[name].copy_(new[name])
            self.op.poison(self.problem, outputs)
        if updated:
            for call in self.calls(kernel, config):
                call()
        else:
            run()
        written = [{k: out.clone() for k, out in one.items()} for one in reversed(self.outputs)]
        sets = zip(fresh, self.inputs, reversed(written), strict=True)
        worst = Check(True, 0.0)
        for i, (new, inputs, outputs) in enumerate(sets):
            found = self._judged(kernel, config, new, inputs, outputs)
            if not found.ok:
                return replace(found, message=f"{found.message}, of inputs of seed {seed + i}")
            worst = max(worst, found, key=lambda check: check.rel_err)
        return worst

    def _judged(
        self, kernel: Kernel, config: Any, new: Tensors, inputs: Tensors, outputs: Tensors
    ) -> Check:
        if message := changed(inputs, new):
            return Check(False, math.inf, message)
        expected = self.op.reference(self.problem, new)
        noise = kernel.noise(self.problem, config, new)
        found = self.op.check(self.problem, outputs, expected, noise)
        return found if found.ok else replace(found, message=found.message or "wrong result")


class Guard:
    """A guard of what a kernel may not change: what times are taken with, and the L2 cache."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._aside = self._set_aside()

    def judged(self, check: Check) -> Check:
        """Return a check once the device is done with it, or what was found changed since.

        An L2 cache of which a part was set aside is given back, for the next kernel.
        """
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._device.index)
        if tools := timer.replaced():
            return Check(False, check.rel_err, f"{tools[0]} was replaced: no time can be taken")
        if (aside := self._set_aside()) != self._aside:
            with torch.cuda.device(self._device.index):
                _driver().cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(self._aside))
            return Check(
                False,
                check.rel_err,
                f"{aside} bytes of the L2 cache were set aside for accesses that persist: "
                "the next call would find its inputs there",
            )
        return check

    def _set_aside(self) -> int:
        """Return the bytes of the L2 cache that keep what a stream's policy says."""
        if self._device.kind != "cuda":
            return 0
        size = ctypes.c_size_t()
        with torch.cuda.device(self._device.index):
            torch.cuda.current_stream().query()  # the driver's context is there from here on
            failed = _driver().cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
        return 0 if failed else size.value  # before sm_80 there is no such limit


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
