"""Replays: calls recorded once and launched from C++, on a driver that runs on the host."""

import ctypes
import gc
import shutil
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from jetfire import ops
from jetfire.core import calls, profiles, replay, terminal, workspace
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.operators import Operator, define
from jetfire.core.replay import build
from jetfire.export.target import cuda_home
from jetfire.tests import functions

FAKE = Path(__file__).parent / "fakes" / "capture.c"
SCALE, SCALE_BY_JOB, COUNT = range(3)
ASIDE = 128  # a stream's handle


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Job(ctypes.Structure):
    _fields_ = (
        ("map", ctypes.c_uint64 * 16),
        ("end", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("factor", ctypes.c_float),
    )


class Driver:
    """The fake driver, as a kernel's launch uses a driver."""

    def __init__(self, file):
        self.file, self.library = str(file), ctypes.CDLL(str(file))
        self.library.fake_function.restype = ctypes.c_void_p

    def launch(self, function, *parameters, grid=1, cluster=0, beside=False):
        stream = ctypes.c_void_p()
        self.library.aoti_torch_get_current_cuda_stream(0, ctypes.byref(stream))
        given = [Attribute(4, 0, (ctypes.c_uint * 16)(cluster, 1, 1))] if cluster else []
        given += [Attribute(6, 0, (ctypes.c_uint * 16)(1))] if beside else []
        attributes = (Attribute * 2)(*given)
        config = LaunchConfig((grid, 1, 1), (32, 1, 1), 0, stream, attributes, len(given))
        pointers = [ctypes.cast(ctypes.pointer(one), ctypes.c_void_p) for one in parameters]
        code = ctypes.c_void_p(self.library.fake_function(function))
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        assert self.library.cuLaunchKernelEx(ctypes.byref(config), code, array, None) == 0

    def scale(self, x, y, factor, **how):
        address = ctypes.c_uint64
        count = ctypes.c_int(x.numel())
        parameters = address(x.data_ptr()), address(y.data_ptr()), ctypes.c_float(factor), count
        self.launch(SCALE, *parameters, **how)

    @property
    def launched(self):
        return self.library.fake_launched()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("gcc") is None or cuda_home() is None:
        pytest.skip("needs gcc and CUDA's headers")
    file = tmp_path_factory.mktemp("driver") / "fake.so"
    include = f"-I{cuda_home()}/include"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", include, FAKE, "-o", file]
    subprocess.run(command, check=True)
    return file


@pytest.fixture
def afresh(monkeypatch):
    """Calls are replayed, whatever the environment says."""
    monkeypatch.delenv("JETFIRE_REPLAY", raising=False)
    replay.extension.cache_clear()
    yield
    replay.extension.cache_clear()


@pytest.fixture
def driver(library, afresh, monkeypatch):
    """Replays with the fake driver in the real one's place."""
    fake = Driver(library)

    @contextmanager
    def aside(device):
        fake.library.fake_current_stream(ctypes.c_void_p(ASIDE))
        try:
            yield ASIDE, nullcontext
        finally:
            fake.library.fake_current_stream(ctypes.c_void_p(64))

    arena = torch.zeros(256, dtype=torch.int32)
    taken = iter(range(0, 256, 4))
    real = replay.DRIVER, replay.TORCH
    monkeypatch.setattr(replay, "DRIVER", fake.file)
    monkeypatch.setattr(replay, "TORCH", fake.file)
    monkeypatch.setattr(replay, "aside", aside)
    monkeypatch.setattr(replay, "refusals", {})
    monkeypatch.setattr(workspace, "_counters", lambda device, count: arena[next(taken) :][:4])
    fake.arena = arena
    yield fake
    if torch.cuda.is_available():
        build.extension().connect(*real)


_made = iter(range(100))


@pytest.fixture
def serve(driver, monkeypatch):
    """Return a function that makes an operator of one kernel, and has C++ serve it on the CPU.

    The operator's calls through Python are counted in its `calls`.
    """

    def make(launch, arguments="Tensor x, float factor", returns="Tensor[]", written=False):
        operator = Operator(f"replay_test{next(_made)}({arguments}) -> {returns}", op="none")
        monkeypatch.setattr(operator, "key", lambda args: tuple(args[1:]))

        def plan_of(_, device, key):
            def of_kernel(problem, config, inputs, outputs):
                launch(driver, key, inputs, outputs)

            new = None if written else [("y", (4, 6), torch.float32)]
            return calls._Plan(None, None, SimpleNamespace(launch=of_kernel), None, new)

        monkeypatch.setattr(calls, "_plan", plan_of)
        operator.calls = 0

        def counted(*args):
            operator.calls += 1
            return served.run(*args)

        served = replay._served[operator.name]
        monkeypatch.setitem(replay._served, operator.name, replace(served, run=counted))
        replay.take_over(operator.name, "CPU")
        return operator

    return make


def plain(driver, key, inputs, outputs):
    driver.scale(inputs["x"], outputs["y"], key[0], cluster=2)


def called(operator, x, *rest):
    (y,) = operator(x, *rest)
    return y


def test_third_call_runs_without_python(driver, serve):
    double = serve(plain)
    for i in range(6):
        x = torch.randn(4, 6)
        assert torch.equal(called(double, x, 2.0), 2 * x)
        assert double.calls == min(i + 1, 2)
    assert driver.launched == 6
    assert driver.library.fake_clusters() == 2
    assert not replay.refusals


def test_a_launch_beside_the_one_before_it_is_replayed_so(driver, serve):
    def two(driver, key, inputs, outputs):
        plain(driver, key, inputs, outputs)
        driver.scale(inputs["x"], outputs["y"], key[0], beside=True)

    double = serve(two)
    before = driver.library.fake_besides()
    for i in range(4):
        x = torch.randn(4, 6)
        assert torch.equal(called(double, x, 2.0), 2 * x)
        assert double.calls == min(i + 1, 2)
        assert driver.library.fake_besides() == before + i + 1
    assert not replay.refusals


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x, 3.0),
        lambda x: (x.reshape(6, 4), 2.0),
        lambda x: (x.t().contiguous().t(), 2.0),
        lambda x: (torch.cat([x.flatten(), x[0, :1]])[1:].view(4, 6), 2.0),
        lambda x: (x.view(torch.int32), 2.0),
    ],
    ids=["factor", "shape", "strides", "alignment", "dtype"],
)
def test_another_key_is_another_plan(serve, other):
    double = serve(plain)
    x = torch.randn(4, 6)
    for _ in range(3):
        called(double, x, 2.0)
    assert double.calls == 2
    called(double, *other(x))
    assert double.calls == 3


def test_another_stream_is_another_plan(driver, serve):
    double = serve(plain)
    x = torch.randn(4, 6)
    for _ in range(3):
        called(double, x, 2.0)
    driver.library.fake_current_stream(ctypes.c_void_p(192))
    try:
        called(double, x, 2.0)
    finally:
        driver.library.fake_current_stream(ctypes.c_void_p(64))
    assert double.calls == 3


def test_python_launches_into_graphs(driver, serve):
    """A graph's launches may run beside a plan's, whose counters they would share."""
    double = serve(plain)
    x = torch.randn(4, 6)
    for _ in range(3):
        called(double, x, 2.0)
    driver.library.fake_capture(ctypes.c_void_p(64))
    try:
        called(double, x, 2.0)
    finally:
        driver.library.fake_capture(None)
    assert double.calls == 3


def through_scratch(driver, key, inputs, outputs):
    """Scale into memory of the launch's own, then on to y by a struct with addresses in it."""
    x, y = inputs["x"], outputs["y"]
    between = torch.empty(x.shape)
    driver.scale(x, between, key[0])
    end = y.data_ptr() + y.nbytes
    addresses = (ctypes.c_uint64 * 16)(between.data_ptr())
    driver.launch(SCALE_BY_JOB, Job(addresses, end, x.numel(), 3.0))
    counter = workspace.counters(x.device, 1)
    driver.launch(COUNT, ctypes.c_uint64(counter.data_ptr()))


def test_scratch_memory_structs_and_counters(driver, serve):
    times = serve(through_scratch)
    for _ in range(5):
        x = torch.randn(4, 6)
        assert torch.equal(called(times, x, 2.0), 3 * (2 * x))
        gc.collect()
    assert times.calls == 2
    # Two calls in Python, each with its own; one recorded, which three replays share.
    assert driver.arena[driver.arena > 0].tolist() == [1, 1, 3]


def test_written_arguments(serve):
    def launch(driver, key, inputs, outputs):
        assert outputs.keys() == {"y"}
        driver.scale(inputs["x"], outputs["y"], key[1])

    scale_into = serve(launch, "Tensor x, Tensor(a!) y, float factor", "()", written=True)
    x, y = torch.randn(4, 6), torch.zeros(4, 6)
    for _ in range(4):
        y.zero_()
        version = y._version
        assert scale_into(x, y, 2.0) is None
        assert torch.equal(y, 2 * x)
        assert y._version == version + 1
    assert scale_into.calls == 2


def test_absent_tensors_texts_and_one_result(serve):
    def launch(driver, key, inputs, outputs):
        assert "seed" not in inputs
        assert key[1:] == ("nearest even", True, 7)
        driver.scale(inputs["x"], outputs["y"], 2.0)

    schema = "Tensor x, Tensor? seed, str rounding, bool both, int block"
    double = serve(launch, schema, "Tensor")
    x = torch.randn(4, 6)
    for _ in range(4):
        assert torch.equal(double(x, None, "nearest even", True, 7), 2 * x)
    assert double.calls == 2


def test_an_operator_of_operators(driver, serve):
    """Its plan has the launches of all that it calls, and their memory."""
    double = serve(plain)
    whole = f"replay_test{next(_made)}"

    def body(x, factor):
        (between,) = double(x, factor)
        return [*double(between, factor), between]

    run = replay.Served(body, body, ())
    define(f"{whole}(Tensor x, float factor) -> Tensor[]", run, body)
    replay.take_over(whole, "CPU")
    before = driver.launched
    for _ in range(6):
        x = torch.randn(4, 6)
        y, between = getattr(torch.ops.jetfire, whole)(x, 2.0)
        assert torch.equal(between, 2 * x)
        assert torch.equal(y, 4 * x)
    assert not replay.refusals
    assert driver.launched - before == 2 * 6
    # Python's calls: two of the first, and as many each time that the second is recorded.
    assert double.calls == 2 + 2 * 2


def clones(driver, key, inputs, outputs):
    driver.scale(inputs["x"].clone(), outputs["y"], key[0])


def sets_memory(driver, key, inputs, outputs):
    y = outputs["y"]
    stream = ctypes.c_void_p()
    driver.library.aoti_torch_get_current_cuda_stream(0, ctypes.byref(stream))
    driver.library.cuMemsetD8Async(ctypes.c_uint64(y.data_ptr()), 0, y.nbytes, stream)
    plain(driver, key, inputs, outputs)


def looks_at_address(driver, key, inputs, outputs):
    driver.scale(inputs["x"], outputs["y"], key[0], grid=1 + inputs["x"].data_ptr() // 16 % 2)


def scrambles_address(driver, key, inputs, outputs):
    """Pass the address in a word that is no address."""
    x, y = inputs["x"], outputs["y"]
    driver.scale(x, y, key[0])
    words = (ctypes.c_uint64 * 16)(x.data_ptr(), 3 * x.data_ptr())
    driver.launch(SCALE_BY_JOB, Job(words, y.data_ptr() + y.nbytes, x.numel(), key[0]))


_times = iter(range(100))


def allocates_more(driver, key, inputs, outputs):
    for _ in range(1 + next(_times)):
        between = torch.empty(4, 6)
        driver.scale(inputs["x"], between, 1.0)
    driver.scale(between, outputs["y"], key[0])


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (clones, "it calls aten.clone"),
        (sets_memory, "a node of type 2: expected kernels alone"),
        (looks_at_address, "its launch depends on more of an address"),
        (scrambles_address, "its parameters differ at byte 8 by no tensor's address"),
        (allocates_more, "it allocates otherwise each time"),
    ],
)
def test_what_cannot_be_replayed_stays_with_python(serve, launch, reason, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "manner", terminal.Manner(verbose=True))
    double = serve(launch)
    for i in range(5):
        x = torch.randn(4, 6)
        assert torch.equal(called(double, x, 2.0), 2 * x)
        assert double.calls == i + 1
    assert reason in replay.refusals[double.name]
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"jetfire: {double.name}: such calls stay with Python: {reason}")


def test_a_fault_of_the_recording_is_a_warning(serve, monkeypatch):
    def broken(*_):
        raise ValueError("fault")

    double = serve(plain)
    x = torch.randn(4, 6)
    called(double, x, 2.0)
    monkeypatch.setattr(replay, "_moves", broken)
    with pytest.warns(JetfireWarning, match="cannot be replayed: ValueError"):
        assert torch.equal(called(double, x, 2.0), 2 * x)
    assert torch.equal(called(double, x, 2.0), 2 * x)


def test_errors_of_python_come_through(serve):
    def launch(driver, key, inputs, outputs):
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        serve(launch)(torch.randn(4, 6), 2.0)


def test_forgotten_plans_are_made_anew(serve):
    double = serve(plain)
    x = torch.randn(4, 6)
    for _ in range(3):
        called(double, x, 2.0)
    profiles.forget()
    for _ in range(3):
        called(double, x, 2.0)
    assert double.calls == 4


def test_a_failed_launch_says_so(driver, serve):
    double = serve(plain)
    x = torch.randn(4, 6)
    for _ in range(3):
        called(double, x, 2.0)
    driver.library.fake_fail(700)
    try:
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx: error 700"):
            called(double, x, 2.0)
    finally:
        driver.library.fake_fail(0)


def test_without_a_compiler_python_goes_on(afresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.extension.cache_clear()
    try:
        with pytest.warns(JetfireWarning, match="no C\\+\\+ compiler 'no-such-compiler'"):
            assert replay.extension() is None
    finally:
        build.extension.cache_clear()


def test_what_a_compiler_refuses_stays_with_python(afresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path))
    build.extension.cache_clear()
    try:
        with pytest.warns(JetfireWarning, match="false cannot compile replay.cpp for torch"):
            assert replay.extension() is None
    finally:
        build.extension.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


def test_what_cannot_be_loaded_stays_with_python(afresh, monkeypatch, tmp_path):
    broken = tmp_path / "replay.so"
    broken.write_text("no library")
    monkeypatch.setattr(build, "library", lambda: broken)
    build.extension.cache_clear()
    try:
        with pytest.warns(JetfireWarning, match="replay.so cannot be loaded"):
            assert replay.extension() is None
    finally:
        build.extension.cache_clear()


@pytest.mark.parametrize("missing", ["DRIVER", "TORCH"])
def test_a_library_that_is_not_there_leaves_calls_with_python(driver, monkeypatch, missing):
    replay.extension.cache_clear()
    monkeypatch.setattr(replay, missing, "no-such-library.so")
    with pytest.warns(JetfireWarning, match="no-such-library.so cannot be loaded"):
        assert replay.extension() is None


@pytest.mark.parametrize("value", ["off", "0", "False"])
def test_calls_stay_with_python_where_replays_are_off(driver, monkeypatch, value):
    assert replay.extension() is not None
    replay.extension.cache_clear()
    monkeypatch.setenv("JETFIRE_REPLAY", value)
    assert replay.extension() is None


@pytest.mark.parametrize("value", ["no", "NO", "OFF"])
def test_replays_are_off_by_any_word_for_off(afresh, monkeypatch, value):
    monkeypatch.setattr(build, "extension", lambda: pytest.fail("compiled all the same"))
    monkeypatch.setenv("JETFIRE_REPLAY", value)
    assert replay.extension() is None


def test_what_is_neither_on_nor_off_for_replays_is_refused(afresh, monkeypatch):
    monkeypatch.setattr(build, "extension", lambda: pytest.fail("compiled all the same"))
    monkeypatch.setenv("JETFIRE_REPLAY", "of")
    with pytest.raises(UsageError, match="JETFIRE_REPLAY='of': expected one of 1, true, yes, on"):
        replay.extension()


def test_no_call_keeps_its_callers_frames(driver, serve):
    """They hold autograd's graph, whose nodes of an earlier stream break a CUDA graph's capture."""
    operator, x = serve(plain), torch.randn(4, 6)

    def call():
        caller = Caller()
        called(operator, x, 2.0)
        return weakref.ref(caller)

    gc.disable()
    try:
        assert [call()() for _ in range(4)] == [None] * 4
    finally:
        gc.enable()


class Caller:
    """What a frame holds."""


def test_loading_dynamo_keeps_no_frames():
    """Alone in its process, as torch loads it once."""
    code = """
import gc, sys, weakref
from jetfire.core import replay
from jetfire.tests.test_replay import Caller

def call():
    caller = Caller()
    replay._load_dynamo()
    return weakref.ref(caller)

gc.disable()
assert "torch._dynamo" not in sys.modules
assert call()() is None
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", functions.names())
def test_every_function_is_replayed_with_the_bits_of_python(afresh, name):
    # C++ takes over at a process's first call, and sees those after it.
    ops.int8_quantize(torch.zeros(32, 32, device="cuda"))
    for given in functions.arguments()[name]:
        # What rows beyond those drawn hold is not said: as many are drawn as there are.
        rows = next((given[name] for name in ("rows", "weight") if name in given), None)
        if given.get("counts") is not None and rows is not None:
            given["counts"] = torch.full_like(given["counts"], rows.numel())
        options = tree_map_only(torch.Tensor, torch.Tensor.cuda, given)
        before, found = build.extension().replayed(), []
        for _ in range(4):
            copies = tree_map_only(torch.Tensor, torch.clone, options)
            result = getattr(ops, name)(**copies)
            found.append([x.cpu() for x in tree_leaves((result, copies)) if torch.is_tensor(x)])
        assert build.extension().replayed() >= before + 2, (given, replay.refusals)
        for later in found[1:]:
            for one, other in zip(found[0], later, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.gpu
@pytest.mark.quiet
def test_a_replayed_call_takes_less_of_the_host(afresh, monkeypatch):
    """Less than half of Python's; the sizes are such that the GPU is never waited for."""
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)

    def microseconds():
        for _ in range(10):
            ops.int8_quantize(x, block=128, layout="both")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            ops.int8_quantize(x, block=128, layout="both")
        return (time.perf_counter() - start) / 200 * 1e6

    replayed = microseconds()
    run = replay._served["quantize"].run
    monkeypatch.setattr("jetfire.ops.quantize._quantize", lambda *args: run(*args))
    assert replayed < microseconds() / 2
