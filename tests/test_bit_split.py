"""bit_split: the reference against what the paper proves, kernels against the reference."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.kernels_triton import parts as assembly
from jetfire.reference.bit_split import bit_split, codes, split, unit_of
from jetfire.reference.nibbles import pack, unpack

OP = registry.get("bit_split")
KERNEL = registry.get_kernel("bit_split", "triton")
run_ptx = runpy.run_path(str(Path(__file__).with_name("ptx.py")))["run"]


def seed_of(value, device="cpu"):
    return torch.tensor([value], dtype=torch.int64, device=device)


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["x"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def launched(problem, inputs):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(KERNEL, problem, KERNEL.default(problem, Device.of(inputs["x"])), inputs, outputs)
    return outputs


def test_the_parts_make_up_the_gradient():
    """Each element to within a unit; each part to four bits without -8; and their squares."""
    x = torch.randn(60, 34)
    q, unit, squares = bit_split(x, seed=seed_of(5))
    parts = unpack(q)
    assert parts.abs().max() == 7
    assert torch.equal(unit, x.abs().max().reshape(1) / torch.full((1,), 98.0))
    error = (14 * parts[:60].double() + parts[60:]) * unit.double() - x
    assert error.abs().max() < unit.double() * (1 + 1e-5)
    assert torch.equal(squares, parts.int().square().sum(1).int())
    # hi is the nearest multiple of 14 units, so lo has no more than half of its range to cover.
    assert (x - 14 * parts[:60] * unit).abs().max() <= 7 * unit * (1 + 1e-5)


def test_splitting_is_unbiased():
    """Within four standard errors of an element v units in size, which is floor(v) or one more."""
    x, draws = torch.randn((6, 10), generator=torch.Generator().manual_seed(0)), 600
    unit = unit_of(x, 8)
    v = x.double() / unit.double()
    total, seen = torch.zeros_like(v), torch.zeros_like(v)
    for seed in range(draws):
        parts = codes(x, unit, 8, seed_of(seed)).double()
        value = 14 * parts[:6] + parts[6:]
        total += value
        seen += value > v
    above = v - v.floor()
    error = (above * (1 - above) / draws).sqrt()
    assert ((total / draws - v).abs() <= 4 * error + 2e-5).all()
    assert ((seen > 0) & (seen < draws))[(above > 0.05) & (above < 0.95)].all()


def test_codes_stay_in_range_without_clipping():
    """At all the values where hi turns, and at the ends, with the least and the greatest draw."""
    turns = torch.tensor([14.0 * h + 7 for h in range(-7, 7)] + [-98.0, 98.0])
    steps = torch.arange(-3, 4, dtype=torch.int32)
    v = (turns.view(torch.int32)[:, None] + steps).view(torch.float32)
    v = torch.where(v.abs() > 98, 98.0 * v.sign(), v)
    for draw in (0, 1, 65535):
        high, low = split(v, torch.full(v.shape, draw))
        assert high.abs().max() <= 7
        assert low.abs().max() <= 7


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_element_of_any_size_has_a_code(bits):
    """1/unit and the product are rounded: still 98, or 7, at most."""
    generator = torch.Generator().manual_seed(0)
    for exponent in (-99, -20, 0, 60, 127):
        top = (1 + torch.rand(4096, generator=generator)) * 2.0**exponent
        unit = torch.cat([unit_of(x.reshape(1, 1), bits) for x in top[:64]])
        v = top[:64] * unit.reciprocal()
        assert (v.round() == (98 if bits == 8 else 7)).all()
        parts = [int(p) for p in codes(-top[:1, None], unit[:1], bits, seed_of(1)).flatten()]
        assert parts in ([-7, 0], [-7, -1], [-7])


def test_four_bits_are_the_nearest():
    x = torch.randn(40, 30)
    q, unit, squares = bit_split(x, bits=4)
    assert q.shape == (40, 15)
    assert torch.equal(unit, x.abs().max().reshape(1) / torch.full((1,), 7.0))
    assert ((unpack(q) * unit - x).abs() <= unit / 2 * (1 + 1e-6)).all()
    assert torch.equal(squares, unpack(q).int().square().sum(1).int())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("m", "n", "dtype", "data"),
    [
        (1, 2, "bf16", "normal"),
        (33, 70, "bf16", "heavy"),
        (9, 1100, "fp16", "normal"),
        (70, 144, "fp32", "gradient"),
        (5, 1536, "bf16", "outlier"),
    ],
)
def test_triton_gives_the_reference_bits(device, m, n, dtype, data, bits):
    problem = OP.Problem(m, n, dtype=dtype, bits=bits)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_cpu_kernel_gives_the_reference_bits(bits):
    problem = OP.Problem(33, 70, bits=bits)
    kernel = registry.get_kernel("bit_split", "torch")
    check(problem, OP.inputs(problem, torch.device("cpu"), data="heavy"), kernel=kernel)


def test_every_config(device):
    problem = OP.Problem(7, 304)
    inputs = OP.inputs(problem, device, data="heavy")
    for config in [
        (1, 256, 1, 1),
        (16, 128, 2, 64),
        (8, 512, 16, 2),
        (2, 1024, 1, 8),
        (32, 32, 4, 4),
    ]:
        check(problem, inputs, KERNEL.Config(*config))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_row_strided_views(device, dtype):
    """Pairs that lie together, pairs that start at an odd element, rows that do."""
    problem = OP.Problem(9, 46, dtype=dtype)
    inputs = OP.inputs(OP.Problem(9, 98, dtype=dtype), device)
    flat = inputs["x"].flatten()
    for offset, stride in [(0, 90), (1, 90), (2, 97), (4, 96)]:
        inputs["x"] = flat[offset : offset + 9 * stride].view(9, stride)[:, :46]
        check(problem, inputs)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_fault_leaves_one_code_and_no_unit(device, fault, bits):
    problem = OP.Problem(9, 300, bits=bits)
    inputs = OP.inputs(problem, device)
    inputs["x"][7, 231] = fault
    check(problem, inputs)
    outputs = launched(problem, inputs)
    assert outputs["unit"].isnan().all()
    assert unpack(outputs["q"]).nonzero().tolist() == [[0, 0]]
    assert outputs["squares"].tolist() == [1] + [0] * (problem.rows - 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_too_small_is_zero_and_what_is_large_is_split(device, bits):
    problem = OP.Problem(4, 40, dtype="fp32", bits=bits)
    inputs = OP.inputs(problem, device)
    inputs["x"] = inputs["x"].clamp(-1, 1)
    inputs["x"][0, 0] = 1
    normal = inputs["x"]
    for exponent in (-101, -100, 64, 127):
        inputs["x"] = normal * 2.0**exponent
        check(problem, inputs)
        outputs = launched(problem, inputs)
        assert bool(outputs["unit"] == 0) == (exponent == -101)
        assert bool((outputs["q"] == 0).all()) == (exponent == -101)
    inputs["x"] = torch.zeros_like(normal)
    check(problem, inputs)


def test_repeats_bit_for_bit_and_leaves_its_counters_at_zero(device):
    problem = OP.Problem(9, 300)
    inputs = OP.inputs(problem, device, data="heavy")
    first = launched(problem, inputs)
    launched(problem, {**inputs, "x": inputs["x"] * 64})
    second = launched(problem, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def packed(codes_of_pairs):
    """What the asm packs, from even elements' codes and odd ones': a word of four pairs' bytes."""
    even, odd = (torch.tensor(np.stack(c, -1)).to(torch.int8) for c in codes_of_pairs)
    return pack(torch.stack([even, odd], -1).flatten(1)).numpy().view(np.uint32)[:, 0]


@pytest.mark.parametrize("vectors", ["", "_VECTORS"])
def test_the_assembly_is_what_the_interpreter_runs(vectors):
    """Squares are of each pair, or with vectors of all four in the first one's place."""
    generator = np.random.default_rng(0)
    v = [(generator.random(4000, np.float32) * 196 - 98) for _ in range(8)]
    v[0][:29] = np.arange(-98, 99, 7)
    words = [generator.integers(0, 2**32, 4000, dtype=np.uint32) for _ in range(4)]
    words[0][:14] = 0
    draws = [word & 0xFFFF for word in words] + [word >> 16 for word in words]
    parts = [
        [part.numpy() for part in split(torch.tensor(x), torch.tensor(u.astype(np.int64)))]
        for x, u in zip(v, draws, strict=True)
    ]

    def check_asm(packed_word, squares, each):
        assert (packed_word == packed((each[:4], each[4:]))).all()
        expected = [even**2 + odd**2 for even, odd in zip(each[:4], each[4:], strict=True)]
        if vectors:
            expected = [sum(expected)] + [np.zeros(4000)] * 3
        assert (np.stack(squares) == np.stack(expected)).all()

    found = run_ptx(getattr(assembly, f"_SPLIT{vectors}").value, 10, *v, *words)
    for i in (0, 1):
        check_asm(found[i], found[2 + 4 * i : 6 + 4 * i], [part[i] for part in parts])
    v = [x / 14 for x in v]
    found = run_ptx(getattr(assembly, f"_NEAREST{vectors}").value, 5, *v)
    check_asm(found[0], found[1:], [np.rint(x) for x in v])


def test_what_is_refused():
    with pytest.raises(UsageError, match="n=7: expected an even number"):
        OP.Problem(4, 7)
    with pytest.raises(UsageError, match="bits=6: expected 8 or 4"):
        OP.Problem(4, 8, bits=6)
    problem, h200 = OP.Problem(64, 64), target_device((9, 0))
    for config, reason in (
        ((3, 512, 4, 8), "tile_m=3"),
        ((4, 16, 4, 8), "tile_n=16"),
        ((4, 512, 3, 8), "warps=3"),
        ((4, 4096, 4, 8), "128 elements per thread"),
        ((1, 128, 4, 8), "1 elements per thread"),
        ((4, 512, 4, 0), "waves=0"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    assert KERNEL.legal(problem, KERNEL.default(problem, h200), h200) is None


def test_the_peer_is_the_same_in_torch():
    for bits in (8, 4):
        problem = OP.Problem(45, 100, dtype="fp32", bits=bits)
        inputs = OP.inputs(problem, torch.device("cpu"))
        expected = OP.reference(problem, inputs)
        q, unit, _ = OP.peers(problem, inputs)["eager"]()()
        torch.testing.assert_close(unit.reshape(1), expected["unit"])
        theirs, ours = unpack(q)[:45].double(), unpack(expected["q"])[:45].double()
        assert (theirs - ours).abs().max() <= 1
        assert (theirs != ours).double().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size):
    for m, n in [(size, 100), (100, size + size % 2)]:
        problem = OP.Problem(m, n)
        check(problem, OP.inputs(problem, device, data="heavy"))


@pytest.mark.gpu
def test_in_a_graph_without_synchronising(device):
    problem = OP.Problem(1000, 768)
    inputs = OP.inputs(problem, device)
    config = KERNEL.default(problem, Device.of(inputs["x"]))
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, config, inputs, outputs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            launch(KERNEL, problem, config, inputs, outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for scale in (1.0, 8.0, 0.5):
        inputs["x"] *= scale
        OP.poison(problem, outputs)
        graph.replay()
        result = OP.check(problem, outputs, OP.reference(problem, inputs))
        assert result.ok, result.message


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, n = 65537, 32770
    problem = OP.Problem(m, n)
    x = torch.empty((m, n), dtype=torch.bfloat16, device=device)
    for rows in x.split(4096):
        rows.normal_()
    inputs = {"x": x, "seed": seed_of(3, device)}
    outputs = launched(problem, inputs)
    unit = max(rows.abs().max() for rows in x.split(4096)).float().reshape(1) / 98
    torch.testing.assert_close(outputs["unit"], unit)
    for top in (0, 32768, 65535):
        expected = codes(x[top : top + 2], outputs["unit"], 8, inputs["seed"], row0=top)
        for part in range(2):
            found = unpack(outputs["q"][part * m + top : part * m + top + 2])
            assert torch.equal(found, expected[2 * part : 2 * part + len(found)])
            squares = outputs["squares"][part * m + top : part * m + top + 2]
            assert torch.equal(squares, found.int().square().sum(1).int())
