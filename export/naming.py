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
_FILES = "benchmark build csrc dist samples selftest setup test tests"
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
    if name in _FILES.split():
        return "an export has files called so"
    if name in _HEADERS.split():
        return "a header of C, C++, CUDA or PyTorch has it"
    if hasattr(ctypes.CDLL(None), name):  # what this process is linked with, the C library too
        return "the C library, or Python, has a function called so"
    return next((why for pattern, why in _RESERVED if re.fullmatch(pattern, name)), "")
