"""add_rows: the reference against autograd, kernels against the reference, runs at every border."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from jetfire import ops
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.core.launch import launch, verify
from jetfire.core.workloads import RAGGED
from jetfire.ops.add_rows import grouped
from jetfire.reference.add_rows import add_rows

OP = registry.get("add_rows")
KERNEL = registry.get_kernel("add_rows", "triton")
CPU = torch.device("cpu")
SMALL = KERNEL.Config(8, 32, 4, 1)
TINY = KERNEL.Config(1, 32, 1, 1)  # a program for every place: the most borders
DTYPES = ("bf16", "fp16", "fp32")


def check(problem, inputs, config=None, kernel=KERNEL):
    config = config or kernel.default(problem, Device.of(inputs["table"]))
    result = verify(OP, kernel, problem, config, inputs)
    assert result.ok, f"{problem}, {config}: {result.message}"


def whole(ids, m, n, device):
    """Inputs whose sums are exact in any order."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    generator = torch.Generator().manual_seed(len(ids))
    table, gradient = (
        torch.randint(-9, 10, (rows, n), generator=generator) for rows in (m, len(ids))
    )
    inputs = {"table": table.float(), "ids": ids, "order": grouped(ids, m)}
    inputs["gradient"] = gradient.bfloat16()
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def added(inputs, config=SMALL):
    (m, n), k = inputs["table"].shape, len(inputs["ids"])
    problem = OP.Problem(m, n, k)
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, config, inputs, outputs)
    return outputs["table"]


def exact(inputs, config=SMALL):
    expected = add_rows(inputs["table"], inputs["ids"], inputs["gradient"])
    assert torch.equal(added(inputs, config).double(), expected)


def test_reference_is_the_gradient_of_an_embedding():
    """As float64 autograd has it, beside another gradient of the table."""
    ids, weight = torch.randint(9, (40,)), torch.randn(9, 5, dtype=torch.float64)
    other, gradient = torch.randn(9, 5).double(), torch.randn(40, 5).double()
    weight.requires_grad_()
    ((weight * other).sum() + (F.embedding(ids, weight) * gradient).sum()).backward()
    torch.testing.assert_close(add_rows(other, ids, gradient), weight.grad, rtol=0, atol=1e-14)


def test_inputs_are_a_text_s():
    problem = OP.Problem(50304, 2, 16384)
    inputs = OP.inputs(problem, CPU)
    ids, order = inputs["ids"], inputs["order"]
    counts = ids.bincount()
    assert 0.05 < counts.max() / len(ids) < 0.2
    assert (counts == 1).sum() > 2000
    assert not torch.equal(ids, ids.sort().values)
    assert torch.equal(order.sort().values, torch.arange(len(ids)))
    rows = int((counts > 0).sum())
    assert OP.bytes(problem) == 16384 * (8 + 8 + 2 * 2) + 2 * rows * 4 * 2


@pytest.mark.parametrize("rows", [1, 7, 2**15, 2**16, 2**16 + 1, 2**32, 2**40])
def test_equal_ids_follow_one_another(rows):
    """Of every width, whose last ids are negative numbers of it; each id's places rise."""
    ends = torch.tensor([0, rows - 1, rows // 2, max(rows // 2 - 1, 0), rows // 3])
    ids = ends[torch.randint(5, (200,))]
    order = grouped(ids, rows)
    assert order.dtype == torch.int64
    ordered = ids[order]
    new = ordered[1:] != ordered[:-1]
    assert 1 + int(new.sum()) == len(ids.unique())
    assert bool((new | (order[1:] > order[:-1])).all())


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "data"),
    [
        (1, 1, 1, "normal"),
        (33, 130, 31, "outlier"),
        (1000, 33, 65, "gradient"),
        (5, 260, 70, "heavy"),
    ],
)
def test_kernels_are_within_the_rounding_of_their_sums(device, m, n, k, data, dtype, kernel):
    problem = OP.Problem(m, n, k, dtype=dtype)
    where = device if kernel == "triton" else CPU
    check(problem, OP.inputs(problem, where, data=data), kernel=registry.kernels(OP.name)[kernel])


def test_every_config(device):
    problem = OP.Problem(10, 70, 40)
    inputs = OP.inputs(problem, device)
    for config in [
        (8, 64, 8, 2),
        (16, 32, 1, 1),
        (128, 256, 4, 2),
        (1, 32, 1, 1),
        (64, 128, 16, 1),
        (2, 512, 2, 4),
    ]:
        check(problem, inputs, KERNEL.Config(*config))


@pytest.mark.parametrize("k", [7, 8, 9, 16, 17])
def test_one_id_at_all_places(device, k):
    exact(whole([2] * k, 4, 40, device))


@pytest.mark.parametrize("programs", [64, 65, 66, 128, 129, 130])
def test_a_run_of_many_programs(device, programs):
    """The second launch adds what 64 of them have left at once."""
    exact(whole([0] + [1] * programs + [2] * 2, 3, 5, device), TINY)


@pytest.mark.parametrize("k", [1, 7, 8, 9, 40])
def test_different_ids(device, k):
    exact(whole(torch.randperm(k), k, 40, device))


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_runs_that_begin_and_end_at_any_place_of_a_program(device, first, length):
    """Between runs of which the last goes on for two programs more."""
    exact(whole([0] * first + [1] * length + [3] + [2] * 20, 4, 3, device))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=5))
def test_any_runs(device, runs):
    """In no order of the ids: those that come again are brought together."""
    exact(whole([id for id, length in runs for _ in range(length)], 6, 5, device))


def test_repeats_bit_for_bit(device):
    problem = OP.Problem(3, 40, 100, dtype="fp32")
    inputs = OP.inputs(problem, device, data="heavy")
    first, again = (added(inputs, SMALL) for _ in range(2))
    assert torch.equal(first, again)


def test_rows_that_no_id_names_are_left_as_they_are(device):
    inputs = whole([4, 1, 4], 6, 40, device)
    inputs["table"][[0, 2, 3, 5]] = torch.nan
    found = added(inputs)
    assert found.isnan().all(dim=1).tolist() == [True, False, True, True, False, True]


def test_a_bad_row_shows_in_the_row_of_its_id_alone(device):
    """Whatever comes before it and after it in a program."""
    ids = [0] * 5 + [1] * 20 + [2] * 3
    for place in (0, 4, 5, 7, 8, 24, 25, 27):
        inputs = whole(ids, 3, 5, device)
        inputs["gradient"][place, 2] = torch.inf
        found = added(inputs)
        assert found.isinf().nonzero().tolist() == [[ids[place], 2]]
        assert not found.isnan().any()


def test_row_strided_views(device):
    inputs = whole([3, 1, 3, 0, 3], 5, 40, device)
    expected = add_rows(inputs["table"], inputs["ids"], inputs["gradient"]).float()
    for offset in (0, 1, 4):
        table, gradient = (torch.full((5, 50), 7.0, device=device) for _ in range(2))
        gradient = gradient.bfloat16()
        views = [x[:, offset : offset + 40] for x in (table, gradient)]
        views[0].copy_(inputs["table"])
        views[1].copy_(inputs["gradient"])
        assert ops.add_rows(views[0], inputs["ids"], views[1]) is views[0]
        assert torch.equal(views[0], expected)
        table[:, offset : offset + 40] = 7
        assert bool((table == 7).all())


@pytest.mark.parametrize("wrong", [-1, 6, 2**32 + 1, -(2**63)])
def test_what_is_no_row(device, wrong):
    """It is refused on a CPU; a kernel that nothing waits for leaves it out."""
    inputs = whole([1] * 4 + [5] * 9, 6, 5, device)
    expected = add_rows(inputs["table"], inputs["ids"][:12], inputs["gradient"][:12])
    for places in ([12], [0, 12]):
        inputs["ids"][places] = wrong
        inputs["order"] = inputs["ids"].sort(stable=True).indices
        if 0 in places:
            expected[1] -= inputs["gradient"][0]
        assert torch.equal(added(inputs).double(), expected)
    kernel, problem = registry.kernels(OP.name)["torch"], OP.Problem(6, 5, 13)
    with pytest.raises(UsageError, match=f"^ids has {wrong}: expected 0 to 5, rows of the table$"):
        check(problem, {name: x.cpu() for name, x in inputs.items()}, kernel=kernel)


@pytest.mark.parametrize("rows", [6, 50304, 65535, 65536])
def test_what_is_no_row_is_sorted_apart_from_rows(rows):
    """Not among those that it equals modulo 2^16, whose run would be cut."""
    ids = torch.tensor([5, 2**16 + 5, 5, -1, rows - 1, 5 - 2**16, 2**32 + 5, -1, rows - 1])
    ordered = ids[grouped(ids, rows)].tolist()
    for row in (5, rows - 1):
        first, count = ordered.index(row), ordered.count(row)
        assert ordered[first : first + count] == [row] * count


def test_the_check_sees_a_missing_row():
    problem = OP.Problem(100, 8, 4096)
    inputs = OP.inputs(problem, CPU)
    expected = OP.reference(problem, inputs)
    assert OP.check(problem, {"table": expected["table"].float()}, expected).ok
    inputs["gradient"][5] = 0
    table = add_rows(inputs["table"], inputs["ids"], inputs["gradient"]).float()
    found = OP.check(problem, {"table": table}, expected)
    assert not found.ok
    assert f"({int(inputs['ids'][5])}, 0)" in found.message


def test_what_is_refused():
    problem, h200 = OP.Problem(64, 64, 64), target_device((9, 0))
    for config, reason in (
        ((24, 256, 8, 1), "rows=24"),
        ((512, 256, 8, 1), "rows=512"),
        ((32, 96, 8, 1), "tile_n=96"),
        ((8, 256, 16, 1), "batch=16: expected a power of two of at most 8"),
        ((32, 256, 8, 3), "warps=3"),
        ((32, 256, 16, 1), "128 sums per thread in a batch"),
        ((32, 16, 8, 1), "0 sums per thread"),
    ):
        assert reason in KERNEL.legal(problem, KERNEL.Config(*config), h200)
    long = OP.Problem(64, 768, 2**34)
    assert "more than 2^31 programs" in KERNEL.legal(long, KERNEL.default(long, h200), h200)


def test_the_peer_is_the_same_in_torch():
    problem = OP.Problem(45, 100, 70)
    inputs = OP.inputs(problem, CPU)
    found = OP.peers(problem, inputs)["eager"]()()
    expected = OP.reference(problem, inputs)
    assert OP.check(problem, {"table": found}, expected).ok


def test_the_function(device):
    inputs = whole([3, 1, 3, 0, 3], 5, 40, device)
    expected = add_rows(inputs["table"], inputs["ids"], inputs["gradient"]).float()
    order = inputs.pop("order")
    inputs = list(inputs.values())
    for options in ({}, {"order": order}):
        table = inputs[0].clone()
        version = table._version
        assert ops.add_rows(table, *inputs[1:], **options) is table
        assert torch.equal(table, expected)
        assert table._version > version
    compiled = torch.compile(ops.add_rows, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs[0].clone(), *inputs[1:]), expected)


def test_what_the_function_refuses():
    table, ids, gradient = torch.zeros(4, 8), torch.zeros(5).long(), torch.zeros(5, 8)
    for args, message in (
        ((table.half(), ids, gradient), "table is float16: expected float32"),
        ((table, ids, gradient.double()), "gradient is float64: expected bfloat16 or"),
        ((table, ids, gradient[:, :7]), r"gradient has shape \(5, 7\): expected 8 columns"),
        ((table, ids[:4], gradient), r"ids is int64 \(4,\): expected int64 \(5,\)"),
        ((table, ids.int(), gradient), r"ids is int32 \(5,\): expected int64 \(5,\)"),
        ((table, ids + 4, gradient), "ids has 4: expected 0 to 3"),
    ):
        with pytest.raises(UsageError, match=f"^{message}"):
            ops.add_rows(*args)
    with pytest.raises(UsageError, match=r"^order is int32 \(5,\): expected int64"):
        ops.add_rows(table, ids, gradient, order=ids.int())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", RAGGED)
def test_ragged(device, size, dtype):
    for m, n, k in [(size, 100, 300), (100, size, 300), (300, 100, size)]:
        problem = OP.Problem(m, n, k, dtype=dtype)
        check(problem, OP.inputs(problem, device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_s_sizes_repeat_bit_for_bit(device, dtype):
    for m, n, k in [(50304, 768, 16384), (50304, 1024, 8192), (50304, 4096, 4096)]:
        problem = OP.Problem(m, n, k, dtype=dtype)
        inputs = OP.inputs(problem, device)
        config = KERNEL.default(problem, Device.of(inputs["table"]))
        check(problem, inputs, config)
        first = added_by(problem, config, inputs)
        assert all(torch.equal(added_by(problem, config, inputs), first) for _ in range(5))


def added_by(problem, config, inputs):
    outputs = OP.outputs(problem, inputs)
    launch(KERNEL, problem, config, inputs, outputs)
    return outputs["table"]


@pytest.mark.gpu
def test_in_a_graph(device):
    """Sort and all; of other ids at its replay."""
    inputs = OP.inputs(OP.Problem(500, 256, 3000), device)
    table, ids, gradient = (inputs[name] for name in ("table", "ids", "gradient"))
    before = table.clone()
    ops.add_rows(table.clone(), ids, gradient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.add_rows(table, ids, gradient)
    for _ in range(2):
        table.copy_(before)
        graph.replay()
        assert torch.equal(table, ops.add_rows(before.clone(), ids, gradient))
        ids.copy_(ids.flip(0) // 2)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, n, k = 65537, 32772, 65600
    table = torch.zeros((m, n), device=device)
    gradient = torch.ones((k, n), dtype=torch.bfloat16, device=device)
    ids = torch.arange(k, device=device).clamp(max=m - 1)
    ops.add_rows(table, ids, gradient)
    assert bool((table[:-1] == 1).all())
    assert bool((table[-1] == k - m + 1).all())
