"""The sm_90a GEMM in clusters of four and eight, and the launch beside it in clusters of two."""

import ctypes
import dataclasses
import functools
import itertools
import shutil
import statistics
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetfire import ops
from jetfire.core import lookup, registry, replay
from jetfire.core.device import Device, target_device
from jetfire.core.launch import verify
from jetfire.core.replay import build
from jetfire.core.tensors import Quantized
from jetfire.kernels_cuda.gemm import cost, wgmma
from jetfire.kernels_cuda.gemm.config import WgmmaConfig, bands
from jetfire.kernels_cuda.gemm.wgmma import Band
from jetfire.tests.audited import together
from jetfire.tests.test_gemm_stream import PARTS, schedule_code

OP = registry.get("gemm")
KERNEL = registry.get_kernel("gemm", "wgmma")
HOPPER = target_device((9, 0))
INTERLEAVED = WgmmaConfig(2, stages=5, buffers=2, schedule="interleaved")
TELESCOPED = WgmmaConfig(3, stages=4, buffers=2, in_flight=2, schedule="telescoped")
CLUSTERS = ((2, 2), (1, 4), (4, 1), (2, 4), (4, 2))
OUTPUTS = (
    {"out": "bf16", "bias": True},
    {"out": "fp32", "accumulate": True},
    {"out": "fp32", "squares": True},
    {"out": "int8", "out_block": 32, "rounding": "stochastic"},
    {"out": "int8", "out_block": 32, "layout": "both", "bias": True},
)


def banded(config, cluster, **fields):
    return dataclasses.replace(config, cluster_m=cluster[0], cluster_n=cluster[1], **fields)


def test_clusters_of_more_than_two_leave_rows_to_a_second_launch():
    for cluster_m, cluster_n in itertools.product((1, 2, 4), (1, 2, 4)):
        config = banded(INTERLEAVED, (cluster_m, cluster_n))
        assert config.banded == (cluster_m * cluster_n > 2)
        assert (config.below.cluster_m, config.below.cluster_n) == (1, 2)


def test_clusters_of_sixteen_and_streams_of_four_are_refused():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    problem = OP.Problem(4096, 4096, 4096, block=128)
    expected = "cluster_m·cluster_n=16: expected at most 8 blocks per cluster"
    assert KERNEL.legal(problem, banded(INTERLEAVED, (4, 4)), HOPPER) == expected
    expected = (
        "stream=True cluster_m·cluster_n=4: expected at most 2, or not all blocks would run at once"
    )
    streamed = banded(INTERLEAVED, (2, 2), stream=True)
    assert KERNEL.legal(problem, streamed, HOPPER) == expected


@given(
    m=st.integers(1, 40000),
    n=st.integers(1, 20000),
    groups=st.sampled_from((1, 2, 3)),
    cluster=st.sampled_from(CLUSTERS),
    large=st.integers(0, 40),
    others=st.integers(0, 66),
)
def test_bands_cover_all_rows_in_turns_that_no_worker_exceeds(m, n, groups, cluster, large, others):
    problem, config = OP.Problem(m, n, 128), banded(WgmmaConfig(groups), cluster)
    if large + others == 0:
        return
    found = bands(problem, config, large, others)
    whole = config.tile_m * config.cluster_m
    assert 0 <= found.border <= m
    assert found.border % whole == 0 or found.border == m
    above = config.cluster_tiles(found.border, n)
    below = config.below.cluster_tiles(m - found.border, n)
    assert above <= found.turns * large
    assert below <= found.turns * others
    # No worse than a launch of either alone.
    for border, workers, tiles in (
        (m, large, config.cluster_tiles(m, n)),
        (0, others, config.below.cluster_tiles(m, n)),
    ):
        if workers:
            assert found.turns <= -(-tiles // workers), border


def test_bands_of_an_h200_are_even():
    """15 clusters of eight leave 12 multiprocessors, a tenth as many."""
    config = banded(INTERLEAVED, (2, 4))
    found = bands(OP.Problem(16384, 4096, 4096), config, 15, 6)
    assert (found.border, found.turns) == (59 * 256, 32)
    assert bands(OP.Problem(4096, 4096, 4096), config, 15, 6).border == 15 * 256


def test_without_large_clusters_all_rows_are_the_others():
    config = banded(INTERLEAVED, (2, 4))
    assert bands(OP.Problem(4096, 4096, 4096), config, 0, 4).border == 0
    assert bands(OP.Problem(4096, 4096, 4096), config, 16, 0).border == 4096


def test_defaults_of_large_products_are_of_clusters_of_eight():
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    for m, n, k in ((16384, 4096, 16384), (16384, 16384, 4096), (16384, 12288, 4096)):
        config = cost.fastest(KERNEL, OP.Problem(m, n, k, block=128), HOPPER)
        assert (config.cluster_m, config.cluster_n) == (2, 4)


def test_machine_code_of_both_launches():
    """The first lets the other start, which waits for it; neither spills."""
    if (reason := KERNEL.unfit(HOPPER)) is not None:
        pytest.skip(reason)
    cases = [
        (OP.Problem(4096, 4096, 4096, block=128, **options), banded(config, (2, 4)), band)
        for options, config in itertools.product(OUTPUTS[:4], (INTERLEAVED, TELESCOPED))
        for band in (0, 1)
    ]
    audits = together(lambda *one: KERNEL.cubins(*one[:2], (9, 0))[one[2]], cases)
    for case in cases:
        found = audits[case]
        assert found.spills == 0, case
        assert ("PREEXIT" in found.instructions) == (case[2] == 0), case
        assert ("ACQBULK" in found.instructions) == (case[2] == 1), case
        assert found.instructions["IGMMA"] > 0


def test_programs_are_of_both_bands():
    problem = OP.Problem(4096, 4096, 4096, block=128)
    one, two = (
        KERNEL.programs(problem, INTERLEAVED),
        KERNEL.programs(problem, banded(INTERLEAVED, (2, 4))),
    )
    assert [f"BAND = {int(Band.EVERY_ROW)};" in x.header for x in one] == [True]
    assert [f"BAND = {int(band)};" in x.header for band, x in zip((1, 2), two, strict=True)] == [
        True,
        True,
    ]


class Loaded:
    """A function of a device with so many multiprocessors and clusters of eight."""

    def clusters(self, size, threads):
        return {8: 15, 4: 30}[size]


def launches(monkeypatch, problem, config):
    monkeypatch.setattr(wgmma, "loaded", lambda program, device: Loaded())
    monkeypatch.setattr(wgmma.driver, "processors", lambda index: 132)
    monkeypatch.setattr(wgmma.driver, "tensor_map", lambda *sizes: bytes(128))
    addresses = [1 << 20, problem.k, 2 << 20, problem.k, *(x << 20 for x in range(3, 14))]
    return wgmma._prepare.__wrapped__(problem, config, HOPPER, *addresses)


@pytest.mark.parametrize(
    ("m", "cluster", "border", "blocks"),
    [
        (16384, (2, 4), 59 * 256, [120, 12]),
        (16384, (2, 2), 59 * 256, [120, 12]),
        (4096, (2, 4), 15 * 256, [120, 12]),
        (256, (2, 4), 256, [64]),  # too few rows to deal out
    ],
)
def test_a_product_is_two_launches_side_by_side(monkeypatch, m, cluster, border, blocks):
    problem = OP.Problem(m, 4096, 4096, block=128)
    found = launches(monkeypatch, problem, banded(INTERLEAVED, cluster))
    assert [one.blocks for one in found] == blocks
    assert [one.beside for one in found] == [False, True][: len(found)]
    borders = [one.content.tobytes()[624:628] for one in found]
    assert borders == [border.to_bytes(4, "little")] * len(found)
    (whole,) = launches(monkeypatch, problem, banded(INTERLEAVED, (1, 2)))
    assert not whole.beside


@pytest.fixture(scope="module")
def tiles_of(tmp_path_factory):
    """A function that runs the source's own walk over tiles for each block of a launch."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("bands")

    @functools.cache
    def library(config, band):
        fields = config.tile_m, config.tile_n, config.cluster_m, config.cluster_n
        text = PARTS % (*fields, schedule_code())
        text = text.replace("STREAM = true", "STREAM = false")
        text = text.replace("BAND = EVERY_ROW", f"BAND = {band.name}")
        file = folder / f"{band.name}{'_'.join(map(str, fields))}.so"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", file]
        subprocess.run(command, input=text, text=True, check=True)
        return ctypes.CDLL(str(file))

    def tiles(problem, config, band, border, workers):
        found, blocks = [], workers * config.cluster
        room = (ctypes.c_int * (5 * (config.cluster_tiles(problem.m, problem.n) + 1)))()
        for block in range(blocks):
            sizes = problem.m, problem.n, problem.k, border
            count = library(config, band).parts_of(block, blocks, *sizes, room)
            found += [(room[5 * i], room[5 * i + 1]) for i in range(count)]
        return found

    return tiles


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("m", [1, 256, 700, 4096, 5000])
@pytest.mark.parametrize("n", [130, 1000, 4096])
def test_every_tile_is_computed_once_by_one_of_the_launches(tiles_of, m, n, cluster):
    problem, config = OP.Problem(m, n, 256, block=128), banded(INTERLEAVED, cluster)
    border = bands(problem, config, 120 // config.cluster, 6).border
    found = []
    for own, band, workers in (
        (config, Band.ABOVE, 120 // config.cluster),
        (config.below, Band.BELOW, 6),
    ):
        for row, column in tiles_of(problem, own, band, border, workers):
            if row < m and column < n:  # a cluster has tiles beyond the edge, too
                assert (row < border) == (band == Band.ABOVE)
                found.append((row, column))
    assert sorted(found) == [
        (row, column) for row in range(0, m, config.tile_m) for column in range(0, n, config.tile_n)
    ]


# On a GPU


def unfit(device):
    found = Device.parse(str(device))
    problem = OP.Problem(4096, 4096, 1024, block=128)
    return KERNEL.legal(problem, banded(INTERLEAVED, (2, 4)), found)


@pytest.fixture
def hopper(device):
    if (reason := unfit(device)) is not None:
        pytest.skip(reason)
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("options", OUTPUTS, ids=str)
@pytest.mark.parametrize("config", [INTERLEAVED, TELESCOPED], ids=["interleaved", "telescoped"])
def test_large_clusters_write_what_clusters_of_two_do(hopper, config, options):
    """To the bit: a tile's sums do not depend on who shares its operands."""
    for (m, n, k), cluster in zip(
        ((4096, 4096, 640), (2300, 1000, 384), (1700, 2304, 1100), (5000, 700, 256), (3, 900, 512)),
        CLUSTERS,
        strict=True,
    ):
        problem = OP.Problem(m, n, k, block=128, **options)
        inputs = OP.inputs(problem, hopper)
        found = {}
        for one in (config.below, banded(config, cluster)):
            assert KERNEL.legal(problem, one, Device.parse(str(hopper))) is None
            outputs = OP.poison(problem, OP.outputs(problem, inputs))
            if problem.accumulate:
                outputs["c"] = inputs["c"].clone()
            KERNEL.launch(problem, one, inputs, outputs)
            found[one] = outputs
        ours, theirs = found.values()
        for name, right in ours.items():
            assert torch.equal(right, theirs[name]), (problem, cluster, name)
        check = verify(OP, KERNEL, problem, banded(config, cluster), inputs)
        assert check.ok, check.message


@pytest.mark.gpu
def test_what_follows_comes_after_both_launches_and_what_precedes_before(hopper):
    """Captured and not: inputs are written, multiplied and read again, a hundred times."""
    problem = OP.Problem(4096, 4096, 2048, block=128, out="bf16")
    config = banded(INTERLEAVED, (2, 4))
    sets = [OP.inputs(problem, hopper, seed=seed) for seed in range(2)]
    inputs = {name: x.clone() for name, x in sets[0].items()}
    outputs = OP.outputs(problem, inputs)
    rights = []
    for values in sets:
        KERNEL.launch(problem, INTERLEAVED, values, outputs)
        rights.append(outputs["c"].clone())
    differ = torch.zeros((), dtype=torch.int64, device=hopper)

    def turn():
        for values, right in zip(sets, rights, strict=True):
            for name, x in values.items():
                inputs[name].copy_(x)
            outputs["c"].zero_()
            KERNEL.launch(problem, config, inputs, outputs)
            differ.add_((outputs["c"] != right).sum())

    turn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    for _ in range(50):
        turn()
        graph.replay()
    assert int(differ) == 0


def milliseconds(call):
    """The median time of a call, each after the one before it has ended."""
    found = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


@pytest.mark.gpu
@pytest.mark.quiet
def test_the_two_launches_run_at_once(hopper):
    """Launched, captured and replayed: one after the other they would take 1.5 times as long."""
    problem = OP.Problem(16384, 4096, 8192, block=128, out="bf16")
    config = banded(INTERLEAVED, (2, 4))
    inputs = OP.inputs(problem, hopper)
    outputs = OP.outputs(problem, inputs)
    two = functools.partial(KERNEL.launch, problem, config, inputs, outputs)
    one = functools.partial(KERNEL.launch, problem, config.below, inputs, outputs)
    two()
    one()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two()
    usual = milliseconds(one)
    assert milliseconds(two) < 1.25 * usual
    assert milliseconds(graph.replay) < 1.25 * usual


@pytest.mark.gpu
@pytest.mark.quiet
def test_a_product_of_two_launches_is_replayed_without_python(hopper, monkeypatch):
    """As fast as Python launches it: the second launch starts beside the first."""
    monkeypatch.delenv("JETFIRE_REPLAY", raising=False)
    problem = OP.Problem(16384, 4096, 4096, block=128, out="bf16")
    device = Device.parse(str(hopper))
    config = lookup.find(OP, KERNEL, problem, device).config
    if not config.banded:
        pytest.skip(f"the config in use has clusters of {config.cluster}")
    inputs = OP.inputs(problem, hopper)
    a, b = (Quantized(inputs[x], inputs[f"{x}_scale"], block=128) for x in "ab")
    outputs = OP.outputs(problem, inputs)
    python = milliseconds(functools.partial(KERNEL.launch, problem, config, inputs, outputs))
    call = functools.partial(ops.int8_gemm, a, b)
    for _ in range(3):
        found = call()
    before = build.extension().replayed()
    assert milliseconds(call) < 1.25 * python
    assert build.extension().replayed() >= before + 15, replay.refusals
    assert torch.equal(found, outputs["c"])
