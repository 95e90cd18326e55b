"""The sm_90a GEMM's interleaved schedule: what it takes, and its machine code."""

import itertools
import re

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.kernels_cuda.gemm.config import WgmmaConfig
from jetfire.reference.gemm import gemm_telescoped
from jetfire.tests.audited import together

OP = registry.get("gemm")
KERNEL = registry.get_kernel("gemm", "wgmma")
DEPBAR = "WARPGROUP.DEPBAR.LE gsb0, "
HOPPER = target_device((9, 0))
OUTPUTS = (
    {"out": "bf16", "bias": True},
    {"out": "fp32", "accumulate": True},
    {"out": "fp32", "squares": True},
    {"out": "int8", "out_block": 32, "layout": "both", "rounding": "stochastic"},
    {"out": "int8", "out_block": 128},
)


def case(options=OUTPUTS[0], block=128, **fields):
    config = WgmmaConfig(**{"groups": 2, "schedule": "interleaved", **fields})
    return OP.Problem(1024, 1024, 1024, block=block, **options), config


def test_what_it_does_not_do_is_refused():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)

    def legal(**fields):
        return KERNEL.legal(*case(**fields), HOPPER)

    tiles = [(1, 64), (1, 96), (2, 64), (2, 96), (2, 128), (3, 64)]
    for groups, tile_n in itertools.product((1, 2, 3, 4), (32, 64, 96, 128, 192)):
        takes = (groups, tile_n) in tiles or tile_n == 32
        assert (legal(groups=groups, tile_n=tile_n) is None) == takes, (groups, tile_n)
    assert legal(stream=True, cluster_m=2) is None
    assert legal(block=32) == "schedule=interleaved block=32: expected blocks of 128"
    for fields in ({"in_flight": 1}, {"rows": 2, "tile_n": 32}):
        assert legal(**fields) == "schedule=interleaved: expected rows=1 and in_flight=0"


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_best_config_of_each_schedule_is_of_that_schedule(capability, block):
    problem, device = case(block=block)[0], target_device(capability)
    names = KERNEL.space(problem, device)["schedule"]
    assert ("interleaved" in names) == (block == 128)
    found = KERNEL.schedules(problem, device)
    assert tuple(config.schedule for config in found) == names
    if KERNEL.unfit(device) is None:
        assert [KERNEL.legal(problem, config, device) for config in found] == [None] * len(names)


def test_one_sum_is_multiplied_while_the_other_is_promoted():
    """Products wait for the one before last; ptxas has put no wait of its own between them."""
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    cases = [
        case(options, groups=groups, tile_n=tile_n, stages=3, stream=stream)
        for options, (groups, tile_n), stream in itertools.product(
            OUTPUTS, ((2, 128), (3, 64)), (False, True)
        )
    ]
    cases = [one for one in cases if KERNEL.legal(*one, HOPPER) is None]
    assert len(cases) == 18  # blocks of 128 codes do not fit three groups
    audits = together(lambda *one: KERNEL.cubins(*one, (9, 0))[0], cases)
    for problem, config in cases:
        found = re.findall(
            rf"\b(IGMMA|LDL|STL|{re.escape(DEPBAR)}0x\d)\b", audits[problem, config].sass
        )
        name = f"{problem}, {config}"
        spills = [at for at, x in enumerate(found) if x in ("LDL", "STL")]
        first, last = found.index("IGMMA"), len(found) - found[::-1].index("IGMMA")
        assert not any(first < at < last for at in spills), name
        assert len(spills) <= 2, name  # of a register, where biases are added to parts' sums
        # The first step's product, two in the loop, and one before an even number of steps ends,
        # each of these followed by the wait for the one before it; each end's wait for its own.
        product, before, own = ["IGMMA"] * 4, DEPBAR + "0x1", DEPBAR + "0x0"
        found = [x for x in found if x not in ("LDL", "STL")]
        loop = [*product, *[*product, before] * 2]
        ends = [*product, before, own], [own]
        assert found in ([*loop, *a, *b] for a, b in itertools.permutations(ends)), name


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [3, 6])
@pytest.mark.parametrize("cluster_n", [1, 2])
def test_tiles_of_every_number_of_steps_are_right(device, cluster_n, stages):
    """Two tiles or three per block, of fewer steps than the ring has slots and of more."""
    found = Device.parse(str(device))
    config = WgmmaConfig(
        groups=2, schedule="interleaved", stages=stages, cluster_n=cluster_n, buffers=1
    )
    for k in range(128, 1280, 128):
        problem = OP.Problem(2300, 2300, k, block=128, out="fp32")
        if (reason := KERNEL.legal(problem, config, found)) is not None:
            pytest.skip(reason)
        inputs = OP.inputs(problem, device)
        outputs = OP.poison(problem, OP.outputs(problem, inputs))
        KERNEL.launch(problem, config, inputs, outputs)
        operands = [inputs[x] for x in ("a", "a_scale", "b", "b_scale")]
        assert torch.equal(outputs["c"], gemm_telescoped(*operands, 128, config.chains)), k
