"""A kernel that does not load or compile: its file, line, op and architecture, and the caret."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap

import pytest

from jetfire.cli import execute
from jetfire.core import broken, registry
from jetfire.core.errors import UsageError, WrongResultError
from jetfire.measure import peaks

BROKEN = {
    "syntax": ("x = 1\nif x\n    pass\n", 2, "SyntaxError: expected ':'", "if x\n        ^"),
    "indent": ("def f():\npass\n", 2, "IndentationError: expected an indented", "pass\n    ^"),
    "import": (
        "import math\nimport no_such_thing\n",
        2,
        "ModuleNotFoundError: No module named",
        "import no_such_thing\n",
    ),
    "exit": (
        "import sys\nsys.exit(0)\n",
        2,
        "SystemExit: 0",
        "sys.exit(0)\n",
    ),
    "name": (
        "def f():\n    return undefined\nf()\n",
        2,
        "NameError: name 'undefined'",
        "return undefined\n",
    ),
}


def said(capsys):
    """The first line on stderr, and all of it."""
    err = capsys.readouterr().err
    assert "internal error" not in err
    assert "Traceback" not in err
    return err.splitlines()[0], err


@pytest.fixture
def unloaded():
    registry._kernels.cache_clear()
    yield
    registry._kernels.cache_clear()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_kernel_s_module_that_cannot_be_imported(kind, unloaded, tmp_path, capsys, monkeypatch):
    text, line, reason, shown = BROKEN[kind]
    monkeypatch.setattr(registry, "_ROOT", tmp_path)
    file = tmp_path / "kernels_triton" / "gelu" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)

    def load(name):
        assert name == "jetfire.kernels_triton.gelu"
        exec(compile(file.read_text(), str(file), "exec"), {})

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(UsageError) as caught:
        registry.kernels("gelu")
    start = f"{file}:{line}: gelu of kernels_triton cannot be loaded: {reason}"
    assert str(caught.value).startswith(start)
    assert shown in caught.value.details


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_to_load_that_cannot_be_imported(kind, tmp_path, capsys):
    text, line, reason, shown = BROKEN[kind]
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert execute("fuzz", ["gelu", "--load", str(file), "--device", "cpu"]) == 2
    first, err = said(capsys)
    assert first.startswith(f"jetfire: {file}:{line}: --load {file} cannot be loaded: {reason}")
    assert shown in err


def test_a_file_to_load_with_a_nul_byte_has_no_line_to_name(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_bytes(b"x = 1\n\0\n")
    assert execute("list", ["--load", str(file)]) == 2
    first, _ = said(capsys)
    reason = "SyntaxError: source code string cannot contain null bytes"
    assert first == f"jetfire: --load {file} cannot be loaded: {reason}"


def compilation_error():
    """As Triton makes it, for the second line of a function of the GELU's file."""
    from triton.compiler.errors import CompilationError

    source = (broken.ROOT / "kernels_triton" / "gelu" / "__init__.py").read_text()
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    text = "\n".join(source.splitlines()[function.lineno - 1 : function.end_lineno])
    node = ast.Name("x", lineno=2, col_offset=4)
    outer = CompilationError("def caller():\n    f()", ast.Name("f", lineno=2, col_offset=4), "")
    outer.__cause__ = CompilationError(text, node, "x is not defined")
    return outer, function.lineno + 1


def test_the_bench_shows_the_compiler_s_lines(capsys, monkeypatch):
    error, line = compilation_error()
    found = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}
    monkeypatch.setattr(peaks, "cached", lambda *_: found)

    def launch(*_):
        raise error

    monkeypatch.setattr(type(registry.get_kernel("gelu", "torch")), "launch", launch)
    words = ["gelu", "--m", "33", "--block", "32", "--device", "cpu", "--kernel", "torch"]
    assert execute("bench", words) == 3
    _, err = said(capsys)
    place = f"{broken.ROOT}/kernels_triton/gelu/__init__.py:{line}"
    whose = "gelu torch (interpreted) does not compile: CompilationError: x is not defined"
    assert f"jetfire: {place}: {whose}\n" in err
    assert "\n    ^\nx is not defined\n" in err
    assert err.splitlines()[-1].startswith(f"jetfire: 1 of 1 row is wrong: {place}: gelu torch")


def test_a_compiler_s_error_anywhere_is_no_internal_error(capsys, monkeypatch):
    from jetfire.bench import catalogue

    error, line = compilation_error()

    def listing(found):
        raise error

    monkeypatch.setattr(catalogue, "listing", listing)
    assert execute(None, ["list"]) == 3
    first, err = said(capsys)
    assert f"gelu/__init__.py:{line}: gelu does not compile: CompilationError: x is not" in first
    assert "\n    ^\n" in err


def test_nvrtc_s_errors_name_the_op_s_own_file():
    from jetfire.kernels_cuda.compile import CompileError

    log = 'wgmma.cu(12): error: identifier "foo" is undefined\n    foo;\n    ^\n'
    error = CompileError(f"wgmma.cu for sm_90a does not compile:\n{log}")
    for op in ("gemm", "int4_gemm"):
        with (
            pytest.raises(WrongResultError) as caught,
            broken.compiling(op, "wgmma", "sm_90"),
        ):
            raise error
        file = broken.ROOT / "kernels_cuda" / op / "wgmma.cu"
        assert str(caught.value) == (
            f'{file}:12: {op} wgmma (sm_90) does not compile: CompileError: identifier "foo" is '
            "undefined"
        )
        assert "    foo;\n    ^" in caught.value.details


def test_other_errors_stay_what_they_are():
    assert broken.explained(ValueError("x")) is None
    for error in (ValueError("x"), UsageError("y")):
        with pytest.raises(type(error)), broken.compiling("gemm", "triton", "sm_90"):
            raise error


MINE = """
import triton
import triton.language as tl

from jetfire.core import registry
from jetfire.cli import execute
from jetfire.kernels_triton.transpose import TritonTranspose


@triton.jit
def helper(x):
    return tl.no_such_function(x)


@triton.jit
def mine_kernel(q_ptr, N: tl.constexpr):
    q = tl.load(q_ptr)
    tl.store(q_ptr, helper(q))


class Mine(TritonTranspose):
    name = "mine"

    def launch(self, problem, config, inputs, outputs):
        mine_kernel[(1,)](inputs["q"], N=32)


KERNELS = (Mine(),)
"""


def test_triton_s_caret_reaches_the_author(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = "audit transpose --m 64 --block 32 --arch 90 --kernel mine --load"
    done = subprocess.run(
        [sys.executable, "-m", "jetfire.cli", *words.split(), file],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 3, done.stderr
    _, first, *rest = done.stderr.splitlines()  # after what is compiled
    line = MINE.splitlines().index("    return tl.no_such_function(x)") + 1
    whose = "transpose mine (sm_90) does not compile: CompilationError: "
    assert first.startswith(f"jetfire: {file}:{line}: {whose}")
    assert "no_such_function" in first
    shown = textwrap.dedent("\n".join(rest))
    assert "return tl.no_such_function(x)\n" in shown
    assert "^" in shown
