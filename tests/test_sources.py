"""What a kernel has a device run: found in its sources, and hashed for its profiles."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import triton.language as tl

from jetfire.core import registry, sources

TRITON = '''"""A module."""
import triton
import triton.language as tl
from jetfire.kernels_triton import common
from jetfire.kernels_triton.tiles import load_tile, store_tile as store

def _asm(name, width=8):
    return f"{name!r:>{width}} {{}}" + "  x # y"

LOOPS, ASM = tl.constexpr(3), tl.constexpr(_asm("s"))  # as many as there are
GRID = 4

@triton.jit
def twice(x):
    """A function."""
    return x * 2.0

@triton.jit(do_not_specialize=["N"])
def kernel(x_ptr, N, C: tl.constexpr):
    x = twice(load_tile(x_ptr, 0, 0, 1, N, N, 1, C))
    for _ in tl.static_range(LOOPS):
        x = common.divide(x, tl.inline_asm_elementwise(ASM, "=f,f", [x], tl.float32, True, 1))
    store(x_ptr, x, 0, 0, 1, N, N)

def run(tile):
    kernel[(GRID,)](None, 1, C=tile)

class Toy:
    def launch(self):
        run(8)
'''
CUDA = """// A kernel.
#include "a.cuh"
__global__ void f(int* x) { x[0] = 1 /* one */ + 2; printf("// %d\\n", x[0]); }
"""
HOST = """from pathlib import Path
SOURCE = Path(__file__).parent / "a.cu"

def wrapper(n):
    return f"__device__ int wide[{n}];"

class Toy:
    def launch(self):
        return SOURCE, wrapper(2), 3
"""
CPU = """from jetfire.reference.quantize import quantize

def doubled(x):
    return 2 * x

class Base:
    def launch(self, x):
        return quantize(doubled(x), self.block)

class Toy(Base):
    block = 32
"""
ALONE = '''class Toy:
    """A kernel."""
    def launch(self, a: int, *, b=None):
        return f"{a!r:>{b}} {{}}" + "  x # y" if a else (-1.5e-3, [...], b"z")
'''


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Hash a kernel of these files, of which a.py has its class."""

    def call(files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        spec = importlib.util.spec_from_file_location(f"toy_{folder.name}", folder / "a.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return sources.digest(module.Toy.__mro__[:-1])

    return call


KERNELS = {
    "triton": {"a.py": TRITON},
    "cuda": {"a.py": HOST, "a.cu": CUDA, "a.cuh": "int x;", "b.cuh": "int y;"},
    "cpu": {"a.py": CPU},
}


def test_a_hash_is_the_same_under_every_python(hashed):
    assert hashed({"a.py": ALONE}) == "74f27747fed2"
    assert hashed(KERNELS["cuda"]) == "69d7842d0f1e"


@pytest.mark.parametrize(
    ("kernel", "file", "old", "new", "same"),
    [
        ("triton", "a.py", "# as many", "# so many", True),
        ("triton", "a.py", '"""A function."""', '"""Another."""', True),
        ("triton", "a.py", "x_ptr, N, C:", "x_ptr,\n  N,  C :", True),
        ("triton", "a.py", "import triton\n", "import json\nimport triton\n", True),
        ("triton", "a.py", "GRID = 4", "GRID = 5", True),
        ("triton", "a.py", "run(8)", "run(16)", True),
        ("triton", "a.py", "class Toy:", "def other(x):\n    return x\n\nclass Toy:", True),
        (
            "triton",
            "a.py",
            "class Toy:",
            "@triton.jit\ndef other(x):\n    return x\n\nclass Toy:",
            True,
        ),
        ("triton", "a.py", "constexpr(3)", "constexpr(4)", False),
        ("triton", "a.py", "# y", "# z", False),
        ("triton", "a.py", "width=8", "width=9", False),
        ("triton", "a.py", '_asm("s")', '_asm("t")', False),
        ("triton", "a.py", "x * 2.0", "x * 3.0", False),
        ("triton", "a.py", "common.divide", "common.max_nan", False),
        ("triton", "a.py", "C: tl.constexpr", "C", False),
        ("triton", "a.py", '=["N"]', '=["x_ptr"]', False),
        ("cuda", "a.cu", "A kernel", "Another", True),
        ("cuda", "a.cu", "/* one */ + 2", "+\n  2", True),
        ("cuda", "b.cuh", "y", "z", True),
        ("cuda", "a.py", "wrapper(2), 3", "wrapper(4), 5", True),
        ("cuda", "a.cu", "// %d", "//%d", False),
        ("cuda", "a.cu", "= 1", "= 3", False),
        ("cuda", "a.cu", "a.cuh", "b.cuh", False),
        ("cuda", "a.cuh", "x", "y", False),
        ("cuda", "a.py", "int wide", "char wide", False),
        ("cpu", "a.py", "2 * x", "x + x", False),
        ("cpu", "a.py", "block = 32", "block = 64", False),
        ("cpu", "a.py", "class Base", "import json\n\nclass Base", True),
    ],
)
def test_a_hash_changes_with_what_the_device_runs_alone(hashed, kernel, file, old, new, same):
    before = KERNELS[kernel]
    assert old in before[file]
    after = {**before, file: before[file].replace(old, new)}
    assert (hashed(before) == hashed(after)) is same


def test_a_function_may_move(hashed):
    function = "def doubled(x):\n    return 2 * x\n"
    assert function in CPU
    assert hashed({"a.py": CPU.replace(function, "") + function}) == hashed(KERNELS["cpu"])


def names_of(op, kernel):
    """File names, and names in them, of a kernel's device code."""
    return {place.rpartition("/")[2] for place in registry.get_kernel(op, kernel).device_code()}


def test_a_kernel_is_made_of_its_own_device_code():
    names = {kernel: names_of("gemm", kernel) for kernel in ("wgmma", "mma", "gluon", "triton")}
    assert {"wgmma.cu", "pad.cu", "block_gemm.cuh", "block_epilogue.cuh"} < names["wgmma"]
    assert {"mma.cu", "block_epilogue.cuh", "ptx_sm80.cuh"} < names["mma"]
    assert not {"mma.cu", "mma_tiles.cuh"} & names["wgmma"]
    assert not {"wgmma.cu", "pad.cu"} & names["mma"]
    assert {
        "mainloop.py:gemm_kernel",
        "epilogue.py:finish",
        "gluon_common.py:max_nan",
        "common.py:ROUNDS",
    } < names["gluon"]
    assert {"portable.py:gemm_kernel", "tiles.py:store_tile"} < names["triton"]
    assert not any("mainloop" in name for name in names["triton"])
    assert not any("portable" in name for name in names["gluon"])


def global_names(code):
    """The names that compiled code and functions within it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names, *(name for one in inner for name in global_names(one))}


@pytest.mark.parametrize("op", registry.names())
def test_device_code_holds_what_its_compiled_functions_look_up(op):
    """Python's own compiler says which globals a function names; jit functions keep theirs."""
    for kernel in registry.kernels(op).values():
        code = kernel.device_code()
        for place in (place for place in code if ".py:" in place):
            path, _, name = place.rpartition(":")
            parts = Path(path).relative_to(sources.ROOT).with_suffix("").parts
            module = importlib.import_module(
                ".".join(("jetfire", *parts)).removesuffix(".__init__")
            )
            function = getattr(getattr(module, name), "fn", None)
            for needed in global_names(function.__code__) if function else ():
                value = function.__globals__.get(needed)
                if isinstance(value, tl.constexpr) or hasattr(value, "fn"):
                    assert any(other.endswith(f".py:{needed}") for other in code), (place, needed)


def test_every_kernel_has_a_hash_of_its_own():
    kernels = [k for name in registry.names() for k in registry.kernels(name).values()]
    hashes = {kernel.source_hash() for kernel in kernels}
    assert len(hashes) == len(kernels)
    assert all(len(text) == 12 and int(text, 16) >= 0 for text in hashes)
