"""The fuzzer passes right kernels, catches planted bugs, and its cases replay."""

import math

import pytest

from jetfire import ops
from jetfire.fuzz import Case, fuzz, fuzz_kernel, replay, run_case
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError, WrongResultError
from jetfire.ops.op import Check


@pytest.fixture(scope="module")
def here() -> Device:
    return Device.parse("auto")


def test_right_kernels_pass(here):
    assert fuzz(["quantize"], [], here, examples=12, largest=70) == []


class _LastColumnUnwritten:
    """The named kernel of quantize, but for one missing column of wide outputs."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def launch(self, problem, config, inputs, outputs):
        self._kernel.launch(problem, config, inputs, outputs)
        if problem.n > 40 and "q" in outputs:
            outputs["q"][:, -1] = -128


def test_a_planted_bug_is_caught_and_shrunk(here, monkeypatch):
    right = ops.get_kernel("quantize", "torch" if here.kind == "cpu" else "triton")
    mutant = _LastColumnUnwritten(right)
    monkeypatch.setitem(ops.kernels("quantize"), right.name, mutant)
    ran, failure = fuzz_kernel(ops.get("quantize"), mutant, here, 500, 1, 300, math.inf)
    assert failure is not None
    assert ran <= 500
    assert 40 < failure.case.problem["n"] <= 64, "shrunk toward the smallest failing width"
    assert "differ" in failure.message
    with pytest.raises(WrongResultError):
        replay(failure.case.as_json(), here)
    monkeypatch.undo()
    assert run_case(Case.from_json(failure.case.as_json()), here).ok


def test_bad_requests(here):
    with pytest.raises(UsageError, match="not a case"):
        replay("{}", here)
    with pytest.raises(UsageError, match="no kernel 'nope'"):
        fuzz(["quantize"], ["nope"], here)


def test_a_kernel_for_another_device_is_passed_over():
    old, op = Device(kind="cuda", capability=(7, 0)), ops.get("quantize")
    kernel = ops.get_kernel("quantize", "triton")
    assert fuzz_kernel(op, kernel, old, 10, 0, 100, math.inf) == (0, None)


def test_sizes_are_fitted_to_the_groups_drawn(monkeypatch):
    """Few sizes drawn at random are multiples of a group of 32 or more."""
    cases = []
    right = Check(True, 0.0)
    monkeypatch.setattr("jetfire.fuzz.run_case", lambda case, _: cases.append(case) or right)
    op, cpu = ops.get("hadamard_quantize"), Device(kind="cpu")
    kernel = ops.get_kernel("hadamard_quantize", "torch")
    fuzz_kernel(op, kernel, cpu, 200, 0, 100, math.inf)
    assert {case.problem["group"] for case in cases} == {2**i for i in range(11)}
