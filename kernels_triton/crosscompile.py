"""Compile Triton kernels for an architecture that is not here, and read what came out.

`record_launches` runs a kernel's own `launch` under a driver that compiles and never launches, so
what is audited is what would run: the same specialisation of arguments, the same options. Needs a
process without TRITON_INTERPRET=1; run as a module it prints one JSON line an audit, of one
kernel or (``--specs``) of as many as standard input describes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from jetfire import ops
from jetfire.ops.device import target_device
from jetfire.ops.errors import NoDeviceError, UsageError
from jetfire.ops.op import Tensors


@dataclass(frozen=True)
class Audit:
    """One compiled kernel's resources and machine code.

    Attributes:
        name: the kernel function.
        registers: 32-bit registers a thread.
        stack_bytes: local memory a thread; spills live there.
        shared_bytes: shared memory a block.
        warps: warps a block.
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


@dataclass(frozen=True)
class Launch:
    """One launch that a kernel would have made.

    Attributes:
        compiled: Triton's compiled kernel.
        grid: blocks along x, y and z.
        arguments: the kernel function's parameters by name, as `launch` passed them.
    """

    compiled: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class _CompileOnlyDriver:
    """The part of Triton's driver that compiling asks for; there is no device behind it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise NoDeviceError(f"cross-compilation asked the driver for {name}: there is no device")


@contextmanager
def _compiling(capability: tuple[int, int], found: list[Launch]) -> Iterator[None]:
    """Within, `fn[grid](…)` compiles for the capability, appends to `found`, launches nothing."""
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.device_caches.clear()  # keyed by device number, not by target
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        blocks = tuple(grid(arguments) if callable(grid) else grid)
        found.append(Launch(compiled, (*blocks, 1, 1)[:3], arguments))
        return compiled

    previous = driver._active
    driver.set_active(_CompileOnlyDriver(capability))
    try:
        with mock.patch.object(JITFunction, "run", run):
            yield
    finally:
        driver._active = previous


def record_launches(
    op_name: str, kernel_name: str, problem: Any, config: Any, capability: tuple[int, int]
) -> tuple[list[Launch], Tensors]:
    """Every launch that one call makes, in order, and the (meta) tensors it was called with.

    Raises:
        UsageError: the config is illegal on that architecture, or Triton is interpreted here.
    """
    if knobs.runtime.interpret:
        raise UsageError("cross-compilation needs a process without TRITON_INTERPRET=1")
    op, kernel = ops.get(op_name), ops.get_kernel(op_name, kernel_name)
    reason = kernel.legal(problem, config, target_device(capability))
    if reason is not None:
        raise UsageError(f"{op_name}/{kernel_name}, {problem}: {reason}")
    # Meta tensors: only dtypes, strides and alignment reach the compiler, and theirs is address 0.
    inputs = op.inputs(problem, torch.device("meta"))
    outputs = op.outputs(problem, inputs)
    found: list[Launch] = []
    with _compiling(capability, found):
        kernel.launch(problem, config, inputs, outputs)
    return found, {**inputs, **outputs}


def compile_launches(
    op_name: str, kernel_name: str, problem: Any, config: Any, capability: tuple[int, int]
) -> list[Any]:
    """Triton's compiled kernels for every launch that one call makes, in order."""
    launches, _ = record_launches(op_name, kernel_name, problem, config, capability)
    return [launch.compiled for launch in launches]


@cache
def _tool(name: str) -> str:
    """cuobjdump or nvdisasm: Triton's own copy, else the one on the PATH."""
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"{name}: neither in Triton's package nor on the PATH")
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def audit(compiled: Any) -> Audit:
    """Resources and machine code of one of Triton's compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(_tool("cuobjdump"), "--dump-resource-usage", str(cubin))
        sass = _output(_tool("nvdisasm"), "--print-code", str(cubin))
    resources = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    counts = Counter(line.split(".")[0] for line in lines)
    return Audit(
        name=compiled.metadata.name,
        registers=resources["REG"],
        stack_bytes=resources["STACK"],
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        spills=counts["LDL"] + counts["STL"],
        instructions=dict(counts.most_common()),
        sass=sass,
    )


def audit_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The audits of one kernel's default config, without their machine code.

    Args:
        spec: ``{"op": …, "kernel": …, "capability": [major, minor], "problem": {field: value}}``.

    Returns:
        The spec with ``"config"`` and ``"audits"``, or with ``"refused"``: the kernel's own reason.
    """
    capability = (spec["capability"][0], spec["capability"][1])
    problem = ops.get(spec["op"]).Problem.parse(spec["problem"])
    kernel = ops.get_kernel(spec["op"], spec["kernel"])
    device = target_device(capability)
    config = kernel.default(problem, device)
    if (reason := kernel.legal(problem, config, device)) is not None:
        return {**spec, "refused": reason}
    compiled = compile_launches(spec["op"], spec["kernel"], problem, config, capability)
    audits = [asdict(audit(c)) for c in compiled]
    for found in audits:
        del found["sass"]
    return {**spec, "config": config.as_dict(), "audits": audits}


def main(arguments: list[str]) -> None:
    """``OP KERNEL ARCH [FIELD=VALUE…]`` (config fields as ``config.FIELD=VALUE``): JSON lines.

    ``--specs``: for each line of standard input, an `audit_spec`.
    """
    if arguments == ["--specs"]:
        for line in sys.stdin:
            print(json.dumps(audit_spec(json.loads(line))), flush=True)
        return
    op_name, kernel_name, arch, *fields = arguments
    pairs = dict(field.split("=", 1) for field in fields)
    chosen = {k.removeprefix("config."): pairs.pop(k) for k in list(pairs) if "config." in k}
    capability = (int(arch[:-1]), int(arch[-1]))
    problem = ops.get(op_name).Problem.parse(pairs)
    kernel = ops.get_kernel(op_name, kernel_name)
    default = kernel.default(problem, target_device(capability))
    config = kernel.Config.parse({**default.as_dict(), **chosen})
    for compiled in compile_launches(op_name, kernel_name, problem, config, capability):
        print(json.dumps(asdict(audit(compiled))))


if __name__ == "__main__":
    main(sys.argv[1:])
