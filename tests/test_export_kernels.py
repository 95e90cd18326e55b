"""CUDA kernels of the INT4 GEMM, both Hadamard quantisers, GELU and bit splitting as exports:
several kernels per launch, scratch memory, host code that computes what Python's does."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.core.machine_code import audit
from jetfire.core.profiles import Entry
from jetfire.export import cuda, flatten, samples
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.target import cuda_home
from jetfire.export.targets.c_library import TARGET
from jetfire.kernels_cuda import (
    bit_split_codes,
    driver,
    hadamard_quantize_codes,
    mma_tiles,
    program,
    tiles,
)
from jetfire.kernels_cuda import compile as compiler
from jetfire.kernels_cuda.bit_split_codes import RowsConfig as SplitConfig
from jetfire.kernels_cuda.hadamard_quantize import rows
from jetfire.kernels_cuda.hadamard_rows import RowsConfig
from jetfire.kernels_cuda.int4_gemm import wgmma
from jetfire.kernels_cuda.int4_gemm.config import WgmmaConfig
from jetfire.kernels_cuda.int4_gemm.mma import MmaConfig
from jetfire.kernels_cuda.tiles import PartsConfig
from jetfire.tests.audited import alone

FAKES = Path(__file__).parent / "fakes"
CC = ("gcc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
NAME = "a_kernel"
STREAM, WORKSPACE = 0x5EED0, 0x7F0000000000
UNKNOWN = 4 + 999  # the code of CUDA_ERROR_UNKNOWN


def plan_of(op, kernel, *cases, capability=(9, 0)):
    """A plan for some (fields, config), as if they had been tuned."""
    tuned = []
    for fields, config in cases:
        problem = registry.get(op).Problem(**fields)
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
    return ExportPlan(NAME, registry.get(op), registry.get_kernel(op, kernel), device, tuple(tuned))


def gemm(m=1024, n=768, k=4096, **others):
    return {"m": m, "n": n, "k": k, **others}


def wide(product="fwd", **others):
    return gemm(operands="wide", product=product, **others)


def columns(m=1024, n=2048, **others):
    return {"m": m, "n": n, **others}


# Every branch of the host code's templates.
CASES = [
    ("int4_gemm", "wgmma", gemm(k=4090), WgmmaConfig(2, 2, 128, cluster_m=1, cluster_n=2)),
    (
        "int4_gemm",
        "wgmma",
        gemm(n=771, k=4094, bias=True, out="fp16"),
        WgmmaConfig(1, 1, 64, 3, cluster_m=1, split=2),
    ),
    ("int4_gemm", "wgmma", wide(out="fp32"), WgmmaConfig(3, 1, 192)),
    ("int4_gemm", "wgmma", wide("dgrad", n=771), WgmmaConfig(1, tile_n=96, cluster_m=1)),
    (
        "int4_gemm",
        "wgmma",
        wide("wgrad", n=771, out="fp32"),
        WgmmaConfig(1, 1, 96, 8, cluster_m=1, raster=32, split=4),
    ),
    ("int4_gemm", "mma", gemm(bias=True), MmaConfig()),
    ("int4_gemm", "mma", gemm(k=4088), MmaConfig(tile_n=256)),
    ("int4_gemm", "mma", wide("dgrad", n=771, k=4086, out="fp32"), MmaConfig(64, 64, 2, 2)),
    ("int4_gemm", "mma", wide("wgrad"), MmaConfig(64, 64, 2, 2)),
    ("hadamard_quantize", "rows", columns(), RowsConfig()),
    (
        "hadamard_quantize",
        "rows",
        columns(n=2056, group=8, dtype="fp16", layout="both"),
        RowsConfig(16, 2, 16),
    ),
    (
        "hadamard_quantize",
        "rows",
        columns(n=2050, group=1, dtype="fp32", layout="wide"),
        RowsConfig(8, 2, 16, blocks=2),
    ),
    ("hadamard_quantize", "rows", columns(mode="bwd"), RowsConfig(8, 2)),
    (
        "hadamard_quantize",
        "rows",
        columns(mode="bwd", given="x", dtype="fp32"),
        RowsConfig(8, 1, 32, 2, 1),
    ),
    ("gelu", "tiles", columns(), PartsConfig(8, 2, 4)),
    (
        "gelu",
        "tiles",
        columns(mode="bwd", rounding="stochastic", layout="both", out_block=128),
        PartsConfig(),
    ),
    (
        "gelu",
        "tiles",
        columns(1023, 2055, approximate="erf", block=64, layout="qt"),
        PartsConfig(16, 3, 2),
    ),
    ("gelu", "tiles", columns(1022, 2056, mode="bwd"), PartsConfig(8, 2, 3)),
    (
        "int4_gemm",
        "wgmma",
        wide(out="int8", out_block=64, bias=True),
        WgmmaConfig(3, 1, 192, 4, cluster_m=1),
    ),
    ("int4_gemm", "mma", gemm(out="int8", n=771), MmaConfig()),
    (
        "hadamard_quantize",
        "rows",
        columns(mode="bwd", out="int8", out_block=64, rounding="stochastic"),
        RowsConfig(16, 1, 8, 16, 2),
    ),
    (
        "hadamard_quantize",
        "rows",
        columns(n=2050, group=2, mode="bwd", out="int8"),
        RowsConfig(8, 2, 8, 8, 1),
    ),
    (
        "hadamard_quantize",
        "rows",
        columns(n=2056, group=8, mode="bwd", given="wide", dtype="fp32"),
        RowsConfig(8, 2, 32, 4, 6),
    ),
    ("bit_split_codes", "rows", columns(sums=True), SplitConfig(8, 2, 8)),
    ("bit_split_codes", "rows", columns(bits=4, block=128), SplitConfig(4, 4, 32)),
    (
        "bit_split_codes",
        "rows",
        columns(1021, 2054, bits=4, block=64, sums=True),
        SplitConfig(2, 1, 4),
    ),
    ("bit_split_codes", "rows", columns(1021, 2050, block=64), SplitConfig()),
    ("hadamard_quantize_codes", "rows", columns(), RowsConfig(32, 1, 16, 16, 2)),
    (
        "hadamard_quantize_codes",
        "rows",
        columns(n=2056, block=64, group=8, layout="both"),
        RowsConfig(16, 2, 16, 8, 4),
    ),
    (
        "hadamard_quantize_codes",
        "rows",
        columns(n=2050, group=1, layout="wide"),
        RowsConfig(8, 4, 32, 2, 4, prefetch=False),
    ),
    (
        "hadamard_quantize_codes",
        "rows",
        columns(block=128, group=64, layout="both"),
        RowsConfig(16, 2, 32, 2, 8),
    ),
]


def name_of(case):
    return f"{case[0]}-{case[1]}-{CASES.index(case)}"


every = pytest.mark.parametrize("case", CASES, ids=name_of)


def plan_for(case):
    op, kernel, *tuned = case
    return plan_of(op, kernel, tuned)


def source_of(case):
    return cuda.library(plan_for(case)).files[f"{NAME}.cu"].decode()


# --- text ----------------------------------------------------------------------------------------


@every
def test_a_source_stands_alone_and_reads_well(case):
    plan = plan_for(case)
    assert plan.kernel.legal(plan.problem, case[-1], plan.device) is None
    text = source_of(case)
    assert re.findall(r'#include "(.*)"', text) == [f"{NAME}.h"]
    assert not re.search(r"#pragma once|EXPECTED_SHARED|using u?int\d+_t", text)
    assert [line for line in text.splitlines() if len(line) > 103] == []
    assert "\n\n\n" not in text
    assert not re.search(r"[ \t]\n", text)
    assert text.endswith("}\n")


@every
def test_every_constant_is_said_with_what_it_means(case):
    plan = plan_for(case)
    codes = cuda.host_of(plan.kernel).codes(plan.problem, plan.tuned[0].config)
    wanted = []
    for code in codes:
        wanted += [
            (kind, name, ("false", "true")[int(value)] if kind == "bool" else value)
            for kind, name, value in re.findall(
                r"^constexpr (\w+) (\w+) = (\d+);", code.header, re.M
            )
            if not name.startswith("EXPECTED")
        ]
        defined = flatten.read(code.source).defined  # by the source, for the headers it includes
        wanted += [("int", name, str(value)) for name, value in defined.items()]
    said = "\n".join(re.findall(r"// === This config =+\n\n(.*?)\n\n", source_of(case), re.DOTALL))
    assert re.findall(r"^constexpr (\w+) (\w+) = (\w+); +// \w", said, re.MULTILINE) == wanted


def test_several_kernels_are_each_in_a_namespace_that_no_other_file_sees():
    text = source_of(CASES[1])
    assert re.findall(r"^namespace.*|^__global__.*", text, re.MULTILINE) == [
        "namespace unpack_kernel {",
        "namespace {",
        "__global__ void unpack(uint4* to, const uint8_t* from, int rows, int bytes,",
        "namespace gemm_kernel {",
        "namespace {",
        "__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)",
        "namespace reduce_kernel {",
        "namespace {",
        "__global__ void reduce(const int* raw, int pitch, int slab, const Epilogue to) {",
    ]
    assert "\n                       int64_t pitch) {" in text  # hangs below the first parameter
    assert re.findall(r"^// (\w+):$", text, re.MULTILINE) == ["unpack", "gemm", "reduce"]


def test_what_the_contract_asks_of_sizes_and_says_of_tensors():
    def contract(number):
        return cuda.library(plan_for(CASES[number])).contract

    asked = "Sizes: up to 2^30, {}; any that keep to this will do."
    packed = "Codes lie two in a byte of a and b, the first in its low half."
    assert contract(0) == (
        "The addresses of a, b, c and workspace are multiples of 16.",
        asked.format("n a multiple of 8, k a multiple of 2 and at most 131071"),
        packed,
    )
    assert contract(1)[1] == asked.format("k a multiple of 2 and at most 131071")
    assert contract(2)[:2] == (
        "The addresses of a, b and c are multiples of 16.",
        asked.format("n a multiple of 4, k a multiple of 16 and at most 131071"),
    )
    assert "counts[1] on may hold anything" in contract(3)[-1]
    assert contract(4)[1] == asked.format("k a multiple of 16 and at most 171196")
    assert "multiples of 128" in contract(4)[-1]
    assert "n a multiple of 8, k a multiple of 32 and" in contract(5)[1]
    assert "n a multiple of 8, k a multiple of 8 and" in contract(6)[1]
    assert "up to 2^30, k a multiple of 2 and" in contract(7)[1]
    assert contract(9)[:3] == (
        "The addresses of x and q are multiples of 16.",
        asked.format("n a multiple of 32 and at most 16777216"),
        "q holds two codes per byte, the first in its low half.",
    )
    assert "n a multiple of 8 and" in contract(10)[1]
    assert "n a multiple of 2 and" in contract(11)[1]
    assert contract(12)[0] == "The addresses of dx_hat, q and dx are multiples of 16."
    assert "dstep is the step's" in contract(13)[-1]
    assert contract(14) == (
        "The addresses of x and q are multiples of 16.",
        asked.format("m a multiple of 4, n a multiple of 16"),
    )
    assert contract(15)[0] == "The addresses of x, dy, q and qt are multiples of 16."
    assert contract(16)[1] == "Sizes: any up to 2^30."
    assert contract(17)[1] == asked.format("n a multiple of 8")
    assert contract(23)[:3] == (
        "The addresses of q, parts and workspace are multiples of 16.",
        asked.format("n a multiple of 16, m at most 16777216"),
        "parts holds two codes per byte, the first in its low half: m rows of high parts, then m "
        "of low ones.",
    )
    assert contract(24)[1:3] == (
        asked.format("n a multiple of 16"),
        "parts holds two codes per byte, the first in its low half.",
    )
    assert contract(25)[1] == asked.format("n a multiple of 2, m at most 16777216")
    assert contract(26)[1] == asked.format("n a multiple of 2")
    assert contract(27) == (
        "The addresses of q and packed are multiples of 16.",
        asked.format("n a multiple of 32 and at most 16777216"),
        "packed holds two codes per byte, the first in its low half.",
        "unit is the step, NaN where a scale is not finite or the step not finite and above 0; "
        "squares are, row by row, the sums of the codes' squares.",
    )
    assert contract(28)[0] == "The addresses of q, packed and wide are multiples of 16."
    assert "n a multiple of 8 and" in contract(28)[1]
    assert "n a multiple of 2 and" in contract(29)[1]
    assert "one code per byte" in contract(29)[2]
    assert "n a multiple of 64 and" in contract(30)[1]


def test_scratch_memory_may_hold_anything_counters_must_be_zeros():
    for number, zeros in ((0, False), (1, False), (9, True), (23, True), (24, True), (27, True)):
        library = cuda.library(plan_for(CASES[number]))
        header = library.files[f"{NAME}.h"].decode()
        assert (library.workspace, library.zeros) == (True, zeros)
        assert ("must be all zeros" in header, "it may hold anything" in header) == (
            zeros,
            not zeros,
        )
        plan = plan_for(CASES[number])
        files = TARGET.files(plan, library, samples.record(plan))
        assert ("cudaMemset" in files["README.md"].decode()) == zeros


def test_what_the_function_cannot_say_is_refused():
    gathered = columns(mode="bwd", gathered=True)
    with pytest.raises(UsageError, match=r"dx_hat: its size is no simple function of m, n"):
        cuda.library(plan_of("hadamard_quantize", "rows", (gathered, RowsConfig(8, 2))))
    odd = wide(k=4090), WgmmaConfig()
    with pytest.raises(UsageError, match="k=4090: an exported one takes multiples of 16"):
        cuda.library(plan_of("int4_gemm", "wgmma", odd))


@needs_gcc
def test_a_self_test_compares_what_must_be_written(tmp_path):
    """Of an input's gradient the rows that counts say; of other outputs all."""
    plan = plan_for(CASES[3])
    sample = samples.record(plan)
    end = int(sample.inputs["counts"][1])
    assert 0 < end < sample.problem.m
    files = TARGET.files(plan, cuda.library(plan), sample)
    for name, content in files.items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    assert f"{{{end}, 336, 0}},  // c\n" in files["manifest.h"].decode()
    subprocess.run(
        [*CC[:-2], "-fsyntax-only", f"-I{cuda_home()}/include", "selftest.c"],
        cwd=tmp_path,
        check=True,
    )
    whole = plan_for(CASES[4])
    sample = samples.record(whole)
    text = TARGET.files(whole, cuda.library(whole), sample)["manifest.h"].decode()
    assert f"{{{sample.problem.m}, {sample.problem.n}, " in text


# --- the program ---------------------------------------------------------------------------------


def nvrtc_missing():
    try:
        compiler._nvrtc_version()
    except UsageError as error:
        return str(error)
    return None


def instructions(found):
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", found.sass, re.MULTILINE)


@pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))
@pytest.mark.parametrize(
    ("case", "names"),
    [
        (CASES[1], {"unpack"}),
        (CASES[13], {"backward"}),
        (CASES[15], {"tiles"}),
        (CASES[23], {"largest", "rows"}),
        (CASES[26], {"largest", "rows"}),
        (CASES[27], {"forward_codes"}),
        (CASES[28], {"forward_codes"}),
    ],
    ids=[
        "int4_gemm",
        "hadamard_quantize",
        "gelu",
        "bit_split_codes",
        "of bytes",
        "codes-packed",
        "codes-both",
    ],
)
def test_the_flattened_source_is_the_same_program(case, names, tmp_path, monkeypatch):
    """By the same compiler: instruction by instruction what the workbench launches.

    Of the kernels that compile fast; test_export_cuda has others.
    """
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    plan = plan_for(case)
    bodies = [part.split("}  // namespace\n")[0] for part in source_of(case).split("namespace {\n")]
    codes = cuda.host_of(plan.kernel).codes(plan.problem, case[-1])
    types = "".join(
        line + "\n"
        for line in (compiler.ROOT / "ptx.cuh").read_text().splitlines()
        if line.startswith("using ")
    )
    architecture = f"sm_{cuda.library(plan).architecture}"

    def compiled(source, header):
        code = compiler.compile_cubin(source, header, architecture)
        return instructions(audit(alone(code)))

    for body, code in zip(bodies[1:], codes, strict=True):
        if code.name in names:
            flat = tmp_path / "flat.cu"
            flat.write_text(types + body.replace("__global__ void", 'extern "C" __global__ void'))
            assert compiled(flat, "") == compiled(code.source, code.header)


def compiled_by_nvcc(case, folder, form):
    """What nvcc says of the export, of which it makes an object or a cubin."""
    library = cuda.library(plan_for(case))
    for name, content in library.files.items():
        (folder / name).write_bytes(content)
    architecture = library.architecture
    done = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-O3",
            "-Xcompiler",
            "-Wall,-Wextra",
            "-gencode",
            f"arch=compute_{architecture},code=sm_{architecture}",
            form,
            f"{NAME}.cu",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("number", [1, 23, 24, 25, 26])
def test_nvcc_takes_several_kernels_in_one_source(number, tmp_path):
    assert compiled_by_nvcc(CASES[number], tmp_path, "-c") == (0, "")


@needs_nvcc
@pytest.mark.parametrize("number", [14, 15, 16, 17])
def test_gelu_by_nvcc_spills_nothing_with_as_many_blocks_as_fit(number, tmp_path):
    assert compiled_by_nvcc(CASES[number], tmp_path, "-cubin") == (0, "")
    found = audit(alone((tmp_path / f"{NAME}.cubin").read_bytes()))
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers
    assert ("UTMALDG" in found.instructions) == (number < 16)


@needs_nvcc
@pytest.mark.parametrize("number", [27, 28, 29, 30])
def test_the_quantiser_of_codes_by_nvcc_spills_nothing(number, tmp_path):
    assert compiled_by_nvcc(CASES[number], tmp_path, "-cubin") == (0, "")
    found = audit(alone((tmp_path / f"{NAME}.cubin").read_bytes()))
    assert (found.spills, found.stack_bytes) == (0, 0), found.registers


# --- host code -----------------------------------------------------------------------------------

# Bytes of each kernel's parameters.
PARAMETERS = {
    "unpack": (8, 8, 4, 4, 8),
    "gemm": (512,),
    "reduce": (8, 4, 4, 56),
    "int4_gemm": (104,),
    "forward": (72,),
    "backward": (88,),
    "backward_codes": (88,),
    "forward_codes": (88,),
    "tiles": (384,),
    "largest": (96,),
    "rows": (96,),
}
ELF = b"\x7fELF"


@pytest.fixture(scope="module")
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


def compile_c(plan, folder, monkeypatch):
    """The export as a library, with something else for the machine code."""
    monkeypatch.setattr(cuda, "compile_cubin", lambda *_: ELF)
    library = cuda.compiled_library(plan)
    for name, content in library.files.items():
        (folder / name).write_bytes(content)
    include = f"-I{cuda_home()}/include"
    subprocess.run([*CC, include, "-o", "it.so", *library.c_sources], cwd=folder, check=True)
    return library


def kernels_in(library):
    """The kernels' names in the order of their numbers."""
    header = library.files[f"{NAME}_code.h"].decode()
    names = re.findall(rf"char {NAME}_(\w+)\[", header)
    return [re.sub(r"_\d+x.*", "", name) for name in names]


def called(fake_driver, folder, library, calls, function=NAME, **environment):
    """Codes that calls returned, and the lines of maps and launches, call by call."""
    kernels = [{"bytes": len(ELF), "parameters": PARAMETERS[name]} for name in kernels_in(library)]
    request = {
        "library": str(folder / "it.so"),
        "function": function,
        "calls": calls,
        "threads": 1,
        "driver": str(fake_driver),
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
    found, lines = [], []
    for line in done.stdout.splitlines():
        if line.startswith("code "):
            found.append((int(line[5:]), lines))
            lines = []
        elif line.startswith(("map ", "launch ")):
            lines.append(line)
    return found


def arguments_of(plan, library, problem, tensors, workspace=WORKSPACE):
    """Typed ones."""
    pointers = [["pointer", tensors[p.name].data_ptr()] for p in plan.signature.parameters]
    sizes = [["int", size] for size in plan.sizes(problem).values()]
    after = [["pointer", workspace]] if library.workspace else []
    return [*pointers, *sizes, *after, ["pointer", STREAM]]


class Memory:
    """Where what a launch allocates lies: one after another from `WORKSPACE` on."""

    def __init__(self):
        self.end = WORKSPACE

    def take(self, shape, dtype):
        shape = (shape, 1) if isinstance(shape, int) else shape
        start, size = self.end, shape[0] * shape[1] * dtype.itemsize
        self.end += -(-size // 256) * 256
        return self.tensor(start, shape, dtype)

    def tensor(self, address, shape, dtype):
        """What a launch asks of a contiguous one."""
        return SimpleNamespace(
            data_ptr=lambda: address,
            stride=lambda dim: (*shape, 1)[dim + 1],
            dtype=dtype,
            itemsize=dtype.itemsize,
            shape=shape,
            device=SimpleNamespace(index=0),
            new_empty=lambda shape: self.take(shape, dtype),
        )


def tensors_of(plan, problem, memory):
    """The function's, each at an address of its own."""
    return {
        p.name: memory.tensor((i + 1) << 20, p.sizes(plan.sizes(problem)), p.dtype)
        for i, p in enumerate(plan.signature.parameters)
    }


def launched_by_python(plan, problem, config, tensors, memory, monkeypatch):
    """The driver's lines for the workbench's own launch."""
    host = cuda.host_of(plan.kernel)
    codes = host.codes(problem, config)
    maps, launches = [], []
    # What must stay zeros comes first in a workspace.
    counters = host.zeros and host.workspace(problem, config) and memory.take(2, torch.int32)

    def function(program):
        asked = program.function, program.header
        numbers = [i for i, code in enumerate(codes) if (code.name, code.header) == asked]

        def launch(blocks, threads, arguments):
            (number,) = numbers
            content = " ".join(x.tobytes().hex() for x in arguments)
            launches.append(
                f"launch {number} {blocks} 1 1 {threads} 1 1 "
                f"{codes[number].shared_bytes} {STREAM} 1 {content}"
            )

        return launch

    def tensor_map(address, dtype, rows, columns, pitch, box_rows, box_columns):
        swizzle = driver.SWIZZLES[box_columns * driver.ELEMENT_BYTES[dtype]]
        maps.append(
            f"map {driver.DATA_TYPES[dtype]} 2 {address} 0 {swizzle} "
            f"{driver.PROMOTE_TO_256_BYTES} 0 {columns} {box_columns} 1 {rows} {box_rows} 1 {pitch}"
        )
        return b"\xab" * 128

    def empty(shape, dtype, device):
        return memory.take(shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "processors", lambda device: 132)
        patch.setattr(driver, "tensor_map", tensor_map)
        patch.setattr(torch, "empty", empty)
        patch.setattr(wgmma, "_prepare", wgmma._prepare.__wrapped__)
        patch.setattr(program, "_loaded", program._loaded.__wrapped__)
        for module in (program, wgmma):
            patch.setattr(module, "loaded", lambda program, device: function(program))
        for module in (bit_split_codes, hadamard_quantize_codes, rows):
            patch.setattr(module, "counters", lambda device, count: {2: counters}[count])
        for module in (bit_split_codes, hadamard_quantize_codes, mma_tiles, rows, tiles, wgmma):
            patch.setattr(module, "Device", SimpleNamespace(of=lambda x: x.device))
        roles = {p.name: p.role for p in plan.signature.parameters}
        plan.kernel.launch(
            problem,
            config,
            {name: x for name, x in tensors.items() if roles[name] == "input"},
            {name: x for name, x in tensors.items() if roles[name] == "output"},
        )
    return maps + launches


@needs_gcc
@every
def test_host_code_launches_what_the_workbench_does(case, fake_driver, tmp_path, monkeypatch):
    """Kernels, grids and every byte of their arguments, at many sizes."""
    draw = random.Random(7)
    plan, config = plan_for(case), case[-1]
    library = compile_c(plan, tmp_path, monkeypatch)
    calls, wanted, scratch = [], [], []
    for _ in range(12):
        # As long as rows stay as aligned, the tuned code is the workbench's for all sizes.
        sizes = {
            dim: (size - 1) % 64 + 1 + 64 * int(2 ** draw.uniform(0, 9))
            for dim, size in plan.sizes(plan.problem).items()
        }
        problem, memory = plan.with_sizes(**sizes), Memory()
        tensors = tensors_of(plan, problem, memory)
        wanted.append(launched_by_python(plan, problem, config, tensors, memory, monkeypatch))
        calls.append(arguments_of(plan, library, problem, tensors))
        scratch.append(memory.end - WORKSPACE)
    found = called(fake_driver, tmp_path, library, calls)
    assert [code for code, _ in found] == [0] * len(calls)
    for (_, lines), expected in zip(found, wanted, strict=True):
        assert lines == expected
    if library.workspace:
        sizes = [[x for x in call if x[0] == "int"] for call in calls]
        asked = called(fake_driver, tmp_path, library, sizes, f"{NAME}_workspace_bytes")
        # Counters, and totals of columns, are not rounded up.
        assert [-(-size // 256) * 256 for size, _ in asked] == scratch
    else:
        assert set(scratch) == {0}


REFUSED = [
    *((0, sizes, {}, 0) for sizes in ((16, 8, 2), (16, 8, 131070), (1 << 30, 8, 2))),
    *(
        (0, sizes, {}, 1)
        for sizes in (
            (16, 8, 131072),
            (16, 8, 3),
            (16, 4, 2),
            (0, 8, 2),
            (16, -8, 2),
            (16, 8, 0),
            (1 << 30, 128, 2),
            ((1 << 30) + 1, 8, 2),
        )
    ),
    *((0, (16, 8, 2), {name: 8}, 2) for name in ("a", "b", "c", "workspace")),
    (0, (16, 8, 2), {"a_scale": 4}, 0),
    (1, (16, 7, 2), {}, 0),
    (5, (1, 8, 32), {}, 0),
    (5, (1, 8, 16), {}, 1),
    (5, (1, 8, 131072), {}, 1),
    (5, (1 << 30, 1 << 20, 32), {}, 1),
    (9, (1, 32), {}, 0),
    (9, (1, 16), {}, 1),
    (9, (1, 1 << 24), {}, 0),
    (9, (1, 1 << 25), {}, 1),
    (9, (1, 32), {"q": 8}, 2),
    (9, (1, 32), {"squares": 4}, 0),
    *((15, sizes, {}, 0) for sizes in ((4, 16), (1 << 30, 1 << 30))),
    *(
        (15, sizes, {}, 1)
        for sizes in (
            (4, 8),
            (2, 16),
            (0, 16),
            (4, -16),
            ((1 << 30) + 4, 16),
            (4, (1 << 30) + 16),
        )
    ),
    *((15, (4, 16), {name: 8}, 2) for name in ("x", "dy", "q", "qt")),
    *((15, (4, 16), {name: 4}, 0) for name in ("x_scale", "dy_scale", "scale", "scale_t")),
    (16, (1, 1), {}, 0),
    (16, (1, 1), {"x": 1}, 2),
    (17, (1, 8), {}, 0),
    (17, (1, 9), {}, 1),
    *((23, sizes, {}, 0) for sizes in ((1, 16), (1 << 24, 16), (1, 1 << 30))),
    *(
        (23, sizes, {}, 1)
        for sizes in ((1, 8), (0, 16), (1, -16), ((1 << 24) + 1, 16), (1, (1 << 30) + 16))
    ),
    *((23, (1, 16), {name: 8}, 2) for name in ("q", "parts", "workspace")),
    *((23, (1, 16), {name: 4}, 0) for name in ("scale", "unit", "squares", "sums")),
    (24, (1 << 30, 16), {}, 0),
    (24, ((1 << 30) + 1, 16), {}, 1),
    (25, (1, 2), {}, 0),
    (25, (1, 1), {}, 1),
    (25, ((1 << 24) + 1, 2), {}, 1),
    (26, (1 << 30, 2), {}, 0),
    (26, (1, 2), {"parts": 8}, 2),
    *((27, sizes, {}, 0) for sizes in ((1, 32), (1 << 30, 1 << 24))),
    *(
        (27, sizes, {}, 1)
        for sizes in ((1, 16), (1, 48), (1, 1 << 25), (0, 32), (1, -32), ((1 << 30) + 1, 32))
    ),
    *((27, (1, 32), {name: 8}, 2) for name in ("q", "packed")),
    *((27, (1, 32), {name: 4}, 0) for name in ("scale", "step", "unit", "squares")),
    (28, (1, 8), {}, 0),
    (28, (1, 4), {}, 1),
    *((28, (1, 8), {name: 8}, 2) for name in ("q", "packed", "wide")),
    (29, (1, 2), {}, 0),
    (29, (1, 3), {}, 1),
    (29, (1, 2), {"wide": 1}, 2),
    (30, (1, 64), {}, 0),
    (30, (1, 32), {}, 1),
]


@needs_gcc
@pytest.mark.parametrize("number", sorted({number for number, *_ in REFUSED}))
def test_what_the_contract_excludes_is_refused(number, fake_driver, tmp_path, monkeypatch):
    plan = plan_for(CASES[number])
    library = compile_c(plan, tmp_path, monkeypatch)
    names = [p.name for p in plan.signature.parameters]
    cases = [case[1:] for case in REFUSED if case[0] == number]
    calls = []
    for sizes, offsets, _ in cases:
        pointers = [["pointer", ((i + 1) << 20) + offsets.get(x, 0)] for i, x in enumerate(names)]
        space = [["pointer", WORKSPACE + offsets.get("workspace", 0)]] if library.workspace else []
        calls.append([*pointers, *(["int", x] for x in sizes), *space, ["pointer", STREAM]])
    found = called(fake_driver, tmp_path, library, calls)
    assert [code for code, _ in found] == [code for *_, code in cases]
    # Nothing is launched of what is refused.
    assert [bool(lines) for _, lines in found] == [code == 0 for code, _ in found]


# Each template that maps matrices, and launches of one kernel and of several.
@needs_gcc
@pytest.mark.parametrize(
    ("number", "function", "launches"),
    [
        *((number, "cuTensorMapEncodeTiled", 0) for number in (1, 2, 14)),
        *((number, "cuKernelSetAttribute", 0) for number in (1, 2)),
        *((number, "cuLaunchKernel", 1) for number in (1, 2, 5, 9, 14, 23)),
    ],
)
def test_what_the_driver_refuses_first_ends_the_call_with_its_error(
    number, function, launches, fake_driver, tmp_path, monkeypatch
):
    plan = plan_for(CASES[number])
    library = compile_c(plan, tmp_path, monkeypatch)
    call = arguments_of(plan, library, plan.problem, tensors_of(plan, plan.problem, Memory()))
    ((code, lines),) = called(fake_driver, tmp_path, library, [call], FAKE_FAILURE=function)
    assert code == UNKNOWN
    assert sum(line.startswith("launch ") for line in lines) == launches


@needs_gcc
def test_of_several_configs_only_some_need_scratch_memory(fake_driver, tmp_path, monkeypatch):
    small = {"out": "fp32", "operands": "wide", "product": "wgrad"}
    plan = plan_of(
        "int4_gemm",
        "wgmma",
        (gemm(256, 256, 8192, **small), WgmmaConfig(1, 1, 64, cluster_m=1, split=4)),
        (gemm(8192, 8192, 8192, **small), WgmmaConfig(3, 1, 192, 3)),
    )
    library = compile_c(plan, tmp_path, monkeypatch)
    assert kernels_in(library) == ["gemm", "reduce", "gemm"]
    calls = [
        arguments_of(plan, library, problem, tensors_of(plan, problem, Memory()), workspace)
        for problem, workspace in zip(
            (plan.with_sizes(m=m, n=n, k=4096) for m, n in ((256, 512), (8192, 4096))),
            (WORKSPACE, None),
            strict=True,
        )
    ]
    found = called(fake_driver, tmp_path, library, calls)
    launches = [[line.split()[1] for line in lines if line[0] == "l"] for _, lines in found]
    assert ([code for code, _ in found], launches) == ([0, 0], [["0", "1"], ["2"]])
    sizes = [[x for x in call if x[0] == "int"] for call in calls]
    asked = called(fake_driver, tmp_path, library, sizes, f"{NAME}_workspace_bytes")
    assert [size for size, _ in asked] == [4 * 256 * 512 * 4, 0]
    source = cuda.library(plan).files[f"{NAME}_8192x8192x8192.cu"].decode()
    assert "(void)workspace;  // this config needs none" in source
