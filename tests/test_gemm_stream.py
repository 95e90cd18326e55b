"""Stream-K in the sm_90a GEMM: its schedule, its bounds, its outputs and its workspace."""

import dataclasses
import functools
import itertools
import re
import shutil
import subprocess
from ctypes import CDLL, c_int

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.kernels_cuda import driver, hopper
from jetfire.kernels_cuda.compile import ROOT
from jetfire.kernels_cuda.gemm import cost, wgmma
from jetfire.kernels_cuda.gemm.config import (
    PARTS_A_TILE,
    WgmmaConfig,
    clusters,
    whole_tiles,
)
from jetfire.reference.gemm import fma, gemm_float64, gemm_telescoped
from jetfire.reference.quantize import quantize, spread
from jetfire.tests.audited import together

OP = registry.get("gemm")
KERNEL = registry.get_kernel("gemm", "wgmma")
HOPPER = target_device((9, 0))
# Every output and epilogue that differs in how a tile ends.
OUTPUTS = (
    {"out": "fp32"},
    {"out": "fp32", "accumulate": True, "bias": True},
    {"out": "fp32", "squares": True},
    {"out": "bf16", "bias": True},
    {"out": "bf16", "accumulate": True},
    {"out": "fp16", "accumulate": True, "bias": True},
    {"out": "int8"},
    {"out": "int8", "layout": "qt", "bias": True},
    {"out": "int8", "layout": "both", "rounding": "stochastic"},
    {"out": "int8", "layout": "both", "out_block": 128},
)


# The schedule


PARTS = """
#include <algorithm>
#include <cstdint>
using std::max; using std::min;
#define DEVICE inline
struct Index { int x; };
static Index blockIdx, gridDim;
struct Target { int m, n; };
struct Arguments { Target to; int k, border; };
enum Band { EVERY_ROW, ABOVE, BELOW };
constexpr Band BAND = EVERY_ROW;
static int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr bool STREAM = true;
constexpr int TILE_M = %d, TILE_N = %d, TILE_K = 128, CLUSTER_M = %d, CLUSTER_N = %d, RASTER = 8;
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
%s
extern "C" int parts_of(int block, int blocks, int m, int n, int k, int border, int* found) {
  blockIdx.x = block, gridDim.x = blocks;
  const Arguments x{{m, n}, k, border};
  int count = 0;
  for (Parts parts(x); parts.more(); parts.next(), ++count) {
    const Part part = parts.part(block %% CLUSTER);
    const int all[] = {part.tile.row, part.tile.column, part.first, part.steps, parts.others()};
    std::copy(all, all + 5, found + 5 * count);
  }
  return count;
}
"""


def schedule_code():
    """The source's own text of `Tile`, `tile_at`, `Part` and `Parts`."""
    shared = (ROOT / "hopper.cuh").read_text()
    own = wgmma.SOURCE.read_text()
    tiles = re.search(r"^struct Tile \{.*?^// Blocks of the cluster", shared, re.S | re.M)
    parts = re.search(r"^struct Part \{.*?^DEVICE float scale_of", own, re.S | re.M)
    return "\n".join(found[0].rpartition("\n")[0] for found in (tiles, parts))


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    """Parts (row, column, first, steps, others) of each block of a launch, in turn."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder, built = tmp_path_factory.mktemp("parts"), {}

    def library(config):
        fields = config.tile_m, config.tile_n, config.cluster_m, config.cluster_n
        if fields not in built:
            name = folder / ("_".join(map(str, fields)) + ".so")
            text = PARTS % (*fields, schedule_code())
            subprocess.run(
                ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", name],
                input=text,
                text=True,
                check=True,
            )
            built[fields] = CDLL(str(name))
        return built[fields]

    def parts(problem, config, processors):
        blocks = clusters(problem, config, processors) * config.cluster
        room = (c_int * (5 * (config.cluster_tiles(problem.m, problem.n) + 3)))()
        sizes = problem.m, problem.n, problem.k, 0
        found = []
        for block in range(blocks):
            count = library(config).parts_of(block, blocks, *sizes, room)
            found.append([tuple(room[5 * i : 5 * i + 5]) for i in range(count)])
        return found

    return parts


SCHEDULED = [
    (sizes, fields, processors)
    for sizes, fields in itertools.product(
        (
            (64, 64, 1),
            (64, 64, 300),
            (64, 4096, 16384),
            (768, 768, 8192),
            (8192, 1024, 4096),
            (500, 900, 1100),
            (3072, 2816, 640),
            (4096, 4096, 200),
            (1, 17000, 129),
        ),
        (
            {"groups": 3},
            {"groups": 1, "tile_n": 64},
            {"groups": 2, "tile_n": 64, "cluster_n": 2},
            {"groups": 2, "cluster_m": 2},
        ),
    )
    for processors in (132, 7)
]


@pytest.mark.parametrize(("sizes", "fields", "processors"), SCHEDULED, ids=str)
def test_every_step_is_dealt_once_and_who_begins_a_tile_finds_the_rest(
    schedule, sizes, fields, processors
):
    problem, config = OP.Problem(*sizes), WgmmaConfig(stream=True, **fields)
    found = schedule(problem, config, processors)
    steps, cluster = -(-problem.k // hopper.TILE_K), config.cluster
    workers, tiles = len(found) // cluster, config.cluster_tiles(problem.m, problem.n)
    covered, most = {}, 0
    for block, parts in enumerate(found):
        assert parts
        for turn, (row, column, first, count, others) in enumerate(parts):
            assert count > 0
            # A block has room for the sums of one tile: those of its first part.
            assert first == 0 or turn == 0
            covered.setdefault((row, column), []).append((first, count))
            if first:
                continue
            # What the finisher adds: the first parts of the blocks after it, in order, to the end.
            end = count
            for i in range(1, others + 1):
                theirs = found[block + i * cluster][0]
                assert theirs[:3] == (row, column, end)
                end += theirs[3]
            assert end == steps
            most = max(most, others)
    assert len(covered) == tiles * cluster
    for parts in covered.values():
        ends = [first + count for first, count in sorted(parts)]
        assert [0, *ends[:-1]] == [first for first, _ in sorted(parts)]
        assert ends[-1] == steps
    assert most <= PARTS_A_TILE  # so that PARTS_A_TILE + 1 share a tile, as `noise` has it
    loads = [sum(part[3] for part in parts) for parts in found]
    assert max(loads) - min(loads) <= 1
    whole = whole_tiles(tiles, workers)
    cut = {tile for tile, parts in covered.items() if len(parts) > 1}
    assert len(cut) <= (tiles - whole) * cluster
    assert tiles % workers or not cut
    assert max(len(parts) for parts in found) <= -(-tiles // workers) + 2


def test_all_blocks_finish_however_few_run_at_once(schedule):
    """Blocks start in order and wait while they run: none waits for one that cannot start."""
    problem = OP.Problem(64, 1024, 16384)
    config = WgmmaConfig(groups=1, tile_n=64, stream=True)
    found = schedule(problem, config, 132)
    for resident in (len(found), 40, PARTS_A_TILE + 1):
        started, left, running, done = 0, set(), set(), 0
        while done < len(found):
            while len(running) < resident and started < len(found):
                running.add(started)
                left |= {started} if found[started][0][2] else set()
                started += 1
            free = {
                b
                for b in running
                if all(b + i in left for *_, others in found[b] for i in range(1, others + 1))
            }
            assert free, resident
            running -= free
            done += len(free)


# Legality, sizes and bounds


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
def test_every_output_can_be_streamed(block, options):
    options = {"out_block": block} | options if options["out"] == "int8" else options
    problem = OP.Problem(256, 512, 4096, block=block, **options)
    config = WgmmaConfig(groups=2, stages=3, stream=True)
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    assert KERNEL.legal(problem, config, HOPPER) is None
    assert KERNEL.space(problem, HOPPER)["stream"] == (False, True)


def streamed(options, schedule_name):
    problem = OP.Problem(256, 512, 4096, block=32, **options)
    return problem, WgmmaConfig(groups=2, stages=3, stream=True, schedule=schedule_name)


def compiled(problem, config):
    (cubin,) = KERNEL.cubins(problem, config, (9, 0))
    return cubin


@pytest.fixture(scope="module")
def audits():
    cases = itertools.starmap(streamed, itertools.product(OUTPUTS, ("exact", "telescoped")))
    return together(compiled, [case for case in cases if KERNEL.legal(*case, HOPPER) is None])


@pytest.mark.parametrize("schedule_name", ["exact", "telescoped"])
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
def test_no_register_spills_where_tiles_are_multiplied(audits, options, schedule_name):
    problem, config = streamed(options, schedule_name)
    if (reason := KERNEL.legal(problem, config, HOPPER)) is not None:
        pytest.skip(reason)
    found = re.findall(r"\b(?:IGMMA|LDL|STL)\b", audits[problem, config].sass)
    first, last = found.index("IGMMA"), found[::-1].index("IGMMA")
    assert set(found[first : len(found) - last]) == {"IGMMA"}
    # One value of a thread, beside the elements of C that a 16-bit accumulation holds.
    held = problem.accumulate and problem.out != "fp32"
    assert len(found) - found.count("IGMMA") <= (5 if held else 0)


def test_the_workspace_has_a_flag_per_group_and_room_for_a_tile_per_block():
    problem = OP.Problem(64, 1024, 16384)
    for fields, blocks in (
        ({"groups": 1, "tile_n": 64}, 64),  # 16 tiles
        ({"groups": 3}, 32),
        ({"groups": 2, "tile_n": 64, "cluster_n": 2}, 64),
        ({"groups": 1, "tile_n": 32}, 128),
    ):
        config = WgmmaConfig(stream=True, **fields)
        tile = config.tile_m * config.tile_n
        sizes = wgmma.workspace_sizes(problem, config, 132)
        assert sizes == (blocks * config.groups, blocks * tile)
    short = dataclasses.replace(problem, k=200)  # two steps: no more than two blocks per tile
    config = WgmmaConfig(groups=1, tile_n=64, stream=True)
    assert wgmma.workspace_sizes(short, config, 132) == (32, 32 * 64 * 64)
    large = OP.Problem(8192, 8192, 8192)
    assert wgmma.workspace_sizes(large, config, 132) == (132, 132 * 64 * 64)


def in_parts(inputs, block, ends, sums):
    """What blocks that share a tile make of it: `sums` of each part, then added from the first."""
    a, a_scale, b, b_scale = (inputs[name] for name in ("a", "a_scale", "b", "b_scale"))
    found = None
    for first, end in itertools.pairwise((0, *ends)):
        k, scales = slice(first, end), slice(first // block, -(-end // block))
        part = sums(a[:, k], a_scale[:, scales], b[:, k], b_scale[:, scales], block)
        found = part if found is None else found + part
    return found


def exact_sums(a, a_scale, b, b_scale, block):
    """Sums in fp32 as the kernel's exact schedule has them, from zero."""
    acc = torch.zeros(a.shape[0], b.shape[0])
    for i in range(a_scale.shape[1]):
        k = slice(i * block, (i + 1) * block)
        inner = (a[:, k].double() @ b[:, k].double().t()).float()
        scale = a_scale[:, i, None] * b_scale[None, :, i]
        acc = fma(spread(scale, block, *acc.shape), inner, acc)
    return acc


SUMS = {
    "exact": exact_sums,
    "telescoped": gemm_telescoped,
    "interleaved": functools.partial(gemm_telescoped, chains=2),
}
CUTS = ((1280, 2500), (128, 256, 384, 512, 2500), (2432, 2500))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("data", ["heavy", "gradient", "constant"])
@pytest.mark.parametrize("ends", CUTS, ids=str)
def test_sums_of_parts_err_within_their_bound(block, data, ends):
    problem = OP.Problem(70, 90, 2500, block=block, out="fp32")
    inputs = OP.inputs(problem, torch.device("cpu"), data=data)
    exact = gemm_float64(*(inputs[x] for x in ("a", "a_scale", "b", "b_scale")), block)
    expected = OP.reference(problem, inputs)
    for name, sums in SUMS.items():
        config = WgmmaConfig(stream=True, schedule=name)
        noise = KERNEL.noise(problem, config, inputs)
        assert noise.shape == (-(-70 // block), -(-90 // block))
        assert noise.dtype == torch.float64
        c = in_parts(inputs, block, ends, sums)
        assert OP.check(problem, {"c": c}, expected, noise).ok
        bound = spread(noise + expected["evaluation"], block, 70, 90)
        assert bool(((c.double() - exact).abs() <= bound).all())


def test_exact_sums_of_parts_are_not_the_references_bits():
    """So `noise` is not None, by which fuzzing compares bits."""
    problem = OP.Problem(70, 90, 2500, out="fp32")
    inputs = OP.inputs(problem, torch.device("cpu"))
    whole, cut = (in_parts(inputs, 32, ends, exact_sums) for ends in ((2500,), (1280, 2500)))
    assert not torch.equal(whole, cut)
    config = WgmmaConfig(schedule="exact")
    assert KERNEL.noise(problem, config, inputs) is None
    streamed = dataclasses.replace(config, stream=True)
    assert not KERNEL.noise(problem, streamed, inputs).any()


# The model


def streams(m, n, k, **options):
    return cost.fastest(KERNEL, OP.Problem(m, n, k, **options), HOPPER).stream


def test_defaults_stream_where_few_tiles_or_a_part_of_a_wave_would_leave_blocks_idle():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    for block, (out, accumulate) in itertools.product(
        (32, 128), (("bf16", False), ("fp32", False), ("fp16", True), ("fp32", True))
    ):
        options = {"block": block, "out": out, "accumulate": accumulate}
        assert streams(64, 1024, 16384, **options)
        assert streams(768, 768, 16384, **options)  # a weight's gradient
        assert not streams(1024, 1024, 1024, **options)
        assert not streams(8192, 8192, 8192, **options)
        assert not streams(16384, 16384, 16384, **options)
    assert streams(1408, 1664, 8192, block=128, out="int8", out_block=32)
    assert not streams(8192, 1024, 1024, block=128, out="int8", out_block=32)  # 27 µs, not 23
    assert not streams(1408, 1664, 8192, block=128, out="int8", layout="both")
    assert not streams(2304, 768, 16384, block=128, out="fp32")  # 54 µs, 77 with it


def test_defaults_do_not_stream_where_tiles_would_share_nothing_in_l2():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    for m, n in ((2048, 1600), (4096, 1600)):  # an output head's input gradient
        assert streams(m, n, 16384, block=128, out="bf16")
        assert not streams(m, n, 50304, block=128, out="bf16")
        for l2_bytes in (0, 1 << 30):  # unknown, and one that all of it fits
            found = dataclasses.replace(HOPPER, l2_bytes=l2_bytes)
            assert cost.fastest(KERNEL, OP.Problem(m, n, 50304, block=128), found).stream
    assert streams(2816, 1600, 22016, block=128, out="bf16")


def test_defaults_share_operands_of_blocks_of_128_and_of_large_outputs():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    for block, m, n, cluster, raster in (
        (32, 16384, 4096, (1, 1), 8),
        (32, 16384, 8192, (1, 2), 16),
        (64, 8192, 50304, (1, 2), 16),
        (128, 8192, 50304, (2, 4), 4),
        (128, 8192, 4096, (2, 4), 16),
        (128, 8192, 1024, (1, 2), 16),
        (128, 1024, 1024, (1, 1), 8),
    ):
        config = cost.fastest(KERNEL, OP.Problem(m, n, 4096, block=block), HOPPER)
        assert ((config.cluster_m, config.cluster_n), config.raster) == (cluster, raster)


def test_defaults_interleave_blocks_of_128_but_with_little_along_k():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    for block, k, schedule in (
        (128, 1024, "telescoped"),
        (128, 4096, "interleaved"),
        (64, 4096, "telescoped"),
    ):
        config = cost.fastest(KERNEL, OP.Problem(8192, 4096, k, block=block), HOPPER)
        assert config.schedule == schedule


def test_streaming_whole_waves_costs_what_they_cost():
    problem = OP.Problem(64 * 132, 128, 4096)  # 132 tiles
    config = WgmmaConfig(groups=1, schedule="telescoped")
    streamed = dataclasses.replace(config, stream=True)
    times = [KERNEL.estimate(problem, c, HOPPER) for c in (config, streamed)]
    assert times[0] == times[1]
    more = dataclasses.replace(problem, m=problem.m + 1)
    times = [KERNEL.estimate(more, c, HOPPER) for c in (config, streamed)]
    assert times[1] < 0.7 * times[0]


# On a GPU


@pytest.fixture
def gpu(device):
    found = Device.parse(str(device))
    problem = OP.Problem(256, 256, 256)
    if (reason := KERNEL.legal(problem, KERNEL.default(problem, found), found)) is not None:
        pytest.skip(reason)
    return device


CONFIGS = (
    {"groups": 3},
    {"groups": 2},
    {"groups": 4, "tile_n": 64, "in_flight": 2},
    {"groups": 2, "in_flight": 1, "buffers": 2},
    {"groups": 2, "tile_n": 64, "cluster_n": 2},
    {"groups": 1, "rows": 2, "tile_n": 64, "cluster_m": 2},
    {"groups": 1, "tile_n": 32},
)
# Few tiles and many, whole and ragged, with rows that TMA cannot write; K of one step and of many.
SIZES = (
    (384, 256, 9000),
    (300, 401, 1009),
    (5000, 300, 300),
    (40, 24, 20000),
    (2600, 2050, 1040),
    (64, 4096, 4096),
    (17, 9, 5),
    (6000, 1400, 129),
)


def cases(options, block, schedule_name, device):
    options = {"out_block": block} | options if options["out"] == "int8" else options
    for sizes, fields in itertools.product(SIZES, CONFIGS):
        problem = OP.Problem(*sizes, block=block, **options)
        config = WgmmaConfig(stages=3, stream=True, schedule=schedule_name, **fields)
        if KERNEL.legal(problem, config, Device.parse(str(device))) is None:
            yield problem, config


def launched(problem, config, inputs):
    outputs = OP.outputs(problem, inputs)
    if not problem.accumulate:
        OP.poison(problem, outputs)
    KERNEL.launch(problem, config, inputs, outputs)
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule_name", "block"),
    [*itertools.product(("exact", "telescoped"), (32, 64, 128)), ("interleaved", 128)],
)
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
def test_streamed_sums_are_right_and_the_same_each_time(gpu, options, block, schedule_name):
    for problem, config in cases(options, block, schedule_name, gpu):
        inputs = OP.inputs(problem, gpu)
        found = [launched(problem, config, inputs) for _ in range(3)]
        noise = KERNEL.noise(problem, config, inputs)
        result = OP.check(problem, found[0], OP.reference(problem, inputs), noise)
        assert result.ok, f"{problem}, {config}: {result.message}"
        for name, tensor in found[0].items():
            assert all(torch.equal(tensor, other[name]) for other in found[1:]), (config, name)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["q", "qt", "both"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_streamed_codes_are_those_of_the_streamed_sums(gpu, layout, rounding):
    """The sums in fp32 are cut alike, so that their codes are known to the bit."""
    sizes, fields = (600, 384, 9000), {"groups": 2, "stages": 3, "stream": True}
    for block, out_block, name in itertools.product(
        (32, 128), (32, 64, 128), ("exact", "telescoped")
    ):
        config = WgmmaConfig(schedule=name, **fields)
        problem = OP.Problem(
            *sizes,
            block=block,
            out="int8",
            out_block=out_block,
            layout=layout,
            bias=True,
            rounding=rounding,
        )
        inputs = OP.inputs(problem, gpu)
        sums = launched(OP.Problem(*sizes, block=block, out="fp32", bias=True), config, inputs)
        q, scale = quantize(sums["c"], out_block, rounding, inputs.get("seed"))
        expected = {"q": q, "scale": scale, "qt": q.t(), "scale_t": scale.t()}
        for output, tensor in launched(problem, config, inputs).items():
            assert torch.equal(tensor, expected[output]), (config, output)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
def test_a_launch_leaves_its_flags_at_zero_and_its_sums_within_their_room(
    gpu, options, monkeypatch
):
    problem = OP.Problem(200, 520, 8200, block=32, **options)
    inputs = OP.inputs(problem, gpu)
    for fields in CONFIGS:
        config = WgmmaConfig(stages=3, stream=True, schedule="telescoped", **fields)
        if KERNEL.legal(problem, config, Device.parse(str(gpu))) is not None:
            continue
        count, room = wgmma.workspace_sizes(problem, config, driver.processors(gpu.index or 0))
        flags = torch.zeros(count + 64, dtype=torch.int32, device=gpu)
        sums = torch.full((room + 1024,), 3.5, device=gpu, dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(wgmma, "_workspace", lambda *_, f=flags, s=sums: (f, s))
            launched(problem, config, inputs)
        assert not flags.any()
        assert bool((sums[room:] == 3.5).all())


@pytest.mark.gpu
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
def test_captured_launches_replay_beside_others(gpu, options):
    """Two graphs, each of two launches, and launches on streams: no two share flags or sums."""
    problem = OP.Problem(128, 768, 8192, block=32, **options)
    config = WgmmaConfig(groups=2, tile_n=64, stages=3, stream=True, schedule="telescoped")
    if (reason := KERNEL.legal(problem, config, Device.parse(str(gpu)))) is not None:
        pytest.skip(reason)
    inputs = OP.inputs(problem, gpu)
    expected = launched(problem, config, inputs)
    graphs = []
    for _ in range(2):
        graph, held = torch.cuda.CUDAGraph(), [OP.outputs(problem, inputs) for _ in range(2)]
        with torch.cuda.graph(graph):
            for outputs in held:
                KERNEL.launch(problem, config, inputs, outputs)
        graphs.append((graph, held, torch.cuda.Stream(gpu)))
    start = {name: tensor.clone() for name, tensor in OP.outputs(problem, inputs).items()}
    own = torch.cuda.Stream(gpu)
    for _ in range(20):
        for _, held, _ in graphs:
            for outputs in held:
                for name, tensor in outputs.items():
                    tensor.copy_(start[name])
        torch.cuda.synchronize(gpu)
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(own):
            eager = launched(problem, config, inputs)
        torch.cuda.synchronize(gpu)
        for outputs in (eager, *(x for _, held, _ in graphs for x in held)):
            for name, tensor in outputs.items():
                assert torch.equal(tensor, expected[name]), name
