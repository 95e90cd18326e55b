import pytest
import torch

from jetfire.nn.streams import branches


def test_branches_on_a_cpu_run_where_they_stand():
    with branches(torch.device("cpu"), 2) as lanes:
        x = torch.ones(4)
        for lane in lanes:
            with lane:
                x += 1
    assert x.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_branches_wait_for_what_came_before_and_are_waited_for(device):
    current = torch.cuda.current_stream(device)
    x = torch.zeros(1 << 26, device=device)
    torch.cuda.synchronize(device)
    for _ in range(20):  # milliseconds of work that a branch must not overtake
        x += 1
    made, streams = [], []
    with branches(device, 2) as lanes:
        for lane in (*lanes, lanes[0]):
            with lane:
                streams.append(torch.cuda.current_stream(device))
                made.append(x * 2)
                for _ in range(20):
                    made[-1] += 1
        assert torch.cuda.current_stream(device) == current
    assert streams[0] == streams[2]
    assert len({*streams, current}) == 3
    assert all(bool((y == 60).all()) for y in made)


def fails(x):
    """Add 20 to x on a branch, then fail beside it."""
    with branches(x.device, 1) as (lane,):
        with lane:
            for _ in range(20):
                x += 1
        raise ValueError("of the work")


@pytest.mark.gpu
def test_branches_are_waited_for_after_an_error(device):
    x = torch.zeros(1 << 26, device=device)
    with pytest.raises(ValueError, match="of the work"):
        fails(x)
    assert bool((x == 20).all())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_branches_on_another_device_leave_the_current_one():
    with torch.cuda.device(0):
        with branches(torch.device("cuda", 1), 1) as (lane,), lane:
            pass
        assert torch.cuda.current_device() == 0
