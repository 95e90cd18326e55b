"""What the documents say of profiles and lookups: the figures of the entries, and no others."""

import dataclasses
import json

import pytest

from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.files import write
from jetfire.core.profiles import Entry
from jetfire.measure.results import Results
from jetfire.report import documents, tuned
from jetfire.report.documents import BEGIN, END
from jetfire.tuner import unseen

H200 = Device("cuda", 0, "NVIDIA H200", (9, 0), 132, 227 << 10, 50 << 20)
RECORD = {"name": "NVIDIA H200", "kind": "cuda"}


def entry(op, kernel, ms, default_ms, n=64, peers=None, source=None, **fields):
    problem = registry.get(op).Problem.parse({"m": 64, "n": n, "block": 32, **fields}).as_dict()
    origin = {
        "gpu": "NVIDIA H200",
        "capability": [9, 0],
        "driver": "580",
        "cuda": "13.0",
        "torch": "2.11",
        "triton": "3.6",
        "timer": 4,
        "date": "2026-01-02",
        "source": source or registry.kernels(op)[kernel].source_hash(),
    }
    return Entry(
        kernel, problem, {}, ms, ms, ms, 15, default_ms, None, "time", peers or {}, 10, "gp", origin
    )


LAYERNORM = [
    entry("layernorm", "gluon", 1.0, 4.0, peers={"copy": 0.5}),
    entry("layernorm", "triton", 2.0, 32.0, peers={"copy": 0.25}),  # not in use: slower
    entry("layernorm", "gluon", 1.0, 1.0, n=128, peers={"copy": 0.5}),
    entry("layernorm", "gluon", 3.0, 3.0, mode="bwd", peers={"copy": 0.5}),
]
GEMM = [entry("gemm", "triton", 1.0, 2.0, k=64, peers={"cublas_bf16": 1.5, "int8_torch": 9.0})]


def lookup(op, lookup_ms, source="nearest", default_ms=4.0, tuned_ms=1.0, m=64):
    return {
        "op": op,
        "kernel": "triton",
        "problem": {"m": m, "n": 64, "block": 32},
        "source": source,
        "distance": 0.5 if source == "nearest" else None,
        "lookup_ms": lookup_ms,
        "default_ms": default_ms,
        "tuned_ms": tuned_ms,
        "trials": 7,
    }


LOOKUPS = [lookup("gemm", 1.1), lookup("gelu", 0.99), lookup("gemm", 1.2, "default", m=96)]


def write_lookups(file, rows=LOOKUPS, **more):
    content = {"schema": 1, "device": RECORD, "seed": 0, "rows": rows, **more}
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A results file of an H200, and what is shipped for that."""
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "shipped")
    profiles.forget()
    profiles.save(profiles.SHIPPED, H200, registry.get("layernorm"), LAYERNORM)
    profiles.save(profiles.SHIPPED, H200, registry.get("gemm"), GEMM)
    file = tmp_path / "h200.json"
    write(file, Results(RECORD, []).to_json())
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    yield file
    profiles.forget()


def made(file, check=False):
    return {path.name for path in documents.report(file, file.with_name("README.md"), check)}


def page_of(file):
    made(file)
    return file.with_suffix(".md").read_text()


def test_a_problem_counts_once_with_its_fastest_kernel(place):
    page = page_of(place)
    assert "has 5 configs for 4 problems, found in 50 trials" in page
    # (2 · 4 · 1 · 1)^(1/4), and of the LayerNorms alone 4^(1/3); their slower kernel is not in.
    assert (
        "| all ops | 4 | 1.682× | 2 (50%) | 0 | 1.50× cublas_bf16, 0.50× copy |\n"
        "| products | 1 | 2.000× | 1 (100%) | 0 | 1.50× cublas_bf16 |\n"
        "| the other ops | 3 | 1.587× | 1 (33%) | 0 | 0.50× copy |\n"
    ) in page


def test_each_kernel_and_direction_has_a_row(place):
    assert (
        "| gemm bf16 | triton | 32 | 1 | 2.00× | 2.00× | 64×64×64 | 0 | 10 |\n"
        "| layernorm fwd | gluon | 32 | 2 | 2.00× | 4.00× | 64×64 | 0 | 20 |\n"
        "| layernorm bwd | gluon | 32 | 1 | 1.00× | 1.00× | – | 0 | 10 |\n"
        "| layernorm fwd | triton | 32 | 1 | 16.00× | 16.00× | 64×64 | 0 | 10 |\n"
    ) in page_of(place)


def test_what_it_was_tuned_with_is_said(place):
    page = page_of(place)
    assert "Tuned on NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, Triton 3.6, timer 4; " in page
    assert "2026-01-02. No kernel's source has changed since." in page


def test_what_is_slower_or_stale_is_counted(place):
    worse = entry("gelu", "triton", 1.01, 1.0, source="of old")
    profiles.save(profiles.SHIPPED, H200, registry.get("gelu"), [worse])
    page = page_of(place)
    assert "| all ops | 5 | 1.513× | 2 (40%) | 1 |" in page
    assert "| gelu fwd | triton | 32 | 1 | 0.99× | 0.99× | – | 1 | 10 |" in page
    assert "**The kernel's source has changed since for 1 config.**" in page
    assert ", 1 slower." in place.with_name("README.md").read_text()


def test_a_default_that_failed_is_in_no_mean(place):
    profiles.save(
        profiles.SHIPPED, H200, registry.get("gelu"), [entry("gelu", "triton", 1.0, None)]
    )
    page = page_of(place)
    assert "| all ops | 5 | 1.682× | 2 (40%) | 0 |" in page
    assert "| gelu fwd | triton | 32 | 1 |  |  | – | 0 | 10 |" in page
    assert "The default fails 1 problem, in no mean here." in page
    assert "4 tuned problems, sorted within each op: from 1.00× to 4.00× (layernorm).](h2" in page
    assert "1.682× the defaults' speed" in place.with_name("README.md").read_text()


def test_defaults_that_all_failed(place):
    for op, known in (("gemm", GEMM), ("layernorm", LAYERNORM)):
        failed = [dataclasses.replace(one, default_ms=None) for one in known]
        profiles.save(profiles.SHIPPED, H200, registry.get(op), failed)
    assert "Gain over the default of 0 tuned problems, sorted within each op.](h2" in page_of(place)
    assert "4 problems: no default could run, none" in place.with_name("README.md").read_text()


def test_lookups_are_near_within_a_tenth_or_when_faster(place):
    write_lookups(place.with_name("h200-lookups.json"))
    page = page_of(place)
    assert "2 lookups gave the nearest profile's config, 1 found none near" in page
    assert "Tuning took 21 trials." in page
    assert (
        "| gelu | 1 | 1 (100%) | 0.990× | 0.99× (64×64 block=32) "
        "| 0 (0%) | 4.000× | 4.00× (64×64 block=32) |\n"
        "| gemm | 2 | 1 (50%) | 1.149× | 1.20× (96×64 block=32) |"
    ) in page
    assert "| all ops | 3 | 2 (67%) | 1.093× | 1.20× (96×64 block=32) |" in page


def test_the_readme_has_a_line_of_each(place):
    write_lookups(place.with_name("h200-lookups.json"))
    made(place)
    readme = place.with_name("README.md").read_text()
    assert (
        "Tuned configs are shipped for 4 problems: 1.682× the defaults' speed in the geometric "
        "mean (products 2.000×, the other ops 1.587×), none slower.\n"
    ) in readme
    assert "a lookup is within 10% of what tuning gives in 2 of 3 (67%).\n" in readme


def test_the_plot_says_in_words_what_it_shows(place):
    page = page_of(place)
    assert "4 tuned problems, sorted within each op: from 1.00× to 4.00× (layernorm).](h2" in page
    write_lookups(place.with_name("h200-lookups.json"))
    assert "Time of 3 looked-up configs over the tuned one's: up to 1.20× (gemm).]" in page_of(
        place
    )
    assert "block 32" in place.with_name("h200-tuned.svg").read_text()


def test_a_new_profile_or_lookup_makes_all_of_it_stale(place):
    everything = {"h200.md", "README.md", "h200-tuned.svg"}
    assert made(place, check=True) == everything
    assert made(place) == everything
    assert made(place, check=True) == set()
    profiles.save(
        profiles.SHIPPED, H200, registry.get("gemm"), [entry("gemm", "triton", 1.0, 3.0, k=32)]
    )
    assert made(place) == everything
    write_lookups(place.with_name("h200-lookups.json"))
    assert made(place) == everything
    assert made(place, check=True) == set()


def test_what_the_tuner_writes_is_what_is_read(tmp_path):
    file = write_lookups(tmp_path / "lookups.json")
    known = tuned.lookups(file, RECORD)
    write(file, unseen.render(LOOKUPS, RECORD, 0))
    assert tuned.lookups(file, RECORD) == known
    assert json.loads(file.read_text())["seed"] == 0


def test_another_device_has_none_of_it(place):
    write(place, Results({"name": "NVIDIA B200", "kind": "cuda"}, []).to_json())
    assert "Tuned" not in page_of(place)
    assert not place.with_name("h200-tuned.svg").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema '2': this version reads schema 1"),
        ({"device": {"name": "NVIDIA B200"}}, "of NVIDIA B200, not NVIDIA H200"),
        ({"rows": [{"op": "gemm"}]}, "rows.0.kernel is missing"),
        ({"device": {}}, "device.name is missing"),
        ({"rows": [{**LOOKUPS[0], "tuned_ms": 0}]}, "rows.0.tuned_ms=0: expected greater"),
        ({"rows": [{**LOOKUPS[0], "lookup_ms": "1"}]}, "rows.0.lookup_ms='1': expected a number"),
        ({"rows": [{**LOOKUPS[0], "op": "[red]"}]}, r"rows.0.op='\[red\]': expected letters"),
        ({"rows": [{**LOOKUPS[0], "source": "x"}]}, "rows.0.source='x': expected 'nearest' or"),
        ({"rows": [{**LOOKUPS[0], "problem": {"m": [1]}}]}, "rows.0.problem.m"),
    ],
)
def test_lookups_of_another_form_are_refused(tmp_path, change, reason):
    file = write_lookups(tmp_path / "h200-lookups.json", **change)
    with pytest.raises(UsageError, match=reason):
        tuned.lookups(file, RECORD)
