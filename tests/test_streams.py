import pytest
import torch

from jetfire.nn.streams import Branch


def test_a_branch_on_a_cpu_runs_where_it_stands():
    beside = Branch(torch.device("cpu"))
    with beside.here():
        x = torch.ones(4) + 1
    beside.join()
    assert x.sum() == 8


@pytest.mark.gpu
def test_a_branch_waits_for_what_came_before_and_is_waited_for(device):
    current = torch.cuda.current_stream(device)
    x = torch.zeros(1 << 26, device=device)
    torch.cuda.synchronize(device)
    for _ in range(20):  # milliseconds of work that the branch must not overtake
        x += 1
    beside = Branch(device)
    with beside.here():
        assert torch.cuda.current_stream(device) != current
        y = x * 2
        for _ in range(20):
            y += 1
    assert torch.cuda.current_stream(device) == current
    beside.join()
    assert bool((y == 60).all())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_branch_on_another_device_leaves_the_current_one():
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        beside = Branch(other)
        with beside.here():
            pass
        beside.join()
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_branches_of_other_numbers_are_other_streams(device):
    streams = []
    for number in (0, 1, 0):
        with Branch(device, number).here():
            streams.append(torch.cuda.current_stream(device))
    assert streams[0] == streams[2] != streams[1]
