"""The PyTorch operator around a library's function: what templates of three targets need to know.

Inputs come in the function's order; sizes are read off their shapes, and one that no shape shows is
an argument; outputs are allocated and returned, updated tensors are not.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import jetfire
from jetfire.core.tensors import Tensors
from jetfire.export.c_text import WIDTH, capital, fields
from jetfire.export.foreign import Foreign
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.samples import Sample
from jetfire.export.signature import Extent, Parameter, Signature
from jetfire.export.target import cuda_home

# The oldest PyTorch whose stable C++ interface has all that is used; also as its headers want it.
TORCH = "2.11"
TORCH_TARGET = "0x020b000000000000"
SCALAR_TYPES = {
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float32: "Float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Where a size is read.

    Attributes:
        tensor: an input that has it as its side number `side`; None where it is an argument.
    """

    name: str
    tensor: Parameter | None
    side: int


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A tensor of the sample, as self-tests list it.

    Attributes:
        written: the shape of the part, from the tensor's beginning, that a call must write.
        tolerance: of ‖written − expected‖/‖expected‖; 0 where bits must be equal.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    written: tuple[int, ...]
    tolerance: float


def sizes_of(signature: Signature) -> tuple[Size, ...]:
    """Return each size, in the function's order."""
    found = ((dim, signature.dim_from(dim)) for dim in signature.dims)
    return tuple(Size(dim, *(origin or (None, 0))) for dim, origin in found)


def asked(signature: Signature) -> list[str]:
    """The sizes that are arguments."""
    return [size.name for size in sizes_of(signature) if size.tensor is None]


def allocated(signature: Signature) -> tuple[Parameter, ...]:
    """Return what a call allocates."""
    return tuple(p for p in signature.parameters if p.role == "output")


def schema(signature: Signature) -> str:
    """An operator's type as `torch.library` writes it, without its name."""
    aliases = iter("abcdefghijklmnopqrstuvwxyz")
    taken = [
        f"Tensor({next(aliases)}!) {p.name}" if p.role == "updated" else f"Tensor {p.name}"
        for p in signature.inputs
    ]
    taken += [f"SymInt {dim}" for dim in asked(signature)]
    given = ["Tensor"] * len(allocated(signature))
    returned = given[0] if len(given) == 1 else f"({', '.join(given)})"
    return f"({', '.join(taken)}) -> {returned}"


def fill(items: Iterable[str], column: int, indent: int) -> str:
    """List items with commas, from a column on, in lines of at most `WIDTH` at an indent."""
    lines, room = [""], WIDTH - column
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) + 3 > room:
            lines.append("")
            room = WIDTH - indent
        lines[-1] += f"{item}, "
    return ("\n" + " " * indent).join(line.strip() for line in lines).removesuffix(",")


def text(words: str, prefix: str) -> str:
    """Prose in lines that begin with a prefix, the first but for that."""
    lines = textwrap.wrap(words, WIDTH - len(prefix), break_on_hyphens=False)
    return f"\n{prefix}".join(lines)


def c_string(content: str, indent: int) -> str:
    """C++ of a string in lines at an indent, cut after commas."""
    pieces, room = [""], WIDTH - indent - 4
    for word in re.split(r"(?<=, )", content):
        if pieces[-1] and len(pieces[-1]) + len(word) > room:
            pieces.append("")
        pieces[-1] += word
    return ("\n" + " " * indent).join(f'"{piece}"' for piece in pieces)


def fit(line: str, rest: str) -> str:
    """A statement on one line, or two where it is too long for one; the line's indent is 2."""
    return f"{line} {rest}" if len(line) + len(rest) < WIDTH - 2 else f"{line}\n      {rest}"


def listed(name: str, items: Sequence[str]) -> str:
    """A Python list's assignment."""
    whole = f"{name} = [{', '.join(items)}]"
    if len(whole) <= WIDTH:
        return whole
    return f"{name} = [\n" + "".join(f"    {item},\n" for item in items) + "]"


def _definition(name: str, taken: Sequence[str], returned: str) -> str:
    """A Python function's first line or lines."""
    whole = f"def {name}({', '.join(taken)}) -> {returned}:"
    if len(whole) <= WIDTH:
        return whole
    inner = f"    {', '.join(taken)}"
    if len(inner) > WIDTH:
        inner = "\n".join(f"    {each}," for each in taken)
    return f"def {name}(\n{inner}\n) -> {returned}:"


def _call(function: str, names: Sequence[str]) -> str:
    """A Python function's last line: a call at an indent of 4."""
    whole = f"{function}({', '.join(names)})"
    if len(whole) <= WIDTH - 4:
        return whole
    return f"{function}(\n        {', '.join(names)}\n    )"


def python(extent: Extent) -> str:
    """An extent as Python computes it."""
    return extent.c().replace(" / ", " // ")


def python_shape(parameter: Parameter) -> str:
    """A parameter's shape as a Python tuple."""
    sides = [python(extent) for extent in parameter.shape]
    return f"({', '.join(sides)}{',' if len(sides) == 1 else ''})"


def c_shape(parameter: Parameter) -> str:
    """A parameter's shape as a C++ initializer list."""
    return f"{{{', '.join(extent.c() for extent in parameter.shape)}}}"


def scalar_type(parameter: Parameter) -> str:
    """Return a parameter's dtype in C++."""
    return SCALAR_TYPES[parameter.dtype]


def dtype_name(parameter: Parameter) -> str:
    """Return a parameter's dtype without ``torch.``."""
    return str(parameter.dtype).removeprefix("torch.")


def _address(parameter: Parameter) -> str:
    """C++ of a tensor's address, as the function takes it."""
    data = "const_data_ptr" if parameter.role == "input" else "mutable_data_ptr"
    return f"static_cast<{parameter.pointer}>({parameter.name}.{data}())"


def recorded(plan: ExportPlan, sample: Sample) -> list[Recorded]:
    """The sample's tensors in the function's order."""
    parameters = plan.signature.parameters
    outputs = {p.key: sample.expected[p.name] for p in plan.signature.outputs}
    parts = plan.op.written(sample.problem, sample.inputs, outputs)
    found = []
    for p in parameters:
        tensor = sample.inputs[p.name] if p.role == "input" else sample.expected[p.name]
        part = tensor if p.role == "input" else parts[p.key]
        assert part.storage_offset() == tensor.storage_offset()
        found.append(
            Recorded(
                p.name,
                p.role,
                dtype_name(p),
                tuple(tensor.shape),
                tuple(part.shape),
                sample.tolerance.get(p.name, 0.0),
            )
        )
    return found


def values(plan: ExportPlan, library: Library, sample: Sample) -> dict[str, Any]:
    """Return what every template may use."""
    return {
        "plan": plan,
        "library": library,
        "name": plan.name,
        "version": jetfire.__version__,
        **_prose(plan, library, sample),
        **_arguments(plan, library),
        "quoted_library": [f'"csrc/{file}"' for file in sorted(library.files)],
        "quoted_sources": [f'"csrc/{s}"' for s in (*library.cuda_sources, *library.c_sources)],
        "torch": TORCH,
        "torch_target": TORCH_TARGET,
        "c_shape": c_shape,
        "c_string": c_string,
        "fit": fit,
        "listed": listed,
        "text": text,
        "dtype_name": dtype_name,
        "fill": fill,
        "python_shape": python_shape,
        "scalar_type": scalar_type,
    }


def _prose(plan: ExportPlan, library: Library, sample: Sample) -> dict[str, Any]:
    """Return what documentation, self-test and benchmark say of a plan."""
    return {
        "summary": capital(plan.op.summary),
        "fixed": fields(plan.fixed),
        # Of addresses the operator asks more than the C function, and the templates say what.
        "contract": library.contract[1:],
        "recorded": recorded(plan, sample),
        "recorded_sizes": plan.sizes(sample.problem),
        "tuned": [plan.sizes(t.problem) for t in plan.tuned],
        "origins": [origin(plan, t) for t in plan.tuned],
        "where": plan.tuned[0].where,
        "others": sorted(set(library.files) - {f"{plan.name}.h"}),
        "capability": "{}.{}".format(*plan.capability),
    }


def _arguments(plan: ExportPlan, library: Library) -> dict[str, Any]:
    """Return what the functions of C, C++ and Python take and return."""
    signature = plan.signature
    given = allocated(signature)
    sizes = sizes_of(signature)
    numbers = asked(signature)
    cpp_numbers = [f"int64_t {dim}" for dim in numbers]
    names = [p.name for p in signature.inputs] + numbers
    python_taken = [f"{p.name}: torch.Tensor" for p in signature.inputs]
    python_taken += [f"{dim}: int" for dim in numbers]
    scratch = ["zeros" if library.zeros else "scratch"] if library.workspace else []
    every = [p.name for p in signature.parameters]
    return {
        "signature": signature,
        "inputs": signature.inputs,
        "outputs": given,
        "updated": [p for p in signature.inputs if p.role == "updated"],
        "sizes": sizes,
        "returned_sizes": {extent.dim for p in given for extent in p.shape},
        "asked": numbers,
        "schema": schema(signature),
        "cpp_taken": [*(f"const Tensor& {p.name}" for p in signature.inputs), *cpp_numbers],
        "cpp_all": [
            *(f"const Tensor& {each}" for each in every),
            *cpp_numbers,
            *(f"const Tensor& {each}" for each in scratch),
        ],
        "scratch": next(iter(scratch), None),
        "pybind_arguments": [f'arg("{each}")' for each in (*every, *numbers, *scratch)],
        "called": lambda function: _call(function, names),
        "define": lambda name: _definition(name, python_taken, _returned(given)),
        "python_names": names,
        "narrowed": _narrowed(sizes),
        "passed": _passed(plan, library, sizes),
        "result": _result(given),
    }


def _result(given: Sequence[Parameter]) -> str:
    """Return what the C++ function returns."""
    if not given:
        return "void"
    return "Tensor" if len(given) == 1 else f"std::tuple<{', '.join(['Tensor'] * len(given))}>"


def _returned(given: Sequence[Parameter]) -> str:
    """Return what the Python function returns."""
    if not given:
        return "None"
    tensors = ["torch.Tensor"] * len(given)
    return tensors[0] if len(given) == 1 else f"tuple[{', '.join(tensors)}]"


def _narrowed(sizes: Sequence[Size]) -> list[str]:
    """C++ of sizes as the C functions take them."""
    return [f'narrow({size.name}, "{size.name}")' for size in sizes]


def _passed(plan: ExportPlan, library: Library, sizes: Sequence[Size]) -> list[str]:
    """C++ of what the C function is given: of a tensor's, a size's and the workspace's names."""
    found = [_address(p) for p in plan.signature.parameters]
    found += _narrowed(sizes)
    return [
        *found,
        *(["workspace"] if library.workspace else []),
        "static_cast<CUstream_st*>(stream)",
    ]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a README says of a problem: its time and rate when tuned are None where another's
    config is used."""

    sizes: tuple[int, ...]
    config: str
    microseconds: float | None
    rate: str | None
    where: Foreign


def origin(plan: ExportPlan, tuned: TunedProblem) -> Origin:
    """Say where a problem's config comes from, in words."""
    entry, problem = tuned.entry, tuned.problem
    exact = entry.problem == problem.as_dict()
    nearest = "×".join(map(str, plan.sizes_tuned(tuned).values()))
    return Origin(
        tuple(plan.sizes(problem).values()),
        ", ".join(f"{name}={value}" for name, value in tuned.config.as_dict().items()),
        round(1e3 * entry.ms, 2) if exact else None,
        _rate(plan, tuned) if exact else None,
        tuned.where if exact else Foreign(f"for {nearest}, {tuned.where.text}"),
    )


def _rate(plan: ExportPlan, tuned: TunedProblem) -> str:
    """Return multiply-add operations per second, or bytes for an op that has none."""
    ms, flops = tuned.entry.ms, plan.op.flops(tuned.problem)
    if flops:
        return f"{flops / ms / 1e9:.0f} TFLOP/s"
    return f"{plan.op.bytes(tuned.problem) / ms / 1e6:.0f} GB/s"


def caller(
    plan: ExportPlan, function: Callable[..., Any]
) -> Callable[[Any, Tensors, Tensors], Tensors]:
    """Return a call of the operator with a problem's tensors; it allocates what it returns."""
    signature = plan.signature
    numbers = asked(signature)
    given = allocated(signature)
    updated = [p for p in signature.inputs if p.role == "updated"]

    def call(problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        tensors = [(inputs if p.role == "input" else outputs)[p.key] for p in signature.inputs]
        found = function(*tensors, *(getattr(problem, dim) for dim in numbers))
        several = (found,) if len(given) == 1 else found or ()
        returned = {p.key: tensor for p, tensor in zip(given, several, strict=True)}
        return {**{p.key: outputs[p.key] for p in updated}, **returned}

    return call


def imported(name: str, file: Path) -> ModuleType:
    """A package's module from its `__init__.py`, wherever that is."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def environment() -> dict[str, str]:
    """Return this process's environment, with the CUDA toolkit that was found."""
    return {**os.environ, "CUDA_HOME": str(cuda_home())}
