"""CUDA kernels as exports: the program stays the same, host code computes what Python's does."""

import json
import random
import re
import shutil
import subprocess
import sys
from ctypes import CDLL
from types import SimpleNamespace

import pytest

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.core.machine_code import audit
from jetfire.core.profiles import Entry
from jetfire.export import cuda, flatten
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.target import cuda_home
from jetfire.kernels_cuda import compile as compiler
from jetfire.kernels_cuda import driver, mma_tiles, program
from jetfire.kernels_cuda.gemm import host, mma, wgmma
from jetfire.kernels_cuda.gemm.config import WgmmaConfig
from jetfire.kernels_cuda.gemm.mma import MmaConfig
from jetfire.tests.audited import alone

OP = registry.get("gemm")
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or cuda_home() is None, reason="needs gcc and CUDA's headers"
)


def plan_of(kernel, *cases, capability=(9, 0)):
    """A plan for some (fields, config), as if they had been tuned."""
    tuned = []
    for fields, config in cases:
        problem = OP.Problem(**fields)
        entry = Entry(
            kernel,
            problem.as_dict(),
            config.as_dict(),
            1.0,
            1.0,
            1.0,
            1,
            None,
            None,
            "time",
            {},
            24,
            "gp",
            {},
        )
        tuned.append(TunedProblem(problem, config, entry))
    device = target_device(capability)
    return ExportPlan("a_gemm", OP, registry.get_kernel("gemm", kernel), device, tuple(tuned))


def fields(m=4096, n=4096, k=4096, **others):
    return {"m": m, "n": n, "k": k, "block": 32, **others}


# Every branch of the host code's templates.
WGMMA = [
    (fields(), WgmmaConfig()),
    (fields(n=4095, out="fp16", accumulate=True), WgmmaConfig(cluster_n=2)),
    (
        fields(out="fp32", accumulate=True, bias=True),
        WgmmaConfig(2, 1, 64, 7, 1, 2, 1, stream=True, schedule="telescoped"),
    ),
    (
        fields(block=128, out="int8", layout="both", rounding="stochastic"),
        WgmmaConfig(2, cluster_m=2),
    ),
    (fields(m=4090, out="int8", layout="both"), WgmmaConfig(4, tile_n=32)),
    (fields(n=4090, out="int8", layout="qt"), WgmmaConfig(4, tile_n=64)),
    (fields(out="int8", layout="q"), WgmmaConfig(1, 2, 192, 4)),
    (fields(block=128, out_block=32, out="int8", layout="both"), WgmmaConfig()),
    (fields(n=4095, out="bf16"), WgmmaConfig(4, tile_n=64, stream=True)),
    (fields(out="int8", layout="both"), WgmmaConfig(2, cluster_m=2, stream=True)),
    (fields(out="fp32", squares=True), WgmmaConfig()),
    (fields(block=128), WgmmaConfig(2, cluster_n=2, schedule="interleaved")),
]
MMA = [
    (fields(), MmaConfig()),
    (fields(n=4090, k=4092, out="fp32", accumulate=True, bias=True), MmaConfig(64, 64, 2, 2, 4)),
    (fields(k=4093, block=64, out="int8", layout="both", rounding="stochastic"), MmaConfig()),
    (fields(m=4090, out="int8", layout="qt"), MmaConfig(64, 128, 2, 2)),
    (fields(block=128, out_block=32, out="int8"), MmaConfig(64, 64, 2, 2, 4)),
    (fields(out="fp32", squares=True), MmaConfig()),
]
CASES = [("wgmma", *case) for case in WGMMA] + [("mma", *case) for case in MMA]


def name_of(case):
    return f"{case[0]}-{case[1].get('out', 'bf16')}-{CASES.index(case)}"


# --- text ----------------------------------------------------------------------------------------


def source_of(plan):
    return cuda.library(plan).files["a_gemm.cu"].decode()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_source_stands_alone_and_reads_well(case):
    kernel, problem, config = case
    text = source_of(plan_of(kernel, (problem, config)))
    assert re.findall(r'#include "(.*)"', text) == ["a_gemm.h"]
    assert not re.search(r"#pragma once|EXPECTED_SHARED|using u?int\d+_t", text)
    files = (*compiler.ROOT.glob("*.cuh"), *wgmma.SOURCE.parent.glob("*.cu*"))
    own = {line for file in files for line in file.read_text().splitlines()}
    assert [line for line in text.splitlines() if len(line) > 100 and line not in own] == []
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]\n", text)
    assert text.endswith("}\n")


def test_what_is_not_used_is_left_out():
    source = flatten.read(mma.MmaGemm.source)
    kept = dict(flatten.used(source.headers, source.body))
    ptx = next(text for title, text in kept.items() if "PTX instructions that" in title)
    assert not re.search(r"mbarrier|tma_load|--- clusters", ptx)
    assert "--- the rest" in ptx
    assert "pack_bf16" in ptx


def test_constants_are_those_of_the_config():
    config = WgmmaConfig(2, 1, 64, 7, 2, 2, 1, 16, 1, "telescoped")
    text = source_of(plan_of("wgmma", (fields(out="fp32"), config)))
    found = dict(re.findall(r"^constexpr \w+ (\w+) = (\w+); +// \w", text, re.MULTILINE))
    assert found == {
        "BLOCK": "32",
        "OUT_BLOCK": "32",
        "OUTPUT": "0",
        "BIAS": "false",
        "ACCUMULATE": "false",
        "SQUARES": "false",
        "STOCHASTIC": "false",
        "Q": "false",
        "QT": "false",
        "TMA_OUT": "true",
        "TMA_QT": "false",
        "GROUPS": "2",
        "ROWS": "1",
        "TILE_N": "64",
        "STAGES": "7",
        "BUFFERS": "2",
        "CLUSTER_M": "2",
        "CLUSTER_N": "1",
        "RASTER": "16",
        "BAND": "0",
        "IN_FLIGHT": "1",
        "STREAM": "false",
        "TELESCOPED": "true",
        "INTERLEAVED": "false",
        "CONSUMER_REGISTERS": "224",
        "PRODUCER_REGISTERS": "56",
        "CHUNK_WARPS": "4",
        "MARKED": "0",
    } | {name: found[name] for name in found if name in ("SUMS", "WINDOW")}


def test_what_the_contract_asks_of_sizes():
    def asked(kernel, case):
        return cuda.library(plan_of(kernel, case)).contract[1]

    assert "m a multiple of 16, n a multiple of 16, k a multiple of 16" in asked("wgmma", WGMMA[3])
    assert "n a multiple of" not in asked("wgmma", WGMMA[1])
    assert "n a multiple of 4, k a multiple of 16" in asked("wgmma", WGMMA[2])
    assert (
        asked("mma", MMA[1])
        == "Sizes: up to 2^30, k a multiple of 4; any that keep to this will do."
    )
    with pytest.raises(UsageError, match="k=4088: an exported one takes multiples of 16"):
        cuda.library(plan_of("wgmma", (fields(k=4088), WgmmaConfig())))


@pytest.mark.parametrize("sizes", [(4096, 4092), (4092, 4096)])
def test_the_contract_of_several_configs_asks_for_the_largest_multiple(sizes):
    plan = plan_of("mma", *((fields(k=k), MmaConfig()) for k in sizes))
    assert cuda.library(plan).contract[1] == (
        "Sizes: up to 2^30, n a multiple of 8, k a multiple of 16 (but for the sizes that were "
        "tuned); any that keep to this will do."
    )


def test_a_kernel_without_host_code_is_refused():
    plan = plan_of("wgmma", WGMMA[0])
    other = registry.get_kernel("gemm", "triton")
    assert cuda.takes(plan.kernel)
    assert not cuda.takes(other)
    with pytest.raises(UsageError, match="gemm/triton has no form as CUDA C"):
        cuda.host_of(other)


def test_every_constant_of_every_kernel_has_a_note():
    for kernel, problem, config in CASES:
        host = cuda.host_of(registry.get_kernel("gemm", kernel))
        for code in host.codes(OP.Problem(**problem), config):
            named = re.findall(r"^constexpr \w+ (\w+) =", code.header, re.MULTILINE)
            assert {n for n in named if not n.startswith("EXPECTED")} <= set(host.notes)


# --- the program ---------------------------------------------------------------------------------


def nvrtc_missing():
    try:
        compiler._nvrtc_version()
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))
@pytest.mark.parametrize("case", [CASES[2], ("mma", *MMA[0])], ids=["wgmma", "mma"])
def test_the_flattened_source_is_the_same_program(case, tmp_path, monkeypatch):
    """By the same compiler: instruction by instruction what the workbench launches."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    kernel, problem, config = case
    plan = plan_of(kernel, (problem, config))
    code = source_of(plan).split("namespace {\n")[1].split("}  // namespace\n")[0]
    types = "".join(
        line + "\n"
        for line in (compiler.ROOT / "ptx.cuh").read_text().splitlines()
        if line.startswith("using ")
    )
    source = tmp_path / "flat.cu"
    source.write_text(types + code.replace("__global__ void", 'extern "C" __global__ void'))
    architecture = "sm_90a" if kernel == "wgmma" else "sm_90"
    flat = audit(alone(compiler.compile_cubin(source, "", architecture)))
    (own,) = plan.kernel.cubins(OP.Problem(**problem), config, (9, 0))
    assert instructions(flat) == instructions(audit(own))


def instructions(found):
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", found.sass, re.MULTILINE)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The kernel of the first case, as nvcc makes it of the export."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("cuda")
    for name, content in cuda.library(plan_of("wgmma", WGMMA[0])).files.items():
        (folder / name).write_bytes(content)
    done = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-O3",
            "-Xcompiler",
            "-Wall,-Wextra",
            "-gencode",
            "arch=compute_90a,code=sm_90a",
            "-cubin",
            "a_gemm.cu",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""
    return alone((folder / "a_gemm.cubin").read_bytes())


@pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))
def test_nvcc_makes_the_same_of_it_where_it_counts(built):
    """But for addresses of shared memory, which nvcc keeps in 32 bits and NVRTC in 64."""
    (own,) = registry.get_kernel("gemm", "wgmma").cubins(
        OP.Problem(**WGMMA[0][0]), WGMMA[0][1], (9, 0)
    )
    nvcc, nvrtc = audit(built), audit(own)
    assert (nvcc.registers, nvcc.spills, nvcc.stack_bytes) == (nvrtc.registers, 0, 0)
    counted = (
        "IGMMA",
        "I2FP",
        "FFMA",
        "FADD",
        "FMUL",
        "F2FP",
        "LDS",
        "STS",
        "STSM",
        "LDG",
        "SYNCS",
        "UTMALDG",
        "UTMASTG",
        "BAR",
        "WARPGROUP",
        "WARPSYNC",
        "BRA",
    )
    assert {i: nvcc.instructions.get(i) for i in counted} == {
        i: nvrtc.instructions.get(i) for i in counted
    }
    assert nvcc.instructions["IGMMA"] > 0
    assert sum(nvcc.instructions.values()) <= 1.01 * sum(nvrtc.instructions.values())


ERRORS = """
import ctypes, sys
describe = ctypes.CDLL(sys.argv[1]).a_gemm_error
describe.restype = ctypes.c_char_p
print(*(describe(code).decode() for code in map(int, sys.argv[2:])), sep="\\n")
"""
TWO = [(fields(size, size, size), WgmmaConfig(groups)) for size, groups in ((1024, 1), (8192, 3))]
STREAMED = [(fields(), WgmmaConfig(stream=True))]


def described(library, *codes, **environment):
    """What a library says of codes."""
    words = [sys.executable, "-c", ERRORS, library, *map(str, codes)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@needs_gcc
@pytest.mark.parametrize("cases", [WGMMA[:1], TWO], ids=["one config", "two"])
def test_the_driver_names_its_errors(cases, stand_in, tmp_path, monkeypatch):
    library = write_compiled(plan_of("wgmma", *cases), tmp_path, monkeypatch)
    assert compile_c(tmp_path, "gemm.so", *library.c_sources) == ""
    found = described(tmp_path / "gemm.so", 4, 5, 6, -1, LD_LIBRARY_PATH=str(stand_in))
    assert found == [
        "there is no CUDA driver, or one that is too old",
        "CUDA_ERROR_INVALID_VALUE",
        "an error that CUDA's driver has no name for",
        "not one of a_gemm's codes",
    ]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("cases", [TWO, STREAMED], ids=["two configs", "a workspace"])
def test_nvcc_takes_what_chooses_and_launches(cases, tmp_path):
    files = cuda.library(plan_of("wgmma", *cases)).files
    for name in ("a_gemm.h", "a_gemm_configs.h", "a_gemm.cu"):
        if name in files:  # one config needs none to choose by
            (tmp_path / name).write_bytes(files[name])
    command = "nvcc -std=c++17 -Xcompiler -Wall,-Wextra -c a_gemm.cu"
    command += " -gencode arch=compute_90a,code=sm_90a"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert b"cudaGetErrorName" in (tmp_path / "a_gemm.o").read_bytes()


# --- host code -----------------------------------------------------------------------------------

# Stands for libcuda.so.1: a map is what it was made of, a launch is kept to be asked for.
DRIVER = r"""
#include <cuda.h>
#include <string.h>
typedef struct { unsigned blocks, threads, shared_bytes; unsigned char arguments[1024]; } Launch;
Launch launched;
int argument_bytes;
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name == NULL;
}
CUresult cuInit(unsigned flags) { return flags; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR    ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0 : 132;
  return device;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) { return *mode & 0; }
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* o, void** v,
                           unsigned n, CUlibraryOption* p, void** w, unsigned k) {
  (void)o, (void)v, (void)p, (void)w;
  *library = (CUlibrary)code;
  return n + k;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  *kernel = (CUkernel)library;
  return strcmp(name, "gemm");
}
CUresult cuKernelSetAttribute(CUfunction_attribute a, int value, CUkernel kernel, CUdevice device) {
  (void)a, (void)value, (void)kernel;
  return device;
}
CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared_bytes, CUstream stream, void** arguments,
                        void** extra) {
  (void)f, (void)stream, (void)extra;
  launched = (Launch){x, bx, shared_bytes, {0}};
  memcpy(launched.arguments, arguments[0], argument_bytes);
  return y * z * by * bz - 1;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const cuuint64_t all[] = {type, rank, (cuuint64_t)address, sizes[0], sizes[1], strides[0], box[0],
                            box[1], steps[0], steps[1], interleave, swizzle, promotion, fill};
  memset(map, 0, sizeof *map);
  memcpy(map, all, sizeof all);
  return CUDA_SUCCESS;
}
"""
CALL = """
import ctypes, json, sys
folder, calls = json.load(sys.stdin)
driver = ctypes.CDLL("libcuda.so.1")
class Launch(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_uint * 3), ("arguments", ctypes.c_ubyte * 1024)]
launched = Launch.in_dll(driver, "launched")
found = []
for library, size, pointers, sizes, workspace in calls:
    f = ctypes.CDLL(f"{folder}/{library}").a_gemm
    ctypes.c_int.in_dll(driver, "argument_bytes").value = size
    extra = [ctypes.c_void_p(workspace)] if workspace else []
    launched.sizes[:] = [0] * 3
    code = f(*map(ctypes.c_void_p, pointers), *sizes, *extra, None)
    found.append((code, list(launched.sizes), bytes(launched.arguments[:size]).hex()))
    if workspace:
        bytes_of = ctypes.CDLL(f"{folder}/{library}").a_gemm_workspace_bytes
        bytes_of.restype = ctypes.c_size_t
        found[-1] += (bytes_of(*sizes),)
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """A folder with a libcuda.so.1 that launches nothing."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    compile_c(folder, "libcuda.so.1", "driver.c")
    return folder


def compile_c(folder, library, *sources):
    done = subprocess.run(
        [
            "gcc",
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-shared",
            "-fPIC",
            f"-I{cuda_home()}/include",
            "-o",
            library,
            *sources,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def called(stand_in, folder, calls):
    """What the libraries of a folder launch, by a process in which no other driver is."""
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        input=json.dumps([str(folder), calls]),
        text=True,
        env={"LD_LIBRARY_PATH": str(stand_in)},
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


def write_compiled(plan, folder, monkeypatch):
    """The export as compiled code, with something else for the code."""

    monkeypatch.setattr(cuda, "compile_cubin", lambda source, header, architecture: b"ELF")
    library = cuda.compiled_library(plan)
    for name, content in library.files.items():
        (folder / name).write_bytes(content)
    return library


def tensor(address, rows, columns, itemsize=1):
    """What a launch asks of a contiguous tensor."""
    return SimpleNamespace(
        data_ptr=lambda: address,
        stride=lambda dim: columns,
        itemsize=itemsize,
        shape=(rows, columns),
        device=target_device((9, 0)),
    )


def launched_by_python(kernel, problem, config, tensors, workspace, monkeypatch):
    """Blocks, threads, shared bytes and the argument of the workbench's own launch."""
    (code,) = cuda.host_of(registry.get_kernel("gemm", kernel)).codes(problem, config)
    found = []

    def loaded(program, device):
        assert program.header == code.header

        def launch(blocks, threads, arguments):
            content = arguments[0].tobytes().hex()
            found.append([[blocks, threads, program.shared_bytes], content])

        return launch

    with monkeypatch.context() as patch:
        patch.setattr(driver, "processors", lambda device: 132)
        patch.setattr(driver, "tensor_map", driver.tensor_map.__wrapped__)
        patch.setattr(program, "_loaded", program._loaded.__wrapped__)
        for module in (program, wgmma):
            patch.setattr(module, "loaded", loaded)
        patch.setattr(wgmma, "_workspace", lambda *_: workspace)
        patch.setattr(wgmma, "_prepare", wgmma._prepare.__wrapped__)
        for module in (mma_tiles, wgmma):
            patch.setattr(module, "Device", SimpleNamespace(of=lambda x: x.device))
        written = ("c", "squares", "q", "qt", "scale", "scale_t")
        registry.get_kernel("gemm", kernel).launch(
            problem,
            config,
            {name: x for name, x in tensors.items() if name not in written},
            {name: x for name, x in tensors.items() if name in written},
        )
    return found[0]


def tensors_of(plan, problem):
    """The function's, each at an address of its own."""
    return {
        p.name: tensor((i + 1) << 20, *(*p.sizes(plan.sizes(problem)), 1, 1)[:2], p.dtype.itemsize)
        for i, p in enumerate(plan.signature.parameters)
    }


def pointers(tensors):
    return [x.data_ptr() for x in tensors.values()]


@needs_gcc
@pytest.mark.parametrize("kernel", ["wgmma", "mma"])
def test_host_code_launches_what_the_workbench_does(kernel, stand_in, tmp_path, monkeypatch):
    """Grid, shared memory and every byte of the argument, at many sizes."""
    draw = random.Random(7)
    monkeypatch.setattr(driver, "_libcuda", lambda: CDLL(str(stand_in / "libcuda.so.1")))
    calls, wanted = [], []
    for number, case in enumerate(WGMMA if kernel == "wgmma" else MMA):
        plan = plan_of(kernel, case)
        folder = tmp_path / str(number)
        folder.mkdir()
        library = write_compiled(plan, folder, monkeypatch)
        assert compile_c(folder, f"../{number}.so", *library.c_sources) == ""
        for _ in range(20):
            # As long as rows stay as aligned, the tuned code is the workbench's for all sizes.
            sizes = {
                dim: (size - 1) % 16 + 1 + 16 * int(2 ** draw.uniform(0, 11))
                for dim, size in plan.sizes(plan.problem).items()
            }
            problem = plan.with_sizes(**sizes)
            tensors, config = tensors_of(plan, problem), case[1]
            workspace, pieces = 0, (None, None)
            if library.workspace:
                workspace = 12345 * 16
                pieces = tensor(workspace, 1, 1), tensor(workspace + host.FLAG_BYTES, 1, 1)
            expected = launched_by_python(kernel, problem, config, tensors, pieces, monkeypatch)
            size = len(expected[1]) // 2
            calls.append((f"{number}.so", size, pointers(tensors), list(sizes.values()), workspace))
            wanted.append([0, *expected])
            if workspace:
                flags, sums = wgmma.workspace_sizes(problem, config, host.MOST_PROCESSORS)
                assert 4 * flags <= host.FLAG_BYTES
                wanted[-1].append(host.FLAG_BYTES + 4 * sums)
    assert called(stand_in, tmp_path, calls) == wanted


@needs_gcc
def test_what_the_contract_excludes_is_refused(stand_in, tmp_path, monkeypatch):
    plan = plan_of("wgmma", WGMMA[3])
    library = write_compiled(plan, tmp_path, monkeypatch)
    compile_c(tmp_path, "gemm.so", *library.c_sources)
    good = pointers(tensors_of(plan, plan.problem))
    names = [p.name for p in plan.signature.parameters]

    def at(name, offset):
        return [x + offset * (n == name) for n, x in zip(names, good, strict=True)]

    cases = [
        (good, (4096, 4096, 4096), 0),
        (good, (16, 16, 16), 0),
        (good, (1 << 30, 16, 16), 0),
        *(
            (good, sizes, 1)
            for sizes in (
                (0, 16, 16),
                (16, -16, 16),
                (16, 16, 0),
                (8, 16, 16),
                (16, 24, 16),
                (16, 16, 8),
                ((1 << 30) + 16, 16, 16),
                (1 << 29, 1 << 20, 16),
            )
        ),
        *((at(name, 8), (16, 16, 16), 2) for name in ("a", "b", "q", "qt")),
        *((at(name, 4), (16, 16, 16), 0) for name in ("a_scale", "b_scale", "scale", "scale_t")),
    ]
    found = called(stand_in, tmp_path, [("gemm.so", 640, p, s, 0) for p, s, _ in cases])
    assert [code for code, *_ in found] == [code for *_, code in cases]
    # Nothing is launched of what is refused.
    assert all((launch[0] > 0) == (code == 0) for code, launch, _ in found)


@needs_gcc
def test_another_gpu_is_refused(stand_in, tmp_path, monkeypatch):
    plan = plan_of("mma", MMA[0], capability=(8, 0))
    library = write_compiled(plan, tmp_path, monkeypatch)
    assert library.architecture == "80"
    compile_c(tmp_path, "gemm.so", *library.c_sources)
    tensors = tensors_of(plan, plan.problem)
    calls = [("gemm.so", 136, pointers(tensors), (4096, 4096, 4096), 0)] * 2
    assert [code for code, *_ in called(stand_in, tmp_path, calls)] == [3, 3]


@needs_gcc
def test_of_several_configs_the_nearest_is_chosen(stand_in, tmp_path, monkeypatch):
    stream = WgmmaConfig(2, tile_n=64, stages=7, stream=True, schedule="telescoped")
    sums = {"out": "fp32", "accumulate": True}
    tuned = [
        ((512, 512, 8192), stream),
        ((8192, 8192, 8192), WgmmaConfig(3)),
        ((8192, 512, 512), WgmmaConfig(1)),
        ((8192, 1024, 512), WgmmaConfig(1)),
    ]
    plan = plan_of("wgmma", *((fields(*sizes, **sums), config) for sizes, config in tuned))
    library = write_compiled(plan, tmp_path, monkeypatch)
    assert {name for name in library.files if name.endswith(".c")} == {
        "a_gemm.c",
        "a_gemm_512x512x8192.c",
        "a_gemm_8192x8192x8192.c",
        "a_gemm_8192x512x512.c",
        "a_gemm_code.c",
    }
    assert compile_c(tmp_path, "gemm.so", *library.c_sources) == ""
    cases = [
        ((512, 512, 8192), 2, True),
        ((8192, 8192, 8192), 3, False),
        ((8192, 512, 512), 1, False),
        ((8192, 1024, 512), 1, False),
        ((768, 512, 16384), 2, True),
        ((1024, 64, 64), 1, False),
        ((16384, 16384, 4096), 3, False),
        ((16384, 700, 256), 1, False),
    ]
    calls = [
        ("gemm.so", 640, pointers(tensors_of(plan, plan.problem)), sizes, 160)
        for sizes, *_ in cases
    ]
    for (sizes, groups, streams), (code, launch, _, size) in zip(
        cases, called(stand_in, tmp_path, calls), strict=True
    ):
        assert (code, launch[1]) == (0, 128 * (groups + 1)), sizes
        assert (size > 0) == streams
    # The same choice among sources in CUDA C++.
    sources = cuda.library(plan)
    chosen = [
        files[name].partition(b'#include "a_gemm_configs.h"')[2].partition(b"// CUDA's own")[0]
        for files, name in ((sources.files, "a_gemm.cu"), (library.files, "a_gemm.c"))
    ]
    assert chosen[0] == chosen[1] != b""
    assert set(sources.cuda_sources) == {
        n.replace(".c", ".cu") for n in library.files if n.endswith(".c") and "code" not in n
    }
