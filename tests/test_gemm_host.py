"""Whole launches of the sm_90a GEMM on the host: a thread there for each of a block's."""

import functools
import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.kernels_cuda.gemm import wgmma
from jetfire.kernels_cuda.gemm.config import WgmmaConfig
from jetfire.reference.gemm import gemm, gemm_telescoped
from jetfire.tests.host_cuda import launches_here, libraries, needs_a_compiler

OP = registry.get("gemm")
KERNEL = registry.get_kernel("gemm", "wgmma")
NO_CUPY = "needs CuPy: pip install 'jetfire[cuda]'"
SUMS = {
    "exact": gemm,
    "telescoped": gemm_telescoped,
    "interleaved": functools.partial(gemm_telescoped, chains=2),
}
# Several ragged tiles, of fewer steps of 128 of K than the ring has slots and of more.
SIZES = (
    *((200, 260, 40), (136, 140, 256), (130, 250, 640), (70, 130, 1300)),
    *((130, 70, 1024), (60, 70, 2300)),
)
CHOICES = (
    {"groups": 2, "stages": 4},
    {"groups": 3, "in_flight": 2, "buffers": 1},
    {"groups": 1, "rows": 2, "raster": 1},
)
CASES = (("exact", 32), ("telescoped", 32), ("telescoped", 128))

pytestmark = needs_a_compiler


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with launches_here(wgmma, libraries(tmp_path_factory, "gemm.cu")):
        yield


@pytest.mark.parametrize(
    ("schedule", "block", "choice"),
    [
        *((*case, choice) for case in CASES for choice in CHOICES),
        *(("interleaved", 128, {"groups": 2, "stages": stages}) for stages in (3, 4, 5)),
        ("interleaved", 128, {"groups": 1}),
    ],
    ids=str,
)
def test_launches_on_the_host_have_the_schedule_s_bits(host, block, choice, schedule):
    config = WgmmaConfig(**{"tile_n": 64, "stages": 3, "schedule": schedule, **choice})
    for m, n, k in SIZES:
        problem = OP.Problem(m, n, k, block=block, out="fp32")
        assert KERNEL.legal(problem, config, target_device((9, 0))) in (None, NO_CUPY)
        inputs = OP.inputs(problem, torch.device("cpu"))
        outputs = OP.poison(problem, OP.outputs(problem, inputs))
        KERNEL.launch(problem, config, inputs, outputs)
        operands = [inputs[x] for x in ("a", "a_scale", "b", "b_scale")]
        assert torch.equal(outputs["c"], SUMS[schedule](*operands, block)), problem


def parts_of(tiles, steps, blocks):
    """The steps at which each tile's K is cut: all tiles' steps are dealt out evenly to blocks."""
    ends = [tiles * steps * block // blocks for block in range(1, blocks)]
    return [
        [0, *(end - tile * steps for end in ends if 0 < end - tile * steps < steps), steps]
        for tile in range(tiles)
    ]


@pytest.mark.parametrize(
    ("schedule", "block"),
    [
        *((name, side) for name in ("exact", "telescoped") for side in (32, 128)),
        ("interleaved", 128),
    ],
)
@pytest.mark.parametrize("k", [300, 1300, 2300])
def test_streamed_launches_have_the_bits_of_their_parts(host, block, k, schedule):
    """Three tiles below each other, which two blocks share: the middle one's K is cut."""
    config = WgmmaConfig(groups=2, tile_n=64, stages=3, schedule=schedule, stream=True)
    problem = OP.Problem(300, 60, k, block=block, out="fp32")
    inputs = OP.inputs(problem, torch.device("cpu"))
    for name in ("a_scale", "b_scale"):  # of one binade, so that each part alone has K's own shift
        inputs[name] = 2**-8 * (1 + torch.rand_like(inputs[name]))
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, config, inputs, outputs)
    for tile, cuts in enumerate(parts_of(3, -(-k // 128), 2)):
        rows = slice(128 * tile, 128 * (tile + 1))
        total = None
        for first, end in itertools.pairwise(cuts):
            codes = slice(128 * first, 128 * end)
            scales = slice(128 // block * first, 128 // block * end)
            sums = SUMS[schedule](
                inputs["a"][rows, codes],
                inputs["a_scale"][128 // block * tile : 128 // block * (tile + 1), scales],
                inputs["b"][:, codes],
                inputs["b_scale"][:, scales],
                block,
            )
            total = sums if total is None else total + sums
        assert torch.equal(outputs["c"][rows], total), (tile, cuts)
