"""The committed profiles: current, legal, no slower than the defaults, and of every problem."""

import dataclasses
import warnings
from pathlib import Path

import pytest

from jetfire.core import lookup, profiles, registry
from jetfire.core.device import target_device
from jetfire.core.errors import JetfireWarning
from jetfire.core.launch import choose
from jetfire.gpt2.training.finished import addition
from jetfire.report import documents
from jetfire.report.tuned import ROUNDING
from jetfire.tuner import problems, unseen
from jetfire.tuner.options import TuneOptions

ROOT = Path(__file__).parent.parent
H200 = dataclasses.replace(target_device((9, 0)), name="NVIDIA H200")
RESULTS = ROOT / "docs" / "results" / "h200.json"


@pytest.fixture
def entries(shipped):
    """(op, entry) of each that is shipped for the H200."""
    found = [
        (file.stem, entry)
        for file in sorted((shipped / profiles.device_slug(H200)).glob("*.json"))
        for entry in profiles.read(file)
    ]
    ops = map(registry.get, registry.names())
    assert {op for op, _ in found} == {op.name for op in ops if not (op.composite or op.untuned)}
    return found


def named(op, entry):
    return f"{op}/{entry.kernel} {entry.problem}"


def test_the_documents_are_those_of_the_results_the_runs_and_the_profiles(shipped):
    stale = documents.report(RESULTS, ROOT / "README.md", check=True, add=addition)
    assert stale == [], "run `make report`"


def test_every_file_is_of_a_profile_that_can_be_read(shipped):
    with warnings.catch_warnings():
        warnings.simplefilter("error", JetfireWarning)
        for file in sorted(shipped.glob("*/*.json")):
            assert profiles.read(file), file
            assert file.stem in registry.names()


def test_none_is_slower_than_its_default(entries):
    slower = [named(op, e) for op, e in entries if e.gain is not None and e.gain < ROUNDING]
    assert slower == []


def test_none_is_stale(entries):
    stale = {
        f"{op}/{e.kernel}: {profiles.state(op, e)}" for op, e in entries if profiles.state(op, e)
    }
    assert stale == set()


def test_every_config_is_legal(entries):
    illegal = {}
    for op, entry in entries:
        kernel = registry.kernels(op)[entry.kernel]
        problem = registry.get(op).Problem.parse(entry.problem)
        reason = kernel.legal(problem, kernel.Config.parse(entry.config), H200)
        if reason is not None:
            illegal[named(op, entry)] = reason
    assert illegal == {}


def test_every_problem_has_a_profile_of_the_kernel_that_runs_it(entries):
    """An op that says it is untuned has none for the H200."""
    missing = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JetfireWarning)
        for case in problems.cases():
            kernel, config = choose(case.op, case.problem, H200)
            found = lookup.exact(case.op, kernel, case.problem, H200)
            known = found is not None and found.config == config
            if known == case.op.untuned:
                missing.append(f"{case.op.name}/{kernel.name} {case.problem}")
    assert missing == []


@pytest.mark.parametrize(
    ("op", "field", "value"),
    [
        ("quantize", "rounding", "stochastic"),
        ("quantize", "layout", "qt"),
        ("dropout", "layout", "both"),
    ],
)
def test_a_tile_is_not_taken_for_another_rounding_or_layout_that_it_was_slow_for(
    shipped, op, field, value
):
    of, kernel = registry.get(op), registry.get_kernel(op, "triton")
    tuned = of.Problem(m=8192, n=4096)
    assert lookup.find(of, kernel, tuned, H200).source == "tuned"
    other = dataclasses.replace(tuned, **{field: value})
    found = lookup.find(of, kernel, other, H200)
    assert found.source == "default" or found.entry.problem[field] == value


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_what_was_tuned_is_what_runs_unless_another_is_faster(shipped, name):
    device = dataclasses.replace(H200, name=name)
    unused = []
    for file in sorted((shipped / profiles.device_slug(device)).glob("*.json")):
        op = registry.get(file.stem)
        for entry in profiles.read(file):
            problem = op.Problem.parse(entry.problem)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", JetfireWarning)
                kernel, _ = choose(op, problem, device)
            found = lookup.exact(op, kernel, problem, device)
            if found is None or found.entry is None or found.entry.ms > entry.ms:
                unused.append(f"{named(op.name, entry)}: {kernel.name} runs")
    assert unused == []


def test_lookups_are_tried_with_the_kernels_that_run():
    """Of an op with candidates, `tune --unseen` tunes the one that a model runs."""
    several = [
        o for o in registry.names() if any(k.candidate for k in registry.kernels(o).values())
    ]
    asked = TuneOptions(cases=problems.cases(several), unseen=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JetfireWarning)
        for target in unseen.targets(asked, H200):
            assert choose(target.case.op, target.case.problem, H200)[0] is target.kernel
