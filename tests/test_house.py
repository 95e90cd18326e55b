"""The house's walls: who may import whom."""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import jetfire
from jetfire import ops
from jetfire.core import registry

ROOT = Path(jetfire.__file__).parent
# From the ground up: a package imports what stands before it, and itself. So do gpt2's own.
FLOORS = (
    ("reference",),
    ("core",),
    ("measure",),
    ("ops",),
    ("kernels_cpu", "kernels_cuda", "kernels_triton"),
    ("nn",),
    ("report",),
    ("bench",),
    ("tuner",),
    ("fuzz", "export"),
    ("gpt2.data",),
    ("gpt2.model",),
    ("gpt2.training",),
    ("gpt2.bench",),
    ("models",),
    ("commands",),
    ("cli",),
)
FLOOR = {package: height for height, packages in enumerate(FLOORS) for package in packages}
FOLDERS = {name.partition(".")[0] for name in FLOOR}


def modules():
    """The package's modules by dotted name, without tests."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in FOLDERS:
            yield ".".join(part for part in parts if part != "__init__"), path


FILES = dict(modules())


@cache
def tree(path):
    return ast.parse(path.read_text())


def names_typing(test):
    return "TYPE_CHECKING" in ast.dump(test)


def imported(tree):
    """The modules that a module imports when it runs, wherever in it; not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and names_typing(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jetfire"):
            outer = node.module.removeprefix("jetfire").lstrip(".")
            for alias in node.names:
                inner = f"{outer}.{alias.name}".lstrip(".")
                yield inner if inner in FILES else outer
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jetfire."):
                    yield alias.name.removeprefix("jetfire.")
        yield from imported(node)


@cache
def graph():
    return {
        name: {other for other in imported(tree(path)) if other in FILES} - {name}
        for name, path in FILES.items()
    }


def package(module):
    inner = ".".join(module.split(".")[:2])
    return inner if inner in FLOOR else module.partition(".")[0]


def test_every_package_has_a_floor():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert folders | {"cli"} == FOLDERS
    assert {package(name) for name in FILES if name != "gpt2"} == set(FLOOR)


def test_no_arrow_points_upwards():
    upwards = {
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if package(module) != package(other) and FLOOR[package(other)] >= FLOOR[package(module)]
    }
    assert upwards == set()


def circles(edges):
    """Sets of modules that import one another, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            circle = set()
            while node not in circle:
                circle.add(stack.pop())
            if len(circle) > 1:
                found.append(circle)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_imports_go_in_a_circle():
    assert circles(graph()) == []


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [{"b", "c"}]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"a"}}, [{"a", "b", "c"}]),
    ],
)
def test_circles_are_found(edges, expected):
    assert circles(edges) == expected


OPS = frozenset(registry.names())
# What layers call: an op's public functions, all of which `jetfire.ops` has. A type checker takes
# the one whose name is its op's for the module, so that one is imported from the module itself.
FUNCTIONS = frozenset(ops.__all__)
# What such an op is made of are other ops, as it declares: its kernels name those that they launch.
COMPOSITES = frozenset(name for name in OPS if registry.get(name).composite)
# Where an op's name stands outside its own files, and why it may. Strike out what goes; what is new
# belongs into the op's file or its kernels' folders.
NAMED = {
    # A part of the suite `results` that users type.
    "core/suites.py": ["gemm"],
    # Documents about named ops' results.
    "report/int4.py": ["hadamard_gemm", "hadamard_quantize", "int4_gemm"],
    # A setting of a run, and a size of a model, that is called dropout.
    "report/runs.py": ["dropout"],
    "gpt2/model/layouts.py": ["dropout"],
    # A setting's values.
    "gpt2/training/settings.py": ["adamw", "adamw8"],
    # The function in a CUDA source is called gemm.
    "kernels_cuda/int4_gemm/wgmma.py": ["gemm"],
    # Kernels that are another op's, but for what they read: a profile's hash has both ops' code.
    "kernels_triton/quantize_qkv/__init__.py": ["quantize"],
    "kernels_triton/adamw8/__init__.py": ["adamw"],
    # A field that has an op's name.
    "ops/gather_rows.py": ["transpose"],
}


def own(path):
    """The op whose file this is; None for what is of no op."""
    parts = path.relative_to(ROOT).parts
    stem = parts[1].removesuffix(".py") if parts[0] != "cli.py" else ""
    homes = ("ops", "reference", "kernels_cpu", "kernels_cuda", "kernels_triton")
    return stem if parts[0] in homes and stem in OPS else None


def named(tree, called):
    """Ops whose names a module has as a text, or whose files it imports.

    But for their references: those are arithmetic, for whatever is defined by it. And for the
    public functions that it may call.
    """
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    imported = {own(FILES[name]) for name in every_import(tree, called) if name in FILES}
    return {name for name in OPS if name in texts or name in imported}


def every_import(tree, called):
    """The modules of ops and kernels that a module imports, for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jetfire."):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("jetfire.")
                found = inner if inner in FILES else node.module.removeprefix("jetfire.")
                kind = package(found)
                if kind != "reference" and not (kind == "ops" and alias.name in called):
                    yield found
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jetfire.") and "reference" not in alias.name:
                    yield alias.name.removeprefix("jetfire.")


def test_no_op_s_name_stands_outside_its_own_files():
    found = {}
    for module, path in FILES.items():
        kind = package(module)
        if kind.startswith("kernels_") and own(path) in COMPOSITES:
            continue
        others = named(tree(path), FUNCTIONS if kind == "nn" else ()) - {own(path)}
        if others:
            found[str(path.relative_to(ROOT))] = others
    allowed = {file: set(names) for file, names in NAMED.items()}
    assert found == allowed


@pytest.mark.parametrize(
    ("code", "called", "expected"),
    [
        ("x = 'gemm'", FUNCTIONS, {"gemm"}),
        ("from jetfire.reference import gemm", (), set()),
        ("from jetfire.ops import int8_gemm", (), set()),
        ("from jetfire.ops.int4_gemm import int4_gemm", (), {"int4_gemm"}),
        ("from jetfire.ops.int4_gemm import int4_gemm", FUNCTIONS, set()),
        ("from jetfire.ops.int4_gemm import Int4GemmProblem", FUNCTIONS, {"int4_gemm"}),
        ("from jetfire.kernels_cuda.int4_gemm import cost", FUNCTIONS, {"int4_gemm"}),
    ],
)
def test_names_of_ops_are_found(code, called, expected):
    assert named(ast.parse(code), called) == expected


def homes(trees):
    """By name of a public class, where it is: modules, but all kernels are one place.

    A kernel's classes are named for its schedule, and their folder for the op.
    """
    found = defaultdict(set)
    for module, tree in trees.items():
        home = "kernels" if package(module).startswith("kernels_") else module
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(home)
    return found


def test_no_two_classes_have_one_name():
    found = homes({module: tree(path) for module, path in FILES.items()})
    assert {"Quantized", "TimedOutError"} <= found.keys()
    assert {name: sorted(where) for name, where in found.items() if len(where) > 1} == {}


def test_what_checkers_see_of_the_layers_is_what_there_is():
    from jetfire import nn

    seen = {
        alias.name: node.module
        for node in ast.walk(tree(ROOT / "nn" / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jetfire.nn.")
        for alias in node.names
    }
    assert seen == {name: f"jetfire.nn.{module}" for name, module in nn._MODULES.items()}


def test_the_layers_are_found_without_torch():
    code = """import sys
from jetfire import nn
assert 'torch' not in sys.modules
from jetfire.nn import *
import jetfire.nn.conversion
assert all(getattr(nn, name) is globals()[name] for name in nn.__all__)
assert callable(nn.convert)"""
    subprocess.run([sys.executable, "-c", code], check=True)
