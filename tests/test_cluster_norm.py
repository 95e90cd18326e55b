"""The norms' cluster kernel: its machine code, legality and choice, and on a GPU every option."""

import dataclasses
import itertools

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import choose, launch, verify
from jetfire.core.machine_code import audit
from jetfire.kernels_cuda.cluster_norm import ClusterConfig

OPS = ("layernorm", "rmsnorm")
SM_90 = target_device((9, 0))
LAYOUTS = tuple(itertools.product(("q", "qt", "both"), ("nearest", "stochastic")))
# One block and several, few warps and many, more blocks than warps, short and long rings.
CONFIGS = (
    ClusterConfig(512, 8, 2, 2),
    ClusterConfig(1024, 4, 3, 1),
    ClusterConfig(128, 1, 2, 8),
    ClusterConfig(128, 8, 3, 4),
    ClusterConfig(256, 2, 2, 4),
    ClusterConfig(512, 1, 4, 1),
)


pytestmark = pytest.mark.parametrize("op", OPS)


def problem_of(op, **fields):
    return registry.get(op).problems("bwd", {"block": 32, "out_block": 32, **fields})[0]


def kernel_of(op):
    return registry.get_kernel(op, "cluster")


@pytest.mark.parametrize(("layout", "rounding"), LAYOUTS)
def test_nothing_spills(op, layout, rounding):
    """Of whole units of 16 codes, and of columns, rows and addresses of any number."""
    fields = {"layout": layout, "rounding": rounding}
    whole = problem_of(op, m=8192, n=4096, **fields)
    ragged = problem_of(op, m=8191, n=509, block=128, **fields)
    for problem, config, access in ((whole, CONFIGS[0], 16), (ragged, CONFIGS[5], 1)):
        try:
            found = audit(kernel_of(op).cubin(problem, config, (9, 0), access))
        except UsageError as error:
            pytest.skip(str(error))
        assert (found.spills, found.stack_bytes) == (0, 0), f"{config}: {found.registers}"
        # A barrier of the cluster has one: it waits for all that was written before.
        loop = found.sass[found.sass.index("STAS") :] if config.cluster > 1 else ""
        assert "MEMBAR" not in loop


def test_legal_says_why_not(op):
    problem, kernel = problem_of(op, m=8192, n=4096), kernel_of(op)
    good = kernel.default(problem, SM_90)
    assert kernel.legal(problem, good, SM_90) is None
    for field, value in {"columns": 192, "cluster": 3, "stages": 1, "resident": 5}.items():
        wrong = dataclasses.replace(good, **{field: value})
        assert kernel.legal(problem, wrong, SM_90).startswith(f"{field}={value}: expected one of")
    for wrong, reason in (
        ({"cluster": 4}, "n=4096: expected at most cluster·columns"),
        ({"resident": 4}, "resident=4: 128 registers per thread do not fit"),
        ({"stages": 4}, "resident=2 stages=4: too much shared memory"),
    ):
        assert kernel.legal(problem, dataclasses.replace(good, **wrong), SM_90) == reason
    for other, reason in (
        (registry.get(op).problems("fwd", {"m": 64, "n": 64})[0], "mode=fwd: expected bwd"),
        (
            problem_of(op, m=64, n=64, out_block=64),
            "out_block=64: expected 32, the rows that fit an SM",
        ),
    ):
        assert kernel.legal(other, kernel.default(other, SM_90), SM_90) == reason
    for device in (target_device((8, 0)), Device(kind="cpu")):
        assert "sm_90" in kernel.legal(problem, good, device)


@pytest.mark.parametrize("n", [1, 64, 257, 768, 1024, 1600, 2048, 4096, 5120, 8192])
def test_the_default_has_all_columns_and_sixteen_warps(op, n):
    problem, kernel = problem_of(op, m=4096, n=n), kernel_of(op)
    config = kernel.default(problem, SM_90)
    assert kernel.legal(problem, config, SM_90) is None
    assert config.threads * config.resident == 512
    assert n <= config.columns * config.cluster < max(2 * n, 512)


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_it_is_no_one_s_choice_before_it_is_tuned(op):
    assert choose(registry.get(op), problem_of(op, m=8192, n=4096), SM_90)[0].name == "gluon"


def verified(op, problem, config, device, inputs=None):
    op, kernel = registry.get(op), kernel_of(op)
    inputs = inputs or op.inputs(problem, device, data="heavy")
    assert kernel.legal(problem, config, Device.of(inputs["x"])) is None
    result = verify(op, kernel, problem, config, inputs)
    assert result.ok, f"{config} {problem}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_option(op, device, config):
    """Fewer tiles than clusters and many more; columns that fill all blocks, or few of the last."""
    most = config.columns * config.cluster
    sizes = itertools.product((33, 8192 + 100), (most, most - 16, most - 24, most - 127, 1))
    for i, (m, n) in enumerate(sizes):
        layout, rounding = LAYOUTS[i % len(LAYOUTS)]
        fields = {"block": (32, 64, 128)[i % 3], "layout": layout, "rounding": rounding}
        verified(op, problem_of(op, m=m, n=n, **fields), config, device)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_strided_and_unaligned_codes(op, device, offset):
    problem = problem_of(op, m=300, n=1024, layout="both")
    inputs = registry.get(op).inputs(problem, device)
    for name in ("x", "dy"):
        wide = torch.full((300, 1072), 77, dtype=torch.int8, device=device)
        wide[:, offset : offset + 1024] = inputs[name]
        scale = torch.full((10, 41), torch.nan, dtype=torch.float32, device=device)
        scale[:, 3:35] = inputs[f"{name}_scale"]
        inputs |= {name: wide[:, offset : offset + 1024], f"{name}_scale": scale[:, 3:35]}
    config = kernel_of(op).default(problem, Device.of(inputs["x"]))
    verified(op, problem, config, device, inputs)


@pytest.mark.gpu
def test_a_result_is_the_same_in_every_run(op, device):
    """Blocks that send and wait in another order: a thousand launches of some turns each."""
    problem, kernel = problem_of(op, m=20000, n=4096, layout="both"), kernel_of(op)
    op = registry.get(op)
    inputs = op.inputs(problem, device)
    config = kernel.default(problem, Device.of(inputs["x"]))
    expected, found = op.outputs(problem, inputs), op.outputs(problem, inputs)
    launch(kernel, problem, config, inputs, expected)
    for i in range(1000):
        launch(kernel, problem, config, inputs, found)
        if i % 50 == 0:
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), name
