"""The interpreter finds what a Triton kernel touches beside its tensors."""

import pytest
import torch

from jetfire.core.device import Device
from jetfire.core.interpreter import found_in, hold_to_tensors

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    not Device.parse("cpu").interpreted, reason="Triton was imported to compile for a GPU"
)


@pytest.fixture(autouse=True)
def _held():
    hold_to_tensors()


@triton.jit
def _copy(x, y, n, moved, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y + at, tl.load(x + at + moved, at + moved < n, 0.0), at < n)
    else:
        tl.store(y + at, tl.load(x + at + moved))


@triton.jit
def _add(x, at):
    tl.atomic_add(x + at, 1.0)


@triton.jit
def _swap(x, at):
    tl.atomic_cas(x + at, 0, 1)


@triton.jit
def _taken(x, at):
    return tl.load(x + at)


@triton.jit
def _nested(x, y, at):
    tl.store(y, _taken(x, at))


@triton.jit
def _tile(x, y, m, n):
    of = tl.make_tensor_descriptor(x, [m, n], [n, 1], [16, 16])
    to = tl.make_tensor_descriptor(y, [m, n], [n, 1], [16, 16])
    to.store([0, 0], of.load([0, 0]))


def found(launch):
    with pytest.raises(triton.runtime.errors.InterpreterError) as raised:
        launch()
    error = found_in(raised.value)
    assert error is not None
    return str(error)


def test_what_lies_within_is_let_be():
    x, y = torch.randn(100), torch.zeros(100)
    _copy[(2,)](x, y, 100, 0, 64, True)
    assert torch.equal(x, y)
    rows = torch.randn(8, 32)[:, :16]
    _copy[(1,)](rows, torch.zeros(256), 240, 0, 256, True)  # what lies between rows, too
    x, y = torch.randn(12, 8), torch.zeros(12, 8)
    _tile[(1,)](x, y, 12, 8)
    assert torch.equal(x, y)
    counts = torch.zeros(4)
    _add[(2,)](counts, 3)
    assert counts.tolist() == [0, 0, 0, 2]


def test_a_read_after_the_end():
    x, y = torch.randn(100), torch.zeros(128)
    said = found(lambda: _copy[(2,)](x, y, 100, 0, 64, False))
    assert said.startswith("test_interpreter.py:")
    assert "reads 28 elements of 4 bytes outside of the kernel's tensors" in said
    assert said.endswith("the first lies 4 bytes after the nearest one (100)")


def test_a_read_before_the_start():
    x, y = torch.randn(64, dtype=torch.float64)[32:], torch.zeros(64, dtype=torch.float64)
    said = found(lambda: _copy[(1,)](x, y, 64, -1, 32, True))
    assert "reads 1 elements of 8 bytes" in said
    assert said.endswith("the first lies 8 bytes before the nearest one (32)")


def test_a_write_after_the_end():
    x, y = torch.randn(128).bfloat16(), torch.zeros(100).bfloat16()
    said = found(lambda: _copy[(2,)](x, y, 128, 0, 64, True))
    assert "writes 28 elements of 2 bytes" in said


def test_in_a_function_that_a_kernel_calls():
    said = found(lambda: _nested[(1,)](torch.randn(4), torch.zeros(4), 4))
    assert "reads 1 elements of 4 bytes" in said


@pytest.mark.parametrize("kernel", [_add, _swap])
def test_atomics(kernel):
    x = torch.zeros(4, dtype=torch.float32 if kernel is _add else torch.int32)
    assert "writes 1 elements of 4 bytes" in found(lambda: kernel[(1,)](x, 4))


def test_a_tensor_of_an_earlier_launch_is_another_s():
    x, y = torch.randn(64), torch.zeros(64)
    _copy[(1,)](x, y, 64, 0, 64, True)
    away = (x.data_ptr() - y.data_ptr()) // 4
    other = torch.zeros(64)
    assert "reads 64 elements" in found(lambda: _copy[(1,)](y, other, 2**62, away, 64, False))
