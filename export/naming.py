"""What an export may be called: its function in C, its library, and its Python package."""

from __future__ import annotations

import ctypes
import keyword
import re
import sys

from jetfire.core.errors import UsageError

_WORDS = (  # and `main`, which the self-test has
    "alignas alignof asm auto bool break case catch char class concept const consteval constexpr "
    "constinit const_cast continue co_await co_return co_yield decltype default delete do double "
    "dynamic_cast else enum explicit export extern false float for friend goto if inline int long "
    "main mutable namespace new noexcept nullptr operator private protected public register "
    "reinterpret_cast requires restrict return short signed sizeof static static_assert "
    "static_cast struct switch template this thread_local throw true try typedef typeid typename "
    "typeof typeof_unqual union unsigned using virtual void volatile wchar_t while"
)
# Types, macros and objects of the headers that an export includes; functions are asked of the
# library that has them.
_HEADERS = (
    "FILE NULL EOF BUFSIZ RAND_MAX CHAR_BIT assert errno offsetof stdin stdout stderr va_list "
    "va_start va_arg va_end va_copy setjmp environ linux unix i386 "
    "at c10 half half2 dim3 std max min pybind11 blockDim blockIdx gridDim threadIdx warpSize"
)
_RESERVED = (
    (r"\w*_t", "C reserves what ends in _t for types"),
    (r"(u?(char|short|int|long|longlong)|float|double)[1-4]", "CUDA has a type of that name"),
    (r"(cuda|cu|CU|nv)[A-Z]\w*|(cuda|CUDA|nvrtc)(_\w*)?", "CUDA's names begin so"),
    (r"(Py|PY)[A-Z_]\w*", "Python's names in C begin so"),
    (r"U?(CHAR|SHRT|INT|LONG|LLONG|SIZE|PTRDIFF|INTPTR|INTMAX)_(MAX|MIN)", "C has such a macro"),
    (r"E[A-Z0-9]{2,}|SIG[A-Z_0-9]+", "C has macros that begin so"),
)
_FILES = (
    "benchmark benchmarks build build_variant checks compiling csrc dist driver installed launcher "
    "manifest parameters program samples selftest setup test tests workspace"
)
# What files of exports define (`files/`, templates).
_DEFINED = (
    "Argument Binding Content Dtype Extent Kernel Launch Matrix Operator Parameter Problem "
    "Repeated Scratch Shape Sizes Spare allocate ask_gpu begin benchmark bf16 by_value bytes_of "
    "call call_function capture check check_all check_code cluster_tiles clusters code_of "
    "contents count_of differing driver elapsed element element_bytes end error_text extent_of "
    "fill find find_problem fp16 handles have_driver init_result is_captured is_right is_wanted "
    "launch launch_one load load_kernels load_result loaded map_matrices map_matrix matrix "
    "name_of narrow nearest number_name open_driver opened places prepare prepare_device "
    "problem_of ratio raw_row recorded_bytes refuse relative_error report run scratch_for_call "
    "shape_of size_of sizes_fit sizes_of slab_rows small_blocks stream text_of tiles tiles_across "
    "tiles_along tiles_down time_calls unpack_matrix unpacked_row usage whole workspace_bytes "
    "writes_nothing zeros zeros_for_call"
)
LONGEST = 63  # characters of an identifier that C tells apart


def check(name: str) -> None:
    """Refuse a name that no function, library and package can have.

    Raises:
        UsageError: it says why.
    """
    if not re.fullmatch(rf"[A-Za-z][A-Za-z0-9_]{{0,{LONGEST - 1}}}", name, re.ASCII):
        raise UsageError(f"--name {name}: expected a C identifier of at most {LONGEST} characters")
    if taken := _taken(name):
        raise UsageError(f"--name {name}: {taken}; give another")


def _taken(name: str) -> str:
    """Return what else is called so, or may be; empty where nothing is."""
    if name in _WORDS.split():
        return "C and C++ have it as a word of their own"
    if keyword.iskeyword(name):
        return "Python has it as a word of its own"
    if name in sys.stdlib_module_names or name in ("jetfire", "torch"):
        return "a Python module is called so"
    if name in _DEFINED.split():
        return "a file of an export defines it"
    if name in _FILES.split():
        return "an export has files called so"
    if name in _HEADERS.split():
        return "a header of C, C++, CUDA or PyTorch has it"
    if hasattr(ctypes.CDLL(None), name):  # what this process is linked with, the C library too
        return "the C library, or Python, has a function called so"
    return next((why for pattern, why in _RESERVED if re.fullmatch(pattern, name)), "")
