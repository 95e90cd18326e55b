"""Write a Triton kernel's compiled code with all that a launch needs, for use without Jetfire."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import triton

from jetfire.kernels_triton.crosscompile import Launch, record_launches
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Kernel, Op, Tensors

SCHEMA = 1


def _argument(name: str, kind: str, value: Any, tensors: Tensors) -> dict[str, Any]:
    """How a launch fills one parameter: a caller's tensor by name, or a constant."""
    if kind.startswith("*"):
        for tensor_name, tensor in tensors.items():
            if value is tensor:
                return {"parameter": name, "type": kind, "tensor": tensor_name}
        raise UsageError(f"parameter {name} is a workspace: expected a kernel that needs none")
    if not isinstance(value, bool | int | float):
        raise UsageError(
            f"parameter {name} is a {type(value).__name__}: expected a kernel whose parameters are "
            "tensors and numbers, such as triton"
        )
    return {"parameter": name, "type": kind, "value": value}


def _describe(launch: Launch, file: str, tensors: Tensors) -> dict[str, Any]:
    metadata = launch.compiled.metadata
    signature = launch.compiled.src.signature
    return {
        "function": metadata.name,
        "file": file,
        "grid": list(launch.grid),
        "block": [32 * metadata.num_warps, 1, 1],
        "shared_bytes": metadata.shared,
        "arguments": [
            _argument(name, kind, launch.arguments[name], tensors)
            for name, kind in signature.items()
            if kind != "constexpr"
        ],
        # Triton's own trailing parameters (global and profile scratch), unused: pass null.
        "null_pointers": 2,
    }


def export(
    op: Op, kernel: Kernel, problem: Any, config: Any, capability: tuple[int, int], folder: Path
) -> list[Path]:
    """Write cubin and PTX of every launch, ``launch.json``, and ``load.py`` that launches them.

    Args:
        capability: the architecture, which need not be present.
        folder: made if missing; must be empty.

    Returns:
        The files written.

    Raises:
        UsageError: the folder is not empty or cannot be written, the config is illegal there, or
            the kernel is not a Triton kernel or needs a workspace.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: expected a new or empty folder")
    if not isinstance(kernel, TritonKernel):
        raise UsageError(f"{kernel.op}/{kernel.name}: expected a Triton kernel")
    launches, tensors = record_launches(op.name, kernel.name, problem, config, capability)
    described = []
    contents: dict[str, bytes] = {}
    for i, launch in enumerate(launches):
        stem = f"{i}_{launch.compiled.metadata.name}"
        contents[f"{stem}.cubin"] = launch.compiled.asm["cubin"]
        contents[f"{stem}.ptx"] = launch.compiled.asm["ptx"].encode()
        described.append(_describe(launch, f"{stem}.cubin", tensors))
    manifest = {
        "schema": SCHEMA,
        "op": op.name,
        "kernel": kernel.name,
        "problem": problem.as_dict(),
        "config": config.as_dict(),
        "capability": list(capability),
        "made_with": {"torch": torch.__version__, "triton": triton.__version__},
        "tensors": {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in tensors.items()
        },
        "launches": described,
    }
    contents["launch.json"] = json.dumps(manifest, indent=1).encode()
    contents["load.py"] = (Path(__file__).parent / "load.py").read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in contents]
