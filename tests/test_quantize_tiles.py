"""quantize's CUDA kernel, of one matrix and of three: code, legality; on a GPU every path."""

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.launch import choose, launch, verify
from jetfire.kernels_cuda.tiles import Access, PartsConfig
from jetfire.tests.audited import together

SM_90 = target_device((9, 0))
BLOCKS = (32, 64, 128)
FORMS = tuple(itertools.product(("q", "qt", "both"), ("nearest", "stochastic")))
OPS = ("quantize", "quantize_qkv")
WORDS = Access(tma=True, q=8, qt=4, stream=16)
BYTES = Access(tma=False, q=1, qt=1, stream=2)

each_op = pytest.mark.parametrize("name", OPS)


def kernel_of(name):
    return registry.get_kernel(name, "tiles")


def problem_of(name, m=8192, n=1024, **fields):
    return registry.get(name).Problem(m, n, **{"block": 128, "layout": "both", **fields})


def compiled(name, problem, config, access=WORDS):
    return kernel_of(name).program(problem, config, access).cubin((9, 0))


def crowded(layout, rounding, warps):
    """With as many blocks as fit an SM, where registers hold most and where they hold least."""
    block, config = (128, PartsConfig(8, 2, 3)) if warps == 8 else (32, PartsConfig(16, 2, 2))
    problem = problem_of("quantize", block=block, layout=layout, rounding=rounding)
    return "quantize", problem, config


@pytest.fixture(scope="module")
def crowds():
    choices = itertools.product(FORMS, (8, 16))
    return together(compiled, [crowded(*form, warps) for form, warps in choices])


@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize(("layout", "rounding"), FORMS)
def test_nothing_spills(crowds, layout, rounding, warps):
    name, problem, config = crowded(layout, rounding, warps)
    assert kernel_of(name).legal(problem, config, SM_90) is None
    found = crowds[name, problem, config]
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert "UTMALDG" in found.instructions
    # All of the code, with what is done once, per each of a thread's numbers in a turn.
    if warps == 8:
        assert sum(found.instructions.values()) / 64 < (20 if rounding == "stochastic" else 13)


@pytest.mark.parametrize(("name", "access"), [("quantize", BYTES), ("quantize_qkv", WORDS)])
def test_nor_does_it_at_any_address_or_of_three(name, access):
    """Of bytes at most a few registers: their addresses take some that products have."""
    problem = problem_of(name, rounding="stochastic")
    case = name, problem, kernel_of(name).default(problem, SM_90), access
    found = together(compiled, [case])[case]
    assert found.spills <= (0 if access == WORDS else 8), found.registers


@each_op
def test_legal_says_why_not(name):
    kernel, problem = kernel_of(name), problem_of(name)
    good = kernel.default(problem, SM_90)
    assert kernel.legal(problem, good, SM_90) is None
    for field, value in {"warps": 4, "stages": 1, "resident": 5}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert kernel.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    stochastic = problem_of(name, rounding="stochastic")
    for of, config, reason in (
        (stochastic, PartsConfig(16, 2, 3), "resident=3: 64 registers per thread do not fit"),
        (problem, PartsConfig(8, 3, 3), "resident=3 stages=3: too much shared memory"),
        (problem_of(name, m=1 << 31), good, f"m={1 << 31}: expected at most 2^30"),
        (problem_of(name, dtype="fp32"), good, "dtype=fp32: expected bf16"),
    ):
        assert kernel.legal(of, config, SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in kernel.legal(problem, good, device)


def test_no_tile_lies_in_two_matrices():
    kernel, good = kernel_of("quantize_qkv"), PartsConfig()
    assert kernel.legal(problem_of("quantize_qkv", n=768), good, SM_90) is None
    for n, reason in ((1600, "a multiple of 128"), (1 << 29, "at most 2^28")):
        found = kernel.legal(problem_of("quantize_qkv", n=n), good, SM_90)
        assert found == f"n={n}: expected {reason}"


@each_op
@pytest.mark.parametrize("block", BLOCKS)
def test_the_default_is_legal(name, block):
    for layout, rounding in FORMS:
        problem = problem_of(name, block=block, layout=layout, rounding=rounding)
        kernel = kernel_of(name)
        assert kernel.legal(problem, kernel.default(problem, SM_90), SM_90) is None


@each_op
@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_no_one_s_choice_before_it_is_tuned(name):
    assert choose(registry.get(name), problem_of(name), SM_90)[0].name == "triton"


def test_numbers_at_any_address_and_pitch():
    kernel, problem = kernel_of("quantize"), problem_of("quantize", 64, 96)
    assert kernel.accesses(problem) == WORDS
    inputs = registry.get("quantize").inputs(problem, torch.device("cpu"))
    assert kernel.accesses(problem, inputs) == WORDS
    odd = torch.empty(64 * 96 + 1, dtype=torch.bfloat16)[1:].view(64, 96)
    assert kernel.accesses(problem, {"x": odd}) == dataclasses.replace(WORDS, tma=False, stream=2)
    third = torch.empty(64, 3 * 96, dtype=torch.bfloat16)[:, 96:192]
    assert kernel.accesses(problem, {"x": third}) == WORDS
    assert kernel.accesses(problem_of("quantize", 63, 97)) == BYTES
    assert kernel.accesses(problem, inputs, {"q": torch.empty(9, dtype=torch.int8)[1:]}).q == 1


def device_of(device):
    return Device.of(torch.empty(0, device=device))


def verified(name, problem, inputs, config=None):
    where = Device.of(next(iter(inputs.values())))
    config = config or kernel_of(name).default(problem, where)
    assert kernel_of(name).legal(problem, config, where) is None
    result = verify(registry.get(name), kernel_of(name), problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(name, device, block, warps):
    """Roundings and layouts, over tiles that are whole and that are not."""
    sizes = ((8192, 1024), (1, 1), (300, 272), (129, 130), (1000, 520), (36, 40), (515, 4096))
    if name == "quantize_qkv":
        sizes = ((8192, 1024), (1, 128), (300, 256), (513, 768))
    forms = itertools.cycle(FORMS)
    for (m, n), data in itertools.product(sizes, ("heavy", "gradient")):
        layout, rounding = next(forms)
        problem = problem_of(name, m, n, block=block, layout=layout, rounding=rounding)
        inputs = registry.get(name).inputs(problem, device, data=data)
        verified(name, problem, inputs, PartsConfig(warps, 2, 1))


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize(("stages", "resident"), [(2, 3), (3, 2), (4, 1)])
def test_short_and_long_rings(name, device, stages, resident):
    problem = problem_of(name, 12288, 3072, rounding="stochastic")
    inputs = registry.get(name).inputs(problem, device)
    verified(name, problem, inputs, PartsConfig(8, stages, resident))


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_extreme_values(device, block):
    """Blocks of every magnitude, some of it throughout, some of numbers that are not finite."""
    for rounding in ("nearest", "stochastic"):
        problem = problem_of("quantize", 512, 640, block=block, rounding=rounding)
        inputs = registry.get("quantize").inputs(problem, device)
        x = inputs["x"]
        powers = torch.randint(-126, 126, (16, 20), generator=torch.Generator().manual_seed(0))
        x *= (2.0**powers).repeat_interleave(32, 0).repeat_interleave(32, 1).to(x)
        for row, column in itertools.product(range(0, 512, 128), range(0, 640, 256)):
            part = x[row : row + 128, column : column + 128]
            part.copy_(part.sign() * part[:1, :1].abs())
        x[40, 50], x[300, 7], x[511, 639] = math.nan, math.inf, -math.inf
        verified("quantize", problem, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_no_code_is_below_127(device, block):
    """Where a block's largest times its multiplier rounds to more than 127, and 0 is drawn."""
    problem = problem_of("quantize", 2048, 2048, block=block, rounding="stochastic")
    inputs = registry.get("quantize").inputs(problem, device)
    side = 2048 // block
    amax = 1 + torch.rand(side, side, generator=torch.Generator().manual_seed(0))
    wide = amax.bfloat16().repeat_interleave(block, 0).repeat_interleave(block, 1)
    verified("quantize", problem, inputs | {"x": -wide.to(device)})


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_strided_and_unaligned(name, device, offset):
    """As attention leaves them, side by side in one matrix; and at any address."""
    problem = problem_of(name, 300, 1024, rounding="stochastic")
    inputs = registry.get(name).inputs(problem, device)
    for i, part in enumerate(inputs.keys() - {"seed"}):
        wide = torch.full((300, 3 * 1040), torch.nan, dtype=torch.bfloat16, device=device)
        place = wide[:, i * 1040 + offset :][:, :1024]
        inputs[part] = place.copy_(inputs[part])
    verified(name, problem, inputs)


@pytest.mark.gpu
def test_a_config_does_not_show_in_the_result(device):
    problem = problem_of("quantize", 1000, 2048, rounding="stochastic")
    op, kernel = registry.get("quantize"), kernel_of("quantize")
    inputs = op.inputs(problem, device, data="gradient")
    expected = op.outputs(problem, inputs)
    launch(kernel, problem, PartsConfig(8, 2, 2), inputs, expected)
    for config in (PartsConfig(16, 2, 1), PartsConfig(8, 3, 1)):
        found = op.outputs(problem, inputs)
        launch(kernel, problem, config, inputs, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.gpu
def test_a_thread_s_first_call_of_cuda_may_be_ours(device):
    """Autograd's is where a gradient's first kernel is this one; the second finds its maps made."""
    problem, kernel = problem_of("quantize", 344, 1096), kernel_of("quantize")
    op = registry.get("quantize")
    inputs = op.inputs(problem, device)
    config = kernel.default(problem, device_of(device))
    for _ in range(2):
        outputs = op.poison(problem, op.outputs(problem, inputs))
        torch.cuda.synchronize(device)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch, kernel, problem, config, inputs, outputs).result()
        result = op.check(problem, outputs, op.reference(problem, inputs))
        assert result.ok, result.message
