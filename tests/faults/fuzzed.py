"""Kernels of gelu, each wrong in a way of its own, for `jetfire-fuzz --load`."""

import itertools
import os
import time
from dataclasses import dataclass

import triton
import triton.language as tl

from jetfire.core import registry
from jetfire.core.kernel import Config, Kernel

RIGHT = registry.get_kernel("gelu", "torch")


@dataclass(frozen=True)
class Tile(Config):
    tile: int = 1


class Faulty(Kernel):
    """Right, but for problems with n above 10: what is wrong there is the kernel's name."""

    op = "gelu"
    Config = Tile

    def __init__(self, fault):
        self.name = fault.__name__
        self._fault = fault

    def legal(self, problem, config, device):
        return RIGHT.legal(problem, config, device)

    def default(self, problem, device):
        return Tile()

    def space(self, problem, device):
        return {"tile": (1, 2, 3)}

    def launch(self, problem, config, inputs, outputs):
        codes, scale = list(outputs.values())[:2]
        kept = codes[-1].clone()
        RIGHT.launch(problem, None, inputs, outputs)
        if problem.n > 10:
            self._fault(config, inputs, outputs, codes, scale, kept)


def aborts(config, inputs, outputs, codes, scale, kept):
    print("about to end", flush=True)
    os.abort()


def hangs(config, inputs, outputs, codes, scale, kept):
    time.sleep(1000)


def raises(config, inputs, outputs, codes, scale, kept):
    raise RuntimeError("no such thing")


def wrong(config, inputs, outputs, codes, scale, kept):
    scale[0, 0] += 1.0


def beyond(config, inputs, outputs, codes, scale, kept):
    codes.as_strided((1,), (1,), codes.storage_offset() + codes.numel()).fill_(1)


@triton.jit
def _read(x, y, at):
    tl.store(y, tl.load(x + at))


def reads_beyond(config, inputs, outputs, codes, scale, kept):
    x = inputs["x"]
    _read[(1,)](x, kept, x.stride(0) * (x.shape[0] - 1) + x.shape[1])


def changes_input(config, inputs, outputs, codes, scale, kept):
    inputs["x"][0, 0] ^= 1


def unwritten(config, inputs, outputs, codes, scale, kept):
    codes[-1] = kept


LAUNCHES = itertools.count()


def random(config, inputs, outputs, codes, scale, kept):
    """Within the tolerance; no launch like the one before, in the same order each time."""
    _spread(outputs, 1 + 1e-6 * (next(LAUNCHES) % 8))


def _spread(outputs, factor):
    """Both copies' scales of the first block."""
    for name in ("scale", "scale_t"):
        if name in outputs:
            outputs[name][0, 0] *= factor


def by_config(config, inputs, outputs, codes, scale, kept):
    """Within the tolerance."""
    if config.tile == 3:
        _spread(outputs, 1 + 2.0**-20)


FAULTS = (
    aborts,
    hangs,
    raises,
    wrong,
    beyond,
    reads_beyond,
    changes_input,
    unwritten,
    random,
    by_config,
)
KERNELS = tuple(map(Faulty, FAULTS))
