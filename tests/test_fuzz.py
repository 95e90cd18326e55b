"""The fuzzer passes right kernels, catches planted bugs, and its cases replay."""

import dataclasses

import pytest

from jetfire import ops
from jetfire.fuzz import Case, InProcess, fuzz_kernel
from jetfire.fuzz.run import run_case
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError


@pytest.fixture(scope="module")
def here() -> Device:
    return Device.parse("auto")


@pytest.fixture(scope="module")
def right(here):
    return ops.get_kernel("quantize", "torch" if here.kind == "cpu" else "triton")


def test_a_right_kernel_passes(here, right):
    report = fuzz_kernel(ops.get("quantize"), right, here, examples=40, largest=70)
    assert report.failures == []
    assert report.examples == 40
    assert report.coverage["ragged"]
    assert report.coverage["strided"]


class _LastColumnUnwritten:
    """The named kernel of quantize, but for one missing column of wide outputs."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def launch(self, problem, config, inputs, outputs):
        if problem.n > 40 and "q" in outputs:
            kept = outputs["q"][:, -1].clone()
            self._kernel.launch(problem, config, inputs, outputs)
            outputs["q"][:, -1] = kept
        else:
            self._kernel.launch(problem, config, inputs, outputs)


def test_a_planted_bug_is_caught_and_made_small(here, right, monkeypatch):
    mutant = _LastColumnUnwritten(right)
    monkeypatch.setitem(ops.kernels("quantize"), right.name, mutant)
    report = fuzz_kernel(ops.get("quantize"), mutant, here, examples=500, seed=1)
    (failure,) = report.failures
    assert failure.kind == "unwritten"
    case = failure.case
    assert (case.problem["m"], case.problem["n"]) == (1, 41)
    assert (case.layout, case.offset, case.data, case.data_seed) == ({}, 0, "normal", 0)
    assert run_case(case, here).kind == "unwritten"
    monkeypatch.undo()
    assert run_case(Case.from_json(case.as_json()), here).kind is None


def test_a_kernel_for_another_device_is_passed_over():
    old, op = Device(kind="cuda", capability=(7, 0)), ops.get("quantize")
    report = fuzz_kernel(op, ops.get_kernel("quantize", "triton"), old, examples=10)
    assert report.examples == 0


def test_a_case_is_its_json(here, right):
    problem = ops.get("quantize").Problem(3, 5)
    config = right.default(problem, here).as_dict()
    case = Case("quantize", right.name, problem.as_dict(), config, layout={"x": (3, 1)})
    assert Case.from_json(case.as_json()) == case
    assert dataclasses.replace(case, data_seed=1).id != case.id
    assert InProcess(here).run(case).kind is None
    with pytest.raises(UsageError, match="not a case"):
        Case.from_json("{}")
