"""Bugs planted in our kernels: the fuzzer finds each within 500 examples, and makes it small."""

import contextlib
import dataclasses

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import loaded, registry
from jetfire.core.device import Device
from jetfire.fuzz import InProcess, Isolated, fuzz_kernel, store
from jetfire.fuzz.run import run_case
from jetfire.fuzz.simplify import simplify
from jetfire.tests import forked
from jetfire.tests.mutants.build import MovedOnError, build
from jetfire.tests.mutants.planted import ALL, ANYWHERE, ON_A_GPU, ON_THE_CPU

EXAMPLES = 500
# NumPy's, of values that overflow in Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def plant(tmp_path, unload):
    """Builds a mutant's file; what was loaded of it is gone after the test."""
    return lambda mutant: build(mutant, tmp_path)


def found(mutant, device, executor):
    """The fuzzer's report, and its failure made as small as it gets."""
    op, kernel = registry.get(mutant.op), registry.get_kernel(mutant.op, mutant.name)
    report = fuzz_kernel(
        op, kernel, device, examples=EXAMPLES, largest=mutant.largest, executor=executor, failures=1
    )
    assert report.failures, f"not found in {report.examples} examples"
    (failure,) = report.failures

    def fails(case):
        nonlocal failure
        outcome = executor.run(case)
        if outcome.kind != failure.kind:
            return False
        failure = dataclasses.replace(failure, case=case, message=outcome.message)
        return True

    if mutant.most:
        simplify(failure.case, device, fails)
    return report, failure


def right(mutant, case):
    """The same case of the kernel as it is."""
    other = case.other and dataclasses.replace(case.other, kernel=mutant.kernel)
    return dataclasses.replace(case, kernel=mutant.kernel, other=other)


def check(mutant, device, executor):
    report, failure = found(mutant, device, executor)
    sizes = [failure.case.problem[name] for name in registry.get(mutant.op).dims]
    print(f"{mutant.name}: {report.examples} examples, {sizes} {failure.kind}: {failure.message}")
    assert failure.kind in mutant.kinds, failure
    small = {name: failure.case.problem[name] for name in mutant.most}
    assert all(size <= mutant.most[name] for name, size in small.items()), failure
    outcome = run_case(right(mutant, failure.case), device)
    assert not outcome.failed, f"without the bug too: {outcome}"


@pytest.fixture
def quick(monkeypatch):
    """The search does not make failures small: `found` does, for as long as it takes."""
    monkeypatch.setattr("jetfire.fuzz.search.SHRINK_S", 0.0)


@pytest.mark.parametrize("mutant", ANYWHERE, ids=lambda mutant: mutant.name)
def test_found_in_a_triton_kernel(mutant, plant, quick):
    loaded.add([plant(mutant)])
    device = Device.parse("auto")
    check(mutant, device, InProcess(device))


@pytest.mark.parametrize("mutant", ON_THE_CPU, ids=lambda mutant: mutant.name)
def test_found_in_a_cpu_kernel(mutant, plant, quick):
    loaded.add([plant(mutant)])
    device = Device.parse("cpu")
    check(mutant, device, InProcess(device))


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", ON_A_GPU, ids=lambda mutant: mutant.name)
def test_found_on_a_gpu(mutant, plant, quick):
    file, device = plant(mutant), Device.parse("cuda")
    loaded.add([file])
    with contextlib.closing(Isolated(device)) as executor:
        check(mutant, device, executor)


@pytest.mark.parametrize("name", ["store-a-column-more", "factor-missing"])
def test_found_by_the_command(name, plant, quick, tmp_path, monkeypatch, capsys):
    """Lines, files, and the exit code of a wrong result; again when a case is run again."""
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "fuzz"))
    forked.fork_workers(monkeypatch)
    mutant = next(mutant for mutant in ALL if mutant.name == name)
    where = [] if torch.cuda.is_available() and mutant in ANYWHERE else ["--interpreter"]
    load_it = ["--load", str(plant(mutant)), *where]
    words = [mutant.op, "--kernel", name, "--examples", "40", "--largest", "100", *load_it]
    assert execute("fuzz", words) == 3
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "--reproduce" in line]
    paths = list((tmp_path / "fuzz").iterdir())
    assert 0 < len(lines) == len(paths)
    for line in lines:
        assert line.split(": ")[:2] in [[f"{mutant.op} {name}", kind] for kind in mutant.kinds]
    told = " ".join(["jetfire-fuzz", "--reproduce", paths[0].stem, *where])
    assert any(line.endswith(told) for line in lines)
    assert "1 kernel is wrong" in err

    assert execute("fuzz", ["--reproduce", paths[0].stem, *load_it]) == 3
    assert paths[0].stem in capsys.readouterr().err
    case = right(mutant, store.find(paths[0].stem).case)
    device = Device.parse("auto" if where == [] else "cpu")
    assert not run_case(case, device).failed


def test_every_class_of_bug_is_planted_where_no_gpu_is():
    seen = {mutant.bug for mutant in ANYWHERE + ON_THE_CPU}
    assert seen == {mutant.bug for mutant in ALL}
    assert {"bound", "scale", "tile", "race", "edge"} <= seen
    assert len({mutant.name for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ON_A_GPU, ids=lambda mutant: mutant.name)
def test_a_mutant_for_the_gpu_loads(mutant, plant):
    """Its text is there once, and its kernel is one that a problem may be given to."""
    loaded.add([plant(mutant)])
    kernel = registry.get_kernel(mutant.op, mutant.name)
    assert kernel.op == mutant.op


def test_what_a_test_loads_is_gone_after_it(tmp_path, python):
    """The fixture `unload`, by pytest in pytest: the second test sees nothing of the first."""
    (mutant,) = (mutant for mutant in ON_THE_CPU if mutant.name == "factor-missing")
    file = build(mutant, tmp_path / "planted")
    (tmp_path / "conftest.py").write_text("from jetfire.tests.conftest import unload\n")
    (tmp_path / "test_it.py").write_text(
        f"""import pathlib, sys
from jetfire.core import loaded, registry

def seen():
    return [name for name in sys.modules if name.startswith(("mutant_", "jetfire_loaded_"))]

def test_first(unload):
    loaded.add([pathlib.Path({str(file)!r})])
    assert {mutant.name!r} in registry.kernels({mutant.op!r}) and len(seen()) > 2

def test_second():
    assert {mutant.name!r} not in registry.kernels({mutant.op!r}) and seen() == []
    assert {str(file.parent)!r} not in sys.path

def test_third(unload):
    test_first(None)
"""
    )
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_source_that_moved_on_is_said(plant):
    gone = dataclasses.replace(ALL[0], find="what no kernel says")
    with pytest.raises(MovedOnError, match=r"kernels_triton/tiles.py .* 0 times"):
        plant(gone)
