"""Whole launches of the sm_90a GEMM on the host: a thread there for each of a block's."""

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.kernels_cuda.gemm import wgmma
from jetfire.kernels_cuda.gemm.config import WgmmaConfig
from jetfire.reference.gemm import gemm, gemm_telescoped
from jetfire.tests.host_cuda import built, launches_here, needs_a_compiler

OP = registry.get("gemm")
KERNEL = registry.get_kernel("gemm", "wgmma")
NO_CUPY = "needs CuPy: pip install 'jetfire[cuda]'"
SUMS = {"exact": gemm, "telescoped": gemm_telescoped}
# Several ragged tiles, of fewer steps of 128 of K than the ring has slots and of more.
SIZES = ((200, 260, 40), (136, 140, 384), (130, 250, 640), (70, 130, 1300))
CHOICES = (
    {"groups": 2, "stages": 4},
    {"groups": 3, "in_flight": 2, "buffers": 1},
    {"groups": 1, "rows": 2, "raster": 1},
)

pytestmark = needs_a_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The code of a program, on the host; each is built once."""
    found = {}

    def library(of):
        if of.header not in found:
            found[of.header] = built(tmp_path_factory.mktemp("kernel"), of, "gemm.cu")
        return found[of.header]

    return library


@pytest.fixture
def host(library, monkeypatch):
    launches_here(monkeypatch, wgmma, library)
    wgmma._prepare.cache_clear()
    yield
    wgmma._prepare.cache_clear()


@pytest.mark.parametrize(
    ("schedule", "block"), [("exact", 32), ("telescoped", 32), ("telescoped", 128)]
)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
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
