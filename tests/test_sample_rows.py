"""sample_rows: the reference against what it must be, kernels against the reference to the bit."""

import dataclasses
import itertools
import random

import pytest
import torch

from jetfire.core import registry, workloads
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import SEGMENT, capacity
from jetfire.core.launch import launch, verify
from jetfire.ops import int4_sample_rows, int4_sample_rows_both
from jetfire.reference.sample_rows import (
    LEAST,
    ONE,
    drawn,
    probabilities,
    repeats,
    sample_rows,
    systematic,
    weights,
)

OP = registry.get("sample_rows")
KERNEL = registry.get_kernel("sample_rows", "triton")
CLUSTER = registry.get_kernel("sample_rows", "cluster")
TORCH = registry.get_kernel("sample_rows", "torch")
CPU = torch.device("cpu")
PRODUCTS = ("dgrad", "wgrad")
EACH = (*PRODUCTS, "both")
SEED = torch.tensor([11])


def check(problem, inputs, *configs):
    """Look at Triton's kernel with these configs, and at what else runs on the device."""
    device = Device.of(inputs["squares"])
    expected = OP.reference(problem, inputs)
    tried = [(KERNEL, config) for config in configs or (KERNEL.default(problem, device),)]
    for other in (CLUSTER, TORCH):
        config = other.default(problem, device)
        if other.legal(problem, config, device) is None:
            tried.append((other, config))
    for kernel, config in tried:
        result = verify(OP, kernel, problem, config, inputs, expected)
        assert result.ok, f"{problem}, {kernel.name}, {config}: {result.message}"
    return expected


def log_normal(rows, spread, seed=0):
    """Weights of which some are many times the others."""
    draw = random.Random(seed)
    return weights([int(1 + 1000 * draw.lognormvariate(0, spread)) for _ in range(rows)])


# The reference


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("budget", [1, 17, 100, 199])
def test_water_filling_is_the_minimum_of_the_variance(spread, budget):
    """min Σ w²/p for Σp = budget, p ≤ 1: p = min(1, w/λ) with one λ (Karush, Kuhn and Tucker)."""
    w = log_normal(200, spread)
    chances = probabilities(w, budget)
    assert abs(sum(chances) / ONE - budget) < 1e-6
    left = max((chance, value) for value, chance in zip(w, chances, strict=True) if chance < ONE)
    for value, chance in zip(w, chances, strict=True):
        assert abs(chance - min(ONE, value * left[0] / left[1])) <= 2


def test_probabilities_of_few_rows_are_one():
    assert probabilities([5, 0, 1, 0], 2) == [ONE, 0, ONE, 0]
    assert probabilities([0, 0, 0], 1) == [0, 0, 0]


def test_the_smallest_probability_is_kept_to():
    w = [1 << 30] * 4 + [1] * 60
    least = LEAST["wgrad"]
    assert probabilities(w, 32, least)[4:] == [max(least, 28 * ONE // 60)] * 60
    assert probabilities([1 << 30] * 33 + [1] * 31, 32, least)[33:] == [least] * 31


def test_weights_are_roots_that_are_never_zero_for_a_row_that_is_not():
    assert weights([0, 4, 16, 1]) == [0, 1 << 29, 1 << 30, 1 << 28]
    assert weights([1, 10**18]) == [2, 1 << 30]
    assert weights([0, 0]) == [0, 0]


def test_systematic_draws_keep_each_row_as_often_as_it_should_be():
    """Over all u that tell chances of sixteenths apart, exactly; and their number is ⌊Σp⌋, ⌈Σp⌉."""
    draw = random.Random(3)
    sixteenths = [draw.choice([0, 1, 3, 8, 15, 16]) for _ in range(40)]
    total = sum(sixteenths) / 16
    often = [0] * 40
    for u in range(16):
        kept = systematic([share << 28 for share in sixteenths], u << 28)
        assert sum(kept) in (int(total), int(total + 15 / 16))
        often = [count + row for count, row in zip(often, kept, strict=True)]
    assert often == sixteenths


def test_repeats_are_the_inverse_on_average():
    chances = [ONE, ONE // 3 * 2, LEAST["wgrad"], LEAST["wgrad"] + 12345, ONE // 2 - 99, 0]
    draws = torch.tensor(repeats(chances * 4000, SEED)).view(4000, -1)
    assert int(draws.max()) == 16
    for values, chance in zip(draws.t().double(), chances, strict=True):
        inverse = ONE / chance if chance else 0.0
        spread = 4 * float(values.std()) / 4000**0.5
        assert abs(float(values.mean()) - inverse) <= spread + 2**-16
        assert int(values.max()) - int(values.min()) <= 1


@pytest.mark.parametrize("product", PRODUCTS)
def test_buffers_hold_what_they_say(product):
    m = 300
    squares = torch.randint(0, 5000, (2 * m,), dtype=torch.int32)
    x_squares = torch.randint(0, 5000, (m,), dtype=torch.int32) if product == "wgrad" else None
    room = capacity(m, 2, product, "half")
    found = sample_rows(squares, SEED, 2, "half", room, x_squares)
    rows, (high, end) = found["rows"], found["counts"].tolist()
    assert high % SEGMENT == 0
    assert end % SEGMENT == 0
    for part, low, top in ((rows[:high], 0, m), (rows[high:end], m, 2 * m)):
        count = int((part >= 0).sum())
        assert (part[:count].diff() > 0).all()
        assert bool(((part[:count] >= low) & (part[:count] < top)).all())
        assert (part[count:] == -1).all()
        assert len(part) - count < SEGMENT
    assert (rows[end:] == -1).all()
    kept = rows >= 0
    if product == "wgrad":
        assert torch.equal(found["repeat"] > 0, kept)
        return
    assert torch.equal(found["weight"] > 0, kept)
    assert (found["weight"][:high][kept[:high]] >= 14).all()
    slots = found["slots"].t().flatten()
    assert torch.equal(rows[slots[slots >= 0].long()], (slots >= 0).nonzero().flatten().int())
    assert int((slots >= 0).sum()) == int(kept.sum())


@pytest.mark.parametrize("m", [1, 2, 100, 127, 128, 129, 1000])
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_buffer_is_never_too_small(m, product):
    """As many kept as can be, for every way to share them between the parts."""
    room = capacity(m, 2, product, "half")
    assert room % SEGMENT == 0
    most = min(2 * m, m + 1 + (m // 8 if product == "wgrad" else 0))
    for high in range(max(0, most - m), min(m, most) + 1):
        low = most - high
        assert -(-high // SEGMENT) * SEGMENT + -(-low // SEGMENT) * SEGMENT <= room
    # Many rows that the smallest probability lifts, beside those that are certain.
    for certain in {0, 1, m // 2, m - 1}:
        scores = [1 << 40] * certain + [1] * (2 * m - certain)
        chances = probabilities(weights(scores), m, LEAST[product])
        for seed in range(5):
            draw = drawn(chances, torch.tensor([seed]), 2, room, product)
            assert int((draw["rows"] >= 0).sum()) <= most


def test_a_buffer_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match="256 rows are kept: the buffer has 128"):
        drawn([ONE] * 256, SEED, 2, 128, "dgrad")


# The kernels


@pytest.mark.parametrize("product", EACH)
@pytest.mark.parametrize(("m", "data"), [(1, "normal"), (100, "heavy"), (300, "gradient")])
def test_kernels_are_bit_equal(device, product, m, data):
    problem = OP.Problem(m, product=product)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("parts", "keep"), [(2, "all"), (1, "half"), (1, "all")])
def test_all_that_is_not_zero(device, product, parts, keep):
    """Every row is kept and counts c."""
    problem = OP.Problem(150, parts=parts, product=product, keep=keep)
    inputs = OP.inputs(problem, device, data="gradient")
    found = check(problem, inputs)
    alive = inputs["squares"] > 0
    if product == "wgrad":
        alive &= (inputs["x_squares"] > 0).repeat(parts)
        assert set(found["repeat"].tolist()) == {0, 1}
    else:
        assert set(found["weight"].tolist()) == ({0.0, 1.0, 14.0} if parts == 2 else {0.0, 1.0})
    rows = found["rows"][found["rows"] >= 0]
    assert torch.equal(rows.long(), alive.nonzero().flatten())


def ran(problem, inputs, kernel, config):
    outputs = OP.poison(problem, OP.outputs(problem, inputs))
    launch(kernel, problem, config, inputs, outputs)
    return outputs


def singles(problem, inputs, kernel, config):
    """What the draws of one product give, by the names that they have in that of both."""
    found = {}
    for i, product in enumerate(PRODUCTS):
        alone = dataclasses.replace(problem, product=product)
        given = {name: inputs[name] for name in OP.reads(alone)}
        given["seed"] = inputs["seed"][i : i + 1].clone()
        for name, tensor in ran(alone, given, kernel, config).items():
            found[f"wgrad_{name}" if name in found else name] = tensor
    return found


@pytest.mark.parametrize("m", [1, 127, 128, 129, 300])
@pytest.mark.parametrize(("parts", "keep"), [(2, "half"), (2, "all"), (1, "half"), (1, "all")])
def test_both_draws_are_those_of_each_product(device, parts, keep, m):
    problem = OP.Problem(m, parts=parts, keep=keep, product="both")
    inputs = OP.inputs(problem, device, data="heavy")
    where = Device.of(inputs["squares"])
    assert len(inputs["seed"].unique()) == 2
    for config in (KERNEL.default(problem, where), KERNEL.Config(128, 128, 4)):
        found = ran(problem, inputs, KERNEL, config)
        expected = singles(problem, inputs, KERNEL, config)
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
    check(problem, inputs)


@pytest.mark.parametrize("product", EACH)
def test_every_config_draws_the_same(device, product):
    problem = OP.Problem(140, product=product)
    inputs = OP.inputs(problem, device, data="heavy")
    shapes = [(128, 128, 1), (256, 128, 4), (512, 256, 8), (512, 1024, 32)]
    check(problem, inputs, *(KERNEL.Config(*shape) for shape in shapes))


@pytest.mark.parametrize("product", EACH)
@pytest.mark.parametrize(
    "case", ["zeros", "one", "first", "equal", "steep", "largest", "half", "one more than half"]
)
def test_special_scores(device, product, case):
    m, most = 140, 49 * 65536
    squares = torch.zeros(2 * m, dtype=torch.int32)
    x_squares = torch.full((m,), 64 * 65536, dtype=torch.int32)
    if case == "one":
        squares[m + 7] = 3
    elif case == "first":  # what a gradient with NaN is split into
        squares[0] = 1
    elif case == "equal":
        squares[m:] = 196
        squares[:m] = 1
    elif case == "steep":  # round after round of water-filling
        squares[:] = (most * 0.75 ** torch.arange(2 * m).float()).int()
        x_squares = x_squares.flip(0) // torch.arange(1, m + 1, dtype=torch.int32)
    elif case == "largest":
        squares[:] = most
    elif case.endswith("half"):
        squares[: m + (case != "half")] = torch.arange(1, m + 1 + (case != "half")).int()
    problem = OP.Problem(m, product=product)
    inputs = {"squares": squares.to(device), "seed": SEED.to(device)}
    if product == "both":
        inputs["seed"] = torch.tensor([11, 12], device=device)
    if product != "dgrad":
        inputs["x_squares"] = x_squares.to(device)
    found = check(problem, inputs)
    alive = int((squares > 0).sum())
    for rows in (found[name] for name in found if name.endswith("rows")):
        count = int((rows >= 0).sum())
        assert count == alive if alive <= m else m <= count <= m + 1 + m // 8


def test_seeds_draw_other_rows_and_one_seed_the_same(device):
    problem = OP.Problem(200)
    inputs = OP.inputs(problem, device)
    config = KERNEL.default(problem, Device.of(inputs["squares"]))
    found = []
    for seed in (5, 5, 6):
        outputs = OP.outputs(problem, inputs)
        given = {**inputs, "seed": torch.tensor([seed], device=device)}
        launch(KERNEL, problem, config, given, outputs)
        found.append(outputs["rows"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_check_sees_one_row_too_few():
    problem = OP.Problem(100)
    inputs = OP.inputs(problem, CPU)
    expected = OP.reference(problem, inputs)
    outputs = {name: tensor.clone() for name, tensor in expected.items()}
    outputs["rows"][3] = -1
    found = OP.check(problem, outputs, expected)
    assert not found.ok
    assert "rows: 1 of" in found.message


@pytest.mark.parametrize("product", EACH)
@pytest.mark.parametrize("keep", ["half", "all"])
def test_the_torch_peer_keeps_as_many(product, keep):
    problem = OP.Problem(500, product=product, keep=keep)
    inputs = OP.inputs(problem, CPU, data="heavy")
    found = OP.peers(problem, inputs)["eager"]()()
    expected = OP.reference(problem, inputs)
    assert len(found) == 3 * len(problem.products)
    of_each = [tensor for name, tensor in expected.items() if name.endswith("rows")]
    for i, of in enumerate(problem.products):
        rows, count, inverse = found[3 * i : 3 * i + 3]
        if of == "dgrad" or keep == "all":
            assert abs(int(count) - int((of_each[i] >= 0).sum())) <= 1
        assert len(rows) == 1000
        assert bool((inverse[:count] >= 1).all())


def test_there_is_no_n_and_tokens_are_what_is_asked_for():
    with pytest.raises(UsageError, match="n=2: expected 1"):
        OP.Problem(4, n=2)
    assert workloads.problems(OP, "gpt2-124m", "fwd", {}) == [OP.Problem(8192)]


def test_what_is_refused():
    problem, h200 = OP.Problem(64), target_device((9, 0))
    for config, reason in (
        ((100, 128, 4), "tile=100"),
        ((32768, 128, 16), "tile=32768"),
        ((128, 64, 4), "rows=64"),
        ((128, 128, 3), "warps=3"),
        ((16384, 128, 4), "128 rows per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    assert "int32" in KERNEL.legal(OP.Problem(1 << 31), KERNEL.Config(), h200)
    a100 = target_device((8, 0))
    assert KERNEL.legal(problem, KERNEL.Config(), a100) is None
    assert CLUSTER.legal(problem, CLUSTER.Config(), a100) == CLUSTER.needs
    assert "cluster=16" in CLUSTER.legal(problem, CLUSTER.Config(cluster=16), h200)
    assert CLUSTER.legal(OP.Problem(65536), CLUSTER.Config(), h200) is None
    assert (
        CLUSTER.legal(OP.Problem(65537), CLUSTER.Config(), h200)
        == "131074 rows: expected at most 131072, 16 to a thread"
    )


def test_a_thread_of_a_cluster_has_a_power_of_two_of_rows():
    rows = [CLUSTER.Config(2, 4).rows(total) for total in (0, 1, 256, 257, 512, 513, 4096)]
    assert rows == [1, 1, 1, 2, 2, 4, 16]
    h200 = target_device((9, 0))
    chosen = [CLUSTER.default(OP.Problem(m), h200) for m in (1, 1024, 2048, 8192, 65536)]
    assert [(c.cluster, c.warps) for c in chosen] == [(8, 4), (8, 4), (8, 8), (8, 32), (8, 32)]


@pytest.mark.parametrize(("parts", "keep"), [(2, "half"), (2, "all"), (1, "half")])
def test_the_function_of_both_gives_what_that_of_each_does(device, parts, keep):
    problem = OP.Problem(150, parts=parts, keep=keep, product="both")
    squares, x_squares, seed = OP.inputs(problem, device, data="gradient").values()
    more = {"parts": parts, "keep": keep}
    found = int4_sample_rows_both(squares, x_squares=x_squares, seed=seed, **more)
    expected = (
        int4_sample_rows(squares, seed=seed[:1], **more),
        int4_sample_rows(squares, x_squares=x_squares, seed=seed[1:], **more),
    )
    for got, right in zip(found, expected, strict=True):
        for name, tensor in got._asdict().items():
            other = getattr(right, name)
            assert tensor is other is None or torch.equal(tensor, other), name


def test_the_function_of_both_takes_a_seed_for_each():
    squares = torch.ones(8, dtype=torch.int32)
    for seed in (SEED, torch.tensor([[1, 2]]), torch.tensor([1, 2], dtype=torch.int32)):
        with pytest.raises(UsageError, match=r"seed is int.*: expected int64 \(2,\)"):
            int4_sample_rows_both(squares, x_squares=squares[:4], seed=seed)
    apart = torch.tensor([1, 0, 2])[::2]
    found, together = (
        int4_sample_rows_both(squares, x_squares=squares[:4], seed=seed)
        for seed in (apart, apart.clone())
    )
    assert all(map(torch.equal, found[1][:2], together[1][:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("product", EACH)
@pytest.mark.parametrize("m", [1, 33, 4608, 8191, 15360, 65536])
@pytest.mark.parametrize("data", ["normal", "heavy", "gradient"])
def test_whole_layers(device, product, m, data):
    problem = OP.Problem(m, product=product)
    check(problem, OP.inputs(problem, device, data=data))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("keep", ["half", "all"])
@pytest.mark.parametrize("m", [129, 8191, 8192, 16384])
def test_both_draws_of_whole_layers_are_those_of_each_product(device, parts, keep, m):
    problem = OP.Problem(m, parts=parts, keep=keep, product="both")
    inputs = OP.inputs(problem, device, data="gradient")
    default = KERNEL.default(problem, Device.of(inputs["squares"]))
    for config in (default, KERNEL.Config(16384, 256, 8), KERNEL.Config(4096, 512, 8)):
        found = ran(problem, inputs, KERNEL, config)
        for name, tensor in singles(problem, inputs, KERNEL, config).items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "keep"), [(2, "half"), (2, "all"), (1, "half")])
@pytest.mark.parametrize("product", EACH)
@pytest.mark.parametrize("m", [1, 1000, 1024, 8192])
def test_every_cluster_draws_the_same(device, product, m, parts, keep):
    if torch.cuda.get_device_capability() < CLUSTER.least:
        pytest.skip(CLUSTER.needs)
    problem = OP.Problem(m, parts=parts, keep=keep, product=product)
    inputs = OP.inputs(problem, device, data="heavy")
    expected = OP.reference(problem, inputs)
    tried = 0
    for values in itertools.product(*CLUSTER.choices.values()):
        config = CLUSTER.Config(*values)
        if CLUSTER.legal(problem, config, Device.of(inputs["squares"])) is None:
            result = verify(OP, CLUSTER, problem, config, inputs, expected)
            assert result.ok, f"{config}: {result.message}"
            tried += 1
    assert tried >= 7


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KERNEL, CLUSTER], ids=["triton", "cluster"])
@pytest.mark.parametrize("product", EACH)
def test_replays_in_a_graph_with_new_seeds(device, product, kernel):
    problem = OP.Problem(3000, product=product)
    inputs = OP.inputs(problem, device, data="heavy")
    outputs = OP.outputs(problem, inputs)
    config = kernel.default(problem, Device.of(inputs["squares"]))
    if reason := kernel.legal(problem, config, Device.of(inputs["squares"])):
        pytest.skip(reason)
    launch(kernel, problem, config, inputs, outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernel, problem, config, inputs, outputs)
    for seed in (1, 2, 3):
        inputs["seed"].copy_(seed + torch.arange(len(inputs["seed"])))
        OP.poison(problem, outputs)
        graph.replay()
        result = OP.check(problem, outputs, OP.reference(problem, inputs))
        assert result.ok, result.message
