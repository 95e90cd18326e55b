"""Peaks: what they are computed of, and a cache that holds no nonsense."""

import json
import os
import warnings
from types import SimpleNamespace

import filelock
import pytest
import torch

from jetfire.cli import execute
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning
from jetfire.measure import load, peaks, timer
from jetfire.measure.timer import Timing

CPU = Device.parse("cpu")
HERE = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A timer by whose clock calls take the milliseconds that are given, by name; 2 otherwise."""
    took, called = {}, {}

    def time_calls(variants, device, *rest, **options):
        called.update({name: calls[0]() for name, calls in variants.items()})
        return {name: Timing.of([took.get(name, 2.0)] * 3) for name in variants}

    monkeypatch.setattr(timer, "time_calls", time_calls)
    return took, called


def test_a_copy_reads_and_writes_each_byte(clock):
    took, called = clock
    took.update({"torch copy_": 4.0, "an elementwise pass": 8.0})
    gbps, how = peaks._copy_gbps(HERE, 1 << 20)
    assert gbps == pytest.approx(2 * (1 << 20) / 4e-3 / 1e9)
    assert how == "torch copy_ of 1 MiB, bytes read and written"
    assert called["torch copy_"].nbytes == 1 << 20
    assert called["an elementwise pass"].nbytes == 1 << 20
    took["torch copy_"] = 16.0
    gbps, how = peaks._copy_gbps(HERE, 1 << 20)
    assert gbps == pytest.approx(2 * (1 << 20) / 8e-3 / 1e9)
    assert how.startswith("an elementwise pass of 1 MiB")


def test_a_product_counts_two_operations_a_multiplication(clock):
    took, called = clock
    assert peaks._product_tflops(HERE, "bf16_matmul", 64) == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    took.update({"torch._int_mm": 4.0, "torch.matmul": 8.0})
    tops, how = peaks._cpu_int8_tops(64)
    assert (tops, how) == (pytest.approx(2 * 64**3 / 4e-3 / 1e12), "torch._int_mm NT 64³")
    took["torch.matmul"] = 1.0
    tops, how = peaks._cpu_int8_tops(64)
    assert (tops, how) == (pytest.approx(2 * 64**3 / 1e-3 / 1e12), "torch.matmul NT 64³ in FP64")
    assert called["bf16_matmul"].dtype == torch.bfloat16
    assert torch.equal(called["torch._int_mm"].double(), called["torch.matmul"])
    assert called["torch.matmul"].shape == called["bf16_matmul"].shape == (64, 64)


def test_a_cpu_has_all_three_and_says_how(monkeypatch):
    sizes = {}

    def measured(name, result):
        return lambda *given: (sizes.update({name: given[-1]}), result)[1]

    monkeypatch.setattr(peaks, "_copy_gbps", measured("copy", (8.0, "a copy")))
    monkeypatch.setattr(peaks, "_cpu_int8_tops", measured("int8", (0.2, "a product")))
    monkeypatch.setattr(peaks, "_product_tflops", measured("bf16", 0.3))
    monkeypatch.setattr(load.Load, "text", lambda _: None)
    assert peaks.measure(CPU) == {
        "copy_gbps": 8.0,
        "int8_tops": 0.2,
        "bf16_tflops": 0.3,
        "how": {
            "copy_gbps": "a copy",
            "int8_tops": "a product",
            "bf16_tflops": "torch.matmul NT 1024³",
        },
    }
    assert sizes == {"copy": 1 << 28, "int8": 1024, "bf16": 1024}


def test_a_gpu_s_int8_rate_is_the_better_of_the_library_s_and_the_instructions(clock, monkeypatch):
    took, _ = clock
    from jetfire.measure import ceiling

    monkeypatch.setattr(peaks, "_product_tflops", lambda *_: 900.0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("P", (), {"multi_processor_count": 100})
    )
    asked = []
    monkeypatch.setattr(
        ceiling, "int8_call", lambda *given: (asked.append(given), (lambda: None, 3.2e12))[1]
    )
    took["int8"] = 2.0
    assert peaks._int8_tops(HERE)[0] == pytest.approx(1600.0)
    assert asked == [(HERE, 300, 4000)]
    took["int8"] = 4.0
    assert peaks._int8_tops(HERE) == (900.0, "torch._int_mm NT 8192³")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache's file; what measures gives 1, 2, 3, … GB/s and is quiet."""
    made = {"count": 0, "busy": None, "quiet": True, "driver": None}

    def copied(*_):
        made["count"] += 1
        return float(made["count"]), "by counting"

    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peaks, "_copy_gbps", copied)
    monkeypatch.setattr(peaks, "_cpu_int8_tops", lambda _: (1.0, "by nothing"))
    monkeypatch.setattr(peaks, "_product_tflops", lambda *_: 1.0)
    monkeypatch.setattr(load.Load, "text", lambda _: made["busy"])
    monkeypatch.setattr(load.Load, "was_quiet", property(lambda _: made["quiet"]))
    nvml = SimpleNamespace(driver=lambda: made["driver"], utilisation=lambda: None)
    monkeypatch.setattr(load.Nvml, "open", lambda _: nvml)
    return tmp_path / "cache" / "peaks.json", made


def gbps(**more) -> float:
    return peaks.cached(load.Load(CPU), **more)["copy_gbps"]


def test_peaks_are_measured_once_for_all_that_they_depend_on(cache, monkeypatch):
    assert [gbps(), gbps()] == [1, 1]
    cache[1]["driver"] = "2"
    assert [gbps(), gbps()] == [2, 2]
    cache[1]["driver"] = None
    assert [gbps(), gbps(remeasure=True), gbps()] == [1, 3, 3]
    cache[1]["driver"] = "2"
    assert gbps() == 2
    cache[1]["driver"] = None
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert [gbps(), gbps()] == [4, 4]
    monkeypatch.setenv("OMP_WAIT_POLICY", "some other")
    assert [gbps(), gbps()] == [5, 5]
    assert len(json.loads(cache[0].read_text())) == 4


def test_what_was_measured_on_a_busy_machine_says_so_and_is_measured_again(cache):
    file, made = cache
    made.update(busy="others did", quiet=False)
    assert peaks.cached(load.Load(CPU))["busy"] == "others did"
    assert peaks.cached(load.Load(CPU))["busy"] == "others did"  # it would be no better now
    assert made["count"] == 1
    made.update(busy=None, quiet=True)
    assert "busy" not in peaks.cached(load.Load(CPU))
    made.update(busy="others did")
    assert gbps() == 2
    assert "busy" not in next(iter(json.loads(file.read_text()).values()))


GOOD = {"copy_gbps": 7.0, "int8_tops": 7.0, "bf16_tflops": 7.0, "how": {"copy_gbps": "a copy"}}


def entry(**changes) -> str:
    return json.dumps({peaks._key(CPU, None): {**GOOD, **changes}})


def test_a_good_cache_is_used(cache):
    cache[0].parent.mkdir()
    cache[0].write_text(entry())
    assert gbps() == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{ broken",
        "[]",
        "3",
        '{"x": 3}',
        entry(copy_gbps=0),
        entry(copy_gbps=-1.0),
        entry(copy_gbps="7"),
        entry(int8_tops=None),
        entry(bf16_tflops=float("nan")),
        entry(copy_gbps=float("inf")),
        entry(copy_gbps=1e300),
        entry(how=[]),
        entry(how={"copy_gbps": "\x1b[2J"}),
        entry(busy="\n"),
        json.dumps({"\x1b": GOOD}),
        json.dumps({"x": {"copy_gbps": 7.0}}),
        "[" * 100_000,
        " " * (2 << 20),
        json.dumps({str(i): 0 for i in range(2000)}),
    ],
)
def test_a_damaged_or_hostile_cache_is_told_and_replaced(text, cache):
    file, made = cache
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(JetfireWarning, match=r"peaks\.json: .*: its peaks are measured") as told:
        assert gbps() == 1
    assert len(told) == 1
    assert str(told[0].message).isprintable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gbps() == 1
    assert made["count"] == 1


def test_a_pipe_in_its_place_hangs_nobody(cache):
    file, _ = cache
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.warns(JetfireWarning, match="no regular file"):
        assert gbps() == 1
    assert file.is_fifo()


def test_a_cache_that_cannot_be_kept_costs_a_measurement(cache, monkeypatch):
    file, made = cache
    file.parent.mkdir()
    monkeypatch.setattr(peaks, "LOCK_S", 0.01)
    with filelock.FileLock(file.with_suffix(".lock")):
        assert gbps() == 1
    file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.write_text("no folder")
    assert [gbps(), gbps()] == [2, 3]
    assert made["count"] == 3


def test_a_full_disk_does_not_measure_twice(cache, monkeypatch):
    def fsync(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert [gbps(), gbps()] == [1, 2]


def test_the_command_line_tells_of_a_damaged_cache_in_a_line(cache, capsys):
    file, _ = cache
    file.parent.mkdir()
    file.write_text("{ broken")
    words = ["gemm", "--m", "8", "--block", "32", "--device", "cpu", "--kernel", "int_mm"]
    assert execute("bench", [*words, "--rounds", "2", "--peer", "none"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "peaks.json" in line]
    assert lines == [
        f"jetfire: {file}: no JSON: key must be a string at line 1 column 3: its "
        "peaks are measured anew"
    ]
