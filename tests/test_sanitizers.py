"""Sanitizers say nothing of our kernels, and something of planted faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jetfire
from jetfire.cli import execute
from jetfire.core import loaded, registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import NoDeviceError
from jetfire.core.machine_code import audit
from jetfire.core.sanitizer import INSTRUMENTATION
from jetfire.fuzz import draw, sanitize
from jetfire.tests.mutants.build import Edit, Mutant, build
from jetfire.tests.mutants.planted import ON_A_GPU

HERE = Path(__file__).parent
BARRIERS = HERE / "faults" / "barriers.py"
SOURCE, BLOCKS = "kernels_cuda/gemm/wgmma.cu", "kernels_cuda/block_gemm.cuh"
SHARED = "kernels_cuda/hopper.cuh"
# All 32 lanes of a warp arrive at a slot's barriers, where one does so for all.
EVERY_LANE = (
    Edit(
        BLOCKS,
        "  __syncwarp();\n  if (threadIdx.x % 32 == 0) barrier_arrive(slot.full());",
        "  barrier_arrive(slot.full());",
    ),
    Edit(BLOCKS, "start_barriers<Slot>(2)", "start_barriers<Slot>(33)"),
    Edit(
        SHARED,
        "      if (lane == 0) barrier_arrive(empty());\n"
        "    } else if (lane < CLUSTER && common(lane, rank)) {\n"
        "      barrier_arrive_at(empty(), lane);\n    }",
        "      barrier_arrive(empty());\n    } else {\n"
        "      for (int i = 0; i < CLUSTER; ++i)\n"
        "        if (common(i, rank)) barrier_arrive_at(empty(), i);\n    }",
    ),
    Edit(SHARED, "slot.empty(), 4 * GROUPS", "slot.empty(), 128 * GROUPS"),
)


def every_lane_arrives(*edits):
    """The Hopper GEMM with these edits: no bug, but that it arrives more often than it need."""
    first, *others = edits
    return Mutant(
        "every-lane-arrives",
        "race",
        "gemm",
        "wgmma",
        first.file,
        first.find,
        first.replace,
        {},
        also=tuple(others),
    )


@pytest.fixture
def fuzz(tmp_path, monkeypatch, unload):
    """Runs the command and gives the exit code and the pairs of its summary."""
    for name in (INSTRUMENTATION, "TRITON_CACHE_DIR"):  # which consan sets, here to be undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "failures"))
    monkeypatch.setattr("jetfire.fuzz.search.SHRINK_S", 0.0)

    def fuzz(*words, tool):
        try:
            if tool != "consan":
                sanitize.find()
        except NoDeviceError as missing:
            pytest.skip(str(missing))
        file = tmp_path / "summary.json"
        code = execute("fuzz", [*words, "--sanitizer", tool, "-o", str(file)])
        return code, json.loads(file.read_text())["pairs"]

    return fuzz


def for_a_gpu(tool):
    """Op and kernel, by name, of all that take a problem on the GPU that is here, for a tool."""
    device = Device.parse("cuda")
    return {
        (name, kernel.name)
        for name in registry.names()
        for kernel in registry.kernels(name).values()
        if draw.usual(registry.get(name), kernel, device)
        and (tool != "consan" or kernel.backend == "triton")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_every_kernel_is_clean(tool, fuzz):
    """And each has run: the third example may be of an empty tensor, which no kernel sees."""
    code, pairs = fuzz("all", "--examples", "3", "--jobs", "8", "--budget", "1h", tool=tool)
    assert [failure for pair in pairs for failure in pair["failures"]] == []
    assert code == 0
    ran = {
        (pair["op"], pair["kernel"]): pair["examples"] - pair["coverage"].get("skipped", 0)
        for pair in pairs
    }
    assert {pair: ran[pair] for pair in for_a_gpu(tool) if ran[pair] < 2} == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "tool"),
    [("send-a-chunk-more", "memcheck"), ("group-before-its-warps", "racecheck")],
)
def test_a_planted_fault_is_found(name, tool, fuzz, tmp_path):
    (mutant,) = (mutant for mutant in ON_A_GPU if mutant.name == name)
    file = str(build(mutant, tmp_path))
    words = ["--kernel", name, "--load", file, "--jobs", "1"]
    code, (pair,) = fuzz(mutant.op, *words, tool=tool)
    assert code == 3
    assert pair["failures"][0]["kind"] == "sanitizer"


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "code"), [("waits", 0), ("hurries", 3)])
def test_a_barrier_that_nobody_waits_for_is_found(kernel, code, fuzz):
    if Device.parse("cuda").capability < (9, 0):
        pytest.skip("needs sm_90 or newer")
    words = ["--kernel", kernel, "--load", str(BARRIERS), "--jobs", "1", "--examples", "12"]
    found, (pair,) = fuzz("dequantize", *words, tool="consan")
    assert found == code
    assert {failure["kind"] for failure in pair["failures"]} == ({"sanitizer"} if code else set())
    for failure in pair["failures"]:
        assert "Buffer being accessed has outstanding" in failure["message"]
        assert f" at {BARRIERS}:" in failure["message"]


def test_consan_is_in_what_gluon_kernels_are_compiled_to():
    """For sm_90, of every one that has something in shared memory, and of none other."""
    names = [f"{op}/gluon" for op in registry.names() if "gluon" in registry.kernel_names(op)]
    names += ["dequantize/waits", "dequantize/hurries"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {INSTRUMENTATION: "consan", "JETFIRE_LOAD": str(BARRIERS)}
    done = subprocess.run(
        [sys.executable, str(HERE / "processes" / "instrumented.py"), *names],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["kernel"] for launch in launches} == set(names)
    seen = [launch for launch in launches if launch["calls"]]
    assert seen == [launch for launch in launches if launch["buffers"]]
    assert {launch["kernel"] for launch in seen} == {"gemm/gluon", *names[-2:]}
    for launch in seen:
        assert launch["asserts"] >= 10
        assert any("has outstanding writes" in text for text in launch["says"])
        assert not any("overflow detected" in text for text in launch["says"])


@pytest.mark.gpu
def test_racecheck_follows_arrivals_of_every_lane(fuzz, tmp_path):
    """What it says of the Hopper GEMM is that of a warp's 32 lanes one arrives for all."""
    mutant = every_lane_arrives(*EVERY_LANE)
    file = str(build(mutant, tmp_path))
    code, (pair,) = fuzz("gemm", "--kernel", mutant.name, "--load", file, tool="racecheck")
    assert (code, pair["failures"]) == (0, [])
    assert pair["examples"] >= 20


def sass(kernel):
    """The machine instructions of a product's default config on sm_90."""
    problem, device = registry.get("gemm").Problem(256, 256, 256), target_device((9, 0))
    (cubin,) = kernel.cubins(problem, kernel.default(problem, device), device.capability)
    return audit(cubin).sass


@pytest.mark.parametrize("edits", [*((edit,) for edit in EVERY_LANE), EVERY_LANE])
def test_arrivals_of_every_lane_are_compiled(edits, tmp_path, unload):
    """Each text is where it is replaced, in a file that the mutant's code is made of."""
    mutant = every_lane_arrives(*edits)
    loaded.add([build(mutant, tmp_path)])
    kernel = registry.get_kernel("gemm", mutant.name)
    assert sass(kernel) != sass(registry.get_kernel("gemm", "wgmma"))


def test_known_reports_are_told_from_others():
    known = (
        "Error: Race reported between Read access at Multiplier::read_factors(float (&)[4], int, "
        "int) const+0x1260 in wgmma.cu:394 · and Write access at scale(const Arguments &, "
        "int)+0xc550 in wgmma.cu:303 [56 hazards]"
    )
    other = "Error: Race reported between Read access at block_amax in wgmma.cu:1 [1 hazards]"
    sift = sanitize.sift
    assert sift("racecheck", "gemm", "wgmma", f"{known} · {known}") == ("", 2)
    interleaved = known.replace("Multiplier::", "Interleaved::").replace("scale(", "give_factors(")
    assert sift("racecheck", "gemm", "wgmma", interleaved) == ("", 1)
    read, write = "Read access at Multiplier::read_factors", "Write access at scale"
    turned = known.replace(read, "?").replace(write, read).replace("?", write)
    assert sift("racecheck", "gemm", "wgmma", turned) == ("", 1)
    both = known.replace(read, write)
    assert sift("racecheck", "gemm", "wgmma", both) == (both, 0)
    assert sift("racecheck", "gemm", "wgmma", f"{known} · {other}") == (other, 1)
    assert sift("racecheck", "gemm", "mma", known) == (known, 0)
    assert sift("memcheck", "gemm", "wgmma", known) == (known, 0)
    gluon = (
        "Error: Race reported between Read access at gemm_kernel+0x130 in mainloop.py:228 · and "
        "Write access at gemm_kernel+0x16be0 in mainloop.py:248 [7 hazards]"
    )
    assert sift("racecheck", "gemm", "gluon", gluon) == ("", 1)
    elsewhere = gluon.replace("0x130", "0x1130")
    assert sift("racecheck", "gemm", "gluon", elsewhere) == (elsewhere, 0)
    scales = (
        "Error: Race reported between Write access at gemm_kernel+0x7ee0 in "
        f"mainloop.py:{line_of('.store(products[i])')} · and Read access at gemm_kernel+0x15f0 in "
        f"mainloop.py:{line_of('rows.slice(col')} [524 hazards]"
    )
    assert sift("racecheck", "gemm", "gluon", scales) == ("", 1)
    other_line = scales.replace("mainloop.py:", "mainloop.py:9")
    assert sift("racecheck", "gemm", "gluon", other_line) == (other_line, 0)


def line_of(code):
    text = Path(jetfire.__path__[0], "kernels_triton/gemm/mainloop.py").read_text()
    return next(i for i, line in enumerate(text.splitlines(), 1) if code in line)
