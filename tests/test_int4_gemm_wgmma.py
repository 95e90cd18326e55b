"""int4_gemm/wgmma: its machine code, legality and choice of a config, and on a GPU its bits."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import verify
from jetfire.core.machine_code import audits
from jetfire.kernels_cuda.int4_gemm import wgmma
from jetfire.kernels_cuda.int4_gemm.config import WgmmaConfig

HOPPER = target_device((9, 0))
KERNEL, OP = registry.get_kernel("int4_gemm", "wgmma"), registry.get("int4_gemm")
FWD = OP.Problem(4096, 4096, 4096, bias=True)
DGRAD = OP.Problem(4096, 4096, 4096, operands="wide", product="dgrad")
CODES = OP.Problem(4096, 4096, 4096, operands="wide", out="int8", bias=True)
WGRAD = OP.Problem(4096, 4096, 4096, operands="wide", product="wgrad", out="fp32")
# The most sums that each number of warp groups may have, whole or cut; and one of many parts.
FULL = (
    WgmmaConfig(groups=1, tile_n=256, stages=4, cluster_m=1),
    WgmmaConfig(groups=1, rows=2, tile_n=128, cluster_m=1),
    WgmmaConfig(),
    WgmmaConfig(rows=2, tile_n=128, cluster_m=1, cluster_n=2),
    WgmmaConfig(groups=3, tile_n=192),
    WgmmaConfig(groups=4, tile_n=128, cluster_m=1),
    WgmmaConfig(groups=1, tile_n=64, stages=8, cluster_m=1, split=4),
)


def compiled(problem, config):
    """Audits by function, or skip where nothing can be compiled or read."""
    assert KERNEL.legal(problem, config, HOPPER) is None
    try:
        return {found.name: found for found in audits(KERNEL.cubins(problem, config, (9, 0)))}
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("config", FULL, ids=str)
def test_the_largest_tiles_do_not_spill(config):
    """s8 wgmma, TMA in and out; the source asserts that it counts shared memory as `legal` does."""
    found = compiled(FWD, config)
    assert found.keys() == {"unpack", "gemm"} | ({"reduce"} if config.split > 1 else set())
    assert all(audit.spills == 0 for audit in found.values())
    gemm = found["gemm"].instructions
    assert gemm["IGMMA"] % (4 * config.rows) == 0
    assert gemm["UTMALDG"] > 0
    assert gemm["UTMASTG"] > 0
    assert "LDG.E.64" in found["unpack"].sass
    assert "STG.E.128" in found["unpack"].sass


@pytest.mark.parametrize("config", [c for c in FULL if c.split == 1], ids=str)
def test_codes_do_not_spill_in_the_largest_tiles(config):
    """Neither by TMA nor where it cannot write them."""
    for n in (4096, 4091):
        audit = compiled(dataclasses.replace(CODES, n=n), config)["gemm"]
        assert audit.spills == 0
        assert audit.instructions["IGMMA"] == 32
        assert ("UTMASTG" in audit.instructions) == (n == 4096)


def test_codes_of_128_do_not_spill():
    problem = dataclasses.replace(CODES, out_block=128)
    assert compiled(problem, FULL[3])["gemm"].spills == 0
    assert KERNEL.default(problem, HOPPER).rows == 2


@pytest.mark.parametrize(("problem", "config"), [(DGRAD, FULL[3]), (WGRAD, FULL[4])], ids=str)
def test_gradients_do_not_spill(problem, config):
    found = compiled(problem, config)
    assert found.keys() == {"gemm"}  # wide operands are multiplied where they are
    assert found["gemm"].spills == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tile_n": 80}, "tile_n=80: expected one of"),
        ({"rows": 2}, "256 sums per thread: 2 groups have registers for 128"),
        ({"groups": 3, "tile_n": 192, "stages": 5}, "bytes of shared memory"),
        ({"rows": 2, "tile_n": 128, "groups": 2, "cluster_m": 1, "stages": 8}, "shared memory"),
        ({"split": 16, "tile_n": 64}, "split=16: expected at most 2"),
        ({"rows": 2, "groups": 3, "tile_n": 64, "stages": 3}, "tile_m: 384 rows per block"),
        ({"cluster_m": 4, "tile_n": 96, "cluster_n": 1}, None),
    ],
)
def test_legality(fields, reason):
    problem = OP.Problem(512, 512, 256)
    found = KERNEL.legal(problem, WgmmaConfig(**fields), HOPPER)
    assert found is None if reason is None else found is not None and reason in found
    assert "sm_90" in KERNEL.legal(problem, WgmmaConfig(), target_device((8, 9)))


@pytest.mark.parametrize(
    ("block", "fields", "reason"),
    [
        (32, {"tile_n": 96, "cluster_m": 1}, None),
        (32, {"split": 2}, "split=2 out=int8: expected split=1"),
        (64, {"tile_n": 96, "cluster_m": 1}, "tile_n=96: expected a multiple of 64"),
        (64, {"tile_n": 192}, None),
        (128, {}, "64·rows=64: expected a multiple of 128"),
        (128, {"rows": 2, "tile_n": 64}, "tile_n=64: expected a multiple of 128"),
        (128, {"rows": 2, "tile_n": 128}, None),
    ],
)
def test_legality_of_codes(block, fields, reason):
    problem = OP.Problem(512, 512, 256, out="int8", out_block=block)
    found = KERNEL.legal(problem, WgmmaConfig(**fields), HOPPER)
    assert found is None if reason is None else found is not None and reason in found


def test_shared_memory_is_all_that_there_is_at_most():
    for config in FULL:
        assert wgmma.shared_bytes(FWD, config) <= HOPPER.shared_bytes


def test_the_default_is_the_fastest_by_its_own_model():
    for shape in ((16384, 768, 768), (8192, 7680, 9728), (300, 500, 770)):
        for problem in OP.problems("bwd", dict(zip("mnk", shape, strict=True))):
            config = KERNEL.default(problem, HOPPER)
            assert KERNEL.legal(problem, config, HOPPER) is None
            least = KERNEL.estimate(problem, config, HOPPER)
            for other in ({"split": 1}, {"groups": 1, "tile_n": 64, "cluster_m": 1, "rows": 1}):
                rival = dataclasses.replace(config, **other)
                assert KERNEL.estimate(problem, rival, HOPPER) >= least
    # 768×768 are too few tiles for 132 multiprocessors.
    small = OP.Problem(768, 768, 18560, operands="wide", product="wgrad", out="fp32")
    assert KERNEL.default(small, HOPPER).split > 1


# Whole tiles; ragged edges; rows that TMA neither reads nor writes; less than a tile; many tiles.
SHAPES = ((512, 768, 1024), (300, 500, 770), (257, 129, 130), (3, 1, 2), (1100, 2304, 384))
PRODUCTS = (
    {"bias": True},
    {"operands": "wide", "out": "fp32"},
    {"out": "fp16"},
    {"operands": "wide", "product": "dgrad"},
    {"operands": "wide", "product": "wgrad", "out": "fp32"},
    {"operands": "wide", "product": "wgrad", "out": "bf16"},
    *({"operands": "wide", "out": "int8", "out_block": b, "bias": b < 128} for b in (32, 64, 128)),
)
CONFIGS = (
    *FULL,
    WgmmaConfig(groups=1, rows=2, tile_n=96, stages=5, cluster_m=2, cluster_n=2, raster=2),
    WgmmaConfig(cluster_m=4, buffers=2, raster=1),
    WgmmaConfig(groups=3, tile_n=96, stages=6, cluster_m=1, split=3),
    WgmmaConfig(rows=2, tile_n=64, stages=3, cluster_n=2, cluster_m=1, split=2),
    WgmmaConfig(rows=2, tile_n=128, stages=3, buffers=2, cluster_m=2),
)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", PRODUCTS, ids=str)
def test_every_family_gives_the_references_bits(fields):
    device = Device.parse("cuda")
    problems = []
    for m, n, k in SHAPES:
        wide = 128 * math.ceil(k / 128) if fields.get("product") == "wgrad" else k
        problems.append(OP.Problem(m, n, wide, **fields))
    cases = [(p, c) for p in problems for c in CONFIGS if KERNEL.legal(p, c, device) is None]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: KERNEL.cubins(*case, device.capability), cases))
    for problem in problems:
        inputs = OP.inputs(problem, device.torch_device, seed=problem.m)
        expected = OP.reference(problem, inputs)
        for config in CONFIGS:
            if KERNEL.legal(problem, config, device) is None:
                found = verify(OP, KERNEL, problem, config, inputs, expected)
                assert found.ok, (problem, config, found.message)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("counts", [(0, 0), (0, 128), (128, 128), (512, 512), (384, 512)])
def test_counts_are_read_on_the_device(counts, split):
    """Nothing kept: a wgrad is zeros, or NaN where the scale is; of a dgrad nothing is written."""
    device = torch.device("cuda")
    config = WgmmaConfig(groups=1, tile_n=128, stages=4, cluster_m=1, split=split)
    for product in ("wgrad", "dgrad"):
        m, k = (100, 512) if product == "wgrad" else (512, 640)
        problem = OP.Problem(m, 128, k, operands="wide", product=product, out="fp32")
        inputs = OP.inputs(problem, device)
        inputs["counts"] = torch.tensor(counts, dtype=torch.int32, device=device)
        if product == "dgrad":
            inputs["weight"] = torch.rand(m, device=device)
        found = verify(OP, KERNEL, problem, config, inputs)
        assert found.ok, found.message
    inputs["a_scale"].fill_(math.nan)
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    KERNEL.launch(problem, config, inputs, outputs)
    assert outputs["c"][: counts[1]].isnan().all()


@pytest.mark.gpu
def test_a_graph_follows_its_inputs():
    device = torch.device("cuda")
    problem = OP.Problem(384, 256, 640, bias=True)
    config = WgmmaConfig(groups=1, tile_n=64, stages=4, cluster_m=1, split=2)
    inputs = OP.inputs(problem, device)
    outputs = OP.outputs(problem, inputs)
    KERNEL.launch(problem, config, inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.launch(problem, config, inputs, outputs)
    for name, fresh in OP.inputs(problem, device, seed=5).items():
        inputs[name].copy_(fresh)
    OP.poison(problem, outputs)
    graph.replay()
    assert OP.check(problem, outputs, OP.reference(problem, inputs)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("moved", [0, 1, 8])
def test_codes_at_any_address_are_the_references_and_nothing_else_is_written(moved):
    device = torch.device("cuda")
    problem = OP.Problem(1100, 2304, 384, operands="wide", out="int8", bias=True)
    inputs = OP.inputs(problem, device)
    inputs["bias"][100], inputs["bias"][2200] = math.nan, math.inf
    expected = OP.reference(problem, inputs)
    for config in (WgmmaConfig(groups=1, tile_n=64, cluster_m=1), WgmmaConfig(groups=3, tile_n=96)):
        outputs = OP.outputs(problem, inputs)
        count = outputs["q"].numel()
        room = torch.full((moved + count + 99,), 77, dtype=torch.int8, device=device)
        outputs["q"] = room[moved : moved + count].view(problem.m, problem.n)
        KERNEL.launch(problem, config, inputs, outputs)
        found = OP.check(problem, outputs, expected)
        assert found.ok, found.message
        assert (room[:moved] == 77).all()
        assert (room[moved + count :] == 77).all()


@pytest.mark.gpu
def test_rows_of_any_pitch_and_alignment():
    device = torch.device("cuda")
    for operands, columns in (("packed", 150), ("wide", 300)):
        problem = OP.Problem(200, 144, 300, operands=operands)
        inputs = OP.inputs(problem, device)
        for name in "ab":
            room = torch.zeros((200, 333), dtype=torch.int8, device=device)
            view = room[: len(inputs[name]), 3 : 3 + columns]
            inputs[name] = view.copy_(inputs[name])
        found = verify(OP, KERNEL, problem, WgmmaConfig(groups=1, tile_n=64), inputs)
        assert found.ok, (operands, found.message)
