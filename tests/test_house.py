"""The house's walls: who may import whom."""

import ast
from pathlib import Path

import pytest

import jetfire

ROOT = Path(jetfire.__file__).parent
# From the ground up: a package imports what stands before it, and itself.
FLOORS = (
    ("reference",),
    ("core",),
    ("measure",),
    ("ops",),
    ("kernels_cpu", "kernels_cuda", "kernels_triton"),
    ("nn",),
    ("bench",),
    ("tuner",),
    ("fuzz", "export"),
    ("gpt2",),
    ("cli",),
)
FLOOR = {package: height for height, packages in enumerate(FLOORS) for package in packages}


def modules():
    """The package's modules by dotted name, without tests."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in FLOOR:
            yield ".".join(part for part in parts if part != "__init__"), path


FILES = dict(modules())


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


def graph():
    return {
        name: {other for other in imported(ast.parse(path.read_text())) if other in FILES} - {name}
        for name, path in FILES.items()
    }


def package(module):
    return module.partition(".")[0]


def test_every_package_has_a_floor():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert folders | {"cli"} == set(FLOOR)


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
