"""What is made of a weight: when it is made anew, in CUDA graphs and out of them."""

from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch

from jetfire.core import registry
from jetfire.gpt2.training import graph
from jetfire.kernels_cuda import norm_tiles, tiles
from jetfire.nn import (
    AdamW,
    Int4Linear,
    Int8Conv1D,
    Int8Linear,
    Int8LlamaBlock,
    Stream,
    captured,
    llama,
    made,
    replaying,
)
from jetfire.nn.flow import JoinedWeights


def of_x(layer):
    return layer(torch.eye(layer.weight.shape[1]))


@contextmanager
def capturing(monkeypatch, ours=False):
    """A capture, as what is made of weights sees it; of a `CapturedStep` of ours or not."""
    with monkeypatch.context() as patch, made.within_capture() if ours else nullcontext():
        patch.setattr(made, "capturing", lambda _: True)
        yield


def test_data_that_was_replaced_twice_is_seen():
    """The second may lie where the first lay."""
    layer = Int8Linear(64, 64, bias=False, device="cpu")
    for _ in range(20):
        before = of_x(layer)
        for _ in range(2):
            layer.weight.data = layer.weight.data * 2
        assert torch.equal(of_x(layer), 4 * before)


@pytest.mark.parametrize(
    "layer",
    [
        Int8Linear(64, 64, bias=False, device="cpu"),
        Int8Conv1D(torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.zeros(64))),
        Int4Linear(64, 64, bias=False, device="cpu"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_change_of_mode_renews_what_was_changed_through_data(layer):
    before = of_x(layer.train())
    with torch.no_grad():
        of_x(layer)
    layer.weight.data.mul_(2)
    assert torch.equal(of_x(layer.eval()), 2 * before)
    layer.weight.data.div_(2)
    assert torch.equal(of_x(layer.train()), before)


def test_a_change_of_mode_renews_joined_weights():
    block = Int8LlamaBlock(128, 2, block=32, device="cpu")

    def joined():
        return [made.of(layers).q for made, layers in block.joined_groups()]

    before = joined()
    assert all(a is b for a, b in zip(joined(), before, strict=True))
    block.eval()
    assert all(a is not b for a, b in zip(joined(), before, strict=True))


def test_codes_that_an_optimizer_renews_outlast_a_change_of_mode():
    layer = Int8Linear(64, 64, device="cpu")
    updates = AdamW(layer.parameters(), model=layer)
    of_x(layer).sum().backward()
    updates.step()
    renewed = layer.codes()
    assert layer.eval().codes() is renewed


def test_a_graph_takes_nothing_that_was_made_before_it_and_leaves_nothing(monkeypatch):
    layer = Int8Linear(64, 64, device="cpu")
    eager = layer.codes()
    assert layer.codes() is eager
    with capturing(monkeypatch):
        first, second = layer.codes(), layer.codes()
        assert eager.q is not first.q is not second.q
    assert layer.codes() is eager


def test_a_capture_of_ours_makes_codes_once_and_no_one_reads_them_outside(monkeypatch):
    layer = Int8Linear(64, 64, device="cpu")
    eager = layer.codes()
    with capturing(monkeypatch, ours=True):
        inside = layer.codes()
        assert inside is not eager
        assert layer.codes() is inside
    assert layer.codes() is not inside


def test_what_a_failed_capture_made_is_forgotten(monkeypatch):
    layer = Int8Linear(64, 64, device="cpu")
    inside = None
    with suppress(KeyboardInterrupt), capturing(monkeypatch, ours=True):
        inside = layer.codes()
        raise KeyboardInterrupt
    assert inside is not None
    with capturing(monkeypatch, ours=True):
        assert layer.codes() is not inside


def test_codes_that_an_optimizer_renews_serve_graphs_too(monkeypatch):
    layer = Int8Linear(64, 64, device="cpu")
    updates = AdamW(layer.parameters(), model=layer)
    of_x(layer).sum().backward()
    updates.step()
    renewed = layer.codes()
    with capturing(monkeypatch):
        assert layer.codes() is renewed


def test_two_graphs_of_several_processes_join_weights_anew(monkeypatch):
    """An evaluation before the capture has joined those of a Llama's query, key and value."""
    block = Int8LlamaBlock(128, 2, block=32, device="cpu")
    updates = AdamW(block.parameters(), model=block)
    joins = []
    join = JoinedWeights._join
    monkeypatch.setattr(JoinedWeights, "_join", lambda *of: joins.append(of) or join(*of))

    class Step:
        split, device, optimizer = True, torch.device("cpu"), updates

        def gradients(self, _):
            x = torch.randn(32, 128).bfloat16().requires_grad_()
            block(Stream.of(x, 32), 1).x.float().sum().backward()
            return torch.zeros(())

        def gradients_made(self):
            return []

        def update(self, _):
            updates.step()
            return torch.zeros(())

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(graph, "captured", lambda *_: capturing(monkeypatch, ours=True))
    step = graph.SplitStep(Step())
    with torch.no_grad():
        block(Stream.of(torch.randn(32, 128).bfloat16(), 32), 1)
    joins.clear()
    step._capture([])
    assert len(joins) == 2


def test_a_replay_that_was_interrupted_may_have_changed_the_weights():
    layer = Int8Linear(64, 64, bias=False, device="cpu")
    updates = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = of_x(layer)
    with suppress(KeyboardInterrupt), replaying(updates):
        layer.weight.data.mul_(2)
        raise KeyboardInterrupt
    assert torch.equal(of_x(layer), 2 * before)


def test_work_on_another_stream_is_waited_for_where_it_fails(monkeypatch):
    class Side:
        device, waits = torch.device("cpu"), []

        def wait_stream(self, other):
            Side.waits.append((self, other))

    current, side = Side(), Side()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with suppress(ValueError), captured.beside(side):
        raise ValueError
    assert Side.waits == [(side, current), (current, side)]


@pytest.mark.gpu
def test_angles_that_a_graph_reads_are_kept(device):
    angles = llama.rotary_tables(40, 1, 64, 1e4, device)
    kept = [table.clone() for table in angles]
    del angles
    seen, recorded = [torch.empty_like(table) for table in kept], torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for to, table in zip(seen, llama.rotary_tables(40, 1, 64, 1e4, device), strict=True):
            to.copy_(table)
    for length in range(100, 100 + 2 * llama._MOST_TABLES):
        llama.rotary_tables(length, 1, 64, 1e4, device)
    recorded.replay()
    assert all(map(torch.equal, seen, kept))


def test_a_transpose_may_be_given_at_any_address():
    buffer = torch.empty(64 * 128 + 4, dtype=torch.int8)
    for at, bytes_of_qt in ((0, 4), (1, 1), (2, 1), (4, 4)):
        assert (buffer.data_ptr() + at) % 4 == at % 4
        qt = buffer[at : at + 64 * 128].view(128, 64)
        assert tiles.write_access(64, 128, {"qt": qt}) == (8, bytes_of_qt)


def test_rows_of_a_gradient_that_lie_on_each_other_are_not_for_tma():
    op = registry.get("layernorm")
    fields = {"mode": "bwd", "residual": True, "rounding": "stochastic"}
    problem = op.Problem(64, 128, block=32, out_block=128, layout="both", **fields)
    inputs = op.inputs(problem, torch.device("cpu"))
    assert norm_tiles.accesses(problem, inputs, op.outputs(problem, inputs)).stream == 16
    inputs["dsum"] = inputs["dsum"][:1].expand(64, 128)
    assert norm_tiles.accesses(problem, inputs, op.outputs(problem, inputs)).stream == 2


def test_angles_of_many_lengths_are_dropped_but_those_that_a_graph_reads(monkeypatch):
    monkeypatch.setattr(llama, "_tables", {})
    cpu = torch.device("cpu")
    kept = llama.rotary_tables(40, 1, 64, 1e4, cpu)
    monkeypatch.setattr(llama, "_read_by_graphs", set(llama._tables))
    for length in range(100, 100 + 2 * llama._MOST_TABLES):
        llama.rotary_tables(length, 1, 64, 1e4, cpu)
    assert len(llama._tables) <= llama._MOST_TABLES + 1
    assert llama.rotary_tables(40, 1, 64, 1e4, cpu) is kept
