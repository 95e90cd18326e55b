"""adamw8's CUDA kernel: its machine code, legality and choice, and on a GPU every path of it."""

import dataclasses
import itertools
import math

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose, launch, verify
from jetfire.core.machine_code import audit
from jetfire.kernels_cuda.adamw8 import ClusterConfig
from jetfire.kernels_cuda.tiles import Access

OP = registry.get("adamw8")
KERNEL = registry.get_kernel("adamw8", "cluster")
SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
BOXES = Access(tma=True, q=4, qt=16, stream=16)
BYTES = Access(tma=False, q=1, qt=1, stream=1)
KEPT = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
# Clusters of every size, and every height of a warp's rows.
CONFIGS = (
    ClusterConfig(8, 4, 4),
    ClusterConfig(16, 4, 2),
    ClusterConfig(4, 8, 5),
    ClusterConfig(8, 8, 2),
    ClusterConfig(16, 8, 1),
)


def problem_of(m=4096, n=16384, **fields):
    return OP.Problem(m, n, **fields)


def legal_configs(block):
    return [c for c in CONFIGS if c.warps * c.rows <= block]


@pytest.mark.parametrize(
    ("fields", "config", "access"),
    [
        ({"block": 128}, ClusterConfig(8, 4, 4), BOXES),
        ({"block": 128, "guarded": True}, ClusterConfig(8, 4, 5), BOXES),
        ({"block": 128, "dtype": "bf16"}, ClusterConfig(16, 8, 1), BOXES),
        ({"block": 64, "guarded": True}, ClusterConfig(4, 8, 5), BOXES),
        ({"block": 64, "dtype": "bf16", "guarded": True}, ClusterConfig(16, 4, 2), BOXES),
        ({"block": 32, "dtype": "bf16", "layout": "none"}, ClusterConfig(8, 4, 4), BOXES),
        ({"block": 64, "n": 16368, "layout": "q"}, ClusterConfig(8, 4, 4), BOXES),
        ({"block": 64, "n": 16368, "dtype": "bf16"}, ClusterConfig(8, 4, 3), BOXES),
        ({"block": 128, "n": 16383}, ClusterConfig(8, 4, 4), BYTES),
        ({"block": 128, "n": 16383, "dtype": "bf16"}, ClusterConfig(8, 8, 1), BYTES),
    ],
)
def test_nothing_spills(fields, config, access):
    """Of numbers in boxes and of any address; and blocks of a cluster send words to one another."""
    problem = problem_of(**fields)
    assert KERNEL.legal(problem, config, SM_90) is None
    try:
        found = audit(KERNEL.program(problem, config, access).cubin((9, 0)))
    except UsageError as error:
        pytest.skip(str(error))
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert ("UTMALDG" in found.instructions) == access.tma
    sends = problem.layout != "none" and KERNEL.cluster(problem, config) > 1
    assert ("STAS" in found.instructions) == sends
    if access.tma:  # all of the code, with what is done once per thread, of each of its numbers
        assert sum(found.instructions.values()) / (4 * config.rows) < 130


def test_legal_says_why_not():
    problem, good = problem_of(block=64), ClusterConfig()
    assert KERNEL.legal(problem, good, SM_90) is None
    for field, value in {"warps": 3, "rows": 2, "resident": 7}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert KERNEL.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    for config, reason in (
        (ClusterConfig(16, 8, 1), "warps=16 rows=8: expected 32 to 64 rows of a block"),
        (ClusterConfig(4, 4, 1), "warps=4 rows=4: expected 32 to 64 rows of a block"),
        (ClusterConfig(16, 4, 3), "resident=3: 48 registers per thread do not fit"),
        (ClusterConfig(4, 8, 6), "resident=6: 96 registers per thread do not fit"),
    ):
        assert KERNEL.legal(problem, config, SM_90) == reason
    small = dataclasses.replace(SM_90, shared_bytes=100 << 10)
    assert KERNEL.legal(problem, good, small) == "resident=3: too much shared memory"
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in KERNEL.legal(problem, good, device)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"eps": 1e-40}, "eps=1e-40: expected 0, or 2^-126 to 2^126"),
        ({"eps": 1e38}, "eps=1e+38: expected 0, or 2^-126 to 2^126"),
        ({"m": 1 << 31}, f"m={1 << 31}: expected at most 2^30"),
    ],
)
def test_other_problems_are_refused(fields, reason):
    assert KERNEL.legal(problem_of(**fields), ClusterConfig(), SM_90) == reason


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1000, 1000), (4096, 16384)])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_default_is_legal(block, m, n, capability):
    device = target_device(capability)
    for dtype, guarded in itertools.product(("fp32", "bf16"), (False, True)):
        problem = problem_of(m, n, block=block, dtype=dtype, guarded=guarded)
        assert KERNEL.legal(problem, KERNEL.default(problem, device), device) is None


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_no_one_s_choice_before_it_is_tuned():
    assert choose(OP, problem_of(1056, 1056, block=128), SM_90)[0].name == "triton"


def test_a_tile_is_a_whole_cluster():
    for block in BLOCKS:
        problem = problem_of(100, 300, block=block)
        tiles = -(-100 // block) * 3
        for config in legal_configs(block):
            cluster = KERNEL.cluster(problem, config)
            assert cluster * config.warps * config.rows == block
            assert KERNEL.blocks(problem, config, 132) == tiles * cluster


def test_numbers_at_any_address_and_pitch():
    problem = problem_of(64, 96)
    inputs = OP.inputs(problem, torch.device("cpu"))
    outputs = OP.outputs(problem, inputs)
    assert KERNEL.accesses(problem) == KERNEL.accesses(problem, inputs, outputs) == BOXES
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    in_bytes = dataclasses.replace(BYTES, qt=16)
    assert KERNEL.accesses(problem, inputs, outputs | {"exp_avg": odd}) == in_bytes
    assert KERNEL.accesses(problem, inputs, outputs | {"q": odd}) == in_bytes
    of_columns = outputs | {"qt": odd.view(96, 64)}
    assert KERNEL.accesses(problem, inputs, of_columns) == dataclasses.replace(BOXES, qt=1)
    wide = torch.empty(64, 104)
    assert KERNEL.accesses(problem, inputs | {"grad": wide[:, 8:]}, outputs) == BOXES
    assert KERNEL.accesses(problem, inputs | {"grad": wide[:, 7:103]}, outputs) == in_bytes
    assert KERNEL.accesses(problem_of(60, 100)) == BYTES


def verified(problem, inputs, config=None):
    where = Device.of(inputs["param"])
    config = config or KERNEL.default(problem, where)
    assert KERNEL.legal(problem, config, where) is None
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_tiles_of_every_cluster(device, block, dtype):
    """Whole and not, of one row of tiles and of many, of words and of single bytes."""
    sizes = ((1024, 1024), (1, 1), (33, 50), (300, 1600), (129, 144), (1000, 416), (257, 130))
    where = Device.of(torch.empty(1, device=device))
    for (m, n), config in itertools.product(sizes, legal_configs(block)):
        problem = problem_of(m, n, block=block, dtype=dtype)
        for resident in range(config.resident, 0, -1):
            config = dataclasses.replace(config, resident=resident)
            if KERNEL.legal(problem, config, where) is None:
                verified(problem, OP.inputs(problem, device, data="heavy"), config)
                break


@pytest.mark.gpu
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("layout", ["none", "q", "qt", "both"])
def test_layouts_and_guards(device, layout, guarded):
    for block, dtype, n in itertools.product(BLOCKS, ("fp32", "bf16"), (512, 160, 75)):
        problem = problem_of(200, n, block=block, layout=layout, guarded=guarded, dtype=dtype)
        verified(problem, OP.inputs(problem, device, data="outlier"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("row", [0, 40, 127])
def test_one_number_decides_its_block_s_scale_whichever_slice_holds_it(device, row, dtype):
    problem = problem_of(256, 256, block=128, dtype=dtype)
    for value in (2.0**60, math.inf, math.nan):
        inputs = OP.inputs(problem, device)
        inputs["param"][row, 130], inputs["grad"][row, 130] = value, 0.0
        inputs["exp_avg"][row] = 0
        verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_numbers_of_any_size(device, dtype, eps):
    """Roots of subnormal numbers and of the largest, of 0 and of infinity."""
    generator = torch.Generator().manual_seed(0)
    for block, n in itertools.product(BLOCKS, (512, 130)):
        problem = problem_of(256, n, block=block, dtype=dtype, eps=eps)
        inputs = OP.inputs(problem, device)
        powers = torch.randint(-149, 127, (256, n), generator=generator).double().exp2()
        inputs["grad"] *= powers.to(inputs["grad"])
        for name, least in (("exp_avg_scale", -70), ("exp_avg_sq_scale", -35)):
            sizes = torch.randint(least, -least, inputs[name].shape, generator=generator)
            inputs[name] *= sizes.double().exp2().to(inputs[name])
            inputs[name][5] = 0
        inputs["grad"][5, ::2] = 0
        inputs["grad"][9, 3], inputs["grad"][200, 17] = math.inf, math.nan
        verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_found_inf_leaves_all_as_it_was(device, dtype):
    for m, n in ((40, 140), (256, 256)):
        problem = problem_of(m, n, block=128, guarded=True, dtype=dtype)
        inputs = OP.inputs(problem, device)
        inputs["found_inf"].fill_(1)
        inputs["grad_scale"].fill_(math.nan)
        inputs["grad"][3, 5] = math.inf
        verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_gradient(device, offset):
    problem = problem_of(300, 1024, block=64)
    inputs = OP.inputs(problem, device)
    wide = torch.full((300, 1072), math.nan, device=device)
    wide[:, offset : offset + 1024] = inputs["grad"]
    verified(problem, inputs | {"grad": wide[:, offset : offset + 1024]})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_kept_is_triton_s_to_the_bit_and_the_same_in_every_run(device, block, dtype):
    problem = problem_of(2048, 2048, block=block, dtype=dtype)
    inputs = OP.inputs(problem, device)
    triton = registry.get_kernel("adamw8", "triton")
    where = Device.of(inputs["param"])
    theirs = OP.outputs(problem, inputs)
    launch(triton, problem, triton.default(problem, where), inputs, theirs)
    first = None
    for _ in range(20):
        found = OP.outputs(problem, inputs)
        launch(KERNEL, problem, KERNEL.default(problem, where), inputs, found)
        assert all(torch.equal(found[name], theirs[name]) for name in KEPT)
        first = first or found
        assert all(torch.equal(found[name], tensor) for name, tensor in first.items())
