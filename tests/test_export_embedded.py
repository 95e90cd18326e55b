"""Triton kernels as C: what the launcher asks of a driver is what the kernel's own launch would."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from ctypes import CDLL, c_int, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.core.machine_code import Cubin
from jetfire.export import embedded, recording, samples
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.recording import (
    Address,
    Argument,
    Call,
    LaunchRecording,
    Memory,
    Scratch,
    TensorMap,
)
from jetfire.export.signature import signature_of
from jetfire.export.target import cuda_home

ROOT = Path(__file__).parent.parent
FAKES = ROOT / "tests" / "fakes"
CC = ("gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared")
SMALL = {dim: samples.SMALL[dim] for dim in "mn"}
STREAM = 0x5EED0
WORKSPACE = 0x7F0000000000
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or cuda_home() is None, reason="needs gcc and CUDA's headers"
)


def plan_of(op_name, kernel_name, *fields, capability=(9, 0)):
    """A plan for some problems and default configs, as if these had been tuned."""
    op, kernel = registry.get(op_name), registry.get_kernel(op_name, kernel_name)
    device = target_device(capability)
    problems = [op.Problem(**each) for each in fields]
    tuned = tuple(TunedProblem(p, kernel.default(p, device), None) for p in problems)
    return ExportPlan(f"a_{op_name}", op, kernel, device, tuned)


PLANS = {
    "quantize": plan_of(
        "quantize",
        "triton",
        *(
            {"m": m, "n": n, "layout": "both", "rounding": "stochastic"}
            for m, n in ((256, 512), (300, 1000))
        ),
    ),
    # The sample's own sizes: fewer kernels to compile.
    "gelu": plan_of("gelu", "triton", {**SMALL, "mode": "bwd"}),
    "layernorm forward": plan_of("layernorm", "gluon", SMALL),
    "layernorm backward": plan_of(
        "layernorm", "gluon", {**SMALL, "mode": "bwd", "rounding": "stochastic"}
    ),
    "add": plan_of("add", "triton", {"m": 512, "n": 1024}),
}


@pytest.mark.parametrize("name", ["hadamard_quantize_codes", "hadamard_restore"])
def test_the_factor_of_a_transform_is_no_tensor(name):
    """A launch that asks torch for a number is none that C could repeat."""
    (tuned,) = plan_of(name, "triton", {"m": 128, "n": 256}).tuned
    (found,) = recording.record([(name, "triton", (9, 0), tuned.problem, tuned.config)])
    assert found.calls


def cases_of(plan):
    """Problems and configs that the function takes."""
    small = samples.small_problem(plan)
    found = {t.problem: t.config for t in plan.tuned}
    return [*found.items(), *([] if small in found else [(small, plan.configs[0])])]


def compile_c(folder, library, name):
    for file, content in library.files.items():
        (folder / file).write_bytes(content)
    so = folder / f"{name}.so"
    include = f"-I{cuda_home()}/include"
    subprocess.run([*CC, include, "-o", so.name, *library.c_sources], cwd=folder, check=True)
    return so


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    file = tmp_path_factory.mktemp("driver") / "libfake.so"
    subprocess.run(
        [
            *CC,
            f"-I{cuda_home()}/include",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            file,
            FAKES / "driver.c",
        ],
        check=True,
    )
    return file


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Of each plan: its library compiled, and what its kernel's launches were when recorded."""
    requests = [
        (plan.op.name, plan.kernel.name, plan.capability, *case)
        for plan in PLANS.values()
        for case in cases_of(plan)
    ]
    recordings = dict(zip(map(repr, requests), recording.record(requests), strict=True))
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "record", lambda asked: [recordings[repr(each)] for each in asked])
        for name, plan in PLANS.items():
            library = embedded.library(plan)
            so = compile_c(tmp_path_factory.mktemp("built"), library, plan.name)
            names = plan.op.name, plan.kernel.name, plan.capability
            recorded = [recordings[repr((*names, *case))] for case in cases_of(plan)]
            found[name] = SimpleNamespace(plan=plan, library=library, so=so, recorded=recorded)
    return found


def arguments_of(made, problem, **changed):
    """Typed arguments of a call: a different address for each tensor."""
    plan, workspace = made.plan, made.library.workspace
    values = {p.name: 0x10000 * (i + 1) for i, p in enumerate(plan.signature.parameters)}
    values |= {"workspace": WORKSPACE, **changed}
    pointers = [["pointer", values[p.name]] for p in plan.signature.parameters]
    sizes = [["int", changed.get(d, size)] for d, size in plan.sizes(problem).items()]
    after = [["pointer", values["workspace"]]] if workspace else []
    return [*pointers, *sizes, *after, ["pointer", STREAM]]


def parameters_in(code, function):
    """Bytes of each parameter of a kernel, as its ELF file has them (EIATTR_KPARAM_INFO)."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<3H", code, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", code, start + i * size) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        at = texts + header[0]
        if code[at : code.index(b"\0", at)].decode() == f".nv.info.{function}":
            info = code[header[4] : header[4] + header[5]]
    found, at = {}, 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        if form == 4 and attribute == 0x17:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", info, at + 4)
            found[ordinal] = flags >> 18
        at += 4 + (length if form == 4 else 0)
    return [found[i] for i in range(len(found))]


def codes_of(recorded):
    """Each different kernel in the order of its first call."""
    return list(dict.fromkeys(call.cubin for r in recorded for call in r.calls))


def run(so, function, calls, *, driver=None, kernels=(), threads=1, **environment):
    """Codes that calls returned, and what the fake driver was asked to, in words."""
    request = {
        "library": str(so),
        "function": function,
        "describe": f"{function}_error",
        "calls": calls,
        "threads": threads,
        "driver": driver and str(driver),
        "kernels": kernels,
    }
    done = subprocess.run(
        [sys.executable, FAKES / "call.py"],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, **environment},
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return [int(line[1]) for line in lines if line[0] == "code"], lines


def run_fake(fake_driver, made, calls, **options):
    kernels = [
        {"bytes": len(c.code), "parameters": parameters_in(c.code, c.name)}
        for c in codes_of(made.recorded)
    ]
    return run(made.so, made.plan.name, calls, driver=fake_driver, kernels=kernels, **options)


def call_all(made):
    return [arguments_of(made, problem) for problem, _ in cases_of(made.plan)]


FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}


def check_argument(argument, content, addresses, scratch):
    """The bytes that a kernel was given are what its launch passed."""
    if argument.type == "pointer":
        (given,) = struct.unpack("<Q", content)
        base = given - argument.value.offset
        if isinstance(argument.value.of, int):
            assert scratch.setdefault(argument.value.of, base) == base
        else:
            assert base == addresses[argument.value.of]
        return
    (given,) = struct.unpack(FORMATS[argument.type], content)
    expected = argument.value
    assert given == (np.float32(expected) if argument.type == "fp32" else expected)


@pytest.mark.parametrize("name", PLANS)
def test_a_call_launches_what_the_kernel_would(built, fake_driver, name):
    made = built[name]
    plan, kernels = made.plan, codes_of(made.recorded)
    calls = call_all(made)
    codes, lines = run_fake(fake_driver, made, calls)
    assert codes == [0] * len(calls)
    # Every different code was loaded once, whole, by the name of its function.
    assert [bytes.fromhex(x[3]) for x in lines if x[0] == "load"] == [c.code for c in kernels]
    assert [x[2] for x in lines if x[0] == "kernel"] == [c.name for c in kernels]
    launches = iter([x for x in lines if x[0] == "launch"])
    for arguments, recorded in zip(calls, made.recorded, strict=True):
        names = [p.name for p in plan.signature.parameters]
        addresses = {n: value for n, (_, value) in zip(names, arguments, strict=False)}
        scratch = {}
        for call in recorded.calls:
            _, kernel, *numbers = next(launches)
            assert kernels[int(kernel)] == call.cubin
            grid, block, (shared, stream, no_extra) = numbers[:3], numbers[3:6], numbers[6:9]
            assert tuple(map(int, grid)) == call.grid
            assert tuple(map(int, block)) == (32 * call.cubin.warps, 1, 1)
            assert (int(shared), int(stream), int(no_extra)) == (call.cubin.shared_bytes, STREAM, 1)
            *given, last, profile = map(bytes.fromhex, numbers[9:])
            assert len(given) == len(call.arguments)
            for argument, content in zip(call.arguments, given, strict=True):
                check_argument(argument, content, addresses, scratch)
            assert not any(last + profile)
        check_scratch(made, arguments, recorded, scratch)
    assert next(launches, None) is None


def check_scratch(made, arguments, recorded, scratch):
    """Pieces of the workspace are aligned, apart, and within it."""
    assert sorted(scratch) == list(range(len(recorded.scratch)))
    if not made.library.workspace:
        return
    sizes = [value for kind, value in arguments if kind == "int"]
    function = getattr(CDLL(str(made.so)), f"{made.plan.name}_workspace_bytes")
    function.restype = c_size_t
    end = WORKSPACE
    for base, number in sorted((base, number) for number, base in scratch.items()):
        assert base >= end
        assert base % 256 == 0
        end = base + recorded.scratch[number].nbytes
    assert end <= WORKSPACE + function(*sizes)
    assert function(*(size + 1 for size in sizes)) == 0


@pytest.mark.parametrize("name", PLANS)
def test_files_keep_to_a_width_and_hold_no_paths(built, name):
    library = built[name].library
    for file, content in library.files.items():
        text = content.decode()
        assert max(map(len, text.splitlines())) <= 100, file
        assert str(ROOT) not in text
        assert "\n\n\n" not in text, file
        assert not re.search(r"[ \t]$", text, re.MULTILINE), file
    assert library.c_sources == (f"{built[name].plan.name}.c", f"{built[name].plan.name}_code.c")
    assert (library.cuda_sources, library.any_size) == ((), False)
    assert library.architecture == "90"


def test_no_machine_code_names_where_it_was_compiled(built):
    for made in built.values():
        for cubin in codes_of(made.recorded):
            assert str(ROOT).encode() not in cubin.code


def test_counters_come_first_and_are_as_many_for_all_sizes(built):
    """What one size leaves in the workspace is never another's counter."""
    made = built["add"]
    assert [s.zeroed for s in made.recorded[0].scratch] == [False, True]
    text = made.library.files["a_add.c"].decode()
    places = re.findall(r"\{\.kind = WORKSPACE, \.value = (\d+)\},  // (\w+)", text)
    most = max(s.nbytes for r in made.recorded for s in r.scratch if s.zeroed)
    assert set(places) == {("0", "counter_ptr"), (str(-(-most // 256) * 256), "partial_ptr")}


@pytest.mark.parametrize(("name", "zeros"), [("add", True), ("layernorm backward", False)])
def test_only_counters_must_be_zeros(built, name, zeros):
    """Partial sums, which a call writes before it reads them, need not be."""
    library = built[name].library
    assert (library.workspace, library.zeros) == (True, zeros)
    text = library.files[f"{built[name].plan.name}.h"].decode()
    assert ("must be all zeros" in text, "it may hold anything" in text) == (zeros, not zeros)


# --- refusals ------------------------------------------------------------------------------------

OK, BAD_SIZE, BAD_ALIGNMENT, BAD_DEVICE, CUDA_ERROR = range(5)
UNKNOWN = CUDA_ERROR + 999  # CUDA_ERROR_UNKNOWN


def test_what_a_caller_gets_wrong_is_found_before_the_driver_is_needed(built):
    made = built["add"]
    plan, problem = made.plan, made.plan.problem
    names = [p.name for p in plan.signature.parameters] + ["workspace"]
    wrong = [
        ({"m": problem.m + 1}, BAD_SIZE),
        ({"n": problem.m, "m": problem.n}, BAD_SIZE),
        *(({name: 0x1008}, BAD_ALIGNMENT) for name in names),
    ]
    calls = [arguments_of(made, problem, **changed) for changed, _ in [*wrong, ({}, OK)]]
    *codes, right = run(made.so, plan.name, calls)[0]
    assert codes == [code for _, code in wrong]
    assert right >= CUDA_ERROR  # no driver, no GPU or no context
    library = CDLL(str(made.so))
    describe = getattr(library, f"{plan.name}_error")
    describe.restype = c_void_p
    assert len({describe(code) for code in range(6)}) == 6


@pytest.mark.parametrize(
    ("environment", "code"),
    [
        ({"FAKE_CAPABILITY": "80"}, BAD_DEVICE),
        ({"FAKE_DEVICE": "63"}, OK),
        ({"FAKE_DEVICE": "64"}, OK),  # beyond those whose state is kept
        *(
            ({"FAKE_FAILURE": function}, UNKNOWN)
            for function in (
                "cuInit",
                "cuCtxGetDevice",
                "cuDeviceGetAttribute",
                "cuLibraryLoadData",
                "cuThreadExchangeStreamCaptureMode",
                "cuLibraryGetKernel",
                "cuLaunchKernel",
            )
        ),
    ],
)
def test_what_the_driver_refuses_is_a_code_that_has_its_name(built, fake_driver, environment, code):
    made = built["quantize"]
    codes, lines = run_fake(fake_driver, made, 2 * call_all(made)[:1], **environment)
    assert codes == [code, code]
    means = {OK: "no error", BAD_DEVICE: "the current device is not of sm_90"}
    said = " ".join(next(x for x in lines if x[0] == "means")[1:])
    assert said == means.get(code, "CUDA_ERROR_UNKNOWN")
    if code < CUDA_ERROR:
        assert sum(x[0] == "launch" for x in lines) == (2 if code == OK else 0)
        assert sum(x[0] == "load" for x in lines) == (len(codes_of(made.recorded)) * (code == OK))


def test_code_is_loaded_once_whoever_calls_first(built, fake_driver):
    made = built["quantize"]
    calls = 8 * call_all(made)
    codes, lines = run_fake(fake_driver, made, calls, threads=8)
    assert codes == [OK] * len(calls)
    assert sum(x[0] == "load" for x in lines) == len(codes_of(made.recorded))
    assert sum(x[0] == "launch" for x in lines) == len(calls)
    # A capture in that thread allows it: relaxed (2) around the loads, and then what it was.
    assert [x[1] for x in lines if x[0] == "capture"] == ["2", "0"]


# --- recordings made by hand ---------------------------------------------------------------------


def by_hand(monkeypatch, tmp_path, recordings, fields=({"m": 256, "n": 512},)):
    """A library of made-up recordings of quantize, compiled; the sample's comes last."""
    plan = plan_of("quantize", "triton", *fields)
    monkeypatch.setattr(embedded, "record", lambda requests: recordings)
    library = embedded.library(plan)
    return SimpleNamespace(
        plan=plan, library=library, so=compile_c(tmp_path, library, plan.name), recorded=recordings
    )


def a_call(*arguments, code=b"\x7fELF", function="some_kernel", shared_bytes=0, grid=(1, 1, 1)):
    return Call(Cubin(function, code, shared_bytes, 4), grid, arguments)


def launched(fake_driver, made, sizes, **options):
    """The driver's lines for a call of each of the plan's problems, the sample's last."""
    kernels = [{"bytes": 4, "parameters": sizes[c.code]} for c in codes_of(made.recorded)]
    codes, lines = run(
        made.so, made.plan.name, call_all(made), driver=fake_driver, kernels=kernels, **options
    )
    assert codes == [OK] * len(made.recorded)
    return lines


def test_tensor_maps_are_encoded_for_each_call(monkeypatch, tmp_path, fake_driver):
    def recorded(m, n):
        matrix = TensorMap(Address("x", 0), "bfloat16", 2, (m, n), (n, 1), (64, 32), 64)
        return LaunchRecording(
            (a_call(Argument("x_desc", "map", matrix), Argument("x_desc_stride0", "i64", n)),), ()
        )

    made = by_hand(monkeypatch, tmp_path, [recorded(256, 512), recorded(208, 336)])
    lines = launched(fake_driver, made, {b"\x7fELF": [128, 8, 8, 8]})
    maps = [list(map(int, x[1:])) for x in lines if x[0] == "map"]
    # bf16, rank 2, x; no interleave, 64 bytes, promotion to 128, zeros; columns first.
    assert maps == [
        [9, 2, 0x10000, 0, 2, 2, 0, 512, 32, 1, 256, 64, 1, 1024],
        [9, 2, 0x10000, 0, 2, 2, 0, 336, 32, 1, 208, 64, 1, 672],
    ]
    launches = [x[11:] for x in lines if x[0] == "launch"]
    assert launches[0][0] == "ab" * 128
    assert [int.from_bytes(bytes.fromhex(x[1]), "little") for x in launches] == [512, 336]


def test_shared_memory_beyond_48_kib_is_asked_for_once_a_device(monkeypatch, tmp_path, fake_driver):
    small = LaunchRecording((a_call(code=b"\x7fELS", shared_bytes=48 << 10),), ())
    large = LaunchRecording((a_call(code=b"\x7fELL", shared_bytes=(48 << 10) + 16),), ())
    made = by_hand(monkeypatch, tmp_path, [small, large])
    sizes = {b"\x7fELS": [8, 8], b"\x7fELL": [8, 8]}
    lines = launched(fake_driver, made, sizes, FAKE_DEVICE="3")
    # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of the second kernel.
    assert [x[1:] for x in lines if x[0] == "attribute"] == [["1", "8", str((48 << 10) + 16), "3"]]


def test_problems_whose_launches_differ_get_each_its_own(monkeypatch, tmp_path, fake_driver):
    """Such as where Triton compiled a stride of 1 in, so that the kernel takes one number less."""
    one = LaunchRecording(
        (
            a_call(
                Argument("x_ptr", "pointer", Address("x", 0)),
                Argument("stride", "i32", 7),
                code=b"\x7fEL1",
            ),
        ),
        (),
    )
    other = LaunchRecording(
        (
            a_call(Argument("x_ptr", "pointer", Address("x", 0)), code=b"\x7fEL2"),
            a_call(Argument("rate", "fp32", 0.1), code=b"\x7fEL3"),
        ),
        (),
    )
    fields = ({"m": 256, "n": 512}, {"m": 512, "n": 512})
    made = by_hand(monkeypatch, tmp_path, [one, other, one], fields)
    sizes = {b"\x7fEL1": [8, 4, 8, 8], b"\x7fEL2": [8, 8, 8], b"\x7fEL3": [4, 8, 8]}
    lines = [x for x in launched(fake_driver, made, sizes) if x[0] == "launch"]
    assert [x[1] for x in lines] == ["0", "1", "2", "0"]
    assert lines[0][12] == "07000000"
    assert lines[2][11] == struct.pack("<f", 0.1).hex()


def test_views_and_numbers_that_differ_come_from_the_table(monkeypatch, tmp_path, fake_driver):
    def recorded(offset, place, count, rate):
        arguments = (
            Argument("x_ptr", "pointer", Address("x", offset)),
            Argument("q_ptr", "pointer", Address(0, place)),  # q is an output's name
            Argument("count", "i64", count),
            Argument("rate", "fp32", rate),
        )
        return LaunchRecording((a_call(*arguments),), (Scratch(1000, False), Scratch(8, True)))

    made = by_hand(
        monkeypatch, tmp_path, [recorded(32, 0, 1 << 40, 1e-5), recorded(64, 500, 3, -2.0)]
    )
    lines = launched(fake_driver, made, {b"\x7fELF": [8, 8, 8, 4, 8, 8]})
    given = [list(map(bytes.fromhex, x[11:])) for x in lines if x[0] == "launch"]
    for content, expected in zip(
        given,
        [(0x10020, WORKSPACE + 256, 1 << 40, 1e-5), (0x10040, WORKSPACE + 756, 3, -2.0)],
        strict=True,
    ):
        assert content[0] == struct.pack("<Q", expected[0])
        assert content[1] == struct.pack("<Q", expected[1])
        assert content[2] == struct.pack("<q", expected[2])
        assert content[3] == struct.pack("<f", expected[3])
    assert made.library.workspace


# --- what is recorded ----------------------------------------------------------------------------


def test_new_tensors_views_and_counters_are_traced(monkeypatch):
    from jetfire.kernels_triton import add

    memory = Memory()
    x = torch.empty(4, 8, device="meta")
    memory.name(x, "x")
    with recording.watching(memory):
        pair = torch.empty((2, 8), device="meta")
        second = pair[1]
        counted = add.counters(x.device, 5)
        turned = x[2:].t()
    assert memory.scratch == [Scratch(64, False), Scratch(20, True)]
    assert memory.find("a", second) == Address(0, 32)
    assert memory.find("b", counted) == Address(1, 0)
    assert memory.find("c", turned) == Address("x", 64)
    with pytest.raises(UsageError, match="parameter d is no input, output or new tensor"):
        memory.find("d", torch.empty(1, device="meta"))


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda x: torch.zeros(3, device="meta"), "aten.zeros"),
        (lambda x: x.zero_(), "aten.zero_"),
        (lambda x: x.sum(), "aten.sum"),
        (lambda x: x.t().contiguous(), "aten.clone"),
    ],
)
def test_a_launch_that_needs_torch_is_refused(act, named):
    with (
        pytest.raises(UsageError, match=f"a launch that calls {named}.* cannot be exported"),
        recording.watching(Memory()),
    ):
        act(torch.empty((2, 3), device="meta"))


def launch_of(signature, arguments, **metadata):
    """A made-up launch as Triton's compiler describes one."""
    plain = {
        "name": "k",
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "num_warps": 4,
        "shared": 0,
    }
    parameters = ", ".join(".param .u64 p" for _ in range(len(signature) + 2))
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(**{**plain, **metadata}),
        src=SimpleNamespace(signature=signature),
        asm={"ptx": f".visible .entry k({parameters})", "cubin": b""},
    )
    return SimpleNamespace(compiled=compiled, grid=(1, 1, 1), arguments=arguments)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"global_scratch_size": 128}, "k needs global scratch memory: cannot export"),
        ({"profile_scratch_size": 128}, "k needs profiling memory"),
        ({"num_ctas": 2}, "k needs clusters"),
        ({"launch_cooperative_grid": True}, "k needs a cooperative launch"),
        ({"launch_pdl": True}, "k needs programmatic dependent launch"),
    ],
)
def test_a_launch_that_needs_more_than_a_plain_one_is_refused(metadata, message):
    with pytest.raises(UsageError, match=message):
        recording.call_of(launch_of({}, {}, **metadata), Memory())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (("i32", "i32"), "parameter p is a tuple: expected tensors and numbers"),
        ("fp64", "parameter p is fp64: expected i32, i64, fp32 or a tensor"),
        ("tensordesc<i8[8, 8]>", "parameter p is no plain tensor map: cannot export"),
    ],
)
def test_an_argument_of_another_kind_is_refused(kind, message):
    with pytest.raises(UsageError, match=message):
        recording.call_of(launch_of({"p": kind}, {"p": None}), Memory())


def test_an_error_of_the_process_that_records_is_the_callers():
    with pytest.raises(UsageError, match="no op 'nothing'"):
        recording.record([("nothing", "triton", (9, 0), None, None)])


def test_an_output_with_an_inputs_name_that_does_not_update_it_has_its_own():
    """Dropout's codes and scales: another tensor in than out."""
    op = registry.get("dropout")
    signature = signature_of(op, op.Problem(m=64, n=64))
    assert [(p.name, p.key, p.role) for p in signature.parameters] == [
        ("q", "q", "input"),
        ("scale", "scale", "input"),
        ("seed", "seed", "input"),
        ("q_out", "q", "output"),
        ("scale_out", "scale", "output"),
    ]
    inputs, outputs = {"q": 1, "scale": 2, "seed": 3}, {"q": 4, "scale": 5}
    assert list(signature.tensors(inputs, outputs).values()) == [1, 2, 3, 4, 5]


def test_an_updated_tensor_is_one_parameter():
    op = registry.get("gemm")
    problem = op.Problem(m=64, n=64, k=64, out="fp32", accumulate=True)
    roles = {p.name: p.role for p in signature_of(op, problem).parameters}
    assert list(roles.items()).count(("c", "updated")) == 1


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
def test_the_function_does_what_the_kernel_does(built, device, name):
    made = built[name]
    plan, op = made.plan, made.plan.op
    if torch.cuda.get_device_capability(device) != plan.capability:
        pytest.skip("compiled for sm_90")
    library = CDLL(str(made.so))
    for problem, _ in cases_of(plan):
        inputs = op.inputs(problem, device)
        outputs = op.poison(problem, op.outputs(problem, inputs))
        sizes = [c_int(size) for size in plan.sizes(problem).values()]
        tensors = plan.signature.tensors(inputs, outputs)
        pointers = [c_void_p(t.data_ptr()) for t in tensors.values()]
        after = []
        if made.library.workspace:
            bytes_of = getattr(library, f"{plan.name}_workspace_bytes")
            bytes_of.restype = c_size_t
            workspace = torch.zeros(bytes_of(*sizes), dtype=torch.uint8, device=device)
            after = [c_void_p(workspace.data_ptr())]
        stream = c_void_p(torch.cuda.current_stream(device).cuda_stream)
        for _ in range(2):
            assert getattr(library, plan.name)(*pointers, *sizes, *after, stream) == OK
            result = op.check(problem, outputs, op.reference(problem, inputs))
            assert result.ok, result.message
            op.poison(problem, outputs)
