"""CUDA sources of ours, built for the host: tests/fakes/cuda.cuh stands for CUDA."""

import contextlib
import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from jetfire.kernels_cuda import block_gemm
from jetfire.kernels_cuda import driver as cuda
from jetfire.kernels_cuda.compile import ROOT

FAKES = Path(__file__).parent / "fakes"
# What stands for inline assembly.
STAND_INS = {
    r'asm\("max\.NaN.*?"f"\(b\)\);': "most = fake_max_nan(a, b);",
    r'asm\("rcp\.approx.*?\(m\)\);': "y = fake_reciprocal(m);",
    r'asm\("\{\\n\.reg \.b64 product.*?"r"\(b\)\);': (
        "low = uint64_t(a) * b, high = uint64_t(a) * b >> 32;"
    ),
    r'asm\("\{\\n\.reg \.s32 a, b.*?"f"\(high\)\);': (
        "codes = uint8_t(fake_code(low)) | uint8_t(fake_code(high)) << 8;"
    ),
}
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


FLAGS = (
    *("-std=c++20", "-O1", "-w", "-ffp-contract=off", "-frounding-math", "-fPIC", "-pthread"),
    "-D__CUDA_ARCH__=900",
)


def _compile(folder, *words):
    command = ["g++", *FLAGS, *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _standard(folder):
    """The standard library's headers, compiled once per folder: half of what a kernel takes."""
    header = folder / "standard.h"
    if not header.exists():
        lines = (FAKES / "cuda.cuh").read_text().splitlines(keepends=True)
        header.write_text("".join(line for line in lines if line.startswith("#include <")))
        _compile(folder, "-x", "c++-header", header, "-o", f"{header}.gch")
    return header


def built(folder, program, driver):
    """The library of a kernel by blocks, from its own sources and a driver that includes them."""
    for header in ROOT.glob("*.cuh"):
        shutil.copy(header, folder)
    quantize = (ROOT / "quantize.cuh").read_text()
    for assembly, text in STAND_INS.items():
        quantize, found = re.subn(assembly, text, quantize, flags=re.DOTALL)
        assert found == 1, assembly
    (folder / "quantize.cuh").write_text(quantize)
    for name in ("ptx.cuh", "ptx_sm80.cuh", "ptx_transposed.cuh"):
        shutil.copy(FAKES / "cuda.cuh", folder / name)
    for file in (program.source, FAKES / "launch.cuh", FAKES / driver):
        shutil.copy(file, folder)
    constants = program.header[: program.header.index("__device__")]
    (folder / "config.cuh").write_text(f'#pragma once\n#include "ptx.cuh"\n{constants}')
    first = ("-include", _standard(folder.parent))
    _compile(folder, *first, "-shared", "-x", "c++", driver, "-o", "kernel.so")
    return ctypes.CDLL(str(folder / "kernel.so"))


def libraries(factory, driver):
    """Return a function from a program to its library, built once, by pytest's `factory`."""
    found = {}

    def library(program):
        if program.header not in found:
            found[program.header] = built(factory.mktemp("kernel"), program, driver)
        return found[program.header]

    return library


@contextlib.contextmanager
def launches_here(module, library):
    """Have the module of a kernel by blocks launch it here, as on a GPU of two multiprocessors.

    Args:
        library: a function from a program to its library, whose driver has `launch`.
    """

    def tensor_map(at, dtype, rows, columns, pitch, box_rows, box_columns):
        sizes = rows, columns, box_rows, box_columns, cuda.ELEMENT_BYTES[dtype]
        return struct.pack("<Q5i4xq", at, *sizes, pitch).ljust(128, b"\0")

    def loaded(program, _):
        def run(blocks, threads, arguments):
            assert threads == 32 * program.warps
            library(program).launch(blocks, arguments[0].tobytes())

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "tensor_map", tensor_map)
        patch.setattr(cuda, "processors", lambda _: 2)
        patch.setattr(module, "loaded", loaded)
        patch.setattr(block_gemm, "readable", lambda _: True)
        module._prepare.cache_clear()
        yield
    module._prepare.cache_clear()
