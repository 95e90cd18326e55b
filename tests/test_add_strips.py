"""add's CUDA kernel: its machine code, legality and choice, and on a GPU every path through it."""

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
from jetfire.kernels_cuda.add import StripsConfig
from jetfire.kernels_cuda.tiles import Access

OP = registry.get("add")
KERNEL = registry.get_kernel("add", "strips")
SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
BOXES = Access(tma=True, q=8, qt=1, stream=16)
BYTES = Access(tma=False, q=8, qt=1, stream=2)
# Blocks of every number of warps, as many as fit, and rings of every length.
CONFIGS = (
    StripsConfig(8, 1, 2),
    StripsConfig(8, 2, 1),
    StripsConfig(16, 1, 1),
    StripsConfig(6, 1, 3),
    StripsConfig(4, 2, 2),
    StripsConfig(2, 1, 8),
    StripsConfig(2, 4, 2),
    StripsConfig(4, 3, 1),
)


def problem_of(m=8192, n=1024, **fields):
    return OP.Problem(m, n, **{"out_block": 32, **fields})


def audited(problem, config, access=BOXES):
    try:
        return audit(KERNEL.program(problem, config, access).cubin((9, 0)))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("config", "access"),
    [
        (StripsConfig(8, 1, 2), BOXES),
        (StripsConfig(16, 1, 1), BOXES),
        (StripsConfig(2, 1, 8), BOXES),
        (StripsConfig(4, 2, 2), BYTES),
        (StripsConfig(6, 1, 3), BYTES),
    ],
)
def test_nothing_spills(config, access):
    """Of numbers in boxes and of any address; the sum and its codes leave in boxes."""
    problem = problem_of()
    assert KERNEL.legal(problem, config, SM_90) is None
    found = audited(problem, config, access)
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert "UTMASTG" in found.instructions
    assert ("UTMALDG" in found.instructions) == access.tma
    # All of the code, with what is done once per strip or band, per each of a lane's 32 numbers.
    assert sum(found.instructions.values()) / 32 < 42


@pytest.mark.parametrize("config", CONFIGS)
def test_rings_of_every_length_are_legal(config):
    assert KERNEL.legal(problem_of(), config, SM_90) is None


def test_legal_says_why_not():
    problem, good = problem_of(), StripsConfig()
    assert KERNEL.legal(problem, good, SM_90) is None
    for field, value in {"warps": 3, "stages": 5, "resident": 5}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert KERNEL.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    for config, reason in (
        (StripsConfig(8, 1, 4), "resident=4: 80 registers per thread do not fit"),
        (StripsConfig(8, 1, 3), "resident=3 stages=1: too much shared memory"),
        (StripsConfig(8, 3, 1), "resident=1 stages=3: too much shared memory"),
    ):
        assert KERNEL.legal(problem, config, SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in KERNEL.legal(problem, good, device)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "bwd"}, "mode=bwd: expected fwd"),
        ({"rounding": "stochastic"}, "rounding=stochastic: expected nearest"),
        ({"layout": "both"}, "layout=both: expected q"),
        ({"out_block": 128}, "out_block=128: expected 32"),
        ({"n": 1000}, "n=1000: expected a multiple of 32"),
        ({"m": 1 << 31}, f"m={1 << 31}: expected at most 2^30"),
    ],
)
def test_other_forms_are_refused(fields, reason):
    assert KERNEL.legal(problem_of(**fields), StripsConfig(), SM_90) == reason


@pytest.mark.parametrize("n", [32, 768, 1024, 1056, 4096, 16384])
def test_the_default_is_legal(n):
    """And where a block's warps hold all of a row it has a stage each."""
    problem = problem_of(n=n)
    config = KERNEL.default(problem, SM_90)
    assert KERNEL.legal(problem, config, SM_90) is None
    assert (config.warps * config.stages * 128 >= n) == (n <= 2048)


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_no_one_s_choice_before_it_is_tuned():
    assert choose(OP, problem_of(n=1056), SM_90)[0].name == "triton"


def test_numbers_at_any_address_and_pitch():
    problem = problem_of(64, 96)
    inputs = OP.inputs(problem, torch.device("cpu"))
    assert KERNEL.accesses(problem) == KERNEL.accesses(problem, inputs) == BOXES
    odd = torch.empty(64 * 96 + 1, dtype=torch.int8)[1:].view(64, 96)
    assert KERNEL.accesses(problem, inputs | {"y": odd}) == BYTES
    wide = torch.empty(64, 112, dtype=torch.bfloat16)
    assert KERNEL.accesses(problem, inputs | {"x": wide[:, 8:104]}) == BOXES
    assert KERNEL.accesses(problem, inputs | {"x": wide[:, 1:97]}) == BYTES


def verified(problem, inputs, config=None):
    where = Device.of(inputs["x"])
    config = config or KERNEL.default(problem, where)
    assert KERNEL.legal(problem, config, where) is None
    result = verify(OP, KERNEL, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("block", BLOCKS)
def test_bands(device, block, config):
    """Rows of a strip and of many, whole and not, in bands that are whole and that are not."""
    sizes = ((8192, 1024), (8192, 768), (1, 32), (300, 1600), (129, 4096), (31, 96), (1000, 416))
    for (m, n), data in itertools.product(sizes, ("normal", "heavy")):
        problem = problem_of(m, n, block=block)
        verified(problem, OP.inputs(problem, device, data=data), config)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5])
def test_means_far_from_0(device, eps):
    """Rows of one number throughout, of numbers close to one another, and with one far away."""
    problem = problem_of(500, 1600, eps=eps)
    inputs = OP.inputs(problem, device)
    x, generator = inputs["x"], torch.Generator().manual_seed(0)
    x += (10.0 ** torch.randint(-3, 5, (500, 1), generator=generator)).to(x)
    x[::3] = x[::3, :1]
    inputs["y"][::3] = 0
    x[1::3, 1:] *= 1e-3
    verified(problem, inputs)


@pytest.mark.gpu
def test_extreme_values(device):
    problem = problem_of(512, 640)
    inputs = OP.inputs(problem, device)
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-120, 100, (16, 20), generator=generator)
    x, scale = inputs["x"], inputs["y_scale"]
    x *= (2.0**powers).repeat_interleave(32, 0).repeat_interleave(32, 1).to(x)
    scale *= (2.0 ** powers.flip(0)).to(scale)
    verified(problem, inputs)
    x[40, 50], x[300, 7], x[511, 639] = math.nan, math.inf, -math.inf
    scale[2, 3], scale[15, 19], scale[9, 9] = math.nan, math.inf, 0.0
    verified(problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_and_unaligned(device, offset):
    problem = problem_of(300, 1024)
    inputs = OP.inputs(problem, device)
    for name in ("x", "y"):
        wide = torch.full((300, 1072), 77, dtype=inputs[name].dtype, device=device)
        wide[:, offset : offset + 1024] = inputs[name]
        inputs[name] = wide[:, offset : offset + 1024]
    scale = torch.full((10, 41), torch.nan, dtype=torch.float32, device=device)
    scale[:, 3:35] = inputs["y_scale"]
    inputs["y_scale"] = scale[:, 3:35]
    verified(problem, inputs)


@pytest.mark.gpu
def test_a_result_is_the_same_in_every_run(device):
    problem = problem_of(20000, 1024)
    inputs = OP.inputs(problem, device)
    config = KERNEL.default(problem, Device.of(inputs["x"]))
    expected, found = OP.outputs(problem, inputs), OP.outputs(problem, inputs)
    launch(KERNEL, problem, config, inputs, expected)
    for _ in range(20):
        launch(KERNEL, problem, config, inputs, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
