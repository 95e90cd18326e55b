"""Compile CUDA C++ at run time with NVRTC, once for each source, constants and architecture.

A kernel's config reaches its source as `config.cuh`, a header of constants that is written here, so
that a new config costs one compilation of a few seconds and the kernel reads like plain C++.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

from jetfire.core import files, terminal
from jetfire.core.errors import JetfireError, UsageError
from jetfire.core.machine_code import is_whole

ROOT = Path(__file__).parent
# Two first compilations at once have failed to open NVRTC's own libraries.
_one_at_a_time = threading.Lock()
OPTIONS = ("-std=c++17", "--define-macro=NDEBUG", "-lineinfo")


@dataclass(frozen=True)
class CudaText:
    """CUDA C++ that is read as if it were a file, in the place of the one that it stands in."""

    file: Path
    line: int
    text: str

    @property
    def name(self) -> str:
        """The Python file's, so that NVRTC's errors have its path and its lines."""
        return str(self.file)

    @property
    def stem(self) -> str:
        return self.file.stem

    @property
    def parent(self) -> Path:
        return self.file.parent

    def read_text(self) -> str:
        return f"#line {self.line}\n{self.text}"


class CompileError(JetfireError):
    """NVRTC refused a source: a fault of ours, not of the caller's."""


def header(constants: Mapping[str, bool | int], functions: str = "") -> str:
    """Write `config.cuh`: the constants as ``constexpr``, then functions that depend on them."""
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
        for name, value in constants.items()
    ]
    return "\n".join(["#pragma once", *lines, functions, ""])


@cache
def _sources(folder: Path) -> dict[str, str]:
    """Return what an `#include` may name: the folder's headers and those that all kernels share."""
    headers = [*ROOT.glob("*.cuh"), *folder.glob("*.cuh")]
    return {file.name: file.read_text() for file in sorted(headers)}


@cache
def _nvrtc_version() -> tuple[int, int]:
    try:
        from cupy.cuda import nvrtc

        return tuple(nvrtc.getVersion())
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"CUDA kernels need CuPy and NVRTC ({reason}): pip install 'jetfire[cuda]'"
        ) from None


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``$JETFIRE_CACHE``, else the user's cache folder."""
    return files.cache() / "cubin"


def _compile(source: Path | CudaText, config: str, architecture: str) -> bytes:
    from cupy.cuda import nvrtc

    headers = {**_sources(source.parent), "config.cuh": config}
    program = nvrtc.createProgram(
        source.read_text(),
        source.name,
        tuple(text.encode() for text in headers.values()),
        tuple(name.encode() for name in headers),
    )
    try:
        with _one_at_a_time:
            nvrtc.compileProgram(program, (*OPTIONS, f"-arch={architecture}"))
        cubin: bytes = nvrtc.getCUBIN(program)
        # CuPy takes the last byte for a string's end: a zero, of a file in units of eight bytes.
        return cubin + bytes(-len(cubin) % 8)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"{source.name} for {architecture} does not compile:\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


def _cached(file: Path) -> bytes | None:
    """Read a file of the cache; None where it is missing, or not whole."""
    try:
        cubin = file.read_bytes()
    except FileNotFoundError:
        return None
    return cubin if is_whole(cubin) else None


def compile_cubin(source: Path | CudaText, config: str, architecture: str) -> bytes:
    """Return the machine code of a source with a `config.cuh`, from the disk cache if it is there.

    The key is all that the code depends on: sources, constants, options, architecture and
    compiler. Processes that want the same code wait for the first one's. A file that is not whole
    is written anew.

    Args:
        architecture: as NVRTC names it: ``sm_90a``.

    Raises:
        UsageError: CuPy or NVRTC is missing.
        CompileError: the source does not compile.
    """
    texts = [source.name, source.read_text(), config, architecture, *OPTIONS, str(_nvrtc_version())]
    for name, text in _sources(source.parent).items():
        texts += [name, text]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    file = cache_folder() / f"{source.stem}-{key[:32]}.cubin"
    what = f"{source.name} for {architecture}"
    try:
        if (cubin := _cached(file)) is not None:
            terminal.decision(f"{what}: compiled before, {file}")
            return cubin
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if (cubin := _cached(file)) is not None:
                return cubin
            begin = time.perf_counter()
            cubin = _compile(source, config, architecture)
            terminal.decision(f"{what}: compiled in {time.perf_counter() - begin:.1f} s")
            files.write(file, cubin, alone=True)
            return cubin
    except OSError as error:
        raise UsageError(f"cannot use {file.parent}: {error.strerror}") from None
