"""Read compiled GPU code: registers, spills and instructions of a cubin, on any machine."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from jetfire.core.errors import UsageError


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel function, and the resources that a launch gives it.

    Attributes:
        name: the kernel function.
        code: an ELF file that has the function.
        shared_bytes: shared memory per thread block, static and dynamic.
        warps: warps per thread block.
    """

    name: str
    code: bytes = field(repr=False)
    shared_bytes: int
    warps: int


_CUDA = 190  # an ELF file's e_machine of NVIDIA's
_INSTRUCTION_BYTES = 16
# A line of a disassembly, and the instruction's name.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def _version(code: bytes) -> int:
    """Return the architecture of a cubin: 90 of sm_90 and sm_90a."""
    # The second byte of e_flags, but the first of those that CUDA 12 writes.
    return code[49 if code[8] >= 8 else 48]


def is_whole(code: bytes) -> bool:
    """Return whether bytes are an ELF file with its tables of headers, which cubins have last."""
    if len(code) < 64 or not code.startswith(b"\x7fELF"):
        return False
    programs, sections = struct.unpack_from("<2Q", code, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", code, 54)
    ends = programs + program_size * program_count, sections + section_size * section_count
    return max(ends) <= len(code)


@cache
def unusable(file: Path, function: str, capability: tuple[int, int]) -> str | None:
    """Return why a file is no cubin with a function for an architecture; None where it is one.

    The file is read once per process.
    """
    expected = "expected a cubin, as nvcc -cubin writes it"
    try:
        code = file.read_bytes()
    except OSError as error:
        return f"{file}: {error.strerror}: expected a cubin"
    if len(code) < 64 or not code.startswith(b"\x7fELF") or code[18] != _CUDA:
        return f"{file}: {expected}"
    if not is_whole(code):
        return f"{file}: expected a whole cubin: its end is missing"
    major, minor = divmod(_version(code), 10)
    if capability[0] != major or capability[1] < minor:
        return f"{file.name} is for sm_{major}{minor}, not sm_{capability[0]}{capability[1]}"
    try:
        functions = functions_of(code)
    except (struct.error, IndexError, ValueError):  # its table of sections is rubbish
        return f"{file}: {expected}"
    if function not in functions:
        held = ", ".join(sorted(functions)) or "none"
        return f'{file.name}: expected extern "C" __global__ void {function}, it has {held}'
    return None


@dataclass(frozen=True)
class Audit:
    """The resources and the disassembly of one compiled kernel.

    Attributes:
        name: the kernel function.
        registers: 32-bit registers per thread.
        stack_bytes: local memory per thread, where spills are.
        shared_bytes: shared memory per thread block.
        warps: warps per thread block.
        spills: local loads and stores (LDL, STL) in the machine code.
        instructions: machine instructions by mnemonic without modifiers (``LDG``, ``IGMMA``, …).
        sass: the disassembly.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    spills: int
    instructions: dict[str, int] = field(repr=False)
    sass: str = field(repr=False)


@cache
def _tool(name: str) -> str:
    """Return the path of cuobjdump or nvdisasm: Triton's own copy, else the one on the PATH."""
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        if own.exists():
            return str(own)
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"{name}: neither in Triton's package nor on the PATH")
    return found


def _said(code: bytes, tool: str, *options: str) -> str:
    """Return what cuobjdump or nvdisasm prints of some code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        command = (_tool(tool), *options, str(file))
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.replace(str(file), file.name).partition("\n")[0]
        why = said or f"{tool} ended with {done.returncode}"
        raise UsageError(f"{why}: expected machine code as nvcc -cubin writes it")
    return done.stdout


def audit(cubin: Cubin) -> Audit:
    """Return the resources and the disassembly of a compiled kernel.

    Raises:
        UsageError: there is no disassembler, or it cannot read the code.
    """
    # The analysis of where branches go takes a quarter of the time, and changes no instruction.
    sass = _said(cubin.code, "nvdisasm", "--print-code", "--no-dataflow")
    of_it = rf"^\.text\.{re.escape(cubin.name)}:\n(.*?)(?=^//--|\Z)"
    (sass,) = re.findall(of_it, sass, re.MULTILINE | re.DOTALL)
    return _audited(cubin, sass)


def audits(cubins: Sequence[Cubin]) -> list[Audit]:
    """Return the resources and the disassembly, without labels, of many compiled kernels.

    nvdisasm takes 0.3 s to begin, and is begun once for each architecture: it is given the
    instructions of all kernels, one after another.

    Raises:
        UsageError: there is no disassembler, or it cannot read the code.
    """
    found: dict[int, Audit] = {}
    by_version: dict[int, list[int]] = {}
    for i, cubin in enumerate(cubins):
        by_version.setdefault(_version(cubin.code), []).append(i)
    for version, places in by_version.items():
        texts = [functions_of(cubins[i].code)[cubins[i].name] for i in places]
        options = "--binary", f"SM{version}", "--no-dataflow"
        sass = _said(b"".join(texts), "nvdisasm", *options)
        lines = [line for line in sass.splitlines() if _INSTRUCTION.match(line)]
        for i, text in zip(places, texts, strict=True):
            count = len(text) // _INSTRUCTION_BYTES
            found[i] = _audited(cubins[i], "\n".join(lines[:count]))
            del lines[:count]
        assert not lines
    return [found[i] for i in range(len(cubins))]


def functions_of(code: bytes) -> dict[str, bytes]:
    """Return the instructions of each function of a cubin by its name."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<3H", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, start + i * size) for i in range(count)]
    found = {}
    for name, _, _, _, begin, length in sections:
        at = sections[names][4] + name
        if code.startswith(b".text.", at):
            function = code[at + len(b".text.") : code.index(b"\0", at)]
            found[function.decode()] = code[begin : begin + length]
    return found


def _audited(cubin: Cubin, sass: str) -> Audit:
    """Return the audit of a cubin that was disassembled."""
    usage = _said(cubin.code, "cuobjdump", "--dump-resource-usage")
    (usage,) = re.findall(rf"Function {re.escape(cubin.name)}:\n(.*)", usage)
    resources = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = Counter(name.split(".")[0] for name in _INSTRUCTION.findall(sass))
    return Audit(
        name=cubin.name,
        registers=resources["REG"],
        stack_bytes=resources["STACK"],
        shared_bytes=cubin.shared_bytes,
        warps=cubin.warps,
        spills=counts["LDL"] + counts["STL"],
        instructions=dict(counts.most_common()),
        sass=sass,
    )
