"""Kernels that cheat: bench and tune find each, and say what was seen."""

import re
import time
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.launch import interpreted
from jetfire.measure import peaks, timer
from jetfire.measure.proof import Sets
from jetfire.tuner.worker import Bench, Job

FILE = Path(__file__).parent / "faults" / "cheats.py"
OP = registry.get("transpose")
CPU = Device.parse("cpu")
PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1}
# What is seen where the memory was not written: the poison. And where it was with old results.
UNWRITTEN = r"qt: {} of 4096 differ, first at \({}\): -128 where the reference has -?\d+"
STALE = r"qt: 4\d\d\d of 4096 differ, first at \(0, \d+\): -?\d+ where the reference has -?\d+"
PROVED = r", of inputs of seed \d+ after timing"
SEEN = {
    "caches": STALE + PROVED,
    "peeks": STALE + PROVED,
    "remembers": STALE + PROVED,
    "views": UNWRITTEN.format(4096, "0, 0"),
    "swaps": UNWRITTEN.format(4096, "0, 0"),
    "skips": UNWRITTEN.format(4096, "0, 0") + PROVED,
    "spoils": "q: the kernel changed 3 elements of this input",
    "spoils_later": "q: the kernel changed 3 elements of this input" + PROVED,
    "knows_seed": UNWRITTEN.format(4096, "0, 0") + PROVED,
    "leaves": UNWRITTEN.format(64, "63, 0") + PROVED,
    "stops_clock": r"time\.perf_counter was replaced: no time can be taken",
    "halves": r"Timing\.of was replaced: no time can be taken",
}
GPU_SEEN = {
    "persists": r"[1-9]\d+ bytes of the L2 cache were set aside for accesses that persist: .*",
    "elsewhere": UNWRITTEN.format(4096, "0, 0") + PROVED,
    "elsewhere_uncaptured": UNWRITTEN.format(4096, "0, 0") + PROVED,
}


@pytest.fixture
def bench(monkeypatch, capsys):
    """What `jetfire bench` says of one of the cheats, in its last line, with exit code 3."""
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    monkeypatch.setenv("JETFIRE_STRICT_PROFILE", "")
    for owner, name in ((time, "perf_counter"), (timer.Timing, "of"), (OP, "reference")):
        monkeypatch.setattr(owner, name, vars(owner).get(name, getattr(owner, name)))

    def run(name, device):
        words = ["transpose", "--m", "64", "--block", "32", "--rounds", "2", "--peer", "none"]
        words += ["--load", str(FILE), "--kernel", name, "--device", device]
        assert execute("bench", words) == 3
        captured = capsys.readouterr()
        assert "WRONG" in captured.out
        return captured.err.splitlines()[-1].partition(" wrong: ")[2]

    return run


@pytest.mark.parametrize("name", SEEN)
def test_a_cheat_is_found_out(name, bench):
    seen = bench(name, "cpu")
    assert re.fullmatch(SEEN[name], seen), seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SEEN)
def test_a_cheat_on_the_gpu_is_found_out(name, bench):
    seen = bench(name, "cuda")
    assert re.fullmatch(GPU_SEEN[name], seen), seen


@pytest.mark.gpu
def test_what_a_cheat_set_aside_is_given_back(bench):
    for _ in range(2):  # the second finds what it would have found at first
        assert re.fullmatch(GPU_SEEN["persists"], bench("persists", "cuda"))


@pytest.mark.parametrize("name", ["caches", "skips", "knows_seed"])
def test_a_cheat_is_no_finalist(name, monkeypatch):
    monkeypatch.setenv("JETFIRE_LOAD", str(FILE))
    kernel = type(registry.get_kernel("transpose", name))()
    began = []
    problem = OP.Problem(m=64, n=64)
    job = Job(OP, kernel, problem, seed=0, data="normal", energy=False, peers=())
    bench = Bench(job, CPU, lambda: began.append(True))
    found = bench.compare([kernel.Config()], budget_s=0.0, rounds=2, peers=False)
    assert began == [True]
    assert found.configs == {}
    assert re.fullmatch(SEEN[name].replace(" after", ", after"), found.failed[kernel.Config()])
    with monkeypatch.context() as patch:  # an honest kernel is judged right by the same bench
        patch.setattr(type(kernel), "cheat", lambda self, _, *tensors: self.work(*tensors))
        for _ in range(2):
            assert bench.compare([kernel.Config()], 0.0, 2, False).failed == {}


def problems(op):
    """A problem of each mode, and one of which a call adds to its outputs."""
    sizes = dict.fromkeys(op.dims, 128)
    found = [problem for mode in op.modes for problem in op.problems(mode, sizes)]
    if "accumulate" in op.Problem.__dataclass_fields__:
        found.append(op.Problem.parse({**sizes, "accumulate": True, "out": "fp32"}))
    return found


@pytest.mark.parametrize("name", registry.names())
def test_an_honest_kernel_of_every_op_is_proved(name):
    op, device = registry.get(name), Device.parse("auto")
    proved = []
    for problem in problems(op):
        sets = Sets.drawn(op, problem, device.torch_device, 2, 0, "normal")
        for kernel in registry.kernels(name).values():
            config = kernel.default(problem, device)
            if interpreted(kernel, device) or kernel.legal(problem, config, device) is not None:
                continue
            runs = {}
            calls = {kernel.name: sets.calls(kernel, config)}
            timer.time_calls(calls, device.torch_device, 1, 0.01, warm_ms=0, timed=runs.__setitem__)
            check = sets.proved(kernel, config, runs[kernel.name])
            assert check.ok, (kernel.name, problem, check.message)
            proved.append(kernel.name)
    assert proved
