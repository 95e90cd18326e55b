"""A step of AdamW by clusters: its machine code, legality, choice, and on a GPU every path of it.

Of fp32 moments and of INT8 ones.
"""

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
from jetfire.kernels_cuda.adamw_cluster import ClusterConfig
from jetfire.kernels_cuda.tiles import Access

NAMES = ("adamw", "adamw8")
KINDS = (("adamw", "fp32"), ("adamw8", "fp32"), ("adamw8", "bf16"))  # ops, and dtypes of weights
SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
BOXES = Access(tma=True, q=4, qt=16, stream=16)
SINGLE = Access(tma=False, q=1, qt=1, stream=1)
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = {"adamw": MOMENTS, "adamw8": (*MOMENTS, "exp_avg_scale", "exp_avg_sq_scale")}
# Clusters of every size, and every height of a warp's rows.
CONFIGS = {
    "adamw": (
        ClusterConfig(8, 4, 3),
        ClusterConfig(16, 4, 1),
        ClusterConfig(4, 8, 3),
        ClusterConfig(8, 8, 1),
    ),
    "adamw8": (
        ClusterConfig(8, 4, 4),
        ClusterConfig(16, 4, 2),
        ClusterConfig(4, 8, 5),
        ClusterConfig(8, 8, 2),
        ClusterConfig(16, 8, 1),
    ),
}
# Of all the code, with what is done once per thread.
INSTRUCTIONS = {"adamw": 60, "adamw8": 130}  # per number

every_op = pytest.mark.parametrize("name", NAMES)
every_kind = pytest.mark.parametrize(("name", "dtype"), KINDS)


def kernel_of(name):
    return registry.get_kernel(name, "cluster")


def problem_of(name, m=4096, n=16384, *, dtype="fp32", **fields):
    wide = {} if dtype == "fp32" else {"dtype": dtype}
    return registry.get(name).Problem(m, n, **wide, **fields)


def legal_configs(name, block):
    return [c for c in CONFIGS[name] if c.warps * c.rows <= block]


@pytest.mark.parametrize(
    ("name", "fields", "config", "access"),
    [
        ("adamw", {"block": 128}, ClusterConfig(8, 4, 3), BOXES),
        ("adamw", {"block": 64}, ClusterConfig(8, 4, 3), BOXES),
        ("adamw", {"block": 128, "guarded": True}, ClusterConfig(16, 4, 1), BOXES),
        ("adamw", {"block": 32, "layout": "q"}, ClusterConfig(4, 8, 3), BOXES),
        ("adamw", {"block": 64, "n": 16380, "layout": "qt"}, ClusterConfig(8, 8, 1), BOXES),
        ("adamw", {"block": 32, "layout": "none"}, ClusterConfig(8, 4, 3), BOXES),
        ("adamw", {"block": 64, "n": 16383}, ClusterConfig(8, 4, 3), SINGLE),
        ("adamw", {"block": 128, "n": 16383, "guarded": True}, ClusterConfig(4, 8, 3), SINGLE),
        ("adamw8", {"block": 128}, ClusterConfig(8, 4, 4), BOXES),
        ("adamw8", {"block": 128, "guarded": True}, ClusterConfig(8, 4, 5), BOXES),
        ("adamw8", {"block": 128, "dtype": "bf16"}, ClusterConfig(16, 8, 1), BOXES),
        ("adamw8", {"block": 64, "guarded": True}, ClusterConfig(4, 8, 5), BOXES),
        (
            "adamw8",
            {"block": 64, "dtype": "bf16", "guarded": True},
            ClusterConfig(16, 4, 2),
            BOXES,
        ),
        (
            "adamw8",
            {"block": 32, "dtype": "bf16", "layout": "none"},
            ClusterConfig(8, 4, 4),
            BOXES,
        ),
        ("adamw8", {"block": 64, "n": 16368, "layout": "q"}, ClusterConfig(8, 4, 4), BOXES),
        ("adamw8", {"block": 64, "n": 16368, "dtype": "bf16"}, ClusterConfig(8, 4, 3), BOXES),
        ("adamw8", {"block": 128, "n": 16383}, ClusterConfig(8, 4, 4), SINGLE),
        ("adamw8", {"block": 64, "n": 16383, "dtype": "bf16"}, ClusterConfig(8, 4, 3), SINGLE),
        ("adamw8", {"block": 128, "n": 16383, "dtype": "bf16"}, ClusterConfig(8, 8, 1), SINGLE),
    ],
)
def test_nothing_spills(name, fields, config, access):
    """Of numbers in boxes and of single ones; and blocks of a cluster send words to one another."""
    problem, kernel = problem_of(name, **fields), kernel_of(name)
    assert kernel.legal(problem, config, SM_90) is None
    try:
        found = audit(kernel.program(problem, config, access).cubin((9, 0)))
    except UsageError as error:
        pytest.skip(str(error))
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert ("UTMALDG" in found.instructions) == access.tma
    sends = problem.layout != "none" and kernel.cluster(problem, config) > 1
    assert ("STAS" in found.instructions) == sends
    if access.tma:
        assert sum(found.instructions.values()) / (4 * config.rows) < INSTRUCTIONS[name]
        # Weights, two moments and codes, four at a time, and scales; codes of columns sixteen.
        scales = 2 if name == "adamw" else 3
        assert found.instructions["STG"] <= 4 * config.rows + config.rows // 4 + scales


@every_op
def test_legal_says_why_not(name):
    problem, good, kernel = problem_of(name, block=64), ClusterConfig(), kernel_of(name)
    assert kernel.legal(problem, good, SM_90) is None
    for field, value in {"warps": 3, "rows": 2, "resident": 7}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert kernel.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    for config, reason in (
        (ClusterConfig(16, 8, 1), "warps=16 rows=8: expected 32 to 64 rows of a block"),
        (ClusterConfig(4, 4, 1), "warps=4 rows=4: expected 32 to 64 rows of a block"),
    ):
        assert kernel.legal(problem, config, SM_90) == reason
    small = dataclasses.replace(SM_90, shared_bytes=100 << 10)
    assert kernel.legal(problem, good, small) == "resident=3: too much shared memory"
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in kernel.legal(problem, good, device)


@pytest.mark.parametrize(
    ("name", "config", "registers"),
    [
        ("adamw", ClusterConfig(16, 4, 2), 80),
        ("adamw", ClusterConfig(8, 8, 2), 160),
        ("adamw8", ClusterConfig(16, 4, 3), 48),
        ("adamw8", ClusterConfig(4, 8, 6), 96),
    ],
)
def test_no_more_blocks_than_registers_are_enough_for(name, config, registers):
    expected = f"resident={config.resident}: {registers} registers per thread do not fit"
    assert kernel_of(name).legal(problem_of(name, block=64), config, SM_90) == expected


@every_op
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"eps": 1e-40}, "eps=1e-40: expected 0, or 2^-126 to 2^126"),
        ({"eps": 1e38}, "eps=1e+38: expected 0, or 2^-126 to 2^126"),
        ({"m": 1 << 31}, f"m={1 << 31}: expected at most 2^30"),
    ],
)
def test_other_problems_are_refused(name, fields, reason):
    assert kernel_of(name).legal(problem_of(name, **fields), ClusterConfig(), SM_90) == reason


@every_kind
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1000, 1000), (4096, 16384)])
def test_the_default_is_legal(name, dtype, m, n, capability):
    device, kernel = target_device(capability), kernel_of(name)
    for block, guarded in itertools.product(BLOCKS, (False, True)):
        problem = problem_of(name, m, n, block=block, dtype=dtype, guarded=guarded)
        assert kernel.legal(problem, kernel.default(problem, device), device) is None


@every_op
@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_no_one_s_choice_before_it_is_tuned(name):
    problem = problem_of(name, 1056, 1056, block=128)
    assert choose(registry.get(name), problem, SM_90)[0].name == "triton"


@every_op
def test_a_tile_is_a_whole_cluster(name):
    for block in BLOCKS:
        problem, kernel = problem_of(name, 100, 300, block=block), kernel_of(name)
        tiles = -(-100 // block) * 3
        for config in legal_configs(name, block):
            cluster = kernel.cluster(problem, config)
            assert cluster * config.warps * config.rows == block
            assert kernel.blocks(problem, config, 132) == tiles * cluster


@every_op
def test_numbers_at_any_address_and_pitch(name):
    op, kernel, problem = registry.get(name), kernel_of(name), problem_of(name, 64, 96)
    inputs = op.inputs(problem, torch.device("cpu"))
    outputs = op.outputs(problem, inputs)
    assert kernel.accesses(problem) == kernel.accesses(problem, inputs, outputs) == BOXES
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    moment = torch.empty(64 * 96 + 1, dtype=outputs["exp_avg"].dtype)[1:].view(64, 96)
    single = dataclasses.replace(SINGLE, qt=16)
    assert kernel.accesses(problem, inputs, outputs | {"exp_avg": moment}) == single
    assert kernel.accesses(problem, inputs, outputs | {"q": odd}) == single
    of_columns = outputs | {"qt": odd.view(96, 64)}
    assert kernel.accesses(problem, inputs, of_columns) == dataclasses.replace(BOXES, qt=1)
    wide = torch.empty(64, 104)
    assert kernel.accesses(problem, inputs | {"grad": wide[:, 8:]}, outputs) == BOXES
    assert kernel.accesses(problem, inputs | {"grad": wide[:, 7:103]}, outputs) == single


def test_rows_of_sixteen_bytes_come_in_boxes():
    """Of moments' codes sixteen are that, of fp32 four."""
    columns = dataclasses.replace(BOXES, qt=1)
    for name, n, access in (
        ("adamw", 101, SINGLE),
        ("adamw", 100, columns),
        ("adamw8", 100, SINGLE),
        ("adamw8", 112, columns),
    ):
        assert kernel_of(name).accesses(problem_of(name, 60, n)) == access


def inputs_of(problem, name, device, **options):
    return registry.get(name).inputs(problem, device, **options)


def verified(name, problem, inputs, config=None):
    where, kernel = Device.of(inputs["param"]), kernel_of(name)
    config = config or kernel.default(problem, where)
    assert kernel.legal(problem, config, where) is None
    result = verify(registry.get(name), kernel, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("block", BLOCKS)
def test_tiles_of_every_cluster(device, block, name, dtype):
    """Whole and not, of one row of tiles and of many, of words and of single numbers."""
    sizes = ((1024, 1024), (1, 1), (33, 50), (300, 1600), (129, 144), (1000, 420), (257, 130))
    where, kernel = Device.of(torch.empty(1, device=device)), kernel_of(name)
    for (m, n), config in itertools.product(sizes, legal_configs(name, block)):
        problem = problem_of(name, m, n, block=block, dtype=dtype)
        for resident in range(config.resident, 0, -1):
            config = dataclasses.replace(config, resident=resident)
            if kernel.legal(problem, config, where) is None:
                verified(name, problem, inputs_of(problem, name, device, data="heavy"), config)
                break


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("layout", ["none", "q", "qt", "both"])
def test_layouts_and_guards(device, layout, guarded, name, dtype):
    for block, n in itertools.product(BLOCKS, (512, 160, 75)):
        fields = {"block": block, "layout": layout, "guarded": guarded, "dtype": dtype}
        problem = problem_of(name, 200, n, **fields)
        verified(name, problem, inputs_of(problem, name, device, data="outlier"))


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("row", [0, 40, 127])
def test_one_number_decides_its_block_s_scale_whichever_slice_holds_it(device, row, name, dtype):
    problem = problem_of(name, 256, 256, block=128, dtype=dtype)
    for value in (2.0**60, math.inf, math.nan):
        inputs = inputs_of(problem, name, device)
        inputs["param"][row, 130], inputs["grad"][row, 130] = value, 0.0
        inputs["exp_avg"][row] = 0
        verified(name, problem, inputs)


def of_any_size(inputs):
    """Spread a step's numbers, subnormal ones and infinite ones among them."""
    generator = torch.Generator().manual_seed(0)

    def spread(name, least, most):
        powers = torch.randint(least, most, inputs[name].shape, generator=generator)
        inputs[name] *= powers.double().exp2().to(inputs[name])

    if "exp_avg_scale" in inputs:
        spread("grad", -149, 127)
        spread("exp_avg_scale", -70, 70)
        spread("exp_avg_sq_scale", -35, 35)
        inputs["exp_avg_scale"][5] = inputs["exp_avg_sq_scale"][5] = 0
    else:
        spread("grad", -149, 55)  # above, its square is beyond fp32
        spread("exp_avg", -149, 120)
        spread("exp_avg_sq", -110, 120)
        inputs["exp_avg"][5], inputs["exp_avg_sq"][5], inputs["grad"][5] = 0, 0, 1
        inputs["grad"][7], inputs["exp_avg"][7], inputs["exp_avg_sq"][7] = 0, 2.0**-70, 2.0**-140
    inputs["grad"][5, ::2] = 0
    inputs["grad"][9, 3], inputs["grad"][200, 17] = math.inf, math.nan


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@every_kind
def test_numbers_of_any_size(device, name, dtype, eps):
    """Roots of subnormal numbers and of the largest, of 0 and of infinity."""
    for block, n in itertools.product(BLOCKS, (512, 130)):
        problem = problem_of(name, 256, n, block=block, dtype=dtype, eps=eps)
        inputs = inputs_of(problem, name, device)
        of_any_size(inputs)
        verified(name, problem, inputs)


@pytest.mark.gpu
@every_kind
def test_found_inf_leaves_all_as_it_was(device, name, dtype):
    for m, n in ((40, 140), (256, 256)):
        problem = problem_of(name, m, n, block=128, guarded=True, dtype=dtype)
        inputs = inputs_of(problem, name, device)
        inputs["found_inf"].fill_(1)
        inputs["grad_scale"].fill_(math.nan)
        inputs["grad"][3, 5] = math.inf
        verified(name, problem, inputs)


@pytest.mark.gpu
@every_op
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_gradient(device, offset, name):
    problem = problem_of(name, 300, 1024, block=64)
    inputs = inputs_of(problem, name, device)
    wide = torch.full((300, 1072), math.nan, device=device)
    wide[:, offset : offset + 1024] = inputs["grad"]
    verified(name, problem, inputs | {"grad": wide[:, offset : offset + 1024]})


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_kept_is_triton_s_to_the_bit_and_the_same_in_every_run(device, block, name, dtype):
    problem, op = problem_of(name, 2048, 2048, block=block, dtype=dtype), registry.get(name)
    inputs = inputs_of(problem, name, device)
    triton, kernel = registry.get_kernel(name, "triton"), kernel_of(name)
    where = Device.of(inputs["param"])
    theirs = op.outputs(problem, inputs)
    launch(triton, problem, triton.default(problem, where), inputs, theirs)
    first = None
    for _ in range(20):
        found = op.outputs(problem, inputs)
        launch(kernel, problem, kernel.default(problem, where), inputs, found)
        assert all(torch.equal(found[part], theirs[part]) for part in KEPT[name])
        first = first or found
        assert all(torch.equal(found[part], tensor) for part, tensor in first.items())
